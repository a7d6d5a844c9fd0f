"""The answer in three sentences: how much faster, how close to the limit, how long the synthesis took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.clusters.words import EVEN
from bench.page.parts import Sentence, Strong
from bench.page.results import Document, Row, figure, figures, median, number, word
from bench.page.sweeps import compared
from bench.page.testbed import CHOSEN, LARGE, targets_of, without_limited
from bench.page.words import percent, plural, seconds, size, times

Results = Mapping[str, Document]


def headline(results: Results) -> tuple[Sentence, ...]:
    """Sentences of what was measured; what was not is said."""
    return (_faster(results), _close(results), _synthesis(results))


def _faster(results: Results) -> Sentence:
    found, left_out = without_limited(results.get("testbed"))
    ratios = figures(found, "speed_up_over_ring")
    if ratios:
        said: Sentence = (
            f"On emulated links {_who(found)} ",
            Strong(f"{times(median(ratios))} as fast"),
            f" as the best single ring in the median of {plural(len(ratios), 'case')} "
            f"({times(min(ratios))} to {times(max(ratios))}, {_span(_sizes_with_ring(found))}; "
            f"{_losses(ratios, 'case')}{_left_out(left_out)})",
        )
    else:
        said = ("How much faster than the ring on real links is not measured yet",)
    return (*said, "; ", *_simulated(results))


def _simulated(results: Results) -> Sentence:
    points = compared(results.get("sweeps"))
    if not points:
        return ("clusters are not simulated yet.",)
    ratios = [at.least for at in points]
    sizes = sorted({at.size_bytes for at in points})
    return (
        "in simulations of clusters our schedules, chosen with NCCL's overhead known, are ",
        Strong(times(median(ratios))),
        " as fast as the fastest of NCCL's planning models and the simulated baselines "
        f"({times(min(ratios))} to {times(max(ratios))}, {_span(sizes)}; {_losses(ratios, 'point')}).",
    )


def _losses(ratios: Sequence[float], thing: str) -> str:
    lost = sum(ratio < 1 - EVEN for ratio in ratios)
    return f"slower in {lost or 'none'} of {plural(len(ratios), thing)}"


def _who(rows: Sequence[Row]) -> str:
    """What the figures are of: see `bench.page.testbed.row_of_ours`."""
    only_chosen = all(row.get("method") == CHOSEN for row in rows)
    return "what the process group chooses is" if only_chosen else "our schedules are"


def _left_out(cases: int) -> str:
    return f"; {plural(cases, 'more case')} left out, where the processors may be the limit" if cases else ""


def _sizes_with_ring(rows: Sequence[Row]) -> list[float]:
    return sorted(figures([row for row in rows if figure(row, "speed_up_over_ring") is not None], "bytes"))


def _span(sizes: Sequence[float]) -> str:
    return size(sizes[0]) if sizes[0] == sizes[-1] else f"{size(sizes[0])} to {size(sizes[-1])}"


def _close(results: Results) -> Sentence:
    document = results.get("testbed")
    found = [row for row in without_limited(document)[0] if (figure(row, "bytes") or 0) >= LARGE]
    shared = [(share, row) for row in found if (share := figure(row, "share_of_optimum")) is not None]
    if not shared:
        return ("How close to the limit on real links is not measured yet.",)
    least, worst = min(shared, key=lambda pair: pair[0])
    targets = targets_of(document)
    met = sum(target.get("met") is True for target in targets)
    return (
        f"From {size(LARGE)} on ",
        Strong(percent(median([share for share, _ in shared]))),
        f" of the proven limit is reached in the median, at the least {percent(least)} "
        f"({word(worst, 'collective')}, {word(worst, 'topology')})",
        f"; {met} of {plural(len(targets), 'target')} met." if targets else ".",
    )


def _synthesis(results: Results) -> Sentence:
    document = results.get("synthesis")
    rows = [row for row in (document.rows if document else []) if row.get("method") == "trees"]
    timed = [row for row in rows if figure(row, "seconds") is not None and number(row.get("ranks"))]
    if not timed:
        return ("How long synthesis takes is not measured yet.",)
    timed.sort(key=lambda row: (figure(row, "ranks") or 0, figure(row, "seconds") or 0))
    small, large = timed[0], timed[-1]
    return (
        "Synthesis of trees that are exactly optimal took ",
        Strong(seconds(figure(small, "seconds"))),
        f" for {plural(int(figure(small, 'ranks') or 0), 'rank')} ({word(small, 'title', 'topology')}) and ",
        Strong(seconds(figure(large, "seconds"))),
        f" for {plural(int(figure(large, 'ranks') or 0), 'rank')} ({word(large, 'title', 'topology')}).",
    )

"""The answer in three sentences: how much faster, how close to the limit, how long the synthesis took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.page.parts import Sentence, Strong
from bench.page.results import Document, figure, figures, median, number, word
from bench.page.sweeps import EVEN, compared
from bench.page.testbed import LARGE, targets_of, winners
from bench.page.words import percent, plural, seconds, size, times

Results = Mapping[str, Document]


def headline(results: Results) -> tuple[Sentence, ...]:
    """Sentences of what was measured; what was not is said."""
    return (_faster(results), _close(results), _synthesis(results))


def _faster(results: Results) -> Sentence:
    found = winners(results.get("testbed"))
    ratios = figures(found, "speed_up_over_ring")
    if ratios:
        said: Sentence = (
            "On emulated links our schedules are ",
            Strong(f"{times(median(ratios))} as fast"),
            f" as the best single ring in the median of {plural(len(ratios), 'case')} "
            f"({times(min(ratios))} to {times(max(ratios))}, {_span(sorted(figures(found, 'bytes')))}; "
            f"{_losses(ratios, 'case')})",
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
        "in simulations of clusters they are ",
        Strong(times(median(ratios))),
        " as fast as the fastest of NCCL's models and the baselines "
        f"({times(min(ratios))} to {times(max(ratios))}, {_span(sizes)}; {_losses(ratios, 'point')}).",
    )


def _losses(ratios: Sequence[float], thing: str) -> str:
    lost = sum(ratio < 1 - EVEN for ratio in ratios)
    return f"slower in {lost or 'none'} of {plural(len(ratios), thing)}"


def _span(sizes: Sequence[float]) -> str:
    return size(sizes[0]) if sizes[0] == sizes[-1] else f"{size(sizes[0])} to {size(sizes[-1])}"


def _close(results: Results) -> Sentence:
    document = results.get("testbed")
    found = [row for row in winners(document) if (figure(row, "bytes") or 0) >= LARGE]
    shared = [(share, row) for row in found if (share := figure(row, "share_of_optimum")) is not None]
    if not shared:
        return ("How close to the limit on real links is not measured yet.",)
    least, worst = min(shared, key=lambda pair: pair[0])
    targets = targets_of(document)
    met = sum(target.get("met") is True for target in targets)
    return (
        f"From {size(LARGE)} on they reach ",
        Strong(percent(median([share for share, _ in shared]))),
        f" of the proven limit in the median, at the least {percent(least)} "
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

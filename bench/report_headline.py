"""The answer in three sentences: how much faster, how close to the limit, how long the synthesis took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.report_parts import Sentence, Strong
from bench.report_results import Document, Row, figure, figures, median, number, word
from bench.report_sweeps import compared
from bench.report_testbed import LARGE, at_largest, targets_of, winners
from bench.report_words import listed, percent, plural, seconds, size, times

Results = Mapping[str, Document]


def headline(results: Results) -> tuple[Sentence, ...]:
    """Sentences of what was measured; what was not is said."""
    return (_faster(results), _close(results), _synthesis(results))


def _faster(results: Results) -> Sentence:
    found = winners(results.get("testbed"))
    ratios = [ratio for row in found if (ratio := figure(row, "speed_up_over_ring")) is not None]
    said: list[str | Strong] = []
    if ratios:
        sizes = sorted(figures(found, "bytes"))
        said += [
            "On emulated links our schedules take the ring's place at ",
            Strong(times(median(ratios))),
            f" its speed in the median of {plural(len(ratios), 'case')} ({times(min(ratios))} to {times(max(ratios))}, "
            f"{_span(sizes)}), ",
            _losing(sum(ratio < 1 for ratio in ratios), "case"),
        ]
    else:
        said.append("How much faster than the ring on real links is not measured yet; ")
    return (*said, *_simulated(results))


def _simulated(results: Results) -> Sentence:
    points = compared(results.get("sweeps"))
    if not points:
        return ("clusters are not simulated yet.",)
    won = sorted({size_bytes for _, size_bytes, ratio in points if ratio > 1})
    lost = sum(ratio < 1 for _, _, ratio in points)
    ratios = [ratio for _, _, ratio in points]
    return (
        "and in simulation, beside the better of NCCL's ring and tree models, at ",
        Strong(times(median(ratios))),
        f" ({_span(won)}), " if won else ", ",
        _losing(lost, "size", len(points)),
        ".",
    )


def _losing(count: int, thing: str, of: int | None = None) -> str:
    if not count:
        return f"slower in no {thing}"
    return f"slower in {count} of {plural(of, thing)}" if of else f"slower in {plural(count, thing)}"


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
        "From 8 MiB on they reach ",
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

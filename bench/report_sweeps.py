"""The section of size sweeps: our selection beside NCCL's ring and tree models, simulated, losses shaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.report_parts import Cell, Part, Picture, Section, Strong, Table, grid, missing, text
from bench.report_results import Document, Row, figure, grouped, is_ours, median, word
from bench.report_svg import Line, line_chart
from bench.report_words import DASH, duration, plural, size, times

NAME, TITLE, COMMAND = "sizes", "At which sizes, on larger clusters?", "python bench/sweeps.py"
MODELS = {"nccl-ring-model": "NCCL ring", "nccl-tree-model": "NCCL tree"}


def section(document: Document | None) -> Section:
    """What the sweeps simulated."""
    if document is None:
        return missing(NAME, TITLE, COMMAND)
    cases = grouped(document.rows, case)
    points = compared(document)
    lost = [point for point in points if point[2] < 1]
    parts: list[Part] = [
        text(
            "Our schedules in our simulator, which counts every piece on every link, beside the formulas by "
            "which NCCL itself plans its rings and trees. Nothing here ran on a GPU. Lines are speed-ups "
            "over each model, blue over the better one of each size; below 1× we lose.",
            tone="quiet",
        ),
        text("Of ", Strong(plural(len(points), "size")), " we lose at ", Strong(str(len(lost))), "."),
        grid([_picture(name, rows)] for name, rows in cases.items() if _curves(rows)),
        table(document),
    ]
    return Section(NAME, TITLE, "ours simulated, NCCL by its planning model", tuple(parts), (document,))


def case(row: Row) -> str:
    """The topology and the collective, as one name."""
    return f"{word(row, 'title', 'topology')}, {word(row, 'collective')}"


def compared(document: Document | None) -> list[tuple[str, float, float]]:
    """Case, size and our speed-up over the better NCCL model, wherever there are both."""
    points = []
    for name, rows in grouped(document.rows if document else [], case).items():
        points += [(name, size_bytes, ratio) for size_bytes, ratio in _over_best(rows)]
    return points


def _times(rows: Sequence[Row]) -> dict[float, dict[str, float]]:
    """By size, the time of ours under "" and of each model."""
    found: dict[float, dict[str, float]] = {}
    for row in rows:
        size_bytes, time_us, method = figure(row, "bytes"), figure(row, "time_us"), row.get("method")
        if not size_bytes or not time_us:
            continue
        times_us = found.setdefault(size_bytes, {})
        if method == "selection" or (is_ours(method) and not _has_selection(rows)):
            times_us[""] = min(time_us, times_us.get("", time_us))
        elif method in MODELS:
            times_us[str(method)] = time_us
    return dict(sorted(found.items()))


def _has_selection(rows: Sequence[Row]) -> bool:
    return any(row.get("method") == "selection" for row in rows)


def _over_best(rows: Sequence[Row]) -> list[tuple[float, float]]:
    return [
        (size_bytes, min(models) / found[""])
        for size_bytes, found in _times(rows).items()
        if "" in found and (models := [found[model] for model in MODELS if model in found])
    ]


def _curves(rows: Sequence[Row]) -> list[Line]:
    found = _times(rows)
    lines = [
        Line(
            name,
            tuple((at, one[model] / one[""]) for at, one in found.items() if model in one and "" in one),
            "base",
            dashed=True,
        )
        for model, name in MODELS.items()
    ]
    lines.append(Line("better one", tuple(_over_best(rows)), "ours"))
    return [line for line in lines if line.points]


def _picture(name: str, rows: Sequence[Row]) -> Picture:
    best = _over_best(rows)
    lost = [size_bytes for size_bytes, ratio in best if ratio < 1]
    note = f"Faster at all {plural(len(best), 'size')}." if not lost else _losses(lost, len(best))
    drawn = line_chart(_curves(rows), below="we lose", description=f"speed-up over NCCL's models: {name}")
    return Picture(drawn, name, note)


def _losses(lost: Sequence[float], of: int) -> str:
    return f"Slower at {len(lost)} of {plural(of, 'size')}: {', '.join(map(size, lost))}."


def table(document: Document) -> Table:
    """A line per case: the median, best and worst speed-up, and where it loses."""
    lines = []
    for name, rows in grouped(document.rows, case).items():
        best = _over_best(rows)
        if not best:
            continue
        ratios = [ratio for _, ratio in best]
        lost = [size_bytes for size_bytes, ratio in best if ratio < 1]
        ranks = figure(rows[0], "ranks")
        lines.append(
            (
                Cell(name),
                Cell(DASH if ranks is None else str(int(ranks)), ranks),
                Cell(times(median(ratios)), median(ratios), "ours"),
                Cell(times(max(ratios)), max(ratios)),
                Cell(times(min(ratios)), min(ratios), "bad" if min(ratios) < 1 else ""),
                Cell(f"{len(lost)} of {len(best)}", len(lost), "bad" if lost else ""),
                Cell(_at_ends(_times(rows))),
            )
        )
    head = ("cluster and collective", ">ranks", ">median", ">best", ">worst", ">sizes lost")
    title = "Simulated speed-up over the better of NCCL's models, of all sizes"
    return Table((*head, "our time at the ends"), tuple(lines), title)


def _at_ends(found: Mapping[float, Mapping[str, float]]) -> str:
    ours = [(size_bytes, times_us[""]) for size_bytes, times_us in found.items() if "" in times_us]
    ends = dict.fromkeys((ours[0], ours[-1])) if ours else {}
    return ", ".join(f"{duration(time_us)} for {size(size_bytes)}" for size_bytes, time_us in ends)

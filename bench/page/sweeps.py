"""The section of size sweeps: our selection beside NCCL's models and baselines, simulated, losses shaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from arborcast.bench.clusters.words import EVEN, WITH_OVERHEAD
from arborcast.bench.page.parts import Cell, Part, Picture, Section, Strong, Table, grid, missing, text
from arborcast.bench.page.results import Document, Row, figure, grouped, is_ours, median, word
from arborcast.bench.page.svg import Line, line_chart
from arborcast.bench.page.words import count, duration, percent, plural, size, times

NAME, TITLE, COMMAND = "sizes", "At which sizes, on larger clusters?", "python bench/sweeps.py"
MODELS = {"nccl-ring-model": "NCCL ring", "nccl-tree-model": "NCCL tree"}
CHARGED = "time_us_with_nccl_overhead"
"""The fair clock: simulated links with what NCCL's model charges itself; `time_us` is of the links alone."""


@dataclass(frozen=True)
class At:
    """One size: our time, and the speed-up over each other method.

    Attributes:
        size_bytes: of the buffer.
        time_us: of ours.
        over: speed-ups by method.
    """

    size_bytes: float
    time_us: float
    over: dict[str, float]

    @property
    def least(self) -> float:
        """The speed-up over the fastest of the others."""
        return min(self.over.values())

    @property
    def is_lost(self) -> bool:
        """Whether another method is faster."""
        return self.least < 1 - EVEN


def section(document: Document | None) -> Section:
    """What the sweeps simulated."""
    if document is None:
        return missing(NAME, TITLE, COMMAND)
    cases = _cases(document)
    points = [at for sizes in cases.values() for at in sizes]
    lost = sum(at.is_lost for at in points)
    parts: list[Part] = [
        text(
            "Our schedules in our simulator, which counts every piece on every link, beside the formulas by "
            "which NCCL itself plans its rings and trees, and beside simulated baselines. Nothing here ran "
            "on a GPU. Blue is the speed-up over whichever of them is fastest at that size; below 1× we "
            "lose.",
            tone="quiet",
        ),
        text(
            "Of ",
            Strong(plural(len(points), "point")),
            " we lose at ",
            Strong(count(lost)),
            f"; up to {percent(EVEN)} slower counts as even.",
            *_by_links(document),
        ),
        grid([_picture(name, sizes)] for name, sizes in cases.items()),
        table(document),
        *_list(document.get("skipped"), "Not simulated", _skipped),
        *_list(document.get("notes"), "What to know about these figures", str),
    ]
    return Section(NAME, TITLE, "ours simulated, NCCL by its planning model", tuple(parts), (document,))


def case(row: Row) -> str:
    """The topology and the collective, as one name."""
    return f"{word(row, 'title', 'topology')}, {word(row, 'collective')}"


def compared(document: Document | None) -> list[At]:
    """Every size of every case at which there is something to compare with."""
    return [at for sizes in _cases(document).values() for at in sizes] if document else []


def _cases(document: Document) -> dict[str, list[At]]:
    return _cases_of(document.rows)


def _cases_of(rows: Sequence[Row]) -> dict[str, list[At]]:
    found = {name: _sizes(of_case) for name, of_case in grouped(rows, case).items()}
    return {name: sizes for name, sizes in found.items() if sizes}


def _by_links(document: Document) -> list[str]:
    """What becomes of these figures with the choice of the product, which does not know the overhead."""
    rows = [row for row in document.rows if row.get("method") != WITH_OVERHEAD]
    if len(rows) == len(document.rows):
        return []
    points = [at for sizes in _cases_of(rows).values() for at in sizes]
    lost = sum(at.is_lost for at in points)
    return [
        " Ours is chosen with the overhead known. The process group chooses by simulated links alone: "
        f"so chosen, we lose at {count(lost)} of {plural(len(points), 'point')}."
    ]


def _sizes(rows: Sequence[Row]) -> list[At]:
    """Of ours what was chosen by the fair clock, if there is one on this machine."""
    charged = [row for row in rows if is_ours(row.get("method")) and figure(row, CHARGED) is not None]
    clock = CHARGED if charged else "time_us"
    ours = _fastest(charged or [row for row in rows if is_ours(row.get("method"))], clock)
    found = []
    for size_bytes, time_us in sorted(ours.items()):
        others = [row for row in rows if not is_ours(row.get("method")) and row.get("bytes") == size_bytes]
        over = {
            word(row, "method"): taken / time_us for row in others if (taken := figure(row, clock, "time_us"))
        }
        if over:
            found.append(At(size_bytes, time_us, over))
    return found


def _fastest(rows: Sequence[Row], clock: str) -> dict[float, float]:
    found: dict[float, float] = {}
    for row in rows:
        size_bytes, time_us = figure(row, "bytes"), figure(row, clock)
        if size_bytes and time_us:
            found[size_bytes] = min(time_us, found.get(size_bytes, time_us))
    return found


def _picture(name: str, sizes: Sequence[At]) -> Picture:
    lines = [
        Line(label, tuple((at.size_bytes, at.over[model]) for at in sizes if model in at.over), dashed=True)
        for model, label in MODELS.items()
    ]
    lines.append(Line("the fastest", tuple((at.size_bytes, at.least) for at in sizes), "ours"))
    lost = [size(at.size_bytes) for at in sizes if at.is_lost]
    won = f"Slower at none of {plural(len(sizes), 'size')}."
    note = f"Slower at {len(lost)} of {plural(len(sizes), 'size')}: {', '.join(lost)}." if lost else won
    drawn = line_chart(
        [line for line in lines if line.points],
        below="we lose",
        description=f"speed-up over NCCL's models and the fastest of all: {name}",
    )
    return Picture(drawn, name, note)


def table(document: Document) -> Table:
    """A line per case: the median, best and worst speed-up, and where it loses."""
    ranks = {case(row): figure(row, "ranks") for row in document.rows}
    lines = []
    for name, sizes in _cases(document).items():
        ratios = [at.least for at in sizes]
        lost = sum(at.is_lost for at in sizes)
        ends = sizes[:: len(sizes) - 1] if len(sizes) > 1 else sizes
        lines.append(
            (
                Cell(name),
                Cell(count(ranks[name]), ranks[name]),
                Cell(times(median(ratios)), median(ratios), "ours"),
                Cell(times(max(ratios)), max(ratios)),
                Cell(times(min(ratios)), min(ratios), "bad" if min(ratios) < 1 - EVEN else ""),
                Cell(f"{lost} of {len(sizes)}", lost, "bad" if lost else ""),
                Cell(", ".join(f"{duration(at.time_us)} for {size(at.size_bytes)}" for at in ends)),
            )
        )
    head = ("cluster and collective", ">ranks", ">median", ">best", ">worst", ">sizes lost")
    title = "Simulated speed-up over the fastest of NCCL's models and the baselines, of all sizes"
    return Table((*head, "our time at the ends"), tuple(lines), title)


def _list(entries: Any, title: str, words: Callable[[Any], str]) -> list[Part]:
    lines = tuple((Cell(words(entry)),) for entry in entries or [])
    return [Table((title,), lines, folded=f"{title} ({len(lines)})")] if lines else []


def _skipped(entry: Any) -> str:
    if not isinstance(entry, dict):
        return str(entry)
    what = ", ".join(word(entry, name) for name in ("topology", "collective", "method"))
    return f"{what}: {word(entry, 'reason')}"

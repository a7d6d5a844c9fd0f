"""Larger clusters: our selection beside NCCL's models and baselines, simulated, losses shaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from arborcast.bench.clusters.words import EVEN, SELECTION, WITH_OVERHEAD
from arborcast.bench.page.charts import Line, LineChart
from arborcast.bench.page.parts import (
    Cell,
    Part,
    Picture,
    Section,
    Strong,
    Table,
    cell,
    grid,
    lines,
    table,
    text,
)
from arborcast.bench.page.results import Document, groups, ours_among
from arborcast.bench.page.words import count, duration, percent, plural, size, times
from arborcast.synth.baselines.nccl_model import NOT_RUN

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


def compared(document: Document | None) -> list[At]:
    """Every size of every case at which there is something to compare with."""
    return [at for sizes in _cases(document.rows).values() for at in sizes] if document else []


def _cases(rows: pd.DataFrame) -> dict[str, list[At]]:
    found = {case: _sizes(alike) for case, alike in groups(rows, "case")}
    return {case: sizes for case, sizes in found.items() if sizes}


def _sizes(rows: pd.DataFrame) -> list[At]:
    """Of ours what was chosen by the fair clock, if there is one on this machine."""
    are_ours = ours_among(rows)
    ours = rows[are_ours & rows[CHARGED].notna()]
    clock = CHARGED if len(ours) else "time_us"
    fastest = (ours if len(ours) else rows[are_ours]).groupby("bytes")[clock].min().dropna()
    others = rows[~are_ours]
    taken = others[clock].fillna(others["time_us"])
    found = []
    for size_bytes, time_us in fastest.items():
        beside = taken[(others["bytes"] == size_bytes) & taken.notna()]
        over = dict(zip(others["method"][beside.index], beside / time_us, strict=True))
        if over:
            found.append(At(float(str(size_bytes)), time_us, over))
    return found


def _answer(document: Document) -> Iterator[Part]:
    cases, points = _cases(document.rows), compared(document)
    lost = sum(at.is_lost for at in points)
    yield text(
        "Of ",
        Strong(plural(len(points), "point")),
        " we lose at ",
        Strong(count(lost)),
        f"; up to {percent(EVEN)} slower counts as even.{_by_links(document)}",
    )
    yield grid([_picture(name, sizes)] for name, sizes in cases.items())
    yield summary(document)
    yield from _list(document.get("skipped"), "Not simulated", _skipped)
    yield from _list(document.get("notes"), "What to know about these figures", str)


def _by_links(document: Document) -> str:
    """What becomes of these figures with the choice of the product, which does not know the overhead."""
    rows = document.rows[document.rows["method"] != WITH_OVERHEAD]
    if len(rows) == len(document.rows):
        return ""
    points = [at for sizes in _cases(rows).values() for at in sizes]
    lost = sum(at.is_lost for at in points)
    return (
        " Ours is chosen with the overhead known. The process group chooses by simulated links alone: "
        f"so chosen, we lose at {count(lost)} of {plural(len(points), 'point')}."
    )


def _picture(name: str, sizes: list[At]) -> Picture:
    drawn = [
        Line(label, tuple((at.size_bytes, at.over[model]) for at in sizes if model in at.over), dashed=True)
        for model, label in MODELS.items()
    ]
    drawn.append(Line("the fastest", tuple((at.size_bytes, at.least) for at in sizes), "ours"))
    lost = [size(at.size_bytes) for at in sizes if at.is_lost]
    named = f": {', '.join(lost)}" if lost else ""
    return Picture(
        LineChart(
            f"speed-up over NCCL's models and the fastest of all: {name}", tuple(drawn), below="we lose"
        ),
        name,
        f"Slower at {len(lost) or 'none'} of {plural(len(sizes), 'size')}{named}.",
    )


def summary(document: Document) -> Table:
    """A line per case: the median, best and worst speed-up, where it loses, and how far the least time is."""
    ranks = document.rows.groupby("case")["ranks"].last()
    over_least = _over_least(document.rows)
    rows = []
    for name, sizes in _cases(document.rows).items():
        ratios = pd.Series([at.least for at in sizes])
        lost = sum(at.is_lost for at in sizes)
        ends = sizes[:: len(sizes) - 1] if len(sizes) > 1 else sizes
        rows.append(
            (
                name,
                cell(count, ranks[name]),
                cell(times, ratios.median(), "ours"),
                cell(times, ratios.max()),
                cell(times, ratios.min(), "bad" if ratios.min() < 1 - EVEN else ""),
                Cell(f"{lost} of {len(sizes)}", lost, "bad" if lost else ""),
                cell(times, over_least[name].median()),
                cell(times, over_least[name].max()),
                ", ".join(f"{duration(at.time_us)} for {size(at.size_bytes)}" for at in ends),
            )
        )
    return lines(
        (
            "cluster and collective",
            ">ranks",
            ">median",
            ">best",
            ">worst",
            ">sizes lost",
            ">over the least time",
            ">at worst",
            "our time at the ends",
        ),
        rows,
        f"Simulated speed-up over the fastest of the baselines and {NOT_RUN}; of all sizes; and our time "
        "on the links alone over the least that latencies and bandwidths allow any schedule",
    )


def _over_least(rows: pd.DataFrame) -> dict[str, pd.Series[float]]:
    """By case and for each size, the time on links alone of what is fastest there over the least time."""
    ours = rows[rows["method"] == SELECTION]
    return {name: alike["time_us"] / alike["least_us"] for name, alike in groups(ours, "case")}


def _list(entries: Any, title: str, words: Callable[[Any], str]) -> Iterator[Part]:
    if entries:
        yield table({title: lambda entry: Cell(words(entry))}, entries, folded=f"{title} ({len(entries)})")


def _skipped(entry: Any) -> str:
    if not isinstance(entry, dict):
        return str(entry)
    what = ", ".join(str(entry.get(name)) for name in ("topology", "collective", "method"))
    return f"{what}: {entry.get('reason')}"


SECTION = Section(
    "sweeps",
    "sizes",
    "At which sizes, on larger clusters?",
    f"simulated; {NOT_RUN}",
    "python bench/sweeps.py",
    "Our schedules in our simulator, which counts every piece on every link, beside simulated baselines and "
    f"{NOT_RUN}. Nothing here ran "
    "on a GPU. Blue is the speed-up over whichever of them is fastest at that size; below 1× we "
    "lose.",
    _answer,
    (f"Simulated clusters beside {NOT_RUN}", summary),
)

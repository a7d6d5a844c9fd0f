"""Alltoalls of blocks of any sizes: planned at each step, beside pairwise sends and what FAST does."""

from __future__ import annotations

import math
from collections.abc import Iterator

from arborcast.bench.page.parts import (
    Cell,
    Column,
    Part,
    Section,
    Strong,
    Table,
    all_rows,
    cell,
    columns,
    lines,
    text,
    verdict,
)
from arborcast.bench.page.results import Document, Row, groups, records
from arborcast.bench.page.words import DASH, percent, plural

PLANNED = "planned"


def _answer(document: Document) -> Iterator[Part]:
    rows = document.rows[document.rows["share_of_limit"].notna()]
    shares, pairwise = (rows[rows["method"] == name]["share_of_limit"] for name in (PLANNED, "pairwise"))
    if len(shares):
        yield text(
            "Planned exchanges reach ",
            Strong(percent(shares.median())),
            f" of the proven limit in the median of {plural(len(shares), 'case')}, at the least "
            + percent(shares.min())
            + (f"; pairwise {percent(pairwise.median())} in the median." if len(pairwise) else "."),
        )
    yield all_rows(_COLUMNS, document.rows)


def summary(document: Document) -> Table:
    """A line per machine and pattern: shares of the limit, and how long planning takes."""
    rows: list[tuple[Cell | str, ...]] = []
    for (on, name, pattern), alike in groups(document.rows, "on", "topology", "pattern"):
        of_method = {row.method: row for row in records(alike)}
        ours = of_method[PLANNED]
        shares = [
            cell(percent, of_method[method].share_of_limit if method in of_method else float("nan"))
            for method in (PLANNED, "balanced", "pairwise")
        ]
        # Links that have paused carry a little at once, so that short runs may seem faster than they are.
        rows.append((f"{name}, {on}", str(pattern), *shares, cell(_milliseconds, ours.planning_ms)))
    return lines(("machine", "sizes", ">planned", ">as FAST", ">pairwise", ">planning"), rows)


def _milliseconds(value: float) -> str:
    return DASH if math.isnan(value) else f"{value:.3g} ms"


def _target(row: Row) -> Cell:
    if not row.target_ms > 0:
        return Cell("")
    told = verdict(f"{_milliseconds(row.target_ms)} {'met' if row.met else 'missed'}", bool(row.met))
    return Cell(told.text, row.target_ms, told.tone)


_COLUMNS: dict[str, Column] = {
    **columns("topology | >ranks | sizes: pattern | method | on | >size: bytes | >time: time_us"),
    ">of the limit": lambda row: cell(percent, row.share_of_limit, "ours" if row.method == PLANNED else ""),
    ">gap": lambda row: cell(percent, row.gap),
    ">planning": lambda row: cell(_milliseconds, row.planning_ms),
    "target": _target,
}

SECTION = Section(
    "alltoallv",
    "alltoallv",
    "How fast is an alltoall of blocks of any sizes, planned at each step?",
    "simulated, and measured on emulated links",
    "python bench/alltoallv.py",
    "Sizes as experts of a mixture make them. The limit is the time that the plan's certificate proves. "
    "Pairwise sends every block whole on a shortest way; as FAST shares what boxes have for each other "
    "among their ports. Planning is warm, in one process.",
    _answer,
    ("Alltoalls of blocks of any sizes: shares of the proven limit", summary),
)

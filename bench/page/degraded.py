"""Degraded fabrics: the optimum of an allreduce against what is lost, and how quickly a job changes over."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from arborcast.bench.page.parts import Cell, Part, Section, Strong, Table, cell, columns, lines, table, text
from arborcast.bench.page.results import Document, Row, groups
from arborcast.bench.page.words import DASH, count, digits, percent, plural, scaled

_milliseconds = scaled("ms")
_kilobytes = scaled("KB", 1e3)


def _answer(document: Document) -> Iterator[Part]:
    rows = document.rows
    lost = _of(rows, "loss")
    if len(lost):
        best, told = int(lost["optimal"].sum()), f"{count(len(lost))} settings: "
        yield text(
            told,
            Strong(f"our schedule is optimal in {count(best)}"),
            ", proved by its certificate.",
            tone="good" if best == len(lost) else "bad",
        )
        yield summary(document)
        yield table(_LOSS, lost, folded="Every setting, exactly")
    spares = _of(rows, "spares")
    if len(spares):
        yield table(_SPARES, spares, "A schedule for the failure of each link, made beforehand")
    changed = _of(rows, "change-over")
    if len(changed):
        yield table(_CHANGES, changed, "A group of local processes does without a link from one call on")


def _of(rows: pd.DataFrame, what: str) -> pd.DataFrame:
    return rows[rows["what"] == what] if "what" in rows else rows.iloc[:0]


def summary(document: Document) -> Table:
    """A line for each fabric and fault, a column for each loss: times over the ring without faults."""
    lost = _of(document.rows, "loss")
    lost = lost[lost["loss"] > 0] if len(lost) else lost
    losses = sorted(set(lost["loss"])) if len(lost) else []
    lost = lost.assign(kind=lost["fault"].str.replace(r"lost \d+ of", "lost some of", regex=True))
    shown: list[tuple[Cell | str, ...]] = []
    for (name, fault), found in groups(lost, "topology", "kind"):
        at = {row.loss: row for row in found.itertuples()}
        shown.append((f"{name}: {fault}", *(_over(at.get(loss)) for loss in losses)))
    return lines(
        ("loss", *(f">{percent(loss)}" for loss in losses)),
        shown,
        "Time of large messages over the ring's without faults: the optimum, ours / a ring's now",
    )


def _over(row: Row | None) -> Cell:
    if row is None or pd.isna(row.over_fault_free_ring):
        return Cell("" if row is None else DASH)
    ring = DASH if pd.isna(row.ring_over_fault_free_ring) else _more(row.ring_over_fault_free_ring)
    return Cell(f"{_more(row.over_fault_free_ring)} / {ring}", row.over_fault_free_ring)


def _more(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _proof(row: Row) -> Cell:
    return Cell(f"{row.proof}, {row.scope}")


def _formula(row: Row) -> Cell:
    return Cell(DASH) if pd.isna(row.is_closed_form) else Cell("equal" if row.is_closed_form else "differs")


def _failures(row: Row) -> Cell:
    quality = "all optimal" if row.optimal else "not all optimal"
    return Cell(f"{plural(int(row.failures), 'link')}, {quality}", row.failures)


_LOSS = {
    **columns("topology | >ranks | fault"),
    ">lost": lambda row: cell(percent, row.loss),
    **columns(">optimum GB/s: optimum | >ours GB/s: algbw"),
    ">over the ring without faults": lambda row: Cell(
        DASH if pd.isna(row.over_fault_free_ring) else _more(row.over_fault_free_ring)
    ),
    "proof": _proof,
    "closed form": _formula,
}
_SPARES = {
    **columns("topology | collective | >ranks"),
    "failures": _failures,
    ">a difference": lambda row: cell(_kilobytes, row.each_bytes),
    ">a schedule file": lambda row: cell(_kilobytes, row.explicit_bytes),
    ">applied": lambda row: cell(_milliseconds, row.applied_ms),
}
_CHANGES = {
    **columns("method | >ranks"),
    ">a call as usual": lambda row: cell(_milliseconds, row.usual_ms),
    ">the first without the link": lambda row: cell(_milliseconds, row.first_ms),
    ">CPU of a rank": lambda row: cell(_milliseconds, row.cpu_ms),
    ">rate GB/s": lambda row: cell(digits, row.algbw),
}

SECTION = Section(
    "degraded",
    "degraded",
    "What does one slow rank or link cost, and how quickly does a job change over?",
    "computed exactly; change-over measured",
    "python bench/degraded.py",
    "One rank of a star keeps a part of its rate, as in OptCC (arXiv 2606.01680), or one link of a box or "
    "torus does, or NICs of one of four boxes are lost. Rates and limits are exact. Where one of p equal "
    "ranks keeps the part b of its rate, an allreduce takes max(1/b, 2(p-1)/(p-1+b)) for the 2(p-1)/p of the "
    "ring without faults: our schedules take no longer. Schedules for the failure of each link are kept as "
    "differences to the whole fabric's, so that a group that avoids a link has the best one of what is left "
    "at its next call. The ranks of the change-over share the cores of the machine.",
    _answer,
    ("Degraded fabrics, allreduce over the ring without faults (optimum, ours / a ring)", summary),
)

"""Switches that add and multicast, on emulated links: share of the link over size, workers and levels."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from arborcast.bench.page.charts import Line, LineChart
from arborcast.bench.page.parts import (
    Cell,
    Column,
    Part,
    Picture,
    Section,
    Strong,
    Table,
    all_rows,
    cell,
    columns,
    grid,
    lines,
    text,
    verdict,
)
from arborcast.bench.page.results import Document, Row, groups
from arborcast.bench.page.words import percent, size

THROUGH = "cut-through"


def _answer(document: Document) -> Iterator[Part]:
    rows = document.rows[document.rows["share_of_optimum"].notna()]
    largest = rows[rows["bytes"] == rows["bytes"].max()]
    shares = largest[largest["method"] == THROUGH]["share_of_optimum"]
    gloo = largest[largest["method"] == "gloo"]["share_of_optimum"]
    if len(shares):
        yield text(
            f"At {size(largest['bytes'].max())} an allreduce reaches ",
            Strong(f"{percent(shares.min())} to {percent(shares.max())}"),
            " of the link's rate",
            f", gloo's {percent(gloo.min())} to {percent(gloo.max())}." if len(gloo) else ".",
        )
    yield grid([_picture(name, rows)] for name, rows in groups(document.rows, "topology"))
    yield all_rows(_COLUMNS, document.rows)


def _picture(name: str, rows: pd.DataFrame) -> Picture:
    drawn = []
    for method, found in groups(rows[rows["share_of_optimum"].notna()], "method"):
        points = tuple(zip(found["bytes"], found["share_of_optimum"], strict=True))
        drawn.append(Line(method, points, "ours" if method == THROUGH else "base"))
    return Picture(LineChart(f"share of the link: {name}", tuple(drawn), equal=None, upright=percent), name)


def summary(document: Document) -> Table:
    """A line per fabric, a column per size: the share through switches that add, and of gloo."""
    found = sorted(set(document.rows["bytes"].dropna()))
    rows: list[tuple[Cell | str, ...]] = []
    for name, alike in groups(document.rows, "topology"):
        shares = alike.pivot_table(
            index="method", columns="bytes", values="share_of_optimum", aggfunc="first"
        ).reindex(index=[THROUGH, "forwarding", "gloo"], columns=found)
        rows.append(
            (
                str(name),
                *(Cell(" / ".join(map(percent, shares[at])), shares[at].iloc[0]) for at in found),
            )
        )
    return lines(("adding / forwarding / gloo", *(f">{size(at)}" for at in found)), rows)


def _target(row: Row) -> Cell:
    if not row.target > 0:
        return Cell("")
    told = verdict(f"{percent(row.target)} {'met' if row.met else 'missed'}", bool(row.met))
    return Cell(told.text, row.target, told.tone)


_COLUMNS: dict[str, Column] = {
    **columns("topology | >ranks | >size: bytes | method | served by: served_by | >time: time_us | >spread"),
    ">of the link": lambda row: cell(percent, row.share_of_optimum, "ours" if row.method == THROUGH else ""),
    **columns(">over gloo: speed_up_over_gloo"),
    "target": _target,
}

SECTION = Section(
    "in_network",
    "in-network",
    "How near to the rate of a link is an allreduce through switches that add?",
    "measured on emulated links",
    "python bench/in_network.py",
    "Each switch is a process that adds and multicasts: cut-through passes on each piece once all its inputs "
    "are there, store-and-forward each message. The limit is the time in which the slowest link, at the rate "
    "that it delivered alone, carries the buffer once. Forwarding is what the process group would choose "
    "if switches did nothing else.",
    _answer,
    ("Allreduce through switches that add, as shares of the delivered link", summary),
)

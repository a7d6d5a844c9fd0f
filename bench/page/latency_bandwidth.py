"""Fabrics of up to 4,096 ranks: how near the fastest schedule of each size is to the proved least time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from arborcast.bench.page.charts import Line, LineChart
from arborcast.bench.page.parts import (
    Cell,
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
    table,
    text,
)
from arborcast.bench.page.results import Document, frame, groups, records
from arborcast.bench.page.words import DASH, count, duration, percent, plural, seconds, size


def _answer(document: Document) -> Iterator[Part]:
    rows, frontiers = document.rows, document.get("frontiers") or []
    if len(rows):
        shares = rows["share_of_least"]
        yield text(
            f"At {plural(len(rows), 'size')} of {plural(len(frontiers), 'frontier')} the fastest of the "
            "schedules found reaches ",
            Strong(f"{percent(shares.median())} of the least time in the median"),
            f", {percent(shares.min())} at the least.",
        )
        yield grid(
            [_picture(f"{topology.replace(',', ', ')}, {collective}", found)]
            for (topology, collective), found in groups(rows, "topology", "collective")
        )
        yield summary(document)
        yield table(_POINTS, frame(list(_points(frontiers))), folded="Every point of the frontiers")
        yield all_rows(_SIZES, rows)
    missing = document.get("missing") or []
    if missing:
        yield table(_MISSING, frame(missing), "Without an answer")


def _picture(name: str, rows: pd.DataFrame) -> Picture:
    known = rows.dropna(subset=["bytes", "share_of_least"])
    found = tuple(zip(known["bytes"], known["share_of_least"], strict=True))
    chart = LineChart(
        f"share of the least time by size: {name}", (Line("", found, "ours"),), equal=None, upright=percent
    )
    return Picture(chart, name, f"{_worst(rows).text} is the least.")


def _worst(rows: pd.DataFrame) -> Cell:
    """The least share of the least time, and at which size."""
    known = rows[rows["share_of_least"].notna()].sort_values("share_of_least", kind="stable")
    if known.empty:
        return Cell(DASH)
    row = records(known)[0]
    return Cell(f"{percent(row.share_of_least)} at {size(row.bytes)}", row.share_of_least)


def summary(document: Document) -> Table:
    """A line per fabric and collective: both ends of the frontier beside their limits, and the worst size."""
    by_case = dict(groups(document.rows, "topology", "collective"))
    shown = []
    for frontier in document.get("frontiers") or []:
        found = by_case[frontier["topology"], frontier["collective"]]
        least_us = min(point["latency_us"] for point in frontier["points"])
        shown.append(
            (
                frontier["topology"],
                frontier["collective"],
                cell(count, frontier["ranks"]),
                cell(count, len(frontier["points"])),
                cell(seconds, frontier["seconds"]),
                Cell(f"{duration(least_us)} / {duration(frontier['least_latency_us'])}", least_us),
                cell(percent, max(point["share_of_bound"] for point in frontier["points"])),
                cell(percent, found["share_of_least"].median(), "ours"),
                _worst(found),
            )
        )
    return lines(
        (
            *("fabric", "collective", ">ranks", ">points", ">found in", ">latency / its limit"),
            *(">rate, of its limit", ">of the least time, median", ">at worst"),
        ),
        shown,
        "Frontiers of latency and rate: the ends beside their limits, and least times over ours",
    )


def _points(frontiers: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for frontier in frontiers:
        for point in frontier["points"]:
            yield {"topology": frontier["topology"], "collective": frontier["collective"]} | point


_POINTS = columns(
    "fabric: topology | collective | method | >steps | >latency: latency_us | >rate GB/s: rate | "
    ">of its limit: share_of_bound"
)
_SIZES = columns(
    "fabric: topology | collective | >size: bytes | served by: served_by | >steps | >time: time_us | "
    ">least: least_us | >of the least: share_of_least"
)
_MISSING = columns("fabric: topology | collective | why")

SECTION = Section(
    "latency_bandwidth",
    "latency-and-rate",
    "How near is each size to the least possible time, on up to 4,096 ranks?",
    "simulated, beside proved limits",
    "python bench/latency_bandwidth.py",
    "What `synth pareto` shows above 64 ranks: the schedules that no other known one beats in latency and in "
    "rate, each replayed by the verifier (by representatives where it is in implicit form). Times are "
    "simulated by latencies and bandwidths of links alone. The least time is proved for every schedule in "
    "the scope of the bound; that one reaches it is not promised, so what is missing may be the "
    "schedule's loss or the limit's.",
    _answer,
    ("Latency and rate on large fabrics, beside proved limits", summary),
)

"""Switches that add: the share of a worker's link over sizes, and beside switches that only forward."""

from __future__ import annotations

from collections.abc import Iterator

from arborcast.bench.page.charts import Line, LineChart
from arborcast.bench.page.parts import Part, Picture, Section, Table, all_rows, cell, columns, grid, lines
from arborcast.bench.page.results import Document, groups
from arborcast.bench.page.words import count, percent, size

OURS = "added as they pass"
SHOWN_AT = (64 << 10, 1 << 20, 64 << 20)


def _answer(document: Document) -> Iterator[Part]:
    boxes = []
    for (name, ranks), rows in groups(document.rows, "topology", "ranks"):
        drawn = tuple(
            Line(
                method,
                tuple(zip(found["bytes"], found["share_of_nominal"], strict=True)),
                "ours" if method == OURS else "base",
                dashed=method.startswith("forwarded"),
            )
            for method, found in groups(rows, "method")
        )
        title = f"{name}, {count(ranks)} workers"
        chart = LineChart(f"allreduce's share of a link: {title}", drawn, equal=None, upright=percent)
        boxes.append([Picture(chart, title)])
    yield grid(boxes)
    yield all_rows(
        columns(
            "fabric: topology | >workers: ranks | method | >size: bytes | >time: time_us | >algbw | "
            ">share of the link: share_of_nominal"
        ),
        document.rows,
    )


def summary(document: Document) -> Table:
    """A line per fabric and method, a column per size."""
    table = document.rows.pivot_table(
        index=["topology", "ranks", "method"], columns="bytes", values="share_of_nominal", sort=False
    )
    return lines(
        ("fabric", "switches", *(f">{size(at)}" for at in SHOWN_AT)),
        [
            (name, method, *(cell(percent, shares.get(at, float("nan"))) for at in SHOWN_AT))
            for (name, _, method), shares in table.iterrows()
        ],
    )


SECTION = Section(
    "aggregation",
    "aggregation",
    "What do switches that add gain?",
    "simulated",
    "python bench/aggregation.py",
    "An allreduce as a share of a worker's link of 10 Gbit/s, with 1 us per link and frames of 4 KiB. A "
    "switch that adds frames as they pass takes one frame more per level than the link; one that stores "
    "whole messages takes the message again each time that it adds or copies it; where switches only "
    "forward, each worker sends nearly twice the data.",
    _answer,
    ("Switches that add, share of a worker's link", summary),
)

"""Switches that add: the share of a worker's link over sizes, and beside switches that only forward."""

from __future__ import annotations

from collections.abc import Iterator

from arborcast.bench.page.charts import Line, LineChart
from arborcast.bench.page.parts import (
    Cell,
    Part,
    Picture,
    Section,
    Strong,
    Table,
    all_rows,
    columns,
    grid,
    lines,
    text,
)
from arborcast.bench.page.results import Document, groups
from arborcast.bench.page.words import count, percent, plural, size, times

OURS = "added as they pass"
LABELS = {
    OURS: "added",
    "stored, then added": "stored",
    "forwarded, trees": "trees",
    "forwarded, ring": "ring",
}
SHOWN_AT = (64 << 10, 64 << 20)


def _answer(document: Document) -> Iterator[Part]:
    yield from _headline(document)
    boxes = []
    drawable = document.rows[document.rows["share_of_nominal"].notna()]
    for (name, ranks), rows in groups(drawable, "topology", "ranks"):
        drawn = tuple(
            Line(
                LABELS.get(method, method),
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


def _headline(document: Document) -> Iterator[Part]:
    """Of the largest size, the least and the most that switches which add gain."""
    rows = document.rows[document.rows["share_of_nominal"].notna()]
    rows = rows[rows["bytes"] == rows["bytes"].max()]
    added = rows[rows["method"] == OURS].groupby("topology")["share_of_nominal"].max()
    others = rows[rows["method"].str.startswith("forwarded")].groupby("topology")["share_of_nominal"].max()
    gains = (added / others).dropna()
    if len(gains):
        yield text(
            f"At {size(rows['bytes'].max())} switches that add are ",
            Strong(f"{times(gains.min())} to {times(gains.max())}"),
            f" as fast as the best schedule of switches that forward, on {plural(len(gains), 'fabric')}.",
        )


def summary(document: Document) -> Table:
    """A line per fabric, a column per method: the shares at a small and at a large size."""
    methods = list(dict.fromkeys(document.rows["method"]))
    rows: list[tuple[Cell | str, ...]] = []
    for name, alike in groups(document.rows, "topology"):
        shares = alike.pivot_table(index="method", columns="bytes", values="share_of_nominal")
        shares = shares.reindex(index=methods, columns=SHOWN_AT)
        told = (
            Cell(" / ".join(map(percent, shares.loc[method])), float(shares.loc[method].iloc[-1]))
            for method in methods
        )
        rows.append((name, *told))
    return lines(("fabric", *(f">{method}" for method in methods)), rows)


SECTION = Section(
    "aggregation",
    "aggregation",
    "What do switches that add gain?",
    "simulated",
    "python bench/aggregation.py",
    "An allreduce as a share of a worker's link of 10 Gbit/s, with a microsecond per link and frames of "
    "4 KiB. A switch that adds frames as they pass takes one frame more per level than the link; one that "
    "stores whole messages takes the message again each time that it adds or copies it; where switches only "
    "forward (trees, ring), each worker sends nearly twice the data.",
    _answer,
    ("Allreduce in switches, share of a worker's link at 64 KiB / 64 MiB", summary),
)

"""Tensors on a device: the share of the limit that 1 to 8 host buffers leave, beside whole copies."""

from __future__ import annotations

from collections.abc import Iterator

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
    text,
)
from arborcast.bench.page.results import Document, groups
from arborcast.bench.page.words import digits, percent, plural, size, times

HOST, WHOLE, CHOSEN = "host memory", "whole tensors", "chosen"


def _answer(document: Document) -> Iterator[Part]:
    for rate, rows in groups(document.rows, "copies_over_link"):
        largest = rows[rows["bytes"] == rows["bytes"].max()]
        of = largest.groupby("method")["share_of_optimum"].max().reindex([HOST, WHOLE, CHOSEN])
        yield text(
            f"Copies at {_rate(rate)}, {size(rows['bytes'].max())}: whole tensors reach ",
            Strong(percent(of[WHOLE])),
            " of the limit, through the ring that is chosen ",
            Strong(percent(of[CHOSEN])),
            f", without a device {percent(of[HOST])}",
        )
    yield grid(
        [_over_sizes(rate, rows), _over_buffers(rate, rows)]
        for rate, rows in groups(document.rows, "copies_over_link")
    )
    yield all_rows(_COLUMNS, document.rows)


def _rate(times_link: float) -> str:
    return f"{digits(times_link, 1)}× the rate of a link"


def _over_sizes(rate: float, rows: pd.DataFrame) -> Picture:
    """The best of each number of buffers at every size."""
    rows = rows[rows["share_of_optimum"].notna()]
    drawn = [_line(HOST, rows, dashed=True), _line(WHOLE, rows)]
    for buffers, alike in groups(rows[rows["buffers"].notna() & (rows["method"] != CHOSEN)], "buffers"):
        best = alike.groupby("bytes", as_index=False)["share_of_optimum"].max()
        points = tuple(zip(best["bytes"], best["share_of_optimum"], strict=True))
        drawn.append(Line(plural(buffers, "buffer"), points, "base" if buffers == 1 else "ours"))
    chart = LineChart(
        f"share of the limit over size, copies at {_rate(rate)}", tuple(drawn), None, upright=percent
    )
    return Picture(chart, f"Share of the limit over size, copies at {_rate(rate)}")


def _line(method: str, rows: pd.DataFrame, *, dashed: bool = False) -> Line:
    found = rows[rows["method"] == method]
    return Line(method, tuple(zip(found["bytes"], found["share_of_optimum"], strict=True)), dashed=dashed)


def _over_buffers(rate: float, rows: pd.DataFrame) -> Picture:
    """Of the largest size, the sizes of a buffer that were tried with all numbers of them."""
    is_ring = rows["buffers"].notna() & (rows["method"] != CHOSEN) & rows["share_of_optimum"].notna()
    rows = rows[is_ring & (rows["bytes"] == rows["bytes"].max())]
    tried = rows["buffer_bytes"].map(rows["buffer_bytes"].value_counts())
    rows, drawn = rows[tried == tried.max()], []
    for buffers, alike in groups(rows.sort_values("buffer_bytes"), "buffers"):
        points = tuple(zip(alike["buffer_bytes"], alike["share_of_optimum"], strict=True))
        drawn.append(Line(plural(buffers, "buffer"), points, "base" if buffers == 1 else "ours"))
    chart = LineChart(
        f"share of the limit over a buffer's size, {_rate(rate)}", tuple(drawn), None, upright=percent
    )
    return Picture(chart, f"{size(rows['bytes'].max())}: over the size of a buffer")


def summary(document: Document) -> Table:
    """A line for each rate of copies, a column for each size: whole tensors, and what is chosen."""
    found = sorted(set(document.rows["bytes"].dropna()))
    drawn: list[tuple[Cell | str, ...]] = []
    for rate, rows in groups(document.rows, "copies_over_link"):
        shares = rows.pivot_table(index="method", columns="bytes", values="share_of_optimum", aggfunc="max")
        shares = shares.reindex(index=[WHOLE, CHOSEN], columns=found)
        cells = (Cell(" / ".join(map(percent, shares[at])), shares[at].iloc[-1]) for at in found)
        drawn.append((cell(times, rate), *cells))
    return lines((">copies over link", *(f">{size(at)}" for at in found)), drawn)


_COLUMNS = columns(
    ">copies over link: copies_over_link | >size: bytes | method | >buffers | >of: buffer_bytes | >pieces | "
    ">time: time_us | >spread | >of the limit: share_of_optimum"
)

SECTION = Section(
    "staging",
    "device-tensors",
    "What do tensors on a device lose on their way through host memory?",
    "measured on emulated links, with an emulated device",
    "python bench/staging.py",
    "Workers around a switch run an allreduce on data that lie on a device whose copies, each way, have a "
    "rate of their own. Whole tensors are copied before and after; through a ring of host buffers copies, "
    "sending, receiving and adding overlap. The limit is that of data in host memory, at the rates that the "
    "links delivered. Nothing here ran on a GPU.",
    _answer,
    ("Tensors on a device: share of the limit by whole tensors / through the ring that is chosen", summary),
)

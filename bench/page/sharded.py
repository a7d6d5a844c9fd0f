"""Operators divided over meshes: what is chosen beside fixed layouts, and how long planning that takes."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

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
    missed,
    table,
    text,
)
from arborcast.bench.page.results import Document, first, groups
from arborcast.bench.page.targets import tally
from arborcast.bench.page.training import COMMAND, named
from arborcast.bench.page.words import DASH, duration, plural, seconds, times

FREE = "chosen freely"
FIXED = {"data-parallel": "data parallel", "zero-3": "ZeRO-3", "megatron": "Megatron"}
LEVEL = 1e-3
"""Share of the time up to which two predicted times are one."""


def _layouts(document: Document) -> Iterator[Part]:
    fixed = document.rows[document.rows["method"].isin(list(FIXED)) & document.rows["ratio"].notna()]
    if len(fixed):
        nearest = fixed.groupby(["title", "model"], sort=False)["ratio"].min()
        gains = nearest[nearest > 1 + LEVEL]
        yield text(
            "The free choice is faster than the best fixed layout in ",
            Strong(f"{len(gains)} of {plural(len(nearest), 'case')}"),
            f", {times(nearest.median())} in the median and {times(nearest.max())} at most. "
            + " ".join(
                f"{name} takes {times(alike['ratio'].min())} to {times(alike['ratio'].max())} as long."
                for method, name in FIXED.items()
                if len(alike := fixed[fixed["method"] == method])
            ),
        )
    yield layout_table(document)
    yield all_rows(_ALL, named(document.rows))


def layout_table(document: Document) -> Table:
    """A line per fabric and model: what was chosen, and how much longer each fixed layout takes."""

    def over(method: str) -> Column:
        def shown(alike: pd.DataFrame) -> Cell:
            row = first(alike, method=method)
            if not row.ratio > 0:
                return Cell("does not fit", tone="quiet")
            return cell(times, row.ratio, "quiet" if row.ratio <= 1 + LEVEL else "")

        return shown

    head: dict[str, Column] = {
        "fabric": lambda alike: Cell(first(alike).title),
        "model": lambda alike: Cell(first(alike).model),
        "mesh": lambda alike: Cell(first(alike, method=FREE).mesh),
        "a block": lambda alike: Cell(first(alike, method=FREE).how),
        ">step": lambda alike: cell(duration, first(alike, method=FREE).time_us, "ours"),
    }
    head |= {f">{name}": over(method) for method, name in FIXED.items()}
    return table(head, (alike for _, alike in groups(document.rows, "title", "model")))


_ALL = columns(
    "fabric: title | model | layout: method | mesh | a block: how | >step: time_us | >over the best: ratio | "
    ">a rank holds: memory_bytes"
)


def _times(document: Document) -> Iterator[Part]:
    counted = tally(document)
    if counted.all:
        yield text(Strong(f"{counted.words}."), tone="good" if counted.met == counted.all else "bad")
    yield time_table(document)


def time_table(document: Document) -> Table:
    """A line per case."""
    return table(
        {
            **columns("topology | >ranks: devices | >blocks: layers"),
            ">CPU time, one run": lambda row: missed(
                seconds, row.cpu_seconds, row.cpu_seconds > row.target_s
            ),
            **columns(">of that tracing: trace_seconds | >one program: program_seconds | >elapsed: seconds"),
            ">target": lambda row: cell(seconds, row.target_s) if row.target_s > 0 else Cell(DASH),
            "mesh": lambda row: Cell(row.mesh),
        },
        named(document.rows),
    )


SECTIONS = (
    Section(
        "pipeline_sharding",
        "sharding",
        "Which layout is best inside a stage, and by how much?",
        "predicted by our schedules",
        COMMAND + "sharding",
        "A GPT in one stage on V100, in float32 with Adam; operators are divided by an integer program that "
        "is solved to the proof, all layouts on the same costs, each on its best mesh. A block is told by "
        "what some of its products make: for each axis of the mesh the dimension that is divided, or R.",
        _layouts,
        ("The best layout inside a stage, beside fixed ones", layout_table),
    ),
    Section(
        "pipeline_intra",
        "intra",
        "How long does planning inside a stage take?",
        "measured",
        COMMAND + "intra",
        "From a module to the sharding of all its operators on the best of all meshes, layouts beside it, "
        "in a process of its own, imports left out. One thread works: CPU time is what an idle machine "
        "takes. One program is the best mesh solved once more with its prices known.",
        _times,
        ("Time to plan inside a stage", time_table),
    ),
)

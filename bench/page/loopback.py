"""The process group on one machine, by call and by step: its costs, with no links to use better."""

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
    columns,
    grid,
    lines,
    table,
    text,
    verdict,
)
from arborcast.bench.page.results import Document, Row, groups
from arborcast.bench.page.words import DASH, count, digits, listed, size, times

SHOWN = {"shared memory": "in memory", "sockets": "sockets", "executor": "executor"}


def _case(collective: str, ranks: float, main_thread: str) -> str:
    busy = ", Python busy" if main_thread == "computes" else ""
    return f"{collective}, {count(ranks)} ranks{busy}"


def _answer(document: Document) -> Iterator[Part]:
    told = _spans(document, "shared memory", "sockets")
    if told:
        yield text("Of gloo's speed, in the median of all sizes and collectives: ", Strong(listed(told)), ".")
    cases = groups(document.rows, "collective", "ranks", "main_thread")
    yield grid([_picture(_case(*case), rows)] for case, rows in cases)
    yield all_rows(_COLUMNS, document.rows)


def _spans(document: Document, *methods: str) -> list[str]:
    """How many times as fast as gloo each of them is: the median of all rows, the least and the most."""
    rows = document.rows
    return [
        f"{times(ratios.median())} {SHOWN[method]} ({times(ratios.min())} to {times(ratios.max())})"
        for method in methods
        if len(ratios := rows[rows["method"] == method]["times_gloo"].dropna())
    ]


def _picture(name: str, rows: pd.DataFrame) -> Picture:
    drawn = []
    for method, label in SHOWN.items():
        found = rows[(rows["method"] == method) & rows["times_gloo"].notna()]
        points = tuple(zip(found["bytes"], found["times_gloo"], strict=True))
        tone = "ours" if method == "shared memory" else "base"
        drawn.append(Line(label, points, tone, dashed=method == "executor"))
    return Picture(LineChart(f"speed over gloo's: {name}", tuple(drawn), below="gloo is faster"), name)


def summary(document: Document) -> Table:
    """A line per case, a column per size: in memory and over sockets, as multiples of gloo's speed."""
    found = sorted(set(document.rows["bytes"].dropna()))
    rows: list[tuple[Cell | str, ...]] = []
    for case, alike in groups(document.rows, "collective", "ranks", "main_thread"):
        ratios = alike.pivot_table(index="method", columns="bytes", values="times_gloo", aggfunc="first")
        ratios = ratios.reindex(index=["shared memory", "sockets"], columns=found)
        verdicts = alike["met"].dropna()
        missed = sum(verdicts.eq(False))
        rows.append(
            (
                _case(*case),
                *(Cell(" / ".join(map(digits, ratios[at])), ratios[at].iloc[0]) for at in found),
                Cell(
                    f"{missed} of {len(verdicts)}" if len(verdicts) else DASH, missed, "bad" if missed else ""
                ),
            )
        )
    return lines(("in memory / over sockets", *(f">{size(at)}" for at in found), ">targets missed"), rows)


def _target(row: Row) -> Cell:
    if not row.target > 0:
        return Cell("")
    told = verdict(f"{times(row.target)} {'met' if row.met else 'missed'}", bool(row.met))
    return Cell(told.text, row.target, told.tone)


_COLUMNS: dict[str, Column] = {
    "collective": lambda row: Cell(_case(row.collective, row.ranks, row.main_thread)),
    **columns(
        ">size: bytes | contender: method | served by: served_by | >time: time_us | >spread | "
        ">CPU time: cpu_us | >over gloo: times_gloo | >less CPU than gloo: cpu_saving"
    ),
    "target": _target,
}

SECTION = Section(
    "loopback",
    "one-machine",
    "What does the process group cost on one machine?",
    "measured on local processes",
    "python bench/loopback.py",
    "Speed as a multiple of gloo's in the same round, on local processes. Loopback has no links to "
    "use better, so that these are the costs of the runtime alone. Main threads wait for each call, or, "
    "where it says so, compute in Python until it has ended. Blue is what the group does by itself "
    "within a host.",
    _answer,
    ("The process group on one machine, as multiples of gloo's speed", summary),
)


def _steps(document: Document) -> Iterator[Part]:
    told = _spans(document, "shared memory", "sockets")
    if told:
        yield text("Of gloo's speed: ", Strong(listed(told)), ".")
    yield table(_STEP_COLUMNS, document.rows)


def steps_summary(document: Document) -> Table:
    """A line per size and number of ranks: steps in memory and over sockets, as multiples of gloo's speed."""
    rows: list[tuple[Cell | str, ...]] = []
    for (parameters, ranks), alike in groups(document.rows, "parameters", "ranks"):
        ratios = alike.set_index("method")["times_gloo"].reindex(["shared memory", "sockets"])
        missed = sum(alike["met"].dropna().eq(False))
        rows.append(
            (
                f"{digits(parameters / 1e6)} M parameters, {count(ranks)} ranks",
                *(Cell(times(ratio), ratio) for ratio in ratios),
                Cell(count(missed), missed, "bad" if missed else ""),
            )
        )
    return lines(("", ">in memory", ">over sockets", ">targets missed"), rows)


_STEP_COLUMNS: dict[str, Column] = {
    **columns(
        ">ranks | >parameters | contender: method | >time: time_us | >spread | >CPU time: cpu_us | "
        ">over gloo: times_gloo | >less CPU than gloo: cpu_saving"
    ),
    "target": _target,
}

STEPS = Section(
    "ddp",
    "ddp-steps",
    "What does a step of DistributedDataParallel cost on one machine?",
    "measured on local processes",
    "python bench/ddp.py",
    "Steps with gradients averaged by gloo and by the process group, each in turn on its own copy of one "
    "network, whose parameters are compared at the end. The time is the slowest rank's.",
    _steps,
    ("A step of DistributedDataParallel, as multiples of gloo's speed", steps_summary),
)

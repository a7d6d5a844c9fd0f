"""The section of the process group on one machine: its costs, where there are no links to use better."""

from __future__ import annotations

from collections.abc import Sequence

from arborcast.bench.page.cells import Column, all_rows, durations, sizes, speed_ups, words
from arborcast.bench.page.parts import Cell, Part, Picture, Section, Table, grid, missing, text
from arborcast.bench.page.results import Document, Row, figure, grouped, word
from arborcast.bench.page.svg import Line, line_chart
from arborcast.bench.page.targets import tally
from arborcast.bench.page.words import DASH, count, digits, size, times

NAME, TITLE = "one-machine", "What does the process group cost on one machine?"
COMMAND = "python bench/loopback.py"
BASELINE = "gloo"
SHOWN = {
    "shared memory": "in memory",
    "sockets": "sockets",
    "as it comes": "as it comes",
    "executor": "executor",
}


def section(document: Document | None) -> Section:
    """What loopback measured."""
    if document is None:
        return missing(NAME, TITLE, COMMAND)
    cases = grouped(document.rows, case)
    parts: list[Part] = [
        text(
            "Speed as a multiple of gloo's in the same round, on local processes. Loopback has no links to "
            "use better, so that these are the costs of the runtime alone. Blue is what the group does by "
            "itself within a host.",
            tone="quiet",
        ),
        *_targets(document),
        grid([_picture(name, rows)] for name, rows in cases.items()),
        all_rows(_COLUMNS, document.rows),
    ]
    return Section(NAME, TITLE, "measured on local processes", tuple(parts), (document,))


def case(row: Row) -> str:
    """The collective and the number of ranks."""
    return f"{word(row, 'collective')}, {count(figure(row, 'ranks'))} ranks"


def _targets(document: Document) -> list[Part]:
    counted = tally(document)
    if not counted.all:
        return []
    return [text(f"{counted.words}.", tone="good" if counted.met == counted.all else "bad")]


def _picture(name: str, rows: Sequence[Row]) -> Picture:
    lines = [
        Line(
            label,
            tuple(
                (at, ratio)
                for row in rows
                if row.get("method") == method
                and (at := figure(row, "bytes"))
                and (ratio := figure(row, "times_gloo"))
            ),
            "ours" if method == "shared memory" else "base",
            dashed=method == "executor",
        )
        for method, label in SHOWN.items()
        if method != "as it comes"
    ]
    drawn = line_chart(lines, below="gloo is faster", description=f"speed over gloo's: {name}")
    return Picture(drawn, name)


def table(document: Document) -> Table:
    """A line per case, a column per size: in memory and over sockets, as multiples of gloo's speed."""
    sizes = sorted({at for row in document.rows if (at := figure(row, "bytes")) is not None})
    lines = []
    for name, rows in grouped(document.rows, case).items():
        cells = []
        for at in sizes:
            here = [row for row in rows if figure(row, "bytes") == at]
            ratios = [_ratio(here, method) for method in ("shared memory", "sockets")]
            cells.append(
                Cell(" / ".join(DASH if ratio is None else digits(ratio) for ratio in ratios), ratios[0])
            )
        verdicts = [row["met"] for row in rows if isinstance(row.get("met"), bool)]
        missed = verdicts.count(False)
        said = f"{missed} of {len(verdicts)}" if verdicts else DASH
        lines.append((Cell(name), *cells, Cell(said, missed, "bad" if missed else "")))
    head = ("in memory / over sockets", *(f">{size(at)}" for at in sizes), ">targets missed")
    return Table(head, tuple(lines))


def _ratio(rows: Sequence[Row], method: str) -> float | None:
    return next((figure(row, "times_gloo") for row in rows if row.get("method") == method), None)


def _verdict(row: Row) -> Cell:
    target = figure(row, "target")
    if target is None:
        return Cell("")
    met = row.get("met")
    return Cell(f"{times(target)} {'met' if met else 'missed'}", target, "good" if met else "bad")


_COLUMNS: dict[str, Column] = {
    "collective": lambda row: Cell(case(row)),
    ">size": sizes,
    "contender": words("method"),
    "served by": words("served_by"),
    ">time": durations("time_us"),
    ">spread": durations("spread"),
    ">CPU time": durations("cpu_us"),
    ">over gloo": speed_ups("times_gloo"),
    ">less CPU than gloo": speed_ups("cpu_saving"),
    "target": _verdict,
}

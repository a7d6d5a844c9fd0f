"""The section of synthesis time: bounds and trees of whole machines."""

from __future__ import annotations

from collections.abc import Sequence

from arborcast.bench.page.parts import Cell, Part, Picture, Section, Table, missing, text
from arborcast.bench.page.results import Document, Row, figure, grouped, word
from arborcast.bench.page.svg import Dots, dot_chart
from arborcast.bench.page.words import DASH, count, digits, seconds

NAME, TITLE, COMMAND = "synthesis", "How long does synthesis take?", "python bench/synthesis.py"


def section(document: Document | None) -> Section:
    """What the bench of synthesis measured."""
    if document is None:
        return missing(NAME, TITLE, COMMAND)
    drawn = _chart(document)
    parts: list[Part] = [
        text(
            "Allgather trees that reach their proven limit exactly, on one core, kernels compiled before; "
            "every figure is a median. Other synthesizers are asked in the section of peers.",
            tone="quiet",
        ),
    ]
    if drawn:
        parts.append(Picture(drawn, "Time to find the trees", "Logarithmic."))
    parts.append(table(document))
    parts += [text(sentence) for sentence in _whole_processes(document)]
    return Section(NAME, TITLE, "measured", tuple(parts), (document,))


def _by_machine(document: Document) -> list[tuple[str, list[Row]]]:
    rows = [row for row in document.rows if row.get("method") != "whole process"]
    cases = grouped(rows, lambda row: word(row, "title", "topology"))
    return sorted(cases.items(), key=lambda pair: figure(pair[1][0], "ranks") or 0)


def _of(rows: Sequence[Row], method: str) -> Row:
    return next((row for row in rows if row.get("method") == method), {})


def table(document: Document) -> Table:
    """A line per machine."""
    lines = []
    for title, rows in _by_machine(document):
        bound, trees = _of(rows, "bound"), _of(rows, "trees")
        lines.append(
            (
                Cell(title),
                *(Cell(count(figure(rows[0], "ranks")), figure(rows[0], "ranks")),),
                Cell(count(figure(trees, "trees")), figure(trees, "trees")),
                Cell(seconds(figure(bound, "seconds")), figure(bound, "seconds")),
                Cell(seconds(figure(trees, "seconds")), figure(trees, "seconds"), "ours"),
                Cell(_memory(figure(trees, "peak_MB")), figure(trees, "peak_MB")),
            )
        )
    head = ("machine", ">ranks", ">trees", ">bound", ">trees found in", ">memory")
    return Table(head, tuple(lines))


def _memory(megabytes: float | None) -> str:
    return DASH if megabytes is None else f"{digits(megabytes / 1e3, 2)} GB"


def _whole_processes(document: Document) -> list[str]:
    return [
        f"`{word(row, 'title')}` answers in {seconds(figure(row, 'seconds'))} as a whole process."
        for row in document.rows
        if row.get("method") == "whole process"
    ]


def _chart(document: Document) -> str:
    dots = []
    for title, rows in _by_machine(document):
        ours = figure(_of(rows, "trees"), "seconds")
        if ours:
            ranks = count(figure(rows[0], "ranks"))
            hint = f"{title}, {ranks} ranks: {seconds(ours)}"
            dots.append(Dots(f"{title} ({ranks})", (("ours", ours),), hint))
    return dot_chart(dots, unit="s", logarithmic=True, label_width=128, description="time of synthesis")

"""The section of synthesis time: trees of whole machines, and how a peer does in the same run."""

from __future__ import annotations

from collections.abc import Sequence

from bench.page.parts import Cell, Part, Picture, Section, Table, Tone, missing, text
from bench.page.results import Document, Row, figure, grouped, is_ours, word
from bench.page.svg import Dots, dot_chart
from bench.page.words import DASH, count, digits, seconds, times

NAME, TITLE, COMMAND = "synthesis", "How long does synthesis take?", "python bench/synthesis.py"
IN_TURNS = "trees, in turns"


def section(document: Document | None) -> Section:
    """What the bench of synthesis measured."""
    if document is None:
        return missing(NAME, TITLE, COMMAND)
    drawn = _chart(document)
    parts: list[Part] = [
        text(
            "Allgather trees that reach their proven limit exactly, on one core. Peers are measured in turns "
            "with ours, in the same run on the same machine; every figure is a median.",
            tone="quiet",
        ),
    ]
    if drawn:
        parts.append(Picture(drawn, "Time to find the trees", "Blue: ours. Grey: ForestColl. Logarithmic."))
    parts.append(table(document))
    parts += [text(sentence) for sentence in _whole_processes(document)]
    return Section(NAME, TITLE, "measured", tuple(parts), (document,))


def _by_machine(document: Document) -> list[tuple[str, list[Row]]]:
    rows = [row for row in document.rows if row.get("method") != "whole process"]
    cases = grouped(rows, lambda row: word(row, "title", "topology"))
    return sorted(cases.items(), key=lambda pair: figure(pair[1][0], "ranks") or 0)


def _of(rows: Sequence[Row], method: str) -> Row:
    return next((row for row in rows if row.get("method") == method), {})


def _peers(document: Document) -> list[str]:
    known = {"bound", "trees", IN_TURNS, "whole process"}
    methods = [str(row.get("method")) for row in document.rows]
    return list(dict.fromkeys(method for method in methods if method not in known and not is_ours(method)))


def table(document: Document) -> Table:
    """A line per machine."""
    peers = _peers(document)
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
                *(_peer_cell(_of(rows, peer), _of(rows, IN_TURNS)) for peer in peers),
            )
        )
    head = ("machine", ">ranks", ">trees", ">bound", ">trees found in", ">memory")
    return Table((*head, *(f"{peer}, same run" for peer in peers)), tuple(lines))


def _memory(megabytes: float | None) -> str:
    return DASH if megabytes is None else f"{digits(megabytes / 1e3, 2)} GB"


def _peer_cell(peer: Row, ours: Row) -> Cell:
    taken = figure(peer, "seconds")
    if taken is None:
        return Cell("")
    trees, mine = figure(peer, "trees"), figure(ours, "seconds")
    said = [seconds(taken)]
    if trees is not None:
        said.append(f"{count(trees)} trees")
    if mine:
        said.append(f"{times(taken / mine)} as long")
    return Cell(", ".join(said), taken, "base")


def _whole_processes(document: Document) -> list[str]:
    return [
        f"`{word(row, 'title')}` answers in {seconds(figure(row, 'seconds'))} as a whole process."
        for row in document.rows
        if row.get("method") == "whole process"
    ]


def _chart(document: Document) -> str:
    peers = _peers(document)
    dots = []
    for title, rows in _by_machine(document):
        values: list[tuple[Tone, float]] = [
            ("base", taken) for peer in peers if (taken := figure(_of(rows, peer), "seconds"))
        ]
        ours = figure(_of(rows, "trees"), "seconds")
        if ours:
            values.append(("ours", ours))
        if values:
            ranks = count(figure(rows[0], "ranks"))
            dots.append(Dots(f"{title} ({ranks})", tuple(values), f"{title}, {ranks} ranks: {seconds(ours)}"))
    return dot_chart(dots, unit="s", logarithmic=True, label_width=128, description="time of synthesis")

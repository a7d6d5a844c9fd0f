"""The section of peers: public synthesizers on the same questions, on the same machine, in turns with ours."""

from __future__ import annotations

from collections.abc import Sequence

from bench.report_parts import Cell, Part, Picture, Section, Table, Tone, missing, text
from bench.report_results import Document, Row, figure, grouped, is_ours, word
from bench.report_svg import Dots, dot_chart
from bench.report_words import DASH, digits, percent, plural, seconds, times

NAME, TITLE, COMMAND = "peers", "How do the public synthesizers do?", "python bench/peers.py"


def section(document: Document | None) -> Section:
    """What the peers answered."""
    if document is None:
        return missing(NAME, TITLE, COMMAND)
    parts: list[Part] = [
        text(
            "Every contender is asked the same question in a process of its own, in turns with the others on "
            "the same machine. What it answers is turned into a schedule of ours, so that the same verifier "
            "computes its rate and the same simulator its time.",
            tone="quiet",
        ),
    ]
    drawn = _chart(document)
    if drawn:
        note = "Whole processes, logarithmic. Blue: ours. Grey: each peer that answered."
        parts.append(Picture(drawn, "Time to answer", note))
    parts += [table(document), _everything(document)]
    return Section(
        NAME, TITLE, "measured; rates exact, times of schedules simulated", tuple(parts), (document,)
    )


def case(row: Row) -> str:
    """The question."""
    return f"{word(row, 'title', 'topology')}, {word(row, 'collective')}"


def table(document: Document) -> Table:
    """A line per question, a column per contender: time, and share of the proven limit."""
    contenders = sorted(
        dict.fromkeys(word(row, "method") for row in document.rows), key=lambda name: not is_ours(name)
    )
    lines = [
        (
            Cell(name),
            *(_answer([row for row in rows if word(row, "method") == who], rows) for who in contenders),
        )
        for name, rows in grouped(document.rows, case).items()
    ]
    return Table(("question", *contenders), tuple(lines))


def _taken(row: Row) -> float | None:
    taken = figure(row, "seconds")
    time_us = figure(row, "time_us")
    return taken if taken is not None else None if time_us is None else time_us / 1e6


def _answer(rows: Sequence[Row], everybody: Sequence[Row]) -> Cell:
    """The best of what a contender found: how long it took, and how near to the limit that is."""
    if not rows:
        return Cell("cannot be asked", tone="quiet")
    best = max(rows, key=lambda row: figure(row, "share_of_optimum", "rate", "algbw") or 0.0)
    taken, verdict = _taken(best), word(best, "verdict")
    if verdict not in {"found", DASH}:
        return Cell(verdict if taken is None else f"{verdict}, {seconds(taken)}", taken, "quiet")
    said = [seconds(taken), f"{percent(figure(best, 'share_of_optimum'))} of the limit"]
    if (trees := figure(best, "trees")) is not None:
        said.append(plural(int(trees), "tree"))
    elif (steps := figure(best, "steps")) is not None:
        said.append(plural(int(steps), "step"))
    ours = [taken for row in everybody if is_ours(row.get("method")) and (taken := _taken(row))]
    mine = is_ours(best.get("method"))
    if taken and ours and not mine:
        said[0] += f" ({times(taken / min(ours))} as long)"
    return Cell(", ".join(said), taken, "ours" if mine else "")


def _chart(document: Document) -> str:
    dots = []
    for name, rows in grouped(document.rows, case).items():
        answered = [
            (row, taken) for row in rows if row.get("verdict", "found") == "found" and (taken := _taken(row))
        ]
        values: list[tuple[Tone, float]] = [
            ("ours" if is_ours(row.get("method")) else "base", taken)
            for row, taken in sorted(answered, key=lambda pair: is_ours(pair[0].get("method")))
        ]
        hint = "; ".join(f"{word(row, 'method')} {seconds(taken)}" for row, taken in answered)
        if values:
            dots.append(Dots(name, tuple(values), f"{name}: {hint}"))
    return dot_chart(dots, unit="s", logarithmic=True, label_width=150, description="time to answer")


def _everything(document: Document) -> Table:
    names = ("seconds", "cpu_seconds")
    lines = [
        (
            Cell(case(row)),
            Cell(word(row, "method"), tone="ours" if is_ours(row.get("method")) else ""),
            Cell(word(row, "label", "algorithm")),
            Cell(word(row, "verdict")),
            *(Cell(seconds(figure(row, name)), figure(row, name)) for name in names),
            Cell(digits(figure(row, "rate", "algbw")), figure(row, "rate", "algbw")),
            Cell(percent(figure(row, "share_of_optimum")), figure(row, "share_of_optimum")),
            *(Cell(digits(figure(row, name), 4), figure(row, name)) for name in ("trees", "steps", "runs")),
            Cell(word(row, "why")),
        )
        for row in document.rows
    ]
    head = ("question", "contender", "algorithm", "verdict", ">time", ">CPU time", ">GB/s", ">of the limit")
    head += (">trees", ">steps", ">runs", "why")
    return Table(head, tuple(lines), folded=f"All {plural(len(lines), 'row')}")

"""The section of peers: public synthesizers on the same questions and machine, in turns with ours."""

from __future__ import annotations

from collections.abc import Sequence

from arborcast.bench.page.cells import (
    Column,
    all_rows,
    counts,
    durations,
    method,
    numbers,
    seconds_of,
    shares,
    words,
)
from arborcast.bench.page.parts import Cell, Part, Picture, Section, Table, Tone, missing, text
from arborcast.bench.page.results import Document, Row, figure, figures, grouped, is_ours, word
from arborcast.bench.page.svg import Dots, dot_chart
from arborcast.bench.page.words import percent, plural, seconds, times

NAME, TITLE, COMMAND = "peers", "How do the public synthesizers do?", "python bench/peers.py"


def section(document: Document | None) -> Section:
    """What the peers answered."""
    if document is None:
        return missing(NAME, TITLE, COMMAND)
    parts: list[Part] = [
        text(
            "Every contender is asked the same question in a process of its own, in turns with the others on "
            "the same machine. What it answers is turned into a schedule of ours, so that the same verifier "
            "computes its rate and the same simulator its time. Two times: a whole process that asks once / "
            "a call in a process that has answered before; below 1× ours the other one is faster. TACOS is "
            "compiled and is called once.",
            tone="quiet",
        ),
    ]
    drawn = _chart(document)
    if drawn:
        note = "Whole processes, logarithmic. Blue: ours. Grey: each peer that answered."
        parts.append(Picture(drawn, "Time to answer", note))
    parts += [table(document), all_rows(_COLUMNS, document.rows)]
    return Section(
        NAME, TITLE, "measured; rates exact, times of schedules simulated", tuple(parts), (document,)
    )


def case(row: Row) -> str:
    """The question."""
    return f"{word(row, 'title', 'topology')}, {word(row, 'collective')}"


def contender(row: Row) -> str:
    """Who answered, without which of its answers it is."""
    return word(row, "method").partition(" (")[0]


def table(document: Document) -> Table:
    """A line per question, a column per contender: how long its best answer took, and how good it is."""
    names = sorted(dict.fromkeys(map(contender, document.rows)), key=lambda name: not is_ours(name))
    lines = []
    for name, rows in grouped(document.rows, case).items():
        answers = grouped(rows, contender)
        lines.append((Cell(name), *(_answer(answers.get(who, [])) for who in names)))
    return Table(("question", *names), tuple(lines))


def _answer(rows: Sequence[Row]) -> Cell:
    if not rows:
        return Cell("")
    best = max(rows, key=lambda row: figure(row, "share_of_optimum") or 0.0)
    taken, share, verdict = figure(best, "seconds"), figure(best, "share_of_optimum"), word(best, "verdict")
    if share is None:
        return Cell(verdict if taken is None else f"{verdict}, {seconds(taken)}", taken, "quiet")
    said = [seconds(taken), f"{percent(share)} of the limit"]
    if (call := figure(best, "call_seconds")) is not None:
        said[0] += f" / {seconds(call)}"
    ratios = [figure(best, "times_ours"), figure(best, "call_times_ours")]
    if ratios[0] is not None:
        said[0] += f" ({' / '.join(map(times, ratios))} ours)"
    if (trees := figure(best, "trees")) is not None:
        said.append(plural(int(trees), "tree"))
    elif (steps := figure(best, "steps")) is not None:
        said.append(plural(int(steps), "step"))
    if verdict != "found":
        said.append(verdict)
    return Cell(", ".join(said), taken, "ours" if is_ours(best.get("method")) else "")


def _chart(document: Document) -> str:
    dots = []
    for name, rows in grouped(document.rows, case).items():
        found = [row for row in rows if figure(row, "share_of_optimum") is not None]
        taken = {who: figures(answers, "seconds")[:1] for who, answers in grouped(found, contender).items()}
        values: list[tuple[Tone, float]] = [
            ("ours" if is_ours(who) else "base", one)
            for who, times_s in sorted(taken.items(), key=lambda pair: is_ours(pair[0]))
            for one in times_s
        ]
        hint = "; ".join(f"{who} {seconds(one)}" for who, times_s in taken.items() for one in times_s)
        if values:
            dots.append(Dots(name, tuple(values), f"{name}: {hint}"))
    return dot_chart(dots, unit="s", logarithmic=True, label_width=150, description="time to answer")


_COLUMNS: dict[str, Column] = {
    "question": lambda row: Cell(case(row)),
    "contender": method,
    "verdict": words("verdict"),
    ">time": seconds_of("seconds"),
    ">CPU time": seconds_of("cpu_seconds"),
    ">call": seconds_of("call_seconds"),
    ">GB/s": numbers("rate", "algbw"),
    ">of the limit": shares("share_of_optimum"),
    ">simulated, 64 KiB": durations("time_us_64KiB"),
    ">simulated, 64 MiB": durations("time_us_64MiB"),
    ">trees": counts("trees"),
    ">steps": counts("steps"),
    ">runs": counts("runs"),
    "why": words("why"),
}

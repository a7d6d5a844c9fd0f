"""The sections of chunk schedules: whole frontiers beside SCCL's tool, and which solver wins where."""

from __future__ import annotations

from collections.abc import Sequence

from arborcast.bench.page.cells import table_of, words
from arborcast.bench.page.parts import Cell, Part, Section, Table, missing, text
from arborcast.bench.page.results import Document, Row, figure, grouped, word
from arborcast.bench.page.words import DASH, count, listed, plural, seconds

NAME, TITLE = "frontiers", "How long do whole frontiers take?"
COMMAND = "python bench/frontier.py"
SOLVERS = "solvers", "Which solver wins where?"
PEER = "SCCL"


def section(document: Document | None) -> Section:
    """Frontiers of chunk schedules."""
    if document is None:
        return missing(NAME, TITLE, COMMAND)
    parts: list[Part] = [
        text(
            "Best trades between steps and rounds per chunk, (C, S, R); proved: no schedule is better. On "
            "one core, without the cache; SCCL's tool, where shown, ran in turns with ours in the same run.",
            tone="quiet",
        ),
        table(document),
        *_failures(document),
    ]
    return Section(NAME, TITLE, "measured", tuple(parts), (document,))


def _failures(document: Document) -> list[Part]:
    """What the peer said where it failed."""
    failed = [row for row in document.rows if row.get("verdict") == "failed"]
    columns = {"frontier": words("title", "topology"), "its last word": words("why_stopped", "why")}
    return [table_of(columns, failed, folded="Why SCCL's tool failed")] if failed else []


def table(document: Document) -> Table:
    """A line per frontier; the peer's column where it ran."""
    cases = grouped(document.rows, lambda row: word(row, "title", "topology"))
    has_peer = any(row.get("method") == PEER for row in document.rows)
    lines = []
    for title, rows in cases.items():
        ours = next((row for row in rows if row.get("method") != PEER), {})
        peer = next((row for row in rows if row.get("method") == PEER), {})
        lines.append(
            (
                Cell(title),
                Cell(_points(ours)),
                Cell(_proved(ours)),
                Cell(seconds(figure(ours, "call_seconds")), figure(ours, "call_seconds"), "ours"),
                Cell(seconds(figure(ours, "cpu_seconds")), figure(ours, "cpu_seconds")),
                *((_peer(peer),) if has_peer else ()),
            )
        )
    head = ("frontier", "(C, S, R)", "proved", ">call", ">CPU, whole process")
    return Table((*head, "SCCL's tool, CPU, same run") if has_peer else head, tuple(lines))


def _points(row: Row, most: int = 4) -> str:
    points = row.get("points")
    if not isinstance(points, list) or not points:
        return DASH
    if len(points) > most:
        return plural(len(points), "point")
    return " ".join(f"({','.join(map(str, point))})" for point in points if isinstance(point, list))


def _proved(row: Row) -> str:
    proved = row.get("proved")
    if not isinstance(proved, list):
        return DASH
    return "all" if all(proved) else f"{sum(map(bool, proved))} of {len(proved)}"


def _peer(row: Row) -> Cell:
    if not row:
        return Cell("not asked", tone="quiet")
    taken, verdict = figure(row, "cpu_seconds"), row.get("verdict")
    match verdict:
        case "found":
            return Cell(f"{seconds(taken)}, {_points(row)}", taken, "base")
        case "out of time":
            return Cell(
                f"not found in {seconds(figure(row, 'seconds'))} ({seconds(taken)} CPU)", taken, "base"
            )
    return Cell(word(row, "verdict"), taken, "quiet")


def solvers(document: Document | None) -> Section:
    """The same instances by each solver."""
    name, title = SOLVERS
    if document is None:
        return missing(name, title, COMMAND)
    lines = grouped(document.rows, _instance)
    contenders = list(dict.fromkeys(word(row, "solver", "method") for row in document.rows))
    wins = {
        solver: sum(bool(_find(rows, solver).get("wins")) for rows in lines.values()) for solver in contenders
    }
    fastest = sorted((solver for solver in contenders if wins[solver]), key=lambda solver: -wins[solver])
    parts: list[Part] = [
        text(
            "One (C, S, R) each, as it is and under a group of symmetries: a schedule, or a proof that there "
            "is none. The time is that of writing the instance and solving it, without imports.",
            tone="quiet",
        ),
        text(
            f"Of {plural(len(lines), 'line')} ",
            *(listed([f"{solver} is fastest on {wins[solver]}" for solver in fastest]),),
            ".",
        ),
        _solver_table(lines, contenders),
    ]
    return Section(name, title, "measured", tuple(parts), (document,))


def _instance(row: Row) -> tuple[str, str, bool]:
    point = "(" + ",".join(count(figure(row, name)) for name in ("chunks", "steps", "rounds")) + ")"
    return word(row, "title", "topology"), point, bool(row.get("symmetric"))


def _find(rows: Sequence[Row], solver: str) -> Row:
    return next((row for row in rows if word(row, "solver", "method") == solver), {})


def _solver_table(lines: dict[tuple[str, str, bool], list[Row]], contenders: Sequence[str]) -> Table:
    drawn = []
    for (title, point, symmetric), rows in lines.items():
        decided = next((row for row in rows if row.get("verdict") != "out of time"), rows[0])
        group = count(figure(decided, "group")) if symmetric else "none"
        cells = [_time(_find(rows, solver)) for solver in contenders]
        drawn.append((Cell(title), Cell(point), Cell(word(decided, "verdict")), Cell(group), *cells))
    head = ("instance", "(C, S, R)", "answer", "symmetries", *(f">{solver}" for solver in contenders))
    return Table(head, tuple(drawn))


def _time(row: Row) -> Cell:
    if not row:
        return Cell("")
    taken = figure(row, "seconds")
    if row.get("verdict") == "out of time":
        limit = figure(row, "limit_s", "seconds")
        return Cell(f"over {seconds(limit)}", limit, "quiet")
    return Cell(seconds(taken), taken, "ours" if row.get("wins") else "")

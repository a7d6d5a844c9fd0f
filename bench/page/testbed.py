"""The section of real links: shares of the proven limit on emulated networks, targets met and missed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.page.cells import (
    Column,
    all_rows,
    counts,
    durations,
    method,
    numbers,
    shares,
    sizes,
    speed_ups,
    table_of,
    words,
)
from bench.page.graph import delivery, graph, links_of
from bench.page.parts import Bar, Bars, Cell, Part, Picture, Section, Table, grid, missing, text
from bench.page.results import Document, Row, figure, figures, grouped, is_ours, word
from bench.page.words import duration, percent, plural, size, times

NAME, TITLE, COMMAND = "links", "How close to the limit, on links that are real?", "python bench/testbed.py"
CHOSEN, RING = "selection", "ring"
LARGE = 8 << 20
"""Bytes from which on the targets count."""


def section(document: Document | None) -> Section:
    """What the testbed measured."""
    if document is None:
        return missing(NAME, TITLE, COMMAND)
    rows = [row for row in document.rows if figure(row, "time_us") is not None]
    parts: list[Part] = [
        text(
            "Real processes, real TCP, one rate-limited pair of network devices per link of the topology. "
            "The limit is what no schedule can pass at the rates that these links delivered in the same run, "
            "less what links carry at once after a pause. Each line is what "
            "the process group chooses by itself at the largest size, or the fastest of ours where that was "
            "not measured, beside unmodified gloo, whose ring follows the numbers of the ranks, and the best "
            "single ring.",
            tone="quiet",
        ),
        table(document),
        *_targets(document),
        *_busy(rows),
        grid(_card(document, topology, found) for topology, found in grouped(rows, _topology).items()),
        all_rows(_COLUMNS, rows),
    ]
    return Section(NAME, TITLE, "measured on emulated links", tuple(parts), (document,))


def _topology(row: Row) -> str:
    return word(row, "topology")


def _case(row: Row) -> tuple[str, str]:
    return word(row, "topology"), word(row, "collective")


def at_largest(rows: Sequence[Row]) -> list[Row]:
    """The rows of the largest size."""
    largest = max(figures(rows, "bytes"), default=None)
    return [row for row in rows if figure(row, "bytes") == largest]


def _at_fullest(rows: Sequence[Row]) -> list[Row]:
    """The rows of the size at which most methods ran; slow ones are spared the largest sizes."""
    by_size = grouped(rows, lambda row: figure(row, "bytes") or 0.0)
    return by_size[max(by_size, key=lambda at: (at >= LARGE, len(by_size[at]), at))] if by_size else []


def row_of_ours(rows: Sequence[Row]) -> Row | None:
    """What the process group chooses; the fastest of ours where that was not measured.

    The fastest of several methods is known only after all have run: as a claim it would flatter us.
    """
    ours = [row for row in rows if is_ours(row.get("method")) and figure(row, "time_us") is not None]
    chosen = [row for row in ours if row.get("method") == CHOSEN]
    return min(chosen or ours, key=lambda row: figure(row, "time_us") or 0.0, default=None)


def rows_of_ours(document: Document | None) -> list[Row]:
    """That of each topology, collective and size."""
    return [row for found in _by_size(document) if (row := row_of_ours(found)) is not None]


def is_limited(row: Row) -> bool:
    """Whether the processors, not the links, may have been the limit."""
    return row.get("cpu_limited") is True


def without_limited(document: Document | None) -> tuple[list[Row], int]:
    """Those of `rows_of_ours` that are about links, and how many are not.

    A ring that the processors slowed down would flatter us as much as a row of ours would do us wrong.
    """
    found = [(row_of_ours(rows), rows) for rows in _by_size(document)]
    about_links = [
        row
        for row, rows in found
        if row is not None
        and not is_limited(row)
        and not any(is_limited(other) for other in rows if other.get("method") == RING)
    ]
    return about_links, sum(row is not None for row, _ in found) - len(about_links)


def _by_size(document: Document | None) -> list[list[Row]]:
    rows = document.rows if document else []
    return list(grouped(rows, lambda row: (*_case(row), figure(row, "bytes"))).values())


def table(document: Document) -> Table:
    """A line per topology and collective at its largest size."""
    cases = grouped(document.rows, _case).values()
    best = [row for found in cases if (row := row_of_ours(at_largest(found))) is not None]
    return table_of(
        {
            "topology": words("topology"),
            "collective": words("collective"),
            ">size": sizes,
            "ours": words("method"),
            ">time": durations("time_us"),
            ">of the limit": _share,
            ">over the best ring": speed_ups("speed_up_over_ring"),
            ">over gloo": speed_ups("speed_up_over_gloo"),
        },
        best,
    )


def _share(row: Row) -> Cell:
    """With a star where the processors may have been the limit."""
    share = figure(row, "share_of_optimum")
    return Cell(percent(share) + (" *" if is_limited(row) else ""), share, "ours")


def targets_of(document: Document | None) -> list[dict[str, Any]]:
    """What was aimed for, where it was measured."""
    listed = document.get("targets") if document else None
    return [target for target in listed or [] if isinstance(target, dict)]


def _targets(document: Document) -> list[Part]:
    targets = targets_of(document)
    if not targets:
        return []
    met = sum(target.get("met") is True for target in targets)
    unknown = sum(not isinstance(target.get("met"), bool) for target in targets)
    title = f"{met} of {plural(len(targets), 'target')} met" + (
        f", {unknown} not measured" if unknown else ""
    )
    columns: dict[str, Column] = {
        "topology": words("topology"),
        "collective": words("collective"),
        ">size": sizes,
        "measure": words("what", "measure"),
        ">target": lambda target: _aim(figure(target, "target")),
        ">measured": lambda target: _aim(figure(target, "measured")),
        "verdict": _verdict,
    }
    return [table_of(columns, targets, title)]


def _busy(rows: Sequence[Row]) -> list[Part]:
    """What the testbed itself says against its figures."""
    limited = sum(map(is_limited, rows))
    if not limited:
        return []
    share = f"In {limited} of {plural(len(rows), 'row')} "
    return [
        text(
            share,
            "the processors, not the links, may have been the limit; such figures and bars have a star, "
            "and the headline leaves them out.",
            tone="bad",
        )
    ]


def _aim(value: float | None) -> Cell:
    """Targets up to 1 are shares of the limit, larger ones are speed-ups."""
    return Cell(percent(value) if value is None or value <= 1.2 else times(value), value)


def _verdict(target: Row) -> Cell:
    match target.get("met"):
        case True:
            return Cell("met", tone="good")
        case False:
            return Cell("missed", tone="bad")
    return Cell("not measured", tone="quiet")


def _card(document: Document, topology: str, rows: Sequence[Row]) -> list[Part]:
    """A topology's picture, and bars of the share of the limit that each method reached."""
    links = links_of(document.get("links"), topology)
    parts: list[Part] = []
    drawn = graph(links, f"the links of {topology}")
    parts.append(Picture(drawn, topology, delivery(links)) if drawn else text(topology))
    for collective, found in grouped(rows, lambda row: word(row, "collective")).items():
        shown = [row for row in _at_fullest(found) if figure(row, "share_of_optimum") is not None]
        if not shown:
            continue
        shown.sort(key=lambda row: (not is_ours(row.get("method")), -(figure(row, "share_of_optimum") or 0)))
        title = f"{collective}, {size(figure(shown[0], 'bytes'))}: share of the limit"
        parts.append(Bars(title, tuple(map(_bar, shown))))
    return parts


def _bar(row: Row) -> Bar:
    share = figure(row, "share_of_optimum") or 0.0
    busy = "; the processors may have been the limit" if is_limited(row) else ""
    hint = f"{duration(figure(row, 'time_us'))}, spread {duration(figure(row, 'spread'))}, {_runs(row)}{busy}"
    method = word(row, "method")
    mark = " *" if busy else ""
    return Bar(f"{method}{mark}", share, percent(share), "ours" if is_ours(method) else "base", hint)


def _runs(row: Row) -> str:
    runs = figure(row, "runs")
    return "runs not noted" if runs is None else plural(int(runs), "run")


_COLUMNS: dict[str, Column] = {
    "topology": words("topology"),
    "collective": words("collective"),
    "method": method,
    ">size": sizes,
    ">time": durations("time_us"),
    ">spread": durations("spread"),
    ">algbw GB/s": numbers("algbw"),
    ">busbw GB/s": numbers("busbw"),
    ">of the limit, delivered": shares("share_of_optimum"),
    ">of the limit, nominal": shares("share_of_nominal"),
    ">over the best ring": speed_ups("speed_up_over_ring"),
    ">over gloo": speed_ups("speed_up_over_gloo"),
    ">runs": counts("runs"),
    ">from bursts, at most": shares("burst_share"),
    "limited by": lambda row: Cell("processors?", tone="bad") if is_limited(row) else Cell(""),
}

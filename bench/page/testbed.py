"""The section of real links: shares of the proven limit on emulated networks, targets met and missed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from arborcast.bench.contest.cases import SERVICES, column, worst_column
from arborcast.bench.page.cells import (
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
from arborcast.bench.page.graph import delivery, graph, links_of
from arborcast.bench.page.parts import Bar, Bars, Cell, Part, Picture, Section, Table, grid, missing, text
from arborcast.bench.page.results import Document, Row, figure, figures, grouped, is_ours, word
from arborcast.bench.page.targets import tally
from arborcast.bench.page.words import DASH, duration, percent, plural, size, times

NAME, TITLE, COMMAND = "links", "How close to the limit, on links that are real?", "python bench/testbed.py"
CHOSEN = "selection"
PATTERNS = ("ring", "multiring", "binary-tree", "halving-doubling")
LARGE = 8 << 20
"""Bytes from which on the targets count."""

MIDDLE_AND_ENDS = ("median", "least", "most")

FAR_OFF = 0.05
"""Of a simulated time, what is marked."""


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
            "not measured, beside the fastest baseline of the case (named in brackets; gloo's ring follows "
            "the numbers of the ranks) and unmodified gloo.",
            tone="quiet",
        ),
        table(document),
        *_targets(document),
        *_services(rows),
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


@dataclass(frozen=True)
class Case:
    """A topology, collective and size on which ours ran.

    Attributes:
        ours: see `row_of_ours`.
        baselines: the rows of all others.
    """

    ours: Row
    baselines: tuple[Row, ...]

    @property
    def over_best(self) -> float | None:
        """The speed-up of ours over the fastest baseline; None where none was measured."""
        ours, times_us = figure(self.ours, "time_us"), figures(self.baselines, "time_us")
        return min(times_us) / ours if ours and times_us else None

    @property
    def chose_baseline(self) -> bool:
        """Whether what serves ours is itself one of the classical patterns."""
        return str(self.ours.get("served_by") or "").startswith(PATTERNS)

    @property
    def is_limited(self) -> bool:
        """Whether the processors may have been the limit of ours or of the fastest baseline."""
        fastest = min(self.baselines, key=lambda row: figure(row, "time_us") or 0.0, default={})
        return is_limited(self.ours) or is_limited(fastest)


def is_limited(row: Row) -> bool:
    """Whether the processors, not the links, may have been the limit."""
    return row.get("cpu_limited") is True


def cases(document: Document | None) -> list[Case]:
    """Each topology, collective and size on which ours ran."""
    found = []
    for rows in _by_size(document):
        ours = row_of_ours(rows)
        if ours is not None:
            timed = [row for row in rows if figure(row, "time_us") is not None]
            found.append(Case(ours, tuple(row for row in timed if not is_ours(row.get("method")))))
    return found


def cases_about_links(document: Document | None) -> tuple[list[Case], int]:
    """Those in which links, not processors, were the limit, and how many others there are.

    A baseline that the processors slowed down would flatter us as much as a row of ours would do us wrong.
    """
    found = cases(document)
    about_links = [case for case in found if not case.is_limited]
    return about_links, len(found) - len(about_links)


def _by_size(document: Document | None) -> list[list[Row]]:
    rows = document.rows if document else []
    return list(grouped(rows, lambda row: (*_case(row), figure(row, "bytes"))).values())


def table(document: Document) -> Table:
    """A line per topology and collective at its largest size."""
    columns: dict[str, Callable[[Case], Cell]] = {
        "topology": lambda case: Cell(word(case.ours, "topology")),
        "collective": lambda case: Cell(word(case.ours, "collective")),
        ">size": lambda case: sizes(case.ours),
        "ours": lambda case: Cell(word(case.ours, "method")),
        ">time": lambda case: durations("time_us")(case.ours),
        ">of the limit": lambda case: _share(case.ours),
        ">over the best baseline": _over_best,
        ">over gloo": lambda case: speed_ups("speed_up_over_gloo")(case.ours),
    }
    largest = grouped(cases(document), lambda case: _case(case.ours)).values()
    lines = [max(alike, key=lambda case: figure(case.ours, "bytes") or 0.0) for alike in largest]
    return Table(tuple(columns), tuple(tuple(cell(case) for cell in columns.values()) for case in lines))


def _over_best(case: Case) -> Cell:
    """The speed-up, with the name of the baseline that is the fastest here."""
    ratio = case.over_best
    if ratio is None:
        return Cell(DASH)
    fastest = min(case.baselines, key=lambda row: figure(row, "time_us") or 0.0)
    return Cell(f"{times(ratio)} ({word(fastest, 'method')})", ratio, "bad" if ratio < 1 else "")


def _share(row: Row) -> Cell:
    """With a star where the processors may have been the limit."""
    share = figure(row, "share_of_optimum")
    return Cell(percent(share) + (" *" if is_limited(row) else ""), share, "ours")


def _targets(document: Document) -> list[Part]:
    targets = [target for target in document.get("targets") or [] if isinstance(target, dict)]
    if not targets:
        return []
    columns: dict[str, Column] = {
        "topology": words("topology"),
        "collective": words("collective"),
        ">size": sizes,
        "measure": words("what", "measure"),
        ">target": lambda target: _aim(figure(target, "target")),
        ">measured": lambda target: _aim(figure(target, "measured")),
        "verdict": _verdict,
    }
    return [table_of(columns, targets, tally(document).words)]


def _services(rows: Sequence[Row]) -> list[Part]:
    """Measured over simulated time under each order of service, for the sizes that the targets count."""
    large = [
        row
        for row in rows
        if (figure(row, "bytes") or 0) >= LARGE
        and all(figure(row, column(service)) for service in SERVICES)
        and not is_limited(row)
    ]
    if not large:
        return []
    lines = [
        (topology, [_ratios(found, service) for service in SERVICES])
        for topology, found in [*grouped(large, _topology).items(), ("all", large)]
    ]
    table = Table(
        (
            "topology",
            *(f">{service}: {what}" for service in SERVICES for what in ("median", "least", "most")),
        ),
        tuple(
            (
                Cell(topology),
                *(
                    Cell(percent(ratio), ratio, "bad" if abs(ratio - 1) > FAR_OFF else "")
                    for ratios in by_service
                    for ratio in (statistics.median(ratios), min(ratios), max(ratios))
                ),
            )
            for topology, by_service in lines
        ),
        "Measured time, of the time simulated at delivered rates",
    )
    sentence = text(
        f"The simulator's answer rests on the order in which links serve what waits. In "
        f"{plural(len(large), 'row')} from 8 MiB on: priority is the order that schedules are planned with; "
        "fifo is what would happen if ranks handed over all that is ready; engine is what the process group "
        "does, which sends to each rank in the planned order and not far ahead of what comes in. Figures "
        f"that are off by more than {percent(FAR_OFF)} are marked.",
        tone="quiet",
    )
    worst = [row for row in large if figure(row, worst_column("engine")) is not None]
    return [sentence, table, *([_worst_orders(worst)] if worst else [])]


def _ratios(rows: Sequence[Row], service: str) -> list[float]:
    return [(figure(row, "time_us") or 0.0) / (figure(row, column(service)) or 1.0) for row in rows]


def _worst_orders(rows: Sequence[Row]) -> Table:
    """What the process group chooses, with the slowest of many random orders."""

    def over_planned(name: str) -> Column:
        def cell(row: Row) -> Cell:
            ratio = (figure(row, name) or 0.0) / (figure(row, column("priority")) or 1.0)
            return Cell(percent(ratio), ratio, "bad" if ratio > 1 + FAR_OFF else "")

        return cell

    return table_of(
        {
            "topology": words("topology"),
            "collective": words("collective"),
            ">size": sizes,
            ">fifo": over_planned(column("fifo")),
            ">slowest random order": over_planned(worst_column("random")),
            ">engine": over_planned(column("engine")),
            ">slowest order of the engine": over_planned(worst_column("engine")),
        },
        rows,
        "Simulated time of what the process group chooses, of the time with priority",
    )


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

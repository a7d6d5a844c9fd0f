"""Real links: shares of the proven limit on emulated networks, targets met and missed, the links."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pandas as pd

from arborcast.bench.clusters.words import EVEN
from arborcast.bench.contest.cases import SERVICES
from arborcast.bench.contest.cases import column as simulated
from arborcast.bench.contest.cases import worst_column as worst_simulated
from arborcast.bench.page.charts import Graph
from arborcast.bench.page.parts import (
    Bars,
    Cell,
    Column,
    Part,
    Picture,
    Section,
    Sentence,
    Strong,
    Table,
    all_rows,
    cell,
    columns,
    grid,
    lines,
    speed_up,
    table,
    text,
    verdict,
)
from arborcast.bench.page.results import (
    Document,
    Row,
    frame,
    groups,
    is_ours,
    number,
    ours_among,
    records,
    span,
)
from arborcast.bench.page.targets import tally
from arborcast.bench.page.words import digits, duration, listed, percent, plural, size, times
from arborcast.synth.baselines import BASELINES
from arborcast.synth.pictures.placement import place
from arborcast.synth.topology import Link, Topology

CHOSEN = "selection"
LARGE = 8 << 20
"""Bytes from which on the targets count."""

FAR_OFF = 0.05
"""Of a simulated time, what is marked."""

LEAST_DELIVERED = 0.9
"""Share of its nominal rate below which a link is drawn as one that did not keep its promise."""


# --------------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """A topology, collective and size on which ours ran.

    Attributes:
        ours: what the process group chooses; the fastest of ours where that was not measured. The fastest of
            several methods is known only after all have run: as a claim it would flatter us.
        baselines: all others that ran.
        missing: by name, the other baselines: why each did not run.
        is_whole: whether every baseline ran, or is known to have no schedule here.
    """

    ours: Row
    baselines: tuple[Row, ...]
    missing: Mapping[str, str] = field(default_factory=dict)
    is_whole: bool = True

    @property
    def over_best(self) -> float:
        """The speed-up of ours over the fastest baseline; NaN where none was measured."""
        return self.fastest[0].time_us / self.ours.time_us if self.fastest else math.nan

    @property
    def fastest(self) -> list[Row]:
        """The baselines, the fastest first."""
        return sorted(self.baselines, key=lambda row: float(row.time_us))

    @property
    def chose_baseline(self) -> bool:
        """Whether what serves ours is itself one of the classical patterns."""
        return str(self.ours.served_by).startswith(BASELINES)

    @property
    def is_limited(self) -> bool:
        """Whether the processors may have been the limit of ours or of any baseline."""
        return any(row.cpu_limited is True for row in (self.ours, *self.baselines))

    def over(self, method: str) -> float:
        """The speed-up of ours over a baseline; NaN where it did not run."""
        return next((r.time_us / self.ours.time_us for r in self.baselines if r.method == method), math.nan)


def cases(document: Document | None) -> list[Case]:
    """Each topology, collective and size on which ours ran."""
    if document is None:
        return []
    timed, found = _timed(document), []
    rivals = document.get("rivals") or ()  # of old results nobody knows: none of their cases counts
    absent = {
        (each.get("topology"), each.get("collective"), each.get("method")): each
        for each in document.get("unavailable") or ()
    }
    for (topology, collective, _), rows in groups(timed, "topology", "collective", "bytes"):
        listed = records(rows)
        ours = [row for row in listed if is_ours(row.method)]
        chosen = [row for row in ours if row.method == CHOSEN]
        if ours:
            best = min(chosen or ours, key=lambda row: float(row.time_us))
            others = tuple(row for row in listed if not is_ours(row.method))
            missing = {
                name: absent.get((topology, collective, name), {})
                for name in rivals
                if name not in {row.method for row in others}
            }
            why = {name: str(each.get("why", "did not run")) for name, each in missing.items()}
            is_whole = bool(rivals and others) and all(
                each.get("ruled_out") is True for each in missing.values()
            )
            found.append(Case(best, others, why, is_whole))
    return found


def _timed(document: Document) -> pd.DataFrame:
    return document.rows[document.rows["time_us"].notna()]


def cases_that_count(document: Document | None) -> tuple[list[Case], int, int]:
    """Those that a headline may be about, and how many are left out: by a missing baseline, by processors.

    A baseline that did not run, or that the processors slowed down, would flatter us.
    """
    found = cases(document)
    whole = [case for case in found if case.is_whole]
    about_links = [case for case in whole if not case.is_limited]
    return about_links, len(found) - len(whole), len(whole) - len(about_links)


def summary(document: Document) -> Table:
    """A line per case."""

    def of_ours(specs: str) -> dict[str, Column]:
        def ours(how: Column) -> Column:
            return lambda case: how(case.ours)

        return {head: ours(how) for head, how in columns(specs).items()}

    return table(
        {
            **of_ours("topology | collective | >size: bytes | ours: method | >time: time_us"),
            ">of the limit": lambda case: Cell(  # with a star where the processors may have been the limit
                percent(case.ours.share_of_optimum) + (" *" if case.ours.cpu_limited is True else ""),
                case.ours.share_of_optimum,
                "ours",
            ),
            ">over the best baseline": _over_best,
            ">over multiring": lambda case: speed_up(case.over("multiring")),
            ">over gloo": lambda case: speed_up(case.over("gloo")),
            "left out of the headline": lambda case: Cell(
                "" if case.is_whole else "; ".join(f"{name}: {why}" for name, why in case.missing.items())
            ),
        },
        cases(document),
    )


def _over_best(case: Case) -> Cell:
    """The speed-up, with the name of the baseline that is the fastest here."""
    found = speed_up(case.over_best)
    named = f"{found.text} ({case.fastest[0].method})" if case.baselines else found.text
    return Cell(named, found.order, found.tone)


# -------------------------------------------------------------------------------------------------- answer


def _answer(document: Document) -> Iterator[Part]:
    rows = _timed(document)
    yield text(*best_of_each_case(document))
    yield summary(document)
    targets = frame(document.get("targets"))
    if len(targets):
        yield table(_TARGETS, targets, tally(document).words)
    absent = frame(document.get("unavailable"))
    if len(absent):
        yield table(columns("topology | collective | method | why"), absent, folded="Did not run")
    yield from _services(rows)
    limited = sum(rows["cpu_limited"].eq(True))
    if limited:
        yield text(
            f"In {limited} of {plural(len(rows), 'row')} the processors, not the links, may have been the "
            "limit; such figures and bars have a star, and the headline leaves them out.",
            tone="bad",
        )
    yield grid(_card(document, topology, found) for topology, found in groups(rows, "topology"))
    yield all_rows(_COLUMNS, rows)


def best_of_each_case(document: Document | None) -> Sentence:
    """What the process group chooses, beside the fastest baseline of each case in the same run."""
    found, incomplete, limited = cases_that_count(document)
    if not found:
        return ("How much faster than baselines on real links is not measured yet.",)
    ratios = [case.over_best for case in found]
    lost = sorted((case for case in found if case.over_best < 1 - EVEN), key=lambda case: case.over_best)
    slower, faster = len(lost), sum(ratio > 1 + EVEN for ratio in ratios)
    kinds = listed(list(dict.fromkeys(str(case.ours.collective) for case in found)))
    chosen = sum(case.chose_baseline for case in found)
    names = list(dict.fromkeys(row.method for case in found for row in case.baselines))
    least, most = span(case.ours.bytes for case in found)
    left_out = [
        f"{plural(count, 'more case')} left out, {why}"
        for count, why in (
            (incomplete, "where a baseline did not run"),
            (limited, "where the processors may be the limit"),
        )
        if count
    ]
    only_chosen = all(case.ours.method == CHOSEN for case in found)
    alone = (
        f" Over {method} alone: {_range([case.over(method) for case in found if case.over(method) > 0])}."
        for method in ("multiring", "gloo")
        if method in names
    )
    return (
        f"On emulated links {'what the process group chooses is' if only_chosen else 'our schedules are'} ",
        Strong(f"{times(pd.Series(ratios).median())} as fast"),
        f" as the best baseline of each case (of {listed(names)}; the fastest of the same run) "
        f"in the median of {plural(len(found), 'case')} of {kinds} ({times(min(ratios))} to "
        f"{times(max(ratios))}, "
        f"{size(least)} to {size(most)}): faster in {faster}, even within {percent(EVEN)} in "
        f"{len(ratios) - faster - slower}, slower in {slower}"
        f"{f' ({named})' if (named := '; '.join(map(_lost, lost))) else ''}"
        f"{f'; in {chosen} of them what it chooses is a baseline' if chosen else ''}"
        f"{''.join(f'; {each}' for each in left_out)}.",
        *alone,
    )


def _lost(case: Case) -> str:
    ours, best = case.ours, case.fastest[0].method
    return (
        f"{ours.collective} of {size(ours.bytes)} on {ours.topology}, {times(case.over_best)} beside {best}"
    )


def _range(ratios: list[float]) -> str:
    found = pd.Series(ratios)
    return (
        f"{times(found.median())} in the median of {plural(len(found), 'case')} "
        f"({times(found.min())} to {times(found.max())})"
    )


def _aim(name: str) -> Column:
    """Targets up to 1 are shares of the limit, larger ones are speed-ups."""
    return lambda row: cell(times if getattr(row, name) > 1.2 else percent, getattr(row, name))


_TARGETS: dict[str, Column] = {
    **columns("topology | collective | >size: bytes | measure: what"),
    ">target": _aim("target"),
    ">measured": _aim("measured"),
    "verdict": lambda row: (
        verdict("met" if row.met else "missed", row.met)
        if isinstance(row.met, bool)
        else Cell("not measured", tone="quiet")
    ),
}


def _services(rows: pd.DataFrame) -> Iterator[Part]:
    """Measured over simulated time under each order of service, for the sizes that the targets count."""
    names = [simulated(service) for service in SERVICES]
    large = rows[(rows["bytes"] >= LARGE) & (rows[names] > 0).all(axis=1) & rows["cpu_limited"].ne(True)]
    if not len(large):
        return
    yield text(
        "The simulator's answer rests on the order in which links serve what waits. In "
        f"{plural(len(large), 'row')} from 8 MiB on: priority is the order that schedules are planned with; "
        "fifo is what would happen if ranks handed over all that is ready; engine is what the process group "
        "does, which sends to each rank in the planned order and not far ahead of what comes in. Figures "
        f"that are off by more than {percent(FAR_OFF)} are marked.",
        tone="quiet",
    )
    ratios = large[names].rdiv(large["time_us"], axis=0)
    rows_of = [*ratios.groupby(large["topology"], sort=False), ("all", ratios)]
    yield lines(
        ("topology", *(f">{service}: {end}" for service in SERVICES for end in ("median", "least", "most"))),
        (
            (
                str(topology),
                *(
                    cell(percent, ratio, "bad" if abs(ratio - 1) > FAR_OFF else "")
                    for name in names
                    for ratio in (found[name].median(), found[name].min(), found[name].max())
                ),
            )
            for topology, found in rows_of
        ),
        "Measured time, of the time simulated at delivered rates",
    )
    worst = large[large[worst_simulated("engine")].notna()]
    if len(worst):
        yield table(
            {
                **columns("topology | collective | >size: bytes"),
                ">fifo": _over_planned(simulated("fifo")),
                ">slowest random order": _over_planned(worst_simulated("random")),
                ">engine": _over_planned(simulated("engine")),
                ">slowest order of the engine": _over_planned(worst_simulated("engine")),
            },
            worst,
            "Simulated time of what the process group chooses, of the time with priority",
        )


def _over_planned(name: str) -> Column:
    def shown(row: Row) -> Cell:
        ratio = getattr(row, name) / getattr(row, simulated("priority"))
        return cell(percent, ratio, "bad" if ratio > 1 + FAR_OFF else "")

    return shown


def _card(document: Document, topology: str, rows: pd.DataFrame) -> Iterator[Part]:
    """A topology's picture, and bars of the share of the limit that each method reached."""
    links = links_of(document.get("links"), topology)
    drawn = graph(links, f"the links of {topology}")
    yield Picture(drawn, topology, delivery(links)) if drawn.places else text(topology)
    for collective, found in groups(rows, "collective"):
        # Slow methods are spared the largest sizes: what is shown is the size at which most of them ran.
        by_size = dict(groups(found, "bytes"))
        fullest = by_size[max(by_size, key=lambda at: (at >= LARGE, len(by_size[at]), at))]
        shown = fullest[fullest["share_of_optimum"].notna()].sort_values(
            "share_of_optimum", ascending=False, kind="stable"
        )
        ours = ours_among(shown)
        ranked = records(pd.concat([shown[ours], shown[~ours]]))
        if ranked:
            title = f"{collective}, {size(ranked[0].bytes)}: share of the limit"
            yield Bars(title, tuple(map(_bar, ranked)))


def _bar(row: Row) -> Any:
    busy = row.cpu_limited is True
    runs = plural(row.runs, "run") if row.runs > 0 else "runs not noted"
    hint = f"{duration(row.time_us)}, spread {duration(row.spread)}, {runs}"
    return (
        row.method + (" *" if busy else ""),
        row.share_of_optimum,
        percent(row.share_of_optimum),
        "ours" if is_ours(row.method) else "base",
        hint + ("; the processors may have been the limit" if busy else ""),
    )


_COLUMNS: dict[str, Column] = {
    **columns(
        "topology | collective | method | >size: bytes | >time: time_us | >spread | "
        ">algbw GB/s: algbw | >busbw GB/s: busbw | >of the limit, delivered: share_of_optimum | "
        ">of the limit, nominal: share_of_nominal | >over the best ring: speed_up_over_ring | "
        ">over gloo: speed_up_over_gloo | >runs | >from bursts, at most: burst_share"
    ),
    "limited by": lambda row: Cell("processors?", tone="bad") if row.cpu_limited is True else Cell(""),
}


# --------------------------------------------------------------------------------------------------- links


@dataclass(frozen=True, slots=True)
class Delivered:
    """A link as it was measured, in Mbit/s; NaN where that was not.

    Attributes:
        src: where it starts: the number of a rank, or the name of a switch.
        dst: where it ends.
        nominal: what it was set to.
        alone: what it delivered with all others idle.
        together: what it delivered with all others busy.
    """

    src: int | str
    dst: int | str
    nominal: float
    alone: float
    together: float

    @property
    def share(self) -> float:
        """The least that it delivered, of what it was set to."""
        return span((self.alone / self.nominal, self.together / self.nominal))[0]

    def __str__(self) -> str:
        rates = ((self.nominal, "nominal"), (self.alone, "alone"), (self.together, "with all others"))
        told = ", ".join(f"{digits(rate)} Mbit/s {when}" for rate, when in rates if not math.isnan(rate))
        return f"{self.src} to {self.dst}: {told or 'not measured'}"


def links_of(listed: Any, topology: str) -> list[Delivered]:
    """The links of a topology from a results file's `links`; those that lack an end are left out."""
    rows = listed.get(topology) if isinstance(listed, dict) else None
    found = []
    for row in rows if isinstance(rows, list) else ():
        src, dst = row.get("from"), row.get("to")
        if isinstance(src, int | str) and isinstance(dst, int | str):
            rates = (number(row.get(f"{part}_mbit")) for part in ("nominal", "alone", "together"))
            found.append(Delivered(src, dst, *rates))
    return found


def graph(links: list[Delivered], description: str) -> Graph:
    """The topology's picture; a link is red that delivered less than `LEAST_DELIVERED` of its rate."""
    vertices = sorted(
        {end for link in links for end in (link.src, link.dst)}, key=lambda end: (isinstance(end, str), end)
    )
    ranks = sum(isinstance(vertex, int) for vertex in vertices)
    if not ranks:
        return Graph(description, (), ())
    index = {vertex: at for at, vertex in enumerate(vertices)}
    # Only where the vertices go is asked of it; names are drawn from the results.
    topology = Topology.build(
        "drawn",
        ranks,
        [Link(index[link.src], index[link.dst], Fraction(1)) for link in links if link.src != link.dst],
        [f"switch {at}" for at in range(len(vertices) - ranks)],
    )
    points = place(topology).points
    widest = span(link.nominal for link in links)[1]
    pairs: dict[frozenset[int | str], list[Delivered]] = {}
    for link in links:
        pairs.setdefault(frozenset((link.src, link.dst)), []).append(link)
    return Graph(
        description,
        tuple((vertex, points[at]) for vertex, at in index.items()),
        tuple(
            (
                pair[0].src,
                pair[0].dst,
                1.0 + 2.6 * math.sqrt(nominal / widest)
                if (nominal := span(x.nominal for x in pair)[1])
                else 1.5,
                any(link.share < LEAST_DELIVERED for link in pair),
                "; ".join(map(str, pair)),
            )
            for pair in pairs.values()
        ),
    )


def delivery(links: list[Delivered]) -> str:
    """In one line what the links delivered, alone and together, as a share of what they were set to."""
    slowest, fastest = span(link.nominal for link in links)
    told = []
    for name, (low, high) in {
        "alone": span(link.alone / link.nominal for link in links),
        "all at once": span(link.together / link.nominal for link in links),
    }.items():
        if not math.isnan(low):
            told.append(f"{name} {_between(percent(low), percent(high))}")
    if math.isnan(slowest):
        return ""
    delivered = f"; delivered {', '.join(told)}" if told else ""
    return f"Links of {_between(digits(slowest), digits(fastest))} Mbit/s{delivered}."


def _between(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


SECTION = Section(
    "testbed",
    "links",
    "How close to the limit, on links that are real?",
    "measured on emulated links",
    "python bench/testbed.py",
    "Real processes, real TCP, one rate-limited pair of network devices per link of the topology. "
    "The limit is what no schedule can pass at the rates that these links delivered in the same run, "
    "less what links carry at once after a pause. Each line is what "
    "the process group chooses by itself, or the fastest of ours where that was "
    "not measured, beside the fastest baseline of the case (named in brackets), multiring and unmodified "
    "gloo, whose ring follows the numbers of the ranks.",
    _answer,
    ("Real processes and TCP on emulated links", summary),
)

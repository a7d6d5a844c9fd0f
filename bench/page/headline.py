"""The answer in a few sentences: what one run of `make headline` measures, and what else the page says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from arborcast.bench.page.contest import CHOSEN, EVEN, Case, cases_that_count
from arborcast.bench.page.results import Document, known, least, middle, most, number, rows_of
from arborcast.bench.page.tables import strong
from arborcast.bench.page.words import listed, percent, plural, seconds, size, times

LARGE = 8 << 20
"""Bytes from which on the limit counts."""

Results = Mapping[str, Document]


def headline(results: Results) -> tuple[str, ...]:
    """Sentences of README, all of one run of `make headline`; what was not measured is said."""
    return *_over_baselines(results.get("testbed")), _close(results.get("testbed")), _synthesis(results)


def more(results: Results) -> tuple[str, ...]:
    """What the page says besides, of benches that take longer or need checkouts of others."""
    beside = _beside_forestcoll(results.get("peers"))
    return (*([beside] if beside else []), _targets(results))


def _over_baselines(document: Document | None) -> tuple[str, ...]:
    """What the process group chooses, beside the fastest baseline of each case; and where it is slower."""
    found, incomplete, limited = cases_that_count(document)
    if document is None or not found:
        return ("How much faster than baselines on real links is not measured yet.",)
    ratios = [case.over_best for case in found]
    lost = sorted((case for case in found if case.over_best < 1 - EVEN), key=lambda case: case.over_best)
    faster = sum(ratio > 1 + EVEN for ratio in ratios)
    kinds = listed(list(dict.fromkeys(case.ours.text("collective") for case in found)))
    chosen = sum(case.chose_baseline for case in found)
    compared = {row.get("method") for case in found for row in case.baselines}
    names = [name for name in dict.fromkeys(row.text("method") for row in document.rows) if name in compared]
    only_chosen = all(case.ours.get("method") == CHOSEN for case in found)
    left_out = "".join(
        f"; {plural(number, 'more case')} left out, {why}"
        for number, why in (
            (incomplete, "where a baseline did not run"),
            (limited, "where the processors may be the limit"),
        )
        if number
    )
    alone = "".join(
        f" Over {method} alone: {_median([case.over(method) for case in found])}."
        for method in ("multiring", "gloo")
        if method in names
    )
    subject = "what the process group chooses is" if only_chosen else "our schedules are"
    by_size = ", ".join(
        f"{size(nbytes)} {times(middle([case.over_best for case in cases]))}"
        for nbytes, cases in _by(found, "bytes").items()
    )
    baselines = f"; in {chosen} of them what it chooses is a baseline" if chosen else ""
    first = (
        f"On emulated links {subject} {strong(f'{times(middle(ratios))} as fast')} as the best baseline of "
        f"each case (of {listed(names)}; the fastest of the same run) in the median of "
        f"{plural(len(found), 'case')} of {kinds} ({_range(ratios)}, "
        f"{_sizes([case.ours.figure('bytes') for case in found])}): faster in {faster}, even within "
        f"{percent(EVEN)} in {len(ratios) - faster - len(lost)}, slower in {len(lost)}"
        f"{baselines}{left_out}. By size, in the median: {by_size}.{alone}"
    )
    return (first, f"Slower than the best baseline: {_named(lost)}.") if lost else (first,)


def _by(cases: Iterable[Case], column: str) -> dict[Any, list[Case]]:
    """Cases by what stands in a column of ours, in the order of that."""
    found: dict[Any, list[Case]] = {}
    for case in sorted(cases, key=lambda case: case.ours[column]):
        found.setdefault(case.ours[column], []).append(case)
    return found


def _named(lost: Iterable[Case]) -> str:
    """Cases by size and collective, each with its ratio and the baseline that was faster."""
    return "; ".join(
        f"{kind} of {size(nbytes)} on "
        + listed(
            [
                f"{case.ours.text('topology')} ({times(case.over_best)}, {case.baselines[0].text('method')})"
                for case in cases
            ]
        )
        for nbytes, of_size in _by(lost, "bytes").items()
        for kind, cases in _by(of_size, "collective").items()
    )


def _median(ratios: list[float]) -> str:
    found = known(ratios)
    return f"{times(middle(found))} in the median of {plural(len(found), 'case')} ({_range(found)})"


def _range(ratios: list[float]) -> str:
    return f"{times(least(ratios))} to {times(most(ratios))}"


def _sizes(of: list[float]) -> str:
    return size(min(of)) if min(of) == max(of) else f"{size(min(of))} to {size(max(of))}"


def _close(document: Document | None) -> str:
    ours = [case.ours for case in cases_that_count(document)[0]]
    large = [row for row in ours if row.figure("bytes") >= LARGE and row.figure("share_of_optimum") > 0]
    if not large:
        return "How close to the limit on real links is not measured yet."
    worst = min(large, key=lambda row: row.figure("share_of_optimum"))
    return (
        f"From {size(LARGE)} on {strong(percent(middle(row.figure('share_of_optimum') for row in large)))} "
        "of the proven limit is reached in the median, at the least "
        f"{percent(worst.figure('share_of_optimum'))} ({worst.text('collective')}, "
        f"{worst.text('topology')})."
    )


def _synthesis(results: Results) -> str:
    document = results.get("synthesis")
    rows = [row for row in (document.rows if document else []) if row.get("method") == "trees"]
    rows = [row for row in rows if row.figure("seconds") > 0 and row.figure("ranks") > 0]
    if not rows:
        return "How long synthesis takes is not measured yet."
    ordered = sorted(rows, key=lambda row: (row.figure("ranks"), row.figure("seconds")))
    ends = [
        f"{strong(seconds(row.figure('seconds')))} for {plural(row.figure('ranks'), 'rank')} "
        f"({row.text('title')})"
        for row in (ordered[0], ordered[-1])
    ]
    return f"Synthesis of trees that are exactly optimal took {' and '.join(ends)}."


def _beside_forestcoll(document: Document | None) -> str:
    """ForestColl asks for the same trees; both on the same graphs, in turns."""
    rows = [row for row in (document.rows if document else []) if row.get("method") == "ForestColl"]
    calls, processes = (known(row.figure(name) for row in rows) for name in ("call_times_ours", "times_ours"))
    if not calls or not processes:
        return ""
    return (
        f"On the same {plural(len(calls), 'graph')} a call of ForestColl takes "
        f"{strong(times(middle(calls)))} as long as ours in the median ({_range(calls)}) and a whole "
        f"process {times(middle(processes))} ({_range(processes)})."
    )


# ------------------------------------------------------------------------------------------------- targets


@dataclass(frozen=True, slots=True)
class Tally:
    """The targets of one or more results files: met, missed, and not measured."""

    met: int = 0
    missed: int = 0
    unknown: int = 0

    @property
    def all(self) -> int:
        """How many there are."""
        return self.met + self.missed + self.unknown

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.met + other.met, self.missed + other.missed, self.unknown + other.unknown)

    @property
    def words(self) -> str:
        """Such as "21 of 25 targets met, 4 missed"."""
        parts = [f"{self.met} of {self.all} target{'' if self.all == 1 else 's'} met"]
        parts += [f"{self.missed} missed"] if self.missed else []
        parts += [f"{self.unknown} not measured"] if self.unknown else []
        return ", ".join(parts)


def _column(name: str, entry: str = "") -> Callable[[Document], list[bool | None]]:
    """Rows, or those of an entry of the document, with a truth value in this column have a target."""

    def verdicts(document: Document) -> list[bool | None]:
        found = [row.get(name) for row in (rows_of(document.get(entry)) if entry else document.rows)]
        return [one if isinstance(one, bool) else None for one in found if entry or isinstance(one, bool)]

    return verdicts


def _at_most(name: str, limit: str, spread: str = "") -> Callable[[Document], list[bool | None]]:
    """Rows have a figure in a column; another column limits it, or an entry of the document all of them.

    What lies above the limit by no more than a row's `spread` is met.
    """

    def verdicts(document: Document) -> list[bool | None]:
        of_all = number(document.get(limit))
        pairs = [
            (
                row.figure(name) - (row.figure(spread) if spread else 0.0),
                row.figure(limit) if math.isnan(of_all) else of_all,
            )
            for row in document.rows
        ]
        return [
            None if math.isnan(taken) else taken <= allowed
            for taken, allowed in pairs
            if not math.isnan(allowed)
        ]

    return verdicts


TARGETS: Mapping[str, tuple[str, Callable[[Document], list[bool | None]]]] = {
    "testbed": ("emulated links", _column("met", entry="targets")),
    "scale_targets": ("large fabrics", _column("kept")),
    "loopback": ("one machine", _column("met")),
    "ddp": ("one machine", _column("met")),
    "pipeline_memory": ("memory of ranks", _at_most("off", "limit")),
    "pipeline_prediction": ("predicted steps", _at_most("error", "target", "error_spread")),
    "pipeline_testbed": ("predicted steps", _at_most("error", "target", "error_spread")),
    "pipeline_planner": ("planning", _at_most("seconds", "target_s")),
    "pipeline_intra": ("planning", _at_most("cpu_seconds", "target_s")),
}
"""Results files with targets: what the headline calls them, and whether each was met."""


def tally(document: Document | None) -> Tally:
    """The targets of a results file; none where it has none."""
    verdicts = TARGETS[document.name][1](document) if document and document.name in TARGETS else []
    return Tally(*(verdicts.count(verdict) for verdict in (True, False, None)))


def _targets(results: Results) -> str:
    """All targets of all benches, the missed ones by bench."""
    found: dict[str, Tally] = {}
    for name, (title, _) in TARGETS.items():
        found[title] = found.get(title, Tally()) + tally(results.get(name))
    together = sum(found.values(), Tally())
    if not together.all:
        return "No targets are measured yet."
    missed = [f"{title} {one.missed} of {one.all}" for title, one in found.items() if one.missed]
    return f"Of all benches together, {strong(together.words)}{f': {listed(missed)}' if missed else ''}."

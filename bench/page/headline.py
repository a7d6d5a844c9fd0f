"""The answer in a few sentences: what one run of `make headline` measures, and what else the page says.

The baseline of a case is the fastest of all that were measured on it, and so it is known only afterwards: who
picks one method beforehand does no better.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pandas as pd

from arborcast.bench.clusters.words import EVEN
from arborcast.bench.page.parts import Sentence, Strong
from arborcast.bench.page.results import Document, Row, records, span
from arborcast.bench.page.sweeps import compared
from arborcast.bench.page.targets import Tally, tallies
from arborcast.bench.page.testbed import LARGE, best_of_each_case, cases_that_count
from arborcast.bench.page.words import listed, percent, plural, seconds, size, times

Results = Mapping[str, Document]


def headline(results: Results) -> tuple[Sentence, ...]:
    """Sentences of README, all of one run of `make headline`; what was not measured is said."""
    return (
        best_of_each_case(results.get("testbed")),
        _close(results.get("testbed")),
        _synthesis(results),
    )


def more(results: Results) -> tuple[Sentence, ...]:
    """What the page says besides, of benches that take longer or need checkouts of others."""
    beside = _beside_forestcoll(results.get("peers"))
    return (_simulated(results.get("sweeps")), *([beside] if beside else []), _targets(results))


def _simulated(document: Document | None) -> Sentence:
    points = compared(document)
    if not points:
        return ("Clusters are not simulated yet.",)
    ratios = pd.Series([at.least for at in points])
    return (
        "In simulations of clusters our schedules, chosen with NCCL's overhead known, are ",
        Strong(times(ratios.median())),
        " as fast as the fastest of NCCL's planning models, re-implemented here (NCCL itself was not run), "
        "and the simulated baselines "
        f"({_range(ratios)}, {_sizes(at.size_bytes for at in points)}; {_losses(ratios, 'point')}).",
    )


def _range(ratios: pd.Series[float]) -> str:
    return f"{times(ratios.min())} to {times(ratios.max())}"


def _losses(ratios: pd.Series[float], thing: str) -> str:
    return f"slower in {sum(ratios < 1 - EVEN) or 'none'} of {plural(len(ratios), thing)}"


def _sizes(of: Iterable[float]) -> str:
    least, most = span(of)
    return size(least) if least == most else f"{size(least)} to {size(most)}"


def _close(document: Document | None) -> Sentence:
    large = _large(document)
    if not large:
        return ("How close to the limit on real links is not measured yet.",)
    worst = min(large, key=lambda row: row.share_of_optimum)
    return (
        f"From {size(LARGE)} on ",
        Strong(percent(pd.Series([row.share_of_optimum for row in large]).median())),
        f" of the proven limit is reached in the median, at the least {percent(worst.share_of_optimum)} "
        f"({worst.collective}, {worst.topology}).",
    )


def _large(document: Document | None) -> list[Row]:
    """Ours in the cases that are about links, from the size on at which the limit counts."""
    ours = [case.ours for case in cases_that_count(document)[0]]
    return [row for row in ours if row.bytes >= LARGE and row.share_of_optimum > 0]


def _trees(document: Document | None) -> list[Row]:
    """Times of synthesis by the number of ranks."""
    if document is None:
        return []
    rows = document.rows
    rows = rows[(rows["method"] == "trees") & rows["seconds"].notna() & (rows["ranks"] > 0)]
    return records(rows.sort_values(["ranks", "seconds"], kind="stable"))


def _synthesis(results: Results) -> Sentence:
    ordered = _trees(results.get("synthesis"))
    if not ordered:
        return ("How long synthesis takes is not measured yet.",)
    small, large = ordered[0], ordered[-1]
    return (
        "Synthesis of trees that are exactly optimal took ",
        Strong(seconds(small.seconds)),
        f" for {plural(small.ranks, 'rank')} ({small.title}) and ",
        Strong(seconds(large.seconds)),
        f" for {plural(large.ranks, 'rank')} ({large.title})",
        ".",
    )


def _beside_forestcoll(document: Document | None) -> Sentence:
    """ForestColl asks for the same trees; both on the same graphs, in turns."""
    if document is None:
        return ()
    rows = document.rows[document.rows["method"] == "ForestColl"]
    calls, processes = rows["call_times_ours"].dropna(), rows["times_ours"].dropna()
    if not len(calls) or not len(processes):
        return ()
    return (
        f"On the same {plural(len(calls), 'graph')} a call of ForestColl takes ",
        Strong(times(calls.median())),
        f" as long as ours in the median ({_range(calls)}) and a whole process "
        f"{times(processes.median())} ({_range(processes)}).",
    )


def _targets(results: Results) -> Sentence:
    """All targets of all benches, the missed ones by bench."""
    found = tallies(results)
    if not found:
        return ("No targets are measured yet.",)
    together = sum(found.values(), Tally())
    missed = [f"{title} {tally.missed} of {tally.all}" for title, tally in found.items() if tally.missed]
    return (
        "Of all benches together, ",
        Strong(together.words),
        f": {listed(missed)}." if missed else ".",
    )

"""The answer in a few sentences: speed, share of the limit, time of synthesis, targets met.

The baseline of a case is the fastest of all that were measured on it, and so it is known only afterwards: who
picks one method beforehand does no better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arborcast.bench.clusters.words import EVEN
from arborcast.bench.page.parts import Sentence, Strong
from arborcast.bench.page.results import Document, figure, figures, median, number, word
from arborcast.bench.page.sweeps import compared
from arborcast.bench.page.targets import Tally, tallies
from arborcast.bench.page.testbed import CHOSEN, LARGE, Case, cases_about_links
from arborcast.bench.page.words import listed, percent, plural, seconds, size, times

Results = Mapping[str, Document]


def headline(results: Results) -> tuple[Sentence, ...]:
    """Sentences of what was measured; what was not is said."""
    return (_faster(results), _close(results), _synthesis(results), _targets(results))


def _faster(results: Results) -> Sentence:
    found, left_out = cases_about_links(results.get("testbed"))
    beside = [case for case in found if case.over_best is not None]
    ratios = [case.over_best for case in beside if case.over_best is not None]
    if ratios:
        over_gloo = figures([case.ours for case in beside], "speed_up_over_gloo")
        said: Sentence = (
            f"On emulated links {_who(beside)} ",
            Strong(f"{times(median(ratios))} as fast"),
            f" as the best baseline of each case ({listed(_methods(beside))}) in the median of "
            f"{plural(len(ratios), 'case')} "
            f"({times(min(ratios))} to {times(max(ratios))}, {_span(_sizes(beside))}; "
            f"{_losses(ratios, 'case')}{_baselines_chosen(beside)}{_left_out(left_out)})",
            f", and {times(median(over_gloo))} as fast as gloo" if over_gloo else "",
        )
    else:
        said = ("How much faster than baselines on real links is not measured yet",)
    return (*said, "; ", *_simulated(results))


def _methods(cases: Sequence[Case]) -> list[str]:
    return list(dict.fromkeys(word(row, "method") for case in cases for row in case.baselines))


def _baselines_chosen(cases: Sequence[Case]) -> str:
    chosen = sum(case.chose_baseline for case in cases)
    return f"; in {chosen} of them what it chooses is a baseline" if chosen else ""


def _simulated(results: Results) -> Sentence:
    points = compared(results.get("sweeps"))
    if not points:
        return ("clusters are not simulated yet.",)
    ratios = [at.least for at in points]
    sizes = sorted({at.size_bytes for at in points})
    return (
        "in simulations of clusters our schedules, chosen with NCCL's overhead known, are ",
        Strong(times(median(ratios))),
        " as fast as the fastest of NCCL's planning models and the simulated baselines "
        f"({times(min(ratios))} to {times(max(ratios))}, {_span(sizes)}; {_losses(ratios, 'point')}).",
    )


def _losses(ratios: Sequence[float], thing: str) -> str:
    lost = sum(ratio < 1 - EVEN for ratio in ratios)
    return f"slower in {lost or 'none'} of {plural(len(ratios), thing)}"


def _who(cases: Sequence[Case]) -> str:
    """What the figures are of: see `bench.page.testbed.row_of_ours`."""
    only_chosen = all(case.ours.get("method") == CHOSEN for case in cases)
    return "what the process group chooses is" if only_chosen else "our schedules are"


def _left_out(cases: int) -> str:
    return f"; {plural(cases, 'more case')} left out, where the processors may be the limit" if cases else ""


def _sizes(cases: Sequence[Case]) -> list[float]:
    return sorted(figures([case.ours for case in cases], "bytes"))


def _span(sizes: Sequence[float]) -> str:
    return size(sizes[0]) if sizes[0] == sizes[-1] else f"{size(sizes[0])} to {size(sizes[-1])}"


def _close(results: Results) -> Sentence:
    about_links, _ = cases_about_links(results.get("testbed"))
    found = [case.ours for case in about_links if (figure(case.ours, "bytes") or 0) >= LARGE]
    shared = [(share, row) for row in found if (share := figure(row, "share_of_optimum")) is not None]
    if not shared:
        return ("How close to the limit on real links is not measured yet.",)
    least, worst = min(shared, key=lambda pair: pair[0])
    return (
        f"From {size(LARGE)} on ",
        Strong(percent(median([share for share, _ in shared]))),
        f" of the proven limit is reached in the median, at the least {percent(least)} "
        f"({word(worst, 'collective')}, {word(worst, 'topology')}).",
    )


def _synthesis(results: Results) -> Sentence:
    document = results.get("synthesis")
    rows = [row for row in (document.rows if document else []) if row.get("method") == "trees"]
    timed = [row for row in rows if figure(row, "seconds") is not None and number(row.get("ranks"))]
    if not timed:
        return ("How long synthesis takes is not measured yet.",)
    timed.sort(key=lambda row: (figure(row, "ranks") or 0, figure(row, "seconds") or 0))
    small, large = timed[0], timed[-1]
    return (
        "Synthesis of trees that are exactly optimal took ",
        Strong(seconds(figure(small, "seconds"))),
        f" for {plural(int(figure(small, 'ranks') or 0), 'rank')} ({word(small, 'title', 'topology')}) and ",
        Strong(seconds(figure(large, "seconds"))),
        f" for {plural(int(figure(large, 'ranks') or 0), 'rank')} ({word(large, 'title', 'topology')})",
        *_beside_forestcoll(results.get("peers")),
        ".",
    )


def _beside_forestcoll(document: Document | None) -> Sentence:
    """ForestColl asks for the same trees; both on the same graphs, in turns."""
    rows = [row for row in (document.rows if document else []) if row.get("method") == "ForestColl"]
    calls, processes = figures(rows, "call_times_ours"), figures(rows, "times_ours")
    if not calls or not processes:
        return ()
    return (
        f"; on the same {plural(len(calls), 'graph')} a call of ForestColl takes ",
        Strong(times(median(calls))),
        f" as long as ours in the median ({times(min(calls))} to {times(max(calls))}) and a whole process "
        f"{times(median(processes))} ({times(min(processes))} to {times(max(processes))})",
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

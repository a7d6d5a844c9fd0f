"""Questions of chunk schedules: one (C, S, R), frontiers, and those of an allreduce."""

from __future__ import annotations

from fractions import Fraction
from random import Random
from typing import Any

from arborcast import synth
from arborcast.synth.chunks.bounds.step_certificate import StepBound
from arborcast.synth.collective import NAMED_KINDS, Collective, Kind
from arborcast.synth.errors import InfeasibleError, InputError, TimedOutError
from arborcast.synth.schedule import Schedule
from arborcast.synth.topology import Topology
from tests.fuzzing import chunk_search
from tests.fuzzing.fabrics import fabric
from tests.fuzzing.tally import Tally, draw_collective

DEADLINE_S = 15  # a late answer says less; what it says must be true
ONE_SUM = "with one partial sum per rank and chunk"
COPIES = tuple(kind for kind in NAMED_KINDS if kind is not Kind.ALLREDUCE)


def ask_size(rng: Random, tally: Tally) -> None:
    """One (C, S, R): there is one, or there is none."""
    topology = tally.draw(_tiny_fabric(rng))
    collective = draw_collective(rng, topology, relays=rng.random() < 0.2)
    chunks, steps = rng.randint(1, 2), rng.randint(1, 3)
    if collective.kind is Kind.ALLREDUCE:
        chunks = len(collective.ranks) if rng.random() < 0.6 else rng.randint(1, 3)
    rounds = rng.randint(steps, steps + 2)
    size = {"chunks": chunks, "steps": steps, "rounds": rounds}
    method = rng.choice(["smt", "ilp", "sat"])
    try:
        answer = tally.solve(topology, collective, method=method, **size, cache=False, deadline_s=DEADLINE_S)
    except InputError as error:
        tally.label("chunks of an allreduce", "multiple" in str(error), collective, size, error)
        return
    if answer is None:
        return
    # "None" is said of whatever copies and adds, unless it is said of one partial sum.
    several = not isinstance(answer, Schedule) and ONE_SUM not in str(answer)
    exists = chunk_search.exists(topology, collective, chunks, steps, rounds, several=several)
    if isinstance(answer, Schedule):
        tally.label("found (the reference finds one)", exists, collective, size)
    elif not _is_of_compositions(str(answer)):
        refuted = None if exists is None else not exists
        tally.label(f"infeasible: chunks of {collective.kind}", refuted, collective, size, method, answer)
        if isinstance(answer.proof, StepBound) and collective.kind is not Kind.ALLREDUCE:
            least = chunk_search.least_ratio(topology, collective, steps)
            proved = least is None or least >= answer.proof.ratio > Fraction(rounds, chunks)
            tally.label("infeasible: limit of steps", proved, collective, size, least, answer.proof)


def ask_frontier(rng: Random, tally: Tally) -> None:
    """Every point is the least R/C of its steps with the smallest C, and none is missing."""
    topology = tally.draw(_tiny_fabric(rng))
    collective = draw_collective(rng, topology, COPIES, relays=rng.random() < 0.2)
    most = rng.randint(2, 4) if topology.size <= 3 else 3
    found = _frontier(tally, topology, collective, most)
    ratios = {steps: chunk_search.least_ratio(topology, collective, steps) for steps in range(1, most + 1)}
    if isinstance(found, InfeasibleError):
        tally.label("infeasible: steps", ratios[most] is None, collective, most, found)
    if found is None or isinstance(found, InfeasibleError):
        return
    for point in found.points:
        exact = ratios[point.steps]
        shown = (collective, point.chunks, point.steps, point.rounds, point.least, exact, point.proof)
        tally.label("frontier: least", exact is not None and point.least <= exact, *shown)
        if point.is_proved:
            tally.label("frontier: proved", point.ratio == point.least == exact, *shown)
            smaller = [
                chunk_search.exists(topology, collective, chunks, point.steps, int(chunks * point.ratio))
                for chunks in range(1, point.chunks)
                if (chunks * point.ratio).denominator == 1 and chunks * point.ratio >= point.steps
            ]
            refuted = False if True in smaller else None if None in smaller else True
            tally.label("frontier: smallest C", refuted, *shown, smaller)
    reached = {steps: [p.ratio for p in found.points if p.steps <= steps] for steps in ratios}
    if found.complete:
        is_last = found.points[-1].ratio == found.static_ratio
        tally.label("complete", is_last and _none_missing(reached, ratios, most), collective, ratios, reached)
    looked_at = found.points[-1].steps if found.points else 0
    for steps in range(1, looked_at + 1):
        if steps not in found.open_steps:
            fits = _none_missing(reached, ratios, steps)
            tally.label("frontier: nothing missing", fits, collective, steps, ratios, reached)


def _none_missing(reached: dict[int, list[Fraction]], ratios: dict[int, Fraction | None], steps: int) -> bool:
    """Whether the points up to so many steps are as good as anything in so many."""
    exact = ratios[steps]
    return not reached[steps] if exact is None else bool(reached[steps]) and min(reached[steps]) <= exact


def ask_allreduce(rng: Random, tally: Tally) -> None:
    """What is said of an allreduce over every schedule is true of all that copy and add partial sums."""
    topology = tally.draw(_tiny_fabric(rng, most=rng.choice([2, 3, 3, 4])))
    collective = Collective(Kind.ALLREDUCE, tuple(range(topology.ranks)))
    most = rng.randint(1, 4)
    _check_bound(tally, topology, collective)
    found = _frontier(tally, topology, collective, most)
    if isinstance(found, InfeasibleError) and not _is_of_compositions(str(found)):
        exists = chunk_search.exists_in_long_steps(topology, collective, most)
        refuted = None if exists is None else not exists
        tally.label("infeasible: steps of an allreduce", refuted, topology.ranks, most, found)
    if found is None or isinstance(found, InfeasibleError):
        return
    for point in found.points:
        name, shown = (point.chunks, point.steps, point.rounds), (point.least, point.proof)
        _check_none(tally, "least", topology, collective, point.steps, point.least, *name, *shown)
        if point.is_proved:
            tally.label("allreduce frontier: proved", point.ratio == point.least, *name, *shown)
            for chunks in range(1, min(4, point.chunks)):
                if (rounds := point.ratio * chunks).denominator == 1 and rounds >= point.steps:
                    exists = chunk_search.exists(
                        topology, collective, chunks, point.steps, int(rounds), several=True
                    )
                    refuted = None if exists is None else not exists
                    tally.label("allreduce frontier: smallest C", refuted, chunks, *name, *shown)
    for steps in range(1, found.points[-1].steps if found.points else 0):
        reached = [point.ratio for point in found.points if point.steps <= steps]
        if steps not in found.open_steps and reached:
            _check_none(tally, "nothing missing", topology, collective, steps, min(reached), found.open_steps)
        elif steps not in found.open_steps:
            exists = chunk_search.exists_in_long_steps(topology, collective, steps)
            tally.label("allreduce frontier: latency", None if exists is None else not exists, steps)


def _check_none(
    tally: Tally,
    name: str,
    topology: Topology,
    collective: Collective,
    steps: int,
    ratio: Fraction,
    *shown: object,
) -> None:
    """Nothing that copies and adds has a smaller R/C in so many steps, as far as few chunks can tell."""
    for chunks in range(1, 5):
        rounds = -(-ratio * chunks // 1) - 1  # the most that would be better
        if rounds >= steps:
            exists = chunk_search.exists(topology, collective, chunks, steps, int(rounds), several=True)
            refuted = None if exists is None else not exists
            tally.label(f"allreduce frontier: {name}", refuted, chunks, steps, rounds, ratio, *shown)


def _check_bound(tally: Tally, topology: Topology, collective: Collective) -> None:
    """Whether a search over partial sums finds what the limit of every schedule excludes."""
    with tally.no_crash("bound", collective):
        bound = synth.bound(topology, collective)
    if bound.rate == 0 or bound.scope != "every schedule":
        return
    least = topology.bandwidth_unit / bound.rate
    for chunks in (1, 2, 3):
        rounds = int(-(-least * chunks // 1)) - 1
        for steps in range(1, min(rounds, 4) + 1):
            exists = chunk_search.exists(topology, collective, chunks, steps, rounds, several=True)
            refuted = None if exists is None else not exists
            tally.label("scope: every schedule (search)", refuted, chunks, steps, rounds, bound)


def _frontier(tally: Tally, topology: Topology, collective: Collective, most: int) -> Any:
    """The frontier, all its points played; or why there is none; None where there was no time."""
    with tally.no_crash("pareto", collective, most):
        try:
            found = synth.pareto(topology, collective, max_steps=most, cache=False, deadline_s=DEADLINE_S)
        except InfeasibleError as error:
            return error
        except TimedOutError:
            tally.unknown["in time"] += 1
            return None
    for point in found.points:
        tally.replay(point.schedule, collective, point.chunks, point.steps)
    return found


def _is_of_compositions(text: str) -> bool:
    return "compos" in text or "as a reduce-scatter and an allgather" in text


def _tiny_fabric(rng: Random, most: int = 4) -> Topology:
    return fabric(rng, ranks=(2, most), switches=1, decimals=0, largest=2)

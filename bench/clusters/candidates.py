"""The schedules among which a size sweep chooses, each built or left out with its reason.

They are those of `synth.selection`, with what it finds too slow on hundreds of ranks left out by rules on the
number of ranks, so that the answer does not depend on the machine; the deadline is the last resort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from arborcast.synth.api import LARGEST_EXPLICIT, approach
from arborcast.synth.baselines import BASELINES, solve_baseline
from arborcast.synth.baselines.two_way_rings import both_ways
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import CollectiveError, InfeasibleError, TimedOutError
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.packing.solver import shallow_schedules, solve_by_trees
from arborcast.synth.request import Request
from arborcast.synth.schedule import Schedule
from arborcast.synth.selection import (
    EXTRA_STEPS,
    FEW_TREES,
    LARGEST_FRONTIER,
    LARGEST_SHALLOW,
    by_levels,
    exchanges_written_out,
    shallow_by_symmetry,
)
from arborcast.synth.topology import Topology

FEW_TREES_UP_TO = 32
"""Ranks up to which few trees are chosen well."""

LARGEST_BROADCAST = 8
"""The same as `LARGEST_FRONTIER` for broadcasts, whose frontier is long: minutes on 16 ranks."""

MOST_TRANSFERS = 500_000
"""Of a baseline: what its simulation takes grows with them, and seconds are long over many sizes."""

FEW_CHUNKS = ("binary-tree", "levels", "recursive-doubling", "bine")
"""Baselines that do not cut the buffer into as many blocks as there are ranks."""

LEAST_S = 0.01
"""Of a deadline: solvers refuse one of zero."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule under the name that rows show, or why there is none.

    Attributes:
        name: such as "trees", "trees (at most 2)", "chunks (2,2,3)", "ring".
        schedule: None where it is left out.
        why_not: the reason, None where there is a schedule.
    """

    name: str
    schedule: AnySchedule | None
    why_not: str | None = None


def candidates(
    topology: Topology, collective: Collective, limit: Bound, deadline: Deadline
) -> Iterator[Candidate]:
    """The candidates of our own methods, then the baselines.

    Args:
        topology: the fabric.
        collective: one that is done along trees.
        limit: its bound.
        deadline: for all together; who is late says so.
    """

    def trees(most: int | None) -> Schedule:
        return solve_by_trees(topology, collective, Request(max_trees=most, deadline_s=_at_least(deadline)))

    if topology.ranks > LARGEST_EXPLICIT:
        yield from _of_the_product(topology, collective, deadline)
    else:
        full = _attempt("trees", lambda: trees(None), deadline)
        yield full
        yield from _named(exchanges_written_out(topology, collective, Request(), deadline))
        yield from _named(by_levels(topology, collective, limit, deadline))
        if topology.ranks > LARGEST_SHALLOW:
            yield from _named(shallow_by_symmetry(topology, collective, Request(), deadline))
        elif full.schedule is not None:
            yield from _shallow(topology, collective, full.schedule.height, deadline)
        if topology.ranks <= FEW_TREES_UP_TO:
            for few in FEW_TREES:
                yield _attempt(f"trees (at most {few})", lambda few=few: trees(few), deadline)  # type: ignore[misc]
    if topology.ranks <= (LARGEST_BROADCAST if collective.kind is Kind.BROADCAST else LARGEST_FRONTIER):
        yield from _frontier(topology, collective, deadline)
    for name in BASELINES:
        reason = _too_large(name, topology, collective)
        if reason is not None:
            yield Candidate(name, None, reason)
        else:
            found = _attempt(
                name,
                lambda name=name: solve_baseline(  # type: ignore[misc]
                    topology, collective, name, bound=limit, deadline_s=_at_least(deadline)
                ),
                deadline,
            )
            yield found
            if name == "multiring" and topology.ranks <= LARGEST_EXPLICIT:
                joined = both_ways(found.schedule) if isinstance(found.schedule, Schedule) else None
                if joined is not None:
                    yield Candidate("two-way rings", joined)


def _attempt(name: str, build: Callable[[], Schedule], deadline: Deadline) -> Candidate:
    if deadline.has_passed:
        return Candidate(name, None, f"the deadline of {deadline.allowed_s:g} s had passed")
    try:
        return Candidate(name, build())
    except (InfeasibleError, CollectiveError) as error:
        return Candidate(name, None, str(error).removeprefix(f"{name}: "))
    except TimedOutError as error:
        # What a solver has by then depends on the machine, and such a row could not be found again.
        return Candidate(name, None, str(error))


def _at_least(deadline: Deadline) -> float | None:
    return None if deadline.left_s is None else max(deadline.left_s, LEAST_S)


def _of_the_product(topology: Topology, collective: Collective, deadline: Deadline) -> Iterator[Candidate]:
    """What `synth solve` compares on as many ranks, in whichever form."""
    yield from _named(
        approach(topology, collective, request=Request(deadline_s=_at_least(deadline))).candidates()
    )


def _named(found: Iterator[AnySchedule]) -> Iterator[Candidate]:
    """Under the name of the method and what tells it apart from its kin, each name once."""
    names: set[str] = set()
    try:
        for schedule in found:
            facts = dict(schedule.method.settings)
            match schedule.method.name:
                case "levels":
                    shape = f"{facts['fan_out']} below, {facts['lanes']} lanes, {facts['copies']} copies"
                    name = f"levels ({shape})"
                case "exchange":
                    name = f"exchange ({facts['what']}, {facts['radices']})"
                case "two-way-rings":
                    name = "two-way rings"
                case "multiring":
                    name = f"{facts['rings']} rings"
                case _:
                    trees = -(-schedule.chunk_count // len(schedule.collective.ranks))
                    name = f"trees (height {schedule.height}, {trees} a root)"
            if name not in names:
                names.add(name)
                yield Candidate(name, schedule)
    except (InfeasibleError, TimedOutError) as error:
        yield Candidate("low trees", None, str(error))


def _shallow(
    topology: Topology, collective: Collective, below: int, deadline: Deadline
) -> Iterator[Candidate]:
    """Packings of lower trees than those of the full one."""
    try:
        for schedule in shallow_schedules(topology, collective, below=below, deadline=deadline):
            yield Candidate(f"trees (height {schedule.height})", schedule)
    except (InfeasibleError, TimedOutError) as error:
        yield Candidate("shallow trees", None, str(error))


def _frontier(topology: Topology, collective: Collective, deadline: Deadline) -> Iterator[Candidate]:
    from arborcast.synth.chunks.frontier import pareto
    from arborcast.synth.chunks.problem.instance import TooManyRoutesError
    from arborcast.synth.chunks.sums.halves import latency_of_parts

    if deadline.has_passed:
        yield Candidate("chunks", None, f"the deadline of {deadline.allowed_s:g} s had passed")
        return
    try:
        most = (latency_of_parts(topology, collective) or 0) + EXTRA_STEPS
        left_s = _at_least(deadline)
        frontier = pareto(topology, collective, max_steps=most, deadline_s=left_s, proofs=False)
    except TooManyRoutesError as error:
        yield Candidate("chunks", None, str(error))
        return
    for point in frontier.points:
        size = (point.chunks, point.steps, point.rounds)
        yield Candidate(f"chunks ({','.join(map(str, size))})", point.schedule)
    if frontier.timed_out:
        yield Candidate("chunks", None, f"the rest of the frontier: {frontier.why_stopped}")


def _too_large(name: str, topology: Topology, collective: Collective) -> str | None:
    ranks = len(collective.ranks)
    blocks = 1 if collective.root is not None or name in FEW_CHUNKS else ranks
    transfers = blocks * (ranks - 1) * (2 if collective.kind is Kind.ALLREDUCE else 1)
    if transfers > MOST_TRANSFERS:
        return f"not simulated above {MOST_TRANSFERS} transfers, {ranks} ranks need at least {transfers}"
    return None

"""The schedules among which a size sweep chooses, each built or left out with its reason.

They are those that `synth solve` compares, and the baselines that it does not: what is too slow to simulate
on hundreds of ranks is left out by rules on the number of ranks, so that the answer does not depend on the
machine; the deadline is the last resort.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from arborcast.synth.api import approach
from arborcast.synth.baselines import BASELINES, solve_baseline
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import CollectiveError, InfeasibleError, TimedOutError
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.request import Request
from arborcast.synth.topology import Topology

MOST_TRANSFERS = 500_000
"""Of a baseline: what its simulation takes grows with them, and seconds are long over many sizes."""

FEW_CHUNKS = ("binary-tree", "levels", "recursive-doubling", "bine")
"""Baselines that do not cut the buffer into as many blocks as there are ranks."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule under the name that rows show, or why there is none.

    Attributes:
        name: such as "trees (height 2, 1 a root)", "chunks (2,2,3)", "ring".
        schedule: None where it is left out.
        why_not: the reason, None where there is a schedule.
    """

    name: str
    schedule: AnySchedule | None
    why_not: str | None = None


def candidates(
    topology: Topology, collective: Collective, limit: Bound, deadline: Deadline
) -> Iterator[Candidate]:
    """What `synth solve` compares, then the baselines that are not among that; each name once.

    Args:
        topology: the fabric.
        collective: one that is done along trees.
        limit: its bound.
        deadline: for all together; who is late says so.
    """
    names: set[str] = set()
    try:
        for schedule in approach(topology, collective, request=Request(deadline_s=deadline)).candidates():
            name = _name(schedule)
            if name not in names:
                names.add(name)
                yield Candidate(name, schedule)
    except (InfeasibleError, TimedOutError) as error:
        # What a solver has by then depends on the machine, and such a row could not be found again.
        yield Candidate("others", None, str(error))
    for name in BASELINES:
        if name not in names:
            yield _baseline(name, topology, collective, limit, deadline)


def _name(schedule: AnySchedule) -> str:
    """The method, and what tells it apart from its kin."""
    facts = dict(schedule.method.settings)
    match schedule.method.name:
        case "levels":
            return f"levels ({facts['fan_out']} below, {facts['lanes']} lanes, {facts['copies']} copies)"
        case "exchange":
            return f"exchange ({facts['what']}, {facts['radices']})"
        case "pareto":
            return f"chunks ({facts['chunks']},{facts['steps']},{facts['rounds']})"
        case "two-way-rings":
            return "two-way rings"
        case name if name in BASELINES:
            return name
        case _:
            trees = -(-schedule.chunk_count // len(schedule.collective.ranks))
            return f"trees (height {schedule.height}, {trees} a root)"


def _baseline(
    name: str, topology: Topology, collective: Collective, limit: Bound, deadline: Deadline
) -> Candidate:
    reason = _too_large(name, topology, collective)
    if reason is None and deadline.has_passed:
        reason = f"the deadline of {deadline.allowed_s:g} s had passed"
    if reason is not None:
        return Candidate(name, None, reason)
    try:
        return Candidate(name, solve_baseline(topology, collective, name, bound=limit, deadline_s=deadline))
    except (InfeasibleError, CollectiveError, TimedOutError) as error:
        return Candidate(name, None, str(error).removeprefix(f"{name}: "))


def _too_large(name: str, topology: Topology, collective: Collective) -> str | None:
    ranks = len(collective.ranks)
    blocks = 1 if collective.root is not None or name in FEW_CHUNKS else ranks
    transfers = blocks * (ranks - 1) * (2 if collective.kind is Kind.ALLREDUCE else 1)
    if transfers > MOST_TRANSFERS:
        return f"not simulated above {MOST_TRANSFERS} transfers, {ranks} ranks need at least {transfers}"
    return None

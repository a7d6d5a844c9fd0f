"""What can matter in S steps: sends that data can be there for, and that still lead to a target.

Every encoding has variables for these alone. A schedule whose every send is needed, and in which no chunk
comes to a rank twice, is made of these sends: so leaving out the rest loses no instance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkOrbits
from arborcast.synth.chunks.problem.outcome import Instance
from arborcast.synth.collective import Demand

MANY_MEMBERS = 7
"""Chunks of one class from which on their order is worth fixing, see `is_ordered`."""

Reach: TypeAlias = tuple[int | None, ...]
"""Steps to or from each rank; None: out of reach."""


@dataclass(frozen=True, slots=True)
class ReachableSends:
    """What chunks of each class may do.

    Attributes:
        sends: for each chunk class the (route, step) worth a variable, by step and then route: its src is a
            source or an earlier one of these sends leads there, its dst is no source, and from there some
            target other than the src can be reached in the steps that are left.
        holds: for each chunk class the (rank, time) worth a variable, by time and then rank, sources
            included: these sends can bring the chunk there within `time` steps (0 to S), and it is a target
            there, or some target can be reached from there in the steps that are left.
    """

    sends: tuple[tuple[tuple[int, int], ...], ...]
    holds: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(cls, orbits: ChunkOrbits, steps: int) -> ReachableSends:
        """Those of the representatives' chunks in so many steps.

        With fewer steps than the problem's latency, (target, S) is missing among the holds of some target.
        """
        problem = orbits.problem
        targets = sorted({t for c in orbits.classes for t in problem.demands[c.demand].targets})
        to_target = {target: problem.steps_to(target) for target in targets}
        sends = []
        holds = []
        for chunk_class in orbits.classes:
            demand = problem.demands[chunk_class.demand]
            useful = _sends(problem, demand, to_target, steps)
            sends.append(useful)
            holds.append(_holds(problem, demand, useful, to_target, steps))
        return cls(tuple(sends), tuple(holds))


def longest_step(instance: Instance) -> int:
    """Rounds of which a step never needs more: as many as R leaves it, or as the sends of all chunks fill."""
    orbits = instance.orbits
    fullest = max(
        -(-sum(orbits.classes[number].count for number, _ in limit.users) // limit.capacity)
        for limit in orbits.limits
    )
    return max(1, min(instance.rounds - instance.steps + 1, fullest))


def is_ordered(orbits: ChunkOrbits) -> bool:
    """Whether a solver is better told which of the chunks that are alike comes first.

    Measured with CaDiCaL: a broadcast on DGX-1 with (31, 7, 7) is found in 0.2 s instead of 3.5 s, and that
    there is none with (20, 5, 5) is proved in 0.01 s instead of not in 12 s. Where there are several classes,
    or few chunks in it, an order only hinders: an allgather with (6, 3, 7) takes 7 s instead of 0.6 s, one on
    the 5-cube with 5 chunks in a class 4 s instead of 2 s.
    """
    return len(orbits.classes) == 1 and orbits.classes[0].count >= MANY_MEMBERS


def _sends(
    problem: ChunkProblem, demand: Demand, to_target: dict[int, Reach], steps: int
) -> tuple[tuple[int, int], ...]:
    since = problem.steps_from(demand.sources)
    found = []
    for index, route in enumerate(problem.routes):
        first = since[route.src]
        onward = _least(to_target[target][route.dst] for target in demand.targets if target != route.src)
        if first is not None and onward is not None and route.dst not in demand.sources:
            found += [(index, step) for step in range(first, steps - onward)]
    found.sort(key=lambda send: (send[1], send[0]))
    # What lies beyond the last target is out of reach by now, and so are the sends back from there.
    reached = _reached(problem, demand, found)
    return tuple(send for send in found if reached.get(problem.routes[send[0]].src, steps) <= send[1])


def _reached(problem: ChunkProblem, demand: Demand, sends: Iterable[tuple[int, int]]) -> dict[int, int]:
    """After how many steps a chunk can first be at each rank by such sends, which come in order of step."""
    reached = dict.fromkeys(demand.sources, 0)
    for index, step in sends:
        route = problem.routes[index]
        if reached.get(route.src, step + 1) <= step:
            reached.setdefault(route.dst, step + 1)
    return reached


def _holds(
    problem: ChunkProblem,
    demand: Demand,
    sends: Iterable[tuple[int, int]],
    to_target: dict[int, Reach],
    steps: int,
) -> tuple[tuple[int, int], ...]:
    reached = _reached(problem, demand, sends)
    found = []
    for rank in range(problem.ranks):
        first = reached.get(rank)
        onward = _least(to_target[target][rank] for target in demand.targets)
        if first is not None and onward is not None:
            found += [(rank, time) for time in range(first, steps - onward + 1)]
    return tuple(sorted(found, key=lambda hold: (hold[1], hold[0])))


def _least(steps: Iterable[int | None]) -> int | None:
    return min((each for each in steps if each is not None), default=None)

"""Brute force over what spreads among few ranks, step by step: a message brings all that its sender has met.

No allreduce does more. It shares nothing with the encodings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import combinations, product

from arborcast.synth.chunks.problem.instance import ChunkProblem

State = tuple[int, ...]
"""What each rank has met of a chunk, a bit for each contributor."""

Loads = tuple[int, ...]
"""Messages over each link."""


def can_spread(problem: ChunkProblem, chunks: int, steps: int, rounds: int) -> bool:
    """Whether so many chunks can reach everybody in so many steps and rounds."""
    members = sorted(demand.owner for demand in problem.demands)
    everyone = sum(1 << rank for rank in members)
    start = tuple(1 << rank if rank in members else 0 for rank in range(problem.ranks))

    @cache
    def after(state: State, most: int) -> tuple[tuple[State, Loads], ...]:
        """What one chunk can come to in a step of so many rounds, over the least loads."""
        limits = tuple(capacity * most for capacity in problem.capacities)
        found: dict[State, set[Loads]] = {}
        for other, loads in _moves(problem, state):
            if all(load <= limit for load, limit in zip(loads, limits, strict=True)):
                known = found.setdefault(other, set())
                if not any(_within(less, loads) for less in known):
                    found[other] = {less for less in known if not _within(loads, less)} | {loads}
        return tuple((other, loads) for other, several in found.items() for loads in several)

    @cache
    def search(states: tuple[State, ...], steps: int, rounds: int) -> bool:
        if not steps:
            return all(state[rank] == everyone for state in states for rank in members)
        for here in range(1, rounds - steps + 2):
            limits = tuple(capacity * here for capacity in problem.capacities)
            for together in product(*(after(state, here) for state in states)):
                loads = [sum(column) for column in zip(*(loads for _, loads in together), strict=True)]
                if all(load <= limit for load, limit in zip(loads, limits, strict=True)):
                    following = tuple(sorted((state for state, _ in together)))
                    if search(following, steps - 1, rounds - here):
                        return True
        return False

    return search((start,) * chunks, steps, rounds)


def _within(less: Loads, more: Loads) -> bool:
    return all(a <= b for a, b in zip(less, more, strict=True))


def _loads(problem: ChunkProblem, routes: Iterable[int]) -> Loads:
    loads = [0] * len(problem.topology.links)
    for route in routes:
        for link in problem.routes[route].links:
            loads[link] += 1
    return tuple(loads)


def _moves(problem: ChunkProblem, state: State) -> Iterator[tuple[State, Loads]]:
    for count in range(len(problem.routes) + 1):
        for some in combinations(range(len(problem.routes)), count):
            known = list(state)
            for route in some:
                known[problem.routes[route].dst] |= state[problem.routes[route].src]
            yield tuple(known), _loads(problem, some)

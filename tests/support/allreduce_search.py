"""Brute force over allreduces of few ranks, step by step; it shares nothing with the encodings.

Three meanings of what a chunk's messages may do, from the strictest to the loosest: `sums` (a rank keeps one
partial sum, which a message adds to or replaces), `several` (a rank keeps every partial sum it ever had, and
sends any sum of those that have nothing in common), `spread` (a message brings all that its sender has met).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import combinations, product
from typing import Any

from arborcast.synth.chunks.problem.instance import ChunkProblem

State = tuple[Any, ...]
"""What each rank holds of a chunk."""

Loads = tuple[int, ...]
"""Messages over each link."""


def can_be_done(problem: ChunkProblem, meaning: str, chunks: int, steps: int, rounds: int) -> bool:
    """Whether there is an allreduce of so many chunks, steps and rounds."""
    members = sorted(demand.owner for demand in problem.demands)
    everyone = sum(1 << rank for rank in members)
    start, moves, is_done = MEANINGS[meaning](problem, members, everyone)

    @cache
    def after(state: State, most: int) -> tuple[tuple[State, Loads], ...]:
        """What one chunk can come to in a step of so many rounds, over the least loads."""
        limits = tuple(capacity * most for capacity in problem.capacities)
        found: dict[State, set[Loads]] = {}
        for other, loads in moves(state, limits):
            if all(load <= limit for load, limit in zip(loads, limits, strict=True)):
                known = found.setdefault(other, set())
                if not any(_within(less, loads) for less in known):
                    found[other] = {less for less in known if not _within(loads, less)} | {loads}
        return tuple((other, loads) for other, several in found.items() for loads in several)

    @cache
    def search(states: tuple[State, ...], steps: int, rounds: int) -> bool:
        if not steps:
            return all(map(is_done, states))
        for here in range(1, rounds - steps + 2):
            limits = tuple(capacity * here for capacity in problem.capacities)
            for together in product(*(after(state, here) for state in states)):
                loads = [sum(column) for column in zip(*(loads for _, loads in together), strict=True)]
                if all(load <= limit for load, limit in zip(loads, limits, strict=True)):
                    following = tuple(sorted((state for state, _ in together), key=repr))
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


def _sums(problem: ChunkProblem, members: list[int], everyone: int) -> tuple[Any, ...]:
    def arrivals(state: State, rank: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        coming = [route for route in problem.arriving[rank] if state[problem.routes[route].src]]
        yield state[rank], ()
        for route in coming:
            yield state[problem.routes[route].src], (route,)  # a copy
        for count in range(1, len(coming) + 1):
            for some in combinations(coming, count):
                total = state[rank]
                for route in some:
                    part = state[problem.routes[route].src]
                    if total & part:
                        break
                    total |= part
                else:
                    yield total, some

    def moves(state: State, limits: Loads) -> Iterator[tuple[State, Loads]]:
        for choice in product(*(list(arrivals(state, rank)) for rank in range(problem.ranks))):
            yield tuple(held for held, _ in choice), _loads(problem, [r for _, some in choice for r in some])

    start = tuple(1 << rank if rank in members else 0 for rank in range(problem.ranks))
    return start, moves, lambda state: all(state[rank] == everyone for rank in members)


def _spread(problem: ChunkProblem, members: list[int], everyone: int) -> tuple[Any, ...]:
    def moves(state: State, limits: Loads) -> Iterator[tuple[State, Loads]]:
        for count in range(len(problem.routes) + 1):
            for some in combinations(range(len(problem.routes)), count):
                known = list(state)
                for route in some:
                    known[problem.routes[route].dst] |= state[problem.routes[route].src]
                yield tuple(known), _loads(problem, some)

    start = tuple(1 << rank if rank in members else 0 for rank in range(problem.ranks))
    return start, moves, lambda state: all(state[rank] == everyone for rank in members)


def _several(problem: ChunkProblem, members: list[int], everyone: int) -> tuple[Any, ...]:
    @cache
    def closed(held: frozenset[int]) -> frozenset[int]:
        """All sums of parts that have nothing in common."""
        while True:
            more = held | {a | b for a in held for b in held if not a & b}
            if more == held:
                return held
            held = more

    def moves(state: State, limits: Loads) -> Iterator[tuple[State, Loads]]:
        options = []
        for route in problem.routes:
            most = min(limits[link] for link in route.links)
            new = sorted(state[route.src] - state[route.dst])
            options.append([some for count in range(most + 1) for some in combinations(new, count)])
        for choice in product(*options):
            held = list(state)
            for route, some in zip(problem.routes, choice, strict=True):
                held[route.dst] = held[route.dst] | set(some)
            sent = [index for index, some in enumerate(choice) for _ in some]
            yield tuple(map(closed, held)), _loads(problem, sent)

    start = tuple(frozenset({1 << rank} if rank in members else ()) for rank in range(problem.ranks))
    return start, moves, lambda state: all(everyone in state[rank] for rank in members)


MEANINGS: dict[str, Callable[..., tuple[Any, ...]]] = {"sums": _sums, "several": _several, "spread": _spread}

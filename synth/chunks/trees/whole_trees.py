"""An optimal packing of trees made whole: so many trees of C chunks that steps of whole rounds carry.

The prices that prove the optimum say which trees can take part in one at all: the cheapest. Those that were
met on the way to it are mostly enough for a small integer program to find a schedule with few chunks, where a
search from nothing takes far longer. Not finding one proves nothing: they are not all of the cheapest trees.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TypeAlias

from arborcast.synth.chunks.problem.orbits import ChunkOrbits, OrbitSend
from arborcast.synth.chunks.problem.prune import ChunkPlan, prune
from arborcast.synth.chunks.trees.pricing import TimedTree
from arborcast.synth.deadline import Deadline
from arborcast.synth.lp.integer_program import IntegerProgram

NODES = 50
"""Nodes of the integer program's search: seconds."""

Candidate: TypeAlias = tuple[int, TimedTree]
"""The index of a class of chunks and a tree for one of them."""


def whole_plan(
    orbits: ChunkOrbits,
    steps: int,
    rounds: int | None,
    candidates: Sequence[Candidate],
    *,
    nodes: int = NODES,
    deadline: Deadline,
) -> ChunkPlan | None:
    """C chunks in S steps of R rounds along some of the candidates, if `whole_numbers` finds how many."""
    found = whole_numbers(orbits, steps, rounds, candidates, nodes=nodes, deadline=deadline)
    if found is None:
        return None
    numbers, lengths = found
    return prune(orbits.problem, orbits.chunks, lengths, orbits.unfold(_sends(candidates, numbers)))


def whole_numbers(
    orbits: ChunkOrbits,
    steps: int,
    rounds: int | None,
    candidates: Sequence[Candidate],
    *,
    nodes: int = NODES,
    deadline: Deadline,
) -> tuple[list[int], list[int]] | None:
    """How many chunks of each orbit go along each candidate, and how many rounds each step then lasts.

    Args:
        orbits: the problem and C.
        steps: S.
        rounds: R; None for as few as are found, not always the fewest.
        candidates: trees of one demand of each orbit.
        nodes: of the integer program's search.
        deadline: when to stop.

    Returns:
        None if there is nothing along these trees, or none was found in time.
    """
    program = IntegerProgram()
    everything = sum(len(demand.targets) for demand in orbits.problem.demands)
    most = rounds if rounds is not None else orbits.chunks * everything
    for chunk_class, _ in candidates:
        program.add_column(orbits.classes[chunk_class].count)
    lengths = [program.add_column(most, least=1, cost=int(rounds is None)) for _ in range(steps)]
    if rounds is not None:
        program.add_row(lengths, [1] * steps, least=rounds, most=rounds)
    for chunk_class, members in enumerate(orbits.classes):
        own = [column for column, (of_class, _) in enumerate(candidates) if of_class == chunk_class]
        program.add_row(own, [1] * len(own), least=members.count, most=members.count)
    for (limit, step), uses in _uses(orbits, candidates).items():
        capacity = orbits.limits[limit].capacity
        program.add_row([*uses, lengths[step]], [*uses.values(), -capacity], most=0)
    values = program.best(nodes, deadline)
    return None if values is None else (values[: len(candidates)], values[len(candidates) :])


def _uses(orbits: ChunkOrbits, candidates: Sequence[Candidate]) -> dict[tuple[int, int], dict[int, int]]:
    """For each limit and step, how often each candidate loads it."""
    limits_of: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for number, limit in enumerate(orbits.limits):
        for user in limit.users:
            limits_of[user][number] += 1
    uses: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for column, (chunk_class, tree) in enumerate(candidates):
        for route, step in tree:
            for limit_number, times in limits_of[chunk_class, route].items():
                uses[limit_number, step][column] += times
    return {key: dict(counts) for key, counts in uses.items()}


def _sends(candidates: Sequence[Candidate], numbers: list[int]) -> Iterator[OrbitSend]:
    """What each member of each class does."""
    members: Counter[int] = Counter()
    for (chunk_class, tree), number in zip(candidates, numbers, strict=True):
        for _ in range(number):
            for route, step in tree:
                yield OrbitSend(chunk_class, members[chunk_class], route, step)
            members[chunk_class] += 1


def admissible_chunk_counts(ratio: Fraction, steps: int) -> Iterator[int]:
    """Every C for which ratio * C is whole and gives each step a round, from the smallest."""
    chunks = ratio.denominator
    while True:
        if ratio * chunks >= steps:
            yield chunks
        chunks += ratio.denominator

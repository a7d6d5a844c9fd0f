"""An optimal packing of trees made whole: so many trees of C chunks that steps of whole rounds carry.

The prices that prove the optimum say which trees can take part in one at all: the cheapest. Some hundred of
them are enough for a small integer program to find a schedule with few chunks, where a search from nothing
takes far longer. Not finding one proves nothing, because not all the cheapest trees are looked at.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from random import Random
from typing import TypeAlias

import numpy as np

from arborcast.synth.chunks.bounds.step_certificate import StepLengths
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkOrbits, Group, OrbitSend
from arborcast.synth.chunks.problem.prune import ChunkPlan, prune
from arborcast.synth.chunks.trees.pricing import TimedTree
from arborcast.synth.chunks.trees.spanning_oracle import SpanningSearch, searches_for
from arborcast.synth.chunks.trees.step_master import MultiplicativeWeights
from arborcast.synth.deadline import Deadline
from arborcast.synth.lp.integer_program import IntegerProgram

NODES = 50
"""Nodes of the integer program's search: seconds."""

Candidate: TypeAlias = tuple[int, TimedTree]
"""The index of a class of chunks and a tree for one of them."""

_FINE = 1000  # grades of the prices that choose among equally cheap trees


class ZeroReducedCostTrees:
    """Trees of least cost for one demand of each orbit, found a few at a time.

    Attributes:
        found: all so far, without repetition.
    """

    def __init__(
        self, problem: ChunkProblem, steps: int, lengths: StepLengths, group: Group, seed: int = 0
    ) -> None:
        """Begin with no trees.

        `lengths` are the prices; the group keeps the problem, its identity first.
        """
        self.found: dict[Candidate, None] = {}
        self._classes = ChunkOrbits(problem, len(group), group).classes
        self._weights = MultiplicativeWeights(problem, steps, group)
        demands = [members.demand for members in self._classes]
        self._searches = searches_for(problem, demands, steps, self._weights.orbits)
        self._by_orbits = any(isinstance(search, SpanningSearch) for search in self._searches)
        self._random = Random(seed)
        common = math.lcm(*(length.denominator for row in lengths for length in row))
        # No tree has sends enough for the fine prices to outweigh one unit of the true ones.
        longest = max(len(route.links) for route in problem.routes)
        self._unit = 1 + _FINE * steps * problem.ranks * longest
        self._prices = [[int(length * common) * self._unit for length in row] for row in lengths]

    def look(self, trees: int, deadline: Deadline, *, evenly: bool) -> None:
        """Look for so many more trees, of which some will be known.

        `evenly` prefers among equally cheap trees those that load the links evenly. Ends with those found at
        the deadline.
        """
        for _ in range(max(1, trees // len(self._searches))):
            fine = self._even() if evenly else self._uneven()
            priced = [list(map(operator.add, *rows)) for rows in zip(self._prices, fine, strict=True)]
            for chunk_class, search in enumerate(self._searches):
                if deadline.has_passed:
                    return
                tree = search.run_exactly(priced)[1]
                self.found[chunk_class, tree] = None
                self._weights.add(tree, self._classes[chunk_class].count)

    def _even(self) -> list[list[int]]:
        fine: list[list[int]] = (self._weights.prices() * _FINE).astype(np.int64).tolist()
        return fine

    def _uneven(self) -> list[list[int]]:
        if not self._by_orbits:
            return [[self._random.randrange(_FINE) for _ in row] for row in self._prices]
        orbits = self._weights.orbits.tolist()
        drawn = ([self._random.randrange(_FINE) for _ in range(max(orbits) + 1)] for _ in self._prices)
        return [[row[orbit] for orbit in orbits] for row in drawn]


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

"""An optimal packing of trees made whole: so many trees of C chunks that steps of whole rounds carry.

The prices that prove the optimum say which trees can take part in one at all: the cheapest. Some hundred of
them are enough for a small integer program to find a schedule with few chunks, where a search from nothing
takes far longer. Not finding one proves nothing, because not all the cheapest trees are looked at.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from random import Random
from typing import Any, TypeAlias

import numpy as np

from arborcast.synth.chunks.bounds.certificate import StepLengths
from arborcast.synth.chunks.problem.instance import Problem
from arborcast.synth.chunks.problem.orbits import Group, Orbits, Send
from arborcast.synth.chunks.problem.prune import Plan, prune
from arborcast.synth.chunks.trees.multiplicative_weights import Pressure
from arborcast.synth.chunks.trees.pricing import TimedTree, TreeSearch
from arborcast.synth.deadline import Deadline
from arborcast.synth.lp.highs import limit_time, new_model

NODES = 50
"""Nodes of the integer program's search: seconds."""

Candidate: TypeAlias = tuple[int, TimedTree]
"""The index of a class of chunks and a tree for one of them."""

_FINE = 1000  # grades of the prices that choose among equally cheap trees


class TightTrees:
    """Trees of least cost for one demand of each orbit, found a few at a time.

    Attributes:
        found: all so far, without repetition.
    """

    def __init__(
        self, problem: Problem, steps: int, lengths: StepLengths, group: Group, seed: int = 0
    ) -> None:
        """Begin with no trees.

        `lengths` are the prices; the group keeps the problem, its identity first.
        """
        self.found: dict[Candidate, None] = {}
        self._classes = Orbits(problem, len(group), group).classes
        self._searches = [TreeSearch(problem, members.demand, steps) for members in self._classes]
        self._pressure = Pressure(problem, steps, group)
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
                self._pressure.add(tree, self._classes[chunk_class].count)

    def _even(self) -> list[list[int]]:
        fine: list[list[int]] = (self._pressure.prices() * _FINE).astype(np.int64).tolist()
        return fine

    def _uneven(self) -> list[list[int]]:
        return [[self._random.randrange(_FINE) for _ in row] for row in self._prices]


def whole_plan(
    orbits: Orbits,
    steps: int,
    rounds: int,
    candidates: Sequence[Candidate],
    *,
    nodes: int = NODES,
    deadline: Deadline,
) -> Plan | None:
    """C chunks in S steps of R rounds along some of the candidates, if the integer program finds how.

    Returns:
        The plan; None if there is none along these trees, or none was found in time.
    """
    model = new_model(mip_max_nodes=nodes)
    limit_time(model, deadline.left_s)
    _state(model, orbits, steps, rounds, candidates)
    model.run()
    values = np.rint(model.getSolution().col_value).astype(np.int64).tolist()
    if not _is_solved(model):
        return None
    numbers, durations = values[: len(candidates)], values[len(candidates) :]
    _check(orbits, rounds, candidates, numbers, durations)
    return prune(orbits.problem, orbits.chunks, durations, orbits.unfold(_sends(candidates, numbers)))


def _is_solved(model: Any) -> bool:
    import highspy

    return bool(model.getModelStatus() == highspy.HighsModelStatus.kOptimal)


def _state(model: Any, orbits: Orbits, steps: int, rounds: int, candidates: Sequence[Candidate]) -> None:
    """How often to take each tree and how long each step lasts, in whole numbers."""
    import highspy

    count = len(candidates)
    total = count + steps
    lower = np.array([0.0] * count + [1.0] * steps)
    upper = np.array([float(orbits.classes[chunk_class].count) for chunk_class, _ in candidates])
    model.addVars(total, lower, np.concatenate((upper, np.full(steps, float(rounds)))))
    whole = np.full(total, highspy.HighsVarType.kInteger)
    model.changeColsIntegrality(total, np.arange(total, dtype=np.int32), whole)

    def require(least: float, columns: Mapping[int, int], most: float) -> None:
        indices = np.array(list(columns), dtype=np.int32)
        model.addRow(least, most, len(columns), indices, np.array(list(columns.values()), dtype=np.float64))

    require(rounds, dict.fromkeys(range(count, total), 1), rounds)
    for chunk_class, members in enumerate(orbits.classes):
        own = {column: 1 for column, (of_class, _) in enumerate(candidates) if of_class == chunk_class}
        require(members.count, own, members.count)
    for (limit, step), uses in _uses(orbits, candidates).items():
        require(-highspy.kHighsInf, uses | {count + step: -orbits.limits[limit].capacity}, 0)


def _uses(orbits: Orbits, candidates: Sequence[Candidate]) -> dict[tuple[int, int], dict[int, int]]:
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


def _check(
    orbits: Orbits, rounds: int, candidates: Sequence[Candidate], numbers: list[int], durations: list[int]
) -> None:
    """Once more in integers: HiGHS answers within its tolerances."""
    taken: Counter[int] = Counter()
    for (chunk_class, _), number in zip(candidates, numbers, strict=True):
        taken[chunk_class] += number
    fits = all(
        sum(times * numbers[column] for column, times in uses.items())
        <= orbits.limits[limit].capacity * durations[step]
        for (limit, step), uses in _uses(orbits, candidates).items()
    )
    complete = all(taken[index] == members.count for index, members in enumerate(orbits.classes))
    if not (fits and complete and sum(durations) == rounds and min(durations) >= 1):
        raise ArithmeticError("HiGHS found whole trees that do not fit when counted in integers")


def _sends(candidates: Sequence[Candidate], numbers: list[int]) -> Iterator[Send]:
    """What each member of each class does."""
    members: Counter[int] = Counter()
    for (chunk_class, tree), number in zip(candidates, numbers, strict=True):
        for _ in range(number):
            for route, step in tree:
                yield Send(chunk_class, members[chunk_class], route, step)
            members[chunk_class] += 1


def eligible(ratio: Fraction, steps: int) -> Iterator[int]:
    """Every C for which ratio * C is whole and gives each step a round, from the smallest."""
    chunks = ratio.denominator
    while True:
        if ratio * chunks >= steps:
            yield chunks
        chunks += ratio.denominator

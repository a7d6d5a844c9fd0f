"""Weighted trees as whole chunks: so many along each tree, and steps as long as their loads need.

Of a packing that is a good schedule for any number of chunks that is large enough.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cached_property

import numpy as np

from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkSend
from arborcast.synth.chunks.problem.prune import ChunkPlan, prune
from arborcast.synth.chunks.trees.column_generation import TreeBound
from arborcast.synth.kernels.compiled import Ints

_GRAIN = 1 << 40
"""What weights of larger denominators are rounded to."""


class RoundedTrees:
    """The trees of a packing with whole numbers of chunks."""

    def __init__(self, problem: ChunkProblem, packing: TreeBound) -> None:
        self._problem = problem
        self._steps = len(packing.durations)
        ordered = sorted(packing.trees, key=lambda tree: tree.demand)
        self._trees = [tree.sends for tree in ordered]
        self._demand = np.array([tree.demand for tree in ordered], dtype=np.int64)
        unit = math.lcm(*(tree.weight.denominator for tree in ordered))
        self._unit = min(unit, _GRAIN)
        self._weights = np.array([round(tree.weight * self._unit) for tree in ordered], dtype=np.int64)

    def rounds(self, chunks: int) -> list[int]:
        """Of each step with so many chunks of each demand."""
        counts = self._counts(chunks)
        tree, place = self._uses
        load = np.bincount(place, weights=counts[tree], minlength=self._steps * len(self._problem.capacities))
        longest = np.ceil(load.reshape(self._steps, -1) / np.array(self._problem.capacities)).max(axis=1)
        return [max(1, int(rounds)) for rounds in longest]

    def plan(self, chunks: int) -> ChunkPlan:
        """The schedule with so many chunks of each demand."""
        sends: list[ChunkSend] = []
        taken: Counter[int] = Counter()
        demands = self._demand.tolist()
        for demand, tree, count in zip(demands, self._trees, self._counts(chunks).tolist(), strict=True):
            for chunk in range(taken[demand], taken[demand] + count):
                sends += (ChunkSend(demand, chunk, route, step) for route, step in tree)
            taken[demand] += count
        return prune(self._problem, chunks, self.rounds(chunks), sends)

    @cached_property
    def _uses(self) -> tuple[Ints, Ints]:
        """Of each link that a tree uses in a step: the tree, and the number of step and link."""
        width = len(self._problem.capacities)
        uses = [
            (index, step * width + link)
            for index, tree in enumerate(self._trees)
            for route, step in tree
            for link in self._problem.routes[route].links
        ]
        tree, place = np.array(uses, dtype=np.int64).reshape(-1, 2).T
        return tree, place

    def _counts(self, chunks: int) -> Ints:
        """How many of the chunks each tree takes."""
        return shared_out(chunks, self._weights, self._unit, self._demand)


def shared_out(count: int, weights: Ints, unit: int, groups: Ints) -> Ints:
    """So many in each group shared out among its members by their weights, by the largest remainders.

    Args:
        count: in each group.
        weights: of the members, whole parts of `unit`, which those of a group add up to.
        unit: see there.
        groups: of the members, in ascending order.
    """
    counts, remainders = np.divmod(weights * count, unit)
    left = count - np.bincount(groups, weights=counts).astype(np.int64)
    order = np.lexsort((-remainders, groups))  # stable: of equals the first
    first = np.searchsorted(groups, groups)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return np.asarray(counts + (place - first < left[groups]))

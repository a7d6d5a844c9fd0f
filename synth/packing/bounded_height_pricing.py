"""Which trees of at most a given height are the cheapest at some prices of the links: carriers for a packing.

A carrier is a tree for each root, or for an allreduce a pair with the same root. What comes out is the best
there is where few ranks take part, and elsewhere a good one until somebody asks for the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import TypeAlias

import numpy as np

from arborcast.synth.kernels.arborescence import FORBIDDEN, Distances, LogicalGraph
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.kernels.edmonds import LengthArray
from arborcast.synth.packing.bounded_tree import (
    LARGEST_EXACT,
    UNUSABLE,
    BoundedTrees,
    cheapest_bounded,
    effort_of,
    improve_bounded,
)
from arborcast.synth.packing.carrier import Carrier, mirrored, pair
from arborcast.synth.topology import Topology

EXACT_AT_ONCE = 10
"""Ranks up to which the cheapest tree takes a millisecond, so that nothing else is tried first."""

_STARTS = 384  # drawn for all roots together, from which the search among many ranks sets out
_LEAST_STARTS = 24  # for each root

Priced: TypeAlias = tuple[int, int, Carrier]
"""A group, a cost and the carrier that has it."""


@dataclass(eq=False)
class Pricing:
    """The cheapest carriers of one question.

    Attributes:
        topology: the graph; relays are switches already.
        roots: whose trees are wanted, each a group of its own; None for the pairs of an allreduce, one group.
        height: the most layers of a tree.
        seed: draws where searches set out.
        effort: additions spent on exact answers so far.
    """

    topology: Topology
    roots: Sequence[int] | None
    height: int
    seed: int = 0
    effort: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Set up the search among many ranks."""
        self._random = np.random.default_rng(self.seed)
        self._levels: dict[bool, Ints] = {}

    @property
    def groups(self) -> int:
        """Of carriers, each of which must carry the same."""
        return 1 if self.roots is None else len(self.roots)

    @property
    def can_be_exact(self) -> bool:
        """Whether the best can be asked for."""
        return self.topology.ranks <= LARGEST_EXACT

    @property
    def is_exact(self) -> bool:
        """Whether the best comes without asking."""
        return self.topology.ranks <= EXACT_AT_ONCE

    @property
    def effort_of_one(self) -> int:
        """Additions for one exact answer."""
        pairs = 1 if self.roots is not None or self.topology.is_symmetric else 2
        roots = self.topology.ranks if self.roots is None else len(self.roots)
        return pairs * effort_of(self.topology.ranks, roots, self.height)

    def carriers(self, lengths: Ints, *, exactly: bool = False) -> list[Priced]:
        """Cheap carriers, the cheapest of each group among them if `exactly` or `is_exact`.

        Args:
            lengths: the price of each link, in the order of `topology.links`: whole numbers above 0 that add
                up to much less than `LARGEST_COST`.
            exactly: ask for the best.

        Returns:
            Those that exist, at least one per group.
        """
        exactly = exactly or self.is_exact
        if self.roots is not None:
            there = self._graph.distances(lengths)
            found = self._trees(there, np.array(self.roots), exactly)
            group_of = {root: group for group, root in enumerate(self.roots)}
            return [(group_of[tree.root], cost, tree) for tree, cost in found]
        return (
            self._mirrored(lengths, exactly) if self.topology.is_symmetric else self._pairs(lengths, exactly)
        )

    def _mirrored(self, lengths: Ints, exactly: bool) -> list[Priced]:
        """Pairs that gather where they spread: on links that go both ways no others carry more together.

        Turning a packing round gives another one, and half of both is one with the same load both ways; at
        prices that are the same both ways, a pair of the cheapest tree with itself is the cheapest.
        """
        both = lengths + lengths[self._turned]
        there = self._graph.distances(both)
        found = self._trees(there, np.arange(self.topology.ranks), exactly)
        return [(0, cost, mirrored(tree)) for tree, cost in found]

    def _pairs(self, lengths: Ints, exactly: bool) -> list[Priced]:
        every = np.arange(self.topology.ranks)
        there = self._graph.distances(lengths)
        back = self._back.distances(lengths[self._turned])
        outs = self._trees(there, every, exactly)
        ins = {tree.root: (tree, cost) for tree, cost in self._trees(back, every, exactly, turned=True)}
        return [
            (0, cost + ins[out.root][1], pair(out, ins[out.root][0], out.weight))
            for out, cost in outs
            if out.root in ins
        ]

    def _trees(
        self, there: Distances, roots: Ints, exactly: bool, *, turned: bool = False
    ) -> list[tuple[Carrier, int]]:
        """Cheap trees from those roots from which there are any, with their costs."""
        found = self._bounded(there.entering, roots, exactly, turned)
        return [
            (Carrier(root, Fraction(1), there.routes(parents)), int(cost))
            for root, parents, cost in zip(roots.tolist(), found.parents, found.cost, strict=True)
            if cost < UNUSABLE
        ]

    def _bounded(self, entering: LengthArray, roots: Ints, exactly: bool, turned: bool) -> BoundedTrees:
        if exactly:
            self.effort += effort_of(self.topology.ranks, len(roots), self.height)
            return cheapest_bounded(entering, roots, self.height)
        draws = max(_LEAST_STARTS, _STARTS // len(roots))
        starts = np.tile(roots, draws)
        levels = self._random.integers(1, self.height + 1, (len(starts), self.topology.ranks))
        before = self._levels.get(turned, self._nearest(entering, roots))
        found = improve_bounded(
            entering,
            np.concatenate((roots, starts)),
            self.height,
            np.concatenate((before, _rooted(levels, starts))),
        )
        # Of each root the cheapest, from which the search goes on next time.
        order = np.lexsort((found.cost, np.concatenate((roots, starts))))
        best = order[:: draws + 1][np.argsort(np.argsort(roots))]
        self._levels[turned] = found.levels[best]
        return BoundedTrees(found.cost[best], found.parents[best], found.levels[best])

    def _nearest(self, entering: LengthArray, roots: Ints) -> Ints:
        """Each rank as near to the root as it can be."""
        levels = np.full((len(roots), self.topology.ranks), self.height)
        reach = entering < FORBIDDEN
        for row, root in zip(levels, roots, strict=True):
            row[root] = 0
            joined = np.zeros(len(row), dtype=np.bool_)
            joined[root] = True
            for level in range(1, self.height):
                new = (reach & joined[None, :]).any(axis=1) & ~joined
                row[new] = level
                joined |= new
        return levels

    @cached_property
    def _graph(self) -> LogicalGraph:
        return LogicalGraph(self.topology)

    @cached_property
    def _back(self) -> LogicalGraph:
        return LogicalGraph(self.topology.reversed())

    @cached_property
    def _turned(self) -> Ints:
        """For each link of the reversed topology, the index of the link that it was."""
        return self._graph.numbers(self._back.heads, self._back.tails)


def least_height(topology: Topology, roots: Sequence[int] | None) -> int:
    """The fewest layers in which trees from all roots (None: a pair from some root) reach all ranks.

    `topology.ranks` and more where no trees do.
    """
    farthest = _farthest(topology, range(topology.ranks) if roots is None else roots)
    if roots is not None:
        return max(farthest)
    back = farthest if topology.is_symmetric else _farthest(topology.reversed(), range(topology.ranks))
    return min(map(max, farthest, back))


def _farthest(topology: Topology, roots: Sequence[int]) -> list[int]:
    graph = LogicalGraph(topology)
    return [int(graph.hops(root).max()) for root in roots]


def _rooted(levels: Ints, roots: Ints) -> Ints:
    levels[np.arange(len(roots)), roots] = 0
    return levels

"""The best rate of an alltoall by trees of shortest ways: link lengths from cutting planes, one row per tree.

By averaging over symmetries the best link lengths are equal within each orbit of links, and one source
of each orbit of ranks says what all of them travel. The linear program over these lengths is small; its
rows say that no source travels less than along its shortest ways, its prices say how much of its blocks
each source sends along which tree. Solved exactly it gives the limit and the flow that reaches it at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.bounds.shortest_paths import FAR, ShortestPaths, ShortestTree
from arborcast.synth.collective import Collective
from arborcast.synth.deadline import Deadline
from arborcast.synth.kernels.compiled import Ints, kernel
from arborcast.synth.lp.linear_program import LinearProgram, rationalize
from arborcast.synth.symmetry.permutations import orbit_numbers
from arborcast.synth.topology import Permutation, Topology

LARGEST_EXACT = 600
"""Orbits of links and ranks together up to which the program is solved exactly: a dense system."""

_FINE = 1 << 28  # parts of the longest floating length that a search can tell apart
_PARTS = 1 << 20  # of the largest share, where shares are rounded
_GAIN = 1e-9  # by which part a way must be shorter than what the program believes, to count


@dataclass(frozen=True, slots=True)
class RoutedTree:
    """What a source sends along one tree of ways: to every target this share of its block.

    Attributes:
        source: the first rank of its orbit.
        entering: the last link of the way to each vertex, -1 where there is none.
        share: of each block; those of one source add up to 1.
    """

    source: int
    entering: Ints
    share: Fraction


@dataclass(frozen=True, slots=True)
class BestRouting:
    """The optimum of an alltoall.

    Attributes:
        lengths: a whole length for each orbit of links, which prove the limit.
        trees: flows of the sources; where `exact`, they reach that limit.
        exact: whether both are known to be the optimum, in exact arithmetic.
    """

    lengths: Ints
    trees: tuple[RoutedTree, ...]
    exact: bool


@dataclass(frozen=True, eq=False)
class OrbitPartition:
    """Which links and which ranks some automorphisms of a topology map to each other.

    Attributes:
        link_orbits: the number of each link's orbit, in order of their first links.
        sources: the first rank of each orbit of the ranks that take part.
        weights: how many ranks each of these orbits has.
    """

    link_orbits: Ints
    sources: tuple[int, ...]
    weights: tuple[int, ...]

    @classmethod
    def under(
        cls, topology: Topology, collective: Collective, generators: Iterable[Permutation]
    ) -> OrbitPartition:
        """The orbits under those of the automorphisms that map the ranks that take part to themselves."""
        members = collective.members
        kept = [
            np.array(images, dtype=np.int64)
            for images in generators
            if all(images[rank] in members for rank in members)
        ]
        ways = ShortestPaths(topology)
        moved = [ways.numbers(images[ways.tails], images[ways.heads]) for images in kept]
        ranks = sorted(members)
        of_rank = orbit_numbers(topology.size, kept)[ranks]
        _, firsts, weights = np.unique(of_rank, return_index=True, return_counts=True)
        return cls(
            orbit_numbers(len(ways.tails), moved),
            tuple(ranks[at] for at in firsts.tolist()),
            tuple(weights.tolist()),
        )


class RoutingProgram:
    """The linear program over the lengths of link orbits, with one row for each tree met so far.

    Column k is the length of orbit k; then comes, for each source, how far its blocks travel together.
    Minimise what all links offer, bandwidth times length, while all blocks together travel as many units as
    there are blocks. The price of that row is the GB/s of a block, the prices of trees are their flows.
    """

    def __init__(self, topology: Topology, collective: Collective, alike: OrbitPartition) -> None:
        self._ways = ShortestPaths(topology)
        self._alike = alike
        self._orbits = 1 + int(alike.link_orbits.max(initial=-1))  # none without any link
        self._targets = np.zeros(topology.size, dtype=np.int64)
        self._targets[list(collective.ranks)] = 1
        self._hops = topology.size + 1  # more than any way has: what a length counts beside its hop
        offers = [0] * self._orbits
        for orbit, capacity in zip(alike.link_orbits.tolist(), topology.capacities, strict=True):
            offers[orbit] += capacity
        sources = len(alike.sources)
        self._program = LinearProgram([-offer for offer in offers] + [0] * sources, scale=1)
        blocks = len(collective.ranks) * (len(collective.ranks) - 1)
        self._blocks = blocks
        self._program.add_row(
            range(self._orbits, self._orbits + sources), alike.weights, lower=blocks
        )  # row 0; row i + 1 is that of tree i
        self._trees: list[tuple[int, Ints]] = []
        self._known: set[tuple[int, bytes]] = set()

    @cached_property
    def connected(self) -> bool:
        """Whether every source reaches all ranks that take part."""
        targets = np.flatnonzero(self._targets)
        ones = np.ones(self._orbits, dtype=np.int64)
        trees = [self._tree(ones, source) for source in self._alike.sources]
        return all(bool((tree.distance[targets] < FAR).all()) for tree in trees)

    def shortest(self) -> BestRouting:
        """Fallback: each block whole on a way of the fewest links."""
        ones = np.ones(self._orbits, dtype=np.int64)
        trees = [
            RoutedTree(source, self._tree(ones, source).entering, Fraction(1))
            for source in self._alike.sources
        ]
        return BestRouting(ones, tuple(trees), exact=False)

    def solve(self, deadline: Deadline) -> BestRouting:
        """The best lengths and flows.

        Raises:
            TimedOutError: too late; a limit by simple lengths is all there is.
            ArithmeticError: HiGHS fails.
        """
        if not self.connected:
            raise ArithmeticError("an alltoall among ranks that cannot reach each other has the rate zero")
        nothing = np.zeros(self._orbits), np.full(len(self._alike.sources), np.inf)
        offers = -np.array(self._program.objective[: self._orbits], dtype=np.float64)
        for simple in (np.ones(self._orbits), offers.max() / offers):
            self._add_shorter(self._whole(simple), *nothing)
        steady = np.ones(self._orbits)
        while True:
            deadline.check("the linear program of the routes")
            values = self._program.solve(deadline)
            lengths, believed = np.maximum(values[: self._orbits], 0), values[self._orbits :]
            # Between good old lengths and the newest ones a cut goes deeper and zigzags less.
            steady = (steady + lengths) / 2
            if self._add_shorter(self._whole(steady), lengths, believed):
                continue
            if self._add_shorter(self._whole(lengths), lengths, believed):
                continue
            best = self._best(lengths)
            if best is not None:
                return best

    def _whole(self, lengths: NDArray[np.float64]) -> Ints:
        """Floating lengths in whole parts of the longest."""
        whole: Ints = np.round(lengths * (_FINE / lengths.max())).astype(np.int64)
        return whole

    def _tree(self, lengths: Ints, source: int) -> ShortestTree:
        """Shortest ways under whole lengths of orbits, of fewest links among equals: none has a cycle."""
        return self._ways.tree(lengths[self._alike.link_orbits] * self._hops + 1, source)

    def _loads(self, tree: ShortestTree) -> Ints:
        """How many blocks pass each orbit of links, one to each target."""
        return _tree_loads(
            tree.order, tree.entering, self._ways.tails, self._alike.link_orbits, self._targets, self._orbits
        )

    def _add_shorter(self, whole: Ints, lengths: NDArray[np.float64], believed: NDArray[np.float64]) -> bool:
        """Add the trees under some lengths that contradict the program; whether there are any."""
        added = False
        for position, source in enumerate(self._alike.sources):
            tree = self._tree(whole, source)
            loads = self._loads(tree)
            way = math.fsum((loads * lengths).tolist())  # rounded once: every machine decides alike
            if believed[position] > way * (1 + _GAIN) + _GAIN:
                added |= self._add(position, tree, loads)
        return added

    def _add(self, position: int, tree: ShortestTree, loads: Ints) -> bool:
        key = position, loads.tobytes()
        if key in self._known:
            return False
        self._known.add(key)
        used = np.flatnonzero(loads).tolist()
        self._program.add_row([self._orbits + position, *used], [1, *(-loads[used]).tolist()], upper=0)
        self._trees.append((position, tree.entering))
        return True

    def _best(self, lengths: NDArray[np.float64]) -> BestRouting | None:
        """The optimum as proved as it can be; None where exact arithmetic found a shorter tree to add."""
        near = self._rounded(lengths)
        if self._orbits + len(self._alike.sources) > LARGEST_EXACT:
            return near
        try:
            vertex = self._program.exact()
        except ArithmeticError:
            return near
        exact = vertex.values[: self._orbits]
        parts = math.lcm(*(length.denominator for length in exact))
        trees = self._weighted([abs(price) for price in vertex.prices])
        # Sums over a way must stay exact, with the hop beside each length.
        most = max(self._ways.topology.size, len(self._ways.tails))
        longest = int(max(exact) * parts) * self._hops * most
        if min(exact) < 0 or min(vertex.prices[1:]) < 0 or longest >= FAR:
            return near
        whole = np.array([int(length * parts) for length in exact], dtype=np.int64)
        travelled, added = 0, False
        for position, (source, weight) in enumerate(
            zip(self._alike.sources, self._alike.weights, strict=True)
        ):
            tree = self._tree(whole, source)
            loads = self._loads(tree)
            together = int(loads.astype(object) @ whole.astype(object))
            travelled += weight * together
            if together < vertex.values[self._orbits + position] * parts:
                added |= self._add(position, tree, loads)
        if travelled == self._blocks * parts:
            return BestRouting(whole, trees, exact=True)
        return None if added else near

    def _rounded(self, lengths: NDArray[np.float64]) -> BestRouting:
        """Rounded lengths and the flow of the last solution of the program."""
        fractions = rationalize(lengths / lengths.max(), _FINE)
        parts = math.lcm(*(fraction.denominator for fraction in fractions))
        whole = np.array([int(fraction * parts) for fraction in fractions], dtype=np.int64)
        return BestRouting(whole, self._rounded_trees(), exact=False)

    def _weighted(self, prices: Sequence[Fraction]) -> tuple[RoutedTree, ...]:
        """The trees that are used, with the shares that their prices say."""
        totals = [Fraction(0)] * len(self._alike.sources)
        for (position, _), price in zip(self._trees, prices[1:], strict=True):
            totals[position] += price
        return tuple(
            RoutedTree(self._alike.sources[position], entering, price / totals[position])
            for (position, entering), price in zip(self._trees, prices[1:], strict=True)
            if price
        )

    def _rounded_trees(self) -> tuple[RoutedTree, ...]:
        """The trees with floating shares, rounded."""
        prices = np.abs(self._program.prices())
        return self._weighted(
            [Fraction(round(price * _PARTS / prices[1:].max())) for price in prices.tolist()]
        )


@kernel
def _tree_loads(order: Ints, entering: Ints, tails: Ints, orbits: Ints, targets: Ints, count: int) -> Ints:
    """Blocks over each orbit of links: every link carries those of the targets beyond it."""
    beyond = targets.copy()
    loads = np.zeros(count, dtype=np.int64)
    for place in range(len(order) - 1, 0, -1):
        vertex = order[place]
        link = entering[vertex]
        loads[orbits[link]] += beyond[vertex]
        beyond[tails[link]] += beyond[vertex]
    return loads

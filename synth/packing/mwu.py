"""Packings by multiplicative weights, the method of BLINK: any accuracy, no linear program.

Every link has a length that grows with its load; each turn takes the cheapest carrier under the lengths
and gives it as much as its narrowest link allows. The lengths are at the same time a dual, so that each
phase ends with a proven limit and the run knows how far from the optimum it is.

Sources: Wang et al., BLINK (MLSys 2020), section 4; Garg and Koenemann (FOCS 1998).
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TypeAlias

import numpy as np

from arborcast.synth.deadline import NO_DEADLINE, Deadline
from arborcast.synth.errors import InputError
from arborcast.synth.kernels.arborescence import LogicalGraph, cheapest_arborescence
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.packing.weighted_tree import Packing, WeightedTree, congestion, mirrored, pair
from arborcast.synth.schedule import Settings
from arborcast.synth.topology import Topology

DEFAULT_EPSILON = Fraction(1, 20)
DEFAULT_ITERATIONS = 200_000

_GRAIN = 840  # whole amounts per unit of capacity: small shares of a link stay whole for 1 to 8 uses
_FULL_LENGTH = 1 << 36  # the longest link of a phase as an integer; sums over a tree stay inside int64
_COARSE_PHASES = 8  # before the growth is halved for the first time
_PRICED_PHASES = 4  # with several commodities a limit costs calls of its own, so not every phase has one
_SHORTEST = 1e-9  # relative to the longest; below that a link costs nothing anyway
_LONGEST = 1 << 10  # times the longest at first: a phase that fills narrow links again and again starts anew


@dataclass(frozen=True, slots=True)
class PricedTree:
    """The cheapest carrier under some lengths, its cost and how many arborescences it took to find it."""

    carrier: WeightedTree
    cost: int
    calls: int


Finder: TypeAlias = Callable[[Ints], PricedTree]


def weigh(
    topology: Topology,
    roots: Sequence[int] | None,
    *,
    epsilon: Fraction = DEFAULT_EPSILON,
    iterations: int = DEFAULT_ITERATIONS,
    seed: int = 0,
    stop_at: Fraction | None = None,
    deadline: Deadline = NO_DEADLINE,
) -> Packing:
    """Out-trees from each root, or the pairs of an allreduce, at (1 - epsilon) of the largest rate or more.

    On symmetric links mirrored pairs reach the optimum and the root does not matter, so that one
    arborescence is enough per turn; otherwise each turn takes the root whose two arborescences are
    cheapest together.

    Args:
        topology: the graph; switches are passed as they are, balanced or not.
        roots: one for a broadcast, all ranks for an allgather, all at one rate; None for an allreduce, whose
            roots are free.
        epsilon: the share of the optimum that may be missed, above 0 and below 1.
        iterations: arborescences after which the run ends, guarantee or not; whole phases are finished.
        seed: breaks ties between links.
        stop_at: a rate per root in GB/s that is enough.
        deadline: when the run ends, guarantee or not; with several roots once each has
            got as much as the others.

    Returns:
        Carriers with exact weights that fill the fullest link exactly. `settings` hold epsilon, the number
        of arborescences ("iterations"), the proven limit of the rate per root ("limit") and why it
        stopped ("stopped": guarantee, enough, iterations or deadline).

    Raises:
        InputError: an epsilon or a number of iterations out of its range.
        InfeasibleError: a rank cannot be reached.
    """
    graph = LogicalGraph(topology)
    if roots is not None:
        finders = [_tree_finder(graph, root) for root in roots]
    else:
        finders = [_mirrored_finder(graph) if topology.is_symmetric else _pair_finder(graph)]
    run = _MwuRun(topology, finders, epsilon, iterations, seed)
    carriers = run.until(_enough(topology, roots or ()), stop_at, deadline)
    return Packing(carriers, run.settings)


def _tree_finder(graph: LogicalGraph, root: int) -> Finder:
    def find(lengths: Ints) -> PricedTree:
        distances = graph.distances(lengths)
        routes = distances.routes(cheapest_arborescence(distances.matrix, root))
        tree = WeightedTree(root, Fraction(0), routes)
        return PricedTree(tree, int(tree.uses @ lengths), 1)

    return find


def _mirrored_finder(graph: LogicalGraph) -> Finder:
    """One tree serves both ways: an edge costs what its links cost there and back."""
    find_tree = _tree_finder(graph, 0)

    def find(lengths: Ints) -> PricedTree:
        found = find_tree(lengths + lengths[graph.reverse])
        return PricedTree(mirrored(found.carrier), found.cost, 1)

    return find


def _pair_finder(outward: LogicalGraph) -> Finder:
    inward = LogicalGraph(outward.topology.reversed())
    there = outward.numbers(inward.heads, inward.tails)
    finders = [(_tree_finder(outward, root), _tree_finder(inward, root)) for root in range(outward.ranks)]

    def find(lengths: Ints) -> PricedTree:
        both = ((find_out(lengths), find_in(lengths[there])) for find_out, find_in in finders)
        out, into = min(both, key=lambda pair: pair[0].cost + pair[1].cost)
        carrier = pair(out.carrier, into.carrier, Fraction(0))
        return PricedTree(carrier, out.cost + into.cost, 2 * outward.ranks)

    return find


def _enough(topology: Topology, roots: Sequence[int]) -> Fraction:
    """Units of capacity per root and phase: what the narrowest rank can take in; no less than the optimum."""
    arriving = dict.fromkeys(range(topology.ranks), 0)
    for link, capacity in zip(topology.links, topology.capacities, strict=True):
        if link.dst in arriving:
            arriving[link.dst] += capacity
    return min(
        Fraction(capacity, len(set(roots) - {rank}) or 1)
        for rank, capacity in arriving.items()
        if set(roots) != {rank}
    )


@dataclass
class _MwuRun:
    """One run; `finders` give the cheapest carrier of each commodity, and all get the same amount."""

    topology: Topology
    finders: Sequence[Finder]
    epsilon: Fraction
    iterations: int
    seed: int
    calls: int = 0
    limit: Fraction | None = None  # per commodity, in units of capacity
    stopped: str = ""
    amounts: dict[tuple[int, tuple[bytes, ...]], int] = field(default_factory=dict)
    carriers: dict[tuple[int, tuple[bytes, ...]], WeightedTree] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < 1:
            raise InputError(f"epsilon: must be above 0 and below 1, got {self.epsilon}")
        if self.iterations < 1:
            raise InputError(f"iterations: must be at least 1, got {self.iterations}")
        self.room = np.array(self.topology.capacities, dtype=np.float64) * _GRAIN
        self.load = np.zeros_like(self.room)
        # The seed only breaks ties: a change of up to 1 % of the first lengths is soon outgrown.
        noise = random.Random(self.seed)
        self.lengths = np.array([1 + noise.random() / 100 for _ in self.room]) / self.room
        # In the limit of many phases a growth of 2 epsilon gives the guarantee (ln(1 + g) / g >= 1 - g / 2).
        # Several commodities take turns under lengths that grow meanwhile, which costs as much again.
        self.least_growth = float(self.epsilon) * (2 if len(self.finders) == 1 else 1)

    @property
    def settings(self) -> Settings:
        """What `weigh` documents."""
        limit = None if self.limit is None else str(self.limit * self.topology.bandwidth_unit)
        return (
            ("epsilon", str(self.epsilon)),
            ("iterations", self.calls),
            ("limit", limit),
            ("stopped", self.stopped),
        )

    def until(
        self, enough: Fraction, stop_at: Fraction | None, deadline: Deadline
    ) -> tuple[WeightedTree, ...]:
        """Phases, in each of which every commodity gets `enough`, until one of the reasons to stop."""
        amount = max(1, int(enough * _GRAIN))
        wanted = None if stop_at is None else float(stop_at / self.topology.bandwidth_unit)
        phases = 0
        while not self.stopped:
            if not self._phase(amount, self._growth(phases), deadline):
                self.stopped = "deadline"
                break
            phases += 1
            if len(self.finders) > 1 and phases % _PRICED_PHASES == 0:
                self._price_all()
            # A hair more than asked, so that the exact rate is on the right side of the line as well.
            rate = phases * amount / _GRAIN / float((self.load / self.room).max()) * (1 - 1e-9)
            if self.limit is not None and rate >= float((1 - self.epsilon) * self.limit):
                self.stopped = "guarantee"
            elif wanted is not None and rate >= wanted:
                self.stopped = "enough"
            elif self.calls >= self.iterations:
                self.stopped = "iterations"
            elif deadline.has_passed:
                self.stopped = "deadline"
        return self._filled()

    def _growth(self, phases: int) -> float:
        """How much a full link grows: coarse at first, and halved as often as the phases quadruple."""
        growth = 8 * self.least_growth
        while phases > _COARSE_PHASES and growth > self.least_growth:
            growth, phases = growth / 2, phases // 4
        return min(growth, 0.5)

    def _phase(self, amount: int, growth: float, deadline: Deadline) -> bool:
        """Give every commodity the amount; whether the deadline left time for it.

        A phase of several commodities is finished in any case, because all of them must get the same.
        """
        self._shorten()
        for commodity, find in enumerate(self.finders):
            left = amount
            while left:
                lengths = self._whole_lengths()
                found = find(lengths)
                if len(self.finders) == 1:
                    self._note_limit(lengths, found.cost)
                left -= self._give(commodity, found, left, growth)
                if left and len(self.finders) == 1 and deadline.has_passed:
                    return False
        return True

    def _price_all(self) -> None:
        """The limit that the lengths of this moment prove for several commodities."""
        lengths = self._whole_lengths()
        found = [find(lengths) for find in self.finders]
        self.calls += sum(each.calls for each in found)
        self._note_limit(lengths, sum(each.cost for each in found))

    def _note_limit(self, lengths: Ints, cost: int) -> None:
        """Weak duality: what all links offer over what one unit for each commodity costs."""
        offered = sum(map(operator.mul, self.topology.capacities, lengths.tolist()))
        limit = Fraction(offered, cost)
        self.limit = limit if self.limit is None else min(self.limit, limit)

    def _whole_lengths(self) -> Ints:
        return (self.lengths * _FULL_LENGTH).astype(np.int64) + 1

    def _give(self, commodity: int, found: PricedTree, most: int, growth: float) -> int:
        """Give a carrier what its narrowest link has in all, and let its links grow longer."""
        uses = found.carrier.uses
        passed = np.flatnonzero(uses)
        fill = uses[passed] / self.room[passed]
        given = min(most, max(1, int(1 / fill.max())))
        key = (commodity, found.carrier.key)
        self.carriers.setdefault(key, found.carrier)
        self.amounts[key] = self.amounts.get(key, 0) + given
        self.load[passed] += given * uses[passed]
        self.lengths[passed] *= 1 + growth * given * fill
        self.calls += found.calls
        if self.lengths.max() > _LONGEST:
            self._shorten()
        return given

    def _shorten(self) -> None:
        """Make the longest length 1: only their ratios matter."""
        self.lengths = np.maximum(self.lengths / self.lengths.max(), _SHORTEST)

    def _filled(self) -> tuple[WeightedTree, ...]:
        """The carriers with exact weights, scaled so that the fullest link is full."""
        weighed = [
            replace(self.carriers[key], weight=Fraction(amount)) for key, amount in self.amounts.items()
        ]
        fullest = congestion(weighed, self.topology)
        return tuple(replace(carrier, weight=carrier.weight / fullest) for carrier in weighed)

"""Column generation over orbits: prices of the link orbits say which trees are missing, until none is.

Four sources of trees are asked in turn: the trees that cross the tight cut the minimum number of times,
spread evenly by prices (low, and often enough); cheapest trees under coarse prices, among which many are
equally cheap and some are low; cheapest trees under fine prices, whose absence proves the optimum; of trees
below a height, where few ranks take part, those of a recursion that finds the cheapest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache, partial

import numpy as np

from arborcast.synth.deadline import Deadline
from arborcast.synth.kernels.arborescence import LogicalGraph, Routes
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.lp.master import Master
from arborcast.synth.lp.tree_program import CLOSE, TreeProgram, Weighed, whole_prices
from arborcast.synth.packing.bounded_tree import LARGEST_EXACT, UNUSABLE, cheapest_bounded, effort_of
from arborcast.synth.packing.symmetric.contraction import LaminarFamily, contract
from arborcast.synth.packing.symmetric.growth import grow
from arborcast.synth.packing.symmetric.orbit_problem import OrbitTree, Problem, hops_from

log = logging.getLogger(__name__)

COARSE, FINE = 1 << 6, 1 << 30
"""The largest price as a length: of coarse prices many are equal."""

EFFORT = 1_200_000_000
"""Additions that exact pricing below a height is worth: seconds, where most questions need less than one."""

EXACT_AT_ONCE = 10
"""Ranks up to which the cheapest low tree takes a millisecond, so that nothing else is tried first."""

_FINEST = 1 << 42  # below a height; 64 links cost no more than one edge may
_TERTIARY = 1 << 20  # the largest price among equally long ways
_ROUNDS = 2000  # of weighing and pricing
_PATIENCE = 8  # rounds in which a quarter of what is missing must be found
_WARM = 6  # rounds in which loads, not the linear program, make the prices
_EXACT_TURNS = 20  # that exact prices are asked for a tree that rounded ones did not find
_HOP_PRICES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 1 << 20)


@dataclass
class Generation:
    """Trees for one problem, at most so high.

    Attributes:
        problem: what is packed.
        tight: lengths of the orbits under which all trees of an optimum are cheapest, if they are known.
        deadline: when to stop.
        max_height: higher trees are none; None for any height.
        rounds: of weighing and pricing, at most.
        effort: additions that exact pricing below a height may take.
        grown: trees grown so far, whether new or not.
    """

    problem: Problem
    tight: Ints | None
    deadline: Deadline
    max_height: int | None = None
    rounds: int = _ROUNDS
    effort: int = EFFORT
    grown: int = 0
    _hop_price: dict[int, int] = field(default_factory=dict)

    @cached_property
    def master(self) -> Master[OrbitTree]:
        """All trees that were met, and the program that weighs them."""
        return Master(self.problem.rows)

    @property
    def limit(self) -> Fraction:
        """The least rate that no trees, of any or of the given height, were proved to exceed."""
        return Fraction(1) if self.master.limit is None else min(Fraction(1), self.master.limit)

    def up_to(self, height: int | None) -> list[OrbitTree]:
        """The trees of at most a height."""
        return [column for column in self.master.columns if height is None or column.height <= height]

    def run(self) -> Weighed:
        """Generate until the target is reached, no tree would help or the deadline has passed.

        Notes the limit that is then proved.
        """
        if self.max_height is not None and self.problem.topology.ranks <= EXACT_AT_ONCE:
            return self._run_exactly(self.max_height)
        zero = np.zeros(len(self.problem.budgets), dtype=np.int64)
        for lengths in [zero] if self.tight is None else [self.tight, zero]:
            self._take(self.spread(lengths))
        weighed = self._follow_cut(self.master.program.solve())
        if weighed.rate < 1 - CLOSE and not self.deadline.has_passed:
            self._warm()
            if self.max_height is not None:
                self._warm_exactly(self.max_height)
            sources = [self._smooth(COARSE), self._smooth(FINE), self._fine]
            if self.max_height is not None:
                sources.append(partial(self._bounded, self.max_height))
            weighed = self.master.run(sources, self.deadline, rounds=self.rounds)
        if weighed.rate < 1 - CLOSE and not self.deadline.has_passed:
            weighed = self._prove(weighed)
        log.info("%d columns, rate %.9f of the target", len(self.master.columns), weighed.rate)
        return weighed

    def _run_exactly(self, height: int) -> Weighed:
        self._warm_exactly(height)
        weighed = self.master.run([partial(self._bounded, height)], self.deadline, rounds=self.rounds)
        return weighed if weighed.rate >= 1 - CLOSE else self._prove(weighed)

    def _warm_exactly(self, height: int) -> None:
        """Cheapest trees under prices that grow with what those before have used: narrow links cost more."""
        slowest = min(self.problem.budgets)
        even = np.array([max(1, int(FINE * slowest / budget)) for budget in self.problem.budgets])
        loads = np.zeros(len(even), dtype=np.int64)
        for turn in range(_WARM):
            if turn and self.deadline.has_passed:
                return
            lengths = even * (1 + loads)
            columns = list(self._priced_exactly(lengths, height))
            self._take(columns)
            for group in range(len(self.problem.groups)):
                members = [np.array(column.uses) for column in columns if column.group == group]
                loads += min(
                    members, key=lambda uses: int((uses * lengths).sum()), default=np.zeros_like(loads)
                )
            loads = np.minimum(loads, _WARM)

    def _follow_cut(self, weighed: Weighed) -> Weighed:
        """Trees that cross the tight cut the minimum number of times, while they bring the target nearer."""
        mark = weighed.rate
        for turn in range(1, self.rounds):
            if self.tight is None or weighed.rate >= 1 - CLOSE or self.deadline.has_passed:
                break
            columns = self._low(self.trees(self.tight, whole_prices(weighed.prices, _TERTIARY)))
            if not self.master.add_helpful(columns, weighed):
                break
            weighed = self.master.program.solve()
            if turn % _PATIENCE == 0:
                if weighed.rate - mark < (1 - mark) / 4:
                    break
                mark = weighed.rate
        return weighed

    def _smooth(self, finest: int) -> Callable[[Weighed], Iterable[OrbitTree]]:
        """Trees that are cheapest under the mean of earlier prices, which zigzag less."""
        smooth: list[np.ndarray] = []

        def source(weighed: Weighed) -> Iterator[OrbitTree]:
            smooth[:] = [(smooth[0] + weighed.prices) / 2 if smooth else weighed.prices]
            base = whole_prices(weighed.prices, _TERTIARY)
            return self._low(self.trees(whole_prices(smooth[0], finest), base))

        return source

    def _fine(self, weighed: Weighed) -> Iterator[OrbitTree]:
        base = whole_prices(weighed.prices, _TERTIARY)
        return self._low(self.trees(whole_prices(weighed.prices, FINE), base))

    def _bounded(self, height: int, weighed: Weighed) -> Iterator[OrbitTree]:
        # Never nothing: among ways that cost as little the shortest is meant.
        return self._priced_exactly(whole_prices(weighed.prices, _FINEST) + 1, height)

    def _prove(self, weighed: Weighed) -> Weighed:
        """The limits of the prices at the end, rounded and exact; trees that these ask for are added."""
        master, height = self.master, self.max_height
        if height is None:
            self._prove_by(whole_prices(weighed.prices, FINE))
        for _ in range(_EXACT_TURNS):
            prices = master.exact_prices(FINE if height is None else _FINEST)
            if prices is None or self.deadline.has_passed:
                break
            if height is None:
                self._prove_by(prices)
                break
            if not master.add_helpful(self._priced_exactly(prices, height), None):
                break
            weighed = master.program.solve()
        return weighed

    def _prove_by(self, lengths: Ints) -> None:
        cheapest: list[int | None] = [None] * len(self.problem.groups)
        for nest, group, root in self._nests(lengths):
            _note(cheapest, group, nest.cost(root))
        self.master.prove(lengths, cheapest)

    def _warm(self) -> None:
        """Trees under prices that grow with the loads: a good start where there is no tight cut to follow."""
        budgets = np.array([float(budget) for budget in self.problem.budgets])
        loads = np.zeros(len(budgets))
        for _ in range(_WARM):
            part = loads / (4 * max(loads.max(), 1e-12))
            growth = 1 + part + part * part / 2
            for _ in range(4):  # about exp(4 loads / most), by multiplications: those round alike everywhere
                growth = growth * growth
            columns = list(self.spread(whole_prices(growth / budgets, COARSE)))
            for column in columns:
                loads += np.array(column.uses) / budgets
            self._take(columns)

    def _low(self, columns: Iterable[OrbitTree]) -> Iterator[OrbitTree]:
        """Those that are low enough."""
        return (one for one in columns if self.max_height is None or one.height <= self.max_height)

    def _take(self, columns: Iterable[OrbitTree]) -> None:
        self.master.add_helpful(self._low(columns), None)

    def spread(self, lengths: Ints) -> Iterator[OrbitTree]:
        """A cheapest tree for each group, all of which together spread evenly over the orbits."""
        return self.series(lengths, [1] * len(self.problem.groups), self.problem.steepness)

    def series(self, lengths: Ints, numbers: Sequence[int], steepness: Ints) -> Iterator[OrbitTree]:
        """Cheapest trees, all of which together spread evenly over the orbits.

        Args:
            lengths: under which they are cheapest.
            numbers: how many trees each group gets.
            steepness: by how much each use raises the price of an orbit.
        """
        used = np.zeros(len(lengths), dtype=np.int64)
        nests = list(self._nests(lengths))
        for turn in range(max(numbers)):
            for nest, group, root in nests:
                if turn < numbers[group]:
                    column = self._grown(nest, group, root, 1 + used * steepness, steepness)
                    used += np.array(column.uses)
                    yield column

    def trees(self, lengths: Ints, base: Ints) -> Iterator[OrbitTree]:
        """A cheapest tree for each root that pays the least of some other price."""
        flat = np.zeros(len(lengths), dtype=np.int64)
        for nest, group, root in self._nests(lengths):
            yield self._grown(nest, group, root, 1 + base, flat)

    def _grown(self, nest: LaminarFamily, group: int, root: int, base: Ints, steepness: Ints) -> OrbitTree:
        graph = self.problem.graph(turned=self.problem.groups[group].turned)
        self.grown += 1
        return OrbitTree(group, root, *grow(graph, nest, self.problem.orbits, root, base, steepness))

    def _nests(self, lengths: Ints) -> Iterator[tuple[LaminarFamily, int, int]]:
        """For each root the contraction in which its tree is grown: one serves all roots of a side."""
        of_links = self.problem.orbits.spread(lengths)
        by_side: dict[bool, LaminarFamily] = {}
        for group, asked in enumerate(self.problem.groups):
            for root in asked.roots:
                if self.max_height is not None:
                    yield self._low_nest(of_links, asked.turned, root, self.max_height), group, root
                    continue
                if asked.turned not in by_side:
                    by_side[asked.turned] = contract(self.problem.graph(turned=asked.turned), of_links)
                yield by_side[asked.turned], group, root

    def _low_nest(self, of_links: Ints, turned: bool, root: int, height: int) -> LaminarFamily:
        """The contraction with the least price of a hop that makes the tree low enough, if any does."""
        graph = self.problem.graph(turned=turned)
        hops = hops_from(graph, root)
        unit = max(1, int(of_links.max()) // 16)
        ones = np.ones(len(self.problem.budgets), dtype=np.int64)
        scaled = of_links * 16
        # What was just enough before is tried first, then a little less.
        key = 2 * root + turned
        first = max(0, self._hop_price.get(key, 0) - 1)
        for place in range(first, len(_HOP_PRICES)):
            self._hop_price[key] = place
            nest = contract(graph, scaled, hops * _HOP_PRICES[place] * unit)
            routes, _ = grow(graph, nest, self.problem.orbits, root, ones, self.problem.steepness)
            if routes.height <= height:
                break
        return nest

    def _priced_exactly(self, lengths: Ints, height: int) -> Iterator[OrbitTree]:
        """For each root a cheapest tree of at most a height, and the limit that these prove.

        None where too many ranks take part or too much effort was spent before.

        Args:
            lengths: of the orbits.
            height: the most edges between a root and a rank.
        """
        problem, orbits = self.problem, self.problem.orbits
        ranks, roots = problem.topology.ranks, sum(len(group.roots) for group in problem.groups)
        if ranks > LARGEST_EXACT or effort_of(ranks, roots, height) > self.effort:
            return
        if ranks > EXACT_AT_ONCE:
            self.effort -= effort_of(ranks, roots, height)
        cheapest: list[int | None] = [None] * len(problem.groups)
        of_links = orbits.spread(lengths)
        found: list[OrbitTree] = []
        for turned in (False, True):
            members = [
                (index, root)
                for index, group in enumerate(problem.groups)
                for root in group.roots
                if group.turned == turned
            ]
            if not members:
                continue
            graph, order = _logical(problem, turned)
            distances = graph.distances(of_links[order])
            trees = cheapest_bounded(distances.entering, np.array([root for _, root in members]), height)
            for place, (index, root) in enumerate(members):
                if (cost := int(trees.cost[place])) >= UNUSABLE:
                    continue
                _note(cheapest, index, cost)
                routes = distances.routes(trees.parents[place])
                links = order[routes.links]
                tree = Routes(problem.graph(turned=turned), routes.parents, routes.starts, links)
                found.append(OrbitTree(index, root, tree, orbits.counted(links)))
        self.master.prove(lengths, cheapest)
        yield from found


def _note(cheapest: list[int | None], group: int, cost: int) -> None:
    before = cheapest[group]
    cheapest[group] = cost if before is None else min(cost, before)


def with_best_rate(problem: Problem, columns: Sequence[OrbitTree]) -> list[OrbitTree]:
    """The trees up to the least height at which the rate is that of all of them."""
    best = TreeProgram(problem.rows, columns).solve().rate
    heights = sorted({column.height for column in columns})
    low, high = 0, len(heights) - 1
    while low < high:
        middle = (low + high) // 2
        kept = [column for column in columns if column.height <= heights[middle]]
        is_enough = TreeProgram(problem.rows, kept).solve().rate >= best * (1 - CLOSE)
        low, high = (low, middle) if is_enough else (middle + 1, high)
    return [column for column in columns if column.height <= heights[low]]


@lru_cache(maxsize=8)
def _logical(problem: Problem, turned: bool) -> tuple[LogicalGraph, Ints]:
    """The graph to close over its switches, and the link of the problem behind each of its links."""
    graph = LogicalGraph(problem.topology.reversed() if turned else problem.topology)
    ends = (graph.heads, graph.tails) if turned else (graph.tails, graph.heads)
    return graph, problem.graph(turned=False).numbers(*ends)

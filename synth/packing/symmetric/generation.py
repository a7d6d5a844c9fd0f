"""Column generation over orbits: prices of the link orbits say which trees are missing, until none is.

Three sources of trees are asked in turn: the trees that cross the tight cut the minimum number of times,
spread evenly by prices (low, and often enough); cheapest trees under coarse prices, among which many are
equally cheap and some are low; cheapest trees under fine prices, whose absence proves the optimum.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

import numpy as np

from arborcast.synth.deadline import Deadline
from arborcast.synth.kernels.arborescence import LogicalGraph, Routes
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.lp.tree_program import CLOSE, Floats, TreeProgram, Weighed, whole_prices
from arborcast.synth.packing.bounded_tree import LARGEST_EXACT, UNUSABLE, cheapest_bounded, effort_of
from arborcast.synth.packing.symmetric.contraction import LaminarFamily, contract
from arborcast.synth.packing.symmetric.growth import grow
from arborcast.synth.packing.symmetric.problem import Column, Pool, Problem, hops_from

log = logging.getLogger(__name__)

COARSE, FINE = 1 << 6, 1 << 30
"""The largest price as a length: of coarse prices many are equal."""

_TERTIARY = 1 << 20  # the largest price among equally long ways
_ROUNDS = 2000  # of weighing and pricing
_PATIENCE = 8  # rounds in which a quarter of what is missing must be found
_WARM = 6  # rounds in which loads, not the linear program, make the prices
_HOP_PRICES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 1 << 20)


@dataclass
class Generation:
    """Trees for one problem, at most so high.

    Attributes:
        problem: what is packed.
        tight: lengths of the orbits under which all trees of an optimum are cheapest, if they are known.
        deadline: when to stop.
        max_height: higher trees are none; None for any height.
        pool: all trees that were met.
        limit: the least rate that no trees, of any or of the given height, were proved to exceed.
        rounds: of weighing and pricing, at most.
        grown: trees grown so far, whether new or not: the effort.
    """

    problem: Problem
    tight: Ints | None
    deadline: Deadline
    max_height: int | None = None
    pool: Pool = field(default_factory=Pool)
    limit: Fraction = Fraction(1)
    rounds: int = _ROUNDS
    grown: int = 0
    _hop_price: dict[int, int] = field(default_factory=dict)

    def run(self) -> Weighed:
        """Generate until the target is reached or no tree would help; note the `limit` that is then proved.

        Raises:
            TimedOutError: the deadline passed.
        """
        program = TreeProgram(self.problem.rows)
        zero = np.zeros(len(self.problem.budgets), dtype=np.int64)
        for lengths in [zero] if self.tight is None else [self.tight, zero]:
            self._take(program, self.spread(lengths))
        weighed = self._follow_cut(program, program.solve())
        if weighed.rate < 1 - CLOSE:
            self._warm(program)
            weighed = self._follow_prices(program, program.solve())
        if weighed.rate < 1 - CLOSE:
            self._prove(program, weighed)
        log.info("%d columns, rate %.9f of the target", len(self.pool.columns), weighed.rate)
        return weighed

    def _follow_cut(self, program: TreeProgram, weighed: Weighed) -> Weighed:
        """Trees that cross the tight cut the minimum number of times, while they bring the target nearer."""
        mark = weighed.rate
        for turn in range(1, self.rounds):
            if self.tight is None or weighed.rate >= 1 - CLOSE:
                break
            self.deadline.check("the search for symmetric trees")
            columns = self.trees(self.tight, whole_prices(weighed.prices, _TERTIARY))
            if not self._take_helpful(program, weighed, columns):
                break
            weighed = program.solve()
            if turn % _PATIENCE == 0:
                if weighed.rate - mark < (1 - mark) / 4:
                    break
                mark = weighed.rate
        return weighed

    def _follow_prices(self, program: TreeProgram, weighed: Weighed) -> Weighed:
        """Trees that are cheapest under the prices of the program, until there is no better one."""
        smooth = weighed.prices
        for _ in range(self.rounds):
            if weighed.rate >= 1 - CLOSE:
                break
            self.deadline.check("the search for symmetric trees")
            smooth = (smooth + weighed.prices) / 2
            if not self._improve(program, weighed, smooth):
                break
            weighed = program.solve()
        return weighed

    def _prove(self, program: TreeProgram, weighed: Weighed) -> None:
        """The limits of the prices at the end, rounded and exact."""
        vertex = program.vertex()
        exact = (
            [] if vertex is None or max(vertex.prices) > FINE else [np.array(vertex.prices, dtype=np.int64)]
        )
        for lengths in (whole_prices(weighed.prices, FINE), *exact):
            cheapest: list[int | None] = [None] * len(self.problem.groups)
            if self.max_height is None:
                for nest, group in self._nests(lengths):
                    cheapest[group] = nest.cost(self.problem.groups[group].root)
            elif is_small(self.problem, self.max_height):
                for column in bounded_trees(self.problem, lengths, self.max_height):
                    cheapest[column.group] = sum(
                        count * int(lengths[orbit]) for orbit, count in column.used.items()
                    )
            else:
                return
            limit = self.problem.rows.limit(lengths.tolist(), cheapest)
            if limit is not None:
                self.limit = min(self.limit, limit)

    def _warm(self, program: TreeProgram) -> None:
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
            self._take(program, columns)

    def _improve(self, program: TreeProgram, weighed: Weighed, smooth: Floats) -> bool:
        """Ask for cheapest trees under coarser and finer prices."""
        for prices, finest in ((smooth, COARSE), (smooth, FINE), (weighed.prices, FINE)):
            columns = self.trees(whole_prices(prices, finest), whole_prices(weighed.prices, _TERTIARY))
            if self._take_helpful(program, weighed, columns):
                return True
        if self.max_height is None or not is_small(self.problem, self.max_height):
            return False
        lengths = whole_prices(weighed.prices, FINE)
        return self._take_helpful(program, weighed, bounded_trees(self.problem, lengths, self.max_height))

    def _take(self, program: TreeProgram, columns: Iterable[Column]) -> bool:
        new = False
        for column in columns:
            if (self.max_height is None or column.height <= self.max_height) and self.pool.add(column):
                program.add(column)
                new = True
        return new

    def _take_helpful(self, program: TreeProgram, weighed: Weighed, columns: Iterable[Column]) -> bool:
        """Take the columns; whether one of them is new and cheaper than what its group pays."""
        helped = False
        for column in columns:
            cost = price_of(column, weighed)
            helps = cost < weighed.values[column.group] * (1 - CLOSE) - CLOSE
            if self._take(program, [column]) and helps:
                helped = True
        return helped

    def spread(self, lengths: Ints) -> Iterator[Column]:
        """A cheapest tree for each group, all of which together spread evenly over the orbits."""
        return self.series(lengths, [1] * len(self.problem.groups), self.problem.steepness)

    def series(self, lengths: Ints, numbers: Sequence[int], steepness: Ints) -> Iterator[Column]:
        """Cheapest trees, all of which together spread evenly over the orbits.

        Args:
            lengths: under which they are cheapest.
            numbers: how many trees each group gets.
            steepness: by how much each use raises the price of an orbit.
        """
        used = np.zeros(len(lengths), dtype=np.int64)
        nests = list(self._nests(lengths))
        for turn in range(max(numbers)):
            for nest, group in nests:
                if turn < numbers[group]:
                    column = self._grown(nest, group, 1 + used * steepness, steepness)
                    used += np.array(column.uses)
                    yield column

    def trees(self, lengths: Ints, base: Ints) -> Iterator[Column]:
        """A cheapest tree for each group that pays the least of some other price."""
        flat = np.zeros(len(lengths), dtype=np.int64)
        for nest, group in self._nests(lengths):
            yield self._grown(nest, group, 1 + base, flat)

    def _grown(self, nest: LaminarFamily, group: int, base: Ints, steepness: Ints) -> Column:
        asked = self.problem.groups[group]
        graph = self.problem.graph(turned=asked.turned)
        self.grown += 1
        return Column(group, *grow(graph, nest, self.problem.orbits, asked.root, base, steepness))

    def _nests(self, lengths: Ints) -> Iterator[tuple[LaminarFamily, int]]:
        """For each group the contraction in which its tree is grown: one serves all roots of a side."""
        orbits = self.problem.orbits
        of_links = lengths[orbits.of_link] + np.where(orbits.twin >= 0, lengths[orbits.twin], 0)
        by_side: dict[bool, LaminarFamily] = {}
        for group, asked in enumerate(self.problem.groups):
            if self.max_height is not None:
                yield self._low_nest(of_links, group), group
                continue
            if asked.turned not in by_side:
                by_side[asked.turned] = contract(self.problem.graph(turned=asked.turned), of_links)
            yield by_side[asked.turned], group

    def _low_nest(self, of_links: Ints, group: int) -> LaminarFamily:
        """The contraction with the least price of a hop that makes the tree low enough, if any does."""
        assert self.max_height is not None
        asked = self.problem.groups[group]
        graph = self.problem.graph(turned=asked.turned)
        hops = hops_from(graph, asked.root)
        unit = max(1, int(of_links.max()) // 16)
        ones = np.ones(len(self.problem.budgets), dtype=np.int64)
        scaled = of_links * 16
        # What was just enough before is tried first, then a little less.
        first = max(0, self._hop_price.get(group, 0) - 1)
        for place in range(first, len(_HOP_PRICES)):
            self._hop_price[group] = place
            nest = contract(graph, scaled, hops * _HOP_PRICES[place] * unit)
            routes, _ = grow(graph, nest, self.problem.orbits, asked.root, ones, self.problem.steepness)
            if routes.height <= self.max_height:
                break
        return nest


def price_of(column: Column, weighed: Weighed) -> float:
    """What a tree costs at the prices of a program; rounded once, which every machine does alike."""
    return math.fsum(count * float(weighed.prices[orbit]) for orbit, count in column.used.items())


_EFFORT = 20_000_000  # additions that one pricing is worth, a tenth of a second


def is_small(problem: Problem, height: int) -> bool:
    """Whether the best trees of a height can be found by a recursion over sets of ranks."""
    ranks = problem.topology.ranks
    return ranks <= LARGEST_EXACT and effort_of(ranks, len(problem.groups), height) <= _EFFORT


def bounded_trees(problem: Problem, lengths: Ints, height: int) -> Iterator[Column]:
    """For each group a cheapest tree of at most a height.

    Args:
        problem: a small one.
        lengths: of the orbits.
        height: the most edges between a root and a rank.
    """
    orbits = problem.orbits
    of_links = lengths[orbits.of_link] + np.where(orbits.twin >= 0, lengths[orbits.twin], 0)
    for turned in (False, True):
        members = [index for index, group in enumerate(problem.groups) if group.turned == turned]
        if not members:
            continue
        graph, order = _logical(problem, turned)
        distances = graph.distances(of_links[order])
        roots = np.array([problem.groups[index].root for index in members])
        found = cheapest_bounded(distances.entering, roots, height)
        for place, index in enumerate(members):
            if found.cost[place] >= UNUSABLE:
                continue
            routes = distances.routes(found.parents[place])
            links = order[routes.links]
            twins = orbits.twin[links]
            uses = np.bincount(orbits.of_link[links], minlength=orbits.count)
            uses += np.bincount(twins[twins >= 0], minlength=orbits.count)
            tree = Routes(problem.graph(turned=turned), routes.parents, routes.starts, links)
            yield Column(index, tree, tuple(uses.tolist()))


@lru_cache(maxsize=8)
def _logical(problem: Problem, turned: bool) -> tuple[LogicalGraph, Ints]:
    """The graph to close over its switches, and the link of the problem behind each of its links."""
    graph = LogicalGraph(problem.topology.reversed() if turned else problem.topology)
    ends = (graph.heads, graph.tails) if turned else (graph.tails, graph.heads)
    return graph, problem.graph(turned=False).numbers(*ends)

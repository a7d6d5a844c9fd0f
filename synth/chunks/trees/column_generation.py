"""The least R/C over all numbers of chunks C for S steps, with its proof and the packing that attains it.

Trees in the time-expanded graph are packed into steps of free durations (the linear program of
`synth.chunks.bounds.step_certificate`). There are too many trees to list: the program knows those found so
far, its prices go to `synth.chunks.trees.pricing` or, of many ranks, `synth.chunks.trees.spanning`, and each
tree that is cheaper than the program believes joins it (column generation, Gilmore and Gomory 1961). The
prices at the end are the certificate.
"""

from __future__ import annotations

import logging
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.chunks.bounds.step_certificate import StepBound, StepLengths, TreeDual
from arborcast.synth.chunks.bounds.step_check import MOST_TREE_TARGETS, can_check_trees, certified_ratio
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import Group
from arborcast.synth.chunks.trees.cheap_generation import RUINS, CheapGeneration, Source
from arborcast.synth.chunks.trees.insertion import InsertionSearch
from arborcast.synth.chunks.trees.pricing import TimedTree, TreeSearch, cost_of, run_exactly
from arborcast.synth.chunks.trees.spanning import SpanningSearch
from arborcast.synth.chunks.trees.step_master import MultiplicativeWeights, RestrictedMaster
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InputError, TimedOutError
from arborcast.synth.progress import report

FIRST_TREES = 300
"""Trees looked for, in all, before the first linear program: it starts near its optimum."""

_CLOSE = 1e-9  # relative; nearer than that only exact arithmetic can tell
_SMOOTHING = 0.5  # how far the prices asked for stay at the best ones known (Wentges 1997)
_PRICE_UNIT = 1 << 24  # what prices in floating point are rounded to, downwards

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepTree:
    """A tree of a packing.

    Attributes:
        demand: the index of the block it carries.
        weight: the share of that block.
        sends: (route, step), in order of step.
    """

    demand: int
    weight: Fraction
    sends: TimedTree


@dataclass(frozen=True)
class TreeBound:
    """The best packing of trees found, and the best limit proved.

    Attributes:
        bound: `bound.ratio` is the least R/C there is if it equals the sum of the durations. If it is
            less, the truth lies between the two: the deadline came first, or (which is logged) HiGHS ended
            on prices that are not quite the best.
        durations: rounds per chunk of each step; some may be zero, which a schedule's steps must not be.
        trees: their weights are 1 together for each demand.
        candidates: for one demand of each orbit, the trees met on the way that cost as little as those of
            the packing: (demand, sends). No other trees can be part of an optimum. Beside a limit that was
            known, all trees.
    """

    bound: StepBound
    durations: tuple[Fraction, ...]
    trees: tuple[StepTree, ...]
    candidates: tuple[tuple[int, TimedTree], ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether the packing attains the limit."""
        return self.bound.ratio == sum(self.durations)


def tree_bound(
    problem: ChunkProblem,
    steps: int,
    *,
    deadline: Deadline,
    group: Group | None = None,
    gap: Fraction = Fraction(0),
    seeds: Iterable[tuple[int, TimedTree]] = (),
    known: StepBound | None = None,
) -> TreeBound:
    """The infimum of R/C over all schedules of so many steps, whatever C.

    Of more targets than `MOST_TREE_TARGETS` the cheapest trees take longer, and cheap ones come first. No
    others are looked for where these come within the gap of a limit that is known, or where there are more
    ranks than a certificate is checked for; the limit that is returned is then the known one.

    Args:
        problem: what there is to send.
        steps: S.
        deadline: when to stop; the best limit and packing until then are returned, which may leave a gap
            between them. A first tree for each demand is found in any case.
        group: automorphisms that keep the problem, for speed; None for none. The ratio is the same.
        gap: stop where the packing is within this part of the limit.
        seeds: trees of demands in one step fewer, to begin with.
        known: a limit of so many steps; of no use up to `MOST_TREE_TARGETS`.

    Raises:
        InfeasibleError: a target cannot be reached in so many steps.
        InputError: a demand has too many targets for a certificate to be checked, and no limit is known.
    """
    group = group or (tuple(range(problem.topology.size)),)
    most = max(len(demand.targets) for demand in problem.demands)
    master = RestrictedMaster(problem, steps, group)
    if most <= MOST_TREE_TARGETS:
        known = None
        search = _Generation(master, deadline, TreeSearch)
        search.begin(seeds)
    else:
        can_check = can_check_trees(problem)
        if not can_check and known is None:
            words = f"a demand may have at most {MOST_TREE_TARGETS} targets, got {most}; use flows"
            raise InputError(f"limit by trees: {words}")
        enough = 0.0 if known is None else float(known.ratio * (1 + gap))
        ratio, weights = _mixed(master, seeds, enough, deadline.share(2) if can_check else deadline)
        if known is not None and (not can_check or ratio <= enough * (1 + _CLOSE)):
            return _packing(master, weights, known)
        search = _Generation(master, deadline, SpanningSearch)
    weights, lengths = search.settled(gap)
    if known is not None and search.proved <= known.ratio:
        return _packing(master, weights, known)
    certificate = TreeDual(lengths)
    try:
        limit = StepBound(steps, certified_ratio(problem, steps, certificate), certificate)
    except TimedOutError:  # too late to compile the check
        if known is None:
            raise
        return _packing(master, weights, known)
    return _packing(master, weights, limit, search.cheapest(lengths))


def _mixed(
    master: RestrictedMaster, seeds: Iterable[tuple[int, TimedTree]], enough: float, deadline: Deadline
) -> tuple[float, list[Fraction]]:
    """Add cheap trees to a program until none helps or R/C is good enough; R/C, and the trees' weights."""
    sources = [
        _cheap_trees(master.problem, number, found.demand, master.steps)
        for number, found in enumerate(master.classes)
    ]
    search = CheapGeneration(master, sources, deadline)
    master.add_later(seeds)
    if not master.is_complete:
        search.begin(max(1, FIRST_TREES // len(sources)))
    ratio, _, weights = search.run(enough)
    return ratio, weights


def _cheap_trees(problem: ChunkProblem, chunk_class: int, demand: int, steps: int) -> Source:
    """The source of cheap trees of one class."""
    searches = [InsertionSearch(problem, demand, steps, ruins) for ruins in RUINS]
    return lambda prices, long: [(chunk_class, searches[long].run(prices)[1])]


def _packing(
    master: RestrictedMaster,
    weights: list[Fraction],
    limit: StepBound,
    candidates: tuple[tuple[int, TimedTree], ...] | None = None,
) -> TreeBound:
    """The trees of all demands with these weights; all trees are candidates unless some are named."""
    packed = master.unfolded(weights)
    if candidates is None:
        candidates = tuple((master.classes[number].demand, tree) for number, tree in master.trees)
    return TreeBound(
        bound=limit,
        durations=durations_of(master.problem, master.steps, packed),
        trees=tuple(StepTree(demand, packed[demand, tree], tree) for demand, tree in sorted(packed)),
        candidates=candidates,
    )


def durations_of(
    problem: ChunkProblem, steps: int, packed: Mapping[tuple[int, TimedTree], Fraction]
) -> tuple[Fraction, ...]:
    """How long each step lasts: until its most loaded link has carried everything."""
    load: dict[tuple[int, int], Fraction] = defaultdict(Fraction)
    for (_, tree), weight in packed.items():
        for route, step in tree:
            for link in problem.routes[route].links:
                load[step, link] += weight
    longest = [Fraction(0)] * steps
    for (step, link), amount in load.items():
        longest[step] = max(longest[step], amount / problem.capacities[link])
    return tuple(longest)


class _Generation:
    """Column generation: the program, and the best prices so far.

    Attributes:
        master: the program.
        proved: the R/C that the best prices prove, up to rounding.
    """

    def __init__(
        self,
        master: RestrictedMaster,
        deadline: Deadline,
        search: Callable[[ChunkProblem, int, int], TreeSearch | SpanningSearch],
    ) -> None:
        self.master = master
        self._problem = problem = master.problem
        self._steps = steps = master.steps
        self._deadline = deadline
        self._searches = [search(problem, found.demand, steps) for found in master.classes]
        self._counts = [found.count for found in master.classes]
        self._capacities = np.array(problem.capacities, dtype=np.float64)
        self.proved = 0.0
        self._best_prices = np.full((steps, len(self._capacities)), 1 / self._capacities.sum())

    def settled(self, gap: Fraction) -> tuple[list[Fraction], StepLengths]:
        """Weights of the master's trees and prices: the best, or within a gap, or the best in time."""
        try:
            return self.optimum(gap)
        except (TimedOutError, ArithmeticError):
            return self.best()

    def optimum(self, gap: Fraction = Fraction(0)) -> tuple[list[Fraction], StepLengths]:
        """Weights of the master's trees, and prices that prove them best, or nearly so.

        Raises:
            TimedOutError: the deadline came first.
            ArithmeticError: the basis of HiGHS is singular.
        """
        # Of many blocks an exact vertex takes long, and a gap is left even where there need be none.
        is_rough = gap > 0 and isinstance(self._searches[0], TreeSearch)
        while True:
            self._deadline.check("the packing of trees")
            costs, prices = self.master.solve(self._deadline)
            report(f"trees in {self._steps} steps", int(1000 * self.proved / costs.sum()), 1000)
            is_near = self.proved * (1 + gap + _CLOSE) >= costs.sum()
            if gap and is_near and (is_rough or self.proved * (1 + _CLOSE) < costs.sum()):
                return self.best()
            smoothed = _SMOOTHING * self._best_prices + (1 - _SMOOTHING) * prices if self.proved else prices
            if self._improves(smoothed, prices, costs) or self._improves(prices, prices, costs):
                continue
            if is_rough:
                return self.best()
            weights, lengths = self.master.exact()
            if not self._improves_exactly(weights, lengths):
                return weights, lengths

    def best(self) -> tuple[list[Fraction], StepLengths]:
        """The same as far as the search has come."""
        worth = np.maximum((self._best_prices * self._capacities).sum(axis=1, keepdims=True), 1.0)
        whole = np.floor(self._best_prices / worth * _PRICE_UNIT).astype(np.int64).tolist()
        totals = [sum(map(operator.mul, self._problem.capacities, row)) for row in whole]
        lengths = tuple(  # more than the unit only by rounding
            tuple(Fraction(price, max(total, _PRICE_UNIT)) for price in row)
            for row, total in zip(whole, totals, strict=True)
        )
        return self.master.weights(), lengths

    def cheapest(self, lengths: StepLengths) -> tuple[tuple[int, TimedTree], ...]:
        """The trees found that cost least, with the demands of their classes."""
        whole, _ = _in_whole_units(lengths)
        costs = [cost_of(self._problem, tree, whole) for _, tree in self.master.trees]
        least = [
            min(cost for cost, (of, _) in zip(costs, self.master.trees, strict=True) if of == chunk_class)
            for chunk_class in range(len(self._searches))
        ]
        return tuple(
            (self.master.classes[chunk_class].demand, tree)
            for cost, (chunk_class, tree) in zip(costs, self.master.trees, strict=True)
            if cost == least[chunk_class]
        )

    def begin(self, seeds: Iterable[tuple[int, TimedTree]]) -> None:
        """Trees of one step fewer, or for prices that grow with the load of all before, as time allows."""
        for chunk_class, search in enumerate(self._searches):  # there is something to return
            self.master.add(chunk_class, search.run(self._best_prices)[1])
        if self.master.add_later(seeds):
            return
        weights = MultiplicativeWeights(self.master)
        with suppress(TimedOutError):
            for _ in range(max(1, FIRST_TREES // len(self._searches))):
                found = self._ask(weights.prices())
                for chunk_class, (_, tree) in enumerate(found):
                    self.master.add(chunk_class, tree)
                    weights.add(tree, self._counts[chunk_class])

    def _ask(self, prices: NDArray[np.float64]) -> list[tuple[float, TimedTree]]:
        """The cheapest tree of each class; keeps the prices if they prove more than any before."""
        found = []
        for search in self._searches:
            self._deadline.check("the search for cheapest trees")
            found.append(search.run(prices))
        proved = sum(count * cost for count, (cost, _) in zip(self._counts, found, strict=True))
        if proved > self.proved:
            self.proved, self._best_prices = proved, prices
        return found

    def _improves(
        self, asked: NDArray[np.float64], prices: NDArray[np.float64], costs: NDArray[np.float64]
    ) -> bool:
        """Add the cheapest trees under some prices; whether one costs less than the master thought."""
        tolerance = _CLOSE * float(costs.sum())
        better = False
        for chunk_class, (_, tree) in enumerate(self._ask(asked)):
            cost = self._counts[chunk_class] * cost_of(self._problem, tree, prices)
            better |= self.master.add(chunk_class, tree) and cost < costs[chunk_class] - tolerance
        return better

    def _improves_exactly(self, weights: list[Fraction], lengths: StepLengths) -> bool:
        """Price once more in integers; whether that found a new tree while there was a gap."""
        whole, common = _in_whole_units(lengths)
        bits = self._searches[0].WHOLE_BITS
        found = [run_exactly(search.run, self._problem, whole, bits) for search in self._searches]
        proved = Fraction(sum(map(operator.mul, self._counts, (cost for cost, _ in found))), common)
        packed = sum(durations_of(self._problem, self._steps, self.master.unfolded(weights)))
        if proved == packed:
            return False
        log.info("%d steps: %s proved, %s packed; going on", self._steps, proved, packed)
        added = [self.master.add(chunk_class, tree) for chunk_class, (_, tree) in enumerate(found)]
        if not any(added):
            log.warning("%d steps: a gap from %s to %s is left", self._steps, proved, packed)
        return any(added)


def _in_whole_units(lengths: StepLengths) -> tuple[list[list[int]], int]:
    """The lengths in whole units, and how many of these are 1."""
    common = math.lcm(*(length.denominator for row in lengths for length in row))
    return [[int(length * common) for length in row] for row in lengths], common

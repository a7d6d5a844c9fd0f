"""The best rate along trees that join and fork at able switches, with its trees and the prices that prove it.

Column generation by `synth.lp.master`: links and adders are rows, trees or pairs of trees columns, prices go
to `pricing`. Floats propose; the rate, the prices and the limit that they prove are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

import numpy as np

from arborcast.synth.collective import TREE_KINDS, Collective, Kind
from arborcast.synth.deadline import NO_DEADLINE, Deadline, LastAnswers
from arborcast.synth.errors import CollectiveError, InfeasibleError
from arborcast.synth.in_network.steiner_pricing import (
    FAR,
    LARGEST_PRICE,
    MOST_APART,
    Cheapest,
    Priced,
    Side,
)
from arborcast.synth.in_network.steiner_tree import Rows, SteinerColumn, SteinerTree
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.lp.choice import TreeCandidates
from arborcast.synth.lp.master import Master, is_cheaper
from arborcast.synth.lp.tree_program import TreeRows, Weighed, crowded_prices, whole_prices
from arborcast.synth.progress import report
from arborcast.synth.topology import Topology, Vertex

FIRST_ROUNDS = 4
"""How often all roots choose their trees, each under prices that grow with the loads of those before it."""

FIRST_TREES = 24
"""How many trees there are at least before the first linear program."""

EXACT_TURNS = 4
"""How often exact prices are asked for a cheaper tree than rounded ones found."""

ALWAYS_EXACT = 9
"""Ranks that are apart, up to which every pricing is exact: milliseconds."""


@dataclass(frozen=True, eq=False)
class SteinerProgram:
    """The answer.

    Attributes:
        rate: GB/s of the whole buffer that the columns carry, exactly.
        limit: what lengths and adders prove of all trees; None where too many ranks are apart to be exact.
        lengths: the price of each link, in the order of the topology.
        adders: the price of each limited adder, in the order of `Topology.limited_adders`.
        columns: trees with their weights; a root's together carry its block.
        candidates: all that were found, without weights.
        rows: what columns use.
        groups: roots that each have trees of their own; 1 where one rate is asked for.
    """

    rate: Fraction
    limit: Fraction | None
    lengths: tuple[Fraction, ...]
    adders: tuple[Fraction, ...]
    columns: tuple[SteinerColumn, ...]
    candidates: tuple[SteinerColumn, ...]
    rows: Rows
    groups: int

    def choice(self, columns: Sequence[SteinerColumn]) -> TreeCandidates:
        """Some of the candidates to choose from; a group's target is its part of the best rate."""
        rows = TreeRows.of(self.rows.capacities, self.rate / self.groups, self.groups)
        return TreeCandidates(rows, tuple(columns))

    @property
    def is_exact(self) -> bool:
        """Whether the rate is the limit."""
        return self.rate == self.limit


def steiner_program(
    topology: Topology,
    collective: Collective,
    deadline: Deadline = NO_DEADLINE,
    *,
    known: Iterable[SteinerColumn] = (),
) -> SteinerProgram:
    """The best rate over all trees (of an allreduce: pairs that meet) with able switches.

    Exact where at most `MOST_APART` ranks are apart under the prices of the optimum; elsewhere the trees are
    as good as heuristic pricing finds, and `limit` is None.

    Args:
        topology: the fabric; ranks that take no part are relays.
        collective: a broadcast, reduce, allgather, reduce-scatter or allreduce.
        deadline: when to be content with what there is; the first trees are made in any case.
        known: columns to start from besides.

    Raises:
        CollectiveError: a kind that trees cannot do.
        InfeasibleError: some rank cannot be reached; carries no proof, which is a cut.
    """
    if collective.kind not in TREE_KINDS:
        raise CollectiveError(f"{collective.kind}: trees serve {', '.join(TREE_KINDS)} only")
    return _SteinerGeneration(topology, collective, deadline, known).run()


_solved: LastAnswers[SteinerProgram] = LastAnswers(4)


def solved_steiner_program(
    topology: Topology, collective: Collective, deadline: Deadline = NO_DEADLINE
) -> SteinerProgram:
    """`steiner_program`, whose last answers are kept: schedules follow bounds, and parts are alike."""
    return _solved.of(
        (topology, collective), deadline, lambda: steiner_program(topology, collective, deadline)
    )


class _SteinerGeneration:
    """Column generation: the master, and what its sources of trees need."""

    def __init__(
        self, topology: Topology, collective: Collective, deadline: Deadline, known: Iterable[SteinerColumn]
    ) -> None:
        self.topology, self.collective, self.deadline = topology, collective, deadline
        kind = collective.kind
        self.roots = _roots(topology, collective)
        self.groups = len(self.roots) if kind in {Kind.ALLGATHER, Kind.REDUCE_SCATTER} else 1
        self.rows = Rows(topology)
        self.unit = max(link.bandwidth for link in topology.links)
        rows = TreeRows.of(self.rows.capacities, self.unit, self.groups)
        self.master: Master[SteinerColumn] = Master(rows)
        self.sides = [
            Side(topology, collective.ranks, turned)
            for turned, wanted in ((False, kind is Kind.ALLREDUCE or not kind.reduces), (True, kind.reduces))
            if wanted
        ]
        self.forks: dict[bool, list[Vertex]] = {False: [], True: []}  # of the last heuristic trees
        for column in known:
            self.master.add(column)

    def run(self) -> SteinerProgram:
        """The whole of it."""
        self._begin()
        # Heuristic trees first where that is faster; exact ones, with the limit that they prove, at last.
        sources = [partial(self._cheaper, exact) for exact in ((True,) if self._few_ranks else (False, True))]
        master = self.master
        weights = master.program.exact(master.run(sources, self.deadline, enough=math.inf))
        for _ in range(EXACT_TURNS):
            prices = None if self.deadline.has_passed else master.exact_prices(LARGEST_PRICE)
            if prices is None:
                break
            added = master.add_helpful(self._priced(prices, exact=True), None)
            if master.limit == self._rate(weights) or not added:
                break
            weights = master.program.exact(master.program.solve())
        return self._answer([*weights, *[Fraction(0)] * (len(master.columns) - len(weights))])

    def _rate(self, weights: Sequence[Fraction]) -> Fraction:
        return self.master.rows.rate(self.master.columns[: len(weights)], weights)

    def _answer(self, weights: Sequence[Fraction]) -> SteinerProgram:
        of_all, limit = self.unit * self.groups, self.master.limit
        proof = [Fraction(price) for price in self.master.proof.tolist()]
        # The cheapest tree costs 1.
        worth = sum(map(lambda price, capacity: price * capacity, proof, self.rows.capacities))
        scale = limit * of_all / worth if limit is not None and worth else 1
        prices = [price * scale for price in proof]
        links = len(self.topology.links)
        candidates = tuple(self.master.columns)
        return SteinerProgram(
            self._rate(weights) * of_all,
            None if limit is None else limit * of_all,
            tuple(prices[:links]),
            tuple(prices[links:]),
            tuple(
                replace(column, weight=weight * self.unit)
                for column, weight in zip(candidates, weights, strict=True)
                if weight
            ),
            candidates,
            self.rows,
            self.groups,
        )

    def _begin(self) -> None:
        """Trees for every root under prices that grow with the loads of all trees before."""
        capacities = np.array([float(capacity) for capacity in self.master.rows.capacities])
        load = np.zeros(len(capacities))
        for turn in range(max(FIRST_ROUNDS, FIRST_TREES // len(self.roots))):
            for root in self.roots:
                if turn and self.deadline.has_passed:
                    return
                prices = crowded_prices(load, capacities, 2 + turn, LARGEST_PRICE)
                asked = _CheapestTrees(self, prices, exact=self._few_ranks)
                found = asked.column(root)
                if found is not None:
                    self.master.add(found)
                    load[list(found.used)] += list(found.used.values())
        if len({column.group for column in self.master.columns}) < self.groups:
            raise InfeasibleError(f"{self.collective.kind}: some rank cannot be reached by any tree")

    @property
    def _few_ranks(self) -> bool:
        return len(self.collective.ranks) <= ALWAYS_EXACT

    def _cheaper(self, exact: bool, weighed: Weighed) -> Iterator[SteinerColumn]:
        found = self._priced(whole_prices(weighed.prices, LARGEST_PRICE), exact=exact)
        return (column for column in found if is_cheaper(column, weighed))

    def _priced(self, prices: Ints, *, exact: bool) -> Iterator[SteinerColumn]:
        """A cheap tree of each root; exactly none where too many ranks are apart."""
        report("trees through switches", len(self.master.columns), len(self.master.columns) + 1)
        asked = _CheapestTrees(self, prices, exact=exact)
        if exact and asked.apart > MOST_APART:
            return
        if exact:
            self.master.prove(prices, asked.cheapest())
        yield from filter(None, map(asked.column, self.roots))


class _CheapestTrees:
    """The cheapest trees, or pairs, under some prices: exactly, or by a heuristic."""

    def __init__(self, generation: _SteinerGeneration, prices: Ints, *, exact: bool) -> None:
        links = len(generation.topology.links)
        joining = {vertex: int(prices[row]) for vertex, row in generation.rows.of_adder.items()}
        self._of = generation
        self._priced = [Priced.of(side, prices[:links].tolist(), joining) for side in generation.sides]
        self.apart = max(len(priced.terminals) for priced in self._priced)
        exact = exact and self.apart <= MOST_APART
        self._cheapest = [Cheapest.of(priced) for priced in self._priced] if exact else None
        self._forks: dict[bool, list[Vertex]] = {}

    def column(self, root: Vertex) -> SteinerColumn | None:
        """The cheapest of a root; None where some rank cannot be reached."""
        try:
            if self._cheapest is not None:
                trees = {one.priced.side.turned: one.tree(root) for one in self._cheapest}
            else:
                trees = {one.side.turned: self._good_tree(one, root) for one in self._priced}
        except InfeasibleError:
            return None
        out, into = trees.get(False), trees.get(True)
        group = self._of.roots.index(root) if self._of.groups > 1 else 0
        return SteinerColumn(group, out, into, self._of.rows.used(out, into))

    def cheapest(self) -> list[int | None]:
        """What the trees of each group cost at least, where that is known exactly."""
        assert self._cheapest is not None, "who asks has counted the ranks that are apart"
        costs = [sum(one.total(root) for one in self._cheapest) for root in self._of.roots]
        known = [cost if cost < FAR else None for cost in costs]
        if self._of.groups > 1:
            return known
        return [min((cost for cost in known if cost is not None), default=None)]

    def _good_tree(self, priced: Priced, root: Vertex) -> SteinerTree:
        forks = self._good_forks(priced, root)
        if not priced.side.hands_on(root):
            return priced.tree(root, forks)
        others = [vertex for vertex in forks if vertex != root and vertex >= self._of.topology.ranks]
        if not others:
            raise InfeasibleError(f"no tree from switch {root}")
        return priced.tree(root, others, min(others, key=lambda other: int(priced.plain[root, other])))

    def _good_forks(self, priced: Priced, root: Vertex) -> list[Vertex]:
        """Those of the first root that is asked for serve all others."""
        turned = priced.side.turned
        if turned not in self._forks:
            found = priced.improved(root, self._of.forks[turned], self._of.deadline)
            self._forks[turned] = self._of.forks[turned] = found
        return self._forks[turned]


def _roots(topology: Topology, collective: Collective) -> tuple[Vertex, ...]:
    """Where trees may start; in an allreduce, where gathering may turn into spreading."""
    if collective.root is not None:
        return (collective.root,)
    if collective.kind is not Kind.ALLREDUCE:
        return collective.ranks
    spreading = (v for v, switch in enumerate(topology.switches, topology.ranks) if switch.multicasts)
    return (*range(topology.ranks), *spreading)

"""A cheap tree in the time-expanded graph for any number of ranks: targets join it one by one.

The farthest target comes first, by the cheapest way from whoever has the block in time (Takahashi and
Matsuyama 1980, for Steiner trees). Then a branch is cut off and its targets join anew in another order, again
and again, which stands where it costs no more (ruin and recreate, Schrimpf et al. 2000). Not always the
cheapest tree, so that its cost proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.prune import useful_sends
from arborcast.synth.chunks.trees.pricing import Prices, TimedTree, in_order
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.kernels.compiled import Ints, kernel
from arborcast.synth.kernels.max_flow import by_vertex

_LEAST_SAVING = 1e-12
"""Below that a change of price is a matter of rounding."""

RUINS = 300
"""How often a branch of a tree is cut off, unless told: some milliseconds for 16 ranks."""


@dataclass(frozen=True)
class InsertionSearch:
    """The search for one demand, to be run again and again with other prices.

    Attributes:
        problem: what there is to send over.
        demand: the index of the demand.
        steps: S.
        ruins: how often a branch is cut off.
    """

    problem: ChunkProblem
    demand: int
    steps: int
    ruins: int = RUINS

    def run(self, prices: Prices) -> tuple[float, TimedTree]:
        """A cheap tree at some prices of the links in each step, float64: its cost, its sends.

        Raises:
            InfeasibleError: a target cannot be reached in so many steps.
        """
        src, dst = self._ends
        costs = self.problem.route_costs(prices)
        graph = src, dst, *self._entering, *self._leaving
        since, by = _recreated(costs, graph, self._sources, self._order, self.problem.ranks, self.ruins)
        if (since[self._order] > self.steps).any():
            raise InfeasibleError(f"demand {self.demand}: a target cannot be reached in {self.steps} steps")
        (reached,) = np.nonzero((since > 0) & (since <= self.steps))
        sends = zip(by[reached].tolist(), (since[reached] - 1).tolist(), strict=True)
        tree = in_order(useful_sends(self.problem, self.problem.demands[self.demand], sends))
        return float(sum(costs[step, route] for route, step in tree)), tree

    @cached_property
    def _ends(self) -> tuple[Ints, Ints]:
        src, dst = np.array([(route.src, route.dst) for route in self.problem.routes], dtype=np.int64).T
        return np.ascontiguousarray(src), np.ascontiguousarray(dst)

    @cached_property
    def _entering(self) -> tuple[Ints, Ints]:
        return by_vertex(self._ends[1], self.problem.ranks)

    @cached_property
    def _leaving(self) -> tuple[Ints, Ints]:
        return by_vertex(self._ends[0], self.problem.ranks)

    @cached_property
    def _sources(self) -> Ints:
        return np.array(sorted(self.problem.demands[self.demand].sources), dtype=np.int64)

    @cached_property
    def _order(self) -> Ints:
        return np.array(list(self._farthest_first()), dtype=np.int64)

    def _farthest_first(self) -> Iterator[int]:
        block = self.problem.demands[self.demand]
        away = self.problem.steps_from(block.sources)
        yield from sorted(block.targets, key=lambda rank: (-(away[rank] or 0), rank))


_Graph: TypeAlias = tuple[Ints, Ints, Ints, Ints, Ints, Ints]
"""Of each route its source and target; the routes by target (see `by_vertex`), and by source."""


@kernel
def _recreated(
    costs: Prices, graph: _Graph, sources: Ints, order: Ints, ranks: int, ruins: int
) -> tuple[Ints, Ints]:
    """Of each rank the time since which it has the block, more than the steps for never, and its route."""
    src, dst = graph[0], graph[1]
    steps = costs.shape[0]
    since, by = np.full(ranks, steps + 1, np.int64), np.full(ranks, -1, np.int64)
    for source in sources:
        since[source] = 0
    _join(costs, src, dst, order, since, by)
    for target in order:
        if since[target] > steps:
            return since, by
    _shift(costs, graph, order, since, by)
    best = _cost(costs, since, by)
    mixed, cut = order.copy(), np.empty(ranks, np.bool_)
    state = 1
    for _ in range(ruins):
        new_since, new_by = since.copy(), by.copy()
        # The numbers of Park and Miller (1988): the same on every machine.
        state = state * 48271 % 2147483647
        cut[:] = False
        cut[order[state % order.shape[0]]] = True
        for _ in range(steps):
            for rank in range(ranks):
                if new_by[rank] >= 0 and cut[src[new_by[rank]]]:
                    cut[rank] = True
        for rank in range(ranks):
            if cut[rank] and new_by[rank] >= 0:
                new_since[rank], new_by[rank] = steps + 1, -1
        for place in range(mixed.shape[0] - 1, 0, -1):
            state = state * 48271 % 2147483647
            other = state % (place + 1)
            mixed[place], mixed[other] = mixed[other], mixed[place]
        _join(costs, src, dst, mixed, new_since, new_by)
        _shift(costs, graph, order, new_since, new_by)
        cost = _cost(costs, new_since, new_by)
        if cost <= best:
            best, since, by = cost, new_since, new_by
    return since, by


@kernel
def _shift(costs: Prices, graph: _Graph, order: Ints, since: Ints, by: Ints) -> None:
    """Let targets have the block earlier or later, one at a time, while that makes the tree cheaper.

    Whoever has it earlier may pay more for it and serve others that get it when they did, but cheaper.
    """
    steps = costs.shape[0]
    improved = True
    while improved:
        improved = False
        for rank in order:
            for time in range(1, steps + 1):
                if by[rank] < 0 or time == since[rank]:
                    continue
                before, spent = since[rank], costs[since[rank] - 1, by[rank]]
                own, way = _entered(costs, graph, since, rank, time)
                if way < 0:
                    continue
                since[rank] = time
                saved = spent - own + _saved(costs, graph, since, by, rank)
                if saved <= _LEAST_SAVING * (1 + spent):
                    since[rank] = before
                    continue
                by[rank] = way
                _serve(costs, graph, since, by, rank)
                improved = True


@kernel
def _saved(costs: Prices, graph: _Graph, since: Ints, by: Ints, rank: int) -> float:
    """What those save together that a rank can send to, now that it has the block at another time."""
    src, dst, _, _, first_leaving, leaving = graph
    saved = 0.0
    for place in range(first_leaving[rank], first_leaving[rank + 1]):
        route = leaving[place]
        other = dst[route]
        if by[other] < 0:
            continue
        least, way = _entered(costs, graph, since, other, since[other])
        # Counted once, whatever routes lead there.
        if route == by[other] if src[by[other]] == rank else route == way:
            saved += costs[since[other] - 1, by[other]] - least
    return saved


@kernel
def _serve(costs: Prices, graph: _Graph, since: Ints, by: Ints, rank: int) -> None:
    """Let those that a rank can send to take the cheapest routes anew."""
    _, dst, _, _, first_leaving, leaving = graph
    for place in range(first_leaving[rank], first_leaving[rank + 1]):
        other = dst[leaving[place]]
        if by[other] >= 0:
            by[other] = _entered(costs, graph, since, other, since[other])[1]


@kernel
def _entered(costs: Prices, graph: _Graph, since: Ints, rank: int, time: int) -> tuple[float, int]:
    """The cheapest route by which a rank gets the block at a time from who has it before, and its cost."""
    src, _, first_entering, entering, _, _ = graph
    least, way = np.inf, -1
    for place in range(first_entering[rank], first_entering[rank + 1]):
        route = entering[place]
        if since[src[route]] < time and costs[time - 1, route] < least:
            least, way = costs[time - 1, route], route
    return least, way


@kernel
def _cost(costs: Prices, since: Ints, by: Ints) -> float:
    """Of all sends; without limit where some rank that should have joined could not."""
    total = 0.0
    for rank in range(since.shape[0]):
        if by[rank] >= 0:
            total += costs[since[rank] - 1, by[rank]]
    return total


@kernel
def _join(costs: Prices, src: Ints, dst: Ints, order: Ints, since: Ints, by: Ints) -> None:
    """Bring the block to each target in turn, by the cheapest way from whoever has it by then."""
    steps, routes = costs.shape
    ranks = since.shape[0]
    away = np.empty((steps + 1, ranks), np.float64)
    came = np.empty((steps + 1, ranks), np.int64)
    for target in order:
        if since[target] <= steps:
            continue
        for rank in range(ranks):
            away[0, rank] = 0.0 if since[rank] <= 0 else np.inf
        for step in range(steps):
            for rank in range(ranks):
                away[step + 1, rank], came[step + 1, rank] = away[step, rank], -1
                if since[rank] <= step + 1:
                    away[step + 1, rank] = 0.0
            for route in range(routes):
                way = away[step, src[route]] + costs[step, route]
                if way < away[step + 1, dst[route]]:
                    away[step + 1, dst[route]], came[step + 1, dst[route]] = way, route
        if away[steps, target] == np.inf:
            return
        rank = target
        for step in range(steps, 0, -1):
            if since[rank] <= step:
                break  # who has it by then has it from the tree
            route = came[step, rank]
            if route >= 0:
                since[rank], by[rank] = step, route
                rank = src[route]

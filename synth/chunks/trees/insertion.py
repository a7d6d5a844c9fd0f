"""A cheap tree in the time-expanded graph for any number of ranks: targets join it one by one.

The farthest target comes first, by the cheapest way from whoever has the block in time (Takahashi and
Matsuyama 1980, for Steiner trees). Not the cheapest tree, so that its cost proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.prune import useful_sends
from arborcast.synth.chunks.trees.pricing import Prices, TimedTree, in_order
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.kernels.compiled import Ints, kernel


@dataclass(frozen=True)
class InsertionSearch:
    """The search for one demand, to be run again and again with other prices.

    Attributes:
        problem: what there is to send over.
        demand: the index of the demand.
        steps: S.
    """

    problem: ChunkProblem
    demand: int
    steps: int

    def run(self, prices: Prices) -> tuple[float, TimedTree]:
        """A cheap tree at some prices of the links in each step, float64: its cost, its sends.

        Raises:
            InfeasibleError: a target cannot be reached in so many steps.
        """
        links, starts, src, dst = self._routes
        costs = np.add.reduceat(prices[:, links], starts, axis=1)
        sends = _insert(costs, src, dst, self._sources, self._order, self.problem.ranks)
        if sends.shape[0] and sends[0, 0] < 0:
            raise InfeasibleError(f"demand {self.demand}: a target cannot be reached in {self.steps} steps")
        block = self.problem.demands[self.demand]
        tree = in_order(useful_sends(self.problem, block, ((route, step) for route, step in sends.tolist())))
        return float(sum(costs[step, route] for route, step in tree)), tree

    @cached_property
    def _routes(self) -> tuple[Ints, Ints, Ints, Ints]:
        routes = self.problem.routes
        counts = np.array([len(route.links) for route in routes], dtype=np.int64)
        links = np.array([link for route in routes for link in route.links], dtype=np.int64)
        src = np.array([route.src for route in routes], dtype=np.int64)
        return (
            links,
            np.cumsum(counts) - counts,
            src,
            np.array([route.dst for route in routes], dtype=np.int64),
        )

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


@kernel
def _insert(costs: Prices, src: Ints, dst: Ints, sources: Ints, order: Ints, ranks: int) -> Ints:  # noqa: PLR0912
    """The sends (route, step) of a tree, perhaps more than it needs; (-1, -1) where there is none."""
    steps, routes = costs.shape
    since = np.full(ranks, steps + 1, np.int64)
    for source in sources:
        since[source] = 0
    sends = np.empty((order.shape[0] * steps, 2), np.int64)
    count = 0
    away = np.empty((steps + 1, ranks), np.float64)
    by = np.empty((steps + 1, ranks), np.int64)
    for target in order:
        if since[target] <= steps:
            continue
        for rank in range(ranks):
            away[0, rank] = 0.0 if since[rank] <= 0 else np.inf
        for step in range(steps):
            for rank in range(ranks):
                away[step + 1, rank], by[step + 1, rank] = away[step, rank], -1
                if since[rank] <= step + 1:
                    away[step + 1, rank] = 0.0
            for route in range(routes):
                way = away[step, src[route]] + costs[step, route]
                if way < away[step + 1, dst[route]]:
                    away[step + 1, dst[route]], by[step + 1, dst[route]] = way, route
        if away[steps, target] == np.inf:
            sends[0] = -1, -1
            return sends[:1].copy()
        rank = target
        for step in range(steps, 0, -1):
            if since[rank] <= step:
                break  # who has it by then has it from the tree
            route = by[step, rank]
            if route >= 0:
                sends[count] = route, step - 1
                count += 1
                since[rank] = min(since[rank], step)
                rank = src[route]
    return sends[:count].copy()

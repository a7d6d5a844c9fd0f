"""The cheapest tree to every rank in the time-expanded graph, by a search over sets of ranks.

Where all ranks must get a block, a tree is a growing set of ranks: who joins it in a step is sent the block
by whoever of the set can do it cheapest. All sets are followed together, step by step, each by the cheapest
way to it. Two rules leave few of them: what a set has cost, and the least that each other rank costs in any
later step, must be less than a tree known; and who can join for no more than it costs in any later step
joins at once, for a larger set is never worse. That tree is what the same search finds when it keeps but the
best sets of each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.prune import TimedRoute
from arborcast.synth.chunks.trees.pricing import Prices, TimedTree, cost_of, in_order
from arborcast.synth.errors import InfeasibleError, TimedOutError
from arborcast.synth.kernels.compiled import Ints

WAYS = (1000, 30_000, 3_000_000)
"""To sets of ranks in one step that are followed, first to have a good tree: milliseconds to a second."""

_CLOSE = 1e-9  # relative: of prices in floating point, a smaller gain is a matter of rounding

_Costs: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class SpanningSearch:
    """The search for one demand from one rank to all others, to be run again and again with other prices.

    Attributes:
        problem: what there is to send over, among at most 62 ranks.
        demand: the index of the demand.
        steps: S.
        WHOLE_BITS: of whole costs of trees up to which the answer is exact.
    """

    WHOLE_BITS: ClassVar[int] = 53

    problem: ChunkProblem
    demand: int
    steps: int

    def run(self, prices: Prices) -> tuple[int | float, TimedTree]:
        """The cheapest tree at some prices of the links in each step: its cost, its sends.

        Args:
            prices: see `Prices`. Integers give an exact answer, up to `WHOLE_BITS`.

        Raises:
            InfeasibleError: there is none in so many steps.
            TimedOutError: there are too many ways to sets of ranks to find it.
        """
        costs = self.problem.route_costs(prices).astype(np.float64)
        are_whole = prices.dtype != np.float64
        ranks = self.problem.ranks
        enter = np.full((self.steps, ranks, ranks), np.inf)
        for (src, dst), routes in self.problem.between.items():
            enter[:, src, dst] = costs[:, routes].min(axis=1)
        sets: Sequence[int] = ()
        limit = float(np.finfo(np.float64).max)
        for most in WAYS:
            cost, found, are_all = self._grown(enter, limit, most)
            if found:
                sets, limit = found, cost - 0.5 if are_whole else cost * (1 - _CLOSE)
            if are_all:
                break
        else:
            raise TimedOutError(f"demand {self.demand}: more than {most} ways to sets of ranks")
        tree = in_order(self._sends(costs, enter, sets))
        total = cost_of(self.problem, tree, prices)
        return (int(total) if are_whole else float(total)), tree

    def _grown(self, enter: _Costs, limit: float, most: int) -> tuple[float, Sequence[int], bool]:
        """The cheapest way from the source to all ranks that costs no more than a limit.

        Returns:
            Its cost; the set of ranks before each step, and the last, none where nothing was found;
            whether no way was left out: there were no more than `most` in any step.
        """
        bits = 1 << np.arange(self.problem.ranks)
        later = self._later(enter)
        layers: list[tuple[Ints, Ints]] = []
        sets, least = bits[[self._source]], later[0].sum(keepdims=True)
        are_all = True
        for step in range(self.steps):
            is_in = (sets[:, None] & bits) != 0
            price = np.full(is_in.shape, np.inf)
            for holder in range(self.problem.ranks):
                own = is_in[:, holder]
                price[own] = np.minimum(price[own], enter[step, holder])
            joins = ~is_in & (price <= later[step + 1])
            all_others = np.where(is_in, 0, np.minimum(price, later[step + 1])).sum(axis=1)
            least = least + all_others - np.where(is_in, 0, later[step]).sum(axis=1)
            may_join = ~is_in & ~joins & (price < np.inf)
            more = np.subtract(price, later[step + 1], out=np.full(is_in.shape, np.inf), where=may_join)
            (origin,) = np.nonzero(least <= limit)
            at_once = (sets + np.where(joins, bits, 0).sum(axis=1))[origin]
            reached, cost, origin, is_whole = _joined(at_once, least[origin], origin, more, limit, most)
            are_all &= is_whole
            order = np.lexsort((cost, reached))  # the cheapest way to each set
            order = order[np.unique(reached[order], return_index=True)[1]]
            layers.append((sets, origin[order]))
            sets, least = reached[order], cost[order]
        if not len(sets):  # all others have all ranks
            return np.inf, (), are_all
        way, at = [int(sets[0])], 0
        for before, origin in reversed(layers):
            at = int(origin[at])
            way.append(int(before[at]))
        return float(least[0]), way[::-1], are_all

    def _later(self, enter: _Costs) -> list[_Costs]:
        """The least that each other rank costs from each step on, sent by who may have the block by then."""
        since = self._since
        later = [np.where(since > 0, np.inf, 0)]
        for step in range(self.steps - 1, -1, -1):
            later.append(np.minimum(later[-1], enter[step, since <= step].min(axis=0)))
        return later[::-1]

    @cached_property
    def _source(self) -> int:
        (source,) = self.problem.demands[self.demand].sources
        return source

    @cached_property
    def _since(self) -> Ints:
        """The steps after which each rank can have the block."""
        since = self.problem.steps_from(frozenset({self._source}))
        if any(first is None or first > self.steps for first in since):
            words = f"demand {self.demand}: rank {self._source} cannot reach all in {self.steps} steps"
            raise InfeasibleError(words)
        return np.array(since, dtype=np.int64)

    def _sends(self, costs: _Costs, enter: _Costs, sets: Sequence[int]) -> Iterator[TimedRoute]:
        """The sends of a way: to who joins in a step, from the cheapest of who had the block before."""
        ranks = range(self.problem.ranks)
        for step, (before, after) in enumerate(pairwise(sets)):
            holders = [rank for rank in ranks if before >> rank & 1]
            for rank in ranks:
                if (after & ~before) >> rank & 1:
                    holder = holders[enter[step, holders, rank].argmin()]
                    routes = self.problem.between[holder, rank]
                    yield routes[costs[step, routes].argmin()], step


def _joined(
    reached: Ints, cost: _Costs, origin: Ints, more: _Costs, limit: float, most: int
) -> tuple[Ints, _Costs, Ints, bool]:
    """Sets that some ranks join, and the same without them.

    Args:
        reached: the sets.
        cost: what each costs at least.
        origin: the row of each in `more`.
        more: what each rank (column) adds to that; infinity where it cannot join.
        limit: of the cost.
        most: sets that are kept, the cheapest.

    Returns:
        The sets, costs and origins, and whether none was left out but by the limit.
    """
    is_whole = True
    for rank in range(more.shape[1]):
        joined = cost + more[origin, rank]
        (rows,) = np.nonzero(joined <= limit)
        reached = np.concatenate([reached, reached[rows] | 1 << rank])
        cost, origin = np.concatenate([cost, joined[rows]]), np.concatenate([origin, origin[rows]])
        if len(reached) > most:
            is_whole = False
            best = np.argpartition(cost, most)[:most]
            reached, cost, origin = reached[best], cost[best], origin[best]
    return reached, cost, origin, is_whole

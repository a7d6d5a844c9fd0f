"""The cheapest tree for one demand in the time-expanded graph: the pricing of `column_generation`.

The vertices are (rank, step): waiting costs nothing, and a send over a route in a step costs what the links
of the route cost in that step. A dynamic program over sets of targets (Dreyfus and Wagner 1971, on a graph
without cycles) finds the cheapest way to serve them all, relays included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.prune import TimedRoute, useful_sends
from arborcast.synth.collective import Demand
from arborcast.synth.errors import InfeasibleError, InputError
from arborcast.synth.kernels.compiled import Ints, kernel

Prices: TypeAlias = NDArray[Any]
"""One row per step, one entry per link of the topology, not negative; int64 or float64."""

TimedTree: TypeAlias = tuple[TimedRoute, ...]
"""The sends of a tree, in order of step and route."""

MOST_WORK = 4_000_000_000
"""Divisions of a set of targets in two, over all (rank, step), up to which a search is begun: seconds."""

PLAIN_WORK = 1_000_000
"""Of them, up to which a run may go without machine code."""

MOST_ENTRIES = 1 << 26
"""Entries of the table of all sets of targets up to which a search is begun: half a gigabyte."""

_UNREACHED = 1 << 60


@dataclass(frozen=True)
class TreeSearch:
    """The search for one demand, to be run again and again with other prices.

    Attributes:
        problem: what there is to send over.
        demand: the index of the demand.
        steps: S.
        WHOLE_BITS: of whole costs of trees up to which the answer is exact.
    """

    WHOLE_BITS: ClassVar[int] = _UNREACHED.bit_length() - 1

    problem: ChunkProblem
    demand: int
    steps: int

    def __post_init__(self) -> None:
        """Refuse what has no answer and what would take too long."""
        if self.steps < 1:
            raise InputError(f"steps must be at least 1, got {self.steps}")
        block = self._block
        reached = self.problem.steps_from(block.sources)
        for target in sorted(block.targets):
            needed = reached[target]
            if needed is None:
                raise InfeasibleError(f"demand {self.demand}: no way leads to rank {target}")
            if needed > self.steps:
                raise InfeasibleError(
                    f"demand {self.demand}: rank {target} cannot be reached in {self.steps} steps, "
                    f"only in {needed}"
                )
        if self.entries > MOST_ENTRIES or self.work > MOST_WORK:
            raise InputError(
                f"demand {self.demand}: {len(block.targets)} targets among {self.problem.ranks} ranks in "
                f"{self.steps} steps are too many for the exact search of cheapest trees, which is "
                "exponential in the targets (about 15 are possible); use a weaker bound"
            )

    @property
    def entries(self) -> int:
        """Entries of the table that one run fills."""
        return int((self.steps + 1) * (self.problem.ranks + 1) << len(self._block.targets))

    @cached_property
    def work(self) -> int:
        """Divisions of a set of targets in two that one run looks at, over all (rank, step)."""
        return sum(int(3 ** mask.bit_count()) for row in self._alive for mask in row if mask) // 2

    def run(self, prices: Prices) -> tuple[int | float, TimedTree]:
        """The cheapest tree from the sources of the demand to all its targets.

        Args:
            prices: see `Prices`. Integers give an exact answer.

        Returns:
            The cost, and the sends in order of step, each rank reached at most once.

        Raises:
            OverflowError: int64 prices so large that a sum might not fit.
        """
        costs: Prices = self.problem.route_costs(prices)
        graph, unreached = self._graph, self._unreached(costs)
        pair_costs = np.minimum.reduceat(costs, [ways[0] for ways in self._ways], axis=1)
        compiled = self.work > PLAIN_WORK
        fill, trace = (_fill.compiled(), _trace.compiled()) if compiled else (_fill, _trace)
        table = fill(*graph, pair_costs, unreached)
        sends = trace(*graph, pair_costs, table)
        cost: Any = table[0, -1, -1]
        timed = [(self._route(costs[step], pair), step) for pair, step in sends.tolist()]
        tree = in_order(
            useful_sends(self.problem, self._block, timed)
        )  # the table does not count what is free
        return (float(cost) if costs.dtype == np.float64 else int(cost)), tree

    @cached_property
    def _block(self) -> Demand:
        return self.problem.demands[self.demand]

    @cached_property
    def _ways(self) -> list[list[int]]:
        """The routes of each pair of ranks that has one."""
        return list(self.problem.between.values())

    @cached_property
    def _alive(self) -> tuple[tuple[int, ...], ...]:
        """For each step and rank the targets it can still serve; 0 where no source reaches it in time."""
        problem, block = self.problem, self._block
        since = problem.steps_from(block.sources)
        away = [problem.steps_to(target) for target in sorted(block.targets)]
        never = self.steps + 1
        return tuple(
            tuple(
                sum(
                    1 << bit
                    for bit, of_target in enumerate(away)
                    if step + _or(of_target[rank], never) <= self.steps and _or(since[rank], never) <= step
                )
                for rank in range(problem.ranks)
            )
            for step in range(self.steps)
        )

    @cached_property
    def _graph(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """What the kernels need: pairs by source, their destinations, live targets, own bits, sources."""
        ranks = self.problem.ranks
        sources, heads = zip(*self.problem.between, strict=True)
        own = np.zeros(ranks, dtype=np.int64)
        for bit, target in enumerate(sorted(self._block.targets)):
            own[target] = 1 << bit
        return (
            np.searchsorted(sources, np.arange(ranks + 1)).astype(np.int64),
            np.array(heads, dtype=np.int64),
            np.array(self._alive, dtype=np.int64),
            own,
            np.array(sorted(self._block.sources), dtype=np.int64),
        )

    def _unreached(self, costs: Prices) -> int | float:
        """More than any tree costs."""
        if costs.dtype == np.float64:
            return float(np.inf)
        if int(costs.max()) >= _UNREACHED // (self.steps * len(self._block.targets)):
            raise OverflowError(
                f"int64 prices of routes up to {costs.max()} in {self.steps} steps are too large"
            )
        return _UNREACHED

    def _route(self, costs: Prices, pair: int) -> int:
        """The cheapest route of a pair of ranks."""
        return min(self._ways[pair], key=lambda route: costs[route])


def in_order(sends: Iterable[TimedRoute]) -> TimedTree:
    """Sends sorted by step and route."""
    return tuple(sorted(sends, key=lambda send: (send[1], send[0])))


def cost_of(problem: ChunkProblem, tree: TimedTree, prices: Prices | Sequence[Sequence[int]]) -> Any:
    """What a tree costs at some prices of the links in each step."""
    return sum(prices[step][link] for route, step in tree for link in problem.routes[route].links)


def run_exactly(
    run: Callable[[Prices], tuple[int | float, TimedTree]],
    problem: ChunkProblem,
    prices: Sequence[Sequence[int]],
    bits: int,
) -> tuple[int, TimedTree]:
    """The cheapest tree by integers of any size, and its cost; where they are large, up to rounding.

    `run` finds the cheapest where no tree costs more than a number of so many bits.
    """
    most = max(map(max, prices)) * max(len(route.links) for route in problem.routes)
    # A tree has no more sends than ranks in each step.
    shift = max(0, (most * problem.ranks * len(prices)).bit_length() - bits)
    _, tree = run(np.array([[price >> shift for price in row] for row in prices], dtype=np.int64))
    return int(cost_of(problem, tree, prices)), tree


def _or(steps: int | None, never: int) -> int:
    return never if steps is None else steps


@kernel
def _fill(
    start: Ints, heads: Ints, alive: Ints, own: Ints, sources: Ints, costs: Prices, unreached: float
) -> Prices:
    """The cost of serving each set of targets from each rank in each step; the last rank is all sources."""
    steps, ranks = alive.shape
    sets = own.sum() + 1
    table = np.full((steps + 1, ranks + 1, sets), unreached, dtype=costs.dtype)
    table[:, :, 0] = 0
    direct = np.empty(sets, dtype=costs.dtype)
    for rank in range(ranks):
        table[steps, rank, own[rank]] = 0
    for step in range(steps - 1, -1, -1):
        for rank in range(ranks):
            others = alive[step, rank] & ~own[rank]
            if alive[step, rank] == 0:
                continue
            row, later = table[step, rank], table[step + 1]
            direct[:] = later[rank]
            for pair in range(start[rank], start[rank + 1]):
                cost, there = costs[step, pair], later[heads[pair]]
                for served in range(1, sets):
                    direct[served] = min(direct[served], cost + there[served])
            _divide(direct, row, others)
            if own[rank] > 0:
                served = 0
                while True:
                    row[served | own[rank]] = row[served]
                    if served == others:
                        break
                    served = (served - others) & others
    together = table[0, ranks]
    for source in sources:
        together[:] = np.minimum(together, table[0, source])
    if sources.shape[0] > 1:
        direct[:] = together
        _divide(direct, together, sets - 1)
    return table


@kernel
def _divide(direct: Prices, row: Prices, targets: int) -> None:
    """Fill `row` for each set of the targets: one branch serves all, or serves the first and some more."""
    served = targets & -targets
    while served != 0:
        best = direct[served]
        others = served & (served - 1)
        part = others
        while part != 0:
            part = (part - 1) & others
            rest = others ^ part
            best = min(best, direct[served ^ rest] + row[rest])
        row[served] = best
        served = (served - targets) & targets


@kernel
def _trace(
    start: Ints, heads: Ints, alive: Ints, own: Ints, sources: Ints, costs: Prices, table: Prices
) -> Ints:
    """The sends (pair, step) of a cheapest tree: the table again, but only where the tree passes."""
    steps, ranks = alive.shape
    everything = table.shape[2] - 1
    bits = 0
    while everything >> bits:
        bits += 1
    sends, count = np.empty((bits * steps, 2), np.int64), 0
    stack, height = np.empty((2 * bits * (steps + 2), 3), np.int64), 1
    stack[0] = (0, ranks, everything)
    while height > 0:
        height -= 1
        step, rank, served = stack[height]
        if rank < ranks:
            served &= ~own[rank]
        if served == 0:
            continue
        best, rest = _branch(start, heads, sources, costs, table, step, rank, served)[0], 0
        others = served & (served - 1)
        part = others
        while part != 0:
            part = (part - 1) & others
            left = others ^ part
            cost = _branch(start, heads, sources, costs, table, step, rank, served ^ left)[0]
            if cost + table[step, rank, left] < best:
                best, rest = cost + table[step, rank, left], left
        if rest != 0:
            stack[height] = (step, rank, rest)
            height += 1
        choice = _branch(start, heads, sources, costs, table, step, rank, served ^ rest)[1]
        if rank == ranks:
            stack[height] = (step, choice, served ^ rest)
        elif choice < 0:
            stack[height] = (step + 1, rank, served ^ rest)
        else:
            sends[count] = (choice, step)
            count += 1
            stack[height] = (step + 1, heads[choice], served ^ rest)
        height += 1
    return sends[:count].copy()


@kernel
def _branch(
    start: Ints, heads: Ints, sources: Ints, costs: Prices, table: Prices, step: int, rank: int, served: int
) -> tuple[float, int]:
    """The cheapest single move towards a set of targets: its cost; the pair, -1 to wait, or the source."""
    ranks = table.shape[1] - 1
    if rank == ranks:
        best, choice = table[0, sources[0], served], sources[0]
        for source in sources[1:]:
            if table[0, source, served] < best:
                best, choice = table[0, source, served], source
        return best, choice
    best, choice = table[step + 1, rank, served], -1
    for pair in range(start[rank], start[rank + 1]):
        cost = costs[step, pair] + table[step + 1, heads[pair], served]
        if cost < best:
            best, choice = cost, pair
    return best, choice

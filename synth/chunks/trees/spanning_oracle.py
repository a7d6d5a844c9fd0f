"""The cheapest tree to every rank in the time-expanded graph, for more ranks than sets of targets allow.

Where all ranks must get a block, a tree is a growing set of ranks: who joins it in a step is sent the block
by whoever of the set can do it cheapest. So a dynamic program over sets of ranks, step by step, finds the
cheapest: 3 to the power of the ranks instead of ranks times that (`synth.chunks.trees.pricing`). Ranks that
may be exchanged without moving a price count as a class, of which a set has none, some or all: eight classes
of four take less than sixteen ranks. Sets that lead to nothing cheaper than the best tree known are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.chunks.bounds.step_check import MOST_TREE_TARGETS
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.trees.pricing import Prices, TimedTree, TreeSearch, in_order
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.kernels.compiled import Ints, kernel

MOST_MOVES = 50_000_000
"""Ways on from all sets together, in one step, up to which a search is begun: a second for a few steps."""

_UNREACHED = 1 << 60
_NONE, _SOME, _ALL = 0, 1, 2
_ROUNDING = 1e-9


def is_spanning(problem: ChunkProblem) -> bool:
    """Whether every demand brings what one rank has to all others."""
    return all(
        len(demand.sources) == 1 and len(demand.targets) == problem.ranks - 1 for demand in problem.demands
    )


def twins(problem: ChunkProblem, orbits: Ints) -> tuple[tuple[int, ...], ...]:
    """The ranks divided into those of which any two may be exchanged without moving a link to another orbit.

    Args:
        problem: whose ranks.
        orbits: the number of the orbit of each link; prices are the same within one.
    """
    size = problem.topology.size
    table = np.full((size, size), -1, dtype=np.int64)
    for link, orbit in zip(problem.topology.links, orbits.tolist(), strict=True):
        table[link.src, link.dst] = orbit
    classes: list[list[int]] = []
    for rank in range(problem.ranks):
        for members in classes:
            exchanged = np.arange(size)
            exchanged[[rank, members[0]]] = members[0], rank
            if np.array_equal(table[exchanged][:, exchanged], table):
                members.append(rank)
                break
        else:
            classes.append([rank])
    return tuple(map(tuple, classes))


def moves_of(classes: Sequence[Sequence[int]]) -> int:
    """Ways on from all sets of ranks together, in one step."""
    return prod(3 if len(members) == 1 else 6 for members in classes)


def searches_for(
    problem: ChunkProblem, demands: Sequence[int], steps: int, orbits: Ints
) -> Sequence[TreeSearch | SpanningSearch]:
    """The searches of some demands: over sets of ranks where there are too many targets for sets of them.

    Args:
        problem: what there is to send over.
        demands: their indices.
        steps: S.
        orbits: the number of the orbit of each link; prices must be the same within one.
    """
    if max(len(problem.demands[demand].targets) for demand in demands) <= MOST_TREE_TARGETS:
        return [TreeSearch(problem, demand, steps) for demand in demands]
    classes = twins(problem, orbits)
    return [SpanningSearch(problem, demand, steps, classes) for demand in demands]


@dataclass(frozen=True)
class SpanningSearch:
    """The search for one demand, to be run again and again with other prices.

    Attributes:
        problem: what there is to send over.
        demand: the index of a demand from one rank to all others.
        steps: S.
        classes: `twins` of the orbits within which prices are the same.
    """

    problem: ChunkProblem
    demand: int
    steps: int
    classes: tuple[tuple[int, ...], ...]
    _known: dict[TimedTree, NDArray[np.int64]] = field(default_factory=dict)

    def run(self, prices: Prices) -> tuple[int | float, TimedTree]:
        """The cheapest tree at some prices of the links in each step, int64 or float64: its cost, its sends.

        Raises:
            InfeasibleError: there is none in so many steps.
        """
        costs = self.problem.route_costs(prices)
        unreached = np.inf if costs.dtype == np.float64 else _UNREACHED
        enter = self._entering(costs, unreached)
        enough, known = unreached, None
        for tree, uses in self._known.items():
            cost = costs.ravel()[uses].sum()
            if cost < enough:
                enough, known = cost, tree
        limit = enough * (1 + _ROUNDING) if costs.dtype == np.float64 else enough
        codes, came, cost = _grow(enter, self._sizes, self._places, self._start, limit, unreached)
        if cost >= enough:
            if known is None:
                rank = next(iter(self.problem.demands[self.demand].sources))
                raise InfeasibleError(
                    f"demand {self.demand}: rank {rank} cannot reach all in {self.steps} steps"
                )
            return self._number(enough), known
        tree = in_order(self._sends(costs, enter, codes, came))
        self.know(tree)
        return self._number(costs.ravel()[self._known[tree]].sum()), tree

    def know(self, tree: TimedTree) -> None:
        """Take note of a tree that a search need not look for."""
        routes = len(self.problem.routes)
        self._known[tree] = np.array([step * routes + route for route, step in tree], dtype=np.int64)

    @staticmethod
    def _number(cost: float) -> int | float:
        return float(cost) if isinstance(cost, np.floating | float) else int(cost)

    @cached_property
    def _source(self) -> int:
        return next(iter(self.problem.demands[self.demand].sources))

    @cached_property
    def _ordered(self) -> tuple[tuple[int, ...], ...]:
        """The classes; the source comes first in its own."""
        return tuple(
            tuple(sorted(own, key=lambda rank: (rank != self._source, rank))) for own in self.classes
        )

    @cached_property
    def _sizes(self) -> Ints:
        return np.array([len(own) for own in self._ordered], dtype=np.int64)

    @cached_property
    def _places(self) -> Ints:
        """What a digit of each class is worth in the number of a set; one more for the number of sets."""
        return np.cumprod([1, *(2 if len(own) == 1 else 3 for own in self._ordered)]).astype(np.int64)

    @cached_property
    def _first(self) -> int:
        return next(at for at, own in enumerate(self._ordered) if own[0] == self._source)

    @cached_property
    def _start(self) -> int:
        return int(self._places[self._first])  # the digit 1: some, or all of one

    @cached_property
    def _class_ways(self) -> tuple[Ints, Ints, Ints]:
        """The routes between one of each class and one of each, those of a pair together; pairs, starts."""
        pairs: list[int] = []
        routes: list[int] = []
        starts: list[int] = []
        for holder, own in enumerate(self._ordered):
            for entered, others in enumerate(self._ordered):
                ends = (own[0], others[0]) if holder != entered else (own[0], own[-1])
                if found := self.problem.between.get(ends):
                    pairs.append(holder * len(self._ordered) + entered)
                    starts.append(len(routes))
                    routes += found
        return (
            np.array(pairs, dtype=np.int64),
            np.array(routes, dtype=np.int64),
            np.array(starts, dtype=np.int64),
        )

    def _entering(self, costs: Prices, unreached: float) -> Prices:
        pairs, routes, starts = self._class_ways
        count = len(self._ordered)
        enter = np.full((self.steps, count * count), unreached, dtype=costs.dtype)
        enter[:, pairs] = np.minimum.reduceat(costs[:, routes], starts, axis=1)
        return enter.reshape(self.steps, count, count)

    def _sends(
        self, costs: Prices, enter: Prices, codes: Sequence[Ints], came: Sequence[Ints]
    ) -> Iterator[tuple[int, int]]:
        """The sends of the way that led to the last set, found backwards."""
        at = 0
        for step in range(self.steps - 1, -1, -1):
            after, before = int(codes[step + 1][at]), int(codes[step][came[step + 1][at]])
            at = int(came[step + 1][at])
            held = [index for index in range(len(self._ordered)) if self._digit(before, index)]
            for index, own in enumerate(self._ordered):
                has, gets = self._digit(before, index), self._digit(after, index)
                if has == gets:
                    continue
                holder = min(held, key=lambda other: (enter[step, other, index], other))
                new = own[1 if has else 0 : len(own) if gets == _ALL or len(own) == 1 else 1]
                for rank in new:
                    ways = self.problem.between[self._ordered[holder][0], rank]
                    yield min(ways, key=lambda route: costs[step, route]), step

    def _digit(self, code: int, index: int) -> int:
        return code % int(self._places[index + 1]) // int(self._places[index])


@kernel
def _grow(
    enter: Prices, sizes: Ints, places: Ints, start: int, limit: float, unreached: float
) -> tuple[list[Ints], list[Ints], float]:
    """All sets that may lead to a tree of no more than `limit`, step by step, and where each came from.

    A set is looked at once in each step, in at most `moves_of` ways on from all of them.

    Returns:
        For each time the numbers of the sets; for each the position, one step earlier, of the set before it;
        the cost of the full set at the end, which is the only one of the last time.
    """
    steps = enter.shape[0]
    rest = _least_to_come(enter, unreached)
    size = places[sizes.shape[0]]
    position = np.full(size, -1, dtype=np.int64)
    codes = np.array([start], dtype=np.int64)
    spent = np.zeros(1, dtype=enter.dtype)
    all_codes, all_came = [codes], [np.zeros(1, dtype=np.int64)]
    # Of the ways on from one set: what they end with, their costs, and what they cost at least to the end.
    ways = np.empty((2, size), dtype=np.int64)
    costs = np.empty((4, size), dtype=enter.dtype)
    for step in range(steps):
        new_codes, new_came = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int64)
        new_spent = np.empty(size, dtype=enter.dtype)
        found = 0
        for index in range(codes.shape[0]):
            ways[0, 0], costs[0, 0] = codes[index], spent[index]
            row, count = _ways_on(enter, sizes, places, step, rest, limit, unreached, ways, costs)
            for entry in range(count):
                code, cost = ways[row, entry], costs[row, entry]
                place = position[code]
                if place < 0:
                    position[code] = found
                    new_codes[found], new_spent[found], new_came[found] = code, cost, index
                    found += 1
                elif cost < new_spent[place]:
                    new_spent[place], new_came[place] = cost, index
        for entry in range(found):
            position[new_codes[entry]] = -1
        codes, spent = new_codes[:found].copy(), new_spent[:found].copy()
        all_codes.append(codes)
        all_came.append(new_came[:found].copy())
    total = unreached
    if codes.shape[0] == 1:
        total = spent[0]
    return all_codes, all_came, total


@kernel
def _least_to_come(enter: Prices, unreached: float) -> Prices:
    """The least that one rank of each class can cost from each step on."""
    steps, classes = enter.shape[0], enter.shape[1]
    rest = np.full((steps + 1, classes), unreached, dtype=enter.dtype)
    for step in range(steps - 1, -1, -1):
        for entered in range(classes):
            rest[step, entered] = min(rest[step + 1, entered], enter[step, :, entered].min())
    return rest


@kernel
def _ways_on(
    enter: Prices,
    sizes: Ints,
    places: Ints,
    step: int,
    rest: Prices,
    limit: float,
    unreached: float,
    ways: Ints,
    costs: Prices,
) -> tuple[int, int]:
    """What a set may be after a step, class by class: none, one or all of those join that are not in it.

    The set is the first entry of the first row of `ways`, its cost that of `costs`; the row of both that has
    the ways on, and how many they are, are returned. The rows of `costs` after the second are for what they
    cost at least to the end.
    """
    classes = sizes.shape[0]
    last = step == enter.shape[0] - 1
    code = ways[0, 0]
    costs[2, 0] = costs[0, 0]
    # What is still to come costs at least this; subtracted class by class as choices are made.
    for entered in range(classes):
        digit = code // places[entered] % (places[entered + 1] // places[entered])
        if digit == 2 or (digit == 1 and sizes[entered] == 1):
            continue
        if rest[step, entered] >= unreached:
            return 0, 0
        costs[2, 0] += (sizes[entered] - digit) * rest[step, entered]
    if costs[2, 0] > limit:
        return 0, 0
    row, count = 0, 1
    for entered in range(classes):
        digit = code // places[entered] % (places[entered + 1] // places[entered])
        if digit == 2 or (digit == 1 and sizes[entered] == 1):
            continue
        single = _cheapest_entry(enter[step, :, entered], places, code, unreached)
        missing = sizes[entered] - digit
        later, least = rest[step + 1, entered], rest[step, entered]
        full = 1 if sizes[entered] == 1 else 2
        splits = digit == 0 and sizes[entered] > 1 and not last and later < single
        other, more = 1 - row, 0
        for entry in range(count):
            bound = costs[2 + row, entry] - missing * least
            cost = costs[row, entry]
            if not last and later < unreached and bound + missing * later <= limit:
                ways[other, more], costs[other, more] = ways[row, entry], cost
                costs[2 + other, more] = bound + missing * later
                more += 1
            if single < unreached and bound + missing * single <= limit:
                ways[other, more] = ways[row, entry] + (full - digit) * places[entered]
                costs[other, more] = cost + missing * single
                costs[2 + other, more] = bound + missing * single
                more += 1
            if splits and single < unreached and bound + single + (missing - 1) * later <= limit:
                ways[other, more] = ways[row, entry] + places[entered]
                costs[other, more] = cost + single
                costs[2 + other, more] = bound + single + (missing - 1) * later
                more += 1
        row, count = other, more
        if count == 0:
            break
    return row, count


@kernel
def _cheapest_entry(enter: Prices, places: Ints, code: int, unreached: float) -> float:
    """What one rank of a class costs that joins a set, from whichever class of it is cheapest."""
    single = unreached
    for holder in range(enter.shape[0]):
        if code // places[holder] % (places[holder + 1] // places[holder]) > 0:
            single = min(single, enter[holder])
    return single

"""Packings of shallow trees: the best rate within a height, for messages too small to hide many steps.

Column generation: a linear program weighs the trees known so far, its prices of the links say which tree of
the height would help most, and so on until none does. Few of the trees that were met then carry the rate.

Source: Ford and Fulkerson (1958) for the generation of columns; Farley (1990) for the limit it proves.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from synth.compiled import Ints
from synth.deadline import Deadline
from synth.errors import InfeasibleError
from synth.highs import new_model
from synth.packing.carrier import Carrier, hops, shape
from synth.packing.fewest import fewest_among
from synth.packing.shallow_pricing import Pricing, least_height
from synth.packing.weights import Choice
from synth.schedule import Settings
from synth.topology import Topology

NO_DEADLINE = Deadline()

WORTH = Fraction(1, 4)
"""The part of the limit that lower trees may lose to be on the frontier."""

MOST_HEIGHTS = 5
"""How many heights the frontier looks at; of more, every second or third."""

_ROUNDS = 400  # of weighing and pricing
_EFFORT = 300_000_000  # additions for exact prices, about two seconds
_QUICK_EFFORT = 20_000_000  # for those of a frontier, of each height
_FINEST = 1 << 42  # the largest price, as a whole number: 64 links cost no more than one edge may
_SEARCH_LIMIT = 20  # branch-and-bound vertices that few trees are worth
_SEARCHED_UP_TO = 64  # carriers; the integer program of more takes seconds for its first vertex
_CLOSE = 1e-9  # relative: the accuracy to which HiGHS is believed
_USED = 1e-7  # of the rate: a smaller weight is none


@dataclass(frozen=True, slots=True)
class Shallow:
    """The best that was found within a height.

    Attributes:
        height: of the highest tree that is allowed.
        carriers: trees or pairs with exact weights, GB/s.
        rate: of all of them together, GB/s; each root's carriers carry the same part of it.
        settings: facts about how they were found.
        most_per_root: the largest number of trees that one root has; of pairs, all together.
    """

    height: int
    carriers: tuple[Carrier, ...]
    rate: Fraction
    settings: Settings
    most_per_root: int


def pack_shallow(
    topology: Topology,
    roots: Sequence[int] | None,
    height: int,
    *,
    limit: Fraction,
    max_trees: int | None = None,
    tolerance: Fraction = Fraction(0),
    seed: int = 0,
    deadline: Deadline = NO_DEADLINE,
) -> Shallow:
    """Trees of at most a given height from each root, or the pairs of an allreduce, at their best rate.

    Args:
        topology: the graph, relays turned into switches.
        roots: one for a broadcast, all ranks for an allgather; None for an allreduce, whose roots are free.
        height: the most edges between a root and a rank; edges pass switches.
        limit: of the rate without a height, GB/s: nothing beyond is looked for.
        max_trees: at most so many per root (of an allreduce: in all), at the best rate; None for as few as
            the tolerance allows.
        tolerance: the part of the rate within this height that may be given up for fewer trees.
        seed: breaks ties.
        deadline: when to be content with what there is; trees there are in any case.

    Raises:
        InfeasibleError: no tree is as low.
    """
    least = least_height(topology, roots)
    if height < least:
        raise InfeasibleError(_too_low(topology, roots, height, least))
    generation = _Generation(Pricing(topology, roots, height, seed), limit, deadline)
    generation.run()
    return generation.thinned(tolerance, max_trees)


def shallow_frontier(
    topology: Topology,
    roots: Sequence[int] | None,
    below: int,
    *,
    limit: Fraction,
    seed: int = 0,
    deadline: Deadline = NO_DEADLINE,
) -> Iterator[Shallow]:
    """The best rates of growing heights, from the first that is worth it to the first that has the limit.

    Args:
        topology: as in `pack_shallow`, like all others.
        roots: see there.
        below: the height that is not looked at any more.
        limit: see there.
        seed: breaks ties.
        deadline: when to stop.

    Yields:
        Packings that lose at most `WORTH` of the limit, each with a better rate than the ones before.
    """
    least = least_height(topology, roots)
    known: Sequence[Carrier] = ()
    best = limit * (1 - WORTH) * (1 - Fraction(_CLOSE))
    stride = max(1, math.ceil((below - least) / MOST_HEIGHTS))
    for height in sorted(range(below - 1, least - 1, -stride)):
        if deadline.has_passed:
            return
        pricing = Pricing(topology, roots, height, seed)
        generation = _Generation(pricing, limit, deadline, _QUICK_EFFORT)
        generation.run(known)
        if not pricing.is_exact:
            known = generation.support()  # elsewhere all are found at once, and then fewer are needed
        if generation.rate > best * (1 + Fraction(_CLOSE)):
            found = generation.thinned(Fraction(0), None, quickly=True)
            yield found
            best = found.rate
        if best == limit:
            return


def _too_low(topology: Topology, roots: Sequence[int] | None, height: int, least: int) -> str:
    found = f"the lowest have {least}" if least < topology.ranks else "there are none of any height"
    return f"topology {topology.name}: no trees to all ranks have height {height}, {found}"


@dataclass(eq=False)
class _Generation:
    """Carriers met so far, and the linear program that weighs them.

    Column 0 is the rate of each group; rows are the links and then the groups.
    """

    pricing: Pricing
    limit: Fraction
    deadline: Deadline
    effort: int = _EFFORT
    met: dict[tuple[object, ...], int] = field(default_factory=dict)
    carriers: list[tuple[int, Carrier]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """The linear program without carriers."""
        topology, groups = self.pricing.topology, self.pricing.groups
        self._position = {(link.src, link.dst): index for index, link in enumerate(topology.links)}
        self._capacities = np.array(topology.capacities, dtype=np.int64)
        model = new_model(solver="simplex", presolve="off", simplex_strategy=4)
        nothing = (0, np.array([], dtype=np.int32), np.array([], dtype=np.float64))
        for capacity in topology.capacities:
            model.addRow(-np.inf, float(capacity), *nothing)
        links = len(topology.links)
        for _ in range(groups):
            model.addRow(0.0, np.inf, *nothing)
        rows = np.arange(links, links + groups, dtype=np.int32)
        self._most = float(self.limit / groups / topology.bandwidth_unit)
        model.addCol(-1.0, 0.0, self._most, groups, rows, np.full(groups, -1.0))
        self._model: Any = model
        self._values: Sequence[float] = [0.0]
        self._proved = "none"

    @property
    def rate(self) -> Fraction:
        """Of all groups together, GB/s, as near as HiGHS says."""
        return Fraction(self._values[0]) * self.pricing.groups * self.pricing.topology.bandwidth_unit

    def run(self, known: Sequence[Carrier] = ()) -> None:
        """Meet carriers, the known ones first, until none helps."""
        self._proved = self._run(known)

    def thinned(self, tolerance: Fraction, max_trees: int | None, *, quickly: bool = False) -> Shallow:
        """As few of the carriers as carry the rate, with exact weights."""
        search_limit = _SEARCH_LIMIT if len(self.carriers) <= _SEARCHED_UP_TO else 0 if quickly else 1
        carriers, settings = fewest_among(
            self._choice(),
            self.support(),
            tolerance=tolerance,
            max_trees=max_trees,
            seed=self.pricing.seed,
            deadline=self.deadline,
            search_limit=search_limit,
        )
        rate = sum((carrier.weight for carrier in carriers), Fraction(0))
        facts: Settings = (("max_height", self.pricing.height), ("within_height", self._proved))
        counts = Counter(0 if self.pricing.roots is None else carrier.root for carrier in carriers)
        return Shallow(self.pricing.height, carriers, rate, (*facts, *settings), max(counts.values()))

    def _run(self, known: Sequence[Carrier]) -> str:
        group_of = {root: group for group, root in enumerate(self.pricing.roots or ())}
        for carrier in known:
            self._add(group_of.get(carrier.root, 0), carrier)
        for _, _, carrier in self.pricing.carriers(self._first_prices()):
            self._add(group_of.get(carrier.root, 0), carrier)
        for _ in range(_ROUNDS):
            rate, lengths = self._weigh()
            if rate >= self._most * (1 - _CLOSE):
                return "the limit of any height"
            if self.deadline.has_passed:
                return "none: out of time"
            exactly = self.pricing.is_exact
            new, most = self._price(lengths, exactly=exactly)
            if not new and not exactly and self._may_ask():
                exactly = True
                new, most = self._price(lengths, exactly=True)
            if exactly and rate >= most * (1 - _CLOSE):
                return "best, to 1e-9"
            if not new:
                return "none: no better tree was found"
        return "none: the search was cut short"

    def _choice(self) -> Choice[Any]:
        """All carriers met."""
        groups: list[list[Carrier]] = [[] for _ in range(self.pricing.groups)]
        for group, carrier in self.carriers:
            groups[group].append(carrier)
        return Choice(self.pricing.topology, tuple(map(tuple, groups)))

    def support(self) -> list[Carrier]:
        """The carriers that carry something in the last answer."""
        # Those that were met after the last answer carry nothing in it.
        weighed = zip(self.carriers, self._values[1:], strict=False)
        return [carrier for (_, carrier), weight in weighed if weight > _USED * self._most]

    def _may_ask(self) -> bool:
        return self.pricing.can_be_exact and self.pricing.effort + self.pricing.effort_of_one <= self.effort

    def _first_prices(self) -> Ints:
        lengths = _FINEST // self._capacities
        return np.maximum(lengths, 1)

    def _weigh(self) -> tuple[float, Ints]:
        """The best rate of a group, in units of capacity, and the prices of the links."""
        self._model.run()
        solution = self._model.getSolution()
        self._values = solution.col_value
        links = len(self._capacities)
        prices = np.maximum(-np.array(solution.row_dual[:links]), 0.0)
        most = float(prices.max())
        scaled = np.zeros(links) if most <= 0 else prices / most * _FINEST
        # Never nothing: among ways that cost as little the shortest is meant.
        return self._values[0], np.rint(scaled).astype(np.int64) + 1

    def _price(self, lengths: Ints, *, exactly: bool) -> tuple[bool, float]:
        """Meet the cheapest carriers; whether one is new, and the limit that they prove if they are exact."""
        priced = self.pricing.carriers(lengths, exactly=exactly)
        cheapest: dict[int, int] = {}
        new = False
        for group, cost, carrier in priced:
            cheapest[group] = min(cost, cheapest.get(group, cost))
            new |= self._add(group, carrier)
        return new, float(np.dot(lengths, self._capacities)) / max(1, sum(cheapest.values()))

    def _add(self, group: int, carrier: Carrier) -> bool:
        key = shape(carrier)
        if key in self.met:
            return False
        self.met[key] = len(self.carriers)
        self.carriers.append((group, carrier))
        uses = self._uses(carrier)
        links = np.flatnonzero(uses)
        rows = np.array([*links, len(uses) + group], dtype=np.int32)
        counts = np.array([*uses[links], 1], dtype=np.float64)
        self._model.addCol(0.0, 0.0, np.inf, len(rows), rows, counts)
        return True

    def _uses(self, carrier: Carrier) -> Ints:
        """How often it passes each link."""
        uses = np.zeros(len(self._capacities), dtype=np.int64)
        for hop, count in hops(carrier).items():
            uses[self._position[hop]] = count
        return uses

"""Packings of shallow trees: the best rate within a height, for messages too small to hide many steps.

Column generation: a linear program weighs the trees known so far, its prices of the links say which tree of
the height would help most, and so on until none does. Few of the trees that were met then carry the rate.

Source: Ford and Fulkerson (1958) for the generation of columns; Farley (1990) for the limit it proves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from arborcast.synth.deadline import NO_DEADLINE, Deadline
from arborcast.synth.errors import InfeasibleError, Prover
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.lp.tree_program import CLOSE, TreeProgram, Weighed, whole_prices
from arborcast.synth.packing.bounded_height_pricing import Pricing, least_height
from arborcast.synth.packing.carrier import Carrier, Packing
from arborcast.synth.packing.fewest import fewest_among
from arborcast.synth.packing.weights import Choice, Use, rows_of
from arborcast.synth.schedule import Settings
from arborcast.synth.topology import Topology

WORTH = Fraction(1, 4)
"""The part of the limit that lower trees may lose to be on the frontier."""

MOST_HEIGHTS = 5
"""How many heights the frontier looks at; of more, every second or third."""

_ROUNDS = 400  # of weighing and pricing
_EFFORT = 300_000_000  # additions for exact prices, about two seconds
_QUICK_EFFORT = 20_000_000  # for those of a frontier, of each height
_FINEST = 1 << 42  # the largest price, as a whole number: 64 links cost no more than one edge may
_SPREAD = 6  # rounds that spread trees over the links before the first linear program
_SEARCH_LIMIT = 20  # branch-and-bound vertices that few trees are worth
_SEARCHED_UP_TO = 64  # carriers; the integer program of more takes seconds for its first vertex
_USED = 1e-7  # of the limit: a smaller weight is none


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
) -> Packing:
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
        raise InfeasibleError(_too_low(topology, roots, height, least), proved_by=[Prover.LIMIT])
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
) -> Iterator[Packing]:
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
    best = limit * (1 - WORTH) * (1 - Fraction(CLOSE))  # which itself is worth it
    stride = max(1, math.ceil((below - least) / MOST_HEIGHTS))
    for height in sorted(range(below - 1, least - 1, -stride)):
        if deadline.has_passed:
            return
        pricing = Pricing(topology, roots, height, seed)
        generation = _Generation(pricing, limit, deadline, _QUICK_EFFORT)
        generation.run(known)
        if not pricing.is_exact:
            known = generation.support()  # elsewhere all are found at once, and then fewer are needed
        if generation.exceeds(best):
            found = generation.thinned(Fraction(0), None, quickly=True)
            yield found
            best = _rate(found.carriers)
        if best == limit:
            return


def _rate(carriers: Sequence[Carrier]) -> Fraction:
    return sum((carrier.weight for carrier in carriers), Fraction(0))


def _too_low(topology: Topology, roots: Sequence[int] | None, height: int, least: int) -> str:
    found = f"the lowest have {least}" if least < topology.ranks else "there are none of any height"
    return f"topology {topology.name}: no trees to all ranks have height {height}, {found}"


@dataclass(eq=False)
class _Generation:
    """Carriers met so far, and the linear program that weighs them; rates are parts of the limit."""

    pricing: Pricing
    limit: Fraction
    deadline: Deadline
    effort: int = _EFFORT
    met: set[tuple[bytes, ...]] = field(default_factory=set)
    carriers: list[tuple[Use, Carrier]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """The linear program without carriers."""
        topology, groups = self.pricing.topology, self.pricing.groups
        self._target = self.limit / groups
        # The primal simplex goes on best where columns are added.
        self._program = TreeProgram(rows_of(topology, self._target, groups), simplex_strategy=4)
        self._weighed: Weighed | None = None
        self._least = Fraction(1)  # the least limit that prices proved
        self._why = ""  # the search ended where it did

    def exceeds(self, rate: Fraction) -> bool:
        """Whether the carriers reach more than a rate in GB/s, exactly where it is close."""
        found = 0.0 if self._weighed is None else self._weighed.rate
        asked = float(rate / self.limit)
        return found > asked * (1 - CLOSE) and (
            found > asked * (1 + 1000 * CLOSE) or self._choice().rate * self.limit > rate
        )

    def run(self, known: Sequence[Carrier] = ()) -> None:
        """Meet carriers, the known ones first, until none helps."""
        self._why = self._run(known)

    def thinned(self, tolerance: Fraction, max_trees: int | None, *, quickly: bool = False) -> Packing:
        """As few of the carriers as carry the rate, with exact weights."""
        quickly = quickly or self.deadline.has_passed
        search_limit = _SEARCH_LIMIT if len(self.carriers) <= _SEARCHED_UP_TO else 0 if quickly else 1
        choice = self._choice()
        carriers, settings = fewest_among(
            choice,
            self.support(),
            tolerance=tolerance,
            max_trees=max_trees,
            seed=self.pricing.seed,
            deadline=self.deadline,
            search_limit=search_limit,
        )
        shown = self._shown(_rate(carriers) / self.limit, choice.rate)
        facts: Settings = (("max_height", self.pricing.height), ("within_height", shown))
        return Packing(carriers, (*facts, *settings))

    def _shown(self, rate: Fraction, before: Fraction) -> str:
        """What is proved of a rate, of few of the carriers, and of the one of all of them."""
        if rate == 1:
            return "the limit of any height"
        if rate == self._least:
            return "best"
        close = self._least * (1 - Fraction(CLOSE))
        if rate >= close:
            return "best, to 1e-9"
        return f"found: {'few of the best trees' if before >= close else self._why}"

    def _run(self, known: Sequence[Carrier]) -> str:
        group_of = {root: group for group, root in enumerate(self.pricing.roots or ())}
        for carrier in known:
            self._add(group_of.get(carrier.root, 0), carrier)
        self._spread()
        for _ in range(_ROUNDS):
            weighed = self._weighed = self._program.solve()
            if weighed.rate >= 1 - CLOSE:
                return "the exact rate is a little less than the limit of any height"
            if self.deadline.has_passed:
                return "out of time"
            exactly = self.pricing.is_exact
            # Never nothing: among ways that cost as little the shortest is meant.
            lengths = whole_prices(weighed.prices, _FINEST) + 1
            new = self._price(lengths, exactly=exactly)
            if not new and not exactly and self._may_ask():
                exactly = True
                new = self._price(lengths, exactly=True)
            if not new or (exactly and weighed.rate >= float(self._least) * (1 - CLOSE)):
                if exactly and (self.pricing.is_exact or self._may_ask()) and self._price_vertex():
                    continue
                return "no better tree was met"
        return "the search was cut short"

    def _spread(self) -> None:
        """Meet carriers at prices that grow with what those before have used: narrow links cost more."""
        capacities = self._program.rows.capacities
        first = [max(1, math.floor(_FINEST * min(capacities) / capacity)) for capacity in capacities]
        lengths = np.array(first, dtype=np.int64) // _SPREAD
        load = np.zeros(len(first), dtype=np.int64)
        for turn in range(_SPREAD):
            if turn and self.deadline.has_passed:
                return
            cheapest: dict[int, tuple[int, Carrier]] = {}
            for group, cost, carrier in self.pricing.carriers(np.maximum(lengths * (1 + load), 1)):
                self._add(group, carrier)
                if group not in cheapest or cost < cheapest[group][0]:
                    cheapest[group] = cost, carrier
            for _, carrier in cheapest.values():
                load += carrier.uses
            load = np.minimum(load, _SPREAD)

    def _price_vertex(self) -> bool:
        """Ask for the cheapest carriers under the exact prices; whether one is new."""
        vertex = self._program.vertex()
        if vertex is None or max(vertex.prices) > _FINEST:
            return False
        return self._price(np.array(vertex.prices, dtype=np.int64), exactly=True)

    def _choice(self) -> Choice[Carrier]:
        """All carriers met."""
        members = [
            [entry for entry in self.carriers if entry[0].group == g] for g in range(self.pricing.groups)
        ]
        groups = tuple(tuple(carrier for _, carrier in of_group) for of_group in members)
        uses = tuple(use for of_group in members for use, _ in of_group)
        return Choice(self.pricing.topology, groups, self._target, uses)

    def support(self) -> list[Carrier]:
        """The carriers that carry something in the last answer."""
        weights = [] if self._weighed is None else self._weighed.weights.tolist()
        # Those that were met after the last answer carry nothing in it.
        return [
            carrier for (_, carrier), weight in zip(self.carriers, weights, strict=False) if weight > _USED
        ]

    def _may_ask(self) -> bool:
        return self.pricing.can_be_exact and self.pricing.effort + self.pricing.effort_of_one <= self.effort

    def _price(self, lengths: Ints, *, exactly: bool) -> bool:
        """Meet cheap carriers, and if exactly note the limit they prove; whether one is new."""
        cheapest: list[int | None] = [None] * self.pricing.groups
        new = False
        for group, cost, carrier in self.pricing.carriers(lengths, exactly=exactly):
            before = cheapest[group]
            cheapest[group] = cost if before is None else min(cost, before)
            new |= self._add(group, carrier)
        if exactly:
            limit = self._program.rows.limit(lengths.tolist(), cheapest)
            self._least = self._least if limit is None else min(self._least, limit)
        return new

    def _add(self, group: int, carrier: Carrier) -> bool:
        key = carrier.key
        if key in self.met:
            return False
        self.met.add(key)
        use = Use.of(group, carrier)
        self.carriers.append((use, carrier))
        self._program.add(use)
        return True

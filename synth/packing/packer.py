"""The state of one exact packing and the search for its next trees: whole units on links and ranks.

`synth.packing.exact` is the entry and says how it works; `synth.packing.warm_start` takes out what is
known before the search begins.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import reduce
from random import Random

import numpy as np

from arborcast.synth.deadline import Deadline
from arborcast.synth.kernels.arborescence import FORBIDDEN, LogicalGraph
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.kernels.max_flow import checked_int64
from arborcast.synth.packing.capacity_repair import fitting_tree
from arborcast.synth.packing.tight_cuts import TightCuts
from arborcast.synth.packing.weighted_tree import Packing, WeightedTree, merge
from arborcast.synth.progress import report
from arborcast.synth.schedule import Settings
from arborcast.synth.topology import gcd_of_fractions

log = logging.getLogger(__name__)

SCARCEST = 1 << 10
"""Price of the link with the least left, where the others cost in proportion; a pooled cut costs more than
any tree pays in such prices."""
SMALL = 64
"""Up to this many ranks all cuts are checked again after each tree: that is cheap, and gives fewer trees."""
LARGEST_BATCH = 32
"""Trees that are tested against the cuts together: that is most of the work on large graphs."""
PATIENCE = 12
"""Tries in a row that overuse a link before the unit is halved."""
LARGEST_PRESSURE = 12
"""Doublings of an overused link's price; more would leave no difference between the others."""
LINKS_PER_EDGE = 8
"""More links than the edges of a cheap tree pass on average; sizes the guard against overflow."""
LARGEST_IDLENESS = 10_000
"""Tries without a tree that only a bug explains: each pools a cut or makes a link dearer."""


class Packer:
    """One run: whole units on links (`remaining`) and ranks (`demand`), until no demand is left."""

    def __init__(
        self,
        graph: LogicalGraph,
        demands: Mapping[int, Fraction],
        *,
        seed: int,
        hop_weight: float,
        deadline: Deadline,
    ) -> None:
        topology = graph.topology
        amounts = [Fraction(demands.get(rank, 0)) for rank in range(topology.ranks)]
        rates = [link.bandwidth for link in topology.links]
        self.unit = reduce(gcd_of_fractions, rates + amounts, Fraction(0)) or Fraction(1)
        whole = checked_int64([int(value / self.unit) for value in rates + amounts])
        self.remaining, self.demand = whole[: len(rates)], whole[len(rates) :]
        self.graph = graph
        self.cuts = TightCuts(graph)
        self.cuts.check(self.remaining, self.demand, self.unit)
        self.seed, self.hop_weight, self.deadline = seed, hop_weight, deadline
        self.random = Random(seed)
        self.hop_price = round(hop_weight * SCARCEST)
        self.cut_price = (SCARCEST * (topology.size + 1) + self.hop_price * topology.ranks) * topology.ranks
        self.pressure = np.zeros(len(rates), dtype=np.int64)  # doublings of the price of overused links
        self.waiting = [rank for rank in range(topology.ranks) if self.demand[rank] > 0]
        self.total = int(self.demand.sum())
        self.taken: list[WeightedTree] = []  # in units
        self.first_parts: list[Fraction] = []  # the part carried by whole proposals, then by all
        self.overuses = self.idle = 0  # tries in a row that failed for overused links, and for any reason

    def take(self, tree: WeightedTree, times: int) -> None:
        """Take a tree out for good."""
        self.remaining -= times * tree.uses
        self.demand[tree.root] -= times
        self.waiting.remove(tree.root)
        if self.demand[tree.root]:
            self.waiting.append(tree.root)
        self.taken.append(replace(tree, weight=Fraction(times)))

    def run(self) -> Packing:
        """Take trees out until every demand is met."""
        batch = 1
        while self.waiting:
            proposed = self._propose(batch)
            kept = self._commit(proposed)
            enough = batch // 2 + 1 if self.graph.topology.ranks > SMALL else batch
            batch = min(2 * batch, LARGEST_BATCH) if kept >= enough else max(1, kept)
            self.idle = 0 if kept else self.idle + 1
            report("packing trees", self.total - int(self.demand.sum()), self.total)
            if self.idle > LARGEST_IDLENESS:
                raise RuntimeError(f"packing of {self.graph.topology.name}: no tree in {self.idle} tries")
        return self._packing()

    def _propose(self, batch: int) -> list[WeightedTree]:
        """Up to `batch` trees for the roots in turn, as if no other cut than the pooled ones would bind."""
        remaining, demand, waiting = self.remaining.copy(), self.demand.copy(), list(self.waiting)
        proposed: list[WeightedTree] = []
        while waiting and len(proposed) < batch:
            self.deadline.check(f"the search for exact trees, after {len(self.taken)} of them,")
            root = waiting.pop(0)
            distances = self.graph.distances(self.lengths(remaining))
            parent_cost = self.hop_price * self.graph.hops(root, remaining > 0)
            routes, overused = fitting_tree(distances, parent_cost, root, remaining, self.random)
            if routes is None:
                if not proposed:
                    self._relent(overused)
                break
            tree = as_often_as_fits(WeightedTree(root, Fraction(int(demand[root])), routes), remaining)
            remaining -= int(tree.weight) * tree.uses
            demand[root] -= int(tree.weight)
            if demand[root]:
                waiting.append(root)
            proposed.append(tree)
        return proposed

    def _commit(self, proposed: list[WeightedTree]) -> int:
        """Take out as many of the trees as every cut allows; how many that are."""
        if not proposed:
            return 0
        if self.graph.topology.ranks > SMALL:
            # A pass over all sinks costs more than trees that do not know the cuts their batch breaks.
            allowed = self.cuts.allow(self.remaining, self.demand, proposed)
        else:
            allowed = self.cuts.trim(self.remaining, self.demand, proposed)
        for tree, count in zip(proposed, allowed, strict=False):
            if count:
                self.take(tree, count)
        if any(allowed):
            self.pressure //= 2
            self.overuses = 0
        return sum(count > 0 for count in allowed)

    def lengths(self, remaining: Ints) -> Ints:
        """What the links cost the next tree: the pooled cuts they leave, then how little they have left."""
        usable = remaining > 0
        shift = max(0, int(remaining.max()).bit_length() - 20)
        left = np.maximum(remaining >> shift, 1)
        scarcity = np.where(usable, (1 << (20 + self.pressure)) // left, 0)
        price = 1 + scarcity * SCARCEST // max(1, int(scarcity.max()))
        dearest = int(self.cuts.crossings.max()) * self.cut_price + SCARCEST
        if dearest * self.graph.topology.size * LINKS_PER_EDGE >= FORBIDDEN:
            raise OverflowError(f"exact trees on {self.graph.topology.name}: prices exceed int64")
        return np.where(usable, self.cuts.crossings * self.cut_price + price, FORBIDDEN)

    def _relent(self, overused: Ints) -> None:
        """No tree fits as the links are priced: make the overused ones dearer, at last halve the unit."""
        # While the invariant holds, the links that are left connect every root that still has demand.
        assert overused.size, "the cuts allow a tree but the links do not connect the ranks"
        self.overuses += 1
        self.pressure[overused] = np.minimum(self.pressure[overused] + 1, LARGEST_PRESSURE)
        if self.overuses > PATIENCE:
            log.info("packing of %s: halving the unit %s", self.graph.topology.name, self.unit)
            checked_int64([*self.remaining.tolist(), *self.demand.tolist()], factor=2)
            self.remaining *= 2
            self.demand *= 2
            self.total *= 2
            self.unit /= 2
            self.taken = [replace(tree, weight=2 * tree.weight) for tree in self.taken]
            self.pressure[:] = 0
            self.overuses = 0

    def _packing(self) -> Packing:
        """The trees in the order of their roots; those that came up twice are one."""
        trees = merge([replace(tree, weight=tree.weight * self.unit) for tree in self.taken])
        warm: Settings = ()
        if self.first_parts:
            kept, both = map(float, self.first_parts)
            warm = (("repaired", f"{kept:.1%} on old trees, {both - kept:.1%} on patched ones"),)
        return Packing(
            tuple(sorted(trees, key=lambda tree: tree.root)),
            (
                ("tie_seed", self.seed),
                ("hop_weight", str(self.hop_weight)),
                ("unit", str(self.unit)),
                ("tight_cuts", self.cuts.size),
                *warm,
            ),
        )


def as_often_as_fits(tree: WeightedTree, remaining: Ints) -> WeightedTree:
    """The tree with a smaller whole weight where links have less left than it would use."""
    used = tree.uses > 0
    most = int((remaining[used] // tree.uses[used]).min())
    return tree if tree.weight <= most else replace(tree, weight=Fraction(most))

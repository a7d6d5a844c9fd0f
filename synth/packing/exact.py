"""Spanning trees that meet every demand exactly: taken out one at a time, guided by a pool of tight cuts.

Works on the graph with its switches in place. While every cut keeps enough bandwidth for the demands that
stay, another tree exists (Edmonds 1973; Bang-Jensen, Frank and Jackson 1995; switches as in ForestColl,
arXiv 2402.06787): the cheapest arborescence under lengths that count the pooled tight cuts finds it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from random import Random

import numpy as np

from synth.arborescence import FORBIDDEN, LogicalGraph, Routes
from synth.compiled import Ints
from synth.deadline import Deadline
from synth.errors import CollectiveError, InputError, TimedOutError, TopologyError
from synth.flow import checked_int64
from synth.packing.overuse import fitting_tree
from synth.packing.routed import RoutedTree, levels, reverse_links
from synth.packing.tight_cuts import TightCuts
from synth.packing.warm_start import Stump, cheapest_root, grown, largest_part, shares_of, started_at
from synth.progress import report
from synth.schedule import Settings
from synth.topology import Topology, gcd_of_fractions
from synth.tree import Packing, Tree

log = logging.getLogger(__name__)


SCARCEST = 1 << 10
"""Price of the link with the least left, where the others cost in proportion; a pooled cut costs more than
any tree pays in such prices."""
SMALL = 64
"""Up to this many ranks several settings are tried, because it is cheap."""
LARGEST_BATCH = 32
"""Trees that are tested against the cuts together: that is most of the work on large graphs."""
PATIENCE = 12
"""Tries in a row that overuse a link before the unit is halved."""
LARGEST_PRESSURE = 12
"""Doublings of an overused link's price; more would leave no difference between the others."""
LINKS_PER_EDGE = 8
"""More links than the edges of a cheap tree pass on average; sizes the guard against overflow."""
GROWING_BATCH = 32
"""Stumps that are grown before the cuts are asked."""
ROUNDS = 3
"""Times that a proposal of any root is tried, each time with what the cuts have said before."""
LARGEST_IDLENESS = 10_000
"""Tries without a tree that only a bug explains: each pools a cut or makes a link dearer."""


@dataclass(frozen=True, eq=False)
class RoutedPacking:
    """A packing whose trees are arrays; see `synth.tree.Packing`."""

    trees: tuple[RoutedTree, ...]
    settings: Settings = ()

    @property
    def packing(self) -> Packing:
        """The same as values."""
        return Packing(tuple(tree.tree for tree in self.trees), self.settings)


@dataclass(frozen=True, slots=True)
class _Taken:
    """A tree and how many units of weight it carries."""

    root: int
    times: int
    routes: Routes
    uses: Ints


def pack_exactly(
    topology: Topology,
    demands: Mapping[int, Fraction],
    *,
    seed: int = 0,
    hop_weight: float = 0.1,
    attempts: int | None = None,
    deadline_s: float | None = None,
    proposals: Sequence[Tree] = (),
) -> Packing:
    """Out-trees that span all ranks, each root's weighing together exactly its demand.

    Args:
        topology: every rank takes part; bandwidth into each switch must equal bandwidth out of it.
        demands: GB/s that each root sends to all others; roots left out or at 0 get no tree.
        seed: settles which edges keep a link that too many of a tree's edges want.
        hop_weight: what one more hop from the root costs a tree, in prices of the scarcest link: more
            gives shallower and often more trees.
        attempts: how many settings to try, the given one first, then other hop weights and seeds; the
            packing whose weights have the largest common unit wins, then the one with the fewest trees
            and levels together. Default: 4 up to 64 ranks, 1 above.
        deadline_s: seconds from now; settings that have been tried by then count.
        proposals: trees of this topology to take first, each root's in proportion to their weights, as far
            as every cut allows. With any, one setting is tried unless `attempts` says more.

    Returns:
        The packing; its `settings` name the seed of the ties and the hop weight that won, the `unit` in
        GB/s of which all weights are multiples, and how many cuts guided it.

    Raises:
        OverloadedCutError: the demands are more than some cut carries; names the cut.
        TopologyError: a switch sends more than it receives or less, or the numbers do not fit int64.
        CollectiveError: a demand is negative or for a rank that there is not.
        InputError: `hop_weight` is not in 0..16, `attempts` is less than 1, or a proposal is no spanning tree
            of the topology.
        TimedOutError: the deadline passed before the first setting was done.
    """
    if topology.ranks == 1:
        _check(topology, demands)
        return _single_rank(demands)
    graph = LogicalGraph(topology)
    return pack_routed(
        graph,
        demands,
        seed=seed,
        hop_weight=hop_weight,
        attempts=attempts,
        deadline_s=deadline_s,
        stumps=[_stump(graph, tree) for tree in proposals],
    ).packing


def pack_routed(
    graph: LogicalGraph,
    demands: Mapping[int, Fraction],
    *,
    seed: int = 0,
    hop_weight: float = 0.1,
    attempts: int | None = None,
    deadline_s: float | None = None,
    stumps: Sequence[Stump] = (),
) -> RoutedPacking:
    """`pack_exactly` for a thousand trees: they stay arrays, and proposals may lack edges.

    Args:
        graph: of a topology with at least two ranks.
        demands: as there, like all up to `deadline_s`.
        seed: settles ties.
        hop_weight: what one more hop costs.
        attempts: how many settings to try.
        deadline_s: seconds from now.
        stumps: trees and parts of trees over this very graph, to take first.

    Raises:
        OverloadedCutError: and all others as `pack_exactly` does.
    """
    topology = graph.topology
    _check(topology, demands)
    if not 0 <= hop_weight <= 16:
        raise InputError(f"hop weight: must be in 0..16, got {hop_weight}")
    if attempts is not None and attempts < 1:
        raise InputError(f"attempts: must be at least 1, got {attempts}")
    deadline = Deadline.after(deadline_s)
    if attempts is None:
        attempts = 4 if topology.ranks <= SMALL and not stumps else 1
    found: list[RoutedPacking] = []
    for number, weight in _settings(seed, hop_weight, attempts):
        try:
            packer = _Packer(graph, demands, seed=number, hop_weight=weight, deadline=deadline)
            packer.take_first(stumps)
            found.append(packer.run())
        except TimedOutError:
            if not found:
                raise
            log.warning(
                "exact trees on %s: deadline after %d of %d settings", topology.name, len(found), attempts
            )
            break
    return min(found, key=_cost)


def _settings(seed: int, hop_weight: float, attempts: int) -> Iterator[tuple[int, float]]:
    """The given setting, then other hop weights, then other seeds."""
    weights = dict.fromkeys((hop_weight, 0.0, 0.3, 1.0))
    for attempt in range(attempts):
        yield seed + attempt // len(weights), list(weights)[attempt % len(weights)]


def _cost(packing: RoutedPacking) -> tuple[Fraction, int]:
    """What makes a packing worse: a finer common unit of the weights first, then trees and levels."""
    unit = reduce(gcd_of_fractions, (tree.weight for tree in packing.trees), Fraction(0))
    heights = (int(levels(tree.routes.parents)[0].max()) for tree in packing.trees)
    return -unit, len(packing.trees) + max(heights, default=0)


def _stump(graph: LogicalGraph, tree: Tree) -> Stump:
    """A proposal as arrays."""
    name, ranks = graph.topology.name, graph.topology.ranks
    if not 0 <= tree.root < ranks or len(tree.edges) != ranks - 1 or len(tree.depth) != ranks:
        raise InputError(f"proposed tree of root {tree.root}: must span the {ranks} ranks of {name}")
    if tree.weight <= 0:
        raise InputError(f"proposed tree of root {tree.root}: weight must be positive, got {tree.weight}")
    try:
        return Stump.of(graph, tree)
    except KeyError as missing:
        raise InputError(f"proposed tree of root {tree.root}: {name} has no link {missing}") from missing


def _check(topology: Topology, demands: Mapping[int, Fraction]) -> None:
    for root, demand in demands.items():
        if not 0 <= root < topology.ranks:
            raise CollectiveError(f"demand of rank {root}: rank must be in 0..{topology.ranks - 1}")
        if demand < 0:
            raise CollectiveError(f"demand of rank {root}: must not be negative, got {demand} GB/s")
    for switch in topology.unbalanced(range(topology.ranks, topology.size)):
        into = sum((link.bandwidth for link in topology.links if link.dst == switch), Fraction(0))
        out = sum((link.bandwidth for link in topology.links if link.src == switch), Fraction(0))
        raise TopologyError(
            f"switch {topology.label(switch)}: for exact trees the bandwidth in must equal the bandwidth "
            f"out, got {into} and {out} GB/s"
        )


def _single_rank(demands: Mapping[int, Fraction]) -> Packing:
    return Packing(tuple(Tree(root, Fraction(demand), ()) for root, demand in demands.items() if demand))


class _Packer:
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
        self.taken: list[_Taken] = []
        self.first_units: list[Fraction] = []  # the part carried by whole proposals, then by all
        self.overuses = self.idle = 0  # tries in a row that failed for overused links, and for any reason

    def take_first(self, stumps: Sequence[Stump]) -> None:
        """Take out what is known: whole trees first, then those that must be grown."""
        if not stumps:
            return
        self.reverse = reverse_links(self.graph)
        waiting = [
            (largest_part(stump) if stump.free and not stump.is_whole else stump, units)
            for stump, units in zip(stumps, shares_of(stumps, self.demand), strict=True)
            if units
        ]
        whole = [entry for entry in waiting if entry[0].is_whole]
        broken = [entry for entry in waiting if not entry[0].is_whole]
        for entries, size in ((whole, max(1, len(whole))), (broken, GROWING_BATCH)):
            group = entries
            # What a cut has limited is free to start elsewhere, once the cut is known.
            for _ in range(ROUNDS if any(stump.free for stump, _ in group) else 1):
                left = []
                for first in range(0, len(group), size):
                    left += self._take_batch(group[first : first + size])
                if len(left) == len(group):
                    break
                group = left
            self.first_units.append(Fraction(self.total - int(self.demand.sum()), self.total))

    def _take_batch(self, entries: Sequence[tuple[Stump, int]]) -> list[tuple[Stump, int]]:
        """Take out as much of the stumps as fits; returns what of them is left to do."""
        remaining, demand = self.remaining.copy(), self.demand.copy()
        proposed: list[_Taken] = []
        source: list[int] = []
        left = [units for _, units in entries]
        for place, (stump, _) in enumerate(entries):
            if self.deadline.has_passed:
                break
            while left[place]:
                found = self._placed(stump, left[place], remaining, demand)
                if found is None:
                    break
                remaining -= found.times * found.uses
                demand[found.root] -= found.times
                left[place] -= found.times
                proposed.append(found)
                source.append(place)
        if proposed:
            allowed = self.cuts.allow(
                self.remaining,
                self.demand,
                np.array([tree.uses for tree in proposed]),
                np.array([tree.root for tree in proposed], dtype=np.int64),
                np.array([tree.times for tree in proposed], dtype=np.int64),
            )
            for tree, times, place in zip(proposed, allowed.tolist(), source, strict=True):
                left[place] += tree.times - times
                if times:
                    self._take(tree, times)
        return [(stump, units) for (stump, _), units in zip(entries, left, strict=True) if units]

    def _placed(self, stump: Stump, units: int, remaining: Ints, demand: Ints) -> _Taken | None:
        """The stump as a tree that fits what is left, as often as it does; None where it does not."""
        lengths = self._lengths(remaining)
        if stump.free:
            root = cheapest_root(stump, lengths, self.reverse, demand > 0)
            if root < 0:
                return None
            stump = started_at(stump, root, self.reverse)
            if (stump.routes.links < 0).any():
                return None  # a way that only leads in one direction
        routes = stump.routes
        if not stump.is_whole:
            parent_cost = self.hop_price * self.graph.hops(remaining > 0, stump.root)
            whole = grown(stump, lengths, parent_cost)
            if whole is None:
                return None
            routes = whole
        uses = routes.uses()
        used = uses > 0
        times = min(units, int(demand[stump.root]), int((remaining[used] // uses[used]).min()))
        return _Taken(stump.root, times, routes, uses) if times > 0 else None

    def _take(self, tree: _Taken, times: int) -> None:
        """Take a tree out for good."""
        self.remaining -= times * tree.uses
        self.demand[tree.root] -= times
        self.waiting.remove(tree.root)
        if self.demand[tree.root]:
            self.waiting.append(tree.root)
        self.taken.append(replace(tree, times=times))

    def run(self) -> RoutedPacking:
        """Take trees out until every demand is met."""
        batch = 1
        while self.waiting:
            proposed = self._propose(batch)
            kept = self._commit(proposed)
            batch = min(2 * batch, LARGEST_BATCH) if kept == batch else max(1, kept)
            self.idle = 0 if kept else self.idle + 1
            report("packing trees", self.total - int(self.demand.sum()), self.total)
            if self.idle > LARGEST_IDLENESS:
                raise RuntimeError(f"packing of {self.graph.topology.name}: no tree in {self.idle} tries")
        return self._packing()

    def _propose(self, batch: int) -> list[_Taken]:
        """Up to `batch` trees for the roots in turn, as if no other cut than the pooled ones would bind."""
        remaining, demand, waiting = self.remaining.copy(), self.demand.copy(), list(self.waiting)
        proposed: list[_Taken] = []
        while waiting and len(proposed) < batch:
            if self.deadline.has_passed:
                raise TimedOutError(
                    f"exact trees on {self.graph.topology.name}: out of time after {len(self.taken)} trees"
                )
            root = waiting.pop(0)
            distances = self.graph.distances(self._lengths(remaining))
            parent_cost = self.hop_price * self.graph.hops(remaining > 0, root)
            routes, overused = fitting_tree(distances, parent_cost, root, remaining, self.random)
            if routes is None:
                if not proposed:
                    self._relent(overused)
                break
            uses = routes.uses()
            times = min(int(demand[root]), int((remaining[uses > 0] // uses[uses > 0]).min()))
            remaining -= times * uses
            demand[root] -= times
            if demand[root]:
                waiting.append(root)
            proposed.append(_Taken(root, times, routes, uses))
        return proposed

    def _commit(self, proposed: list[_Taken]) -> int:
        """Take out as many of the trees as every cut allows; how many that are."""
        if not proposed:
            return 0
        allowed = self.cuts.trim(
            self.remaining,
            self.demand,
            [tree.uses for tree in proposed],
            [tree.root for tree in proposed],
            [tree.times for tree in proposed],
        )
        for tree, times in zip(proposed, allowed, strict=False):
            self._take(tree, times)
        if allowed:
            self.pressure //= 2
            self.overuses = 0
        return len(allowed)

    def _lengths(self, remaining: Ints) -> Ints:
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
            self.taken = [replace(tree, times=2 * tree.times) for tree in self.taken]
            self.pressure[:] = 0
            self.overuses = 0

    def _packing(self) -> RoutedPacking:
        """The trees in the order of their roots; those that came up twice are one."""
        merged: dict[tuple[bytes, bytes], _Taken] = {}
        for tree in self.taken:
            key = (tree.routes.parents.tobytes(), tree.routes.links.tobytes())
            twin = merged.get(key)
            merged[key] = tree if twin is None else replace(twin, times=twin.times + tree.times)
        trees = tuple(
            RoutedTree(tree.root, tree.times * self.unit, tree.routes)
            for tree in sorted(merged.values(), key=lambda tree: tree.root)
        )
        warm: Settings = ()
        if self.first_units:
            kept, both = map(float, self.first_units)
            warm = (("repaired", f"{kept:.1%} on old trees, {both - kept:.1%} on patched ones"),)
        return RoutedPacking(
            trees,
            (
                ("tie_seed", self.seed),
                ("hop_weight", str(self.hop_weight)),
                ("unit", str(self.unit)),
                ("tight_cuts", self.cuts.size),
                *warm,
            ),
        )

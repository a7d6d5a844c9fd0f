"""Plans of an alltoall of blocks of any sizes: the least time, who proves it, and parts of blocks on ways.

What the fabric alone decides is made once. A plan then takes, in this order: the tightest cut; the parts of
the blocks, moved until no link is in use for longer than that cut; and where that cannot be, the linear
program, whose lengths prove the time and whose flows attain it. On a fabric that is too large for the program
flows are spread over the links instead, and the plan says what is missing to the limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NoReturn

import numpy as np

from arborcast.synth.alltoallv.block_cuts import Cuts
from arborcast.synth.alltoallv.block_plan import ExchangePlan
from arborcast.synth.alltoallv.rerouting import LinkArrays, Parts, peel, reroute, spread
from arborcast.synth.bounds.commodity_flows import CommodityFlows
from arborcast.synth.bounds.shortest_paths import ShortestPaths
from arborcast.synth.certificate import Bound, Cut, Dual
from arborcast.synth.collective import Collective, Kind, square_of_bytes
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.features import check_features
from arborcast.synth.kernels.compiled import Flags, Ints
from arborcast.synth.topology import Topology, Vertex

LARGEST_PROGRAM = 4096
"""Flow columns (ranks times links) up to which the linear program is asked: milliseconds when it is warm."""

PASSES = 24
"""Over the links that have too much, before a time is given up."""

FINEST = 60
"""Units of a byte beyond those of the limit, so that flows with small denominators stay whole."""

SEARCHES = 6000
"""For ways with room, before a time is given up; a quarter of it where there are few ways."""

_MANY = 16  # links of a rank

ROUNDS = 24
"""In which every source moves a part of its flow, where there is no program."""

MOST_HOPS = 16
"""Links of a way, in the mean over all parts: more have no room."""

_MOST = 1 << 60
_COARSE = 1 << 20  # units of the longest link's length: what ways are compared by


@dataclass(frozen=True, eq=False)
class _FixedPaths:
    """One way from every rank to every other that it can reach: `links[first[block]:first[block + 1]]`."""

    first: Ints
    links: Ints

    @classmethod
    def of(cls, graph: ShortestPaths, lengths: Ints, shuffles: bool) -> _FixedPaths:
        """Shortest ones; of equal ones, with `shuffles`, others from each source."""
        links: list[int] = []
        first = [0]
        tails = graph.tails.tolist()
        for source in range(graph.ranks):
            shifted = 64 * graph.size * lengths + (_shuffled(len(lengths), source) if shuffles else 0)
            before = graph.tree(shifted, source).entering.tolist()
            for target in range(graph.ranks):
                way, here = [], target
                while here != source and before[here] >= 0:
                    way.append(before[here])
                    here = tails[before[here]]
                links += reversed(way)
                first.append(len(links))
        return cls(np.array(first, dtype=np.int64), np.array(links, dtype=np.int64))

    def exist(self, ranks: int) -> Flags:
        """From which rank (row) to which (column) there is a way."""
        return (np.diff(self.first) > 0).reshape(ranks, ranks)

    def parts(self, amounts: Ints) -> Parts:
        """Whole blocks on these ways."""
        flat = amounts.reshape(-1)
        lengths = np.diff(self.first)
        block = np.flatnonzero(flat)
        return Parts(
            np.append(0, np.cumsum(lengths[block])),
            self.links[np.repeat(flat > 0, lengths)],
            block,
            flat[block],
        )


@dataclass(frozen=True, eq=False)
class _Distances:
    """What links offer and how far ranks are apart under some lengths, in units of which `scale` are 1."""

    scale: int
    offered: int
    far: Ints


class AlltoallvPlanner:
    """Makes plans on one fabric.

    Args:
        topology: whose switches only forward here.
        ranks: who takes part; all, where None. The others forward.
        largest_program: flow columns up to which the linear program is asked.

    Raises:
        CollectiveError: ranks that do not fit.
        InfeasibleError: there are no links.

    Examples:
        >>> planner = synth.AlltoallvPlanner(topologies.load("full:3"))
        >>> planner.plan([[0, 20, 10], [10, 0, 20], [20, 10, 0]]).gap  # bytes from each rank to each
        Fraction(0, 1)
    """

    def __init__(
        self,
        topology: Topology,
        *,
        ranks: Sequence[int] | None = None,
        largest_program: int = LARGEST_PROGRAM,
    ) -> None:
        check_features(topology, "alltoallv")
        self.topology = topology.forwarding
        self._members = Collective.on(topology, Kind.ALLTOALL, ranks=ranks).ranks
        if not topology.links:
            nothing = Bound(Fraction(0), Cut(frozenset(self._members[:1]), Fraction(0)))
            raise InfeasibleError(f"alltoall on {topology.name}: there are no links", nothing)
        self._graph = ShortestPaths(self.topology)
        self._ways = LinkArrays(*self._graph.leaving, self._graph.tails, self._graph.heads)
        self._capacity = np.array(self.topology.capacities, dtype=np.int64)
        self._cuts = Cuts(self.topology)
        # A unit of length is the time on the fastest link; a step more counts a little.
        self._lengths = np.maximum(1, _COARSE // self._capacity) + _COARSE // (64 * int(self._capacity.max()))
        # Of several shortest ways all take those that come first, or each source its own.
        choices = (False, True) if topology.switches else (True,)
        self._starts = [_FixedPaths.of(self._graph, self._lengths, shuffles) for shuffles in choices]
        slowest = int(self._capacity.min())
        self._simple = tuple(Fraction(slowest, capacity) for capacity in self.topology.capacities)
        self._far = self._distances(self._simple)
        has_choice = topology.switches or len(topology.links) > _MANY * topology.ranks
        self._searches = SEARCHES if has_choice else SEARCHES // 4
        asks = len(self.topology.links) * self.topology.ranks <= largest_program
        self._program = None
        if asks:
            sources = [{rank} for rank in range(topology.ranks)]
            self._program = CommodityFlows(self._graph, self._capacity, sources)

    def plan(self, sizes: Sequence[Sequence[int]]) -> ExchangePlan:
        """The plan for bytes from each rank that takes part (row) to each (column).

        Raises:
            CollectiveError: sizes that do not fit, or send nothing.
            InfeasibleError: a rank cannot reach another one that it has something for.
        """
        collective = Collective.alltoallv(self.topology, sizes, ranks=self._members)
        amounts = self._amounts(collective.sizes)
        limit, cut = self._cuts.tightest(amounts)
        bound = Bound(self._rate(collective, limit), cut)
        proved, dual = self._proved(collective, self._simple, self._far, amounts)
        if proved > limit:
            limit, bound = proved, Bound(self._rate(collective, proved), dual)
        found = self._within(collective, bound, limit, amounts)
        if found.gap and self._program is not None:
            found = min(found, self._by_program(collective, found, amounts), key=lambda plan: plan.gap)
        return found if not found.gap or self._program is not None else self._closer(found, amounts)

    @property
    def choices(self) -> int:
        """Of shortest ways that are tried."""
        return len(self._starts)

    def way(self, source: int, target: int, choice: int = 0) -> tuple[Vertex, ...]:
        """The vertices of a shortest way between two ranks that reach each other."""
        ways, links = self._starts[choice], self.topology.links
        block = source * self.topology.ranks + target
        return (source, *(links[link].dst for link in ways.links[ways.first[block] : ways.first[block + 1]]))

    def outlook(self, sizes: Sequence[Sequence[int]]) -> tuple[Fraction, Fraction]:
        """Before any planning, in us: a time that no plan goes below, and that of shortest ways alone.

        Raises:
            CollectiveError: sizes that do not fit.
            InfeasibleError: as `plan`.
        """
        amounts = self._amounts(square_of_bytes(sizes, len(self._members)))
        parts = self._starts[0].parts(amounts)
        if not len(parts.amount):
            return Fraction(0), Fraction(0)
        load = parts.load(len(self._capacity)).tolist()
        widths = self.topology.capacities
        shortest = max(Fraction(passing, width) for passing, width in zip(load, widths, strict=True))
        unit = 1000 * self.topology.bandwidth_unit
        return self._cuts.tightest(amounts)[0] / unit, shortest / unit

    def _amounts(self, sizes: Sequence[Sequence[int]]) -> Ints:
        """Bytes between all ranks of the topology, none from a rank to itself."""
        ranks = self.topology.ranks
        amounts = np.zeros((ranks, ranks), dtype=np.int64)
        amounts[np.ix_(self._members, self._members)] = sizes
        np.fill_diagonal(amounts, 0)
        if (stuck := np.argwhere((amounts > 0) & ~self._starts[0].exist(ranks))).size:
            self._refuse(*map(int, stuck[0]))
        return amounts

    def _refuse(self, source: int, target: int) -> NoReturn:
        side = frozenset(self._graph.tree(self._lengths, source).order.tolist())
        raise InfeasibleError(
            f"alltoall: rank {source} has something for rank {target} and no way there",
            Bound(Fraction(0), Cut(side, Fraction(0))),
        )

    def _rate(self, collective: Collective, limit: Fraction) -> Fraction:
        whole = Fraction(collective.total, len(collective.ranks))
        return whole * self.topology.bandwidth_unit / limit

    def _units(self, limit: Fraction, amounts: Ints) -> tuple[int, Ints]:
        """Units of a byte in which the limit is whole, and what each link may then carry."""
        total, widest = int(amounts.sum()), int(self._capacity.max())
        most = _MOST // max(total, 1 + int(limit * widest))
        units = min(limit.denominator, most)
        units *= max(1, min(FINEST, most // units))
        return units, self._capacity * int(-(-limit * units // 1))

    def _within(
        self, collective: Collective, bound: Bound, limit: Fraction, amounts: Ints, start: Parts | None = None
    ) -> ExchangePlan:
        """A plan whose links are in use for no longer than the limit, or not much longer.

        Without a start every block is on one shortest way.
        """
        units, room = self._units(limit, amounts)
        plans = []
        for ways in self._starts if start is None else (None,):
            parts = start if ways is None else ways.parts(amounts * units)
            assert parts is not None, "given, or on shortest ways"
            load = parts.load(len(room))
            if (load > room).any():
                parts = self._rerouted(parts, load, room)
            plans.append(ExchangePlan(self.topology, collective, bound, parts, units))
            if plans[-1].busiest <= limit:
                break
        return min(plans, key=lambda plan: plan.busiest)

    def _rerouted(self, parts: Parts, load: Ints, room: Ints) -> Parts:
        known = len(parts.amount)
        more = 4 * known + 64 * self.topology.ranks
        roomy = _with_room(parts, more, self.topology.size)
        ranks, searches = self.topology.ranks, self._searches
        count = reroute(self._ways, self._lengths, room, load, roomy, known, ranks, PASSES, searches)
        return _gathered(roomy, known, count)

    def _by_program(self, collective: Collective, found: ExchangePlan, amounts: Ints) -> ExchangePlan:
        assert self._program is not None, "the fabric is small enough"
        wanted = np.zeros((len(amounts), self.topology.size), dtype=np.int64)
        wanted[:, : len(amounts)] = amounts
        flows = self._program.solve(wanted)
        limit, dual = self._proved(collective, flows.lengths, self._distances(flows.lengths), amounts)
        units, _ = self._units(limit, amounts)
        parts = self._of_flows(np.round(flows.flow * units).astype(np.int64), amounts * units)
        return self._within(collective, Bound(self._rate(collective, limit), dual), limit, amounts, parts)

    def _distances(self, lengths: tuple[Fraction, ...]) -> _Distances:
        scale = math.lcm(*(length.denominator for length in lengths))
        whole = np.array([int(length * scale) for length in lengths], dtype=np.int64)
        offered = int((self._capacity.astype(object) * whole).sum())
        far = self._graph.distances(whole, np.arange(self.topology.ranks))
        return _Distances(scale, offered, far[:, : self.topology.ranks])

    def _proved(
        self, collective: Collective, lengths: tuple[Fraction, ...], distances: _Distances, amounts: Ints
    ) -> tuple[Fraction, Dual]:
        """What link lengths prove: no byte travels less than a shortest way."""
        travelled = int((distances.far.astype(object) * amounts).sum())
        dual = Dual(
            lengths,
            Fraction(distances.offered, distances.scale) * self.topology.bandwidth_unit,
            Fraction(travelled * len(collective.ranks), distances.scale * collective.total),
        )
        return Fraction(travelled, distances.offered), dual

    def _of_flows(self, flow: Ints, amounts: Ints) -> Parts:
        """Parts that carry the flow of each source; what rounding has lost goes shortest ways."""
        ranks = self.topology.ranks
        wanted, most = amounts.copy(), int((flow > 0).sum()) + ranks * ranks
        roomy = _with_room(None, most, self.topology.size)
        count = 0
        for source in range(ranks):
            count = peel(self._ways, flow[source], wanted[source], source, roomy, count, ranks)
        found = _gathered(roomy, count, count)
        return _joined(found, self._starts[0].parts(wanted)) if wanted.any() else found

    def _closer(self, found: ExchangePlan, amounts: Ints) -> ExchangePlan:
        """The better one of a plan and one that shares the links evenly, under the better of their limits."""
        flow = np.zeros((self.topology.ranks, len(self._capacity)))
        lengths = np.zeros(len(self._capacity))
        capacity = self._capacity.astype(np.float64)
        spread(self._ways, capacity, amounts.astype(np.float64), ROUNDS, flow, lengths)
        collective, bound = found.collective, found.bound
        parts = self._of_flows(np.round(flow * FINEST).astype(np.int64), amounts * FINEST)
        other = ExchangePlan(self.topology, collective, bound, parts, FINEST)
        best = min(found, other, key=lambda plan: plan.busiest)
        shares = (lengths / lengths.max()).tolist()
        rounded = tuple(Fraction(round(length * _COARSE), _COARSE) for length in shares)
        limit, dual = self._proved(collective, rounded, self._distances(rounded), amounts)
        proved = self._rate(collective, limit)
        return replace(best, bound=Bound(proved, dual)) if proved < bound.rate else best


def _shuffled(count: int, seed: int) -> Ints:
    """Numbers below 64 in no order, the same on every machine (Knuth's multiplicative hashing)."""
    keys = (np.arange(count, dtype=np.uint64) + np.uint64(seed * count + 1)) * np.uint64(2654435769)
    return ((keys & np.uint64(0xFFFFFFFF)) >> np.uint64(26)).astype(np.int64)


def _with_room(parts: Parts | None, more: int, hops: int) -> Parts:
    """Parts with room for so many more, of ways of at most so many links."""
    known, used = (0, 0) if parts is None else (len(parts.amount), len(parts.links))
    first = np.zeros(known + more + 1, dtype=np.int64)
    links = np.zeros(used + more * min(hops, MOST_HOPS), dtype=np.int64)
    block, amount = np.zeros((2, known + more), dtype=np.int64)
    if parts is not None:
        first[: known + 1], links[:used] = parts.first, parts.links
        block[:known], amount[:known] = parts.block, parts.amount
    return Parts(first, links, block, amount)


def _gathered(parts: Parts, known: int, count: int) -> Parts:
    """Those of so many parts that are not empty; those behind the `known` ones that are alike as one."""
    first, links, block, amount = parts
    merged: dict[tuple[int, bytes], int] = {}
    for part in range(known, count):
        key = int(block[part]), links[first[part] : first[part + 1]].tobytes()
        if (alike := merged.setdefault(key, part)) != part:
            amount[alike] += amount[part]
            amount[part] = 0
    kept = np.flatnonzero(amount[:count])
    lengths = np.diff(first[: count + 1])
    stays = np.repeat(amount[:count] > 0, lengths)
    return Parts(
        np.append(0, np.cumsum(lengths[kept])),
        links[: first[count]][stays],
        block[kept],
        amount[kept],
    )


def _joined(one: Parts, other: Parts) -> Parts:
    return Parts(
        np.concatenate([one.first, other.first[1:] + one.first[-1]]),
        np.concatenate([one.links, other.links]),
        np.concatenate([one.block, other.block]),
        np.concatenate([one.amount, other.amount]),
    )

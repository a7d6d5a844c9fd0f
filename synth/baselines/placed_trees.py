"""Trees placed in time: each link carries one chunk at a time, and every tree takes what the others left.

For messages of a middle size, where latencies and rates count alike, on fabrics that no pattern fits. The
trees of chunks are grown one after the other, each rank along the way by which it has its chunk first (of a
reduction: has to send it last) on the links that are still free, but rather a little later where that keeps
links busy for less. The halves of an allreduce meet at the root of a tree, in the middle of the time that the
trees before it take. Then each tree is taken out and grown again beside all others; the shortest of these
timetables serves. After the time-expanded greedy search of TACOS (Won et al., MICRO 2024), by whole trees in
place of links, with reductions placed backwards from where they end, and with a second chance for each tree.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from heapq import heappop, heappush

from arborcast.synth import bounds
from arborcast.synth.baselines.switch_paths import Path, switch_paths
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Hop, Topology

TICKS_PER_US = 10**6
PASSES = 1
"""How often each tree is taken out and grown again."""

DEAR = 3
"""How often the time for which a way keeps links busy a rank would rather wait."""

DESIGNS = ((16 << 10, 2), (64 << 10, 1), (256 << 10, 2), (1 << 20, 2))
"""Bytes of the buffer and trees of each rank for which schedules are made that are compared."""

MOST_WAYS = 300_000
"""Between ranks, counted for each tree: more take many seconds."""

KINDS = (Kind.BROADCAST, Kind.REDUCE, Kind.ALLREDUCE, Kind.ALLGATHER, Kind.REDUCE_SCATTER)


@dataclass(slots=True)
class _Timetable:
    """When a link is busy: intervals that do not overlap, ascending."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def after(self, tick: int, duration: int) -> int:
        """The soonest start from a tick on."""
        place = bisect_right(self.starts, tick)
        if place and self.ends[place - 1] > tick:
            tick = self.ends[place - 1]
        while place < len(self.starts) and self.starts[place] - tick < duration:
            tick = self.ends[place]
            place += 1
        return tick

    def before(self, tick: int, duration: int) -> int:
        """The latest start that ends by a tick."""
        place = bisect_left(self.starts, tick)
        while place and self.ends[place - 1] > tick - duration:
            tick = min(tick, self.starts[place - 1])
            place -= 1
        return tick - duration

    def reserve(self, start: int, duration: int) -> None:
        place = bisect_left(self.starts, start)
        self.starts.insert(place, start)
        self.ends.insert(place, start + duration)

    def release(self, start: int) -> None:
        place = bisect_left(self.starts, start)
        del self.starts[place], self.ends[place]


@dataclass(frozen=True, slots=True)
class _Move:
    """A way from one rank to the next, and when it enters each of its links."""

    way: Path
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Tree:
    """Moves of a chunk to its root and from it, and the ticks from its first to its last."""

    inward: Sequence[_Move]
    outward: Sequence[_Move]
    first: int
    last: int


class _Net:
    """The links, with the timetable of each."""

    def __init__(self, topology: Topology, chunk_bytes: Fraction) -> None:
        self.ranks = topology.ranks
        self.tables: dict[Hop, _Timetable] = {}
        self.busy: dict[Hop, int] = {}
        self.latency: dict[Hop, int] = {}
        for link in topology.links:
            hop = link.src, link.dst
            self.tables[hop] = _Timetable()
            self.busy[hop] = -int(-chunk_bytes * TICKS_PER_US / 1000 // link.bandwidth)
            self.latency[hop] = -int(-link.latency_us * TICKS_PER_US // 1)
        self.price: dict[Path, int] = {}
        self.out: list[list[Path]] = [[] for _ in range(self.ranks)]
        self.into: list[list[Path]] = [[] for _ in range(self.ranks)]
        for (src, dst), ways in switch_paths(topology, range(self.ranks)).items():
            self.price |= {way: DEAR * sum(map(self.busy.__getitem__, way.hops)) for way in ways}
            self.out[src] += ways
            self.into[dst] += ways

    def ride(self, way: Path, tick: int, outward: bool) -> tuple[int, tuple[int, ...]]:
        """When what leaves at a tick arrives (or what arrives by a tick leaves), and each link's start."""
        starts = []
        for hop in way.hops if outward else reversed(way.hops):
            table, busy, latency = self.tables[hop], self.busy[hop], self.latency[hop]
            if outward:
                starts.append(table.after(tick, busy))
                tick = starts[-1] + busy + latency
            else:
                starts.append(table.before(tick - latency, busy))
                tick = starts[-1]
        return tick, tuple(starts if outward else reversed(starts))

    def grow(self, root: int, tick: int, outward: bool) -> tuple[list[_Move], int]:
        """Reserve the moves from a root at a tick to all ranks, or to it by then; with its furthest tick."""
        sign = 1 if outward else -1
        at: dict[int, int] = {root: tick}
        moves: list[_Move] = []
        queue: list[tuple[int, int, int, Path]] = []
        asked = 0

        def ask(way: Path, end: int) -> None:
            nonlocal asked
            reached, _ = self.ride(way, at[way.src if outward else way.dst], outward)
            asked += 1
            heappush(queue, (sign * reached + self.price[way], asked, end, way))

        def spread(rank: int) -> None:
            for way in self.out[rank] if outward else self.into[rank]:
                end = way.dst if outward else way.src
                if end not in at:
                    ask(way, end)

        spread(root)
        while len(at) < self.ranks:
            cost, _, rank, way = heappop(queue)
            if rank in at:
                continue
            reached, starts = self.ride(way, at[way.src if outward else way.dst], outward)
            if sign * reached + self.price[way] > cost:
                ask(way, rank)  # this tree has taken links since
                continue
            for hop, start in zip(way.hops, starts, strict=True):
                self.tables[hop].reserve(start, self.busy[hop])
            at[rank] = reached
            moves.append(_Move(way, starts))
            spread(rank)
        return moves, max(at.values()) if outward else min(at.values())

    def place(self, root: int, kind: Kind, others: Iterable[_Tree]) -> _Tree:
        """Reserve the tree of a root; the halves of an allreduce meet in the middle of what is there."""
        outward = kind is not Kind.REDUCE and kind is not Kind.REDUCE_SCATTER
        tick = sum(_span(others)) // 2 if kind is Kind.ALLREDUCE else 0
        before, begins = self.grow(root, tick, outward=False) if kind.reduces else ([], tick)
        after, ends = self.grow(root, tick, outward=True) if outward else ([], tick)
        return _Tree(before, after, begins, ends)

    def clear(self, tree: _Tree) -> None:
        """Take a tree out."""
        for move in (*tree.inward, *tree.outward):
            for hop, start in zip(move.way.hops, move.starts, strict=True):
                self.tables[hop].release(start)


def placed_schedules(topology: Topology, collective: Collective, deadline: Deadline) -> Iterator[Schedule]:
    """One for each of `DESIGNS`; none where there are too many ways, or not all ranks take part."""
    if collective.kind not in KINDS or len(collective.ranks) < topology.ranks:
        return
    limit = bounds.bound(topology, collective)
    ways = sum(map(len, switch_paths(topology, collective.ranks).values()))
    for size_bytes, trees in DESIGNS:
        if ways * trees * topology.ranks <= MOST_WAYS:
            yield placed(topology, collective, limit, size_bytes, trees, deadline)


def placed(
    topology: Topology,
    collective: Collective,
    bound: Bound,
    size_bytes: int,
    trees: int,
    deadline: Deadline,
) -> Schedule:
    """One such schedule.

    Args:
        topology: every two ranks reach each other; switches only forward.
        collective: one of `KINDS`, among all ranks.
        bound: of its rate.
        size_bytes: of the buffer that it is made for; it is correct for any.
        trees: chunks of each rank.
        deadline: of all.

    Raises:
        TimedOutError: the deadline passed.
    """
    here = [rank for _ in range(trees) for rank in collective.ranks]
    roots = here if collective.root is None else [collective.root] * len(here)
    share = Fraction(1, len(roots))
    net = _Net(topology, size_bytes * share)
    found: dict[int, _Tree] = {}
    best: tuple[int, list[_Tree]] | None = None
    for _ in range(PASSES + 1):
        for chunk, root in enumerate(roots):
            deadline.check("the placement of trees")
            if (old := found.pop(chunk, None)) is not None:
                net.clear(old)
            found[chunk] = net.place(root, collective.kind, found.values())
        first, last = _span(found.values())
        if best is None or last - first < best[0]:
            best = last - first, [found[chunk] for chunk in range(len(roots))]
    assert best is not None
    moves = [
        (move, chunk, adds)
        for chunk, tree in enumerate(best[1])
        for adds, half in ((True, tree.inward), (False, tree.outward))
        for move in half
    ]
    step = {tick: place for place, tick in enumerate(sorted({move.starts[0] for move, *_ in moves}))}
    transfers = [
        Transfer(chunk, move.way.src, move.way.dst, step[move.starts[0]], reduce=adds, via=move.way.via)
        for move, chunk, adds in moves
    ]
    method = Method("placed", settings=(("bytes", size_bytes), ("trees", trees)))
    chunks = [Chunk(share, root) for root in roots]
    return Schedule.build(topology, collective, method, bound, chunks, transfers)


def _span(trees: Iterable[_Tree]) -> tuple[int, int]:
    """The ticks at which the first of trees begins and the last of them ends."""
    spans = [(tree.first, tree.last) for tree in trees]
    return min((first for first, _ in spans), default=0), max((last for _, last in spans), default=0)

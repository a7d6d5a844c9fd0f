"""How long a program of puts and signals takes on a topology: its very operations, block by block.

A block does one operation after another. A put of its threads keeps it until the bytes have left. They pass
switches as they come, and each link carries one put after another, in the order in which their first bytes
come to it. What proxies are told they do in order, beside the block. A signal arrives no sooner than the puts
before it of its block or proxy; waits, semaphores and barriers wait. Nothing is cut finer than the program
cuts it, and adding and copying take ranks no time.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import TypeAlias

from arborcast.backends.programs.program import (
    Acquire,
    Barrier,
    Connection,
    Flush,
    GlobalProgram,
    Move,
    ProgramError,
    Release,
    Signal,
    Span,
    ThreadBlock,
    Wait,
)
from arborcast.backends.programs.traffic import Traffic, Way, routes, switch_ways, traffic
from arborcast.synth.certificate import Bound
from arborcast.synth.topology import Hop, Topology

Until: TypeAlias = int | tuple[Hashable, int]
"""What is waited for: a time in the ticks of a run, or that something has happened so many times."""

Task: TypeAlias = Generator[Until, None, None]

PACKETS = 2
"""Packets are as many times the bytes of their data: flags stand beside them."""


USUAL_BYTES = 64 << 20


def time_us(program: GlobalProgram, topology: Topology, size_bytes: int) -> Fraction:
    """When one call of a correct one-sided program has ended and its last bytes have arrived.

    Args:
        program: of puts and signals.
        topology: of as many ranks.
        size_bytes: of the whole buffer, as algbw counts it.

    Raises:
        ProgramError: a put has no way, or blocks wait for ever.
    """
    program = _in_pieces(program, size_bytes)
    byte_us = Fraction(size_bytes, 1000 * program.chunks)
    return _TimedRun(
        program, topology, {hop: byte_us / rate for hop, rate in topology.bandwidth.items()}
    ).run()


def timed_bytes(program: GlobalProgram) -> int:
    """The largest size that a program is for, or a usual one, at which its pieces are counted."""
    return program.most_bytes or USUAL_BYTES


def _in_pieces(program: GlobalProgram, size_bytes: int) -> GlobalProgram:
    """Its loops gone through as they are for a whole buffer of this size."""
    if not program.loops:
        return program
    chunk_bytes = Fraction(size_bytes, program.chunks)
    pieces = [loop.piece_bytes * chunk_bytes.denominator for loop in program.loops]
    part_bytes = Fraction(math.gcd(chunk_bytes.numerator, *pieces), chunk_bytes.denominator)
    return program.unrolled(int(chunk_bytes / part_bytes), part_bytes)


def rate_of(program: GlobalProgram, topology: Topology) -> Fraction:
    """Algbw in GB/s of large messages, of which latencies are no part; 0 where nothing moves.

    A program with loops is timed at `timed_bytes`.
    """
    program = _in_pieces(program, timed_bytes(program))
    paces = {hop: 1 / (program.chunks * rate) for hop, rate in topology.bandwidth.items()}
    took = _TimedRun(program, topology, paces, latencies=False).run()
    return 1 / took if took else Fraction(0)


def expected(
    program: GlobalProgram,
    messages: Mapping[tuple[int, int], Fraction],
    topology: Topology,
    bound: Bound | None = None,
) -> Traffic:
    """`traffic` with the rate that a program is to reach: of puts and signals, as they follow each other.

    Two-sided programs are cut into messages at run time, which hides their steps: the fullest link says it.
    """
    found = traffic(program, messages, topology, bound)
    return replace(found, rate=rate_of(program, topology)) if program.one_sided else found


class _TimedRun:
    def __init__(
        self,
        program: GlobalProgram,
        topology: Topology,
        paces: Mapping[Hop, Fraction],
        *,
        latencies: bool = True,
    ) -> None:
        self._program, self._topology = program, topology
        latency = topology.latency_us if latencies else dict.fromkeys(paces, Fraction(0))
        # Whole ticks: sums of fractions would take most of the time.
        self._ticks = math.lcm(*(each.denominator for each in (*paces.values(), *latency.values())))
        self._paces = {hop: int(pace * self._ticks) for hop, pace in paces.items()}
        self._latency = {hop: int(each * self._ticks) for hop, each in latency.items()}
        self._ways: dict[Hop, Way] = {}
        self._free: dict[Hop, int] = defaultdict(int)
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._asked = self._open = 0
        self._now = 0
        self._counts: dict[Hashable, int] = defaultdict(int)
        self._taken: dict[Hashable, int] = defaultdict(int)
        self._waiting: dict[Hashable, list[tuple[int, Task]]] = defaultdict(list)
        self._proxies: dict[Hashable, deque[Move | Connection]] = {}

    def run(self) -> Fraction:
        """The time of the last event, in the unit of the paces."""
        for rank, part in enumerate(self._program.parts):
            self._counts |= {(rank, at): value for at, value in enumerate(part.semaphores)}
            for number, block in enumerate(part.blocks):
                self._open += 1
                self._go_on(self._block(rank, number, block))
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
        if self._open:
            raise ProgramError(f"{self._program.name}: {self._open} thread blocks wait for ever")
        return Fraction(self._now, self._ticks)

    def _at(self, time: int, act: Callable[[], None]) -> None:
        self._asked += 1
        heapq.heappush(self._events, (time, self._asked, act))

    def _go_on(self, task: Task) -> None:
        until = next(task, None)
        if isinstance(until, int):
            self._at(until, partial(self._go_on, task))
        elif until is not None:
            key, goal = until
            if self._counts[key] >= goal:
                self._at(self._now, partial(self._go_on, task))
            else:
                self._waiting[key].append((goal, task))

    def _tell(self, key: Hashable) -> None:
        """Something has happened once more."""
        self._counts[key] += 1
        waiting = self._waiting.pop(key, [])
        for goal, task in waiting:
            if self._counts[key] >= goal:
                self._at(self._now, partial(self._go_on, task))
            else:
                self._waiting[key].append((goal, task))

    def _next(self, key: Hashable) -> tuple[Hashable, int]:
        """That it happens once more than was waited for until now."""
        self._taken[key] += 1
        return key, self._taken[key]

    def _block(self, rank: int, place: int, block: ThreadBlock) -> Task:  # noqa: PLR0912  (a table of cases)
        ends, stream = block.connections, ("block", rank, place)
        for operation in block.operations:
            match operation:
                case Move(channel=None):
                    yield from self._put(rank, operation, stream)
                case Move(channel=channel) if channel is not None:
                    self._told(rank, ends[channel], operation)
                case Signal(channels=channels):
                    for end in (ends[at] for at in channels):
                        if end.kind == "port":
                            self._told(rank, end, end)
                        else:
                            self._go_on(self._signal(rank, end, stream))
                case Wait() | Acquire():
                    for counted in block.takes(rank, operation):
                        yield self._next(counted)
                case Flush(channels=channels):
                    for end in (ends[at] for at in channels):
                        proxy = rank, end.peer, end.number
                        yield ("done", proxy), self._counts["told", proxy]
                case Release():
                    for counted in block.posts(rank, operation):
                        self._tell(counted)
                case Barrier(number=number, blocks=blocks):
                    key = "barrier", rank, number
                    self._tell(key)
                    yield key, -(-self._counts[key] // blocks) * blocks
        self._open -= 1

    def _told(self, rank: int, end: Connection, what: Move | Connection) -> None:
        proxy = rank, end.peer, end.number
        if proxy not in self._proxies:
            self._proxies[proxy] = deque()
            self._go_on(self._proxy(rank, proxy))
        self._proxies[proxy].append(what)
        self._tell(("told", proxy))

    def _proxy(self, rank: int, proxy: Hashable) -> Task:
        while True:
            yield self._next(("told", proxy))
            what = self._proxies[proxy].popleft()
            if isinstance(what, Move):
                yield from self._put(rank, what, proxy)
            else:
                self._go_on(self._signal(rank, what, proxy))
            self._tell(("done", proxy))

    def _signal(self, rank: int, end: Connection, stream: Hashable) -> Task:
        """A signal on its way, behind all puts of its block or proxy; where it has none, back on theirs."""
        try:
            way = self._way(rank, end.peer)
        except ProgramError:
            way = self._way(end.peer, rank)
        soonest = self._now + self._latency_of(way)
        yield ("landed", stream), self._taken["put", stream]
        yield max(soonest, self._now)
        self._tell((rank, end.peer, end.kind, end.number))

    def _put(self, rank: int, move: Move, stream: Hashable) -> Task:
        """All of a move, until its bytes have left."""
        for span in (span for span in move.sources if span.packets and move.channel is None):
            for cell in _cells(rank, span):
                yield cell, 1
        self._taken["put", stream] += 1
        ways = self._ways_of(rank, move)
        parts = [self._pass(way, move.count * (PACKETS if move.packets else 1)) for way in ways]
        arrived = ("arrived", stream, self._taken["put", stream])
        left = self._now
        for part in parts:
            left = max(left, next(part))
            self._go_on(self._arrival(part, arrived))
        self._go_on(self._landing(rank, move, stream, (arrived, len(parts))))
        yield left

    def _pass(self, way: Way, chunks: int) -> Generator[int, None, None]:
        """When the last bytes have passed the first link, when the first reach the next, ..., the end."""
        end = self._now
        for place, hops in enumerate(way):
            begin = max([self._now, *(self._free[hop] for hop in hops)])
            for hop in hops:
                self._free[hop] = begin + chunks * self._paces[hop]
                end = max(end, self._free[hop])
            latency = max(self._latency[hop] for hop in hops)
            end += latency
            if not place:
                yield end - latency
            yield begin + latency if place < len(way) - 1 else end

    def _arrival(self, part: Generator[int, None, None], arrived: Hashable) -> Task:
        yield from part
        self._tell(arrived)

    def _landing(self, rank: int, move: Move, stream: Hashable, until: Until) -> Task:
        """What is true once all of a move has arrived, after what came before it."""
        number = self._taken["put", stream]
        yield until
        for span in (span for span in move.targets if span.packets):
            for cell in _cells(rank, span):
                self._tell(cell)
        yield ("landed", stream), number - 1
        self._tell(("landed", stream))

    def _ways_of(self, rank: int, move: Move) -> Iterator[Way]:
        """The links that each part of a move passes."""
        yield from (self._way(*pair) for pair in move.between(rank))
        yield from switch_ways(self._topology, rank, move)

    def _way(self, src: int, dst: int) -> Way:
        if (src, dst) not in self._ways:
            route = routes(self._topology, [(src, dst)])[src, dst]
            self._ways[src, dst] = [[hop] for hop in pairwise(route)]
        return self._ways[src, dst]

    def _latency_of(self, way: Way) -> int:
        return sum(max(self._latency[hop] for hop in hops) for hops in way)


def _cells(rank: int, span: Span) -> Iterator[Hashable]:
    """The packets of a span, by where they stand."""
    owner = rank if span.rank is None else span.rank
    return (("packet", owner, span.memory, span.start + offset) for offset in range(span.count))

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
from collections import defaultdict
from collections.abc import Generator, Hashable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

from arborcast.backends.programs.block_tasks import BlockTasks, BlockThread, Task, Until
from arborcast.backends.programs.program import (
    Connection,
    GlobalProgram,
    Move,
    ProgramError,
    Span,
    ThreadBlock,
)
from arborcast.backends.programs.traffic import Traffic, Way, routes, switch_ways, traffic
from arborcast.synth.certificate import Bound
from arborcast.synth.topology import Hop, Topology

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


class _TimedRun(BlockTasks):
    def __init__(
        self,
        program: GlobalProgram,
        topology: Topology,
        paces: Mapping[Hop, Fraction],
        *,
        latencies: bool = True,
    ) -> None:
        super().__init__(program)
        self._topology = topology
        latency = topology.latency_us if latencies else dict.fromkeys(paces, Fraction(0))
        # Whole ticks: sums of fractions would take most of the time.
        self._ticks = math.lcm(*(each.denominator for each in (*paces.values(), *latency.values())))
        self._paces = {hop: int(pace * self._ticks) for hop, pace in paces.items()}
        self._latency = {hop: int(each * self._ticks) for hop, each in latency.items()}
        self._ways: dict[Hop, Way] = {}
        self._free: dict[Hop, int] = defaultdict(int)
        self._events: list[tuple[int, int, Task]] = []
        self._asked = self._open = 0
        self._now = 0
        self._waiting: dict[Hashable, list[tuple[int, Task]]] = defaultdict(list)

    def run(self) -> Fraction:
        """The time of the last event, in the unit of the paces."""
        for rank, number, block in self.program.blocks:
            self._open += 1
            self.start(self._block(BlockThread(rank, number), block))
        while self._events:
            self._now, _, task = heapq.heappop(self._events)
            self.start(task)
        if self._open:
            raise ProgramError(f"{self.program.name}: {self._open} thread blocks wait for ever")
        return Fraction(self._now, self._ticks)

    def start(self, task: Task) -> None:
        """Go on with a task until it waits: for a time in ticks, or for what is counted."""
        until = next((it for it in task if it is not None), None)
        if isinstance(until, int):
            self._at(until, task)
        elif until is not None:
            self._wait(task, *until)

    def tell(self, key: Hashable) -> None:
        """Something has happened once more."""
        super().tell(key)
        for goal, task in self._waiting.pop(key, []):
            self._wait(task, key, goal)

    def _wait(self, task: Task, key: Hashable, goal: int) -> None:
        if self.counts[key] >= goal:
            self._at(self._now, task)
        else:
            self._waiting[key].append((goal, task))

    def _at(self, time: int, task: Task) -> None:
        self._asked += 1
        heapq.heappush(self._events, (time, self._asked, task))

    def _block(self, by: BlockThread, block: ThreadBlock) -> Task:
        for operation in block.operations:
            yield from self.operation(by, operation)
        self._open -= 1

    def signal(self, by: BlockThread, end: Connection, proxy: Hashable | None) -> None:
        """Send it on its way."""
        self.start(self._signal(by.rank, end, proxy or by))

    def _signal(self, rank: int, end: Connection, stream: Hashable) -> Task:
        """A signal on its way, behind all puts of its block or proxy; where it has none, back on theirs."""
        try:
            way = self._way(rank, end.peer)
        except ProgramError:
            way = self._way(end.peer, rank)
        soonest = self._now + self._latency_of(way)
        yield ("landed", stream), self.taken["put", stream]
        yield max(soonest, self._now)
        self.tell((rank, end.peer, end.kind, end.number))

    def put(self, by: BlockThread, move: Move, proxy: Hashable | None) -> Task:
        """All of a move, until its bytes have left."""
        rank, stream = by.rank, proxy or by
        for span in (span for span in move.sources if span.packets and proxy is None):
            for cell in _cells(rank, span):
                yield cell, 1
        _, number = self.next(("put", stream))
        ways = self._ways_of(rank, move)
        parts = [self._pass(way, move.count * (PACKETS if move.packets else 1)) for way in ways]
        arrived = ("arrived", stream, number)
        left = self._now
        for part in parts:
            left = max(left, next(part))
            self.start(self._arrival(part, arrived))
        self.start(self._landing(rank, move, stream, number, (arrived, len(parts))))
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
        self.tell(arrived)

    def _landing(self, rank: int, move: Move, stream: Hashable, number: int, until: Until) -> Task:
        """What is true once all of a move has arrived, after what came before it."""
        yield until
        for span in (span for span in move.targets if span.packets):
            for cell in _cells(rank, span):
                self.tell(cell)
        yield ("landed", stream), number - 1
        self.tell(("landed", stream))

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

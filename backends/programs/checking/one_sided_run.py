"""One-sided programs run once, call after call, with a clock at everything that touches memory.

Who waits for signals, semaphores, barriers or packets can go on at any time once it can go on at all. So
one run in which everybody goes on as far as possible decides whether calls end, and the clocks say for all
runs what comes before what. A clock has a column for each *stream*: a thread block, the proxy of a
connection, the caller of a rank.

    program order    a block's threads pass its operations each for themselves: what others did counts
                     after `Synchronize`, a barrier or the end of the call; own elements, at once
    signals          a wait comes after the signals that must have been sent for its count to be reached
    semaphores       so do acquires after releases
    proxies          do what they are told on one connection in order, signals included; a flush waits
    packets          a read comes after the write of the packet, and that thread knows nothing else
    calls            all blocks of a rank end before its caller goes on, then the next call begins there

Relaxed signals and packets carry no more than that their sender has begun the call, and what it knew then;
and packets, that what their data were made of has been read, which the rank that gets them knows from its
next call on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from arborcast.backends.programs.checking.execution import Access, Clash, Clock, Execution, Waiting
from arborcast.backends.programs.checking.memory import UNDEFINED, Values, is_far
from arborcast.backends.programs.program import (
    Acquire,
    Barrier,
    Counted,
    Flush,
    GlobalProgram,
    Memory,
    Move,
    Operation,
    ProgramError,
    Release,
    Signal,
    Span,
    Synchronize,
    Wait,
)

MOST_CELLS = 1 << 29
"""Of all clocks that are kept."""

Clocks: TypeAlias = Clock
"""Two rows, a column for each stream: what has ended before, and what is known of that by who only begins."""

Reads: TypeAlias = frozenset[int]
"""Numbers of the reads that a value was made of: whole sets are joined, and integers join quickly."""

_ALL, _BEGUN = 0, 1
_EVERYBODY = -1


@dataclass
class _Counting:
    """A counter: its first value, who adds how often a call, and what they knew when they did so in it."""

    initial: int = 0
    totals: dict[int, int] = field(default_factory=dict)
    value: int = 0
    taken: int = 0
    posts: dict[int, list[Clocks]] = field(default_factory=dict)


class OneSidedExecution(Execution):
    """All calls of a program of puts and signals."""

    def __init__(
        self,
        program: GlobalProgram,
        *,
        in_place: bool,
        relaxed_orders: bool = False,
        values: Values | None = None,
    ) -> None:
        """Relaxed signals may be taken for full ones, to see whether that is all that is missing.

        Other values than contributions are followed through one call.
        """
        super().__init__(program, in_place, 3 if program.double_scratch else 2, values)
        self._calls = self._calls if values is None else 1
        self._relaxed_orders = relaxed_orders
        self._number = {key: stream for stream, key in enumerate(self._blocks)}
        self._ends = [block.connections for block in self._block]
        ports = {
            (rank, end.peer, end.number): None
            for (rank, _), ends in zip(self._blocks, self._ends, strict=True)
            for end in ends
            if end.kind == "port"
        }
        self._proxy = {key: len(self._blocks) + at for at, key in enumerate(ports)}
        self._callers = len(self._blocks) + len(self._proxy)
        self._width = self._callers + program.ranks
        if self._width * len(self._blocks) > MOST_CELLS:
            raise ProgramError(
                f"{program.name}: {len(self._blocks)} thread blocks are too many to be checked"
            )
        scratch = [part.scratch_chunks for part in program.parts]
        # Behind a rank's cells: the other half of scratch, then both halves for packets.
        for cells, more in zip(self._cells, scratch, strict=True):
            cells.extend([UNDEFINED] * (3 * more))
        self._packets: dict[Counted, tuple[Clocks, Reads]] = {}  # of this call
        self._number_of_read: dict[tuple[int, int, int, int], int] = {}  # of rank, cell, stream, operation
        self._reads_of_call: list[set[int]] = [set() for _ in scratch]
        self._reads_known: list[list[Reads]] = [[] for _ in scratch]
        self._awaited: dict[tuple[int, int], list[Access]] = {}
        self._now = np.zeros((len(self._blocks), 2, self._width), dtype=np.int32)
        self._later: list[dict[int, Clocks]] = [{} for _ in self._blocks]
        self._by_proxy = {stream: np.zeros(self._width, dtype=np.int32) for stream in self._proxy.values()}
        self._orders: dict[int, list[tuple[int, int, int]]] = {stream: [] for stream in self._by_proxy}
        self._done = [np.zeros(self._width, dtype=np.int32) for _ in scratch]
        self._counters: dict[Counted, _Counting] = {}
        self._count()

    def _count(self) -> None:
        """How often each stream adds to each counter in a call."""
        for stream, (rank, _) in enumerate(self._blocks):
            for operation in self._operations[stream]:
                posts = self._block[stream].posts(rank, operation)
                for counter in (*posts, *self._block[stream].takes(rank, operation)):
                    initial = self._program.parts[rank].semaphores[counter[1]] if len(counter) == 2 else 0
                    self._counters.setdefault(counter, _Counting(initial, value=initial))
                for counter in posts:
                    totals, by = self._counters[counter].totals, self._poster(stream, counter)
                    totals[by] = totals.get(by, 0) + 1

    def _poster(self, stream: int, counter: Counted) -> int:
        if len(counter) > 2 and counter[2] == "port":
            return self._proxy[counter[0], counter[1], counter[3]]
        return stream

    def _begin(self, rank: int) -> None:
        """The caller reads what the last call gave, and writes new inputs; then the blocks begin."""
        done, stream = self._done[rank], self._callers + rank
        access = Access(stream, self._call, 0, None)
        for cell in range(self._layout[rank].start[Memory.SCRATCH]):
            self._touch(rank, cell, access, done, writes=True)
        super()._begin(rank)
        done[stream] = self._call + 1
        self._reads_known[rank].append(frozenset(self._reads_of_call[rank]))
        for number in range(len(self._program.parts[rank].blocks)):
            self._now[self._number[rank, number]][:] = done
            self._later[self._number[rank, number]].clear()

    def _end(self, rank: int) -> None:
        """What the blocks have done is done for whatever follows on the rank."""
        done = self._done[rank]
        for number in range(len(self._program.parts[rank].blocks)):
            stream = self._number[rank, number]
            self._synchronize(stream, len(self._operations[stream]))
            np.maximum(done, self._now[stream][_ALL], out=done)
        super()._end(rank)

    def _go(self) -> list[Waiting]:
        for counting in self._counters.values():
            counting.posts.clear()
            counting.taken = 0
        self._packets.clear()
        self._at_barrier: dict[Counted, list[int]] = {}
        return super()._go()

    def _execute(self, stream: int) -> object | None:
        place = self._place[stream]
        operation = self._operations[stream][place]
        match operation:
            case Synchronize():
                self._synchronize(stream, place + 1)
            case Signal() | Release():
                posts = self._block[stream].posts(self._blocks[stream][0], operation)
                for thread, counter in enumerate(posts):
                    self._post(stream, thread, counter, isinstance(operation, Signal) and operation.relaxed)
            case Wait() | Acquire():
                return self._take(stream, operation, isinstance(operation, Wait) and operation.relaxed)
            case Flush(channels=channels):
                for thread, channel in enumerate(channels):
                    self._learn(stream, thread, self._by_proxy[self._proxy_of(stream, channel)], None)
            case Barrier(number=number, blocks=blocks):
                return self._barrier(stream, number, blocks)
            case Move():
                return self._move(stream, operation)
        return None

    def _synchronize(self, stream: int, place: int) -> None:
        now, later = self._now[stream], self._later[stream]
        for known in later.values():
            np.maximum(now, known, out=now)
        later.clear()
        now[_ALL][stream] = self._call * len(self._operations[stream]) + place

    def _learn(self, stream: int, thread: int, ended: Clocks, begun: Clocks | None) -> None:
        """One thread, or each for its elements, knows what others learn when they synchronize."""
        known = self._later[stream].get(thread)
        if known is None:
            known = self._later[stream][thread] = np.zeros((2, self._width), dtype=np.int32)
        np.maximum(known[_ALL], ended, out=known[_ALL])
        if begun is not None:
            np.maximum(known[_BEGUN], begun, out=known[_BEGUN])

    def _knows(self, stream: int, thread: int) -> Clocks:
        now, later = self._now[stream], self._later[stream].get(thread)
        known: Clocks = now.copy() if later is None else np.maximum(now, later)
        return known

    def _post(self, stream: int, thread: int, counter: Counted, relaxed: bool) -> None:
        clocks = self._knows(stream, thread)
        by = self._poster(stream, counter)
        if by != stream:
            np.maximum(self._by_proxy[by], clocks[_ALL], out=self._by_proxy[by])
            clocks[_ALL] = self._by_proxy[by]
        if relaxed and by == stream and not self._relaxed_orders:
            clocks[_ALL] = clocks[_BEGUN]
        counting = self._counters[counter]
        counting.value += 1
        counting.posts.setdefault(by, []).append(clocks)
        self._wake(counter)

    def _take(self, stream: int, operation: Wait | Acquire, relaxed: bool) -> object | None:
        rank = self._blocks[stream][0]
        counters = self._block[stream].takes(rank, operation)
        for counter in counters:
            if self._counters[counter].value <= 0:
                return counter
        for thread, counter in enumerate(counters):
            counting = self._counters[counter]
            counting.value -= 1
            counting.taken += 1
            everybody = sum(counting.totals.values())
            for by, posts in counting.posts.items():
                # So many of its posts must be among those counted, as all others together make fewer.
                sure = counting.taken - counting.initial - (everybody - counting.totals[by])
                if sure > 0:
                    clocks = posts[min(sure, len(posts)) - 1]
                    self._learn(
                        stream,
                        thread,
                        clocks[_BEGUN if relaxed and not self._relaxed_orders else _ALL],
                        clocks[_BEGUN],
                    )
        return None

    def _barrier(self, stream: int, number: int, blocks: int) -> object | None:
        """The last one who comes lets the others, who wait, go on behind it."""
        key = self._blocks[stream][0], number, "barrier"
        here = self._at_barrier.setdefault(key, [])
        self._synchronize(stream, self._place[stream] + 1)
        here.append(stream)
        if len(here) < blocks:
            return key
        joined = self._now[here].max(axis=0)
        for other in here:
            self._now[other][:] = joined
            self._place[other] += other != stream
        here.clear()
        self._wake(key)
        return None

    def _move(self, stream: int, move: Move) -> object | None:
        rank, begun = self._blocks[stream][0], self._now[stream][_BEGUN]
        if move.channel is None:
            awaited = self._packet_cells(stream, move.sources)
            missing = next((key for key in awaited if key not in self._packets), None)
            if missing is not None:
                return missing
            for key in awaited:
                begun = np.maximum(begun, self._packets[key][0])
            clock = np.maximum(self._now[stream][_ALL], begun)
            access = Access(stream, self._index(stream), 0, "packets" if move.packets else "plain")
            if awaited:
                self._learn(stream, _EVERYBODY, begun, begun)
        else:
            by = self._proxy_of(stream, move.channel)
            clock = self._by_proxy[by]
            np.maximum(clock, self._knows(stream, move.thread)[_ALL], out=clock)
            np.maximum(clock, begun, out=clock)
            access = Access(by, len(self._orders[by]), 0, "")
            self._orders[by].append((stream, self._place[stream], self._call))
        sources, targets = (
            [self._place_of(stream, span) for span in spans] for spans in (move.sources, move.targets)
        )
        for owner, cells in sources:
            self._overlap(stream, [cells], [others for other, others in targets if other == owner])
        for offset in range(move.count):
            access = access._replace(offset=offset)
            read, made_of = self._read_all(rank, access, clock, move, sources)
            made = self._values.moved(rank, move, read)
            for (owner, cells), span in zip(targets, move.targets, strict=True):
                cell, value = cells[offset], made[is_far(span, rank, move)]
                if span.packets and (owner, cell, "packets") in self._packets:
                    if value != self._cells[owner][cell]:
                        name = self._named(stream, self._place[stream])
                        what = "writes other packets where there are some of this call"
                        self._outcome.races.append(f"{name} {what}")
                    # Whoever writes next must come after it.
                    self._read[owner].setdefault(cell, []).append(access)
                    continue
                self._touch(owner, cell, access, clock, writes=True, made_of=made_of)
                self._cells[owner][cell] = value
                self._awaited.pop((owner, cell), None)
                if span.packets:
                    self._packets[owner, cell, "packets"] = begun.copy(), made_of
                    self._wake((owner, cell, "packets"))
        if move.channel is not None:
            clock[access.stream] = access.number + 1
        return None

    def _read_all(
        self, rank: int, access: Access, clock: Clocks, move: Move, sources: Sequence[tuple[int, range]]
    ) -> tuple[list[int], Reads]:
        """One chunk of all sources of a move, and who read what for it."""
        read: list[int] = []
        made_of: set[int] = set()
        numbers = self._number_of_read
        for (owner, cells), span in zip(sources, move.sources, strict=True):
            cell = cells[access.offset]
            awaits = span.packets and move.channel is None
            if awaits:
                self._awaited.setdefault((owner, cell), []).append(access)
                reads = self._packets[owner, cell, "packets"][1]
                made_of |= reads
                self._reads_of_call[rank] |= reads
            if move.packets:
                made_of.add(numbers.setdefault((owner, cell, access.stream, access.number), len(numbers)))
            flagged = awaits or self._known(owner, cell, clock)
            self._touch(owner, cell, access, clock, writes=False, flagged=flagged)
            read.append(self._cells[owner][cell])
        return read, frozenset(made_of)

    def _packet_cells(self, stream: int, spans: Sequence[Span]) -> list[tuple[int, int, str]]:
        """Where the packets of some spans stand, as those who wait for them name it."""
        places = [self._place_of(stream, span) for span in spans if span.packets]
        return [(rank, cell, "packets") for rank, cells in places for cell in cells]

    def _known(self, rank: int, cell: int, clock: Clocks) -> bool:
        """Whether the packet in a cell was awaited before by someone whom this clock knows of."""
        return any(clock[access.stream] > access.number for access in self._awaited.get((rank, cell), ()))

    def _apart(self, met: Clash) -> bool:
        """Whether they are of one thread, or packets tell that the first, a read, is over.

        A packet tells so that was made of it, or that was there before a call began of which the clock knows.
        """
        first, second = met.first, met.second
        if second.manner and (first.stream, *first[2:]) == (second.stream, *second[2:]):
            return True
        number = self._number_of_read.get((met.rank, met.cell, first.stream, first.number))
        begun = (int(calls) for calls in met.clock[self._callers :])
        return number in met.made_of or any(
            calls and number in self._reads_known[of][calls - 1] for of, calls in enumerate(begun)
        )

    def _given_by(self, access: Access) -> tuple[int, int, int]:
        """The block, the place in it, and the call of the operation that did an access or told a proxy to."""
        if access.stream >= self._callers:
            return access.stream, 0, access.number
        if access.stream >= len(self._blocks):
            return self._orders[access.stream][access.number]
        return super()._given_by(access)

    def _place_of(self, stream: int, span: Span) -> tuple[int, range]:
        """The rank and the cells of a span: scratch has halves, and packets rooms of their own."""
        rank, cells = super()._place_of(stream, span)
        more = 0
        if span.memory is Memory.SCRATCH:
            half = self._call % 2 if self._program.double_scratch else 0
            more = self._program.parts[rank].scratch_chunks * (2 * span.packets + half)
        return rank, range(cells.start + more, cells.stop + more)

    def _proxy_of(self, stream: int, channel: int) -> int:
        end = self._ends[stream][channel]
        return self._proxy[self._blocks[stream][0], end.peer, end.number]

    def _index(self, stream: int) -> int:
        return self._call * len(self._operations[stream]) + self._place[stream]

    def _why(self, stream: int) -> Waiting:
        place, rank = self._place[stream], self._blocks[stream][0]
        operation = self._operations[stream][place]
        if isinstance(operation, Barrier):
            here = self._at_barrier.get((rank, operation.number, "barrier"), [])
            for other, (owner, _) in enumerate(self._blocks):
                numbers = [it.number for it in self._operations[other] if isinstance(it, Barrier)]
                if owner == rank and other not in here and operation.number in numbers:
                    return Waiting(stream, place, f"waits at barrier {operation.number}", other)
            return Waiting(stream, place, f"waits at barrier {operation.number}", None)
        what, nobody = "packets", " that nobody is to write"
        if isinstance(operation, Move):
            missing = set(self._packet_cells(stream, operation.sources)) - self._packets.keys()
        else:
            counters = self._block[stream].takes(rank, operation)
            counter = next(it for it in counters if self._counters[it].value <= 0)
            missing, nobody = {counter}, ", and nobody is to give it"
            what = f"semaphore {counter[1]}"
            if len(counter) > 2:
                what = f"a signal of rank {counter[0]} on {counter[2]} channel {counter[3]}"
        for other, operations in enumerate(self._operations):
            for later in operations[self._place[other] :]:
                if not missing.isdisjoint(self._gives(other, later)):
                    return Waiting(stream, place, f"waits for {what}", other)
        return Waiting(stream, place, f"waits for {what}{nobody}", None)

    def _gives(self, stream: int, operation: Operation) -> Sequence[Counted]:
        """What others wait for that an operation gives."""
        if isinstance(operation, Move):
            return self._packet_cells(stream, operation.targets)
        return self._block[stream].posts(self._blocks[stream][0], operation)

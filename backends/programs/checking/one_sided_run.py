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

import gc
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from arborcast.backends.programs.checking.memory import buffers, given, wanted
from arborcast.backends.programs.checking.progress import Progress, Waiting
from arborcast.backends.programs.checking.replay import UNDEFINED, Values
from arborcast.backends.programs.checking.verdict import Wait as TraceLine
from arborcast.backends.programs.program import (
    Acquire,
    Barrier,
    Flush,
    GlobalProgram,
    Memory,
    Move,
    ProgramError,
    Release,
    Signal,
    Span,
    Synchronize,
    Wait,
)

MOST_CELLS = 1 << 29
"""Of all clocks that are kept."""

Clocks: TypeAlias = npt.NDArray[np.int32]
"""Two rows, a column for each stream: what has ended before, and what is known of that by who only begins."""

Counter: TypeAlias = tuple[Any, ...]
"""A connection in one direction, or a semaphore."""

Reads: TypeAlias = frozenset[int]
"""Numbers of the reads that a value was made of: whole sets are joined, and integers join quickly."""

_ALL, _BEGUN = 0, 1
_EVERYBODY = -1


@dataclass(frozen=True, slots=True)
class Access:
    """Who touched a cell: stream, number of its operation, place in the span, how threads share elements."""

    stream: int
    index: int
    offset: int
    sharing: str | None


@dataclass
class Outcome:
    """What was found: one line each, and a trace of the first, which may be a circle.

    `moves` are those of the first call with the ranks that do them, in an order in which they may end.
    """

    stuck: list[str] = field(default_factory=list)
    races: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    trace: tuple[TraceLine, ...] = ()
    circle: bool = False
    moves: list[tuple[int, Move]] = field(default_factory=list)


@dataclass
class _Counting:
    """A counter: its first value, who adds how often a call, and what they knew when they did so in it."""

    initial: int = 0
    totals: dict[int, int] = field(default_factory=dict)
    value: int = 0
    taken: int = 0
    posts: dict[int, list[Clocks]] = field(default_factory=dict)


class Execution:
    """All calls of a program, in place or not."""

    def __init__(self, program: GlobalProgram, *, in_place: bool, relaxed_orders: bool = False) -> None:
        """Relaxed signals may be taken for full ones, to see whether that is all that is missing."""
        self._program = program
        self._relaxed_orders = relaxed_orders
        self._in_place = in_place
        self._calls = 3 if program.double_scratch else 2
        self._blocks = [
            (rank, number) for rank, part in enumerate(program.parts) for number in range(len(part.blocks))
        ]
        self._number = {key: stream for stream, key in enumerate(self._blocks)}
        self._operations = [program.parts[rank].blocks[number].operations for rank, number in self._blocks]
        self._ends = [program.parts[rank].blocks[number].connections for rank, number in self._blocks]
        self._proxy: dict[tuple[int, int, int], int] = {}
        for (rank, _), operations, ends in zip(self._blocks, self._operations, self._ends, strict=True):
            for operation in operations:
                channels = operation.channels if isinstance(operation, (Signal, Flush)) else ()
                if isinstance(operation, Move) and operation.channel is not None:
                    channels = (operation.channel,)
                for channel in channels:
                    if ends[channel].kind == "port":
                        key = rank, ends[channel].peer, ends[channel].number
                        self._proxy.setdefault(key, len(self._blocks) + len(self._proxy))
        self._callers = len(self._blocks) + len(self._proxy)
        self._width = self._callers + program.ranks
        if self._width * len(self._blocks) > MOST_CELLS:
            raise ProgramError(
                f"{program.name}: {len(self._blocks)} thread blocks are too many to be checked"
            )
        self._outcome = Outcome()
        self._values = Values(program.ranks)
        self._layout = [buffers(program, rank, in_place=in_place) for rank in range(program.ranks)]
        scratch = [part.scratch_chunks for part in program.parts]
        # Behind a rank's cells: the other half of scratch, then both halves for packets.
        self._cells = [
            [UNDEFINED] * (layout.cells + 3 * more)
            for layout, more in zip(self._layout, scratch, strict=True)
        ]
        self._written: list[dict[int, Access]] = [{} for _ in scratch]
        self._read: list[dict[int, list[Access]]] = [{} for _ in scratch]
        self._packets: dict[tuple[int, int], tuple[int, Clocks, Reads]] = {}
        self._number_of_read: dict[tuple[int, int, int, int], int] = {}  # of rank, cell, stream, operation
        self._reads_of_call: list[set[int]] = [set() for _ in scratch]
        self._reads_known: list[list[Reads]] = [[] for _ in scratch]
        self._awaited: dict[tuple[int, int], list[Access]] = {}
        self._seen: set[tuple[int, int, int, int]] = set()
        self._now = np.zeros((len(self._blocks), 2, self._width), dtype=np.int32)
        self._later: list[dict[int, Clocks]] = [{} for _ in self._blocks]
        self._by_proxy = {stream: np.zeros(self._width, dtype=np.int32) for stream in self._proxy.values()}
        self._orders: dict[int, list[tuple[int, int, int]]] = {stream: [] for stream in self._by_proxy}
        self._done = [np.zeros(self._width, dtype=np.int32) for _ in scratch]
        self._counters: dict[Counter, _Counting] = {}
        self._count()

    def run(self) -> Outcome:
        """All calls, then what callers do after the last one."""
        collects = gc.isenabled()
        gc.disable()  # of millions of values none is in a cycle; looking for one takes a third of the time
        try:
            self._run()
        finally:
            if collects:
                gc.enable()
        return self._outcome

    def _run(self) -> None:
        for call in range(self._calls):
            self._call = call
            for rank in range(self._program.ranks):
                self._begin(rank)
            if not self._go():
                break
            for rank in range(self._program.ranks):
                self._end(rank)
            if self._outcome.wrong:
                break
        else:
            self._call = self._calls
            for rank in range(self._program.ranks):
                self._begin(rank)

    def _count(self) -> None:
        """How often each stream adds to each counter in a call."""
        for stream, (rank, _) in enumerate(self._blocks):
            for operation in self._operations[stream]:
                for counter in self._posts(stream, operation):
                    counting = self._counter(rank, counter)
                    by = self._poster(stream, counter)
                    counting.totals[by] = counting.totals.get(by, 0) + 1

    def _posts(self, stream: int, operation: object) -> list[Counter]:
        rank, ends = self._blocks[stream][0], self._ends[stream]
        if isinstance(operation, Signal):
            chosen = [ends[channel] for channel in operation.channels]
            return [(rank, end.peer, end.kind, end.number) for end in chosen]
        return [(rank, at) for at in operation.semaphores] if isinstance(operation, Release) else []

    def _takes(self, stream: int, operation: object) -> list[Counter]:
        rank, ends = self._blocks[stream][0], self._ends[stream]
        if isinstance(operation, Wait):
            chosen = [ends[channel] for channel in operation.channels]
            return [(end.peer, rank, end.kind, end.number) for end in chosen]
        return [(rank, at) for at in operation.semaphores] if isinstance(operation, Acquire) else []

    def _poster(self, stream: int, counter: Counter) -> int:
        if len(counter) > 2 and counter[2] == "port":
            return self._proxy[counter[0], counter[1], counter[3]]
        return stream

    def _counter(self, rank: int, counter: Counter) -> _Counting:
        if counter not in self._counters:
            initial = self._program.parts[rank].semaphores[counter[1]] if len(counter) == 2 else 0
            self._counters[counter] = _Counting(initial, value=initial)
        return self._counters[counter]

    # ---- calls

    def _begin(self, rank: int) -> None:
        """The caller reads what the last call gave, and writes new inputs; then the blocks begin."""
        layout, done, stream = self._layout[rank], self._done[rank], self._callers + rank
        access = Access(stream, self._call, 0, None)
        for cell in range(layout.start[Memory.SCRATCH]):
            self._touch(rank, cell, access, done, writes=True)
            self._cells[rank][cell] = UNDEFINED
        for chunk, value in enumerate(given(self._program, rank)):
            self._cells[rank][layout.start[Memory.INPUT] + chunk] = self._values.number(value)
        done[stream] = self._call + 1
        self._reads_known[rank].append(frozenset(self._reads_of_call[rank]))
        for number in range(len(self._program.parts[rank].blocks)):
            self._now[self._number[rank, number]][:] = done
            self._later[self._number[rank, number]].clear()

    def _end(self, rank: int) -> None:
        """What the blocks have done is done for whatever follows on the rank; what should stand there now."""
        done = self._done[rank]
        for number in range(len(self._program.parts[rank].blocks)):
            stream = self._number[rank, number]
            self._synchronize(stream, len(self._operations[stream]))
            np.maximum(done, self._now[stream][_ALL], out=done)
        start = self._layout[rank].start[Memory.OUTPUT]
        for chunk, value in enumerate(wanted(self._program, rank)):
            number, found = self._values.number(value), self._cells[rank][start + chunk]
            if value is not None and found != number:
                self._outcome.wrong.append(
                    f"{self._in_call()}rank {rank}: o{chunk} must be {self._values.text(number)}, "
                    f"is {self._values.text(found)}"
                )
        if not self._in_place and self._call == 0:
            self._clobbered(rank)

    def _clobbered(self, rank: int) -> None:
        """Moves that write the caller's input where it is not the output, too."""
        start, size = self._layout[rank].start[Memory.INPUT], self._layout[rank].size[Memory.INPUT]
        for cell in range(start, start + size):
            access = self._written[rank][cell]
            if access.stream != self._callers + rank:
                self._outcome.wrong.append(f"{self._name(access)} writes the caller's input on rank {rank}")

    def _go(self) -> bool:
        """Everybody as far as possible; whether all came to the end of the call."""
        for counting in self._counters.values():
            counting.posts.clear()
            counting.taken = 0
        self._place = [0] * len(self._blocks)
        self._waiters: dict[object, list[int]] = {}
        self._at_barrier: dict[tuple[int, int], list[int]] = {}
        self._passed: set[int] = set()
        self._queue = deque(range(len(self._blocks)))
        while self._queue:
            stream = self._queue.popleft()
            while self._place[stream] < len(self._operations[stream]):
                reason = self._execute(stream)
                if reason is not None:
                    self._waiters.setdefault(reason, []).append(stream)
                    break
                self._place[stream] += 1
        stuck = [
            self._why(stream)
            for stream in range(len(self._blocks))
            if self._place[stream] < len(self._operations[stream])
        ]
        if stuck:
            trace = Progress((), tuple(stuck)).trace()
            texts = [f"{self._named(waiting.block, waiting.step)} {waiting.reason}" for waiting in trace]
            self._outcome.circle = trace[-1].on == trace[0].block
            self._outcome.stuck.append(
                f"{self._in_call()}hangs, {len(stuck)} blocks wait: {'; '.join(texts)}"
            )
            self._outcome.trace = tuple(
                TraceLine(*self._blocks[waiting.block], waiting.step, text)
                for waiting, text in zip(trace, texts, strict=True)
            )
        return not stuck

    # ---- operations

    def _execute(self, stream: int) -> object | None:
        """Do the operation that a block is at; what it waits for where it cannot."""
        place = self._place[stream]
        operation = self._operations[stream][place]
        match operation:
            case Synchronize():
                self._synchronize(stream, place + 1)
            case Signal() | Release():
                for thread, counter in enumerate(self._posts(stream, operation)):
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

    def _post(self, stream: int, thread: int, counter: Counter, relaxed: bool) -> None:
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
        counters = self._takes(stream, operation)
        rank = self._blocks[stream][0]
        for counter in counters:
            if self._counter(rank, counter).value <= 0:
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
        key = self._blocks[stream][0], number
        if stream in self._passed:
            self._passed.discard(stream)
            return None
        here = self._at_barrier.setdefault(key, [])
        if stream not in here:
            self._synchronize(stream, self._place[stream] + 1)
            here.append(stream)
        if len(here) < blocks:
            return key, "barrier"
        joined = self._now[here].max(axis=0)
        for other in here:
            self._now[other][:] = joined
        self._passed.update(other for other in here if other != stream)
        self._at_barrier[key] = []
        self._wake((key, "barrier"))
        return None

    def _move(self, stream: int, move: Move) -> object | None:
        begun = self._now[stream][_BEGUN]
        sources = [self._place_of(stream, span) for span in move.sources]
        awaited: list[Clocks] = []
        for span, (rank, cells) in zip(move.sources, sources, strict=True):
            if span.packets and move.channel is None:
                for cell in cells:
                    found = self._packets.get((rank, cell))
                    if found is None or found[0] != self._call:
                        return rank, cell
                    awaited.append(found[1])
        for known in awaited:
            begun = np.maximum(begun, known)
        has_packets = bool(awaited) or move.packets
        by, index, sharing = stream, self._index(stream), "packets" if has_packets else "plain"
        if move.channel is None:
            clock = np.maximum(self._now[stream][_ALL], begun)
        else:
            by = self._proxy_of(stream, move.channel)
            clock = self._by_proxy[by]
            np.maximum(clock, self._knows(stream, move.thread)[_ALL], out=clock)
            np.maximum(clock, begun, out=clock)
            index, sharing = len(self._orders[by]), ""
            self._orders[by].append((stream, self._place[stream], self._call))
        if awaited:
            self._learn(stream, _EVERYBODY, begun, begun)
        self._access(by, index, sharing, clock, move, stream, begun, sources, has_packets)
        if not self._call:
            self._outcome.moves.append((self._blocks[stream][0], move))
        if move.channel is not None:
            clock[by] = index + 1
        return None

    def _access(
        self,
        by: int,
        index: int,
        sharing: str,
        clock: Clocks,
        move: Move,
        stream: int,
        begun: Clocks,
        sources: Sequence[tuple[int, range]],
        has_packets: bool,
    ) -> None:
        targets = [self._place_of(stream, span) for span in move.targets]
        for rank, cells in sources:
            for other, others in targets:
                if rank == other and cells[0] != others[0] and set(cells) & set(others):
                    self._outcome.races.append(
                        f"{self._named(stream, self._place[stream])} reads what it writes elsewhere"
                    )
        for offset in range(move.count):
            access = Access(by, index, offset, sharing)
            value, made_of = self._sum(access, clock, offset, move, sources, has_packets)
            for (rank, cells), span in zip(targets, move.targets, strict=True):
                cell = cells[offset]
                if span.packets and self._packets.get((rank, cell), (-1,))[0] == self._call:
                    if value != self._cells[rank][cell]:
                        name = self._named(stream, self._place[stream])
                        self._outcome.races.append(
                            f"{name} writes other packets where there are some of this call"
                        )
                    self._read[rank].setdefault(cell, []).append(
                        access
                    )  # whoever writes next must come after it
                    continue
                self._touch(rank, cell, access, clock, writes=True, made_of=made_of)
                self._cells[rank][cell] = value
                self._awaited.pop((rank, cell), None)
                if span.packets:
                    self._packets[rank, cell] = self._call, begun.copy(), made_of
                    self._wake((rank, cell))

    def _sum(
        self,
        access: Access,
        clock: Clocks,
        offset: int,
        move: Move,
        sources: Sequence[tuple[int, range]],
        has_packets: bool,
    ) -> tuple[int, Reads]:
        """The sum of one chunk of all sources, and who read what for it."""
        total: int | None = None
        made_of: set[int] = set()
        numbers = self._number_of_read
        for (rank, cells), span in zip(sources, move.sources, strict=True):
            cell = cells[offset]
            awaits = span.packets and move.channel is None
            if awaits:
                self._awaited.setdefault((rank, cell), []).append(access)
                reads = self._packets[rank, cell][2]
                made_of |= reads
                self._reads_of_call[self._blocks[access.stream][0]] |= reads
            if has_packets:
                made_of.add(numbers.setdefault((rank, cell, access.stream, access.index), len(numbers)))
            self._touch(
                rank, cell, access, clock, writes=False, flagged=awaits or self._known(rank, cell, clock)
            )
            value = self._cells[rank][cell]
            total = value if total is None else self._values.sum(total, value)
        assert total is not None, "a move has sources"
        return total, frozenset(made_of)

    def _known(self, rank: int, cell: int, clock: Clocks) -> bool:
        """Whether the packet in a cell was awaited before by someone whom this clock knows of."""
        return any(clock[access.stream] > access.index for access in self._awaited.get((rank, cell), ()))

    def _touch(
        self,
        rank: int,
        cell: int,
        access: Access,
        clock: Clocks,
        *,
        writes: bool,
        flagged: bool = False,
        made_of: Reads = frozenset(),
    ) -> None:
        """One access against the last write of its cell and, of a write, the reads since then."""
        written, read = self._written[rank], self._read[rank]
        last = written.get(cell)
        earlier = [last] if last is not None and not flagged else []
        if writes:
            earlier += read.get(cell, ())
        for other in earlier:
            own = (
                other.stream == access.stream
                and other.offset == access.offset
                and other.sharing == access.sharing
            )
            if (
                clock[other.stream] <= other.index
                and not (own and access.sharing)
                and self._number_of_read.get((rank, cell, other.stream, other.index)) not in made_of
                and not self._was_read(rank, cell, other, clock)
            ):
                self._unordered(rank, cell, other, access)
        if writes:
            written[cell] = access
            read[cell] = []
        else:
            read.setdefault(cell, []).append(access)

    def _was_read(self, rank: int, cell: int, other: Access, clock: Clocks) -> bool:
        """Whether a packet made of a read was there before a call began of which this clock knows."""
        number = self._number_of_read.get((rank, cell, other.stream, other.index))
        begun = clock[self._callers :]
        return any(
            calls and number in self._reads_known[of][calls - 1] for of, calls in enumerate(begun.tolist())
        )

    def _unordered(self, rank: int, cell: int, first: Access, second: Access) -> None:
        """Two accesses of a cell that nothing orders; said once for each two operations."""
        one, other = self._given_by(first), self._given_by(second)
        key = *one[:2], *other[:2]
        if key in self._seen:
            return
        self._seen.add(key)
        of_callers = max(first.stream, second.stream) >= self._callers
        named = self._name(first, "before its call"), self._name(second, "after its call")
        text = f"nothing orders {named[0]} and {named[1]}"
        if one[2] != other[2] and not of_callers:
            text += ", of the next call" if other[2] == one[2] + 1 else ", of the call after the next"
        text += f": both touch {self._cell(rank, cell)}"
        (self._outcome.early if of_callers or one[2] != other[2] else self._outcome.races).append(text)
        if not self._outcome.trace:
            self._outcome.trace = tuple(
                TraceLine(*self._blocks[stream], place, self._name(access))
                for access, (stream, place, _) in ((first, one), (second, other))
                if access.stream < self._callers
            )

    def _given_by(self, access: Access) -> tuple[int, int, int]:
        """The block, the place in it, and the call of the operation that did an access or told a proxy to."""
        if access.stream >= self._callers:
            return access.stream, 0, access.index
        if access.stream >= len(self._blocks):
            return self._orders[access.stream][access.index]
        call, place = divmod(access.index, len(self._operations[access.stream]))
        return access.stream, place, call

    # ---- where and who

    def _place_of(self, stream: int, span: Span) -> tuple[int, range]:
        """The rank and the cells of a span."""
        rank = self._blocks[stream][0] if span.rank is None else span.rank
        layout, scratch = self._layout[rank], self._program.parts[rank].scratch_chunks
        start = layout.start[span.memory] + span.start
        if span.memory is Memory.SCRATCH:
            start += scratch * (2 * span.packets + (self._call % 2 if self._program.double_scratch else 0))
        return rank, range(start, start + span.count)

    def _cell(self, rank: int, cell: int) -> str:
        layout, scratch = self._layout[rank], self._program.parts[rank].scratch_chunks
        if cell >= layout.start[Memory.SCRATCH]:
            return f"s{(cell - layout.start[Memory.SCRATCH]) % scratch} of rank {rank}"
        names = [
            f"{memory}{cell - layout.start[memory]}"
            for memory in (Memory.INPUT, Memory.OUTPUT)
            if 0 <= cell - layout.start[memory] < layout.size[memory]
        ]
        return f"{' = '.join(names)} of rank {rank}"

    def _proxy_of(self, stream: int, channel: int) -> int:
        end = self._ends[stream][channel]
        return self._proxy[self._blocks[stream][0], end.peer, end.number]

    def _index(self, stream: int) -> int:
        return self._call * len(self._operations[stream]) + self._place[stream]

    def _name(self, access: Access, when: str = "") -> str:
        if access.stream >= self._callers:
            return f"the caller of rank {access.stream - self._callers} {when}"
        stream, place, _ = self._given_by(access)
        return self._named(stream, place) + (" by its proxy" if access.stream >= len(self._blocks) else "")

    def _named(self, stream: int, place: int) -> str:
        rank, block = self._blocks[stream]
        operation = self._operations[stream][place]
        text = str(operation) if isinstance(operation, Move) else type(operation).__name__.lower()
        return f"rank {rank} block {block} operation {place} ({text})"

    def _in_call(self) -> str:
        return f"call {self._call + 1}: " if self._call else ""

    def _wake(self, what: object) -> None:
        self._queue.extend(self._waiters.pop(what, ()))

    def _why(self, stream: int) -> Waiting:
        """For what a block waits, and which block is to do it."""
        place = self._place[stream]
        operation = self._operations[stream][place]
        if isinstance(operation, (Wait, Acquire)):
            rank = self._blocks[stream][0]
            counter = next(
                counter
                for counter in self._takes(stream, operation)
                if self._counter(rank, counter).value <= 0
            )
            what = (
                f"a signal of rank {counter[0]} on {counter[2]} channel {counter[3]}"
                if len(counter) > 2
                else f"semaphore {counter[1]}"
            )
            posting = [
                other
                for other, operations in enumerate(self._operations)
                if any(counter in self._posts(other, later) for later in operations[self._place[other] :])
            ]
            return Waiting(
                stream,
                place,
                f"waits for {what}" + ("" if posting else ", and nobody is to give it"),
                posting[0] if posting else None,
            )
        if isinstance(operation, Barrier):
            key = self._blocks[stream][0], operation.number
            missing = [
                other
                for other, (rank, _) in enumerate(self._blocks)
                if rank == key[0]
                and other not in self._at_barrier.get(key, [])
                and any(isinstance(op, Barrier) and op.number == key[1] for op in self._operations[other])
            ]
            return Waiting(stream, place, f"waits at barrier {key[1]}", missing[0] if missing else None)
        writers: Sequence[int] = [
            other for other in range(len(self._blocks)) if self._writes_packets_of(other, stream, place)
        ]
        return Waiting(
            stream,
            place,
            "waits for packets" + ("" if writers else " that nobody is to write"),
            writers[0] if writers else None,
        )

    def _writes_packets_of(self, other: int, stream: int, place: int) -> bool:
        """Whether a block is yet to write packets that a move of another one reads."""
        move = self._operations[stream][place]
        assert isinstance(move, Move), "nothing else reads packets"
        missing = {
            (rank, cell)
            for rank, cells in (self._place_of(stream, span) for span in move.sources if span.packets)
            for cell in cells
            if self._packets.get((rank, cell), (-1,))[0] != self._call
        }
        return any(
            (rank, cell) in missing
            for later in self._operations[other][self._place[other] :]
            if isinstance(later, Move)
            for rank, cells in (self._place_of(other, span) for span in later.targets if span.packets)
            for cell in cells
        )

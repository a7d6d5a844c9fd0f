"""Runs a program on numpy arrays as device code would, its thread blocks in random order, call after call.

Every thread is a task that stops wherever another might come in between: while it waits for a flag, a signal,
a message or room in a FIFO, and between reading memory and writing it. Which task goes on is drawn anew at
every stop, or by priorities that are drawn now and then, so that some are very slow. A block of two-sided
steps acts as one thread. One of puts and signals has a few, each with elements of its own; its proxies do
what they are told at any time later, and ranks begin their next call once they have ended one. Loops go
through two pieces of a chunk. With the checker, whose verdicts it can show to be wrong, it shares only what
collectives ask of buffers.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from arborcast.backends.programs.checking.memory import Value, buffers, given, wanted
from arborcast.backends.programs.limits import fifo_of
from arborcast.backends.programs.program import (
    Acquire,
    Barrier,
    Code,
    Connection,
    Flush,
    GlobalProgram,
    Memory,
    Move,
    ProgramError,
    Release,
    Signal,
    Span,
    Step,
    Synchronize,
    Wait,
)
from arborcast.synth.nccl_protocol import Protocol

THREADS = 2
"""Of a block of puts and signals: enough to show what is missing between them."""

CALLS = 3
"""Of programs of puts and signals, which nothing else keeps apart; one more than scratch has halves."""

_PLAIN, _PACKED = 2, 1  # consecutive elements of one thread, where it moves data and where it moves packets
_HALF = 0.5
_NOW_AND_THEN = 0.1

Array = npt.NDArray[np.int64]
Task = Generator[Callable[[], bool] | None, None, None]


@dataclass(frozen=True, slots=True)
class Interpretation:
    """What one run gave.

    Attributes:
        wrong: elements of outputs that are not what the collective asks.
        hangs: why the run did not end as it should, such as blocks that wait for ever; None where it did.
    """

    wrong: int
    hangs: str | None = None

    @property
    def correct(self) -> bool:
        """Whether it ended with every element right."""
        return not self.wrong and self.hangs is None


def interpret(
    program: GlobalProgram,
    *,
    in_place: bool,
    seed: int = 0,
    elements: int = 4,
    calls: int = 1,
    loops: int = 1,
    together: int = 1,
) -> Interpretation:
    """Run a program some times in a row, on data that differ in every element, and compare every output.

    Args:
        program: of two-sided steps, or of puts and signals.
        in_place: whether outputs lie over inputs.
        seed: of the data and of the order of blocks.
        elements: of a chunk.
        calls: how many follow each other, without anything else between them.
        loops: of two-sided steps, how often blocks go through the program in a call, each time for another
            part of every chunk.
        together: chunks that fit a message; more than one only where there is one loop.

    Raises:
        ProgramError: an operation reaches beyond a buffer, or names a semaphore that is not there.
    """
    together = 1 if loops > 1 else together
    if program.loops:
        program = program.unrolled(2, Fraction(min(loop.piece_bytes for loop in program.loops)))
    return _Machine(program, in_place, seed, elements, calls, loops, together).run()


def run_in_any_order(
    new: list[Task], chance: random.Random, goes_on: Callable[[], bool] = lambda: True
) -> int:
    """Let tasks go on in random order until all have ended or none can; how many then wait for ever.

    Args:
        new: the tasks; more may be put there while others run.
        chance: draws who goes on, anew at each stop or by priorities that change now and then.
        goes_on: false once enough has happened.
    """
    uniform, draw = chance.random() < _HALF, chance.random
    waiting: list[tuple[Task, Callable[[], bool] | None]] = []
    stalled: list[tuple[Task, Callable[[], bool] | None]] = []
    progress = True
    while goes_on():
        if new:
            waiting += [(task, None) for task in new]
            new.clear()
            chance.shuffle(waiting)
        if not waiting:
            if not progress or not stalled:
                return len(stalled)
            waiting, stalled, progress = stalled, [], False
            chance.shuffle(waiting)
        if uniform:
            at = int(draw() * len(waiting))
            waiting[at], waiting[-1] = waiting[-1], waiting[at]
        task, ready = waiting.pop()
        if ready is not None and not ready():
            stalled.append((task, ready))
            continue
        progress = True
        try:
            waiting.append((task, next(task)))
        except StopIteration:
            continue
        if not uniform and draw() < _NOW_AND_THEN:
            chance.shuffle(waiting)
    return 0


def expected_outputs(program: GlobalProgram, data: Sequence[Array]) -> list[Array | None]:
    """What must stand in the output of each rank, by the inputs of all; None where it does not matter."""
    held = {
        (value[0], rank): row
        for rank, rows in enumerate(data)
        for value, row in zip(given(program, rank), rows, strict=True)
        if value is not None
    }
    sums: dict[Value, Array] = {}

    def total(value: Value) -> Array:
        if value not in sums:
            part, mask = value
            sums[value] = np.sum(
                [held[part, rank] for rank in range(program.ranks) if mask >> rank & 1], axis=0
            )
        return sums[value]

    wants = [[value for value in wanted(program, rank) if value is not None] for rank in range(program.ranks)]
    return [np.stack(list(map(total, values))) if values else None for values in wants]


class _SlotQueue:
    """Parts of messages on their way; a slot is free again when what was in it has been worked in."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.parts: deque[Array] = deque()
        self.held = 0

    @property
    def has_room(self) -> bool:
        return len(self.parts) + self.held < self.depth

    def take(self) -> Array:
        self.held += 1
        return self.parts.popleft()


class _Proxy:
    """What a proxy was told to do, and how much of it is done."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None]] = deque()
        self.told = 0
        self.done = 0

    def tell(self, what: Callable[[], None]) -> None:
        self.queue.append(what)
        self.told += 1

    def task(self) -> Task:
        """Never ends."""
        while True:
            yield lambda: bool(self.queue)
            self.queue.popleft()()
            self.done += 1


class _Machine:
    def __init__(
        self,
        program: GlobalProgram,
        in_place: bool,
        seed: int,
        elements: int,
        calls: int,
        loops: int,
        together: int,
    ) -> None:
        self._program = program
        self._seed = seed
        self._elements = elements
        self._calls = calls
        self._loops = loops
        self._together = together
        self._threads = THREADS if program.one_sided else 1
        self._random = random.Random(seed)
        self._layout = [buffers(program, rank, in_place=in_place) for rank in range(program.ranks)]
        self._memory = [self._buffers(rank) for rank in range(program.ranks)]
        shapes = [(2, part.scratch_chunks, elements) for part in program.parts]
        self._scratch = [self._data(rank, -1, shape) for rank, shape in enumerate(shapes)]
        self._packets = [np.zeros(shape, dtype=np.int64) for shape in shapes]
        self._flags = [np.zeros(shape, dtype=np.int64) for shape in shapes]
        self._posted = [[(-1, 0, 0)] * len(part.blocks) for part in program.parts]
        self._shape = fifo_of(program.protocol)
        self._fifos: dict[tuple[int, int, int], _SlotQueue] = {}
        self._signals: dict[tuple[object, ...], int] = defaultdict(int)
        self._waits: dict[tuple[object, ...], int] = defaultdict(int)
        self._semaphores = [list(part.semaphores) for part in program.parts]
        self._barriers: dict[tuple[int, int], int] = defaultdict(int)
        self._proxies: dict[tuple[int, int, int], _Proxy] = {}
        self._new: list[Task] = [self._rank(rank) for rank in range(program.ranks)]
        self._running = program.ranks
        self._open: set[tuple[int, int, int]] = set()  # rank, block, thread
        self._wrong = 0
        self._results: dict[int, list[Array | None]] = {}

    def run(self) -> Interpretation:
        """Until all ranks have ended all calls, or nobody can go on."""
        try:
            run_in_any_order(self._new, self._random, lambda: self._running > 0)
        except (ValueError, IndexError):  # of numpy
            return Interpretation(self._wrong, "what an operation reads and what it writes differ in length")
        if self._running:
            blocks = sum(len(part.blocks) for part in self._program.parts)
            waiting = {(rank, number) for rank, number, _ in self._open}
            return Interpretation(self._wrong, f"{len(waiting)} of {blocks} blocks wait for ever")
        left = sum(len(fifo.parts) for fifo in self._fifos.values())
        return Interpretation(self._wrong, f"{left} parts of messages were never received" if left else None)

    # ---- ranks and their memory

    def _rank(self, rank: int) -> Task:
        """The caller: inputs, the blocks, outputs, and all that again."""
        for call in range(self._calls):
            memory = self._memory[rank]
            for buffer in memory.values():
                buffer[:] = self._data(rank, -2 - call, buffer.shape)
            memory[Memory.INPUT][:] = self._given(rank, call)
            blocks = self._program.parts[rank].blocks
            threads = range(self._threads)
            left = {(rank, number, thread) for number in range(len(blocks)) for thread in threads}
            self._open |= left
            for number in range(len(blocks)):
                arrived = [0] * self._threads
                self._new += [self._thread(rank, number, call, thread, arrived) for thread in threads]
            yield lambda left=left: self._open.isdisjoint(left)  # type: ignore[misc]
            expected = self._expected(rank, call)
            if expected is not None:
                self._wrong += int(np.count_nonzero(memory[Memory.OUTPUT] != expected))
            yield None
        self._running -= 1

    def _buffers(self, rank: int) -> dict[Memory, Array]:
        """Rows are chunks."""
        layout = self._layout[rank]
        cells = np.zeros((layout.start[Memory.SCRATCH], self._elements), dtype=np.int64)
        return {
            memory: cells[layout.start[memory] :][: layout.size[memory]]
            for memory in (Memory.INPUT, Memory.OUTPUT)
        }

    def _data(self, rank: int, call: int, shape: tuple[int, ...]) -> Array:
        source = np.random.default_rng((self._seed, rank, call + self._calls + 2))
        return source.integers(-(1 << 40), 1 << 40, shape)

    def _given(self, rank: int, call: int) -> Array:
        return self._data(rank, call, (self._layout[rank].size[Memory.INPUT], self._elements))

    def _expected(self, rank: int, call: int) -> Array | None:
        if call not in self._results:
            data = [self._given(other, call) for other in range(self._program.ranks)]
            self._results[call] = expected_outputs(self._program, data)
        return self._results[call][rank]

    def _rows(self, rank: int, call: int, span: Span, *, flags: bool = False) -> Array:
        """The chunks of a span."""
        owner = rank if span.rank is None else span.rank
        if span.memory is not Memory.SCRATCH:
            rows = self._memory[owner][span.memory]
        else:
            half = call % 2 if self._program.double_scratch else 0
            rows = (self._flags if flags else self._packets if span.packets else self._scratch)[owner][half]
        if not 0 <= span.start <= span.start + span.count <= len(rows):
            raise ProgramError(f"rank {rank}: {span} is beyond the {len(rows)} chunks of {span.memory}")
        return rows[span.start : span.start + span.count]

    # ---- thread blocks

    def _thread(self, rank: int, number: int, call: int, thread: int, arrived: list[int]) -> Task:
        block = self._program.parts[rank].blocks[number]
        ends = block.connections

        def meet() -> Callable[[], bool]:
            arrived[thread] += 1
            goal = arrived[thread]
            return lambda: min(arrived) >= goal

        for loop, (place, operation) in (
            (loop, one) for loop in range(self._loops) for one in enumerate(block.operations)
        ):
            yield None
            match operation:
                case Step():
                    yield from self._step(rank, number, operation, call, loop)
                    if operation.posts:
                        self._posted[rank][number] = (call, loop, place)
                case Synchronize():
                    yield meet()
                case Barrier(number=barrier, blocks=blocks):
                    yield meet()
                    if not thread:
                        key = rank, barrier
                        self._barriers[key] += 1
                        goal = -(-self._barriers[key] // blocks) * blocks
                        yield lambda key=key, goal=goal: self._barriers[key] >= goal  # type: ignore[misc]
                    yield meet()
                case Signal(channels=channels) | Wait(channels=channels) | Flush(channels=channels):
                    for channel in channels[thread :: self._threads]:
                        yield self._control(rank, ends[channel], operation)
                case Acquire(semaphores=semaphores) | Release(semaphores=semaphores):
                    for semaphore in semaphores[thread :: self._threads]:
                        yield self._count(rank, semaphore, isinstance(operation, Release))
                case Move(channel=None):
                    yield from self._move(rank, call, thread, operation)
                case Move(channel=channel) if operation.thread % THREADS == thread and channel is not None:
                    proxy = self._proxy(rank, ends[channel])
                    proxy.tell(lambda move=operation: self._copy(rank, call, move))  # type: ignore[misc]
        self._open.discard((rank, number, thread))

    # ---- two-sided steps

    def _step(self, rank: int, number: int, step: Step, call: int, loop: int) -> Task:
        posted = self._posted[rank]
        for after in step.after:
            goal = call, loop, after.step
            yield lambda at=after.block, goal=goal: at < len(posted) and posted[at] >= goal  # type: ignore[misc]
        for first in range(0, step.count, self._together):
            source, target = (
                None if span is None else self._part(self._rows(rank, call, span), first, loop)
                for span in (step.source, step.target)
            )
            yield from self._message(rank, number, step.code, source, target)

    def _part(self, rows: Array, first: int, loop: int) -> Array:
        """The elements of a message: whole chunks, or a part of one."""
        if self._loops == 1:
            return rows[first : first + self._together].reshape(-1)
        return rows[first, self._elements * loop // self._loops : self._elements * (loop + 1) // self._loops]

    def _message(
        self, rank: int, number: int, code: Code, source: Array | None, target: Array | None
    ) -> Task:
        """One message of a step, in the parts in which it passes a FIFO."""
        block = self._program.parts[rank].blocks[number]
        early = self._program.protocol is not Protocol.SIMPLE
        come = self._fifo(block.receive, rank, block.channel) if code.receives else None
        go = self._fifo(rank, block.send, block.channel) if code.sends else None
        length = next(len(row) for row in (source, target) if row is not None)
        parts = self._shape.parts
        for part in range(parts):
            span = slice(length * part // parts, length * (part + 1) // parts)
            if go is not None:
                yield lambda: go.has_room
            value = None
            if source is not None and early:
                value = source[span].copy()
                yield None
            if come is not None:
                yield lambda: bool(come.parts)
            if source is not None and not early:
                value = source[span].copy()
            if come is not None:
                message = come.take()
                value = message if value is None else value + message
            assert value is not None, "a step reads or receives"
            if code is Code.REDUCE and target is not None:
                value = value + target[span]
            yield None
            if go is not None and early:
                go.parts.append(value)
                yield None
            if target is not None:
                target[span] = value
                yield None
            if come is not None:
                come.held -= 1
            if go is not None and not early:
                go.parts.append(value)

    def _fifo(self, sender: int | None, receiver: int | None, channel: int) -> _SlotQueue:
        if sender is None or receiver is None:
            return _SlotQueue(0)  # nobody at the other end
        return self._fifos.setdefault((sender, receiver, channel), _SlotQueue(self._shape.depth))

    # ---- puts and signals

    def _control(
        self, rank: int, end: Connection, operation: Signal | Wait | Flush
    ) -> Callable[[], bool] | None:
        """A signal, a wait or a flush of one thread; what it waits for."""
        if isinstance(operation, Wait):
            key = (end.peer, rank, end.kind, end.number)
            self._waits[key] += 1
            goal = self._waits[key]
            return lambda: self._signals[key] >= goal
        if isinstance(operation, Flush):
            proxy = self._proxy(rank, end)
            told = proxy.told
            return lambda: proxy.done >= told
        key = (rank, end.peer, end.kind, end.number)

        def signal() -> None:
            self._signals[key] += 1

        if end.kind == "port":
            self._proxy(rank, end).tell(signal)
        else:
            signal()
        return None

    def _count(self, rank: int, semaphore: int, release: bool) -> Callable[[], bool] | None:
        """One more or one less; what the thread waits for."""
        values = self._semaphores[rank]
        if not 0 <= semaphore < len(values):
            raise ProgramError(
                f"rank {rank}: semaphore {semaphore} must be below {len(values)}, of which there are"
            )
        old = values[semaphore]
        values[semaphore] += 1 if release else -1
        return None if release or old > 0 else lambda: values[semaphore] >= old

    def _proxy(self, rank: int, end: Connection) -> _Proxy:
        key = rank, end.peer, end.number
        if key not in self._proxies:
            self._proxies[key] = _Proxy()
            self._new.append(self._proxies[key].task())
        return self._proxies[key]

    def _move(self, rank: int, call: int, thread: int, move: Move) -> Task:
        """A thread's elements of a move, chunk by chunk."""
        unit = _PACKED if move.packets else _PLAIN
        for offset in range(move.count):
            place = offset * self._elements + np.arange(self._elements)
            mine = np.flatnonzero(place // unit % self._threads == thread)
            value: Array | None = None
            for source in move.sources:
                row = self._rows(rank, call, source)[offset]
                if source.packets:
                    flags = self._rows(rank, call, source, flags=True)[offset]
                    yield lambda flags=flags, mine=mine: bool((flags[mine] == call + 1).all())  # type: ignore[misc]
                else:
                    yield None
                value = row[mine].copy() if value is None else value + row[mine]
            assert value is not None, "a move has sources"
            for target in move.targets:
                yield None
                self._rows(rank, call, target)[offset][mine] = value
                if target.packets:
                    self._rows(rank, call, target, flags=True)[offset][mine] = call + 1

    def _copy(self, rank: int, call: int, move: Move) -> None:
        """What a proxy does: packets with their flags as they are."""
        for flags in (False, True) if move.packets else (False,):
            source = self._rows(rank, call, move.sources[0], flags=flags)
            for target in move.targets:
                self._rows(rank, call, target, flags=flags)[:] = source

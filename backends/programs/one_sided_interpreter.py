"""Runs a one-sided program on numpy arrays as MSCCL++'s device code would, in random orders, call after call.

A thread block is a few threads, each of which goes through all operations with elements of its own; proxies
do what they are told at any time later; ranks begin their next call once they have ended one. Who goes on is
drawn anew at each access, or some are slow for long. Shares no code with the checker.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable

import numpy as np

from arborcast.backends.programs.interpreter import (
    Array,
    Interpretation,
    Task,
    expected_outputs,
    input_and_output,
    run_in_any_order,
)
from arborcast.backends.programs.program import (
    Acquire,
    Barrier,
    Connection,
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

THREADS = 2
"""Of a block: enough to show what is missing between them."""

_PLAIN, _PACKED = 2, 1  # consecutive elements of one thread, where it moves data and where it moves packets


def interpret_one_sided(
    program: GlobalProgram, *, in_place: bool, seed: int = 0, calls: int = 3, elements: int = 4
) -> Interpretation:
    """Run a program some times in a row, on data that differ in every element, and compare every output.

    Args:
        program: one-sided.
        in_place: whether outputs lie over inputs.
        seed: of the data and of the order.
        calls: how many follow each other, without anything else between them.
        elements: of a chunk, which threads share.
    """
    return _Machine(program, in_place, seed, calls, elements).run()


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
    def __init__(self, program: GlobalProgram, in_place: bool, seed: int, calls: int, elements: int) -> None:
        self._program = program
        self._in_place = in_place
        self._seed = seed
        self._calls = calls
        self._elements = elements
        self._random = random.Random(seed)
        self._layout = [input_and_output(program, rank) for rank in range(program.ranks)]
        self._memory = [self._buffers(rank) for rank in range(program.ranks)]
        shapes = [(2, part.scratch_chunks, elements) for part in program.parts]
        self._scratch = [self._data(rank, -1, shape) for rank, shape in enumerate(shapes)]
        self._packets = [np.zeros(shape, dtype=np.int64) for shape in shapes]
        self._flags = [np.zeros(shape, dtype=np.int64) for shape in shapes]
        self._signals: dict[tuple[object, ...], int] = defaultdict(int)
        self._waits: dict[tuple[object, ...], int] = defaultdict(int)
        self._semaphores = [list(part.semaphores) for part in program.parts]
        self._barriers: dict[tuple[int, int], int] = defaultdict(int)
        self._proxies: dict[tuple[int, int, int], _Proxy] = {}
        self._new: list[Task] = [self._rank(rank) for rank in range(program.ranks)]
        self._running = program.ranks
        self._wrong = 0
        self._results: dict[int, list[Array | None]] = {}

    def run(self) -> Interpretation:
        """Until all ranks have ended all calls, or nobody can go on."""
        stuck = run_in_any_order(self._new, self._random, lambda: self._running > 0)
        return Interpretation(self._wrong, f"{stuck} threads wait for ever" if stuck else None)

    # ---- ranks and their memory

    def _rank(self, rank: int) -> Task:
        """The caller: inputs, the blocks, outputs, and all that again."""
        for call in range(self._calls):
            memory = self._memory[rank]
            for buffer in memory.values():
                buffer[:] = self._data(rank, -2 - call, buffer.shape)
            memory[Memory.INPUT][:] = self._given(rank, call)
            blocks = self._program.parts[rank].blocks
            ended = [0]
            for number in range(len(blocks)):
                arrived = [0] * THREADS
                for thread in range(THREADS):
                    self._new.append(self._thread(rank, number, call, thread, arrived, ended))
            everybody = len(blocks) * THREADS
            yield lambda ended=ended, everybody=everybody: ended[0] == everybody  # type: ignore[misc]
            expected = self._expected(rank, call)
            if expected is not None:
                self._wrong += int(np.count_nonzero(memory[Memory.OUTPUT] != expected))
            yield None
        self._running -= 1

    def _buffers(self, rank: int) -> dict[Memory, Array]:
        given, wanted = self._layout[rank]
        large = np.zeros((max(given, wanted), self._elements), dtype=np.int64)
        if not self._in_place:
            return {Memory.INPUT: large[:given].copy(), Memory.OUTPUT: large[:wanted].copy()}
        block = self._program.chunks // self._program.ranks
        own = large[rank * block : (rank + 1) * block]
        return {
            Memory.INPUT: own if given < wanted else large[:given],
            Memory.OUTPUT: own if wanted < given else large[:wanted],
        }

    def _data(self, rank: int, call: int, shape: tuple[int, ...]) -> Array:
        source = np.random.default_rng((self._seed, rank, call + self._calls + 2))
        return source.integers(-(1 << 40), 1 << 40, shape)

    def _given(self, rank: int, call: int) -> Array:
        return self._data(rank, call, (self._layout[rank][0], self._elements))

    def _expected(self, rank: int, call: int) -> Array | None:
        if call not in self._results:
            given = [self._given(other, call) for other in range(self._program.ranks)]
            self._results[call] = expected_outputs(self._program, given)
        return self._results[call][rank]

    # ---- thread blocks

    def _thread(  # noqa: PLR0912  (a table of cases)
        self, rank: int, number: int, call: int, thread: int, arrived: list[int], ended: list[int]
    ) -> Task:
        block = self._program.parts[rank].blocks[number]
        ends = block.connections

        def meet() -> Callable[[], bool]:
            arrived[thread] += 1
            goal = arrived[thread]
            return lambda: min(arrived) >= goal

        for operation in block.operations:
            yield None
            match operation:
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
                    for channel in channels[thread::THREADS]:
                        yield self._control(rank, ends[channel], operation)
                case Acquire(semaphores=semaphores):
                    for semaphore in semaphores[thread::THREADS]:
                        values = self._semaphores[rank]
                        _check_semaphore(semaphore, len(values), rank)
                        old = values[semaphore]
                        values[semaphore] -= 1
                        if old <= 0:
                            yield lambda at=semaphore, old=old: self._semaphores[rank][at] >= old  # type: ignore[misc]
                case Release(semaphores=semaphores):
                    for semaphore in semaphores[thread::THREADS]:
                        _check_semaphore(semaphore, len(self._semaphores[rank]), rank)
                        self._semaphores[rank][semaphore] += 1
                case Move(channel=None):
                    yield from self._move(rank, call, thread, operation)
                case Move(channel=channel) if operation.thread % THREADS == thread and channel is not None:
                    proxy = self._proxy(rank, ends[channel])
                    proxy.tell(lambda move=operation: self._copy(rank, call, move))  # type: ignore[misc]
        ended[0] += 1

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
            mine = np.flatnonzero(place // unit % THREADS == thread)
            value: Array | None = None
            for source in move.sources:
                row = self._row(rank, call, source, offset)
                if source.packets:
                    flags = self._row(rank, call, source, offset, flags=True)
                    yield lambda flags=flags, mine=mine: bool((flags[mine] == call + 1).all())  # type: ignore[misc]
                else:
                    yield None
                value = row[mine].copy() if value is None else value + row[mine]
            assert value is not None, "a move has sources"
            for target in move.targets:
                yield None
                self._row(rank, call, target, offset)[mine] = value
                if target.packets:
                    self._row(rank, call, target, offset, flags=True)[mine] = call + 1

    def _copy(self, rank: int, call: int, move: Move) -> None:
        """What a proxy does: packets with their flags as they are."""
        for offset in range(move.count):
            for flags in (False, True) if move.packets else (False,):
                source = self._row(rank, call, move.sources[0], offset, flags=flags)
                for target in move.targets:
                    self._row(rank, call, target, offset, flags=flags)[:] = source

    def _row(self, rank: int, call: int, span: Span, offset: int, *, flags: bool = False) -> Array:
        """One chunk of memory."""
        owner = rank if span.rank is None else span.rank
        if span.memory is not Memory.SCRATCH:
            rows = self._memory[owner][span.memory]
        else:
            half = call % 2 if self._program.double_scratch else 0
            rows = (self._flags if flags else self._packets if span.packets else self._scratch)[owner][half]
        if not 0 <= span.start + offset < len(rows):
            raise ProgramError(f"rank {rank}: {span} is beyond the {len(rows)} chunks of {span.memory}")
        return rows[span.start + offset]  # type: ignore[no-any-return]


def _check_semaphore(number: int, count: int, rank: int) -> None:
    if not 0 <= number < count:
        raise ProgramError(f"rank {rank}: semaphore {number} must be below {count}, of which there are")

"""Runs a program on numpy arrays as device code would, its thread blocks in random order, call after call.

Every thread is a task that stops wherever another might come in between: while it waits for a flag, a signal,
a message or room in a FIFO, and between reading memory and writing it. Which task goes on is drawn anew at
every stop, or by priorities that are drawn now and then, so that some are very slow. A block of two-sided
steps acts as one thread. One of puts and signals has a few, each with elements of its own; its proxies do
what they are told at any time later, and ranks begin their next call once they have ended one. Loops go
through two pieces of a chunk. With the checker, whose verdicts it can show to be wrong, it shares only what
collectives ask of buffers, and which signals and semaphores an operation counts.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from arborcast.backends.programs.block_tasks import BlockTasks, BlockThread, Task
from arborcast.backends.programs.checking.memory import Value, buffers, given, wanted
from arborcast.backends.programs.limits import fifo_of
from arborcast.backends.programs.program import (
    Acquire,
    Code,
    Connection,
    GlobalProgram,
    Memory,
    Move,
    ProgramError,
    Release,
    Span,
    Step,
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

_Link: TypeAlias = tuple[int | None, int | None, int]
"""Sender, receiver and channel."""

_STEPS = 32
"""Bits for the steps of a block, where the loops in which they were done are counted, too."""


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
    for rank, _, _, operation in program.operations:
        known = len(program.parts[rank].semaphores)
        if isinstance(operation, (Acquire, Release)) and (most := max(operation.semaphores)) >= known:
            raise ProgramError(f"rank {rank}: semaphore {most} must be below {known}, of which there are")
    return _Machine(program, in_place, seed, elements, calls, loops, together).run()


def run_in_any_order(
    new: list[Task],
    counts: Mapping[Hashable, int],
    chance: random.Random,
    goes_on: Callable[[], bool],
) -> None:
    """Let tasks go on in random order until all have ended or none can.

    Args:
        new: the tasks; more may be put there while others run.
        counts: what happened how often: tasks wait until something did, for what they ask, or for nothing.
        chance: draws who goes on, anew at each stop or by priorities that change now and then.
        goes_on: false once enough has happened.
    """
    uniform, draw = chance.random() < _HALF, chance.random
    waiting: list[tuple[Task, Any]] = []
    stalled: list[tuple[Task, Any]] = []
    progress = True
    while goes_on():
        if new:
            waiting += [(task, None) for task in new]
            new.clear()
            chance.shuffle(waiting)
        if not waiting:
            if not progress or not stalled:
                return
            waiting, stalled, progress = stalled, [], False
            chance.shuffle(waiting)
        if uniform:
            at = int(draw() * len(waiting))
            waiting[at], waiting[-1] = waiting[-1], waiting[at]
        task, until = waiting.pop()
        if until is not None and not (until() if callable(until) else counts[until[0]] >= until[1]):
            stalled.append((task, until))
            continue
        progress = True
        try:
            waiting.append((task, next(task)))
        except StopIteration:
            continue
        if not uniform and draw() < _NOW_AND_THEN:
            chance.shuffle(waiting)


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


class _Machine(BlockTasks):
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
        super().__init__(program, THREADS if program.one_sided else 1)
        self._seed = seed
        self._elements = elements
        self._calls = calls
        self._loops = loops
        self._together = together
        self._random = random.Random(seed)
        self._layout = [buffers(program, rank, in_place=in_place) for rank in range(program.ranks)]
        self._memory = [self._buffers(rank) for rank in range(program.ranks)]
        shapes = [(2, part.scratch_chunks, elements) for part in program.parts]
        self._scratch = [self._data(rank, -1, shape) for rank, shape in enumerate(shapes)]
        self._packets = [np.zeros(shape, dtype=np.int64) for shape in shapes]
        self._flags = [np.zeros(shape, dtype=np.int64) for shape in shapes]
        self._fifo = fifo_of(program.protocol)
        self._parts: dict[_Link, deque[Array]] = defaultdict(deque)  # of messages on their way
        self._new: list[Task] = [self._rank(rank) for rank in range(program.ranks)]
        self._running = program.ranks
        self._open: set[BlockThread] = set()
        self._wrong = 0
        self._results: dict[int, list[Array | None]] = {}

    def run(self) -> Interpretation:
        """Until all ranks have ended all calls, or nobody can go on."""
        try:
            run_in_any_order(self._new, self.counts, self._random, lambda: self._running > 0)
        except (ValueError, IndexError):  # of numpy
            return Interpretation(self._wrong, "what an operation reads and what it writes differ in length")
        if self._running:
            blocks = sum(len(part.blocks) for part in self.program.parts)
            waiting = {by[:2] for by in self._open}
            return Interpretation(self._wrong, f"{len(waiting)} of {blocks} blocks wait for ever")
        left = sum(map(len, self._parts.values()))
        return Interpretation(self._wrong, f"{left} parts of messages were never received" if left else None)

    # ---- ranks and their memory

    def _rank(self, rank: int) -> Task:
        """The caller: inputs, the blocks, outputs, and all that again."""
        for call in range(self._calls):
            memory = self._memory[rank]
            for buffer in memory.values():
                buffer[:] = self._data(rank, -2 - call, buffer.shape)
            memory[Memory.INPUT][:] = self._given(rank, call)
            blocks = range(len(self.program.parts[rank].blocks))
            left = {BlockThread(rank, at, thread, call) for at in blocks for thread in range(self.threads)}
            self._open |= left
            self._new += map(self._thread, sorted(left))
            yield lambda left=left: self._open.isdisjoint(left)
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
            data = [self._given(other, call) for other in range(self.program.ranks)]
            self._results[call] = expected_outputs(self.program, data)
        return self._results[call][rank]

    def _rows(self, rank: int, call: int, span: Span, *, flags: bool = False) -> Array:
        """The chunks of a span."""
        owner = rank if span.rank is None else span.rank
        if span.memory is not Memory.SCRATCH:
            rows = self._memory[owner][span.memory]
        else:
            half = call % 2 if self.program.double_scratch else 0
            rows = (self._flags if flags else self._packets if span.packets else self._scratch)[owner][half]
        if not 0 <= span.start <= span.start + span.count <= len(rows):
            raise ProgramError(f"rank {rank}: {span} is beyond the {len(rows)} chunks of {span.memory}")
        return rows[span.start : span.start + span.count]

    # ---- thread blocks

    def _thread(self, by: BlockThread) -> Task:
        operations = self.program.parts[by.rank].blocks[by.block].operations
        for loop in range(by.call * self._loops, (by.call + 1) * self._loops):
            for place, operation in enumerate(operations):
                yield None
                if isinstance(operation, Step):
                    yield from self._step(by, operation, loop)
                    if operation.posts:
                        self.counts["posted", by.rank, by.block] = (loop << _STEPS) + place + 1
                else:
                    yield from self.operation(by, operation)
        self._open.discard(by)

    # ---- two-sided steps

    def _step(self, by: BlockThread, step: Step, loop: int) -> Task:
        for after in step.after:
            yield ("posted", by.rank, after.block), (loop << _STEPS) + after.step + 1
        for first in range(0, step.count, self._together):
            source, target = (
                None if span is None else self._part(self._rows(by.rank, by.call, span), first, loop)
                for span in (step.source, step.target)
            )
            yield from self._message(by, step.code, source, target)

    def _part(self, rows: Array, first: int, loop: int) -> Array:
        """The elements of a message: whole chunks, or a part of one."""
        if self._loops == 1:
            return rows[first : first + self._together].reshape(-1)
        loop %= self._loops
        return rows[first, self._elements * loop // self._loops : self._elements * (loop + 1) // self._loops]

    def _message(self, by: BlockThread, code: Code, source: Array | None, target: Array | None) -> Task:
        """One message of a step, in the parts in which it passes a FIFO.

        A slot is free again once what was in it is worked in; where nobody is at the other end, none is.
        """
        block = self.program.parts[by.rank].blocks[by.block]
        early = self.program.protocol is not Protocol.SIMPLE
        come = (block.receive, by.rank, block.channel) if code.receives else None
        go = (by.rank, block.send, block.channel) if code.sends else None
        depth = 0 if block.send is None else self._fifo.depth
        length = next(len(row) for row in (source, target) if row is not None)
        parts = self._fifo.parts
        for part in range(parts):
            span = slice(length * part // parts, length * (part + 1) // parts)
            if go is not None:
                key, goal = self.next(("freed", go))
                yield key, goal - depth
            value = None
            if source is not None and early:
                value = source[span].copy()
                yield None
            if come is not None:
                yield self.next(("sent", come))
            if source is not None and not early:
                value = source[span].copy()
            if come is not None:
                message = self._parts[come].popleft()
                value = message if value is None else value + message
            assert value is not None, "a step reads or receives"
            if code is Code.REDUCE and target is not None:
                value = value + target[span]
            yield None
            if go is not None and early:
                self._send(go, value)
                yield None
            if target is not None:
                target[span] = value
                yield None
            if come is not None:
                self.tell(("freed", come))
            if go is not None and not early:
                self._send(go, value)

    def _send(self, link: _Link, value: Array) -> None:
        self._parts[link].append(value)
        self.tell(("sent", link))

    # ---- puts and signals

    def start(self, task: Task) -> None:
        """Let a proxy go on beside the others."""
        self._new.append(task)

    def signal(self, by: BlockThread, end: Connection, proxy: Hashable | None) -> None:
        """There at once: proxies are late in all that they do."""
        self.tell((by.rank, end.peer, end.kind, end.number))

    def put(self, by: BlockThread, move: Move, proxy: Hashable | None) -> Task:
        """A thread's elements; all that a proxy copies, packets with their flags as they are."""
        if proxy is None:
            yield from self._move(by.rank, by.call, by.number, move)
            return
        for flags in (False, True) if move.packets else (False,):
            source = self._rows(by.rank, by.call, move.sources[0], flags=flags)
            for target in move.targets:
                self._rows(by.rank, by.call, target, flags=flags)[:] = source

    def _move(self, rank: int, call: int, thread: int, move: Move) -> Task:
        """A thread's elements of a move, chunk by chunk."""
        unit = _PACKED if move.packets else _PLAIN
        for offset in range(move.count):
            place = offset * self._elements + np.arange(self._elements)
            mine = np.flatnonzero(place // unit % self.threads == thread)
            value: Array | None = None
            for source in move.sources:
                row = self._rows(rank, call, source)[offset]
                if source.packets:
                    flags = self._rows(rank, call, source, flags=True)[offset]
                    yield lambda flags=flags, mine=mine: bool((flags[mine] == call + 1).all())
                else:
                    yield None
                value = row[mine].copy() if value is None else value + row[mine]
            assert value is not None, "a move has sources"
            for target in move.targets:
                yield None
                self._rows(rank, call, target)[offset][mine] = value
                if target.packets:
                    self._rows(rank, call, target, flags=True)[offset][mine] = call + 1

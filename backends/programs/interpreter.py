"""Runs a program on numpy arrays as MSCCL's device code would, with thread blocks in random order.

Every block is a task that stops wherever another might come in between: while it waits for a flag, a message
or room in a FIFO, and between reading memory and writing it. Which task goes on is drawn anew at every stop,
or by priorities that are drawn now and then, so that some blocks are very slow. Shares no code with the
checker, whose verdicts it can show to be wrong.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from arborcast.backends.programs.limits import chunks_together, fifo_of
from arborcast.backends.programs.program import (
    Code,
    GlobalProgram,
    Memory,
    ProgramError,
    Protocol,
    Span,
    Step,
)
from arborcast.synth.collective import Kind

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
    loops: int = 1,
    together: int = 1,
    checked: Callable[[Array, Array], int] | None = None,
) -> Interpretation:
    """Run a program once, on data that differ in every element, and compare every output.

    Args:
        program: two-sided.
        in_place: whether outputs lie over inputs.
        seed: of the data and of the order of blocks.
        elements: of a chunk.
        loops: how often blocks go through the program, each time for another part of every chunk.
        together: chunks that fit a message; more than one only where there is one loop.
        checked: counts wrong elements of (found, expected); by default those that differ.

    Raises:
        ProgramError: an operation is one-sided, or reaches beyond a buffer.
    """
    machine = _Machine(program, in_place, seed, elements, loops, 1 if loops > 1 else together)
    hangs = machine.run()
    differ = checked or (lambda found, expected: int(np.count_nonzero(found != expected)))
    wrong = sum(
        differ(found, expected)
        for found, expected in zip(machine.outputs(), machine.expected(), strict=True)
        if expected is not None
    )
    return Interpretation(wrong, hangs)


class _Fifo:
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


class _Machine:
    def __init__(
        self, program: GlobalProgram, in_place: bool, seed: int, elements: int, loops: int, together: int
    ) -> None:
        self._program = program
        self._random = random.Random(seed)
        self._loops = loops
        self._elements = elements
        self._together = together
        self._shape = fifo_of(program.protocol)
        self._memory = [self._buffers(rank, in_place, seed) for rank in range(program.ranks)]
        self._inputs = [memory[Memory.INPUT].copy() for memory in self._memory]
        self._fifos: dict[tuple[int, int, int], _Fifo] = {}
        self._flags = [[(-1, -1)] * len(part.blocks) for part in program.parts]
        self._tasks = [
            self._block(rank, number)
            for rank, part in enumerate(program.parts)
            for number in range(len(part.blocks))
        ]

    def run(self) -> str | None:
        """Let tasks go on in random order until all have ended or none can."""
        waiting: list[tuple[Task, Callable[[], bool] | None]] = [(task, None) for task in self._tasks]
        uniform = self._random.random() < _HALF
        stalled: list[tuple[Task, Callable[[], bool] | None]] = []
        self._random.shuffle(waiting)
        progress = False
        while waiting or stalled:
            if not waiting:
                if not progress:
                    return f"{len(stalled)} of {len(self._tasks)} blocks wait for ever"
                waiting, stalled, progress = stalled, [], False
                self._random.shuffle(waiting)
            at = self._random.randrange(len(waiting)) if uniform else len(waiting) - 1
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
            except ValueError:  # of numpy
                return "a message is not of the length that its receiver expects"
            if not uniform and self._random.random() < _NOW_AND_THEN:
                self._random.shuffle(waiting)
        left = sum(len(fifo.parts) for fifo in self._fifos.values())
        return f"{left} parts of messages were never received" if left else None

    def outputs(self) -> list[Array]:
        """What stands in the outputs."""
        return [memory[Memory.OUTPUT] for memory in self._memory]

    def expected(self) -> list[Array | None]:  # noqa: PLR0911  (one of each kind)
        """What should; None where it does not matter."""
        given, ranks, root = self._inputs, self._program.ranks, self._program.root or 0
        block = self._program.chunks // ranks
        match self._program.kind:
            case Kind.ALLREDUCE:
                return [np.sum(given, axis=0)] * ranks
            case Kind.REDUCE:
                return [np.sum(given, axis=0) if rank == root else None for rank in range(ranks)]
            case Kind.REDUCE_SCATTER:
                total = np.sum(given, axis=0)
                return [total[rank * block : (rank + 1) * block] for rank in range(ranks)]
            case Kind.BROADCAST:
                return [given[root]] * ranks
            case Kind.ALLGATHER:
                return [np.concatenate(given)] * ranks
            case Kind.GATHER:
                return [np.concatenate(given) if rank == root else None for rank in range(ranks)]
            case Kind.SCATTER:
                return [given[root][rank * block : (rank + 1) * block] for rank in range(ranks)]
            case _:
                return [
                    np.concatenate([one[rank * block : (rank + 1) * block] for one in given])
                    for rank in range(ranks)
                ]

    def _buffers(self, rank: int, in_place: bool, seed: int) -> dict[Memory, Array]:
        """Rows are chunks. Garbage wherever nothing is given."""
        program = self._program
        whole, block, at_root = program.chunks, program.chunks // program.ranks, rank == program.root
        data = np.random.default_rng((seed, rank))

        def rows(count: int) -> Array:
            return data.integers(-(1 << 40), 1 << 40, (count, self._elements))

        match program.kind:
            case Kind.ALLGATHER | Kind.GATHER:
                given, wanted = block, whole if program.kind is Kind.ALLGATHER or at_root else 0
            case Kind.REDUCE_SCATTER | Kind.SCATTER:
                given, wanted = whole if program.kind is Kind.REDUCE_SCATTER or at_root else 0, block
            case _:
                given, wanted = whole, whole
        large = rows(max(given, wanted))
        first, second = (large, rows(wanted)) if given >= wanted else (rows(given), large)
        if in_place:
            own = slice(rank * block, (rank + 1) * block)
            first = large if given >= wanted else large[own] if given else first
            second = large if wanted >= given else large[own] if wanted else second
        return {
            Memory.INPUT: first,
            Memory.OUTPUT: second,
            Memory.SCRATCH: rows(program.parts[rank].scratch_chunks),
        }

    def _block(self, rank: int, number: int) -> Task:
        block = self._program.parts[rank].blocks[number]
        for loop in range(self._loops):
            for place, step in enumerate(block.operations):
                if not isinstance(step, Step):
                    raise ProgramError(f"rank {rank}: {type(step).__name__} is one-sided")
                for after in step.after:
                    yield self._flag(rank, after.block, (loop, after.step))
                for first in range(0, step.count, self._together):
                    yield from self._message(rank, number, step, first, loop)
                if step.posts:
                    self._flags[rank][number] = (loop, place)

    def _flag(self, rank: int, block: int, goal: tuple[int, int]) -> Callable[[], bool]:
        flags = self._flags[rank]
        return lambda: block < len(flags) and flags[block] >= goal

    def _message(self, rank: int, number: int, step: Step, first: int, loop: int) -> Task:
        """One message of a step, in the parts in which it passes a FIFO."""
        block = self._program.parts[rank].blocks[number]
        code, early = step.code, self._program.protocol is not Protocol.SIMPLE
        source = self._rows(rank, step.source, step.count, first, loop)
        target = self._rows(rank, step.target, step.count, first, loop)
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

    def _rows(self, rank: int, span: Span | None, count: int, first: int, loop: int) -> Array | None:
        """The elements of a message in memory: whole chunks, or a part of one."""
        if span is None:
            return None
        memory = self._memory[rank][span.memory]
        start, stop = span.start + first, span.start + min(count, first + self._together)
        if span.start < 0 or stop > len(memory):
            raise ProgramError(f"rank {rank}: {span} is beyond the {len(memory)} chunks of {span.memory}")
        part = slice(self._elements * loop // self._loops, self._elements * (loop + 1) // self._loops)
        if self._loops > 1:
            return memory[start, part]
        return memory[start:stop].reshape(-1)

    def _fifo(self, sender: int | None, receiver: int | None, channel: int) -> _Fifo:
        if sender is None or receiver is None:
            return _Fifo(0)  # nobody at the other end
        key = sender, receiver, channel
        if key not in self._fifos:
            self._fifos[key] = _Fifo(self._shape.depth)
        return self._fifos[key]


def interpret_all(program: GlobalProgram, seeds: Sequence[int], *, elements: int = 4) -> Interpretation:
    """Runs under several orders, in every way of calling that the program is for; the first that is wrong."""
    result = Interpretation(0)
    for seed in seeds:
        for in_place in (True, False):
            if program.in_place if in_place else program.out_of_place:
                # A chunk that does not fit a slot is gone through in several loops.
                together = chunks_together(program)
                result = interpret(
                    program,
                    in_place=in_place,
                    seed=seed,
                    elements=elements,
                    loops=1 + seed % 2 if together == 1 else 1,
                    together=together,
                )
                if not result.correct:
                    return result
    return result

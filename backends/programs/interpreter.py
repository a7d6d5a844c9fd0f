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


def input_and_output(program: GlobalProgram, rank: int) -> tuple[int, int]:
    """Chunks of a rank's input and of its output."""
    whole, block, at_root = program.chunks, program.chunks // program.ranks, rank == program.root
    match program.kind:
        case Kind.ALLGATHER | Kind.GATHER:
            return block, whole if program.kind is Kind.ALLGATHER or at_root else 0
        case Kind.REDUCE_SCATTER | Kind.SCATTER:
            return whole if program.kind is Kind.REDUCE_SCATTER or at_root else 0, block
        case _:
            return whole, whole


def expected_outputs(  # noqa: PLR0911  (one of each kind)
    program: GlobalProgram, given: Sequence[Array]
) -> list[Array | None]:
    """What must stand in the output of each rank, by the inputs of all; None where it does not matter."""
    ranks, root = range(program.ranks), program.root or 0
    block = program.chunks // program.ranks
    of_rank = [slice(rank * block, (rank + 1) * block) for rank in ranks]
    match program.kind:
        case Kind.ALLREDUCE:
            return [np.sum(given, axis=0)] * program.ranks
        case Kind.REDUCE:
            return [np.sum(given, axis=0) if rank == root else None for rank in ranks]
        case Kind.REDUCE_SCATTER:
            total = np.sum(given, axis=0)
            return [total[mine] for mine in of_rank]
        case Kind.BROADCAST:
            return [given[root]] * program.ranks
        case Kind.ALLGATHER:
            return [np.concatenate(given)] * program.ranks
        case Kind.GATHER:
            return [np.concatenate(given) if rank == root else None for rank in ranks]
        case Kind.SCATTER:
            return [given[root][mine] for mine in of_rank]
        case _:
            return [np.concatenate([one[mine] for one in given]) for mine in of_rank]


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

    def run(self) -> str | None:
        """Let tasks go on in random order; why they did not end as they should."""
        tasks = [
            self._block(rank, number)
            for rank, part in enumerate(self._program.parts)
            for number in range(len(part.blocks))
        ]
        count = len(tasks)
        try:
            stuck = run_in_any_order(tasks, self._random)
        except ValueError:  # of numpy
            return "a message is not of the length that its receiver expects"
        if stuck:
            return f"{stuck} of {count} blocks wait for ever"
        left = sum(len(fifo.parts) for fifo in self._fifos.values())
        return f"{left} parts of messages were never received" if left else None

    def outputs(self) -> list[Array]:
        """What stands in the outputs."""
        return [memory[Memory.OUTPUT] for memory in self._memory]

    def expected(self) -> list[Array | None]:
        """What should; None where it does not matter."""
        return expected_outputs(self._program, self._inputs)

    def _buffers(self, rank: int, in_place: bool, seed: int) -> dict[Memory, Array]:
        """Rows are chunks. Garbage wherever nothing is given."""
        program = self._program
        block = program.chunks // program.ranks
        data = np.random.default_rng((seed, rank))

        def rows(count: int) -> Array:
            return data.integers(-(1 << 40), 1 << 40, (count, self._elements))

        given, wanted = input_and_output(program, rank)
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

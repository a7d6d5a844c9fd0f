"""Executes the programs of all ranks in one process, on numpy arrays, as slyly as the rules allow.

It is the reference of what a program means. A transport may be faster at one moment and slower at another;
here a seed decides, and a program is right only if it is right for every seed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum

import numpy as np
from numpy.typing import DTypeLike

from arborcast.backends.lowering.layout import Buffer, BufferSlice
from arborcast.backends.lowering.program import Copy, Program, Receive, Reduce, Send
from arborcast.backends.measure.job import Array, Reduction
from tests.support.deadlock import DeadlockError, check_deadlock, describe, meet
from tests.support.definition import combine, finish


class Freedom(StrEnum):
    """What a transport may do.

    With `BLOCKING` each rank does one operation after the other, and a message passes when both ends have
    come to it. With `DATAFLOW` any operation may happen as soon as those it names in `after` are complete,
    however far ahead, and the data of a message is read and written at the last moment.
    """

    BLOCKING = "blocking"
    DATAFLOW = "dataflow"


def interpret(
    programs: Sequence[Program],
    inputs: Sequence[Array | None],
    *,
    reduction: Reduction = Reduction.SUM,
    dtype: DTypeLike = np.int64,
    freedom: Freedom = Freedom.BLOCKING,
    seed: int = 0,
) -> tuple[Array, ...]:
    """The output buffers after all programs have run; empty for ranks that get nothing.

    Args:
        programs: of ranks 0, 1, 2, ... in this order.
        inputs: of each rank its data, None for a rank that gives none.
        reduction: how contributions are combined.
        dtype: of all buffers.
        freedom: what may happen when.
        seed: decides among all that may happen next, where it matters.

    Raises:
        DeadlockError: ranks wait for one another for ever.
        ValueError: a rank's data is not as long as its buffer.
    """
    memories = [
        RankMemory(program, array, np.dtype(dtype)) for program, array in zip(programs, inputs, strict=True)
    ]
    machine = Machine(memories, reduction)
    if freedom is Freedom.BLOCKING:
        check_deadlock(programs, machine)  # whose order decides nothing
    else:
        _run_dataflow(programs, machine, random.Random(seed))
    for program, memory in zip(programs, memories, strict=True):
        finish(reduction, memory.buffers[Buffer.OUTPUT], program.contributors)
    return tuple(memory.buffers[Buffer.OUTPUT] for memory in memories)


class RankMemory:
    """The buffers of one rank; what nobody has written yet holds a value that would show."""

    def __init__(self, program: Program, given: Array | None, dtype: np.dtype[np.generic]) -> None:
        poison = np.nan if dtype.kind == "f" else -(2**30) + 7
        self.buffers = {buffer: np.full(program.elements(buffer), poison, dtype) for buffer in Buffer}
        if given is not None:
            filled = self.buffers[Buffer.OUTPUT if program.in_place else Buffer.INPUT]
            if len(given) != len(filled):
                raise ValueError(f"rank {program.rank}: needs {len(filled)} elements, got {len(given)}")
            filled[:] = given

    def __getitem__(self, part: BufferSlice) -> Array:
        return self.buffers[part.buffer][part.start : part.stop]


class Machine:
    """Carries out single operations."""

    def __init__(self, memories: Sequence[RankMemory], reduction: Reduction) -> None:
        self._memories = memories
        self._reduction = reduction

    def local(self, rank: int, operation: Reduce | Copy) -> None:
        memory = self._memories[rank]
        if isinstance(operation, Reduce):
            combine(self._reduction, memory[operation.into], memory[operation.source])
        else:
            memory[operation.into][:] = memory[operation.source]

    def deliver(self, src: int, send: Send, receive: Receive) -> None:
        self._memories[send.peer][receive.into][:] = self._memories[src][send.source]


def _run_dataflow(programs: Sequence[Program], machine: Machine, chance: random.Random) -> None:
    receives = {
        (operation.peer, program.rank, operation.tag): index
        for program in programs
        for index, operation in enumerate(program.operations)
        if isinstance(operation, Receive)
    }
    # A message counts as one action, known by its send; it needs what either end needs.
    waiting = {
        (program.rank, index)
        for program in programs
        for index, operation in enumerate(program.operations)
        if not isinstance(operation, Receive)
    }
    done: set[tuple[int, int]] = set()

    def ends(rank: int, index: int) -> list[tuple[int, int]]:
        operation = programs[rank].operations[index]
        if not isinstance(operation, Send):
            return [(rank, index)]
        return [(rank, index), (operation.peer, receives[rank, operation.peer, operation.tag])]

    def ready(rank: int, index: int) -> bool:
        return all(
            (owner, before) in done
            for owner, position in ends(rank, index)
            for before in programs[owner].operations[position].after
        )

    while waiting:
        possible = sorted(action for action in waiting if ready(*action))
        if not possible:
            raise DeadlockError(describe({rank: programs[rank].operations[i] for rank, i in waiting}))
        rank, index = chance.choice(possible)
        operation = programs[rank].operations[index]
        if isinstance(operation, Send):
            peer, position = ends(rank, index)[1]
            receive = programs[peer].operations[position]
            assert isinstance(receive, Receive) and meet(rank, operation, peer, receive)
            machine.deliver(rank, operation, receive)
        elif isinstance(operation, Reduce | Copy):
            machine.local(rank, operation)
        waiting.remove((rank, index))
        done.update(ends(rank, index))

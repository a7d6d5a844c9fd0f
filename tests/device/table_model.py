"""Does what tables say, on arrays: as the kernel would, but one row of one program after another.

Programs take turns in an order that is drawn, so that a piece meets others wherever it can. Fast enough for
the corpus; what is right in every order is for `tests.support.device_check` to say.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from arborcast.backends.device.tables import (
    FIRST_STAGING,
    LENGTH,
    OUTPUT,
    SIGNALS,
    SOURCES,
    TARGETS,
    TIME,
    WAITS,
    Shape,
    Tables,
)

Array = npt.NDArray[Any]


class Memory:
    """Slots and flags of all ranks, which calls follow each other in.

    Args:
        shape: of the plan.
        dtype: of elements.
    """

    def __init__(self, shape: Shape, dtype: Any = np.int64) -> None:
        self.shape = shape
        self.staging = [np.zeros(size, dtype) for size in shape.staging]
        self.flags = [np.zeros((size, shape.lanes), np.int64) for size in shape.flags]
        self.done = 0  # pieces of all calls


def total_of(sources: Sequence[Array]) -> Array:
    """The sum of arrays, in their order."""
    return sum(sources[1:], start=sources[0])


def run_model(
    memory: Memory,
    tables: Sequence[Tables],
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    seed: int = 0,
    total: Callable[[Sequence[Array]], Array] = total_of,
) -> None:
    """One call of all ranks.

    Args:
        memory: what calls before have left.
        tables: of all ranks, for these lengths.
        inputs: of all ranks.
        outputs: of all ranks; the same array where a rank works in place.
        seed: of the order.
        total: what an instruction makes of its sources.

    Raises:
        RuntimeError: programs wait for ever.
    """
    running = [
        _program(memory, table, rank, (inputs[rank], outputs[rank]), (group, lane), total)
        for rank, table in enumerate(tables)
        for group in range(len(table.groups) - 1)
        for lane in range(memory.shape.lanes)
    ]
    draw = random.Random(seed)
    while running:
        draw.shuffle(running)
        before = len(running)
        moved, left = False, []
        for program in running:
            turn = next(program, None)
            moved |= turn is not False
            if turn is not None:
                left.append(program)
        running = left
        if not moved and len(running) == before:
            raise RuntimeError("device model: all programs that are left wait for flags that nobody raises")
    memory.done += tables[0].pieces


def _program(
    memory: Memory,
    table: Tables,
    rank: int,
    buffers: tuple[Array, Array],
    program: tuple[int, int],
    total: Callable[[Sequence[Array]], Array],
) -> Iterator[bool]:
    """The program of a group and lane; says whether it has done a row or waits."""
    shape, (group, lane) = memory.shape, program
    first, end = table.groups[group : group + 2].tolist()
    rows, items = table.rows[first:end].tolist(), table.items.tolist()
    parts = shape.lanes * table.pieces
    for time in range(table.pieces + shape.depth):
        for row in rows:
            piece = time - row[TIME]
            if not 0 <= piece < table.pieces:
                continue
            number = memory.done + piece
            waits, sources, targets, signals = (
                items[row[at] : row[at + 1]] for at in (WAITS, SOURCES, TARGETS, SIGNALS)
            )
            for flag, lag, _ in waits:
                while memory.flags[rank][flag, lane] < number + 1 - lag:
                    yield False
            start, stop = (
                _cut(row[LENGTH], lane * table.pieces + part, parts, shape.vector)
                for part in (piece, piece + 1)
            )
            slot = number % shape.ring * shape.lanes + lane

            def place(item: list[int], start: int = start, stop: int = stop, slot: int = slot) -> Array:
                buffer, offset, stride = item
                begin = offset + (slot * stride if stride else start)
                array = memory.staging[buffer - FIRST_STAGING] if buffer > OUTPUT else buffers[buffer]
                return array[begin : begin + stop - start]

            value = total([place(source).copy() for source in sources])
            for target in targets:
                place(target)[:] = value
            for peer, flag, _ in signals:
                memory.flags[peer][flag, lane] = number + 1
            yield True


def _cut(length: int, part: int, parts: int, vector: int) -> int:
    """Where a part begins: at a whole vector, but for the end."""
    return length if part == parts else length * part // parts // vector * vector

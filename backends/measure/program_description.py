"""The program of one rank in words and as one JSON object, which is what `synth program` shows.

From an implicit schedule one rank's program takes moments where the whole of a thousand ranks takes minutes
and gigabytes, so that what a rank of a large job will do can be looked at on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TypeAlias

from arborcast.backends.lowering.layout import BufferSlice
from arborcast.backends.lowering.lower import DEFAULT_MAX_PIECES, lower_rank
from arborcast.backends.lowering.program import Copy, Operation, Program, Receive, Reduce, Send
from arborcast.backends.measure.job import ITEM_BYTES, LOOPBACK_PIECE_BYTES, count_for
from arborcast.synth.errors import InputError
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.simulation.pieces import pieces_that_fit

Json: TypeAlias = dict[str, object]

_KEYS = {"source": "from"}
"""Of fields of operations, where they are called otherwise."""


def program_of(
    schedule: AnySchedule, rank: int, size_bytes: int, *, dtype: str = "float32", pieces: int | None = None
) -> Program:
    """What one rank does for a buffer of a size, as `synth run` would have it done.

    Args:
        schedule: a correct one, in either form.
        rank: of its topology, relays included; or the vertex of a switch that reduces or multicasts.
        size_bytes: of the whole buffer, as algbw counts it; rounded down to whole elements and blocks.
        dtype: float32, float64, bfloat16 or int64.
        pieces: into how many pieces each chunk is cut; where None as many as leave 1 MiB or more, up to 32.

    Raises:
        InputError: there is no such rank or type, or a number that is too small.
    """
    topology = schedule.topology
    if not 0 <= rank < topology.holders:
        able = " and its able switches" if topology.holders > topology.ranks else ""
        raise InputError(
            f"rank {rank}: must be in 0..{topology.holders - 1}, the ranks of {topology.name}{able}"
        )
    if dtype not in ITEM_BYTES:
        raise InputError(f"type {dtype}: must be one of {', '.join(ITEM_BYTES)}")
    if size_bytes < 0:
        raise InputError(f"size: must be at least 0 bytes, got {size_bytes}")
    if pieces is not None and pieces < 1:
        raise InputError(f"pieces: must be at least 1, got {pieces}")
    count = count_for(schedule, size_bytes, dtype)
    if pieces is None:
        nbytes = count * ITEM_BYTES[dtype]
        pieces = pieces_that_fit(schedule, nbytes, piece_bytes=LOOPBACK_PIECE_BYTES, most=DEFAULT_MAX_PIECES)
    return lower_rank(schedule, rank, count, pieces=pieces)


def program_document(program: Program) -> Json:
    """All of a program: lengths and places in elements, operations in an order that cannot deadlock.

    Each operation has `do` (send, receive, reduce or copy), its logical `time`, `after` (the indices of the
    operations that must be complete before it starts), and slices as [buffer, start, stop]: `from` is read,
    `into` is written. Messages have their `peer` and a `tag` that is the same at both ends.
    """
    return {
        "rank": program.rank,
        "input_elements": program.input_elements,
        "output_elements": program.output_elements,
        "scratch_elements": program.scratch_elements,
        "in_place": program.in_place,
        "contributors": program.contributors,
        "operations": [_operation_document(operation) for operation in program.operations],
    }


def describe_program(program: Program, *, is_switch: bool = False, most: int | None = 40) -> list[str]:
    """What a rank does, one operation a line.

    Args:
        program: of one rank.
        is_switch: whether it is that of an able switch.
        most: operations that are shown; all of them where None.
    """
    operations = program.operations
    sends = [operation for operation in operations if isinstance(operation, Send)]
    receives = [operation for operation in operations if isinstance(operation, Receive)]
    local = f"{_count(operations, Reduce, 'reduction')}, {_count(operations, Copy, 'copy', 'copies')}"
    place = "in place" if program.in_place else f"input {program.input_elements}"
    lines = [
        f"{'switch' if is_switch else 'rank'} {program.rank}: {len(operations)} operations",
        f"  sends     {_messages(sends, 'to')}",
        f"  receives  {_messages(receives, 'from')}",
        f"  local     {local}",
        f"  elements  {place}, output {program.output_elements}, scratch {program.scratch_elements}",
        *_listing(operations[:most]),
    ]
    if most is not None and len(operations) > most:
        lines.append(f"  ... and {len(operations) - most} more")
    return lines


def _listing(operations: tuple[Operation, ...]) -> Iterator[str]:
    if not operations:
        return
    yield f"  {'number':>6}  {'time':>4}  operation"
    for index, operation in enumerate(operations):
        after = f", after {', '.join(map(str, operation.after))}" if operation.after else ""
        yield f"  {index:>6}  {operation.time:>4}  {operation}{after}"


def _messages(messages: list[Send] | list[Receive], way: str) -> str:
    """How many there are, with how many ranks, and what they carry."""
    peers = {message.peer for message in messages}
    elements = sum(_slice(message).length for message in messages)
    ranks = "1 rank" if len(peers) == 1 else f"{len(peers)} ranks"
    return f"{len(messages)} {way} {ranks}, {elements} elements"


def _slice(message: Send | Receive) -> BufferSlice:
    return message.source if isinstance(message, Send) else message.into


def _count(operations: tuple[Operation, ...], form: type, one: str, several: str | None = None) -> str:
    count = sum(isinstance(operation, form) for operation in operations)
    return f"{count} {one if count == 1 else several or one + 's'}"


def _operation_document(operation: Operation) -> Json:
    values = {field.name: getattr(operation, field.name) for field in fields(operation)}
    return {
        "do": type(operation).__name__.lower(),
        **{_KEYS.get(name, name): _shown(value) for name, value in values.items()},
    }


def _shown(value: int | BufferSlice | tuple[int, ...]) -> int | list[str | int] | list[int]:
    if isinstance(value, BufferSlice):
        return [value.buffer.value, value.start, value.stop]
    return list(value) if isinstance(value, tuple) else value

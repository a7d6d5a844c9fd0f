"""Whether tables do what a collective asks, in every order in which programs may run.

The oracle of `backends.device.plan`, of which it takes nothing but the tables and their columns. Flags have
one writer each and only count up, so that which flag lets whom go on does not depend on the order of
execution: one execution that follows the flags stands for all, and if it stops, all do. What it must show is
that each access to a slot is ordered by flags: whoever reads waits in the same row for a flag that the row
which wrote the slot has raised, whoever overwrites for one of the row that has read it. That is stricter than
happens-before, which would also take what follows from other flags; so no vectors of clocks are carried
along, and every wait that is missing is found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from arborcast.backends.device.tables import (
    ABORT,
    FIRST_STAGING,
    INPUT,
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
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError

Worker: TypeAlias = tuple[int, int]
"""A rank and a group: one program of it stands for those of all lanes."""

_Row: TypeAlias = tuple[int, int, int]
"""A rank, a group, and the number of a row of that rank."""

Content: TypeAlias = tuple[tuple[int, int], ...]
"""The ranks whose inputs were added up, each with the first element."""


class TableError(InputError):
    """Tables do not do what they must; the message names rank, row and rule."""


class _Step(NamedTuple):
    """Where in its work a program is: how many rows it has begun."""

    worker: Worker
    at: int


@dataclass(slots=True)
class _Slot:
    number: int
    length: int
    content: Content
    written: _Step
    read: _Step | None = None


@dataclass
class _State:
    """What all programs share while they run."""

    raised: dict[tuple[int, int], list[_Step]] = field(default_factory=lambda: defaultdict(list))
    slots: dict[tuple[int, int, int], _Slot] = field(default_factory=dict)
    outputs: dict[int, dict[tuple[int, int], tuple[int, Content]]] = field(
        default_factory=lambda: defaultdict(dict)
    )


def check_tables(shape: Shape, tables: Sequence[Tables], collective: Collective, count: int) -> None:
    """Refuse tables that can go wrong.

    Args:
        shape: of the plan.
        tables: of all ranks, for buffers of `count` elements.
        collective: what they must do, with blocks of one size.
        count: elements of the whole buffer, as algbw counts it.

    Raises:
        TableError: a number is out of its range, slots overlap, an access is not ordered by a flag, a program
            waits for ever or for another group or time, or an output is not complete.
    """
    _check_form(shape, tables)
    pieces = tables[0].pieces
    state = _State()
    running = {
        (rank, group): _run(shape, table, rank, group, state, 2 + 2 * shape.ring // pieces)
        for rank, table in enumerate(tables)
        for group in range(len(table.groups) - 1)
    }
    waiting: dict[Worker, str] = {}
    moved = True
    while running and moved:
        moved = False
        for worker, program in list(running.items()):
            for blocked in program:
                if blocked:
                    waiting[worker] = blocked
                    break
                moved = True
            else:
                del running[worker]
                moved = True
    if running:
        raise TableError(f"device tables: {waiting[min(running)]}, which never comes")
    for rank in collective.ranks:
        _check_output(collective, rank, count, state.outputs[rank])


def _check_form(shape: Shape, tables: Sequence[Tables]) -> None:
    """Numbers in their ranges, flags with one writer and one waiter, slots that lie apart."""
    if shape.ring < 1 or shape.ring & (shape.ring - 1):
        raise TableError(f"device tables: ring must be a power of two, got {shape.ring}")
    if len({(table.pieces, len(table.groups)) for table in tables}) != 1:
        raise TableError("device tables: pieces and groups must be the same on all ranks")
    where = []
    for rank, table in enumerate(tables):
        bounds = table.groups.tolist()
        if bounds[0] != 0 or bounds[-1] != len(table.rows) or bounds != sorted(bounds):
            raise TableError(f"device tables: rank {rank}: groups must divide its rows, got {bounds}")
        for group, (first, end) in enumerate(pairwise(bounds)):
            times = table.rows[first:end, TIME].tolist()
            if times != sorted(times) or any(not 0 <= time <= shape.depth for time in times):
                raise TableError(
                    f"device tables: rank {rank}: rows must be in order of time up to {shape.depth}"
                )
            where += [(rank, group, number) for number in range(first, end)]
    _check_flags(shape, tables, where)
    _check_rings(shape, tables, where)


def _check_flags(shape: Shape, tables: Sequence[Tables], where: Sequence[_Row]) -> None:
    """Each flag is raised by one row, and waited for by one of the same group."""
    writers: dict[tuple[int, int], _Row] = {}
    waiters: dict[tuple[int, int], _Row] = {}
    for row in where:
        rank, _, number = row
        for flag, _, _ in _items(tables[rank], number, WAITS):
            _one(waiters, (rank, flag), row, "wait for", shape)
        for peer, flag, _ in _items(tables[rank], number, SIGNALS):
            _one(writers, (peer, flag), row, "raise", shape)
    for ends, waiter in waiters.items():
        writer = writers.pop(ends, None)
        if writer is None or writer[1] != waiter[1]:
            raise TableError(f"device tables: flag {ends[1]} of rank {ends[0]} is not raised by its group")
    if writers:
        rank, unheard = min(writers)
        raise TableError(f"device tables: nobody waits for flag {unheard} of rank {rank}")


def _check_rings(shape: Shape, tables: Sequence[Tables], where: Sequence[_Row]) -> None:
    """Each ring has one row that writes and one that reads, and room of its own for its pieces."""
    users: dict[tuple[int, int, int], list[str]] = defaultdict(list)
    for rank, _, number in where:
        for column, way in ((SOURCES, "read"), (TARGETS, "write")):
            for buffer, start, stride in _items(tables[rank], number, column):
                if (buffer >= FIRST_STAGING) != (stride > 0):
                    raise TableError(f"device tables: rank {rank}, row {number}: stride {stride} is wrong")
                if stride:
                    users[buffer - FIRST_STAGING, start, stride].append(way)
                    _check_piece(shape, tables[rank], rank, number, stride, way)
    host, end = -1, 0
    for (owner, start, stride), ways in sorted(users.items()):
        end = end if owner == host else 0
        host = owner
        if start < end or owner >= len(tables) or sorted(ways) != ["read", "write"]:
            raise TableError(f"device tables: the slots of rank {owner} from element {start} are others' too")
        end = start + shape.ring * shape.lanes * stride
        if end > shape.staging[owner]:
            raise TableError(
                f"device tables: rank {owner} has {shape.staging[owner]} elements of staging, "
                f"a ring ends at {end}"
            )


def _one(
    users: dict[tuple[int, int], _Row],
    flag: tuple[int, int],
    where: _Row,
    what: str,
    shape: Shape,
) -> None:
    rank, number = flag
    if flag in users or not 0 <= rank < len(shape.flags) or not ABORT < number < shape.flags[rank]:
        raise TableError(
            f"device tables: rank {where[0]}, row {where[2]} must alone {what} a flag that there is, "
            f"got flag {number} of rank {rank}"
        )
    users[flag] = where


def _check_piece(shape: Shape, table: Tables, rank: int, number: int, stride: int, way: str) -> None:
    """Whether the longest piece of a row fits into a slot."""
    parts, length = shape.lanes * table.pieces, int(table.rows[number, LENGTH])
    cuts = [length * part // parts // shape.vector * shape.vector for part in range(parts)] + [length]
    longest = max(end - start for start, end in pairwise(cuts))
    if longest > stride or stride % shape.vector:
        raise TableError(
            f"device tables: rank {rank}, row {number} must {way} slots of whole vectors for pieces of "
            f"{longest} elements, got {stride}"
        )


def _items(table: Tables, number: int, column: int) -> list[list[int]]:
    first, end = table.rows[number, column : column + 2].tolist()
    if not 0 <= first <= end <= len(table.items):
        raise TableError(f"device tables: row {number}: items {first} to {end} are not there")
    items: list[list[int]] = table.items[first:end].tolist()
    return items


def _run(
    shape: Shape, table: Tables, rank: int, group: int, state: _State, calls: int
) -> Iterator[str | None]:
    """One program of a rank; says for what it waits, or None when it has done a row."""
    first, end = table.groups[group : group + 2].tolist()
    columns = (WAITS, SOURCES, TARGETS, SIGNALS)
    rows = {number: [_items(table, number, column) for column in columns] for number in range(first, end)}
    now, at = table.rows[:, TIME].tolist(), 0
    for call in range(calls):
        for time in range(table.pieces + shape.depth):
            for number, (waits, sources, targets, signals) in rows.items():
                piece = time - now[number]
                if not 0 <= piece < table.pieces:
                    continue
                count = call * table.pieces + piece
                heard: set[_Step] = set()
                for flag, lag, _ in waits:
                    goal = count + 1 - lag
                    raised = state.raised[rank, flag]
                    while len(raised) < goal:
                        yield f"rank {rank}, row {number}, piece {count} waits for flag {flag} to be {goal}"
                    if goal > 0:
                        heard.add(raised[goal - 1])
                at += 1
                step = _Step((rank, group), at)
                _do_row(shape, table, number, count, (sources, targets), step, heard, state)
                for peer, flag, _ in signals:
                    state.raised[peer, flag].append(step)
                yield None


def _do_row(
    shape: Shape,
    table: Tables,
    number: int,
    count: int,
    lists: tuple[list[list[int]], list[list[int]]],
    step: _Step,
    heard: set[_Step],
    state: _State,
) -> None:
    """Read and write once, if flags order it."""
    rank, length = step.worker[0], int(table.rows[number, LENGTH])
    where = f"device tables: rank {rank}, row {number}, piece {count}"

    def follows(other: _Step) -> bool:
        return other.worker == step.worker or other in heard

    added: list[tuple[int, int]] = []
    for buffer, start, stride in lists[0]:
        if not stride:
            if buffer != INPUT:
                raise TableError(f"{where} must read its input or slots, got buffer {buffer}")
            added.append((rank, start))
            continue
        slot = state.slots.get((buffer, start, count % shape.ring))
        if slot is None or slot.number != count or slot.length != length or not follows(slot.written):
            raise TableError(
                f"{where} reads a slot that no flag says to hold this piece of {length} elements"
            )
        slot.read = step
        added += slot.content
    content = tuple(sorted(added))
    for buffer, start, stride in lists[1]:
        if stride:
            key = buffer, start, count % shape.ring
            old = state.slots.get(key)
            if old is not None and (old.read is None or not follows(old.read)):
                raise TableError(f"{where} overwrites a slot that no flag says to be read")
            state.slots[key] = _Slot(count, length, content, step)
        elif buffer != OUTPUT:
            raise TableError(f"{where} must write its output or slots, got buffer {buffer}")
        else:
            known = state.outputs[rank].setdefault((start, number), (length, content))
            if known != (length, content):
                raise TableError(f"{where} does not write the same as the pieces before")


def _check_output(
    collective: Collective, rank: int, count: int, written: dict[tuple[int, int], tuple[int, Content]]
) -> None:
    """Whether a rank's output is written once everywhere, with what the collective says."""
    kind, ranks = collective.kind, collective.ranks
    block = count if kind in (Kind.BROADCAST, Kind.REDUCE, Kind.ALLREDUCE) else count // len(ranks)
    end = block if kind in (Kind.REDUCE_SCATTER, Kind.SCATTER) else count
    if kind in (Kind.REDUCE, Kind.GATHER) and rank != collective.root:
        end = 0
    own, reached = ranks.index(rank), 0
    root = -1 if collective.root is None else collective.root
    for (start, number), (length, content) in sorted(written.items()):
        if not length:
            continue
        if start != reached:
            raise TableError(
                f"device tables: rank {rank}: output must go on at {reached}, row {number} at {start}"
            )
        reached = start + length
        part, offset = divmod(start, block)
        match kind:
            case Kind.ALLREDUCE | Kind.REDUCE:
                wanted = [(it, start) for it in ranks]
            case Kind.REDUCE_SCATTER:
                wanted = [(it, own * block + start) for it in ranks]
            case Kind.BROADCAST:
                wanted = [(root, start)]
            case Kind.SCATTER:
                wanted = [(root, own * block + start)]
            case Kind.ALLTOALL:
                wanted = [(ranks[part], own * block + offset)]
            case _:
                wanted = [(ranks[part], offset)]
        if content != tuple(sorted(wanted)) or offset + length > block:
            raise TableError(
                f"device tables: rank {rank}: output from {start} must be of {sorted(wanted)[:4]}, "
                f"got {content[:4]}"
            )
    if reached != end:
        raise TableError(f"device tables: rank {rank}: output must be written up to {end}, got {reached}")

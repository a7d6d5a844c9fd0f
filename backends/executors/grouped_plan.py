"""The program of one rank as a sequence of group calls, for transports that have no tags, above all NCCL.

Such a transport takes many sends and receives in one call, lets all of them progress at once, matches those
of a pair of ranks in their order, and finishes a call before it starts the next. A phase is one such call
with the local operations around it. The call of logical time t holds exactly the messages of that time, which
both ends of a message know, in the order of their tags, on which both ends agree.

    phase 0: group of time 0     phase 1: group of time 1      phase 2: group of time 3
      during: a copy               during: what 2 needs not      ...
      after:  what 1 needs         after:  what 2 needs

No deadlock: of all calls that are not finished take those of the earliest time. Every rank with messages of
that time has finished all its earlier calls, so that both ends of each of these messages are there.

No race: what a call sends was there before it, because what a step brings counts from the next step on, and
what it receives lands where nothing else of the call is read or written. Scratch is handed out anew for this,
by phases; a receive into the output that must wait for another operation of its own time is staged there.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from arborcast.backends.lowering.layout import Buffer, Slice
from arborcast.backends.lowering.program import Copy, Operation, Program, Receive, Reduce, Send

Local: TypeAlias = Reduce | Copy
Message: TypeAlias = Send | Receive

ALIGNMENT = 16
"""Slots of scratch start at multiples of so many elements, that is of 16 bytes: GPUs load so much at once."""


class PhaseError(RuntimeError):
    """A message needs another operation of its own time; lowered programs never do."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One group call and what is done on this rank while it runs and after it.

    The `after` fields of the operations are empty: the phases say all about their order.

    Attributes:
        time: the logical time of the messages; -1 where there are none.
        messages: all at once; those of one peer and direction are matched in this order.
        during: in this order, while the call runs: they touch nothing that it writes and write nothing that
            it touches.
        after: in this order, when the call is complete.
    """

    time: int
    messages: tuple[Message, ...]
    during: tuple[Local, ...]
    after: tuple[Local, ...]


@dataclass(frozen=True)
class GroupedPlan:
    """What one rank does.

    Attributes:
        program: what it was made from; its buffers are those of the plan, but for scratch.
        phases: in the order of their times.
        scratch_elements: length of the working space.
    """

    program: Program
    phases: tuple[Phase, ...]
    scratch_elements: int

    @cached_property
    def slices(self) -> frozenset[Slice]:
        """All that its operations touch."""
        return frozenset(
            part
            for phase in self.phases
            for operation in (*phase.messages, *phase.during, *phase.after)
            for part in slices_of(operation)
        )


def plan_groups(program: Program) -> GroupedPlan:
    """The phases of one rank, in O(n log n) for n operations.

    Raises:
        PhaseError: the program's messages cannot be grouped by their times.
    """
    items, lengths = _items(program)
    times = sorted({item.operation.time for item in items if item.is_message})
    stamps = _place(program, items, {time: phase for phase, time in enumerate(times)})
    places, elements = _allocate(items, stamps, lengths)
    parts: list[list[Operation]] = [[] for _ in range(2 * len(times) + 1)]
    messages: list[list[Message]] = [[] for _ in times]
    for item, stamp in zip(items, stamps, strict=True):
        operation = item.located(places)
        if isinstance(operation, Send | Receive):
            messages[stamp // 2].append(operation)
        else:
            parts[stamp].append(operation)
    phases = [
        Phase(
            time,
            tuple(sorted(messages[phase], key=_tag)),
            _locals(parts[2 * phase]),
            _locals(parts[2 * phase + 1]),
        )
        for phase, time in enumerate(times)
    ]
    if not times and parts[0]:
        phases = [Phase(-1, (), (), _locals(parts[0]))]
    return GroupedPlan(program, tuple(phases), elements)


@dataclass(frozen=True, slots=True)
class _Item:
    """An operation that knows contents of scratch by number, not by place: a number is written once.

    Attributes:
        operation: of the program, or the copy of what was staged.
        needs: items that must be complete before it starts.
        source: number of the content that it reads, None where that is not in scratch.
        into: number of the content that it writes or changes, None likewise.
    """

    operation: Operation
    needs: tuple[int, ...]
    source: int | None
    into: int | None

    @property
    def is_message(self) -> bool:
        return isinstance(self.operation, Send | Receive)

    def located(self, places: Sequence[Slice]) -> Operation:
        """The operation with contents where they were put."""
        operation = self.operation
        if isinstance(operation, Send):
            source = operation.source if self.source is None else places[self.source]
            return replace(operation, source=source, after=())
        into = operation.into if self.into is None else places[self.into]
        if isinstance(operation, Receive):
            return replace(operation, into=into, after=())
        source = operation.source if self.source is None else places[self.source]
        return replace(operation, source=source, into=into, after=())


def _items(program: Program) -> tuple[list[_Item], list[int]]:
    """The operations with contents for slots, and the length of each content."""
    items: list[_Item] = []
    lengths: list[int] = []
    current: dict[int, int] = {}
    completed_by: list[int] = []

    def read(part: Slice) -> int | None:
        return current[part.start] if part.buffer is Buffer.SCRATCH else None

    def write(part: Slice) -> int | None:
        if part.buffer is not Buffer.SCRATCH:
            return None
        lengths.append(part.length)
        current[part.start] = len(lengths) - 1
        return current[part.start]

    for operation in program.operations:
        needs = tuple(completed_by[before] for before in operation.after)
        if isinstance(operation, Send):
            items.append(_Item(operation, needs, read(operation.source), None))
        elif isinstance(operation, Reduce):
            items.append(_Item(operation, needs, read(operation.source), read(operation.into)))
        elif isinstance(operation, Copy):
            items.append(_Item(operation, needs, read(operation.source), write(operation.into)))
        elif operation.into.buffer is Buffer.SCRATCH:
            # It waits for nobody who used its slot before: it gets one of its own.
            items.append(_Item(operation, (), None, write(operation.into)))
        elif all(items[before].operation.time < operation.time for before in needs):
            items.append(_Item(operation, needs, None, None))
        else:
            lengths.append(operation.into.length)
            staged = len(lengths) - 1
            items.append(_Item(operation, (), None, staged))
            copy = Copy(operation.time, operation.into, operation.into)
            items.append(_Item(copy, (*needs, len(items) - 1), staged, None))
        completed_by.append(len(items) - 1)
    return items, lengths


def _place(program: Program, items: Sequence[_Item], phase_of: dict[int, int]) -> list[int]:
    """When each item is done: 2k with the messages of phase k, 2k + 1 after them.

    A local operation that the group after the one it waits for does not need runs while that one runs.
    """
    never = len(phase_of)
    needed_by = [never] * len(items)
    for index in reversed(range(len(items))):
        item = items[index]
        limit = phase_of[item.operation.time] if item.is_message else needed_by[index]
        for before in item.needs:
            needed_by[before] = min(needed_by[before], limit)
    stamps: list[int] = []
    for index, item in enumerate(items):
        earliest = max((stamps[n] + items[n].is_message for n in item.needs), default=0)
        if item.is_message:
            stamp = 2 * phase_of[item.operation.time]
            late = any(stamps[before] >= stamp for before in item.needs)
        else:
            phase = (earliest + 1) // 2
            overlaps = phase < needed_by[index] and phase < never
            stamp = 2 * phase if overlaps else earliest
            late = not overlaps and stamp % 2 == 0 and never > 0
        if late:
            raise PhaseError(
                f"rank {program.rank}, time {item.operation.time}: {item.operation} belongs to a group call "
                "but needs, or is needed by, another operation of its time"
            )
        stamps.append(stamp)
    return stamps


def _allocate(
    items: Sequence[_Item], stamps: Sequence[int], lengths: Sequence[int]
) -> tuple[list[Slice], int]:
    """A place for every content and the length of scratch; contents in use in the same phase are disjoint.

    A slot is used again from the phase on that follows its last use; the tightest one that is free is taken.
    """
    first, last = [0] * len(lengths), [-1] * len(lengths)
    for item, stamp in zip(items, stamps, strict=True):
        for content in (item.source, item.into):
            if content is not None:
                first[content] = stamp if last[content] < 0 else first[content]
                last[content] = max(last[content], stamp)
    places = [Slice(Buffer.SCRATCH, 0, 0)] * len(lengths)
    free: list[tuple[int, int]] = []  # capacity, start
    leaving = sorted(range(len(lengths)), key=lambda content: last[content], reverse=True)
    taken: dict[int, tuple[int, int]] = {}
    elements = 0
    for content in sorted(range(len(lengths)), key=lambda content: (first[content], content)):
        while last[leaving[-1]] < first[content]:
            insort(free, taken[leaving.pop()])
        capacity = -(-lengths[content] // ALIGNMENT) * ALIGNMENT
        fit = bisect_left(free, (capacity, 0))
        # A slot of more than twice the size is better kept for what needs it.
        if fit < len(free) and free[fit][0] <= 2 * capacity:
            slot = free.pop(fit)
        else:
            slot = (capacity, elements)
            elements += capacity
        taken[content] = slot
        places[content] = Slice(Buffer.SCRATCH, slot[1], slot[1] + lengths[content])
    return places, elements


def _locals(operations: Sequence[Operation]) -> tuple[Local, ...]:
    return tuple(operation for operation in operations if isinstance(operation, Reduce | Copy))


def _tag(message: Message) -> int:
    return message.tag


def slices_of(operation: Operation) -> tuple[Slice, ...]:
    """What an operation reads and writes."""
    match operation:
        case Send(source=source):
            return (source,)
        case Receive(into=into):
            return (into,)
        case Reduce(source=source, into=into) | Copy(source=source, into=into):
            return (source, into)

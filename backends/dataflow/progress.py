"""What lies where on one rank when a run is broken off, told from the actions that it has completed.

The contents of memory follow from the program alone: what a message carries is known from the schedule,
whoever was fast. A message of which a part has come has done its work for the elements that came, and not
for the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from arborcast.backends.dataflow.task_graph import Act, Action, TaskGraph
from arborcast.backends.lowering.layout import Buffer, Layout, Slice
from arborcast.backends.lowering.program import Receive, Reduce
from arborcast.synth.schedule import Schedule
from arborcast.synth.unfinished import Mask


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come.

    Attributes:
        done: of each action of its graph, whether it is complete.
        begun: bytes that have come, and have been used, of the messages that have come in part, by action.
        sent_bytes: handed over to channels.
    """

    done: Sequence[bool]
    begun: Mapping[int, int]
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class Holding:
    """A sum that lies in this rank's memory.

    Attributes:
        chunk: of which chunk.
        start: its first element, from the start of the chunk.
        mask: whose contributions it adds up.
        where: all of it.
    """

    chunk: int
    start: int
    mask: Mask
    where: Slice

    @property
    def stop(self) -> int:
        """The element after the last."""
        return self.start + self.where.length

    def cut(self, start: int, stop: int) -> Slice:
        """Where some of its elements lie, counted from the start of the chunk."""
        first = self.where.start - self.start
        return Slice(self.where.buffer, first + start, first + stop)


def holdings_at_start(layout: Layout, rank: int, pieces: int) -> list[Holding]:
    """What a rank holds before anything has moved."""
    found = []
    for number, place in layout.places.items():
        initial = layout.initial(rank, number)
        if initial is None:
            continue
        who = layout.collective.before(rank, place.block)
        mask = sum(1 << member for member in who)
        for piece in range(pieces):
            where = initial.part(piece, pieces)
            if where.length:
                found.append(Holding(number, where.start - initial.start, mask, where))
    return found


def holdings_of(
    schedule: Schedule, layout: Layout, graph: TaskGraph, pieces: int, progress: Progress, item_bytes: int
) -> list[Holding]:
    """What a rank holds when a run of its graph is broken off.

    Args:
        schedule: in explicit form, with the numbers of which its programs were made.
        layout: of all its chunks, for the same number of elements.
        graph: what was run.
        pieces: into how many its chunks were cut.
        progress: of the run.
        item_bytes: of an element.
    """
    memory = _Memory(schedule, layout, pieces)
    for holding in holdings_at_start(layout, graph.program.rank, pieces):
        memory.put(holding)
    for number, action in enumerate(graph.actions):
        if progress.done[number]:
            memory.apply(action)
    for number, come in progress.begun.items():
        memory.apply_in_part(graph.actions[number], come, item_bytes)
    return memory.all()


def merged(holdings: Iterable[Holding]) -> list[Holding]:
    """The same sums, those put together that continue each other in the chunk and in memory."""
    found: list[Holding] = []
    last: dict[tuple[int, Mask, Buffer], int] = {}
    for it in sorted(holdings, key=lambda it: (it.chunk, it.where.buffer, it.start, it.where.start)):
        key = it.chunk, it.mask, it.where.buffer
        before = found[last[key]] if key in last else None
        if before is not None and before.stop == it.start and before.where.stop == it.where.start:
            whole = Slice(it.where.buffer, before.where.start, it.where.stop)
            found[last[key]] = Holding(it.chunk, before.start, it.mask, whole)
        else:
            last[key] = len(found)
            found.append(it)
    return found


def masks_sent(schedule: Schedule) -> tuple[Mask, ...]:
    """Whose contributions each transfer of a schedule carries; all of a step start from the state before."""
    held: dict[tuple[int, int], Mask] = {}
    for number, chunk in enumerate(schedule.chunks):
        block = schedule.collective.block_of(chunk.owner, chunk.target, chunk.demand)
        for rank in schedule.collective.ranks:
            held[number, rank] = sum(1 << it for it in schedule.collective.before(rank, block))
    sent: list[Mask] = []
    arrived: dict[tuple[int, int], Mask] = {}
    step = -1
    for transfer in schedule.transfers:
        if transfer.step != step:
            held |= arrived
            arrived, step = {}, transfer.step
        mask = held.get((transfer.chunk, transfer.src), 0)
        into = (transfer.chunk, transfer.dst)
        arrived[into] = mask | (arrived.get(into, held.get(into, 0)) if transfer.reduce else 0)
        sent.append(mask)
    return tuple(sent)


class _Memory:
    """What lies at each slice; slices in use at the same time are disjoint, so their start tells them."""

    def __init__(self, schedule: Schedule, layout: Layout, pieces: int) -> None:
        self._transfers = schedule.transfers
        self._sent = masks_sent(schedule)
        self._layout = layout
        self._pieces = pieces
        self._at: dict[tuple[Buffer, int], Holding] = {}
        self._cut: list[Holding] = []  # by messages that came in part

    def put(self, holding: Holding) -> None:
        self._at[holding.where.buffer, holding.where.start] = holding

    def all(self) -> list[Holding]:
        """In the order of chunks."""
        found = [*self._at.values(), *self._cut]
        return sorted(found, key=lambda it: (it.chunk, it.start, it.mask, it.where.buffer, it.where.start))

    def apply(self, action: Action) -> None:
        """Account for an action that is complete."""
        result = self._result(action)
        if result is not None:
            self.put(result)
        elif action.act is not Act.SEND:  # a rank's own block is copied as a whole, whatever its chunks
            self._at.pop((action.into.buffer, action.into.start), None)

    def apply_in_part(self, action: Action, come: int, item_bytes: int) -> None:
        """Account for a message of which so many bytes have come."""
        result = self._result(action)
        before = self._at.pop((action.into.buffer, action.into.start), None)
        if result is None:
            return
        whole, torn = divmod(come, item_bytes)
        if whole:
            middle = result.start + whole
            self._cut.append(
                Holding(result.chunk, result.start, result.mask, result.cut(result.start, middle))
            )
        if before is not None and before.where == action.into:
            rest = before.start + whole + (torn > 0)
            if rest < before.stop:
                self._cut.append(Holding(before.chunk, rest, before.mask, before.cut(rest, before.stop)))

    def _result(self, action: Action) -> Holding | None:
        """What lies in `into` once the action is complete; None where that is not one piece of a chunk."""
        match action.act:
            case Act.RECEIVE | Act.COMBINE:
                operation = action.operation
                assert isinstance(operation, Receive), "a message comes"
                index, piece = divmod(operation.tag, self._pieces)
                if index >= len(self._transfers):  # a word that is no data (`lowering.ending`)
                    return None
                chunk, mask = self._transfers[index].chunk, self._sent[index]
                place = self._layout.places[chunk]
                start = (place.stop - place.start) * piece // self._pieces
                if action.act is Act.COMBINE:
                    mask |= self._at[action.source.buffer, action.source.start].mask
                return Holding(chunk, start, mask, action.into)
            case Act.REDUCE | Act.COPY:
                source = self._at.get((action.source.buffer, action.source.start))
                if source is None or source.where != action.source:
                    return None
                mask = source.mask
                if action.act is Act.REDUCE:
                    assert isinstance(action.operation, Reduce), "it adds"
                    mask |= self._at[action.into.buffer, action.into.start].mask
                return Holding(source.chunk, source.start, mask, action.into)
            case _:
                return None

"""What each rank does for a schedule, in chunks, before thread blocks are thought of.

Transfers are gone through step by step, sends of a step before its receives, as all of a step start from the
state before it. Of each piece a rank knows its *home*, where its value is now: the caller's input, which is
never written, its place in the output, or scratch. Operations remember what they must come after: whoever
wrote what they read, and whoever read or wrote what they write.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from arborcast.backends.lowering.layout import Buffer, BufferSlice, lay_out
from arborcast.backends.programs.program import Memory, Span
from arborcast.synth.collective import Kind
from arborcast.synth.schedule import Schedule

_MEMORY = {Buffer.INPUT: Memory.INPUT, Buffer.OUTPUT: Memory.OUTPUT}
_OWN_PLACE = 1 << 40
"""Where scratch of a piece is counted from until it is known which scratch is needed."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a chunk that is one step's worth: its chunk, and the units of it.

    Its number counts the units of all pieces before it: no two pieces have a unit of scratch in common.
    """

    number: int
    chunk: int
    start: int
    stop: int


@dataclass(slots=True)
class ChunkAction:
    """One end of a message, or a copy within a rank.

    Attributes:
        rank: whose it is.
        piece: what is moved.
        step: when in the schedule.
        peer: the other end, None for a copy.
        sends: which end it is.
        source: what is read; of a receive what the message is added to, None where it replaces.
        target: what is written; None for a send.
        after: actions of the rank that must be done before.
        origin: of a send, the receive that brought just what is sent, None where there is none.
        used: of a receive, actions that read what it wrote.
        replaced: how many of the chunks that it wrote are written over later by something else.
    """

    rank: int
    piece: Piece
    step: int
    peer: int | None
    sends: bool
    source: Span | None
    target: Span | None
    after: list[ChunkAction] = field(default_factory=list)
    origin: ChunkAction | None = None
    used: list[ChunkAction] = field(default_factory=list)
    replaced: int = 0


@dataclass(slots=True)
class _Place:
    """Who touched a chunk of memory last."""

    written: ChunkAction | None = None
    read: list[ChunkAction] = field(default_factory=list)


class Ranks:
    """The actions of all ranks, in an order that each rank may execute them in."""

    def __init__(self, schedule: Schedule, units: int, most: int, *, in_place: bool) -> None:
        """Lay out the buffers of `units` chunks; pieces have at most `most` of them."""
        self.layout = lay_out(schedule, units)
        self._schedule = schedule
        self._in_place = in_place
        self.pieces: list[list[Piece]] = []
        before = 0
        for chunk in range(schedule.chunk_count):
            place = self.layout.places[chunk]
            self.pieces.append(list(_pieces(chunk, place.stop - place.start, most, before)))
            before += place.stop - place.start
        self.actions: list[list[ChunkAction]] = [[] for _ in range(schedule.topology.ranks)]
        self._homes: dict[tuple[int, int], Span | None] = {}
        self._places: dict[tuple[int, Memory, int], _Place] = defaultdict(_Place)
        self._copy(most)
        self._late: list[tuple[int, Piece, Span, Span]] = []
        self._given_until = self._last_sends() if in_place and self._kind is Kind.ALLTOALL else {}
        in_order = sorted(enumerate(schedule.transfers), key=lambda pair: (pair[1].step, pair[0]))
        for _, group in groupby(in_order, key=lambda pair: pair[1].step):
            transfers = [transfer for _, transfer in group]
            for transfer in transfers:
                for piece in self.pieces[transfer.chunk]:
                    self._send(transfer.src, transfer.dst, transfer.step, piece)
            for transfer in transfers:
                for piece in self.pieces[transfer.chunk]:
                    self._receive(transfer.dst, transfer.src, transfer.step, piece, transfer.reduce)
        for rank, piece, source, target in self._late:
            self._do(ChunkAction(rank, piece, schedule.steps, None, False, source, target), source, target)

    def buffers(self, rank: int) -> tuple[int, int]:
        """Chunks of the input and of the output of a rank."""
        wanted = self.layout.output_elements(rank)
        if self._kind in {Kind.BROADCAST, Kind.REDUCE}:
            return self.layout.count, self.layout.count
        return wanted if self.layout.in_place(rank) else self.layout.input_elements(rank), wanted

    def _send(self, rank: int, peer: int, step: int, piece: Piece) -> None:
        home = self._home(rank, piece)
        assert home is not None, "a verified schedule sends what is there"
        action = ChunkAction(rank, piece, step, peer, True, home, None)
        self._do(action, reads=home, writes=None)

    def _receive(self, rank: int, peer: int, step: int, piece: Piece, adds: bool) -> None:
        home, final = self._home(rank, piece), self._final(rank, piece)
        source = home if adds else None
        own = Span(Memory.SCRATCH, _OWN_PLACE + piece.number, piece.stop - piece.start)
        stays = home is not None and home.memory is not Memory.INPUT
        target = home if stays and home is not None else final or own
        if any(self._given_until.get(cell, -1) > step for cell in self._cells(rank, target)):
            # What is given there is sent later.
            self._late.append((rank, piece, own, target))
            target = own
        action = ChunkAction(rank, piece, step, peer, False, source, target)
        self._do(action, reads=source, writes=target)
        self._homes[rank, piece.number] = target

    @property
    def _kind(self) -> Kind:
        return self._schedule.collective.kind

    def _last_sends(self) -> dict[tuple[int, Memory, int], int]:
        """The step in which each chunk of an input is sent for the last time."""
        last: dict[tuple[int, Memory, int], int] = {}
        for transfer in self._schedule.transfers:
            if transfer.src == self._schedule.chunks[transfer.chunk].owner:
                for piece in self.pieces[transfer.chunk]:
                    for cell in self._cells(transfer.src, self._home(transfer.src, piece)):
                        last[cell] = max(last.get(cell, -1), transfer.step)
        return last

    def _do(self, action: ChunkAction, reads: Span | None, writes: Span | None) -> None:
        after: dict[int, ChunkAction] = {}
        writers: dict[int | None, ChunkAction | None] = {}
        for cell in self._cells(action.rank, reads):
            place = self._places[cell]
            writers[id(place.written)] = place.written
            place.read.append(action)
        for writer in writers.values():
            if writer is not None:
                after[id(writer)] = writer
                writer.used.append(action)
                action.origin = writer if action.sends and len(writers) == 1 else None
        for cell in self._cells(action.rank, writes):
            place = self._places[cell]
            for earlier in (*place.read, place.written):
                if earlier is not None and earlier is not action:
                    after[id(earlier)] = earlier
            if place.written is not None and reads is None:
                place.written.replaced += 1
            self._places[cell] = _Place(action)
        action.after = list(after.values())
        self.actions[action.rank].append(action)

    def _cells(self, rank: int, span: Span | None) -> Iterator[tuple[int, Memory, int]]:
        """Memory by chunks; in place, the output is where the input is."""
        if span is None:
            return
        memory, start = span.memory, span.start
        if self._in_place and memory is Memory.OUTPUT:
            whole, block = self.layout.count, self.layout.block
            offset = self._schedule.collective.ranks.index(rank) * block
            match self._kind:
                case Kind.ALLGATHER | Kind.GATHER:
                    if offset <= start < offset + block:
                        memory, start = Memory.INPUT, start - offset
                case Kind.REDUCE_SCATTER | Kind.SCATTER:
                    memory, start = Memory.INPUT, start + offset
                case _ if start < whole:
                    memory = Memory.INPUT
        for chunk in range(start, start + span.count):
            yield rank, memory, chunk

    def _home(self, rank: int, piece: Piece) -> Span | None:
        key = rank, piece.number
        if key not in self._homes:
            initial = self.layout.initial(rank, piece.chunk)
            found = None if initial is None else _span(initial, piece)
            if found is not None and found.memory is Memory.OUTPUT and not self._in_place:
                found = Span(Memory.INPUT, found.start, found.count)
            self._homes[key] = found
        return self._homes[key]

    def _final(self, rank: int, piece: Piece) -> Span | None:
        final = self.layout.final(rank, piece.chunk)
        return None if final is None else _span(final, piece)

    def _copy(self, most: int) -> None:
        """What a rank keeps goes from its input to its output, where these are two."""
        if self._in_place:
            return
        collective = self._schedule.collective
        for rank in collective.ranks:
            kept = self.layout.kept(rank)
            if kept is None and collective.kind is Kind.BROADCAST and rank == collective.root:
                whole = self.layout.count
                kept = BufferSlice(Buffer.INPUT, 0, whole), BufferSlice(Buffer.OUTPUT, 0, whole)
            if kept is None:
                continue
            for start in range(0, kept[0].length, most):
                length = min(most, kept[0].length - start)
                source, target = (Span(_MEMORY[end.buffer], end.start + start, length) for end in kept)
                piece = Piece(-1, -1, start, start + length)
                self._do(ChunkAction(rank, piece, -1, None, False, source, target), source, target)


def _pieces(chunk: int, length: int, most: int, before: int) -> Iterator[Piece]:
    parts = -(-length // most)
    for part in range(parts):
        start, stop = (length * end // parts for end in (part, part + 1))
        yield Piece(before + start, chunk, start, stop)


def _span(where: BufferSlice, piece: Piece) -> Span:
    return Span(_MEMORY[where.buffer], where.start + piece.start, piece.stop - piece.start)

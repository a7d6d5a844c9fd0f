"""From a schedule to the program of each rank, for buffers of one length.

Each chunk is cut into the same number of pieces, and piece p of a transfer in step s happens at logical
time s + p, so that trees are pipelined and links are shared in proportion to the shares. All ranks execute
their messages in one total order (time, then the place in the schedule): the first message that is not yet
done is then always the next one of both its ends, which is why blocking sends cannot deadlock.

    time      0        1        2          a chain 0 -> 1 -> 2 with three pieces: step 0 is the
    0 -> 1    piece 0  piece 1  piece 2    transfer 0 -> 1, step 1 the transfer 1 -> 2
    1 -> 2             piece 0  piece 1 ...

NCCL starts messages in groups and knows no tags. There all messages of one time are a group (`grouped`), so
that none may need another of its time: what a message of a time frees serves those of later times only.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from arborcast.backends.lowering.layout import Buffer, BufferSlice, Layout, lay_out
from arborcast.backends.lowering.program import Copy, Operation, Program, Receive, Reduce, Send
from arborcast.backends.lowering.rank_view import transfers_of
from arborcast.synth.errors import ScheduleError
from arborcast.synth.implicit_schedule import AnySchedule, ImplicitSchedule
from arborcast.synth.schedule import Transfer


class Scratch:
    """Working space for what arrives before it may go where it belongs, and for what only passes through.

    New slots are handed out while the limits allow, used ones after that. Slots of one chunk are all of one
    size and are used again in the order in which they were given back: the last reader of the oldest has most
    likely finished, so that a receive into it need not wait.

    Args:
        limit: elements after which slots are used again wherever one is free; a need that cannot be met so
            is met beyond it.
        window: slots that each chunk may have before it uses the first again, so that as many receives
            can be posted ahead of time.
        later: whether a slot is used again only at a later time than that at which it was given back.
    """

    def __init__(self, limit: int, window: int, *, later: bool) -> None:
        self.elements = 0
        self._limit = limit
        self._window = window
        self._later = later
        self._free: dict[int, deque[tuple[int, int]]] = defaultdict(deque)
        self._slots: dict[int, int] = defaultdict(int)

    def take(self, chunk: int, length: int, slot_length: int, time: int) -> BufferSlice:
        """A slice of `length` elements in a slot of `slot_length`, which is the same for all of a chunk."""
        free = self._free[chunk]
        full = self._slots[chunk] >= self._window or self.elements + slot_length > self._limit
        if free and full and not (self._later and free[0][1] >= time):
            start, _ = free.popleft()
        else:
            start = self.elements
            self.elements += slot_length
            self._slots[chunk] += 1
        return BufferSlice(Buffer.SCRATCH, start, start + length)

    def give_back(self, chunk: int, taken: BufferSlice, time: int) -> None:
        """The slice will not be read again by operations that are yet to be written; those of `time` may."""
        self._free[chunk].append((taken.start, time))


DEFAULT_WINDOW = 8
DEFAULT_MAX_PIECES = 32


def lower(
    schedule: AnySchedule,
    count: int,
    *,
    pieces: int = 1,
    window: int = DEFAULT_WINDOW,
    grouped: bool = False,
) -> tuple[Program, ...]:
    """The programs of all that hold chunks: the ranks, relays included, and then the able switches.

    A switch has a program as a relay has, with scratch alone: all it does is to pass on and to add up.

    Args:
        schedule: a correct one; what shows on one rank alone is checked again.
        count: elements of the whole buffer, as algbw counts it.
        pieces: into how many pieces each chunk is cut; empty ones are not sent.
        window: receives of one chunk that may be posted ahead (slots of scratch, see `Scratch`).
        grouped: whether no message may need another one of its own time (`backends.p2p`).

    Raises:
        CollectiveError: the count does not divide into the collective's blocks.
        ScheduleError: a rank sends a chunk before it holds it, or receives one twice in a step.

    Examples:
        >>> programs = backends.lower(synth.solve(topologies.load("ring:4"), "allgather"), 64)
        >>> [(program.rank, program.input_elements) for program in programs]
        [(0, 16), (1, 16), (2, 16), (3, 16)]
    """
    if isinstance(schedule, ImplicitSchedule):
        return tuple(
            lower_rank(schedule, rank, count, pieces=pieces, window=window, grouped=grouped)
            for rank in range(schedule.topology.holders)
        )
    layout = lay_out(schedule, count)
    of_rank: list[list[tuple[int, Transfer]]] = [[] for _ in range(schedule.topology.holders)]
    for index, transfer in enumerate(schedule.transfers):
        of_rank[transfer.src].append((index, transfer))
        of_rank[transfer.dst].append((index, transfer))
    return tuple(
        lower_part(layout, rank, transfers, pieces, window, grouped=grouped)
        for rank, transfers in enumerate(of_rank)
    )


def lower_rank(
    schedule: AnySchedule,
    rank: int,
    count: int,
    *,
    pieces: int = 1,
    window: int = DEFAULT_WINDOW,
    grouped: bool = False,
) -> Program:
    """The program of one rank, or of an able switch by its vertex; arguments and errors as for `lower`.

    From an implicit schedule in time and memory that grow with what this rank sends and receives, and it is
    the program that the whole schedule gives: the order of messages and their tags are those of the whole,
    in which each transfer's number is known without the others.
    """
    layout, transfers = part_of(schedule, rank, count)
    return lower_part(layout, rank, transfers, pieces, window, grouped=grouped)


def part_of(schedule: AnySchedule, rank: int, count: int) -> tuple[Layout, list[tuple[int, Transfer]]]:
    """Where the chunks lie that a rank sends or receives, and the transfers, each with its number."""
    transfers = transfers_of(schedule, rank)
    return lay_out(schedule, count, dict.fromkeys(it.chunk for _, it in transfers)), transfers


def lower_part(
    layout: Layout,
    rank: int,
    transfers: Sequence[tuple[int, Transfer]],
    pieces: int,
    window: int = DEFAULT_WINDOW,
    *,
    grouped: bool,
) -> Program:
    """The program of one rank by its `part_of` a schedule; arguments and errors as for `lower`."""
    if pieces < 1 or window < 1:
        raise ValueError(f"pieces and window must be at least 1, got {pieces} and {window}")
    messages = _messages_of(layout, rank, transfers, pieces)
    if rank not in layout.collective.members:  # all inputs of a piece take a slot, those of the next others
        window *= _most_inputs(rank, transfers)
    summands = {(it.chunk, it.step, it.dst) for _, it in transfers if it.reduce}
    scratch = Scratch(layout.count, window, later=grouped)
    writer = _OperationWriter(layout, rank, pieces, scratch, summands)
    kept = layout.kept(rank)
    if kept is not None and kept[0].length:
        writer.copy(0, *kept)
    last_send: dict[tuple[int, int, int], int] = {}
    last: dict[tuple[int, int], int] = {}
    for position, message in enumerate(messages):
        last[message.cell] = position
        if message.transfer.src == rank:
            last_send[*message.cell, message.time] = position
    for position, message in enumerate(messages):
        sent_last = last_send.get((*message.cell, message.time), -1)
        more_sends = sent_last > position
        if message.transfer.src == rank:
            writer.send(message)
        else:
            writer.receive(message, more_sends or (grouped and sent_last >= 0))
        # What a step brings counts from the next step on, so it waits for the sends of this one.
        if not more_sends:
            writer.settle(message)
        if last[message.cell] == position:
            writer.close(message)
    collective = layout.collective
    return Program(
        rank,
        tuple(writer.operations),
        layout.input_elements(rank),
        layout.output_elements(rank),
        writer.scratch.elements,
        layout.in_place(rank),
        len(collective.ranks) if collective.kind.reduces else 1,
    )


def _most_inputs(rank: int, transfers: Sequence[tuple[int, Transfer]]) -> int:
    """How many transfers of one chunk in one step end here at most, at least 1."""
    inputs = Counter((transfer.chunk, transfer.step) for _, transfer in transfers if transfer.dst == rank)
    return max([1, *inputs.values()])


@dataclass(frozen=True, slots=True)
class _PieceMessage:
    """One piece of one transfer; `tag` tells it from all other messages of the collective."""

    time: int
    transfer: Transfer
    piece: int
    length: int
    tag: int

    @property
    def cell(self) -> tuple[int, int]:
        return (self.transfer.chunk, self.piece)


def _messages_of(
    layout: Layout, rank: int, transfers: Sequence[tuple[int, Transfer]], pieces: int
) -> list[_PieceMessage]:
    """The messages of a rank in the one order that all ranks share."""
    found = []
    for index, transfer in transfers:
        if transfer.src == transfer.dst:
            raise ScheduleError(f"transfer {index}: rank {rank} sends chunk {transfer.chunk} to itself")
        place = layout.places[transfer.chunk]
        span = BufferSlice(Buffer.INPUT, place.start, place.stop)
        for piece in range(pieces):
            length = span.part(piece, pieces).length
            if length:
                tag = index * pieces + piece
                found.append(_PieceMessage(transfer.step + piece, transfer, piece, length, tag))
    found.sort(key=lambda message: (message.time, message.tag))
    return found


@dataclass(slots=True)
class _PendingReceive:
    """A receive whose data does not count yet; `claims` where its slice becomes the cell's home."""

    src: int
    into: BufferSlice
    reduce: bool
    claims: bool


@dataclass(slots=True)
class _Cell:
    """One piece of one chunk on this rank: where its current value is, and what arrived in this step."""

    home: BufferSlice | None
    final: BufferSlice | None
    latest: Transfer | None = None  # the last that came in
    arrivals: list[_PendingReceive] = field(default_factory=list)


@dataclass(slots=True)
class _SliceUse:
    """Who touched a slice last: the operation that wrote it, and those that have read it since."""

    written: int | None = None
    read: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _OperationWriter:
    """Writes the operations of one rank and keeps track of what depends on what.

    Slices that are in use at the same time are disjoint and keep their start, so a slice is known by its
    buffer and start. `summands` has chunk, step and target of what is sent to be added.
    """

    layout: Layout
    rank: int
    pieces: int
    scratch: Scratch
    summands: Collection[tuple[int, int, int]]
    operations: list[Operation] = field(default_factory=list)
    _cells: dict[tuple[int, int], _Cell] = field(default_factory=dict)
    _uses: dict[tuple[Buffer, int], _SliceUse] = field(default_factory=lambda: defaultdict(_SliceUse))

    def send(self, message: _PieceMessage) -> None:
        cell = self._cell(message)
        if cell.home is None:
            step, chunk = message.transfer.step, message.transfer.chunk
            raise ScheduleError(f"step {step}: rank {self.rank} sends chunk {chunk} before it holds it")
        after = self._reads(cell.home)
        self.operations.append(
            Send(message.time, message.transfer.dst, cell.home, message.tag, tuple(sorted(after)))
        )

    def receive(self, message: _PieceMessage, read_until_then: bool) -> None:
        """With `read_until_then`, sends of this time may still read what the rank holds when it arrives."""
        cell = self._cell(message)
        transfer = message.transfer
        if (
            cell.latest is not None
            and cell.latest.step == transfer.step
            and not (transfer.reduce and cell.latest.reduce)
        ):
            raise ScheduleError(
                f"step {transfer.step}: rank {self.rank} receives chunk {transfer.chunk} twice; "
                "only reductions may meet in one step"
            )
        cell.latest = transfer
        if transfer.reduce:
            # A value that is absent or must not be overwritten moves into the first slice to arrive.
            claims = not cell.arrivals and (cell.home is None or cell.home.buffer is Buffer.INPUT)
            direct = claims
        else:
            claims = True
            direct = cell.home != cell.final or not read_until_then
        into = cell.final if direct and cell.final is not None else self._take(message)
        cell.arrivals.append(_PendingReceive(transfer.src, into, transfer.reduce, claims))
        after = self._writes(into)
        self.operations.append(Receive(message.time, transfer.src, into, message.tag, tuple(sorted(after))))

    def settle(self, message: _PieceMessage) -> None:
        """Let what arrived in this step count."""
        cell = self._cell(message)
        added = [it for it in cell.arrivals if it.reduce]
        for arrival in cell.arrivals:
            if not arrival.reduce:
                self._replace(message, cell, arrival.into)
        if added:
            self._add(message, cell, added)
        cell.arrivals.clear()

    def _add(self, message: _PieceMessage, cell: _Cell, arrivals: Sequence[_PendingReceive]) -> None:
        """Add up what is here and what arrived.

        Ranks that exchange their values do so in the order of ranks: each adds up for itself, and where all
        exchange with all, all get the same bits (`backends.lowering.additions` tells whether they do).
        """
        result = next((it.into for it in arrivals if it.claims), cell.home)
        assert result is not None, "the first arrival claims a home where there is none"
        given = [] if cell.home is None else [(self.rank, cell.home)]
        given += [(it.src, it.into) for it in arrivals]
        chunk, step = message.transfer.chunk, message.transfer.step
        if any((chunk, step, it.src) in self.summands for it in arrivals):
            given.sort(key=lambda one: one[0])
        total, *rest = (it for _, it in given)
        for other in rest:
            if other == result or total.buffer is Buffer.INPUT:
                self.add(message.time, total, other)
                total = other
            else:
                self.add(message.time, other, total)
        for arrival in arrivals:
            if arrival.into != result:
                self.scratch.give_back(chunk, arrival.into, message.time)
        cell.home = result

    def close(self, message: _PieceMessage) -> None:
        """No message of this cell follows."""
        cell = self._cells.pop(message.cell)
        assert cell.home is not None, "what was sent or received has its place"
        if cell.home.buffer is Buffer.SCRATCH:
            self.scratch.give_back(message.transfer.chunk, cell.home, message.time)

    def copy(self, time: int, source: BufferSlice, into: BufferSlice) -> None:
        after = self._reads(source) | self._writes(into)
        self.operations.append(Copy(time, source, into, tuple(sorted(after))))

    def _replace(self, message: _PieceMessage, cell: _Cell, into: BufferSlice) -> None:
        chunk = message.transfer.chunk
        if cell.final is not None and into != cell.final:
            self.copy(message.time, into, cell.final)
            self.scratch.give_back(chunk, into, message.time)
            into = cell.final
        if cell.home is not None and cell.home.buffer is Buffer.SCRATCH:
            self.scratch.give_back(chunk, cell.home, message.time)
        cell.home = into

    def add(self, time: int, source: BufferSlice, into: BufferSlice) -> None:
        after = self._reads(source) | self._writes(into)
        self.operations.append(Reduce(time, source, into, tuple(sorted(after))))

    def _cell(self, message: _PieceMessage) -> _Cell:
        cell = self._cells.get(message.cell)
        if cell is None:
            chunk, piece = message.cell
            initial = self.layout.initial(self.rank, chunk)
            final = self.layout.final(self.rank, chunk)
            cell = _Cell(
                None if initial is None else initial.part(piece, self.pieces),
                None if final is None else final.part(piece, self.pieces),
            )
            self._cells[message.cell] = cell
        return cell

    def _take(self, message: _PieceMessage) -> BufferSlice:
        place = self.layout.places[message.transfer.chunk]
        longest = -(-(place.stop - place.start) // self.pieces)
        return self.scratch.take(message.transfer.chunk, message.length, longest, message.time)

    def _reads(self, source: BufferSlice) -> set[int]:
        """Note that the next operation reads the slice; what it must come after."""
        use = self._uses[source.buffer, source.start]
        use.read.append(len(self.operations))
        return set() if use.written is None else {use.written}

    def _writes(self, into: BufferSlice) -> set[int]:
        """Note that the next operation writes the slice; what it must come after."""
        use = self._uses[into.buffer, into.start]
        # Whoever has read it came after whoever wrote it.
        after = {*use.read} if use.read or use.written is None else {use.written}
        use.written, use.read = len(self.operations), []
        return after

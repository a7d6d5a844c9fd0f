"""A schedule as a program of puts and signals, within the limits of MSCCL++'s executor.

It begins with the two-sided steps that `blocks` makes, one block per connection or pair of connections:

    s    put, signal                  r    wait; each put goes where its data are wanted, or
    rrc  wait, add                         into scratch of its own at the receiver
    rcs  wait, put, signal            rrs  wait, add and put, signal
    cpy  copy

Nothing flows back within a call: every message has its own place. That its receiver has begun the call, every
sender waits for once. Dependencies between blocks become semaphores. Blocks of too many operations go on in
another block, over connections of its own.

Large chunks go through a schedule of several steps in pieces: what a block does for a chunk becomes a loop,
whose every turn waits, moves and signals for one piece. A block ends one chunk before it begins the next, and
all blocks take chunks in the same order, so that loops never wait for each other in a circle.

With packets (LL) data and flag are one: messages pass through scratch, and there are no signals. Proxies take
packets out of scratch, where they are made first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import groupby
from operator import attrgetter
from typing import TypeAlias, TypeVar

from arborcast.backends.programs.exporting.blocks import thread_blocks
from arborcast.backends.programs.exporting.export import (
    check_schedule,
    draft_of,
    excess,
    first_correct,
    in_units,
    over_channels,
)
from arborcast.backends.programs.exporting.logical import Ranks
from arborcast.backends.programs.exporting.switches import BLOCKS, switch_program
from arborcast.backends.programs.mscclpp import limits
from arborcast.backends.programs.mscclpp.writer import KINDS
from arborcast.backends.programs.pacing import rate_of, timed_bytes
from arborcast.backends.programs.program import (
    Acquire,
    Code,
    Connection,
    Flush,
    GlobalProgram,
    Loop,
    Memory,
    Move,
    OneTime,
    Operation,
    ProgramError,
    RankPart,
    Release,
    Signal,
    Span,
    Step,
    Synchronize,
    ThreadBlock,
    Wait,
)
from arborcast.synth.collective import Kind
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.nccl_protocol import Protocol
from arborcast.synth.schedule import Schedule

MOST_CHUNKS = 1 << 20
_MOST_CHANNELS = 32
_AROUND = 7  # operations of a block besides those of its steps, at most

PIECES, LEAST_PIECE_BYTES, MOST_PIECE_BYTES = 128, 1 << 14, 1 << 20
"""Into how many pieces chunks are cut: with fewer the first one is late, with more there are more signals."""

NEAR = Fraction(19, 20)
"""A plan that reaches so much of its schedule's rate without pieces, such as one of rings, has none."""

Seat: TypeAlias = tuple[int, int]
"""A block of the two-sided program, and which of the blocks that it is cut into."""

Place: TypeAlias = tuple[int, int]
"""Block of the two-sided program, step."""

_O = TypeVar("_O", OneTime, Operation)


def export_one_sided(
    schedule: AnySchedule,
    *,
    in_place: bool = True,
    protocol: Protocol = Protocol.SIMPLE,
    chunks: int | None = None,
    channels: int | None = None,
    ranks_per_host: int | None = None,
    least_bytes: int = 0,
    most_bytes: int | None = None,
    name: str | None = None,
) -> GlobalProgram:
    """The program of a schedule as puts and signals, checked.

    Args:
        schedule: a correct one, in either form.
        in_place: for calls whose output is over their input, or for those with two buffers; a program each.
        protocol: Simple for large messages, LL for small ones.
        chunks: of the whole buffer, to which shares are rounded; None for the least number that is exact.
        channels: over how many thread blocks a connection is dealt at most; None for the most that fit.
        ranks_per_host: ranks of different hosts write through proxies (port channels); None for one host.
        least_bytes: the smallest buffer that the plan is for.
        most_bytes: the largest; None for no limit.
        name: what the program is called.

    Raises:
        ProgramError: MSCCL++ has no such collective, or the schedule does not fit; with the limit and by
            how much.
    """
    collective = schedule.collective
    _check(schedule, protocol, ranks_per_host)
    explicit, units = in_units(schedule, chunks)
    if explicit.uses_switches and chunks is None and protocol is Protocol.SIMPLE:
        units *= channels or BLOCKS  # a part for each block
    if units > MOST_CHUNKS:
        raise ProgramError(
            f"{collective.kind}: exact shares need {units} chunks, more than {MOST_CHUNKS}; "
            "chunks= (--chunks) rounds "
            "the shares to fewer"
        )
    draft = draft_of(
        explicit,
        units,
        in_place=in_place,
        protocol=protocol,
        least_bytes=least_bytes,
        most_bytes=most_bytes,
        name=name,
    )
    draft = replace(draft, double_scratch=protocol is not Protocol.SIMPLE)
    return first_correct(_drafts(draft, explicit, channels, ranks_per_host), draft.name, "MSCCL++")


def _drafts(
    draft: GlobalProgram, schedule: Schedule, channels: int | None, ranks_per_host: int | None
) -> Iterator[GlobalProgram]:
    """What is tried in turn, the cheapest first."""
    simple = draft.protocol is Protocol.SIMPLE
    if schedule.uses_switches:
        for greet in (True,) if simple else (False, True):
            program = switch_program(draft, schedule, channels or (BLOCKS if simple else 1), greet=greet)
            found = next(_beyond(program), None)
            if found is not None:
                raise ProgramError(f"{draft.name}: does not fit MSCCL++: {found}")
            yield program
        return
    ranks = Ranks(schedule, draft.chunks, draft.chunks, in_place=draft.in_place)

    def made(ways: _Ways) -> GlobalProgram:
        return _within_limits(draft, ranks, schedule, channels, ranks_per_host, ways)

    forms = [_Ways(None, *form) for form in (_PLAIN if simple else _PACKETS)]
    whole = made(forms[0])
    piece_bytes = _piece_bytes(draft) if simple and schedule.steps > 1 else None
    if piece_bytes is not None and not _is_near(whole, schedule):
        yield from (made(replace(form, piece_bytes=piece_bytes)) for form in forms)
    yield whole
    yield from map(made, forms[1:])


def _is_near(program: GlobalProgram, schedule: Schedule) -> bool:
    """Whether a program without loops has nearly the rate of its schedule."""
    try:
        return rate_of(program, schedule.topology) >= NEAR * schedule.rate
    except ProgramError:  # it waits for ever, or has no way for a message
        return False


@dataclass(frozen=True, slots=True)
class _Ways:
    """What is tried in turn, the fastest first.

    Attributes:
        piece_bytes: of the pieces in which chunks go through loops, for each chunk of the program: so all
            chunks of the schedule, of whatever shares, have as many; None where each goes as a whole.
        direct: messages that nobody adds to go to where they are wanted, not to scratch first.
        flush: blocks wait for their proxies after each message, not after the last one alone.
        greet: senders wait until their receivers have begun the call.
    """

    piece_bytes: int | None
    direct: bool
    flush: bool
    greet: bool


_PLAIN = ((True, False, True), (False, False, True), (False, True, True))
_PACKETS = ((False, False, False), (False, False, True))


def _piece_bytes(draft: GlobalProgram) -> int | None:
    """A power of two of which a chunk of the program has some `PIECES`; None where nothing can be hidden."""
    chunk_bytes = timed_bytes(draft) // draft.chunks
    piece = 1 << max(0, (chunk_bytes // PIECES).bit_length() - 1)
    piece = min(MOST_PIECE_BYTES, max(LEAST_PIECE_BYTES, piece))
    return piece if piece < chunk_bytes else None


def _check(schedule: AnySchedule, protocol: Protocol, ranks_per_host: int | None) -> None:
    collective, topology = schedule.collective, schedule.topology
    if collective.kind in {Kind.GATHER, Kind.SCATTER}:
        raise ProgramError(
            f"{collective.kind}: MSCCL++'s executor divides the bytes of both buffers by their chunks on "
            f"every rank, and ranks besides the root have but one; it runs {', '.join(KINDS)}"
        )
    check_schedule(schedule, KINDS, "MSCCL++", in_network=True)
    if protocol is Protocol.LL128:
        raise ProgramError("MSCCL++ has protocols Simple and LL, got LL128")
    if schedule.uses_switches and (ranks_per_host or topology.ranks) < topology.ranks:
        raise ProgramError(
            f"--ranks-per-host {ranks_per_host}: switch channels are for ranks whose memory one switch "
            f"reaches, all {topology.ranks} of this schedule"
        )
    if ranks_per_host is not None and ranks_per_host < 1:
        raise ProgramError(f"ranks per host must be at least 1, got {ranks_per_host}")


def _within_limits(
    draft: GlobalProgram,
    ranks: Ranks,
    schedule: Schedule,
    channels: int | None,
    ranks_per_host: int | None,
    ways: _Ways,
) -> GlobalProgram:
    """Over as many channels as fit: more of them are more blocks."""
    most = min(_MOST_CHANNELS, schedule.chunk_count, channels or _MOST_CHANNELS)

    def over(number: int) -> GlobalProgram:
        two_sided = [
            thread_blocks(
                actions,
                lambda action: action.piece.chunk % number,
                pair=True,
                by_chunk=ways.piece_bytes is not None,
            )
            for actions in ranks.actions
        ]
        return _Translation(draft, two_sided, ranks, ranks_per_host, ways).program(number)

    numbers = sorted({*range(1, min(most, 8) + 1), most * 3 // 4, most} - {0}, reverse=True)
    return over_channels(numbers, over, _beyond, "MSCCL++")


def _beyond(program: GlobalProgram) -> Iterator[str]:
    """What does not fit, and by how much."""
    for rank, part in enumerate(program.parts):
        yield from excess(f"rank {rank} has", len(part.blocks), "thread blocks", limits.BLOCKS)
        held = f"rank {rank} has a block of"
        for block in part.blocks:
            loops = (each for each in block.operations if isinstance(each, Loop))
            count = len(block.operations) + sum(len(loop.operations) for loop in loops)
            yield from excess(held, count, "operations", limits.OPERATIONS)
            yield from excess(held, len(block.connections), "connections", limits.CHANNELS)


@dataclass(slots=True)
class _PlacedMessage:
    """Where one message lands, the connection that it goes over at both ends, whether it is its last one."""

    lands: Span
    leaving: Connection
    arriving: Connection
    last: bool = False


@dataclass(slots=True)
class _Work:
    """One step and what it becomes.

    Attributes:
        step: of the two-sided program.
        seat: the block that it goes to.
        chunk: whose loop it belongs to; None for none.
        room: where a sum of packets stands that is only passed on, as no operation makes one without.
        come: the message that it takes.
        go: the message that it makes.
        gives: semaphores that it releases, and whether piece by piece.
        before: for once, before the loop.
        each: for each piece.
        after: for once, after the loop.
    """

    step: Step
    seat: Seat
    chunk: int | None
    room: Span | None = None
    come: _PlacedMessage | None = None
    go: _PlacedMessage | None = None
    gives: list[tuple[int, bool]] = field(default_factory=list)
    before: list[OneTime] = field(default_factory=list)
    each: list[OneTime] = field(default_factory=list)
    after: list[OneTime] = field(default_factory=list)


@dataclass(slots=True)
class _Seat:
    """One block that comes out.

    Attributes:
        body: its steps.
        arriving: connections on which it gets messages.
        leaving: those on which it sends some.
        ends: those that it names, by memory before those by proxies, as plans list them.
        acquires: semaphores of the part of its block before it.
        releases: those of the part behind it.
    """

    body: list[_Work] = field(default_factory=list)
    arriving: dict[Connection, None] = field(default_factory=dict)
    leaving: dict[Connection, None] = field(default_factory=dict)
    ends: list[Connection] = field(default_factory=list)
    acquires: list[int] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)


class _Translation:
    def __init__(
        self,
        draft: GlobalProgram,
        two_sided: list[tuple[tuple[ThreadBlock, ...], int]],
        ranks: Ranks,
        ranks_per_host: int | None,
        ways: _Ways,
    ) -> None:
        self._draft = draft
        self._ranks = ranks
        self._ways = ways
        self._per_host = ranks_per_host
        self._packets = draft.protocol is not Protocol.SIMPLE
        self._works = [dict(self._cut(blocks)) for blocks, _ in two_sided]
        self._slots: list[int] = []
        for works, (_, size) in zip(self._works, two_sided, strict=True):
            first = size
            for work in works.values():
                if self._packets and work.step.code is Code.RECEIVE_REDUCE_SEND:
                    work.room = Span(Memory.SCRATCH, first, work.step.count)
                    first += work.step.count
            self._slots.append((first + 1) // 2 if self._packets else first)
        self._match([blocks for blocks, _ in two_sided])

    def program(self, channels: int) -> GlobalProgram:
        """All ranks."""
        return replace(self._draft, parts=tuple(map(self._part, range(len(self._works)))), channels=channels)

    def _cut(self, blocks: Sequence[ThreadBlock]) -> Iterator[tuple[Place, _Work]]:
        """The steps of a rank, each with the block that it goes to of those that its own is cut into."""
        loops = self._ways.piece_bytes is not None
        for number, block in enumerate(blocks):
            part, used, chunk = 0, _AROUND, -1
            for at, step in enumerate(block.operations):
                assert isinstance(step, Step), "it is two-sided"
                sends = (3 if self._per_host is None or not self._packets else 6) * step.code.sends
                cost = 2 * bool(step.after) + 2 + 4 * step.code.receives + sends + 2 * step.posts
                if loops and step.chunk != chunk:
                    cost, chunk = cost + 1, step.chunk or 0
                if used + cost > limits.OPERATIONS:
                    part, used = part + 1, _AROUND
                used += cost
                # Copies before the first step are of no chunk.
                in_loop = loops and step.chunk is not None and step.chunk >= 0
                yield (number, at), _Work(step, (number, part), step.chunk if in_loop else None)

    def _match(self, blocks: Sequence[Sequence[ThreadBlock]]) -> None:
        """Sends with their receives, in order; where messages land; connections, one for each two blocks."""
        sends: dict[tuple[int, int, int], list[_Work]] = defaultdict(list)
        receives: dict[tuple[int, int, int], list[_Work]] = defaultdict(list)
        for rank, works in enumerate(self._works):
            for (number, _), work in works.items():
                block = blocks[rank][number]
                if work.step.code.sends and block.send is not None:
                    sends[rank, block.send, block.channel].append(work)
                if work.step.code.receives and block.receive is not None:
                    receives[block.receive, rank, block.channel].append(work)
        numbers: dict[tuple[int, int, str], int] = defaultdict(int)
        latest: dict[tuple[int, Seat, int, Seat], _PlacedMessage] = {}
        for src, dst, channel in sorted(sends):
            kind = "memory"
            if self._per_host is not None and src // self._per_host != dst // self._per_host:
                kind = "port"
            for sender, receiver in zip(sends[src, dst, channel], receives[src, dst, channel], strict=True):
                key = src, sender.seat, dst, receiver.seat
                if key in latest:
                    number = latest[key].leaving.number
                else:
                    pair = min(src, dst), max(src, dst), kind
                    number = numbers[pair]
                    numbers[pair] += 1
                message = _PlacedMessage(
                    self._landing(dst, receiver.step),
                    Connection(dst, kind, number),
                    Connection(src, kind, number),
                )
                latest[key] = sender.go = receiver.come = message
        for message in latest.values():
            message.last = True

    def _landing(self, rank: int, step: Step) -> Span:
        """Where the message that a step takes is put."""
        if self._ways.direct and not step.code.reads:
            assert step.target is not None, "a step that does not add writes"
            return replace(step.target, rank=rank)
        return self._scratch(rank, step.count, rank)

    def _scratch(self, rank: int, count: int, seen_from: int | None = None) -> Span:
        """Scratch of a message's own."""
        start = self._slots[rank]
        self._slots[rank] += count
        return Span(Memory.SCRATCH, start, count, seen_from, self._packets)

    def _part(self, rank: int) -> RankPart:
        seats: dict[Seat, _Seat] = defaultdict(_Seat)
        works = self._works[rank]
        for work in works.values():
            seats[work.seat].body.append(work)
        for seat in seats.values():
            self._connect(seat)
        semaphores = self._wait(works, seats)
        for work in works.values():
            self._step(rank, work, seats[work.seat])
        return RankPart(
            tuple(map(self._block, seats.values())),
            *self._ranks.buffers(rank),
            self._slots[rank],
            (0,) * semaphores,
        )

    def _connect(self, seat: _Seat) -> None:
        """Connections of a block; packets by memory need none that they name."""
        used: dict[Connection, None] = {}
        for work in seat.body:
            if work.come is not None:
                seat.arriving.setdefault(work.come.arriving)
                used |= {} if self._packets else {work.come.arriving: None}
            if work.go is not None:
                end = work.go.leaving
                seat.leaving.setdefault(end)
                used |= {} if self._packets and end.kind == "memory" else {end: None}
        if self._ways.greet:
            used |= seat.arriving | seat.leaving
        seat.ends = sorted(used, key=attrgetter("kind"))

    def _wait(self, works: Mapping[Place, _Work], seats: Mapping[Seat, _Seat]) -> int:
        """Let steps wait for others by semaphores, and parts of a block for each other; how many these are.

        There is one for each two blocks of which one waits for the other. What is waited for once and what is
        waited for piece by piece, as both are of one loop or of none, are counted apart.
        """
        found: dict[tuple[Seat, Seat, bool], int] = {}
        for work in works.values():
            waits: tuple[list[int], list[int]] = [], []
            for after in work.step.after:
                before = works[after.block, after.step]
                together = before.chunk == work.chunk
                semaphore = found.setdefault((before.seat, work.seat, together), len(found))
                before.gives.append((semaphore, together))
                waits[together].append(semaphore)
            for rows, taken in zip((work.before, work.each), waits, strict=True):
                rows.extend(_by_sixteens(Acquire, taken))
                if taken:
                    rows.append(Synchronize())
        parts = [seat for seat in seats if seat[1]]
        for semaphore, (number, part) in enumerate(parts, len(found)):
            seats[number, part].acquires.append(semaphore)
            seats[number, part - 1].releases.append(semaphore)
        return len(found) + len(parts)

    def _step(self, rank: int, work: _Work, seat: _Seat) -> None:
        body = work.each
        if work.come is not None and not self._packets:
            body += [Wait((seat.ends.index(work.come.arriving),)), Synchronize()]
        landed = None if work.come is None else replace(work.come.lands, rank=None)
        if self._packets:
            self._with_packets(rank, work, landed, seat)
        else:
            self._plain(work, landed, seat)
        for rows, together in ((body, True), (work.after, False)):
            release = [semaphore for semaphore, each in work.gives if each is together]
            if release and not (rows and isinstance(rows[-1], Signal)):
                rows.append(Synchronize())
            rows.extend(_by_sixteens(Release, release))

    def _plain(self, work: _Work, landed: Span | None, seat: _Seat) -> None:
        body, go = work.each, work.go
        read = tuple(span for span in (work.step.source, landed) if span is not None)
        result = work.step.target or read[-1]
        local = () if read == (result,) else (result,)
        # Nothing copies to two places at once, and proxies only copy.
        if local and (go is None or go.leaving.kind == "port" or len(read) == 1):
            body.append(Move(read, local))
            if go is not None and go.leaving.kind == "port":
                body.append(Synchronize())
            local = ()
        if go is None:
            return
        channel = seat.ends.index(go.leaving)
        if go.leaving.kind == "memory":
            body += [Move(read, (*local, go.lands)), Synchronize(), Signal((channel,))]
            return
        body += [Move((result,), (go.lands,), channel), Signal((channel,))]
        if go.last or self._ways.flush:
            body.append(Flush((channel,)))

    def _with_packets(self, rank: int, work: _Work, landed: Span | None, seat: _Seat) -> None:
        body, go = work.each, work.go
        source, target = work.step.source, work.step.target
        by_proxy = go is not None and go.leaving.kind == "port"
        far = () if go is None or by_proxy else (go.lands,)
        passed = landed  # as it stands in scratch, where nobody adds to it
        if landed is None:
            assert source is not None, "it reads"
            if by_proxy:
                passed = self._staged(rank, source, body)
            if not by_proxy or target is not None:
                body.append(Move((source,), far or (target or source,)))
        elif source is not None:
            result = target or work.room
            assert result is not None, "a sum has its place"
            body.append(Move((source, landed), (result, *far)))
            if by_proxy:
                body.append(Synchronize())
                passed = self._staged(rank, result, body)
        else:
            assert target is not None, "it writes"
            body += [Move((landed,), (span,)) for span in (*far, target)]
        if by_proxy and go is not None and passed is not None:
            # All threads have seen all packets before one tells the proxy.
            channel = seat.ends.index(go.leaving)
            body += [Synchronize(), Move((passed,), ()), Synchronize(), Move((passed,), (go.lands,), channel)]
        body.append(Synchronize())

    def _staged(self, rank: int, data: Span, body: list[OneTime]) -> Span:
        """Data made packets in scratch of their own, whence a proxy takes them."""
        room = self._scratch(rank, data.count)
        body.append(Move((data,), (room,)))
        return room

    def _block(self, seat: _Seat) -> ThreadBlock:
        """Greetings, what the block before has to hand on, the steps."""
        head: list[Operation] = []
        if self._ways.greet:
            for ends, make in ((seat.arriving, Signal), (seat.leaving, Wait)):
                for kind in ("memory", "port"):
                    chosen = [seat.ends.index(end) for end in ends if end.kind == kind]
                    for at in range(0, len(chosen), limits.CHANNELS_OF_OPERATION):
                        relaxed = kind == "memory"
                        head.append(make(tuple(chosen[at : at + limits.CHANNELS_OF_OPERATION]), relaxed))
        if seat.acquires:
            head.append(Acquire(tuple(seat.acquires)))
        if head:
            head.append(Synchronize())
        tail: list[Operation] = [Synchronize(), Release(tuple(seat.releases))] if seat.releases else []
        kept = _without_repeats([*head, *self._looped(seat.body), *tail])
        while kept and isinstance(kept[-1], Synchronize):
            kept.pop()
        if kept and isinstance(kept[0], Synchronize):
            kept.pop(0)
        return ThreadBlock(tuple(kept), connections=tuple(seat.ends))

    def _looped(self, body: list[_Work]) -> Iterator[Operation]:
        """What steps become, those of a chunk in one loop."""
        for chunk, group in groupby(body, key=attrgetter("chunk")):
            works = list(group)
            if chunk is None or self._ways.piece_bytes is None:
                for work in works:
                    yield from (*work.before, *work.each, *work.after)
                continue
            for work in works:
                yield from work.before
            each = _without_repeats([operation for work in works for operation in work.each])
            count = works[0].step.count
            yield Loop(tuple(each), count, count * self._ways.piece_bytes)
            for work in works:
                yield from work.after


def _by_sixteens(make: type[Acquire | Release], semaphores: Sequence[int]) -> list[Acquire | Release]:
    """Operations on so many semaphores as one of them takes at most."""
    most = limits.SEMAPHORES_OF_OPERATION
    return [make(tuple(semaphores[at : at + most])) for at in range(0, len(semaphores), most)]


def _without_repeats(rows: list[_O]) -> list[_O]:
    """Of barriers of a block's threads that follow each other, one."""
    return [
        operation
        for at, operation in enumerate(rows)
        if not (at and isinstance(operation, Synchronize) and isinstance(rows[at - 1], Synchronize))
    ]

"""Schedules whose switches add and multicast (NVLink SHARP) as programs of switch channels.

The executor has two such operations. One rank has the switch add a chunk of all ranks of a group, and
multicasts the sum to all ranks of a group at once; or it multicasts a chunk of its own:

    0 -> s, 1 -> s, 2 -> s; s -> 1; 1 -> s; s -> 0, 1, 2        rank 1: add i1 of 0, 1, 2 -> o1 of 0, 1, 2
    1 -> s; s -> 0, 1, 2                                        rank 1: i1 -> o1 of 0, 1, 2

Schedules of these two forms alone are exported. Nobody touches the memory of others before all have begun
the call, and nobody ends it before all have done their part: every rank signals to every other, before and
after. Each chunk is dealt over all blocks of the rank that moves it, which meet at a barrier.

With packets (LL) a chunk is multicast as packets from scratch to scratch, and read from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from arborcast.backends.lowering.layout import lay_out
from arborcast.backends.programs.mscclpp import limits
from arborcast.backends.programs.program import (
    Barrier,
    Connection,
    GlobalProgram,
    Memory,
    Move,
    Operation,
    ProgramError,
    RankPart,
    Signal,
    Span,
    Synchronize,
    ThreadBlock,
    Wait,
)
from arborcast.synth.collective import Kind
from arborcast.synth.nccl_protocol import Protocol
from arborcast.synth.schedule import Schedule, Transfer
from arborcast.synth.topology import Vertex

BLOCKS = 8
"""Thread blocks of a rank where it is not said, of data; upstream's plans for switches take as many."""


@dataclass(slots=True)
class _SwitchContent:
    """What a switch holds of a chunk until it is replaced: whence it came, where it goes."""

    switch: Vertex
    inputs: list[Vertex] = field(default_factory=list)
    outputs: list[Vertex] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Use:
    """One chunk: the rank that moves it, those whose data are added (none: its own), those that get it."""

    mover: int
    added: tuple[int, ...]
    given: tuple[int, ...]


def switch_program(
    draft: GlobalProgram, schedule: Schedule, blocks: int, *, greet: bool = True
) -> GlobalProgram:
    """The program of a schedule whose transfers all end at switches.

    Args:
        draft: which has all but the parts.
        schedule: its shares are whole multiples of a chunk.
        blocks: of each rank, at least; more where signals to all others need them.
        greet: with packets, whether ranks wait until all have begun the call.

    Raises:
        ProgramError: the executor has no operation for what a switch does in the schedule.
    """
    uses = [_use(schedule, chunk, transfers) for chunk, transfers in enumerate(_of_chunks(schedule))]
    packets = draft.protocol is not Protocol.SIMPLE
    if packets and any(use.added for use in uses):
        raise ProgramError("switches add no packets; sums in switches are exported for protocol Simple")
    layout, ranks = lay_out(schedule, draft.chunks), schedule.topology.ranks
    one_buffer = draft.in_place and draft.kind in {Kind.ALLREDUCE, Kind.BROADCAST}
    blocks = max(blocks, -(-(ranks - 1) // limits.CHANNELS))
    moves: list[list[list[Operation]]] = [[[] for _ in range(blocks)] for _ in range(ranks)]
    reads: list[list[list[Operation]]] = [[[] for _ in range(blocks)] for _ in range(ranks)]
    first = 0
    for chunk, use in enumerate(uses):
        initial, final = layout.initial(use.mover, chunk), layout.final(use.mover, chunk)
        assert initial is not None and final is not None, "it holds the chunk, and is among those that get it"
        for block in range(blocks):
            start, end = (final.length * part // blocks for part in (block, block + 1))
            if start == end:
                continue
            own = Span(Memory.INPUT, initial.start + start, end - start)
            aim = Span(Memory.INPUT if one_buffer else Memory.OUTPUT, final.start + start, end - start)
            if packets:
                room = Span(Memory.SCRATCH, first + start, end - start, packets=True)
                there = tuple(replace(room, rank=rank) for rank in use.given)
                moves[use.mover][block] += [
                    Move((own,), (room,)),
                    Synchronize(),
                    Move((room,), there, switch=True),
                ]
                for rank in use.given:
                    if rank != use.mover or not draft.in_place:
                        reads[rank][block].append(Move((room,), (aim,)))
                continue
            read = tuple(replace(own, rank=rank) for rank in use.added) or (own,)
            there = tuple(replace(aim, rank=rank) for rank in use.given)
            moves[use.mover][block].append(Move(read, there, switch=True))
        first += final.length
    parts = []
    for rank in range(ranks):
        made = []
        for number, ends in enumerate(_dealt(rank, ranks, blocks)):
            meet: list[Operation] = [Barrier(0, blocks)] if blocks > 1 else [Synchronize()]
            head = [*_meeting(ends, relaxed=packets), *meet] if greet else []
            tail = reads[rank][number] if packets else [*meet, *_meeting(ends)]
            made.append(ThreadBlock((*head, *moves[rank][number], *tail), connections=ends if head else ()))
        whole, block = layout.count, layout.input_elements(rank)
        given = whole if draft.kind in {Kind.ALLREDUCE, Kind.BROADCAST} else block
        parts.append(RankPart(tuple(made), given, whole, first if packets else 0))
    return replace(draft, parts=tuple(parts), channels=blocks)


def _dealt(rank: int, ranks: int, blocks: int) -> list[tuple[Connection, ...]]:
    """Connections to all others, dealt over the blocks."""
    ends = [Connection(peer, "memory") for peer in range(ranks) if peer != rank]
    return [
        tuple(ends[len(ends) * block // blocks : len(ends) * (block + 1) // blocks])
        for block in range(blocks)
    ]


def _meeting(ends: Sequence[Connection], *, relaxed: bool = False) -> Iterator[Operation]:
    """Tell the others, then wait for them."""
    most = limits.CHANNELS_OF_OPERATION
    groups = [tuple(range(at, min(at + most, len(ends)))) for at in range(0, len(ends), most)]
    yield from (Signal(group, relaxed) for group in groups)
    yield from (Wait(group, relaxed) for group in groups)


def _of_chunks(schedule: Schedule) -> list[list[Transfer]]:
    found: list[list[Transfer]] = [[] for _ in schedule.chunks]
    for transfer in schedule.transfers:  # in order of step
        found[transfer.chunk].append(transfer)
    return found


def _use(schedule: Schedule, chunk: int, transfers: Sequence[Transfer]) -> _Use:
    """What the executor does for a chunk."""
    topology = schedule.topology
    contents = _contents(transfers, topology.ranks)
    where = f"chunk {chunk}"
    if contents is None:
        raise ProgramError(
            f"{where}: goes from rank to rank besides switches; switch channels are exported for schedules "
            "whose transfers all end at switches; solve with --no-in-network"
        )
    name = topology.label(contents[0].switch)
    sums = [content for content in contents if len(content.inputs) > 1]
    if sums and len(sums[0].outputs) > 1:
        raise ProgramError(
            f"{where}: switch {name} multicasts its own sum; MSCCL++'s switch channels are NVLink SHARP, "
            "where a rank does; solve with --no-in-network"
        )
    if sums and (len(contents) != 2 or contents[1].inputs != sums[0].outputs or len(sums) > 1):
        raise ProgramError(
            f"{where}: switch {name} adds for rank {sums[0].outputs[0]} alone; MSCCL++'s executor has "
            "switches add only where the sum is multicast at once (glres); solve with --no-in-network"
        )
    if not sums and len(contents) > 1:
        raise ProgramError(
            f"{where}: is multicast {len(contents)} times, switch channels are exported for one; "
            "solve with --no-in-network"
        )
    last = contents[-1]
    use = _Use(last.inputs[0], tuple(sorted(sums[0].inputs)) if sums else (), tuple(sorted(last.outputs)))
    for ranks in filter(None, (use.added, use.given)):
        if use.mover not in ranks:
            raise ProgramError(
                f"{where}: rank {use.mover} must be of the group of its switch channel, as NVLink SHARP "
                f"loops back, got ranks {', '.join(map(str, ranks[:8]))}; solve with --no-in-network"
            )
    return use


def _contents(transfers: Sequence[Transfer], ranks: int) -> list[_SwitchContent] | None:
    """What switches hold, one after another; None where ranks, or switches, send to each other."""
    found: list[_SwitchContent] = []
    for transfer in transfers:
        if (transfer.src < ranks) is (transfer.dst < ranks):
            return None
        if transfer.dst >= ranks:
            if not found or found[-1].outputs or found[-1].switch != transfer.dst:
                found.append(_SwitchContent(transfer.dst))
            found[-1].inputs.append(transfer.src)
        elif not found or found[-1].switch != transfer.src:
            return None
        else:
            found[-1].outputs.append(transfer.dst)
    return found or None

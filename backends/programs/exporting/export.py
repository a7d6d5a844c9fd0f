"""A schedule as a program that MSCCL executes, within all of its limits.

Chunks of the program are the largest unit that all shares are whole multiples of, or as many as are asked
for: then shares are rounded. Pieces are not needed: the runtime goes through the program again and again, for
as much of each chunk as fits a slot, and blocks do not wait for each other between two rounds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial

from arborcast.backends.lowering.layout import blocks_in
from arborcast.backends.lowering.rank_view import refuse_switches
from arborcast.backends.programs.checking.check import check_program
from arborcast.backends.programs.exporting.blocks import thread_blocks
from arborcast.backends.programs.exporting.logical import ChunkAction, Ranks
from arborcast.backends.programs.limits import MSCCL
from arborcast.backends.programs.msccl.writer import KINDS, elements_of, file_steps
from arborcast.backends.programs.program import GlobalProgram, ProgramError, RankPart
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.nccl_protocol import Protocol
from arborcast.synth.schedule import Schedule

MOST_TRANSFERS = 1 << 18
"""Of a schedule; the program would have as many steps."""


def export_program(
    schedule: AnySchedule,
    *,
    in_place: bool = True,
    protocol: Protocol = Protocol.SIMPLE,
    chunks: int | None = None,
    channels: int | None = None,
    least_bytes: int = 0,
    most_bytes: int | None = None,
    name: str | None = None,
) -> GlobalProgram:
    """The program of a schedule, checked.

    Args:
        schedule: a correct one, in either form.
        in_place: for calls whose output is over their input, or for those with two buffers; a program each.
        protocol: Simple for large messages, LL for small ones.
        chunks: of the whole buffer, to which shares are rounded; None for the least number that is exact.
            The runtime serves calls alone whose elements are a multiple of it.
        channels: at most so many, over which the chunks are dealt; None for the most that fit.
        least_bytes: the smallest buffer that the runtime shall use it for.
        most_bytes: the largest; None for no limit.
        name: what the program is called.

    Raises:
        InputError: MSCCL has no such collective, or the schedule does not fit: which limit, by how much.

    Examples:
        >>> program = backends.export_program(synth.solve(topologies.load("ring:4"), "broadcast"))
        >>> program.ranks, program.protocol.value
        (4, 'Simple')
    """
    check_schedule(schedule, KINDS, "MSCCL")
    explicit, units = in_units(schedule, chunks)
    _check_units(units, schedule.collective)
    ranks = Ranks(explicit, units, MSCCL.count, in_place=in_place)
    draft = draft_of(
        explicit,
        units,
        in_place=in_place,
        protocol=protocol,
        least_bytes=least_bytes,
        most_bytes=most_bytes,
        name=name,
    )
    most = min(MSCCL.channels, explicit.chunk_count, channels or MSCCL.channels)
    ways = (
        over_channels(_numbers(most), partial(_over, draft, ranks, pair=pair), _beyond)
        for pair in (True, False)
    )
    return first_correct(ways, draft.name, "MSCCL")


def draft_of(
    schedule: Schedule,
    units: int,
    *,
    in_place: bool,
    protocol: Protocol,
    least_bytes: int,
    most_bytes: int | None,
    name: str | None,
) -> GlobalProgram:
    """A program of a schedule's that has all but its parts."""
    collective = schedule.collective
    return GlobalProgram(
        name=name or f"{schedule.topology.name}-{collective.kind}-{schedule.method.name}",
        kind=collective.kind,
        root=collective.root,
        chunks=units,
        parts=(),
        protocol=protocol,
        in_place=in_place,
        out_of_place=not in_place,
        least_bytes=least_bytes,
        most_bytes=most_bytes,
    )


def first_correct(programs: Iterable[GlobalProgram], name: str, runtime: str) -> GlobalProgram:
    """The first of some ways to say the same that the checker finds right.

    Raises:
        ProgramError: none is.
    """
    why = ""
    for program in programs:
        verdict = check_program(program, max_errors=1)
        if verdict.correct:
            return program
        why = why or verdict.errors[0]
    raise ProgramError(f"{name}: cannot be run by {runtime} as it is: {why}")


def over_channels(
    numbers: Iterable[int],
    made: Callable[[int], GlobalProgram],
    beyond: Callable[[GlobalProgram], Iterator[str]],
    runtime: str = "MSCCL",
) -> GlobalProgram:
    """The program over as many channels as fit: more of them means less steps a block, and more blocks.

    Args:
        numbers: of channels, the most first.
        made: the program over so many.
        beyond: what of it does not fit, and by how much.
        runtime: which it is for.

    Raises:
        ProgramError: none fits.
    """
    why, name = "", ""
    for number in numbers:
        program = made(number)
        found = next(beyond(program), None)
        if found is None:
            return program
        name = program.name
        if not why or "thread blocks" in why:
            why = f"over {number} channels {found}"
    raise ProgramError(f"{name}: does not fit {runtime}: {why}")


def in_units(schedule: AnySchedule, chunks: int | None) -> tuple[Schedule, int]:
    """The schedule written out, its shares whole multiples of 1 / units of the buffer; and the units.

    Args:
        schedule: in either form.
        chunks: the units, to which shares are rounded where they must be; None for the least exact number.

    Raises:
        ProgramError: the units are not a multiple of the blocks of the buffer.
    """
    explicit = schedule.expand()
    shares = (chunk.share.denominator for chunk in explicit.chunks)
    exact = math.lcm(blocks_in(explicit.collective), *shares)
    if chunks is not None and chunks % exact:
        explicit = rounded(explicit, chunks)
    return explicit, chunks or exact


def rounded(schedule: Schedule, units: int) -> Schedule:
    """The schedule with shares that are whole multiples of 1 / units of the buffer; some chunks may go.

    Within each block the largest remainders are rounded up.

    Raises:
        ProgramError: the units are not a multiple of the blocks of the buffer.
    """
    blocks = blocks_in(schedule.collective)
    if units < 1 or units % blocks:
        raise ProgramError(
            f"chunks must be a multiple of the {blocks} blocks of {schedule.collective.kind}, got {units}"
        )
    of_block: dict[object, list[int]] = defaultdict(list)
    for index, chunk in enumerate(schedule.chunks):
        of_block[schedule.collective.block_of(chunk.owner, chunk.target, chunk.demand)].append(index)
    counts = [0] * schedule.chunk_count
    for members in of_block.values():
        for index, count in zip(
            members, _apportion([schedule.chunks[i].share for i in members], units), strict=True
        ):
            counts[index] = count
    kept = [index for index, count in enumerate(counts) if count]
    number = {old: new for new, old in enumerate(kept)}
    chunks = [replace(schedule.chunks[old], share=Fraction(counts[old], units)) for old in kept]
    transfers = [
        replace(transfer, chunk=number[transfer.chunk])
        for transfer in schedule.transfers
        if transfer.chunk in number
    ]
    method = replace(schedule.method, settings=(*schedule.method.settings, ("rounded_to", units)))
    return Schedule.build(schedule.topology, schedule.collective, method, schedule.bound, chunks, transfers)


def _apportion(shares: list[Fraction], units: int) -> list[int]:
    whole = [int(share * units) for share in shares]
    left = int(sum(shares) * units) - sum(whole)
    by_rest = sorted(range(len(shares)), key=lambda index: (whole[index] - shares[index] * units, index))
    for index in by_rest[:left]:
        whole[index] += 1
    return whole


def check_schedule(
    schedule: AnySchedule, kinds: Collection[Kind], runtime: str, *, in_network: bool = False
) -> None:
    """Refuse what no program of a runtime does, whose switches add and multicast where `in_network` says so.

    Raises:
        InputError: another collective, not all ranks in their order, too many transfers, or switches that do
            more than the runtime's.
    """
    if not in_network:
        refuse_switches(schedule, runtime)
    collective, topology = schedule.collective, schedule.topology
    if collective.kind not in kinds:
        raise ProgramError(f"{collective.kind}: {runtime} runs {', '.join(kinds)}")
    if collective.ranks != tuple(range(topology.ranks)):
        left = sorted(set(range(topology.ranks)) - collective.members)
        raise ProgramError(
            f"{collective.kind}: all ranks take part in {runtime}'s collectives, in their order; "
            + (
                f"{len(left)} are relays ({', '.join(map(str, left[:8]))})"
                if left
                else "these are in another one"
            )
        )
    if schedule.transfer_count > MOST_TRANSFERS:
        raise ProgramError(f"at most {MOST_TRANSFERS} transfers are exported, got {schedule.transfer_count}")


def _check_units(units: int, collective: Collective) -> None:
    if units > MSCCL.offset:
        raise ProgramError(
            f"{collective.kind}: {units} chunks, {units - MSCCL.offset} more than offsets go to "
            f"({MSCCL.offset}); --chunks (chunks=) rounds the shares to fewer"
        )


def _numbers(most: int) -> Iterator[int]:
    number = most
    while number:
        yield number
        number = number * 3 // 4 if number > 8 else number - 1


def _over(draft: GlobalProgram, ranks: Ranks, channels: int, *, pair: bool) -> GlobalProgram:
    def channel_of(action: ChunkAction) -> int:
        return action.piece.chunk % channels

    parts = []
    for rank, actions in enumerate(ranks.actions):
        blocks, scratch = thread_blocks(actions, channel_of, pair=pair)
        parts.append(RankPart(blocks, *ranks.buffers(rank), scratch))
    return replace(draft, parts=tuple(parts), channels=channels)


def _beyond(program: GlobalProgram) -> Iterator[str]:
    """What does not fit, and by how much."""
    for rank, part in enumerate(program.parts):
        steps = max((file_steps(block) for block in part.blocks), default=0)
        yield from excess(f"rank {rank} has a block of", steps, "steps", MSCCL.steps)
        yield from excess(f"rank {rank} has", len(part.blocks), "thread blocks", MSCCL.blocks)
        yield from excess(f"rank {rank} has", elements_of(part, program.ranks), "elements", MSCCL.elements)
        if part.scratch_chunks > MSCCL.offset:
            yield f"rank {rank} needs {part.scratch_chunks} chunks of scratch, offsets go to {MSCCL.offset}"


def excess(holder: str, count: int, what: str, most: int) -> Iterator[str]:
    """How much somebody has beyond a limit, if there is too much."""
    if count > most:
        yield f"{holder} {count} {what}, {count - most} beyond {most}"

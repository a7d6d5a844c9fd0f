"""How long several schedules take that start together: one event loop, every link shared piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from arborcast.synth.collective import bandwidths
from arborcast.synth.errors import InputError
from arborcast.synth.groups.result import GroupSchedules
from arborcast.synth.schedule import Chunk, Schedule, Transfer
from arborcast.synth.simulation.service import EARLIEST
from arborcast.synth.simulation.simulator import Runs, check_positive, check_size, frames_per_piece
from arborcast.synth.simulation.timing import Timing

if TYPE_CHECKING:
    from arborcast.synth.simulation.hops import Hops


def simulate_groups(
    found: GroupSchedules, sizes: Sequence[int], *, pieces: int | None = None
) -> tuple[Timing, ...]:
    """The time of each group when all start at once.

    A link serves pieces as `synth.simulation.simulator` says, whichever group they are of: first those of
    early steps. It does not know of shares, so that a group that finishes leaves its links to the others.

    Args:
        found: what runs.
        sizes: bytes of each group's whole buffer.
        pieces: into how many pieces to cut every chunk; None chooses the number for which the last group
            is done first, among powers of two.

    Raises:
        InputError: other numbers of sizes than of groups, or one that is not positive.
    """
    if len(sizes) != len(found.groups):
        raise InputError(f"sizes: must be one for each of the {len(found.groups)} groups, got {len(sizes)}")
    for size in sizes:
        check_size(size)
    if pieces is not None:
        check_positive("pieces", pieces)
    total = sum(sizes)
    merged = _merged(found, [Fraction(size, total) for size in sizes])
    runs = Runs(merged)
    owners = _groups_of_hops(found, merged)
    powers = range(runs.most_free_pieces(total).bit_length())
    counts = [1 << power for power in powers] if pieces is None else [pieces]
    tried = [_times(runs.hops, owners, total, count) for count in counts]
    count, times = min(tried, key=lambda one: (max(one[1].values(), default=0.0), one[0]))
    return tuple(
        Timing(
            size,
            count,
            times[group],
            *bandwidths(kind.kind, len(kind.ranks), size, times[group]),
            str(EARLIEST),
        )
        for group, (size, kind) in enumerate(zip(sizes, [g.collective for g in found.groups], strict=True))
    )


def _merged(found: GroupSchedules, parts: Sequence[Fraction]) -> Schedule:
    """All chunks and transfers in one, for the event loop alone: as if of one buffer with room for all."""
    chunks: list[Chunk] = []
    transfers: list[Transfer] = []
    for group, part in zip(found.groups, parts, strict=True):
        first = len(chunks)
        chunks += [replace(chunk, share=chunk.share * part, target=None) for chunk in group.schedule.chunks]
        transfers += [
            replace(transfer, chunk=transfer.chunk + first) for transfer in group.schedule.transfers
        ]
    transfers.sort(key=lambda transfer: (transfer.step, transfer.chunk, transfer.src, transfer.dst))
    return replace(
        found.groups[0].schedule, chunks=tuple(chunks), transfers=tuple(transfers), rate=Fraction(0)
    )


def _groups_of_hops(found: GroupSchedules, merged: Schedule) -> list[int]:
    """The group of each hop, in the order of the event loop's hops."""
    of_chunk = [number for number, group in enumerate(found.groups) for _ in group.schedule.chunks]
    return [of_chunk[transfer.chunk] for transfer in merged.transfers for _ in transfer.hops]


def _times(hops: Hops, owners: Sequence[int], total: int, pieces: int) -> tuple[int, dict[int, float]]:
    """When the last piece of each group arrives, microseconds."""
    outcome = hops.play(total, pieces, frames=frames_per_piece(hops, total, pieces))
    last = (outcome.start.max(axis=0) + outcome.duration + outcome.latency).tolist()
    times = dict.fromkeys(owners, 0.0)
    for group, arrival in zip(owners, last, strict=False):  # what comes after them lies inside switches
        times[group] = max(times[group], arrival / outcome.ticks_per_us)
    return pieces, times

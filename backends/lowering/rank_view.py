"""What of a schedule concerns one rank, in the numbering of the whole one, whichever form it has.

An implicit schedule holds one tree for many. A rank has a part in an image of each transfer whose source or
destination is of its orbit: the image under the one translation that takes that end to the rank. So all that
a rank does is worked out from the representatives, and the whole schedule is nowhere made. A switch that
holds chunks is treated likewise; several translations may take an end to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np

from arborcast.synth.errors import InputError
from arborcast.synth.implicit_schedule import AnySchedule, ImplicitSchedule
from arborcast.synth.schedule import Chunk, Transfer
from arborcast.synth.simulation.pieces import switches_in
from arborcast.synth.symmetry.translations import Integers


class Image(NamedTuple):
    """A chunk of the whole schedule.

    Attributes:
        representative: the chunk that stands in the schedule.
        element: the translation that moved it; 0 where there are none.
        chunk: what came of it.
    """

    representative: int
    element: int
    chunk: Chunk


def images_of(schedule: AnySchedule, numbers: Iterable[int] | None = None) -> Iterator[tuple[int, Image]]:
    """Chunks of the whole schedule, each with its number there; all where no numbers are given."""
    if not isinstance(schedule, ImplicitSchedule):
        wanted = range(len(schedule.chunks)) if numbers is None else numbers
        yield from ((number, Image(number, 0, schedule.chunks[number])) for number in wanted)
        return
    found = np.fromiter(range(schedule.chunk_count) if numbers is None else numbers, dtype=np.int64)
    which, elements = np.divmod(found, schedule.translations.order)
    given = [schedule.chunks[index] for index in which.tolist()]
    # A chunk without a target has its owner for one while both are moved.
    ends = [(chunk.owner, chunk.owner if chunk.target is None else chunk.target) for chunk in given]
    pairs = np.array(ends, dtype=np.int64).reshape(-1, 2)
    owners, targets = schedule.translations.apply(elements[:, None], pairs).T
    columns = (column.tolist() for column in (found, which, elements, owners, targets))
    for chunk, (number, representative, element, owner, end) in zip(
        given, zip(*columns, strict=True), strict=True
    ):
        target = None if chunk.target is None else end
        yield number, Image(representative, element, Chunk(chunk.share, owner, target))


def transfers_of(schedule: AnySchedule, rank: int) -> list[tuple[int, Transfer]]:
    """What a rank sends and receives, each transfer with its number in the whole schedule, in their order.

    In the implicit form time and memory grow with twice the transfers that stand there, however many images
    they have.
    """
    if not isinstance(schedule, ImplicitSchedule):
        return [
            (number, transfer)
            for number, transfer in enumerate(schedule.transfers)
            if rank in (transfer.src, transfer.dst)
        ]
    which, elements = _own_images(schedule, rank)
    order = schedule.translations.order
    given = [schedule.transfers[index] for index in which.tolist()]
    ways = [(transfer.src, *transfer.via, transfer.dst) for transfer in given]
    lengths = [len(way) for way in ways]
    vertices = np.fromiter(chain.from_iterable(ways), dtype=np.int64, count=sum(lengths))
    moved = schedule.translations.apply(np.repeat(elements, lengths), vertices).tolist()
    found, end = [], 0
    for transfer, index, element, length in zip(
        given, which.tolist(), elements.tolist(), lengths, strict=True
    ):
        src, *via, dst = moved[end : end + length]
        end += length
        image = Transfer(
            transfer.chunk * order + element, src, dst, transfer.step, transfer.reduce, tuple(via)
        )
        found.append((index * order + element, image))
    return found


def partners_of(schedule: AnySchedule, rank: int) -> frozenset[int]:
    """The ranks, and able switches, that exchange messages with a rank or such a switch."""
    return frozenset(
        end for _, transfer in transfers_of(schedule, rank) for end in (transfer.src, transfer.dst)
    ) - {rank}


def refuse_switches(schedule: AnySchedule, who: str) -> None:
    """Refuse to run what no processes of ranks can: a schedule in which a switch adds or copies.

    Raises:
        InputError: that it is; it begins with `who`.
    """
    if switches := sorted(switches_in(schedule)):
        raise InputError(
            f"{who}: must be a schedule whose switches only forward (--no-in-network), since ranks alone run "
            f"it, got one in which switch {schedule.topology.label(switches[0])} adds or copies"
        )


def digest_of(schedule: AnySchedule) -> bytes:
    """32 bytes that tell a schedule from all with other messages, and one form of it from the other."""
    moves = schedule.translations.generators if isinstance(schedule, ImplicitSchedule) else ()
    content = (schedule.collective, schedule.chunks, schedule.transfers, moves)
    return hashlib.sha256(repr(content).encode()).digest()


def _own_images(schedule: ImplicitSchedule, rank: int) -> tuple[Integers, Integers]:
    """The transfers that a rank has a part in, with the elements that move them to it, in their order."""
    group = schedule.translations
    ends = np.array([(transfer.src, transfer.dst) for transfer in schedule.transfers], dtype=np.int64)
    found = []
    keeping = _keeping(schedule, rank)
    for end in ends.reshape(-1, 2).T:
        which = np.flatnonzero(group.orbit_of[end] == group.orbit_of[rank])
        elements = group.plus(group.moving(end[which], rank)[:, None], keeping)
        found.append((which[:, None] * group.order + elements).ravel())
    # Both ends of a transfer from a rank to itself would name it twice.
    which, elements = np.divmod(np.unique(np.concatenate(found)), group.order)
    return which, elements


def _keeping(schedule: ImplicitSchedule, vertex: int) -> Integers:
    """The elements that keep a vertex in its place: of a rank the identity alone."""
    group = schedule.translations
    if vertex < schedule.topology.ranks:
        return np.zeros(1, dtype=np.int64)
    return np.flatnonzero(group.apply(np.arange(group.order), vertex) == vertex)

"""A schedule carried over to a topology that is the same by renumbering, with its proof."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from arborcast.synth.certificate import Bound, Certificate, Cut, Dual, Partition
from arborcast.synth.schedule import Chunk, Schedule, Transfer
from arborcast.synth.topology import Permutation, Topology


def renumbered(schedule: Schedule, topology: Topology, images: Permutation) -> Schedule:
    """The schedule with every vertex called by its image; ranks take part in ascending order.

    Args:
        schedule: on another topology, among all its ranks.
        topology: what the other one is by renumbering.
        images: the vertex of `topology` that each vertex of the other one becomes.

    Raises:
        ScheduleError: `images` takes a link that is used to where there is none.
    """
    root = schedule.collective.root
    collective = replace(
        schedule.collective,
        ranks=tuple(sorted(images[rank] for rank in schedule.collective.ranks)),
        root=None if root is None else images[root],
    )
    return Schedule(
        topology,
        collective,
        schedule.method,
        _bound(schedule.bound, schedule.topology, topology, images),
        tuple(
            Chunk(chunk.share, images[chunk.owner], None if chunk.target is None else images[chunk.target])
            for chunk in schedule.chunks
        ),
        tuple(
            Transfer(
                transfer.chunk,
                images[transfer.src],
                images[transfer.dst],
                transfer.step,
                transfer.reduce,
                tuple(images[vertex] for vertex in transfer.via),
            )
            for transfer in schedule.transfers
        ),
        schedule.rate,
        schedule.rounds,
    )


def _bound(bound: Bound, before: Topology, after: Topology, images: Permutation) -> Bound:
    return replace(bound, certificate=_certificate(bound.certificate, before, after, images))


def _certificate(
    certificate: Certificate, before: Topology, after: Topology, images: Permutation
) -> Certificate:
    def moved(side: frozenset[int]) -> frozenset[int]:
        return frozenset(images[vertex] for vertex in side)

    match certificate:
        case Cut(side, capacity):
            return Cut(moved(side), capacity)
        case Partition(blocks, capacity):
            return Partition(tuple(map(moved, blocks)), capacity)
        case Dual(lengths, capacity, distance):
            of_link: dict[tuple[int, int], Fraction] = {
                (images[link.src], images[link.dst]): length
                for link, length in zip(before.links, lengths, strict=True)
            }
            return Dual(tuple(of_link[link.src, link.dst] for link in after.links), capacity, distance)

"""Rings both ways round: each block goes half of the way in each direction, in half of the steps of a ring.

Where a set of rings holds pairs that run opposite to each other, what two rings carry all the way round can
go both ways at once: as much on every link, and the last rank has it after n/2 hops and not n - 1. Of an even
number of ranks one side is a hop longer; of the two chunks of a pair each has it on the other side.

    allgather        p > p+1 > ... > p + far    and    p > p-1 > ... > p - near      far + near = n - 1
    reduce-scatter   the same backwards, so that the last sums of both sides come to p
    allreduce        the second, then the first
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction

from arborcast.synth.baselines.rings import moves_on_ring
from arborcast.synth.baselines.square_rings import diagonal_of, square_rings
from arborcast.synth.baselines.switch_paths import Path
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Topology, Vertex

KINDS = (Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE)
FEWEST_RANKS = 4
"""Of three ranks there is no way that is shorter."""

Nexts = Mapping[int, tuple[int, tuple[Vertex, ...]]]
"""Of each rank the next one on a ring, and the switches between."""


def both_ways(schedule: Schedule) -> Schedule | None:
    """The schedule over the same rings as one of `multiring`, opposite ones joined.

    Returns:
        None where no two of them are opposite, where a root is, or there are less than `FEWEST_RANKS`.
    """
    collective = schedule.collective
    count = len(collective.ranks)
    if collective.kind not in KINDS or count < FEWEST_RANKS:
        return None
    rings: list[dict[int, tuple[int, tuple[Vertex, ...]]]] = [
        {} for _ in range(schedule.chunk_count // count)
    ]
    for move in schedule.transfers:
        rings[move.chunk // count][move.src] = (move.dst, move.via)
    shares = [schedule.chunks[number * count].share for number in range(len(rings))]
    chunks: list[Chunk] = []
    transfers: list[Transfer] = []
    pairs = 0
    for first, forward in enumerate(rings):
        for second in range(first + 1, len(rings)):
            share = min(shares[first], shares[second])
            if share and _are_opposite(forward, rings[second]):
                pairs += 1
                shares[first] -= share
                shares[second] -= share
                for rank in collective.ranks:
                    for ways in ((forward, rings[second]), (rings[second], forward)):
                        transfers += _moves(collective.kind, ways, rank, len(chunks))
                        chunks.append(Chunk(share, rank))
    if not pairs:
        return None
    for ring, share in zip(rings, shares, strict=True):
        if share:  # what has no opposite goes all the way
            for rank in collective.ranks:
                transfers += _all_the_way(collective.kind, ring, rank, len(chunks))
                chunks.append(Chunk(share, rank))
    method = Method("two-way-rings", settings=(("rings", len(rings)), ("pairs", pairs)))
    return Schedule.build(schedule.topology, collective, method, schedule.bound, chunks, transfers)


def implicit_two_way_rings(
    topology: Topology, collective: Collective, bound: Bound, translations: Translations
) -> ImplicitSchedule | None:
    """The same over the rings of a square torus (`square_rings`), by translations; None of other fabrics."""
    rings = square_rings(topology, translations)
    if not rings or collective.kind not in KINDS:
        return None
    diagonal = diagonal_of(topology, translations)
    chunks: list[Chunk] = []
    transfers: list[Transfer] = []
    for pair in (rings[:2], rings[2:]):
        forward, backward = ({path.src: (path.dst, path.via) for path in ring} for ring in pair)
        for ways in ((forward, backward), (backward, forward)):
            for rank in diagonal.representatives:
                transfers += _moves(collective.kind, ways, rank, len(chunks))
                chunks.append(Chunk(Fraction(1, len(rings) * topology.ranks), rank))
    method = Method("two-way-rings", settings=(("rings", len(rings)), ("pairs", 2)))
    return ImplicitSchedule.build(topology, collective, method, bound, diagonal, chunks, transfers)


def _are_opposite(forward: Nexts, backward: Nexts) -> bool:
    return all(backward[receiver][0] == rank for rank, (receiver, _) in forward.items())


def _moves(kind: Kind, ways: tuple[Nexts, Nexts], start: int, chunk: int) -> Iterator[Transfer]:
    """What one chunk does, which goes farther the first way than the second."""
    apart = len(ways[0]) - 1
    sides = ((ways[0], ways[1], apart - apart // 2), (ways[1], ways[0], apart // 2))
    steps = sides[0][2]
    for there, back, hops in sides:
        rank = start
        for hop in range(hops):
            receiver, via = there[rank]
            if kind.reduces:  # the nearer side begins as early, and ends a step before the other
                yield Transfer(chunk, receiver, rank, hops - 1 - hop, True, back[receiver][1])
            if kind is not Kind.REDUCE_SCATTER:
                yield Transfer(chunk, rank, receiver, hop + (steps if kind.reduces else 0), via=via)
            rank = receiver


def _all_the_way(kind: Kind, ring: Nexts, start: int, chunk: int) -> Iterator[Transfer]:
    order = [start]
    while len(order) < len(ring):
        order.append(ring[order[-1]][0])
    paths = tuple(Path(rank, *ring[rank], Fraction(0)) for rank in order)  # widths are of no concern here
    return moves_on_ring(kind, paths, 0, chunk)

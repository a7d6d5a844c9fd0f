"""Pairwise sends, as a schedule to compare plans of an alltoall of blocks of any sizes with.

Whole blocks on one shortest way each, in steps of equal distance in the circle of ranks, as libraries send
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

from arborcast.synth.alltoallv.block_plan import stops_of
from arborcast.synth.alltoallv.block_planner import AlltoallvPlanner
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Vertex

Part = tuple[tuple[Vertex, ...], int, int]
"""A way, its part of a block in units, and the step of its first transfer."""


def pairwise(planner: AlltoallvPlanner, sizes: Sequence[Sequence[int]], bound: Bound) -> Schedule:
    """Every block whole, the nearest in the circle of ranks first; `bound` is a plan's.

    Of the planner's choices of shortest ways, that which shares the links best.
    """
    count = planner.topology.ranks
    tried = [
        [
            (planner.way(source, target, choice), sizes[source][target], (target - source) % count - 1)
            for source in range(count)
            for target in range(count)
            if source != target and sizes[source][target]
        ]
        for choice in range(planner.choices)
    ]
    schedules = [as_schedule(planner, sizes, bound, "pairwise", parts) for parts in tried]
    return max(schedules, key=lambda schedule: schedule.rate)


def as_schedule(
    planner: AlltoallvPlanner,
    sizes: Sequence[Sequence[int]],
    bound: Bound,
    name: str,
    parts: Sequence[Part],
    scale: int = 1,
) -> Schedule:
    """A chunk for each part of a block, which goes its way in consecutive steps.

    Args:
        planner: of the fabric.
        sizes: of the blocks, bytes.
        bound: of the rate.
        name: of the method.
        parts: of the blocks.
        scale: of how many units one byte is.
    """
    topology = planner.topology
    collective = Collective.alltoallv(topology, sizes)
    unit = Fraction(topology.ranks, collective.total * scale)
    chunks, transfers = [], []
    for number, (way, amount, first) in enumerate(parts):
        chunks.append(Chunk(unit * amount, way[0], way[-1]))
        stops = stops_of(topology, way)
        for step, (start, end) in enumerate(itertools.pairwise(stops), start=first):
            transfers.append(Transfer(number, way[start], way[end], step, via=way[start + 1 : end]))
    return Schedule.build(topology, collective, Method(name), bound, chunks, transfers)

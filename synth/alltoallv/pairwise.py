"""Pairwise sends, as a schedule to compare plans of an alltoall of blocks of any sizes with.

Whole blocks on one shortest way each, in steps of equal distance in the circle of ranks, as libraries send
them.
"""

from __future__ import annotations

from collections.abc import Sequence

from arborcast.synth.alltoallv.block_plan import BlockPiece, written_out
from arborcast.synth.alltoallv.block_planner import AlltoallvPlanner
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective
from arborcast.synth.schedule import Schedule


def pairwise(planner: AlltoallvPlanner, sizes: Sequence[Sequence[int]], bound: Bound) -> Schedule:
    """Every block whole, the nearest in the circle of ranks first; `bound` is a plan's.

    Of the planner's choices of shortest ways, that which shares the links best.
    """
    topology = planner.topology
    collective = Collective.alltoallv(topology, sizes)
    tried = (
        [
            BlockPiece(way, sizes[source][target], (target - source) % topology.ranks - 1)
            for source in range(topology.ranks)
            for target in range(topology.ranks)
            if source != target and sizes[source][target]
            for way in [planner.way(source, target, choice)]
        ]
        for choice in range(planner.choices)
    )
    schedules = (written_out(topology, collective, "pairwise", bound, pieces) for pieces in tried)
    return max(schedules, key=lambda schedule: schedule.rate)

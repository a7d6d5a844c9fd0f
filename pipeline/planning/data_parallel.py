"""Data parallel: the whole model on every rank, one allreduce of all gradients; what a pipeline must beat."""

from __future__ import annotations

from arborcast.pipeline.costs.links import Network
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.planning.memory import Limit
from arborcast.pipeline.planning.room import both_ways, fitted
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.stages import Plan


def data_parallel(
    profile: Profile,
    network: Network,
    *,
    batch: int,
    microbatches: int = 1,
    memory_bytes: Limit | None = None,
) -> Plan:
    """One stage on all ranks.

    The batch is taken whole; if memory does not hold that, in `microbatches` whose gradients add up, and if
    it does not hold that either, with recomputation.

    Raises:
        PlanError: memory holds none of them (by how much), or the ranks are not connected.
        BatchError: there are fewer samples than ranks.
    """
    ranks = range(network.topology.ranks)
    if not network.allreduce_rate(ranks):
        raise PlanError(
            f"data-parallel: the ranks of {network.topology.name} must be connected for an allreduce"
        )
    counts = sorted({1, max(1, min(microbatches, batch // len(ranks)))})
    plans = [
        Plan(
            [(0, profile.depth, ranks)],
            count,
            "1f1b",
            topology=network.topology,
            model=profile.model,
            method="data-parallel",
        )
        for count in counts
    ]
    return fitted([*plans, *(both_ways(plan)[1] for plan in plans)], profile, memory_bytes, batch)

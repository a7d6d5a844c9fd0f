"""GPipe as torchgpipe runs it: one rank per stage, layers balanced by measured time, fill and drain."""

from __future__ import annotations

from arborcast.pipeline.costs.links import Network
from arborcast.pipeline.planning.balance import balanced
from arborcast.pipeline.planning.memory import Limit
from arborcast.pipeline.planning.room import both_ways, fitted
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.stages import Plan


def straight_gpipe(
    profile: Profile,
    network: Network,
    *,
    batch: int,
    microbatches: int,
    memory_bytes: Limit | None = None,
) -> Plan:
    """As many stages as ranks (or as layers, if those are fewer), in the order of the ranks' numbers.

    The largest time of a stage, forward and backward of one microbatch, is the least possible; messages
    play no part. GPipe recomputes always; this recomputes only where memory asks for it, in its favour.

    Raises:
        PlanError: memory does not hold it even with recomputation (by how much).
        BatchError: there are fewer samples than microbatches.
    """
    stages = min(network.topology.ranks, profile.depth)
    samples = batch / microbatches
    times = [
        profile.forward_us(layer, layer + 1, samples) + profile.backward_us(layer, layer + 1, samples)
        for layer in range(profile.depth)
    ]
    plan = Plan(
        [(start, end, (rank,)) for rank, (start, end) in enumerate(balanced(times, stages))],
        microbatches,
        "gpipe",
        topology=network.topology,
        model=profile.model,
        method="gpipe",
    )
    return fitted(both_ways(plan), profile, memory_bytes, batch)

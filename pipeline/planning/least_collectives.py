"""What the collectives of a plan take at least, by proof: each by whatever schedule, one after another.

Those of a rank are counted on the links among the ranks that run them together, as these forward for each
other; a sum in several buckets takes no less than one of all bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.planning.interop_search import JointPlan
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.sharding.evaluation import calls
from arborcast.pipeline.sharding.fabric_prices import FabricPrices
from arborcast.pipeline.sharding.slices import Sliced
from arborcast.pipeline.stages import Plan
from arborcast.synth.bounds import bound
from arborcast.synth.bounds.time_limits import time_limit
from arborcast.synth.collective import Collective, Kind


def of_replicas(plan: Plan, profile: Profile, network: LinkCosts) -> float:
    """Microseconds of a step's allreduces of gradients, on the ranks where they are most."""
    most = 0.0
    for worker in plan.workers:
        ranges = (plan.stages[stage] for stage in worker.stages)
        layers = (layer for it in ranges for layer in profile.layers[it.start : it.end])
        size_bytes = sum(it.gradient_bytes for it in layers)
        if len(worker.ranks) > 1:
            most = max(most, _least_us(network, Kind.ALLREDUCE, worker.ranks, [worker.ranks], size_bytes))
    return most


def of_divided(joint: JointPlan, sliced: Sliced, network: LinkCosts) -> float:
    """The same of all collectives of stages whose operators are divided."""
    most = 0.0
    for stage in joint.stages:
        setting = stage.priced.setting
        assert isinstance(setting.prices, FabricPrices)
        mesh = setting.prices.mesh
        took = 0.0
        for call in calls(sliced.stage(stage.start, stage.end), stage.priced.sharding.chosen, setting):
            times = call.per_microbatch * joint.microbatches + call.per_step
            groups = mesh.groups(call.axes)
            took += times * _least_us(network, call.kind, mesh.ranks, groups, call.size_bytes)
        most = max(most, took)
    return most


def _least_us(
    network: LinkCosts, kind: Kind, ranks: Sequence[int], groups: Iterable[Sequence[int]], size_bytes: float
) -> float:
    """Of one collective in each of some groups of these ranks: that of the slowest group, were it alone."""
    if not size_bytes:
        return 0.0
    among = sorted(ranks)
    fragment = network.topology.subset(among)
    least = 0.0
    for group in groups:
        collective = Collective.on(fragment, kind, ranks=[among.index(rank) for rank in group])
        limit = time_limit(fragment, collective, bound(fragment, collective))
        least = max(least, float(limit.at(math.ceil(size_bytes))))
    return least

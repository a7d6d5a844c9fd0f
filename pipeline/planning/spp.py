"""SPP's planner as it is published: its device order, its program, its list order, and nothing else.

`planner.plan` began with it and departs from it: it tries orders across hosts as well, lets ranks without
work be, counts what messages really put on links, and lets the simulator choose. Beside that stands this.

Source: SPP (arXiv 2204.10562), sections III and IV.
"""

from __future__ import annotations

from dataclasses import replace

from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.planning.device_order import device_order
from arborcast.pipeline.planning.memory_need import Limit, fitted, rank_limits
from arborcast.pipeline.planning.stage_dp import PartitionProblem, partitions
from arborcast.pipeline.planning.stage_search import plan_of
from arborcast.pipeline.planning.tables import DeviceTables, LayerTables
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.simulation.pass_simulator import simulate
from arborcast.pipeline.stages import Plan


def spp(
    profile: Profile,
    network: LinkCosts,
    *,
    batch: int,
    microbatches: int,
    memory_bytes: Limit | None = None,
) -> Plan:
    """The best partition into some number of stages, in SPP's list order.

    For each number of stages the busiest resource is least busy, where a boundary is as busy as activations
    and gradients together over its slowest link, and all ranks have work; of these partitions the one with
    the shortest simulated step is taken. The published program does not know memory: where its plan does
    not fit, it is run over the stages that fit, with recomputation if it must be.

    Raises:
        PlanError: nothing fits (by how much), or a rank does not reach another.
        BatchError: there are fewer samples than microbatches.
    """
    Plan([(0, profile.depth, (0,))], microbatches).microbatch_sizes(batch)  # raises where it must
    ranks = tuple(range(network.topology.ranks))
    layers, devices = LayerTables(profile), DeviceTables(network, device_order(network.topology))
    free = PartitionProblem(batch, microbatches, "pe")

    def planned(question: PartitionProblem) -> Plan | None:
        found = partitions(layers, devices, question, min(profile.depth, len(ranks)), published=True)
        plans = [plan_of(question, it, network, profile) for it in found.values()]
        best = min(plans, key=lambda it: simulate(it, profile, network, batch=batch).time_us, default=None)
        return best and replace(best, method="spp as published")

    plans = [planned(free)]
    if memory_bytes is not None:
        limits = tuple(rank_limits(memory_bytes, ranks)[rank] for rank in ranks)
        limited = (replace(free, limits=limits, recompute=again) for again in (False, True))
        plans += [planned(question) for question in limited]
    found = [plan for plan in plans if plan is not None]
    if not found:
        raise PlanError(f"spp: no pipeline takes all {len(ranks)} ranks with {batch} samples")
    return fitted(found, profile, memory_bytes, batch)

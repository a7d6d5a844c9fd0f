"""SPP's planner as it is published: its device order, its program, its list order, and nothing else.

`planner.plan` began with it and departs from it: it tries orders across hosts as well, lets ranks without
work be, counts what messages really put on links, and lets the simulator choose. Beside that stands this.

Source: SPP (arXiv 2204.10562), sections III and IV.
"""

from __future__ import annotations

from dataclasses import replace

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.planning.device_order import device_order
from arborcast.pipeline.planning.planning_problem import PlanningProblem
from arborcast.pipeline.planning.stage_dp import PartitionProblem, partitions
from arborcast.pipeline.planning.stage_search import plan_of
from arborcast.pipeline.planning.tables import DeviceTables, LayerTables
from arborcast.pipeline.stages import Plan


def spp(problem: PlanningProblem) -> Plan:
    """The best partition into some number of stages, in SPP's list order.

    For each number of stages the busiest resource is least busy, where a boundary is as busy as activations
    and gradients together over its slowest link, and all ranks have work; of these partitions the one with
    the shortest simulated step is taken. The published program does not know memory: where its plan does
    not fit, it is run over the stages that fit, with recomputation if it must be.

    Raises:
        PlanError: nothing fits (by how much), or a rank does not reach another.
        BatchError: there are fewer samples than microbatches.
    """
    problem.check_batch()
    profile, network, batch, ranks = problem.profile, problem.network, problem.batch, problem.ranks
    layers, devices = LayerTables(profile), DeviceTables(network, device_order(network.topology))
    free = PartitionProblem(batch, problem.microbatches, "pe")

    def planned(question: PartitionProblem) -> Plan | None:
        found = partitions(layers, devices, question, min(profile.depth, len(ranks)), published=True)
        plans = [plan_of(problem, question, it) for it in found.values()]
        best = min(plans, key=problem.time_us, default=None)
        return best and replace(best, method="spp as published")

    questions = [free]
    if problem.limits is not None:
        limits = tuple(problem.limits.values())
        questions += [replace(free, limits=limits, recompute=again) for again in (False, True)]
    found = [plan for plan in map(planned, questions) if plan is not None]
    if not found:
        raise PlanError(f"spp: no pipeline takes all {len(ranks)} ranks with {batch} samples")
    return problem.fitted(found)

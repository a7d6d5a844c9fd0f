"""A model's best plan of both levels on a fabric; beside it each level alone and fixed layouts.

Shardings and cuts are searched at exact rates, where they are the best in scope; what comes out, and all that
stands beside it, is then priced by schedules made for it, and the fastest by those is the plan. It does not
hold them: groups run their own, unless a trainer is given these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING

from arborcast.pipeline.costs.devices import DeviceRates, device_named
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import MemoryShortError, PlanError
from arborcast.pipeline.meshes import Mesh
from arborcast.pipeline.planning.device_order import device_order
from arborcast.pipeline.planning.interop_search import (
    ORDER,
    JointPlan,
    JointStage,
    best_joint,
    crossing_ps,
    one_stage,
    ties_ps,
)
from arborcast.pipeline.planning.memory_need import peak_in_flight
from arborcast.pipeline.sharding.evaluation import cost_of
from arborcast.pipeline.sharding.graph import Graph
from arborcast.pipeline.sharding.layouts import LAYOUTS
from arborcast.pipeline.sharding.mesh_choice import graph_of_microbatch
from arborcast.pipeline.sharding.plan_strategies import stage_sharding, strategies_of
from arborcast.pipeline.sharding.sharding_program import Sharding
from arborcast.pipeline.sharding.slices import Sliced
from arborcast.pipeline.sharding.stage_prices import PricedStage, StagePrices
from arborcast.pipeline.stages import Plan, Stage, check_topology
from arborcast.synth.topology import Topology

if TYPE_CHECKING:
    from arborcast.pipeline.model.traced.model import Traced

BOTH = "both levels"
ONE_STAGE = "one stage"
PIPELINES = "pipelines"
"""Stages whose ranks are replicas."""

GIVEN = "given"
"""A plan of a file."""


@dataclass(frozen=True)
class TrainingCandidate:
    """One way to train.

    Attributes:
        at_rates: the plan with the least step at exact rates.
        scheduled: the same stages, each divided anew over its best mesh by what schedules take.
        why_not: in words why there is none; else "".
    """

    at_rates: JointPlan | None
    scheduled: JointPlan | None
    why_not: str = ""


@dataclass(frozen=True)
class ShardedChoice:
    """The ways to train a model on a fabric.

    Attributes:
        sliced: the model.
        topology: the fabric.
        microbatches: of a step.
        ways: by name; fixed layouts are of one stage.
        best: the name of the fastest by schedules; of equals the first.
        bound_ps: no plan in scope takes less for a step at exact rates.
        programs: integer programs that were solved.
    """

    sliced: Sliced
    topology: Topology
    microbatches: int
    ways: Mapping[str, TrainingCandidate]
    best: str
    bound_ps: int | None
    programs: int

    @property
    def joint(self) -> JointPlan:
        """The best one, by schedules."""
        found = self.ways[self.best].scheduled
        assert found is not None
        return found

    @property
    def plan(self) -> Plan:
        """As a file holds it."""
        return self.plan_by(self.best)

    def plan_by(self, name: str) -> Plan:
        """That of one of the ways.

        Raises:
            PlanError: there is none.
        """
        found = self.ways[name].scheduled
        if found is None:
            raise PlanError(f"{name}: there is no such plan: {self.ways[name].why_not}")
        graph = self.sliced.graph
        stages = []
        for stage in found.stages:
            mesh = Mesh(stage.priced.setting.sizes, stage.ranks)
            own = self.sliced.stage(stage.start, stage.end)
            sharding = stage_sharding(own, stage.priced.sharding.chosen, mesh)
            stages.append(Stage.divided(stage.start, stage.end, sharding))
        return Plan(
            stages,
            self.microbatches,
            topology=self.topology,
            model=graph.name,
            method=name,
            batch=graph.samples * self.microbatches,
            whole=tuple(graph.unknown),
        )


def choose_both(
    graph: Graph,
    topology: Topology,
    device: DeviceRates,
    *,
    microbatches: int = 1,
    optimizer_ratio: Fraction = Fraction(2),
    memory_bytes: int | None = None,
    stages: int | None = None,
    deadline_s: float | None = None,
) -> ShardedChoice:
    """The best way to divide a model into stages and its operators over meshes of their ranks.

    Args:
        graph: the operators with their layers, for the samples of a microbatch.
        topology: the fabric.
        device: that every rank is.
        microbatches: of a step.
        optimizer_ratio: bytes of the optimizer's state for each byte of weights.
        memory_bytes: of one rank that may be used; None for no limit.
        stages: at most; None for no limit.
        deadline_s: for each integer program.

    Raises:
        MemoryShortError: nothing fits: by how much, on which rank, in the plan that comes closest.
        PlanError: no plan for want of links, or fewer than one microbatch or stage.
    """
    for name, count in {"microbatches": microbatches, "stages": stages}.items():
        if count is not None and count < 1:
            raise PlanError(f"{name}: must be at least 1, got {count}")
    sliced = Sliced(graph, topology.ranks)
    orders = tuple(dict.fromkeys((tuple(range(topology.ranks)), device_order(topology))))  # ties: ascending
    network = LinkCosts(topology)
    free = StagePrices(
        sliced,
        topology,
        device,
        microbatches,
        optimizer_ratio,
        memory_bytes,
        deadline_s=deadline_s,
    )
    ways: dict[str, TrainingCandidate] = {}
    ways[ONE_STAGE] = _way(free, [partial(one_stage, free, order) for order in orders])
    for name, layout in LAYOUTS.items():
        fixed = free.restricted(layout)
        ways[name] = _way(fixed, [partial(one_stage, fixed, order) for order in orders])
    replicas = free.restricted(LAYOUTS["data-parallel"], axes=1)
    ways[PIPELINES] = _way(
        replicas, [partial(best_joint, replicas, network, order, most_stages=stages) for order in orders]
    )
    known = [it.at_rates for it in (ways[ONE_STAGE], ways[PIPELINES]) if it.at_rates is not None]
    made = []
    for order in orders:
        made.append(partial(best_joint, free, network, order, most_stages=stages, known=known))
    found = _least(made)  # raises where nothing fits
    ways = {BOTH: TrainingCandidate(found, _scheduled(found, free)), **ways}
    steps = {name: it.scheduled.step_ps() for name, it in ways.items() if it.scheduled is not None}
    best = min(steps, key=steps.__getitem__)
    bound = found.step_ps() if free.is_exact else None
    return ShardedChoice(sliced, topology, microbatches, ways, best, bound, free.programs)


def shard_in_stages(
    model: Traced,
    topology: Topology,
    device: DeviceRates | str,
    *,
    batch: int,
    microbatches: int = 1,
    memory_bytes: int | None = None,
    stages: int | None = None,
) -> ShardedChoice:
    """The best way to divide a whole model over all ranks of a topology, in stages or not: `choose_both`.

    Args:
        model: traced with its loss; stages are cut between its layers.
        topology: the fabric.
        device: that every rank is, or its name ("v100").
        batch: samples of a step.
        microbatches: that they are divided into.
        memory_bytes: of each rank; None for the device's.
        stages: at most; None for no limit.

    Raises:
        PlanError: the batch does not split into microbatches, or nothing fits.
        ProfileError: no such device.
    """
    graph = graph_of_microbatch(model, batch, microbatches, by_layer=True)
    on = device_named(device) if isinstance(device, str) else device
    return choose_both(
        graph,
        topology,
        on,
        microbatches=microbatches,
        memory_bytes=on.memory_bytes if memory_bytes is None else memory_bytes,
        stages=stages,
    )


def priced_plan(plan: Plan, graph: Graph, topology: Topology, device: DeviceRates) -> JointPlan:
    """A plan of a file on a model and a fabric, its collectives by their schedules.

    Raises:
        PlanError: the plan is for another model, topology or mesh, or its links are gone.
    """
    check_topology(plan, topology)
    if plan.model != graph.name:
        raise PlanError(f"plan: is for model {plan.model}, got {graph.name}")
    sliced = Sliced(graph, topology.ranks)
    if plan.depth != sliced.depth:
        raise PlanError(f"plan: must hold the {sliced.depth} layers of {graph.name}, got {plan.depth}")
    prices = StagePrices(sliced, topology, device, plan.microbatches)
    network = LinkCosts(topology)
    stages: list[JointStage] = []
    for number, it in reversed(list(enumerate(plan.stages))):
        in_flight = peak_in_flight(ORDER, len(plan.stages) - 1 - number, plan.microbatches)
        own = sliced.stage(it.start, it.end)
        setting = prices.setting(it.ranks, it.mesh.shape, in_flight)
        chosen = strategies_of(it, own, setting)
        cost = cost_of(own, chosen, setting)
        total = cost.total_ps(plan.microbatches)
        sharding = Sharding(own, chosen, cost, 0, total, "as given")
        crossing = 0
        if stages:
            behind = plan.stages[number + 1].mesh
            crossing = crossing_ps(prices, network, it.end, it.mesh, behind)
        priced = PricedStage(sharding, setting, cost.memory_bytes)
        stages.insert(0, JointStage(it.start, it.end, it.ranks, priced, crossing))
    ranges = [(it.start, it.end, it.ranks) for it in stages]
    return JointPlan(tuple(stages), plan.microbatches, ties_ps(sliced, ranges, network))


def given_choice(
    plan: Plan,
    graph: Graph,
    topology: Topology,
    device: DeviceRates,
    *,
    memory_bytes: int | None = None,
) -> ShardedChoice:
    """The same for a plan of a file alone.

    Raises:
        MemoryShortError: a rank has less memory than it needs (which, and by how much).
        PlanError: as `priced_plan`, or the plan is for another number of samples.
    """
    if plan.batch != graph.samples * plan.microbatches:
        raise PlanError(
            f"plan: is for a batch of {plan.batch}, got {graph.samples * plan.microbatches} samples"
        )
    priced = priced_plan(plan, graph, topology, device)
    worst = max(priced.stages, key=lambda it: it.priced.memory_bytes)
    least = worst.priced.memory_bytes
    if memory_bytes is not None and least > memory_bytes:
        raise MemoryShortError(
            f"plan: rank {worst.ranks[0]} must have at least {least} bytes, got {memory_bytes}: "
            f"{least - memory_bytes} short",
            least,
        )
    way = TrainingCandidate(None, priced)
    sliced = Sliced(graph, topology.ranks)
    return ShardedChoice(sliced, topology, plan.microbatches, {GIVEN: way}, GIVEN, None, 0)


def _way(prices: StagePrices, made: Sequence[Callable[[], JointPlan]]) -> TrainingCandidate:
    try:
        found = _least(made)
    except PlanError as error:
        return TrainingCandidate(None, None, str(error))
    return TrainingCandidate(found, _scheduled(found, prices))


def _least(made: Sequence[Callable[[], JointPlan]]) -> JointPlan:
    """The fastest of those that there are; where there is none, the first one's error."""
    plans: list[JointPlan] = []
    errors: list[PlanError] = []
    for make in made:
        try:
            plans.append(make())
        except PlanError as error:
            errors.append(error)
    if not plans:
        raise errors[0]
    return min(plans, key=lambda it: it.step_ps())


def _scheduled(plan: JointPlan, prices: StagePrices) -> JointPlan:
    stages = []
    for number, stage in enumerate(plan.stages):
        in_flight = peak_in_flight(ORDER, len(plan.stages) - 1 - number, plan.microbatches)
        priced = prices.scheduled(stage.start, stage.end, stage.ranks, in_flight)
        stages.append(replace(stage, priced=priced))
    return replace(plan, stages=tuple(stages))

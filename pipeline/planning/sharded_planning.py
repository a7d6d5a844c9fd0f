"""A model's best plan of both levels on a fabric; beside it each level alone and fixed layouts.

Shardings and cuts are searched at exact rates, where they are the best in scope; what comes out, and all that
stands beside it, is divided anew by schedules made for it and predicted as every plan is, and the fastest is
the plan. Where its ranks divide samples alone, it is one of replicas. It does not hold the schedules: groups
run their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING

from arborcast.pipeline.costs.devices import DeviceRates, device_named, reserving, usable, with_reserve
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.costs.saved_bytes import Segment, Treatment, held_bytes
from arborcast.pipeline.errors import MemoryShortError, PlanError
from arborcast.pipeline.planning.device_order import device_order
from arborcast.pipeline.planning.divided_prediction import predict_divided
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
from arborcast.pipeline.planning.plan_prediction import Prediction, predict
from arborcast.pipeline.profiles import Layer, Profile
from arborcast.pipeline.sharding.evaluation import cost_of
from arborcast.pipeline.sharding.graph import Graph
from arborcast.pipeline.sharding.layouts import LAYOUTS, data_parallel
from arborcast.pipeline.sharding.mesh_choice import divided_plan, divided_stage, graph_of_microbatch
from arborcast.pipeline.sharding.plan_strategies import strategies_of
from arborcast.pipeline.sharding.sharding_program import Sharding
from arborcast.pipeline.sharding.slices import Sliced
from arborcast.pipeline.sharding.stage_prices import PricedStage, StagePrices
from arborcast.pipeline.stages import Plan, check_topology
from arborcast.synth.topology import Topology

if TYPE_CHECKING:
    from arborcast.pipeline.costs.layer_pass import OptimizerFactory
    from arborcast.pipeline.model.traced.model import Traced

BOTH = "both levels"
ONE_STAGE = "one stage"
PIPELINES = "pipelines"
"""Stages whose ranks are replicas."""

GIVEN = "given"
"""A plan of a file."""

TRIES = 4
"""Searches at most, each with less memory, until what is predicted of a plan keeps to the limit."""


@dataclass(frozen=True)
class TrainingCandidate:
    """One way to train.

    Attributes:
        at_rates: the plan with the least step at exact rates.
        scheduled: the same stages, each divided anew over its best mesh by what schedules take.
        prediction: of its step, as of any plan.
        is_divided: whether operators are; else every stage's ranks are its replicas.
        why_not: in words why there is none; else "".
    """

    at_rates: JointPlan | None
    scheduled: JointPlan | None
    prediction: Prediction | None = None
    is_divided: bool = True
    why_not: str = ""

    @property
    def memory_bytes(self) -> int:
        """That the fullest rank needs."""
        assert self.prediction is not None, "the caller has seen that there is a plan"
        return self.prediction.memory_bytes


@dataclass(frozen=True)
class ShardedChoice:
    """The ways to train a model on a fabric.

    Attributes:
        sliced: the model.
        topology: the fabric.
        microbatches: of a step.
        ways: by name; fixed layouts are of one stage.
        best: the name of the one that is predicted to be fastest; of equals the first.
        bound_ps: no plan in scope takes less for a step at exact rates, by Alpa's formula.
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
    def prediction(self) -> Prediction:
        """Of the best one."""
        found = self.ways[self.best].prediction
        assert found is not None
        return found

    @property
    def plan(self) -> Plan:
        """As a file holds it."""
        return self.plan_by(self.best)

    def plan_by(self, name: str, *, divided: bool = False) -> Plan:
        """That of one of the ways: of replicas where every stage's samples alone are divided.

        Args:
            name: of the way.
            divided: whether to say also then how each operator is divided.

        Raises:
            PlanError: there is none.
        """
        way = self.ways[name]
        if way.scheduled is None:
            raise PlanError(f"{name}: there is no such plan: {way.why_not}")
        if not way.is_divided and not divided:
            return replicas_of(way.scheduled, self.sliced, self.topology, name)
        stages = [
            divided_stage(it.start, it.end, self.sliced.stage(it.start, it.end), it.priced, it.ranks)
            for it in way.scheduled.stages
        ]
        return divided_plan(stages, self.sliced.graph, self.microbatches, self.topology, name)


def state_ratio(profile: Profile) -> Fraction:
    """Bytes of the optimizer's state for each byte of trained weights."""
    trained = sum(it.gradient_bytes for it in profile.layers)
    return Fraction(profile.optimizer_bytes(0, profile.depth), max(trained, 1)).limit_denominator(100)


def as_one_layer(profile: Profile) -> Profile:
    """The whole model as one layer."""
    depth, kept = profile.depth, profile.kept_bytes(0, profile.depth)
    held = held_bytes(profile, (Segment(0, depth, Treatment.KEEP),), profile.samples, 1)
    times = ("forward_us", "backward_us", "forward_fixed_us", "backward_fixed_us")
    sums = {name: sum(getattr(it, name) for it in profile.layers) for name in times}
    whole = Layer(
        name=profile.model or "model",
        **sums,
        output_bytes=profile.layers[-1].output_bytes,
        saved_bytes=kept,
        parameter_bytes=profile.parameter_bytes(0, depth),
        gradient_bytes=profile.gradient_bytes(0, depth),
        optimizer_bytes=profile.optimizer_bytes(0, depth),
        weights_us=sum(it.weights_share * it.backward_us for it in profile.layers),
        split_us=sum(it.split_us for it in profile.layers),
        split_bytes=sum(it.split_bytes for it in profile.layers),
        tail_bytes=profile.layers[-1].tail_bytes,
        split_working_bytes=max(it.split_working_bytes for it in profile.layers),
        working_bytes=held - kept,
        update_bytes=profile.update_bytes(0, depth),
        update_us=profile.update_us([(0, depth)]),
    )
    return Profile(profile.model, profile.samples, (whole,), (), profile.source, profile.crowding)


def replicas_of(joint: JointPlan, sliced: Sliced, topology: Topology, method: str) -> Plan:
    """The plan whose stages have the same layers and ranks, as replicas."""
    return Plan(
        [(it.start, it.end, it.ranks) for it in joint.stages],
        joint.microbatches,
        ORDER,
        topology=topology,
        model=sliced.graph.name,
        method=method,
        batch=sliced.graph.samples * joint.microbatches,
    )


def divides_samples_alone(joint: JointPlan) -> bool:
    """Whether all ranks of every stage hold whole weights, and each works on an even share of the samples."""
    for stage in joint.stages:
        sharding, sizes = stage.priced.sharding, stage.priced.setting.sizes
        allowed = data_parallel(sizes)
        if sharding.graph.samples % len(stage.ranks):
            return False
        for operator, way in zip(sharding.graph.operators, sharding.chosen, strict=True):
            if way is None or operator.is_end:
                continue
            is_even = operator.given is not None or operator.sample is None
            if not allowed(operator, way) or not (is_even or way.before == (operator.sample,) * len(sizes)):
                return False
    return True


@dataclass(frozen=True)
class _Judge:
    """Prices what was found as every plan is priced.

    Attributes:
        sliced: the model.
        profile: of it.
        network: the links.
        memory_bytes: of one rank that may be used; None for no limit.
    """

    sliced: Sliced
    profile: Profile
    network: LinkCosts
    memory_bytes: int | None

    def candidate(self, at_rates: JointPlan | None, scheduled: JointPlan) -> TrainingCandidate:
        """What was found, with its prediction."""
        if not divides_samples_alone(scheduled):
            predicted = predict_divided(scheduled, self.sliced, self.profile, self.network)
            return TrainingCandidate(at_rates, scheduled, predicted)
        plan = replicas_of(scheduled, self.sliced, self.network.topology, "")
        return self.of_replicas(at_rates, scheduled, plan)

    def of_replicas(self, at_rates: JointPlan | None, scheduled: JointPlan, plan: Plan) -> TrainingCandidate:
        """The same of stages whose ranks are replicas."""
        batch = self.sliced.graph.samples * plan.microbatches
        predicted = predict(replace(plan, model=""), self.profile, self.network, batch=batch)
        return TrainingCandidate(at_rates, scheduled, predicted, is_divided=False)

    def way(self, prices: StagePrices, made: Sequence[Callable[[], JointPlan]]) -> TrainingCandidate:
        """The fastest at exact rates of what is made, or why there is none."""
        try:
            found = _least(made)
        except PlanError as error:
            return TrainingCandidate(None, None, why_not=str(error))
        return self.candidate(found, _scheduled(found, prices))


def choose_both(
    graph: Graph,
    topology: Topology,
    device: DeviceRates,
    profile: Profile,
    *,
    microbatches: int = 1,
    memory_bytes: int | None = None,
    stages: int | None = None,
    network: LinkCosts | None = None,
) -> ShardedChoice:
    """The best way to divide a model into stages and its operators over meshes of their ranks.

    It is searched at exact rates by what operators take, and chosen by what is predicted of each way.

    Args:
        graph: the operators with their layers, for the samples of a microbatch.
        topology: the fabric.
        device: that every rank is.
        profile: of the same model with the same layers: what steps and memory are predicted by, and how large
            the optimizer's state is.
        microbatches: of a step.
        memory_bytes: of one rank, of which the reserve stays free; None for no limit.
        stages: at most; None for no limit.
        network: with costs of messages beyond the links; None for a `LinkCosts` of `topology` without.

    Raises:
        MemoryShortError: nothing fits: by how much, on which rank, in the plan that comes closest.
        PlanError: no plan for want of links, or fewer than one microbatch or stage.
    """
    for name, count in {"microbatches": microbatches, "stages": stages}.items():
        if count is not None and count < 1:
            raise PlanError(f"{name}: must be at least 1, got {count}")
    sliced = Sliced(graph, topology.ranks)
    network = LinkCosts(topology) if network is None else network
    short = 0
    with reserving(memory_bytes) as limit:
        judge = _Judge(sliced, profile, network, limit)
        free = StagePrices(
            sliced,
            topology,
            device,
            microbatches,
            state_ratio(profile),
            limit,
            collective_us=network.collective_us,
            sum_gbps=network.sum_gbps,
        )
        for _ in range(TRIES):
            try:
                choice = _choice(free, judge, stages)
            except MemoryShortError:
                if not short:
                    raise
                break
            short = choice.ways[choice.best].memory_bytes - (limit or 0)
            if limit is None or short <= 0:
                return choice
            # Operators alone do not know of messages and working memory: next time they get as much less.
            assert free.memory_bytes is not None
            free = replace(free, memory_bytes=max(free.memory_bytes - short, 1))
    assert memory_bytes is not None, "it was short"
    least = with_reserve(usable(memory_bytes) + short)
    raise MemoryShortError(
        f"memory: a rank must have at least {least} bytes, got {memory_bytes}: every plan that was found is "
        f"at least {least - memory_bytes} short",
        least,
    )


def _choice(free: StagePrices, judge: _Judge, stages: int | None) -> ShardedChoice:
    """All ways, and the one that is predicted to be fastest of those that fit; or needs least memory."""
    network, topology = judge.network, judge.network.topology
    orders = tuple(dict.fromkeys((tuple(range(topology.ranks)), device_order(topology))))  # ties: ascending
    ways: dict[str, TrainingCandidate] = {}
    ways[ONE_STAGE] = judge.way(free, [partial(one_stage, free, order) for order in orders])
    for name, layout in LAYOUTS.items():
        fixed = free.restricted(layout)
        ways[name] = judge.way(fixed, [partial(one_stage, fixed, order) for order in orders])
    replicas = free.restricted(LAYOUTS["data-parallel"], axes=1)
    ways[PIPELINES] = judge.way(
        replicas, [partial(best_joint, replicas, network, order, most_stages=stages) for order in orders]
    )
    known = [it.at_rates for it in (ways[ONE_STAGE], ways[PIPELINES]) if it.at_rates is not None]
    made = []
    for order in orders:
        made.append(partial(best_joint, free, network, order, most_stages=stages, known=known))
    found = _least(made)  # raises where nothing fits
    ways = {BOTH: judge.candidate(found, _scheduled(found, free)), **ways}
    there = {name: it.prediction.time_us for name, it in ways.items() if it.prediction is not None}
    limit = judge.memory_bytes
    fitting = [name for name in there if limit is None or ways[name].memory_bytes <= limit]
    best = (
        min(fitting, key=there.__getitem__) if fitting else min(there, key=lambda it: ways[it].memory_bytes)
    )
    bound = found.step_ps() if free.is_exact else None
    return ShardedChoice(judge.sliced, topology, free.microbatches, ways, best, bound, free.programs)


def shard_in_stages(
    model: Traced,
    topology: Topology,
    device: DeviceRates | str,
    *,
    batch: int,
    microbatches: int = 1,
    memory_bytes: int | None = None,
    stages: int | None = None,
    given: Plan | None = None,
    optimizer: OptimizerFactory | None = None,
    name: str | None = None,
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
        given: tell what this plan takes, in place of finding one.
        optimizer: of a list of parameters; None for Adam.
        name: of the model; None for its class.

    Raises:
        PlanError: the batch does not split into microbatches, nothing fits, or the given plan is for another
            model, topology, batch or mesh.
        ProfileError: no such device.

    Examples:
        >>> example = torch.randn(8, 16), torch.randn(8, 16)
        >>> model = pipeline.trace(nn.Sequential(nn.Linear(16, 16)), example, nn.functional.mse_loss)
        >>> choice = pipeline.shard_in_stages(model, topologies.load("full:2"), "v100", batch=8)
        >>> choice.plan.batch
        8
    """
    from torch.optim import Adam

    from arborcast.pipeline.costs.analytic import analyse

    on = device_named(device) if isinstance(device, str) else device
    by_layer = given is None or given.depth > 1
    graph = graph_of_microbatch(model, batch, microbatches, by_layer=by_layer)
    profile = analyse(model, None, on, optimizer=optimizer or Adam)
    if name is not None:
        graph, profile = replace(graph, name=name), replace(profile, model=name)
    limit = on.memory_bytes if memory_bytes is None else memory_bytes
    if given is not None:
        profile = profile if by_layer else as_one_layer(profile)
        return given_choice(given, graph, topology, on, profile, memory_bytes=limit)
    return choose_both(
        graph, topology, on, profile, microbatches=microbatches, memory_bytes=limit, stages=stages
    )


def _priced(plan: Plan, judge: _Judge, device: DeviceRates) -> JointPlan:
    """A plan of a file on a model and a fabric, its collectives by their schedules.

    Raises:
        PlanError: the plan is for another model, topology or mesh, or its links are gone.
    """
    sliced, network, topology = judge.sliced, judge.network, judge.network.topology
    check_topology(plan, topology)
    if plan.model != sliced.graph.name:
        raise PlanError(f"plan: is for model {plan.model}, got {sliced.graph.name}")
    if plan.depth != sliced.depth:
        raise PlanError(f"plan: must hold the {sliced.depth} layers of {sliced.graph.name}, got {plan.depth}")
    prices = StagePrices(sliced, topology, device, plan.microbatches, state_ratio(judge.profile))
    replicas = prices.restricted(LAYOUTS["data-parallel"], axes=1)
    stages: list[JointStage] = []
    for number, it in reversed(list(enumerate(plan.stages))):
        in_flight = peak_in_flight(ORDER, len(plan.stages) - 1 - number, plan.microbatches)
        crossing = 0
        if stages:
            behind = plan.stages[number + 1].mesh
            crossing = crossing_ps(prices, network, it.end, it.mesh, behind)
        if it.sharding is None:
            priced = replicas.scheduled(it.start, it.end, it.ranks, in_flight)
        else:
            own = sliced.stage(it.start, it.end)
            setting = prices.setting(it.ranks, it.mesh.shape, in_flight)
            chosen = strategies_of(it, own, setting)
            cost = cost_of(own, chosen, setting)
            sharding = Sharding(own, chosen, cost, 0, cost.total_ps(plan.microbatches), "as given")
            priced = PricedStage(sharding, setting, cost.memory_bytes)
        stages.insert(0, JointStage(it.start, it.end, it.ranks, priced, crossing))
    ranges = [(it.start, it.end, it.ranks) for it in stages]
    return JointPlan(tuple(stages), plan.microbatches, ties_ps(sliced, ranges, network))


def given_choice(
    plan: Plan,
    graph: Graph,
    topology: Topology,
    device: DeviceRates,
    profile: Profile,
    *,
    memory_bytes: int | None = None,
) -> ShardedChoice:
    """The same for a plan of a file alone.

    Raises:
        MemoryShortError: a rank has less memory than it needs (which, and by how much).
        PlanError: the plan is for another model, topology, mesh or number of samples, or its links are gone.
    """
    if plan.batch not in (None, graph.samples * plan.microbatches):
        raise PlanError(
            f"plan: is for a batch of {plan.batch}, got {graph.samples * plan.microbatches} samples"
        )
    judge = _Judge(Sliced(graph, topology.ranks), profile, LinkCosts(topology), memory_bytes)
    priced = _priced(plan, judge, device)
    way = judge.candidate(None, priced) if plan.is_divided else judge.of_replicas(None, priced, plan)
    assert way.prediction is not None and way.scheduled is not None, "it is priced"
    memory = (with_reserve(need.total) for need in way.prediction.memory)
    need, stage = max((need, number) for number, need in enumerate(memory))
    if memory_bytes is not None and need > memory_bytes:
        raise MemoryShortError(
            f"plan: rank {plan.stages[stage].ranks[0]} must have at least {need} bytes, got {memory_bytes}: "
            f"{need - memory_bytes} short",
            need,
        )
    return ShardedChoice(judge.sliced, topology, plan.microbatches, {GIVEN: way}, GIVEN, None, 0)


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

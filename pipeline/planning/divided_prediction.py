"""A step of a plan whose operators are divided, priced as every other plan's.

Ranks of a stage do the same at the same time. So to the simulator such a plan is one of replicas over a
profile of its stages: each is one layer, which takes what the division makes of the costs of its layers. The
profile says what they cost where samples are divided evenly, operators by how much that changes: times in the
ratio of theirs, bytes in the ratio of what a rank holds, and collectives besides, by their schedules.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.costs.saved_bytes import Moment, Segment, Treatment
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.meshes import Mesh
from arborcast.pipeline.order.pass_messages import WorkerStep, with_messages
from arborcast.pipeline.planning.interop_search import ORDER, JointPlan, JointStage
from arborcast.pipeline.planning.memory_need import MemoryNeed, StageBytes, fullest
from arborcast.pipeline.planning.plan_prediction import Prediction, predict
from arborcast.pipeline.profiles import Layer, Profile, Tie
from arborcast.pipeline.sharding.evaluation import fixed_bytes, readings, updates_ps
from arborcast.pipeline.sharding.graph import Graph
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.sharding.slices import Sliced
from arborcast.pipeline.sharding.specs import local_bytes
from arborcast.pipeline.sharding.strategies import Strategy, strategies
from arborcast.pipeline.stages import Plan

PS = 10**6
"""Of a microsecond."""


def predict_divided(joint: JointPlan, sliced: Sliced, profile: Profile, network: LinkCosts) -> Prediction:
    """A step of a plan of both levels.

    Args:
        joint: the plan, its collectives priced by their schedules.
        sliced: the model, with the samples of a microbatch.
        profile: of the same model with the same layers.
        network: of messages between stages and of shared parameters.

    Raises:
        PlanError: the profile has other layers.
    """
    if profile.depth != sliced.depth:
        raise PlanError(f"profile {profile.model}: must have {sliced.depth} layers, got {profile.depth}")
    layers = [_as_layer(it, joint.microbatches, sliced, profile) for it in joint.stages]
    starts = [it.start for it in joint.stages]
    users = (
        (tie, sorted({sum(at >= start for start in starts) - 1 for at in tie.layers})) for tie in profile.ties
    )
    ties = tuple(Tie(tie.name, tie.size_bytes, tuple(stages)) for tie, stages in users if len(stages) > 1)
    # Counted in parts of samples, of which every mesh has whole ones.
    parts, batch = sliced.ranks, sliced.graph.samples * joint.microbatches
    samples = sliced.graph.samples * parts
    costs = Profile(profile.model, samples, tuple(layers), ties, profile.source, profile.crowding)
    stages = [(number, number + 1, it.ranks) for number, it in enumerate(joint.stages)]
    plan = Plan(stages, joint.microbatches, ORDER)
    found = predict(plan, costs, network, batch=batch * parts)
    memory = tuple(
        _memory(joint, number, sliced, profile, steps, network.peer_bytes)
        for number, steps in enumerate(with_messages(plan.passes))
    )
    return replace(found, memory=memory, samples_per_s=found.samples_per_s / parts)


def _as_layer(stage: JointStage, microbatches: int, sliced: Sliced, profile: Profile) -> Layer:
    """A stage as one layer; collectives of a microbatch are counted by halves to both of its passes."""
    sharding, setting = stage.priced.sharding, stage.priced.setting
    graph, chosen, cost = sharding.graph, sharding.chosen, sharding.cost
    even = sum(
        setting.kernel_ps(kernel, (it.sample,) * len(setting.sizes))
        for it in graph.operators
        for kernel in it.kernels
    )
    ratio, moved_us = (cost.compute_ps / even if even else 1.0), cost.communication_ps / PS / 2
    layers, share = (stage.start, stage.end), sliced.graph.samples / len(stage.ranks)
    forward = profile.forward_us(*layers, share) * ratio + moved_us
    backward = profile.backward_us(*layers, share) * ratio + moved_us
    collectives_us = (cost.step_ps - updates_ps(graph, chosen, setting)) / PS
    return Layer(
        f"layers [{stage.start}, {stage.end})",
        forward,
        backward,
        sum(it.size_bytes for it in sliced.crossing(stage.end)) if stage.end < sliced.depth else 0,
        0,
        0,
        0,
        forward_fixed_us=forward,
        backward_fixed_us=backward,
        update_us=collectives_us + profile.update_us([layers]) * _held(graph, chosen, setting)[2],
    )


def _memory(
    joint: JointPlan,
    number: int,
    sliced: Sliced,
    profile: Profile,
    steps: Sequence[WorkerStep],
    peer_bytes: int,
) -> MemoryNeed:
    """What each rank of a stage needs."""
    stage, samples = joint.stages[number], sliced.graph.samples
    graph, chosen, setting = stage.priced.sharding.graph, stage.priced.sharding.chosen, stage.priced.setting
    whole = StageBytes.of(profile, (Segment(stage.start, stage.end, Treatment.KEEP),), samples)
    alone = replace(setting, prices=replace(setting.prices, mesh=Mesh((), setting.prices.mesh.ranks[:1])))
    undivided = [next(iter(strategies(graph, it, alone)), None) for it in graph.operators]
    parameters, gradients, updated = _held(graph, chosen, setting)
    divided, all_kept = _kept(graph, chosen, setting), _kept(graph, undivided, alone)
    parts = {layer: Fraction(divided[layer], size) for layer, size in all_kept.items() if size}
    kept = _kept_moments(stage, whole.moments, parts, gradients)
    crossing = 2 * (whole.inputs + whole.outputs)  # each there and back
    messages = fixed_bytes(graph, chosen)[1] / max(crossing, 1)
    own = StageBytes(
        math.ceil(whole.inputs * messages),
        math.ceil(whole.outputs * messages),
        kept,
        tuple(math.ceil(it * gradients) for it in whole.behind),
        math.ceil(whole.gradients * gradients),
    )
    lasting = MemoryNeed(
        parameters=math.ceil(profile.parameter_bytes(stage.start, stage.end) * parameters),
        gradients=own.gradients,
        optimizer=math.ceil(profile.optimizer_bytes(stage.start, stage.end) * updated),
        working=math.ceil(profile.update_bytes(stage.start, stage.end) * updated),
        buffers=peer_bytes * sum(it - 1 for it in setting.sizes),
    )
    return fullest(steps, {number: own}, lasting, has_replicas=False)


def _kept(graph: Graph, chosen: Sequence[Strategy | None], setting: Setting) -> Mapping[int, int]:
    """Bytes that a rank keeps for backward passes, by layer."""
    found: Counter[int] = Counter()
    for operator, way in zip(graph.operators, chosen, strict=True):
        if way is not None and operator.given is None and not operator.is_end:
            found[operator.place] += way.memory_bytes
    for it in readings(graph, chosen, setting):
        found[graph.operators[graph.maker[it.tensor.value][0]].place] += it.cost.memory_bytes
    return found


def _kept_moments(
    stage: JointStage, whole: Sequence[Moment], parts: Mapping[int, Fraction], gradients: float
) -> tuple[Moment, ...]:
    """What is there in each layer where its operators are divided, in the ratio of what is kept of it.

    Gradients of parameters, before they are added, are in the ratio of theirs.
    """
    found, kept, before = [], 0, 0
    for place, it in zip(range(stage.start, stage.end), whole, strict=True):
        part = parts.get(place, Fraction(1, len(stage.ranks)))
        kept, before = kept + math.ceil((it.kept - before) * part), it.kept
        fixed = math.ceil(it.fixed * gradients)
        found.append(Moment(kept, kept, math.ceil((it.working - it.fixed) * part) + fixed, fixed, 0, 0, 0))
    return tuple(found)


def _held(graph: Graph, chosen: Sequence[Strategy | None], setting: Setting) -> tuple[float, float, float]:
    """The parts that a rank holds of parameters and of their gradients, and that it updates."""
    whole = trained = held = gradients = updated = 0
    for operator, way in zip(graph.operators, chosen, strict=True):
        if way is None or way.update is None or operator.given is None:
            continue
        size = operator.given.size_bytes
        stored = local_bytes(size, way.before, setting.sizes)  # labels of parameters are dimensions
        whole, held = whole + size, held + stored
        if operator.given.is_trained:
            trained, gradients = trained + size, gradients + stored
            updated += local_bytes(size, way.update, setting.sizes)
    return (
        held / whole if whole else 1.0,
        gradients / trained if trained else 1.0,
        updated / trained if trained else 1.0,
    )

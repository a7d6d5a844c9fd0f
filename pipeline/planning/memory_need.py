"""What a plan needs of each rank's memory, and what is wrong where it does not fit.

Of a plan it is found by going through the passes and messages of a step: what is there at its fullest moment.
Before there is a plan, dynamic programs ask for what a range of layers needs at most where an order keeps so
many microbatches in flight (`peak_in_flight`), which is a closed form.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from typing import TypeAlias

from arborcast.pipeline.costs.devices import RESERVE, usable
from arborcast.pipeline.costs.saved_bytes import (
    Moment,
    Segments,
    Treatment,
    described,
    held_bytes,
    moments,
)
from arborcast.pipeline.errors import BatchError, PlanError
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.order.actions import Phase, last_phase, most_on_their_way
from arborcast.pipeline.order.actions import peak_in_flight as peak_in_flight_of
from arborcast.pipeline.order.pass_messages import WorkerStep, with_messages
from arborcast.pipeline.planning.activation_search import MemoryBudget
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.stages import Plan

Limit: TypeAlias = int | Mapping[int, int]
"""Bytes of memory for a plan: of every rank, or by rank."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that a rank of a stage needs, by what they are for at the fullest moment of a step.

    Attributes:
        parameters: and buffers.
        gradients: of the parameters that a backward pass has come to; of all where there are replicas, which
            have them throughout.
        optimizer: its state.
        activations: kept for the backward passes.
        boundary: of messages: outputs until a gradient comes back for them, what is received ahead, gradients
            of inputs until they have been sent.
        working: of operators while they run, or of the update; before there is a plan among activations.
        buffers: of the process groups that sum gradients.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int = 0
    boundary: int = 0
    working: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(astuple(self))


Sizes: TypeAlias = tuple[int, int, int, int]
"""Bytes of gradients, activations, messages and working memory."""


@dataclass(frozen=True, slots=True)
class StageBytes:
    """What a rank needs for one of its stages, of each microbatch and of all.

    Attributes:
        inputs: of a message from the stage before, and back; 0 of the first stage.
        outputs: likewise of the stage behind.
        moments: of passes, by layer.
        behind: for each layer gradients of the parameters of those behind it.
        gradients: of all parameters.
    """

    inputs: int
    outputs: int
    moments: tuple[Moment, ...]
    behind: tuple[int, ...]
    gradients: int

    @classmethod
    def of(cls, profile: Profile, segments: Segments, share: int) -> StageBytes:
        """Of consecutive layers, where the rank works on so many samples of a microbatch."""
        start, end = segments[0].start, segments[-1].end
        inputs, outputs = (
            math.ceil(profile.output_bytes(it, share)) if 0 < it < profile.depth else 0 for it in (start, end)
        )
        behind = tuple(profile.gradient_bytes(it + 1, end) for it in range(start, end))
        gradients = profile.gradient_bytes(start, end)
        return cls(inputs, outputs, moments(profile, segments, share), behind, gradients)

    def of_pass(self, phase: Phase, *, splits: bool, is_first: bool, is_here: bool) -> list[Sizes]:
        """What a pass lets go of as it begins, what is there besides at its fullest moment, what it leaves.

        Args:
            phase: of the pass.
            splits: whether backward passes are split.
            is_first: whether there are no gradients of parameters yet.
            is_here: whether the stage behind is on the same rank, and so has taken the output itself.
        """
        end, both = self.moments[-1], list(zip(self.moments, self.behind, strict=True))
        left = end.kept + end.between - end.tail
        # Whoever sent a gradient has received the output; the last layer's operators work on that gradient.
        sent, at_end = 0 if is_here else -self.outputs, {len(both) - 1: -self.outputs}
        most: Iterable[Sizes]
        match phase:
            case Phase.FORWARD:  # the input is among what it keeps
                most = ((0, it.held, 0, it.working - it.fixed) for it in self.moments)
                goes, comes = (0, 0, -self.inputs, 0), (0, end.kept, self.outputs, 0)
            case Phase.BACKWARD:
                most = (
                    (0, end.held + end.between - it.between, at_end.get(at, 0), it.split)
                    if splits
                    else (size * is_first, it.held, at_end.get(at, 0), it.working)
                    for at, (it, size) in enumerate(both)
                )
                goes, comes = (0, -end.kept, sent, 0), (0, left * splits, self.inputs - self.outputs, 0)
            case Phase.WEIGHTS:
                kept = ((min(it.kept + it.between, left), it.fixed, size) for it, size in both)
                most = ((size * is_first, there, 0, fixed) for there, fixed, size in kept)
                goes, comes = (0, -left, 0, 0), (0, 0, 0, 0)
        return [goes, max(most, key=sum), comes]


def plan_memory(plan: Plan, profile: Profile, *, batch: int, peer_bytes: int = 0) -> tuple[MemoryNeed, ...]:
    """What the rank with the largest share of the largest microbatch needs, of each stage.

    Where ranks hold several stages it is for all of them. The batch is not counted.

    Args:
        plan: whose order says what is there when.
        profile: of the plan's model.
        batch: samples.
        peer_bytes: of the process group that sums gradients, for each other replica.

    Raises:
        BatchError: some replica would have no sample.
    """
    found: dict[int, MemoryNeed] = {}
    for number, steps in enumerate(with_messages(plan.passes)):
        own = plan.workers[number].stages
        ranges = [(plan.stages[it].start, plan.stages[it].end) for it in own]
        replicas = plan.stages[own[0]].replicas
        share = largest_share(batch, plan.microbatches, replicas)
        lasting = MemoryNeed(
            parameters=profile.bytes_once("parameter_bytes", ranges),
            gradients=profile.bytes_once("gradient_bytes", ranges),
            optimizer=profile.optimizer_once(ranges),
            working=max(profile.update_bytes(*it) for it in ranges),
            buffers=peer_bytes * (replicas - 1),
        )
        parts = {it: StageBytes.of(profile, plan.segments(it), share) for it in own}
        found |= dict.fromkeys(own, fullest(steps, parts, lasting, has_replicas=replicas > 1))
    return tuple(found[it] for it in range(len(plan.stages)))


def fullest(
    steps: Sequence[WorkerStep],
    parts: Mapping[int, StageBytes],
    lasting: MemoryNeed,
    *,
    has_replicas: bool,
) -> MemoryNeed:
    """What a rank needs at the fullest moment of a step: all its passes and messages, one after another.

    Args:
        steps: what it does.
        parts: its stages, by number.
        lasting: what is there throughout, and while the update runs.
        has_replicas: whether gradients of all parameters are there from the start.
    """
    computed = [it.action for it in steps if it.kind == "compute"]
    last, most_sent = last_phase(computed), most_on_their_way(computed)
    made = {it: part.gradients if has_replicas else 0 for it, part in parts.items()}
    found: Sizes = (lasting.gradients, 0, 0, lasting.working)
    kept = messages = 0
    sent: deque[int] = deque()

    @cache
    def passing(stage: int, phase: Phase, is_first: bool) -> list[Sizes]:
        splits, is_here = last is Phase.WEIGHTS, stage + 1 in parts
        return parts[stage].of_pass(phase, splits=splits, is_first=is_first, is_here=is_here)

    for step in steps:
        action, part = step.action, parts[step.action.stage]
        if step.kind == "receive":
            messages += part.inputs if action.phase is Phase.FORWARD else part.outputs
        elif step.kind == "compute":
            goes, most, comes = passing(action.stage, action.phase, not made[action.stage])
            kept, messages = kept + goes[1], messages + goes[2]
            there = min(sum(made.values()) + most[0], lasting.gradients)
            found = max(found, (there, kept + most[1], messages + most[2], most[3]), key=sum)
            kept, messages = kept + comes[1], messages + comes[2]
            made[action.stage] = part.gradients if action.phase is last else made[action.stage]
        elif action.phase is Phase.BACKWARD:
            sent.append(part.inputs)
            messages -= sent.popleft() if len(sent) > most_sent else 0
    gradients, activations, boundary, working = found
    return replace(lasting, gradients=gradients, activations=activations, boundary=boundary, working=working)


def range_memory(
    profile: Profile, segments: Segments, share: int, in_flight: int, *, splits: bool = False
) -> MemoryNeed:
    """What a rank needs at most for consecutive layers, in an order that keeps so many microbatches.

    That is what programs reckon with that have no plan yet; no plan of theirs needs more.

    Args:
        profile: of the model.
        segments: of these layers.
        share: samples of a microbatch that the rank works on.
        in_flight: microbatches that it keeps.
        splits: whether the order splits backward passes.
    """
    start, end = segments[0].start, segments[-1].end
    part = StageBytes.of(profile, segments, share)
    activations = held_bytes(profile, segments, share, in_flight)
    between = part.moments[-1].between if splits else 0
    boundary = in_flight * (part.inputs + part.outputs + between) + 4 * part.inputs + part.outputs
    return MemoryNeed(
        parameters=profile.parameter_bytes(start, end),
        gradients=part.gradients,
        optimizer=profile.optimizer_bytes(start, end),
        activations=activations,
        boundary=boundary,
        working=max(profile.update_bytes(start, end) - activations - boundary, 0),
    )


def most_memory(plan: Plan, profile: Profile, *, batch: int, stage: int) -> MemoryNeed:
    """As `range_memory`, of a stage on ranks of its own."""
    share = largest_share(batch, plan.microbatches, plan.stages[stage].replicas)
    splits = ORDERS[plan.order].splits
    return range_memory(profile, plan.segments(stage), share, _in_flight(plan, stage), splits=splits)


def check_memory(plan: Plan, profile: Profile, limit: Limit, *, batch: int, peer_bytes: int = 0) -> None:
    """Raise where a rank needs more memory than it has, the reserve included; of groups as `plan_memory`.

    Raises:
        PlanError: says on which stage most is missing, how much, of what limit; or a rank has no limit.
        BatchError: some replica would have no sample.
    """
    limits = rank_limits(limit, plan.ranks)
    worst, message = 0, ""
    needs = plan_memory(plan, profile, batch=batch, peer_bytes=peer_bytes)
    for index, (stage, memory) in enumerate(zip(plan.stages, needs, strict=True)):
        rank = min(stage.ranks, key=lambda it: (limits[it], it))
        missing = memory.total - usable(limits[rank])
        if missing > worst:
            worst = missing
            message = (
                f"plan: stage {index} (layers [{stage.start}, {stage.end})) on rank {rank} must fit into "
                f"{readable(limits[rank])} with {RESERVE} % to spare, got {readable(memory.total)}, "
                f"{readable(missing)} too many: "
                f"{_parts(memory)}, {_in_flight(plan, index)} of {plan.microbatches} microbatches in flight"
                f"{_choices(plan, index)}"
            )
    if message:
        raise PlanError(message)


def fits(plan: Plan, profile: Profile, limits: Mapping[int, int], *, batch: int, peer_bytes: int = 0) -> bool:
    """Whether `check_memory` would pass; every rank must have a limit."""
    needs = plan_memory(plan, profile, batch=batch, peer_bytes=peer_bytes)
    return all(
        need.total <= usable(min(limits[it] for it in stage.ranks))
        for need, stage in zip(needs, plan.stages, strict=True)
    )


def memory_budgets(
    plan: Plan, profile: Profile, limits: Mapping[int, int], *, batch: int, peer_bytes: int = 0
) -> tuple[MemoryBudget, ...]:
    """What each stage of a plan has to make do with, where every stage is on ranks of its own."""
    rooms = []
    for index, stage in enumerate(plan.stages):
        memory = most_memory(plan, profile, batch=batch, stage=index)
        share = largest_share(batch, plan.microbatches, stage.replicas)
        others = memory.total - memory.activations + peer_bytes * (stage.replicas - 1)
        limit = usable(min(limits[it] for it in stage.ranks)) - others
        samples = batch / plan.microbatches / stage.replicas
        rooms.append(MemoryBudget(share, samples, _in_flight(plan, index), limit))
    return tuple(rooms)


def rank_limits(limit: Limit, ranks: tuple[int, ...]) -> dict[int, int]:
    """The limit of each rank.

    Raises:
        PlanError: one is not positive, or missing.
    """
    limits = limit if isinstance(limit, Mapping) else dict.fromkeys(ranks, limit)
    for rank in ranks:
        if rank not in limits:
            raise PlanError(f"memory: must have a limit for rank {rank}, got those of {sorted(limits)}")
        if limits[rank] < 1:
            raise PlanError(f"memory: limit of rank {rank} must be at least 1 byte, got {limits[rank]}")
    return {rank: limits[rank] for rank in ranks}


def peak_in_flight(order: str, behind: int, microbatches: int, most: int | None = None) -> int:
    """Most microbatches in flight on a stage with so many stages behind it; `most` is the plan's cap."""
    in_flight = ORDERS[order].in_flight
    assert in_flight is not None, "only such orders are planned with"
    kept = min(in_flight(behind, microbatches), microbatches)
    return kept if most is None else min(kept, most)


def largest_share(batch: int, microbatches: int, replicas: int) -> int:
    """Samples of the largest share that a replica has of a microbatch.

    Raises:
        BatchError: some replica would have no sample.
    """
    if batch < microbatches * replicas:
        raise BatchError(
            f"batch of {batch} samples: must have at least {microbatches * replicas}, one for each of "
            f"{microbatches} microbatches on each of {replicas} replicas"
        )
    largest = -(-batch // microbatches)
    return -(-largest // replicas)


def readable(size: float) -> str:
    """Bytes in the unit that gives the fewest digits before the point: `11.92 GiB`."""
    power = min(int(math.log2(size) // 10) if size >= 1 else 0, 4)
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{size:.0f} B" if not power else f"{size / 1024**power:.2f} {unit}"


def _in_flight(plan: Plan, stage: int) -> int:
    if ORDERS[plan.order].in_flight is None:
        return max(peak_in_flight_of([it for it in actions if it.stage == stage]) for actions in plan.passes)
    behind = len(plan.stages) - 1 - stage
    return peak_in_flight(plan.order, behind, plan.microbatches, plan.max_in_flight)


def _choices(plan: Plan, stage: int) -> str:
    if plan.recompute:
        return " with recomputation"
    own = plan.stages[stage].segments
    return f" ({described(own)})" if any(it.treatment is not Treatment.KEEP for it in own) else ""


def _parts(memory: MemoryNeed) -> str:
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "messages": memory.boundary,
        "working": memory.working,
        "groups": memory.buffers,
    }
    return ", ".join(f"{name} {readable(size)}" for name, size in parts.items() if size)

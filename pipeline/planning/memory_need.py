"""What a plan needs of each rank's memory, and what is wrong where it does not fit.

Weights, gradients and the optimizer's state lie there throughout; activations come with every microbatch in
flight. `peak_in_flight` says for every order how many those are, which the dynamic program asks before
there is a plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from arborcast.pipeline.costs.devices import RESERVE, usable
from arborcast.pipeline.costs.saved_bytes import Segments, Treatment, described, held
from arborcast.pipeline.errors import BatchError, PlanError
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.order.actions import peak_in_flight as peak_in_flight_of
from arborcast.pipeline.planning.activation_search import MemoryBudget
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.stages import Plan

Limit: TypeAlias = int | Mapping[int, int]
"""Bytes of memory for a plan: of every rank, or by rank."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that a rank of a stage needs.

    Attributes:
        parameters: and buffers.
        gradients: of all its parameters.
        optimizer: its state.
        activations: kept for the backward passes, at the fullest moment.
        boundary: of messages: the stage's input and the gradient of its output, posted ahead; its output
            and the gradient of its input, on their way.
        working: of operators while they run, at the fullest moment, beyond all these: of a pass, or of the
            update, when there are no activations and no messages.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    boundary: int
    working: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        lasting = self.parameters + self.gradients + self.optimizer
        return lasting + self.activations + self.boundary + self.working


def stage_memory(plan: Plan, profile: Profile, *, batch: int, stage: int) -> MemoryNeed:
    """What the rank with the largest share of the largest microbatch needs, of one stage.

    Where ranks hold several stages it is for all of them, at the fullest moment of the order. What a split
    backward pass leaves for its second half counts as all that the forward pass has kept. What the first
    layer takes in is not counted: a profile does not know it, and the batch is there anyway.

    Args:
        plan: whose order and `max_in_flight` say how many microbatches are in flight.
        profile: of the plan's model.
        batch: samples.
        stage: its index.

    Raises:
        BatchError: some replica would have no sample.
    """
    own = plan.stages[stage]
    share = largest_share(batch, plan.microbatches, own.replicas)
    if ORDERS[plan.order].in_flight is not None:
        return range_memory(profile, plan.segments(stage), share, _in_flight(plan, stage))
    number = next(it for it, worker in enumerate(plan.workers) if stage in worker.stages)
    own_stages = plan.workers[number].stages
    one = {it: range_memory(profile, plan.segments(it), share, 1) for it in own_stages}
    ranges = [(plan.stages[it].start, plan.stages[it].end) for it in own_stages]
    # What recomputation repeats, or offload fetches, is there for one microbatch of one stage.
    kept = {it: held(profile, plan.segments(it), share).kept for it in own_stages}
    return MemoryNeed(
        parameters=profile.bytes_once("parameter_bytes", ranges),
        gradients=profile.bytes_once("gradient_bytes", ranges),
        optimizer=sum(it.optimizer for it in one.values()),
        activations=max(one[it].activations - kept[it] for it in own_stages)
        + peak_in_flight_of(plan.passes[number], kept.__getitem__),
        boundary=sum(it.boundary for it in one.values()),
        working=max(it.working for it in one.values()),
    )


def range_memory(profile: Profile, segments: Segments, share: int, in_flight: int) -> MemoryNeed:
    """What a rank needs for consecutive layers.

    Args:
        profile: of the model.
        segments: of these layers.
        share: samples of a microbatch that the rank works on.
        in_flight: microbatches that it keeps.
    """
    start, end = segments[0].start, segments[-1].end
    inputs, outputs = (
        math.ceil(profile.output_bytes(cut, share)) if 0 < cut < profile.depth else 0 for cut in (start, end)
    )
    found = held(profile, segments, share)
    activations = found.with_in_flight(in_flight) - found.working
    boundary = 2 * (inputs + outputs)
    return MemoryNeed(
        parameters=profile.parameter_bytes(start, end),
        gradients=profile.gradient_bytes(start, end),
        optimizer=profile.optimizer_bytes(start, end),
        activations=activations,
        boundary=boundary,
        working=max(found.working, profile.update_bytes(start, end) - activations - boundary),
    )


def check_memory(plan: Plan, profile: Profile, limit: Limit, *, batch: int) -> None:
    """Raise where a rank needs more memory than it has, the reserve included.

    Raises:
        PlanError: says on which stage most is missing, how much, of what limit; or a rank has no limit.
        BatchError: some replica would have no sample.
    """
    limits = rank_limits(limit, plan.ranks)
    worst, message = 0, ""
    for index, stage in enumerate(plan.stages):
        memory = stage_memory(plan, profile, batch=batch, stage=index)
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


def fits(plan: Plan, profile: Profile, limits: Mapping[int, int], *, batch: int) -> bool:
    """Whether `check_memory` would pass; every rank must have a limit."""
    return all(
        stage_memory(plan, profile, batch=batch, stage=index).total
        <= usable(min(limits[it] for it in stage.ranks))
        for index, stage in enumerate(plan.stages)
    )


def memory_budgets(
    plan: Plan, profile: Profile, limits: Mapping[int, int], *, batch: int
) -> tuple[MemoryBudget, ...]:
    """What each stage of a plan has to make do with, where every stage is on ranks of its own."""
    rooms = []
    for index, stage in enumerate(plan.stages):
        memory = stage_memory(plan, profile, batch=batch, stage=index)
        limit = usable(min(limits[it] for it in stage.ranks)) - (memory.total - memory.activations)
        share = largest_share(batch, plan.microbatches, stage.replicas)
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
    }
    return ", ".join(f"{name} {readable(size)}" for name, size in parts.items() if size)

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

from arborcast.pipeline.errors import BatchError, PlanError
from arborcast.pipeline.order import actions
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.stages import Plan

Limit: TypeAlias = int | Mapping[int, int]
"""Bytes of memory for a plan: of every rank, or by rank."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a rank of a stage needs.

    Attributes:
        parameters: and buffers.
        gradients: one contiguous buffer.
        optimizer: its state.
        activations: kept for the backward passes, at the fullest moment.
        boundary: of messages: the stage's input and the gradient of its output, posted ahead; its output
            and the gradient of its input, on their way.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    boundary: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.boundary


def stage_memory(plan: Plan, profile: Profile, *, batch: int, stage: int) -> Memory:
    """What the rank with the largest share of the largest microbatch needs, of one stage.

    What the first layer takes in is not counted: a profile does not know it, and the batch is there anyway.

    Args:
        plan: whose order and `max_in_flight` say how many microbatches are in flight.
        profile: of the plan's model.
        batch: samples.
        stage: its index.

    Raises:
        BatchError: some replica would have no sample.
    """
    from arborcast.pipeline.order import order_of

    in_flight = actions.peak_in_flight(order_of(plan)[stage])
    return _memory(plan, profile, batch, stage, in_flight)


def check_memory(plan: Plan, profile: Profile, limit: Limit, *, batch: int) -> None:
    """Raise where a rank needs more memory than it has.

    Raises:
        PlanError: says on which stage most is missing, how much, of what limit; or a rank has no limit.
        BatchError: some replica would have no sample.
    """
    from arborcast.pipeline.order import order_of

    limits = rank_limits(limit, plan.ranks)
    worst, message = 0, ""
    for index, (stage, its_actions) in enumerate(zip(plan.stages, order_of(plan), strict=True)):
        in_flight = actions.peak_in_flight(its_actions)
        memory = _memory(plan, profile, batch, index, in_flight)
        rank = min(stage.ranks, key=lambda it: (limits[it], it))
        missing = memory.total - limits[rank]
        if missing > worst:
            worst = missing
            message = (
                f"plan: stage {index} (layers [{stage.start}, {stage.end})) on rank {rank} must fit into "
                f"{readable(limits[rank])}, got {readable(memory.total)}, {readable(missing)} too many: "
                f"{_parts(memory)}, {in_flight} of {plan.microbatches} microbatches in flight"
                f"{' with recomputation' if plan.recompute else ''}"
            )
    if message:
        raise PlanError(message)


def fits(plan: Plan, profile: Profile, limits: Mapping[int, int], *, batch: int) -> bool:
    """Whether `check_memory` would pass, without the order itself; every rank must have a limit."""
    for index, stage in enumerate(plan.stages):
        behind = len(plan.stages) - 1 - index
        in_flight = peak_in_flight(plan.order, behind, plan.microbatches, plan.max_in_flight)
        need = _memory(plan, profile, batch, index, in_flight).total
        if need > min(limits[rank] for rank in stage.ranks):
            return False
    return True


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
    """Most microbatches in flight on a stage with so many stages behind it, of an order of `ORDERS`.

    Fill and drain keeps all of them; 1F1B one more than there are stages behind; SPP's list order warms up
    with `4 behind + 1` of them (PE's closed form). `most` is the plan's cap.
    """
    kept = {"gpipe": microbatches, "1f1b": behind + 1, "pe": 4 * behind + 1}[order]
    return min(kept, microbatches, microbatches if most is None else most)


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


def readable(size: int) -> str:
    """Bytes in the unit that gives the fewest digits before the point: `11.92 GiB`."""
    power = min(int(math.log2(size) // 10) if size else 0, 4)
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{size} B" if not power else f"{size / 1024**power:.2f} {unit}"


def _memory(plan: Plan, profile: Profile, batch: int, index: int, in_flight: int) -> Memory:
    stage = plan.stages[index]
    share = largest_share(batch, plan.microbatches, stage.replicas)
    cuts = (stage.start, stage.end)
    inputs, outputs = (
        math.ceil(profile.output_bytes(cut, share)) if 0 < cut < plan.depth else 0 for cut in cuts
    )
    saved = math.ceil(profile.saved_bytes(*cuts, share))
    return Memory(
        parameters=profile.parameter_bytes(*cuts),
        gradients=profile.gradient_bytes(*cuts),
        optimizer=profile.optimizer_bytes(*cuts),
        activations=in_flight * inputs + saved if plan.recompute else in_flight * saved,
        boundary=2 * (inputs + outputs),
    )


def _parts(memory: Memory) -> str:
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "messages": memory.boundary,
    }
    return ", ".join(f"{name} {readable(size)}" for name, size in parts.items() if size)

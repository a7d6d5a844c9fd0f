"""Memory for the planners that do not plan by it: whether a plan or a range of layers fits.

`fitted` asks the real check, which has the last word; `range_room` is for dynamic programs, which ask for
thousands of ranges before there is a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import TypeAlias

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.planning.memory import Limit, check_memory, largest_share, peak_in_flight, rank_limits
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.stages import Plan

Room: TypeAlias = Callable[[int, int, Sequence[int], int], bool]
"""Whether the layers [start, end) fit on these replicas with so many stages behind them."""


def fitted(candidates: Iterable[Plan], profile: Profile, memory_bytes: Limit | None, batch: int) -> Plan:
    """The first plan whose every stage fits.

    Raises:
        PlanError: none does; by how much the last of them does not, and on which stage.
        BatchError: some replica of the first would have no sample.
    """
    refusal: PlanError | None = None
    for plan in candidates:
        plan.microbatch_sizes(batch)
        try:
            if memory_bytes is not None:
                check_memory(plan, profile, memory_bytes, batch=batch)
        except PlanError as error:
            refusal = error
        else:
            return plan
    raise refusal or PlanError("plan: must have a candidate, got none")


def both_ways(plan: Plan) -> tuple[Plan, Plan]:
    """A plan without and with recomputation."""
    return plan, replace(plan, recompute=True)


def range_room(
    profile: Profile, limit: Limit, ranks: tuple[int, ...], *, batch: int, microbatches: int, recompute: bool
) -> Room:
    """A question about ranges of layers in a 1F1B pipeline, counted as `stage_memory` counts."""
    limits = rank_limits(limit, ranks)

    @cache
    def constant(start: int, end: int) -> int:
        return (
            profile.parameter_bytes(start, end)
            + profile.gradient_bytes(start, end)
            + profile.optimizer_bytes(start, end)
        )

    def room(start: int, end: int, replicas: Sequence[int], behind: int) -> bool:
        share = largest_share(batch, microbatches, len(replicas))
        inputs, outputs = (
            profile.output_bytes(cut, share) if 0 < cut < profile.depth else 0.0 for cut in (start, end)
        )
        saved = profile.saved_bytes(start, end, share)
        in_flight = peak_in_flight("1f1b", behind, microbatches)
        activations = in_flight * inputs + saved if recompute else in_flight * saved
        needed = constant(start, end) + activations + 2 * (inputs + outputs)
        return needed <= min(limits[rank] for rank in replicas)

    return room

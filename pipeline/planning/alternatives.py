"""What else could be done with the same costs, links and memory: the published methods, each as a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import BatchError, PlanError
from arborcast.pipeline.planning.memory_need import Limit, fitted, with_and_without_recompute
from arborcast.pipeline.planning.pipedream import pipedream
from arborcast.pipeline.planning.rannc import rannc
from arborcast.pipeline.planning.spp import spp
from arborcast.pipeline.planning.stage_balance import balanced
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.simulation.pass_simulator import simulate
from arborcast.pipeline.stages import Plan


def data_parallel(
    profile: Profile,
    network: LinkCosts,
    *,
    batch: int,
    microbatches: int = 1,
    memory_bytes: Limit | None = None,
) -> Plan:
    """One stage on all ranks; gradients of the microbatches add up. It recomputes only where memory asks.

    Raises:
        PlanError: memory does not hold it (by how much), or the ranks are not connected.
        BatchError: a microbatch would have fewer samples than there are ranks.
    """
    ranks = range(network.topology.ranks)
    if not network.allreduce_rate(ranks):
        raise PlanError(
            f"data-parallel: the ranks of {network.topology.name} must be connected for an allreduce"
        )
    plan = Plan(
        [(0, profile.depth, ranks)],
        microbatches,
        "1f1b",
        topology=network.topology,
        model=profile.model,
        method="data-parallel",
    )
    return fitted(with_and_without_recompute(plan), profile, memory_bytes, batch)


def straight_gpipe(
    profile: Profile,
    network: LinkCosts,
    *,
    batch: int,
    microbatches: int,
    memory_bytes: Limit | None = None,
) -> Plan:
    """As many stages as ranks (or as layers, if those are fewer), in the order of the ranks' numbers.

    The largest time of a stage, forward and backward of one microbatch, is the least possible; messages
    play no part. GPipe recomputes always; this recomputes only where memory asks for it, in its favour.

    Raises:
        PlanError: memory does not hold it even with recomputation (by how much).
        BatchError: there are fewer samples than microbatches.
    """
    stages = min(network.topology.ranks, profile.depth)
    samples = batch / microbatches
    times = [
        profile.forward_us(layer, layer + 1, samples) + profile.backward_us(layer, layer + 1, samples)
        for layer in range(profile.depth)
    ]
    plan = Plan(
        [(start, end, (rank,)) for rank, (start, end) in enumerate(balanced(times, stages))],
        microbatches,
        "gpipe",
        topology=network.topology,
        model=profile.model,
        method="gpipe",
    )
    return fitted(with_and_without_recompute(plan), profile, memory_bytes, batch)


PlanMethod: TypeAlias = Callable[..., Plan]


@dataclass(frozen=True, slots=True)
class PublishedMethod:
    """A published way to train.

    Attributes:
        plan: `(profile, network, *, batch, microbatches, memory_bytes) -> Plan`.
        remark: how the plan differs from what was published; "" where it does not.
    """

    plan: PlanMethod
    remark: str = ""


METHODS: Mapping[str, PublishedMethod] = {
    "data-parallel": PublishedMethod(data_parallel),
    "gpipe": PublishedMethod(straight_gpipe),
    "pipedream": PublishedMethod(pipedream, "with a flush after every batch; published without"),
    "rannc": PublishedMethod(rannc),
    "spp": PublishedMethod(spp),
}
"""The alternatives by name."""


def alternatives(
    profile: Profile,
    network: LinkCosts,
    *,
    batch: int,
    microbatches: int | Sequence[int],
    memory_bytes: Limit | None = None,
    methods: Iterable[str] = tuple(METHODS),
) -> dict[str, Plan | PlanError]:
    """The plan of each alternative, or why it has none.

    Args:
        profile: of the model.
        network: whose ranks are all to be used.
        batch: samples of a step.
        microbatches: that each divides it into; of several numbers, each alternative takes the one by which
            it is predicted to be fastest.
        memory_bytes: of every rank, or by rank; None for no limit.
        methods: of `METHODS`.
    """
    scheduled = replace(network, by_schedule=True)
    counts = [microbatches] if isinstance(microbatches, int) else list(microbatches)

    def best(method: PlanMethod) -> Plan | PlanError:
        tried = [_tried(method, profile, network, batch, count, memory_bytes) for count in counts]
        plans = [plan for plan in tried if isinstance(plan, Plan)]
        if not plans:  # what the plan of the most microbatches that the batch has samples for lacks
            refusals = [it for it in reversed(tried) if isinstance(it, PlanError)]
            return refusals[0] if refusals else PlanError(str(tried[-1]))
        return min(plans, key=lambda plan: simulate(plan, profile, scheduled, batch=batch).time_us)

    return {name: best(METHODS[name].plan) for name in methods}


def _tried(
    method: PlanMethod,
    profile: Profile,
    network: LinkCosts,
    batch: int,
    microbatches: int,
    memory_bytes: Limit | None,
) -> Plan | PlanError | BatchError:
    try:
        return method(profile, network, batch=batch, microbatches=microbatches, memory_bytes=memory_bytes)
    except (PlanError, BatchError) as error:
        return error

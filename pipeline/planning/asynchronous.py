"""PipeDream as published, without a flush: what a batch takes in the long run, and what memory that needs.

Each microbatch of a plan is a minibatch of its own, and the replicas of a stage take minibatches in turn.
Every stage updates its weights after its backward passes, and keeps for every minibatch in flight the version
that its forward pass has seen (weight stashing). Nothing waits at the end of a batch, so there is no bubble;
gradients are of weights that have moved on since.

    stage 0   F0 F1 F2 B0 F3 B1 F4 B2 ...       three versions at once
    stage 1      F0 F1 B0 F2 B1 F3 B2 ...       two
    stage 2         F0 B0 F1 B1 F2 B2 ...       one

The trainer does not do this: its weights are those of serial training.

Source: PipeDream (SOSP 2019), sections 3.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import BatchError, PlanError
from arborcast.pipeline.planning.memory_need import Limit, MemoryNeed, range_memory, rank_limits, readable
from arborcast.pipeline.planning.pipedream import pipedream
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.simulation.pass_simulator import simulate
from arborcast.pipeline.stages import Plan

ROUNDS = 4
"""Times that every stage is filled before the steady state is read, and twice as many while it is."""


@dataclass(frozen=True, slots=True)
class SteadyState:
    """Asynchronous training, in the long run.

    Attributes:
        plan: the stages, in 1F1B; its microbatches are the minibatches.
        time_us: from one batch to the next.
        versions: of its weights that a rank of each stage keeps: the minibatches that it has in flight.
        memory: that a rank of each stage needs, all versions among its parameters.
    """

    plan: Plan
    time_us: float
    versions: tuple[int, ...]
    memory: tuple[MemoryNeed, ...]

    def missing(self, limit: Limit | None) -> str:
        """What does not fit into memory, in words; "" where all does."""
        if limit is None:
            return ""
        limits = rank_limits(limit, self.plan.ranks)
        for index, (memory, stage) in enumerate(zip(self.memory, self.plan.stages, strict=True)):
            least = min(limits[rank] for rank in stage.ranks)
            if memory.total > least:
                return f"stage {index} would need {readable(memory.total)} of {readable(least)}"
        return ""


def fastest_steady_state(
    profile: Profile,
    network: LinkCosts,
    *,
    batch: int,
    microbatches: Sequence[int],
    memory_bytes: Limit | None = None,
) -> SteadyState:
    """PipeDream's plans without a flush: the fastest that fits, or the fastest where none does.

    Arguments are those of `alternatives`; the published planner does not know memory.

    Raises:
        PlanError: there is no plan for any number of minibatches (why the last has none).
    """
    found: list[SteadyState] = []
    refusal = PlanError("pipedream: must have a number of microbatches, got none")
    for count in microbatches:
        try:
            plan = pipedream(profile, network, batch=batch, microbatches=count)
            found.append(steady_state(plan, profile, network, batch=batch))
        except (PlanError, BatchError) as error:
            refusal = PlanError(str(error))
    if not found:
        raise refusal
    return min(found, key=lambda it: (bool(it.missing(memory_bytes)), it.time_us))


def steady_state(plan: Plan, profile: Profile, network: LinkCosts, *, batch: int) -> SteadyState:
    """What a plan in 1F1B would do if nothing were flushed.

    A stage synchronises once for as many minibatches as it has replicas, and pays a replica's share of the
    allreduce in each backward pass. For its time a minibatch is divided among the replicas, as the simulator
    does: parts of a pass that do not shrink with the samples then count on each of them.

    Args:
        plan: whose microbatches are the minibatches.
        profile: of its model.
        network: its links; allreduces cost what their schedules do.
        batch: samples; a minibatch has batch / microbatches of them, rounded down.

    Raises:
        PlanError: the plan does not fit the network.
        BatchError: a minibatch has fewer samples than a stage has replicas.
    """
    plan.microbatch_sizes(batch)
    network = replace(network, by_schedule=True)
    each = batch // plan.microbatches
    layers = list(profile.layers)
    for stage in plan.stages:
        size = profile.gradient_bytes(stage.start, stage.end)
        sync_us = network.allreduce_us(stage.ranks, size) / stage.replicas
        last = layers[stage.end - 1]
        layers[stage.end - 1] = replace(
            last,
            backward_us=last.backward_us + sync_us,
            backward_fixed_us=last.backward_fixed_us + sync_us,
        )
    synchronised = replace(profile, layers=tuple(layers))
    few = ROUNDS * len(plan.stages)

    def until(minibatches: int) -> float:
        many = replace(plan, microbatches=minibatches)
        return simulate(many, synchronised, network, batch=minibatches * each).time_us

    # What fills, drains and sums at the end is in both.
    period_us = (until(3 * few) - until(few)) / (2 * few)
    versions = tuple(
        -(-sum(behind.replicas for behind in plan.stages[index:]) // stage.replicas)
        for index, stage in enumerate(plan.stages)
    )
    needs = (range_memory(profile, plan.segments(index), each, kept) for index, kept in enumerate(versions))
    return SteadyState(
        plan,
        period_us * batch / each,
        versions,
        tuple(
            replace(memory, parameters=memory.parameters * kept)
            for memory, kept in zip(needs, versions, strict=True)
        ),
    )

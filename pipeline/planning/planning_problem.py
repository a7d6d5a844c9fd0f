"""What a published planner is asked: a model on a fabric, its batch in microbatches, and the memory there.

Each planner is a function from a `PlanningProblem` to a plan; what several of them do with one stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TypeAlias

from arborcast.pipeline.costs.devices import usable
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.costs.saved_bytes import Segment, Treatment
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.planning.activation_search import MemoryBudget
from arborcast.pipeline.planning.memory_need import (
    Limit,
    check_memory,
    fits,
    largest_share,
    memory_budgets,
    peak_in_flight,
    range_memory,
    rank_limits,
)
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.simulation.pass_simulator import simulate
from arborcast.pipeline.stages import Plan, Stage

RangeFits: TypeAlias = Callable[[int, int, Sequence[int], int], bool]
"""Whether the layers [start, end) fit on these replicas with so many stages behind them."""


@dataclass(frozen=True)
class PlanningProblem:
    """A model to be planned on a fabric.

    Attributes:
        profile: of the model.
        network: whose ranks are all to be used.
        batch: samples of a step.
        microbatches: that it is divided into.
        memory_bytes: of every rank, or by rank; None for no limit.
    """

    profile: Profile
    network: LinkCosts
    batch: int
    microbatches: int
    memory_bytes: Limit | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the fabric."""
        return tuple(range(self.network.topology.ranks))

    @property
    def samples(self) -> float:
        """Of a microbatch on average."""
        return self.batch / self.microbatches

    @cached_property
    def layer_us(self) -> tuple[float, ...]:
        """Time of both passes of a microbatch through each layer."""
        profile, samples = self.profile, self.samples
        return tuple(
            profile.forward_us(it, it + 1, samples) + profile.backward_us(it, it + 1, samples)
            for it in range(profile.depth)
        )

    def check_batch(self) -> None:
        """Raise where the batch does not split.

        Raises:
            BatchError: there are fewer samples than microbatches.
        """
        Plan([(0, self.profile.depth, (0,))], self.microbatches).microbatch_sizes(self.batch)

    def plan(
        self,
        stages: Iterable[Stage | tuple[int, int, Iterable[int]]],
        order: str,
        method: str,
        *,
        recompute: bool = False,
        max_in_flight: int | None = None,
    ) -> Plan:
        """The plan of these stages for this model and fabric, made by a method."""
        made_for = self.network.topology, self.profile.model
        return Plan(stages, self.microbatches, order, recompute, max_in_flight, *made_for, method)

    @cached_property
    def limits(self) -> dict[int, int] | None:
        """Bytes of memory of each rank; None for no limit.

        Raises:
            PlanError: one is not positive, or missing.
        """
        return None if self.memory_bytes is None else rank_limits(self.memory_bytes, self.ranks)

    def fits(self, plan: Plan) -> bool:
        """Whether a plan fits into memory, the buffers of its replicas' groups included."""
        limits, peer_bytes = self.limits, self.network.peer_bytes
        return limits is None or fits(plan, self.profile, limits, batch=self.batch, peer_bytes=peer_bytes)

    def check_memory(self, plan: Plan) -> None:
        """Raise where it does not.

        Raises:
            PlanError: says by how much, and on which stage.
            BatchError: some replica would have no sample.
        """
        if self.memory_bytes is not None:
            limit, peer_bytes = self.memory_bytes, self.network.peer_bytes
            check_memory(plan, self.profile, limit, batch=self.batch, peer_bytes=peer_bytes)

    def budgets(self, plan: Plan) -> tuple[MemoryBudget, ...]:
        """What its stages have to make do with, where memory is limited."""
        assert self.limits is not None, "the caller asked"
        peer_bytes = self.network.peer_bytes
        return memory_budgets(plan, self.profile, self.limits, batch=self.batch, peer_bytes=peer_bytes)

    def time_us(self, plan: Plan, network: LinkCosts | None = None) -> float:
        """Of a simulated step; over other links if there are any."""
        return simulate(plan, self.profile, network or self.network, batch=self.batch).time_us

    def fitted(self, candidates: Iterable[Plan]) -> Plan:
        """The first plan whose every stage fits into memory.

        Raises:
            PlanError: none does; by how much the last of them does not, and on which stage.
            BatchError: some replica of the first would have no sample.
        """
        refusal: PlanError | None = None
        for plan in candidates:
            plan.microbatch_sizes(self.batch)
            try:
                self.check_memory(plan)
            except PlanError as error:
                refusal = error
            else:
                return plan
        raise refusal or PlanError("plan: must have a candidate, got none")

    def recomputing_where_needed(self, plan: Plan) -> Plan:
        """A plan that keeps all results; where that does not fit into memory, the same with recomputation.

        Raises:
            PlanError, BatchError: as `fitted`.
        """
        return self.fitted((plan, replace(plan, recompute=True)))

    def fastest(self, plans: Iterable[Plan]) -> Plan:
        """The plan with the least predicted step, its allreduces by their schedules; of equals the first."""
        several = list(plans)
        if len(several) == 1:
            return several[0]
        network = replace(self.network, by_schedule=True)
        return min(several, key=lambda it: self.time_us(it, network))

    def range_fits(self, *, recompute: bool, order: str = "1f1b") -> RangeFits:
        """What dynamic programs over ranges of layers ask of memory, for a pipeline in this order."""
        limits = self.limits
        if limits is None:
            return lambda start, end, replicas, behind: True
        treatment = Treatment.RECOMPUTE if recompute else Treatment.KEEP

        @cache
        def needed(start: int, end: int, replicas: int, behind: int) -> int:
            share = largest_share(self.batch, self.microbatches, replicas)
            in_flight = peak_in_flight(order, behind, self.microbatches)
            layers = (Segment(start, end, treatment),)
            own = range_memory(self.profile, layers, share, in_flight, splits=ORDERS[order].splits)
            return own.total + self.network.peer_bytes * (replicas - 1)

        return lambda start, end, replicas, behind: (
            needed(start, end, len(replicas), behind) <= usable(min(limits[rank] for rank in replicas))
        )


Planner: TypeAlias = Callable[[PlanningProblem], Plan]
"""A published way to plan.

Raises:
    PlanError: it has no plan: nothing fits into memory (by how much), or links do not connect the ranks.
    BatchError: there are fewer samples than microbatches, or a replica without a sample.
"""

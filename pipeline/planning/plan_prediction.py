"""What a plan will cost: time, bound, bubble, memory and the timeline, from its profile and its topology."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.order.actions import peak_in_flight
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.simulation.lower_bound import CONDITION, bound_us, least_us
from arborcast.pipeline.simulation.pass_simulator import simulate
from arborcast.pipeline.simulation.timeline import Timeline
from arborcast.pipeline.stages import Plan

if TYPE_CHECKING:
    from arborcast.pipeline.planning.memory_need import MemoryNeed


@dataclass(frozen=True)
class Prediction:
    """A step of training, predicted.

    Attributes:
        time_us: of the step, by the simulator.
        bound_us: that the step is proven to keep to under `bound_condition`; None where ranks hold several
            stages.
        least_us: that no order of the same passes on these ranks can go below.
        bound_condition: in words; it says whether `bound_us` holds for this plan.
        bubble: the share of the ranks' time, of those with work, in which they wait.
        peak_in_flight: of each stage, the most microbatches whose results it keeps at once.
        memory: that a rank of each stage needs.
        samples_per_s: of the whole pipeline.
        timeline: who does what when.
    """

    time_us: float
    bound_us: float | None
    least_us: float
    bound_condition: str
    bubble: float
    peak_in_flight: tuple[int, ...]
    memory: tuple[MemoryNeed, ...]
    samples_per_s: float
    timeline: Timeline

    @property
    def memory_bytes(self) -> int:
        """That the fullest rank needs."""
        return max(it.total for it in self.memory)


def predict(
    plan: Plan,
    profile: Profile,
    network: LinkCosts | None = None,
    *,
    batch: int | None = None,
) -> Prediction:
    """Simulate a step of a plan, its allreduces by the schedules for exactly their ranks.

    Args:
        plan: what to do.
        profile: of the plan's model.
        network: None for the plan's topology with messages that cost nothing beyond their links.
        batch: samples of a step; None for those of the profile.

    Raises:
        PlanError: there is no topology, or the plan does not fit the model or the topology.
        BatchError: the batch does not split into microbatches and replicas.

    Examples:
        >>> profile = pipeline.profile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(8, 8))
        >>> plan = pipeline.plan(profile, topologies.load("full:2"))
        >>> pipeline.predict(plan, profile).time_us > 0
        True
    """
    from arborcast.pipeline.planning.memory_need import plan_memory

    if network is None:
        if plan.topology is None:
            raise PlanError("plan: must name a topology where none is given to predict it on, got none")
        network = LinkCosts(plan.topology)
    network = replace(network, by_schedule=True)
    samples = profile.samples if batch is None else batch
    timeline = simulate(plan, profile, network, batch=samples)
    time_us, passes = timeline.time_us, plan.passes
    return Prediction(
        time_us=time_us,
        bound_us=bound_us(plan, profile, network, batch=samples),
        least_us=least_us(plan, profile, batch=samples),
        bound_condition=bound_condition(plan),
        bubble=_bubble(timeline, len(plan.ranks)),
        peak_in_flight=tuple(
            peak_in_flight([it for actions in passes for it in actions if it.stage == stage])
            for stage in range(len(plan.stages))
        ),
        memory=plan_memory(plan, profile, batch=samples, peer_bytes=network.peer_bytes),
        samples_per_s=samples / time_us * 1e6 if time_us else float("inf"),
        timeline=timeline,
    )


def bound_condition(plan: Plan) -> str:
    """When the bound is proven, and what keeps it from being so for this plan."""
    if not ORDERS[plan.order].is_bounded:
        return f"{CONDITION}; this plan's order is {plan.order}"
    if plan.max_in_flight is not None:
        return f"{CONDITION}; this plan has a cap of {plan.max_in_flight}"
    return CONDITION


def _bubble(timeline: Timeline, ranks: int) -> float:
    idle = sum(it.end_us - it.start_us for it in timeline.intervals if it.kind == "waiting")
    return idle / (timeline.time_us * ranks) if timeline.time_us else 0.0

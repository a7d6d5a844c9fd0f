"""What the collectives of a plan take at least, by proof: each by whatever schedule, one after another.

Those of a rank are counted on the links among the ranks that run them together, as these forward for each
other; a sum in several buckets takes no less than one of all bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from arborcast.pipeline.answers import kept
from arborcast.pipeline.planning.interop_search import JointPlan
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.sharding.evaluation import calls
from arborcast.pipeline.sharding.slices import Sliced
from arborcast.pipeline.stages import Plan
from arborcast.synth.bounds import bound
from arborcast.synth.bounds.time_limits import TimeLimit, time_limit
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.topology import Topology


@dataclass(frozen=True)
class LeastTimes:
    """The least times of collectives on a fabric; what was worked out of a group is kept.

    Attributes:
        topology: whose ranks plans name.
    """

    topology: Topology
    _limits: dict[tuple[Kind, tuple[int, ...], tuple[int, ...]], TimeLimit] = field(default_factory=dict)

    def of_replicas(self, plan: Plan, profile: Profile) -> float:
        """Microseconds of a step's allreduces of gradients, on the ranks where they are most."""
        most = 0.0
        for worker in plan.workers:
            ranges = (plan.stages[stage] for stage in worker.stages)
            layers = (layer for it in ranges for layer in profile.layers[it.start : it.end])
            size_bytes = sum(it.gradient_bytes for it in layers)
            if len(worker.ranks) > 1:
                most = max(most, self._us(Kind.ALLREDUCE, worker.ranks, [worker.ranks], size_bytes))
        return most

    def of_divided(self, joint: JointPlan, sliced: Sliced) -> float:
        """The same of all collectives of stages whose operators are divided."""
        most = 0.0
        for stage in joint.stages:
            setting = stage.priced.setting
            mesh = setting.prices.mesh
            took = 0.0
            for call in calls(sliced.stage(stage.start, stage.end), stage.priced.sharding.chosen, setting):
                times = call.per_microbatch * joint.microbatches + call.per_step
                took += times * self._us(call.kind, mesh.ranks, mesh.groups(call.axes), call.size_bytes)
            most = max(most, took)
        return most

    def _us(
        self, kind: Kind, ranks: Sequence[int], groups: Iterable[Sequence[int]], size_bytes: float
    ) -> float:
        """Of one collective in each of some groups of these ranks: of the slowest group, were it alone."""
        if not size_bytes:
            return 0.0
        limits = (self._limit(kind, tuple(sorted(ranks)), tuple(group)) for group in groups)
        return max((float(limit.at(math.ceil(size_bytes))) for limit in limits), default=0.0)

    def _limit(self, kind: Kind, among: tuple[int, ...], group: tuple[int, ...]) -> TimeLimit:
        def found() -> TimeLimit:
            fragment = self.topology.subset(among)
            collective = Collective.on(fragment, kind, ranks=[among.index(rank) for rank in group])
            return time_limit(fragment, collective, bound(fragment, collective))

        return kept(self._limits, (kind, among, group), found)

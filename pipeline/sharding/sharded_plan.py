"""A plan of both levels: stages of a pipeline, each divided over a mesh; and what it is for.

It is carried out in 1F1B. `pipeline.planning.formats` writes and reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.sharding.graph import Graph, MergedOperator
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.sharding.stage_sharding import StageSharding, operator_sharding
from arborcast.pipeline.sharding.strategies import Strategy, strategies
from arborcast.pipeline.stages import Plan
from arborcast.synth.topology import Topology


@dataclass(frozen=True, slots=True)
class ShardedStage:
    """The layers [start, end) on the ranks of a mesh.

    Attributes:
        start: the first layer.
        end: the layer behind the last one.
        sharding: the mesh, and how everything lies on it.
    """

    start: int
    end: int
    sharding: StageSharding

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the mesh."""
        return self.sharding.mesh.ranks


@dataclass(frozen=True)
class ShardedPlan:
    """Stages, the first one first.

    Attributes:
        model: its name.
        batch: samples of a step.
        microbatches: that they are divided into.
        stages: all layers.
        topology: whose ranks the meshes name.
        whole: operators without a rule, which every rank of their stage runs on whole tensors.
    """

    model: str
    batch: int
    microbatches: int
    stages: tuple[ShardedStage, ...]
    topology: Topology
    whole: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check that stages follow each other, on ranks of their own."""
        if not self.stages:
            raise PlanError("plan: must have at least one stage, got none")
        if self.microbatches < 1 or self.batch % self.microbatches:
            raise PlanError(
                f"plan: batch of {self.batch} samples must split into {self.microbatches} equal microbatches"
            )
        for index, stage in enumerate(self.stages):
            start = self.stages[index - 1].end if index else 0
            if stage.start != start or stage.end <= start:
                raise PlanError(
                    f"plan: stage {index} must begin at layer {start} and hold a layer, got "
                    f"[{stage.start}, {stage.end})"
                )
        ranks = [rank for stage in self.stages for rank in stage.ranks]
        for rank in ranks:
            if not 0 <= rank < self.topology.ranks:
                most = self.topology.ranks - 1
                raise PlanError(f"plan: rank must be in 0..{most} of the topology, got {rank}")
        twice = sorted(a for a, b in pairwise(sorted(ranks)) if a == b)
        if twice:
            raise PlanError(f"plan: rank {twice[0]} must be in one mesh, got it twice")

    @property
    def depth(self) -> int:
        """Number of layers."""
        return self.stages[-1].end

    def pipeline(self, depth: int) -> Plan:
        """Which layers lie on which ranks, of a model with so many layers; one stage holds all of them."""
        ends = [depth] if len(self.stages) == 1 else [it.end for it in self.stages]
        stages = [(it.start, end, it.ranks) for it, end in zip(self.stages, ends, strict=True)]
        return Plan(stages, self.microbatches, topology=self.topology, batch=self.batch)


def check_topology(plan: ShardedPlan, topology: Topology) -> None:
    """Whether a plan is for these ranks and links (which may be of other bandwidths).

    Raises:
        PlanError: it is not.
    """
    theirs, ours = (
        (it.ranks, [(link.src, link.dst) for link in it.links]) for it in (plan.topology, topology)
    )
    if theirs != ours:
        raise PlanError(
            f"plan: is for topology {plan.topology.name}, got {topology.name}, which has other links"
        )


def strategies_of(stage: ShardedStage, graph: Graph, setting: Setting) -> tuple[Strategy | None, ...]:
    """The strategies that a stage of a plan names, one for each operator of its graph, None for inputs.

    Args:
        stage: of a plan.
        graph: of its layers.
        setting: prices on a mesh of its shape.

    Raises:
        PlanError: the plan is for another model, mesh or number of samples.
    """
    where = f"plan: stage of layers [{stage.start}, {stage.end})"
    if setting.sizes != stage.sharding.mesh.shape:
        raise PlanError(f"{where}: mesh must be {setting.prices.mesh}, got {stage.sharding.mesh}")
    named = {it.name: it for it in stage.sharding.operators} | {
        it.path: it for it in stage.sharding.parameters
    }
    wanted = {_name(it): it for it in graph.operators if it.given is None or it.given.is_parameter}
    for name in (*wanted, *named):
        if (name in wanted) != (name in named):
            what = "lacks" if name in wanted else "has"
            raise PlanError(f"{where}: is for another model: it {what} {name}")
    found: list[Strategy | None] = []
    for operator in graph.operators:
        if _name(operator) not in wanted:
            found.append(None)
            continue
        asked = named[_name(operator)]
        ways = strategies(graph, operator, setting)
        way = next((it for it in ways if operator_sharding(operator, it) == asked), None)
        if way is None:
            raise PlanError(
                f"{where}: {_name(operator)} cannot be divided over mesh {stage.sharding.mesh} as it says"
            )
        found.append(way)
    return tuple(found)


def _name(operator: MergedOperator) -> str:
    return operator.name if operator.given is None else operator.given.path

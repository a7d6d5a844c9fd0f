"""A whole model divided over all ranks of a topology as one stage: its best mesh, by `StagePrices`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from arborcast.pipeline.costs.devices import DeviceRates, device_named, reserving
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.meshes import Mesh
from arborcast.pipeline.sharding.graph import Graph, merged
from arborcast.pipeline.sharding.plan_strategies import stage_sharding
from arborcast.pipeline.sharding.sharding_program import Sharding
from arborcast.pipeline.sharding.slices import Sliced
from arborcast.pipeline.sharding.stage_prices import PricedStage, StagePrices
from arborcast.pipeline.stages import Plan, Stage
from arborcast.synth.topology import Topology

if TYPE_CHECKING:
    from arborcast.pipeline.model.traced.model import Traced


@dataclass(frozen=True)
class MeshChoice:
    """The best mesh of all ranks.

    Attributes:
        graph: the operators.
        topology: whose ranks they are divided over.
        priced: how, by what schedules take.
    """

    graph: Graph
    topology: Topology
    priced: PricedStage

    @property
    def sharding(self) -> Sharding:
        """On the best mesh."""
        return self.priced.sharding

    @property
    def plan(self) -> Plan:
        """The same as a plan of one stage and one layer, which files hold and `Trainer` runs."""
        stage = divided_stage(0, 1, self.sharding.graph, self.priced, range(self.topology.ranks))
        return divided_plan([stage], self.graph, self.priced.setting.microbatches, self.topology, "one mesh")


def divided_stage(start: int, end: int, graph: Graph, priced: PricedStage, ranks: Sequence[int]) -> Stage:
    """The layers [start, end), with these operators, as they are divided over some ranks."""
    mesh = Mesh(priced.setting.sizes, tuple(ranks))
    return Stage.divided(start, end, stage_sharding(graph, priced.sharding.chosen, mesh))


def divided_plan(
    stages: Sequence[Stage], graph: Graph, microbatches: int, topology: Topology, method: str
) -> Plan:
    """The plan of such stages.

    Args:
        stages: all of them.
        graph: of the model, for the samples of a microbatch.
        microbatches: of a step.
        topology: the fabric.
        method: that made the plan.
    """
    return Plan(
        stages,
        microbatches,
        topology=topology,
        model=graph.name,
        method=method,
        batch=graph.samples * microbatches,
        whole=tuple(graph.unknown),
    )


def graph_of_microbatch(model: Traced, batch: int, microbatches: int, *, by_layer: bool = False) -> Graph:
    """The merged operators of a model on one of the equal parts of a batch.

    Raises:
        PlanError: the batch does not split so.
    """
    from arborcast.pipeline.model.traced.operator_reader import operator_trace

    if microbatches < 1 or batch % microbatches:
        raise PlanError(f"batch of {batch} samples: must split into {microbatches} equal microbatches")
    return merged(operator_trace(model, batch // microbatches, by_layer=by_layer))


def shard_model(
    model: Traced,
    topology: Topology,
    device: DeviceRates | str,
    *,
    batch: int,
    microbatches: int = 1,
    memory_bytes: int | None = None,
    name: str | None = None,
) -> MeshChoice:
    """The best way to divide the operators of a whole model over all ranks of a topology.

    Args:
        model: traced with its loss.
        topology: the fabric.
        device: that every rank is, or its name ("v100").
        batch: samples of a step.
        microbatches: that they are divided into.
        memory_bytes: of each rank; None for the device's.
        name: of the model; None for its class.

    Raises:
        PlanError: the batch does not split into microbatches, or nothing fits.
        ProfileError: no such device.

    Examples:
        >>> example = torch.randn(8, 16), torch.randn(8, 16)
        >>> model = pipeline.trace(nn.Sequential(nn.Linear(16, 16)), example, nn.functional.mse_loss)
        >>> choice = pipeline.shard_model(model, topologies.load("full:2"), "v100", batch=8)
        >>> [stage.ranks for stage in choice.plan.stages]
        [(0, 1)]
    """
    graph = graph_of_microbatch(model, batch, microbatches)
    on = device_named(device) if isinstance(device, str) else device
    limit = on.memory_bytes if memory_bytes is None else memory_bytes
    named = graph if name is None else replace(graph, name=name)
    return choose(named, topology, on, microbatches=microbatches, memory_bytes=limit)


def choose(
    graph: Graph,
    topology: Topology,
    device: DeviceRates,
    *,
    microbatches: int = 1,
    memory_bytes: int | None = None,
) -> MeshChoice:
    """The same of operators that bear no numbers of layers, for the samples of a microbatch.

    Raises:
        PlanError: no mesh has a choice.
    """
    sliced = Sliced(graph, topology.ranks)
    with reserving(memory_bytes) as limit:
        prices = StagePrices(sliced, topology, device, microbatches, memory_bytes=limit)
        return MeshChoice(graph, topology, prices.scheduled(0, sliced.depth, range(topology.ranks), 1))

"""The best mesh for a graph on some ranks: each sharded at exact rates, the best ones again by schedules.

No schedule is faster than the exact rate. So meshes are taken in the order of their times at rates, until
the next one takes longer at rates than the best so far by schedules. Beside the free choice stand the fixed
layouts on the same mesh and the same costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from arborcast.pipeline.costs.devices import DeviceRates, device_named
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.meshes import Mesh, meshes
from arborcast.pipeline.sharding.evaluation import Cost, repriced
from arborcast.pipeline.sharding.fabric_prices import FabricPrices
from arborcast.pipeline.sharding.graph import Graph, merged
from arborcast.pipeline.sharding.layouts import LAYOUTS
from arborcast.pipeline.sharding.plan_strategies import stage_sharding
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.sharding.sharding_program import Sharding, shard
from arborcast.pipeline.stages import Plan, Stage
from arborcast.synth.topology import Topology

if TYPE_CHECKING:
    from arborcast.pipeline.model.traced.model import Traced


@dataclass(frozen=True)
class OnMesh:
    """What one mesh gives.

    Attributes:
        setting: the mesh and its prices: what schedules take, or exact rates where those rule it out.
        sharding: the best choice at these prices; None where there is none.
        at_rates: the best at exact rates.
        scheduled: the cost of `sharding` when collectives take what their schedules take; None where there
            is none.
        layouts: the best choice of each fixed layout at the prices of `setting`, by name.
        why_not: in words why there is none; the free choice is called "free".
    """

    setting: Setting
    sharding: Sharding | None
    at_rates: Sharding | None
    scheduled: Cost | None
    layouts: Mapping[str, Sharding]
    why_not: Mapping[str, str]

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.setting.prices.mesh


@dataclass(frozen=True)
class MeshChoice:
    """The meshes of some ranks with what they give.

    Attributes:
        graph: the operators.
        topology: whose ranks they are.
        tried: every mesh.
        best: the one with the least time of a step by schedules.
    """

    graph: Graph
    topology: Topology
    tried: tuple[OnMesh, ...]
    best: OnMesh

    @property
    def sharding(self) -> Sharding:
        """On the best mesh."""
        assert self.best.sharding is not None
        return self.best.sharding

    @property
    def plan(self) -> Plan:
        """The same as a plan of one stage and one layer, which files hold and `Trainer` runs."""
        microbatches = self.best.setting.microbatches
        stage = stage_sharding(self.graph, self.sharding.chosen, self.best.mesh)
        return Plan(
            [Stage.divided(0, 1, stage)],
            microbatches,
            topology=self.topology,
            model=self.graph.name,
            method="one mesh",
            batch=self.graph.samples * microbatches,
            whole=tuple(self.graph.unknown),
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
    """The best way to divide the operators of a whole model over all ranks of a topology: `choose`.

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
    """
    graph = graph_of_microbatch(model, batch, microbatches)
    on = device_named(device) if isinstance(device, str) else device
    return choose(
        graph if name is None else replace(graph, name=name),
        topology,
        on,
        microbatches=microbatches,
        memory_bytes=on.memory_bytes if memory_bytes is None else memory_bytes,
    )


def choose(
    graph: Graph,
    topology: Topology,
    device: DeviceRates,
    *,
    ranks: Sequence[int] | None = None,
    microbatches: int = 1,
    in_flight: int = 1,
    optimizer_ratio: Fraction = Fraction(2),
    memory_bytes: int | None = None,
    by_schedule: bool = True,
    deadline_s: float | None = None,
) -> MeshChoice:
    """The best way to divide operators over some ranks of a topology.

    Args:
        graph: the operators, for the samples of a microbatch.
        topology: the fabric.
        device: that every rank is.
        ranks: in the order in which meshes are filled row by row; None for all.
        microbatches: of a step.
        in_flight: of how many a rank holds activations.
        optimizer_ratio: bytes of the optimizer's state for each byte of weights.
        memory_bytes: of one rank that may be used; None for no limit.
        by_schedule: whether collectives are priced by simulated schedules where that may decide.
        deadline_s: for each program.

    Raises:
        PlanError: no mesh has a choice (why, of the mesh that comes first).
    """

    def on(prices: FabricPrices) -> OnMesh:
        setting = Setting(prices, device, microbatches, in_flight, optimizer_ratio)
        return _on_mesh(graph, setting, memory_bytes, deadline_s)

    (first, *rest) = meshes(range(topology.ranks) if ranks is None else ranks)
    rates = [FabricPrices(topology, first)]
    rates += [replace(rates[0], mesh=mesh) for mesh in rest]  # answers are shared
    tried = [on(prices) for prices in rates]
    least = math.inf
    for number in sorted(range(len(tried)), key=lambda it: _total(tried[it].sharding)):
        rough = tried[number]
        if rough.sharding is None or not by_schedule:
            break
        real = replace(rates[number], by_schedule=True)
        if rough.sharding.total_ps < least:
            tried[number] = replace(on(real), at_rates=rough.sharding)
            least = min(least, _total(tried[number].sharding))
        else:
            cost = repriced(graph, rough.sharding.chosen, rough.setting, real)
            tried[number] = replace(rough, scheduled=cost)
    best = min(tried, key=lambda it: it.scheduled.total_ps(microbatches) if it.scheduled else math.inf)
    if best.sharding is None:
        raise PlanError(tried[0].why_not["free"])
    return MeshChoice(graph, topology, tuple(tried), best)


def _total(sharding: Sharding | None) -> float:
    return math.inf if sharding is None else sharding.total_ps


def _on_mesh(graph: Graph, setting: Setting, memory_bytes: int | None, deadline_s: float | None) -> OnMesh:
    found: dict[str, Sharding] = {}
    why_not: dict[str, str] = {}
    for name, layout in (("free", None), *LAYOUTS.items()):
        allowed = None if layout is None else layout(setting.sizes)
        try:
            found[name] = shard(
                graph, setting, memory_bytes=memory_bytes, allowed=allowed, deadline_s=deadline_s
            )
        except PlanError as error:
            why_not[name] = str(error)
    free = found.pop("free", None)
    return OnMesh(setting, free, free, None if free is None else free.cost, found, why_not)

"""The best mesh for a graph on some ranks: each sharded at exact rates, the results priced by schedules.

Beside the free choice stand the fixed layouts on the same mesh and the same costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from arborcast.pipeline.costs.devices import Device
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.sharding.evaluation import Cost, repriced
from arborcast.pipeline.sharding.graph import Graph
from arborcast.pipeline.sharding.layouts import LAYOUTS
from arborcast.pipeline.sharding.mesh import FabricPrices, Mesh, meshes
from arborcast.pipeline.sharding.program import Sharding, shard
from arborcast.pipeline.sharding.setting import Setting
from arborcast.synth.topology import Topology


@dataclass(frozen=True)
class OnMesh:
    """What one mesh gives.

    Attributes:
        setting: the mesh and its prices, at exact rates.
        sharding: the best choice; None where there is none.
        scheduled: its cost when collectives take what their schedules take; None where there is none.
        layouts: the best choice of each fixed layout, by name.
        why_not: in words why there is none; the free choice is called "free".
    """

    setting: Setting
    sharding: Sharding | None
    scheduled: Cost | None
    layouts: Mapping[str, Sharding]
    why_not: Mapping[str, str]

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.setting.prices.mesh


@dataclass(frozen=True)
class Choice:
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


def choose(
    graph: Graph,
    topology: Topology,
    device: Device,
    *,
    ranks: Sequence[int] | None = None,
    microbatches: int = 1,
    in_flight: int = 1,
    optimizer_ratio: Fraction = Fraction(2),
    memory_bytes: int | None = None,
    by_schedule: bool = True,
    deadline_s: float | None = None,
) -> Choice:
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
        by_schedule: whether the chosen shardings are priced by simulated schedules to find the best mesh.
        deadline_s: for each program.

    Raises:
        PlanError: no mesh has a choice (why, of the mesh that comes first).
    """
    tried = []
    prices: FabricPrices | None = None
    for mesh in meshes(range(topology.ranks) if ranks is None else ranks):
        prices = FabricPrices(topology, mesh) if prices is None else replace(prices, mesh=mesh)
        setting = Setting(prices, device, microbatches, in_flight, optimizer_ratio)
        found: dict[str, Sharding] = {}
        why_not: dict[str, str] = {}
        for name, layout in (("free", None), *LAYOUTS.items()):
            allowed = None if layout is None else layout(mesh.shape)
            try:
                found[name] = shard(
                    graph, setting, memory_bytes=memory_bytes, allowed=allowed, deadline_s=deadline_s
                )
            except PlanError as error:
                why_not[name] = str(error)
        free = found.pop("free", None)
        scheduled = None
        if free is not None:
            scheduled = repriced(graph, free.chosen, setting, replace(prices, by_schedule=by_schedule))
        tried.append(OnMesh(setting, free, scheduled, found, why_not))
    fitting = [it for it in tried if it.scheduled is not None]
    if not fitting:
        raise PlanError(tried[0].why_not["free"])
    best = min(fitting, key=lambda it: it.scheduled.total_ps(microbatches) if it.scheduled else 0)
    return Choice(graph, topology, tuple(tried), best)

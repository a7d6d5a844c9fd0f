"""The best mesh: collectives that add up to the cost, schedules no cheaper than rates, layouts no better."""

from __future__ import annotations

import pytest

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.meshes import meshes
from arborcast.pipeline.sharding.evaluation import calls
from arborcast.pipeline.sharding.fabric_prices import FabricPrices
from arborcast.pipeline.sharding.layouts import LAYOUTS
from arborcast.pipeline.sharding.mesh_choice import choose
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.sharding.sharding_program import shard
from arborcast.pipeline.sharding.specs import local_bytes
from tests.sharding.examples import UNIT, mlp, ring


def test_the_best_mesh_is_taken():
    graph, fabric = mlp(64, 64, 512), ring(4, 10)
    found = choose(graph, fabric, UNIT, microbatches=2)
    totals = {}
    for mesh in meshes(range(4)):
        setting = Setting(FabricPrices(fabric, mesh, by_schedule=True), UNIT, microbatches=2)
        real = shard(graph, setting)
        totals[mesh.shape] = real.total_ps
        assert real.total_ps >= shard(graph, Setting(FabricPrices(fabric, mesh), UNIT, 2)).total_ps
        # Ranks 0 and 2 of a ring are no neighbours: nothing can be added up along that axis of 2 x 2.
        for name in ("data-parallel", "zero-3") if len(mesh.shape) > 1 else LAYOUTS:
            assert shard(graph, setting, allowed=LAYOUTS[name](mesh.shape)).total_ps >= real.total_ps
        # what all collectives take is what the cost says beside computing and updates
        listed = calls(graph, real.chosen, setting)
        price = {call: setting.prices.ps(call.kind, call.axes, call.size_bytes) for call in listed}
        assert sum(n.per_microbatch * price[n] for n in listed) == real.cost.communication_ps
        updates = sum(
            setting.update_ps(local_bytes(operator.given.size_bytes, way.update, mesh.shape))
            for operator, way in zip(graph.operators, real.chosen, strict=True)
            if way is not None and way.update is not None and operator.given is not None
        )
        assert sum(n.per_step * price[n] for n in listed) == real.cost.step_ps - updates
    assert list(totals) == [(4,), (2, 2)]
    assert found.sharding.total_ps == min(totals.values())
    assert totals[found.priced.setting.sizes] == found.sharding.total_ps


def test_no_memory_for_any_mesh_says_by_how_much():
    with pytest.raises(
        PlanError,
        match=r"every rank must have at least \d+ bytes, got 909 \(of 1000, with 10 % to spare\)$",
    ):
        choose(mlp(64, 64, 512), ring(4), UNIT, memory_bytes=1000)

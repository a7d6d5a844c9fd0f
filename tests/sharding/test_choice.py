"""The best mesh: collectives that add up to the cost, schedules no cheaper than rates, layouts no better."""

from __future__ import annotations

from dataclasses import replace

import pytest

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.sharding.evaluation import calls
from arborcast.pipeline.sharding.fabric_prices import FabricPrices
from arborcast.pipeline.sharding.mesh_choice import choose
from arborcast.pipeline.sharding.sharding_program import shard
from arborcast.pipeline.sharding.specs import local_bytes
from tests.sharding.examples import UNIT, mlp, ring


def test_every_mesh_is_tried_and_the_best_taken():
    graph = mlp(64, 64, 512)
    found = choose(graph, ring(4, 10), UNIT, microbatches=2)
    assert [str(it.mesh) for it in found.tried] == ["4", "2x2"]
    for it in found.tried:
        assert it.sharding is not None
        assert it.at_rates is not None
        assert it.scheduled is not None
        assert it.scheduled.total_ps(2) >= it.sharding.total_ps >= it.at_rates.total_ps
        # by schedules no choice on any mesh, also those that rates ruled out, is better than the best
        real = replace(it.setting, prices=FabricPrices(found.topology, it.mesh, by_schedule=True))
        assert shard(graph, real).total_ps >= found.sharding.total_ps
        assert found.best.scheduled.total_ps(2) <= it.scheduled.total_ps(2)
        assert all(layout.total_ps >= it.sharding.total_ps for layout in it.layouts.values())
        # what all collectives take is what the cost says beside computing and updates
        listed = calls(graph, it.sharding.chosen, it.setting)
        price = {call: it.setting.prices.ps(call.kind, call.axes, call.size_bytes) for call in listed}
        assert sum(n.per_microbatch * price[n] for n in listed) == it.sharding.cost.communication_ps
        updates = sum(
            it.setting.update_ps(local_bytes(operator.given.size_bytes, way.update, it.mesh.shape))
            for operator, way in zip(graph.operators, it.sharding.chosen, strict=True)
            if way is not None and way.update is not None and operator.given is not None
        )
        assert sum(n.per_step * price[n] for n in listed) == it.sharding.cost.step_ps - updates
    # Ranks 0 and 2 of a ring are no neighbours: nothing can be added up along that axis of 2 x 2.
    assert "megatron" in found.tried[1].why_not


def test_no_memory_for_any_mesh_says_by_how_much():
    with pytest.raises(PlanError, match=r"mesh 2 of ranks \[1, 0\]: every rank must have at least \d+ bytes"):
        choose(mlp(64, 64, 512), ring(4), UNIT, ranks=(1, 0), memory_bytes=1000)

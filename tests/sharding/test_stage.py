"""A stage's sharding as a value: drawn, to JSON and back, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from arborcast.pipeline.costs.saved_bytes import Segment, Treatment
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.sharding.plan_strategies import stage_sharding, strategies_of
from arborcast.pipeline.sharding.sharding_program import shard
from arborcast.pipeline.stage_sharding import StageSharding, check_spec
from arborcast.pipeline.stages import Plan, Stage, check_topology
from tests.sharding.examples import Writer, mlp, on_ring, ring


def test_columns_then_rows_as_drawn_and_read_back():
    graph, setting = mlp(1, 64, 512), on_ring((2,))
    made = stage_sharding(graph, shard(graph, setting).chosen, setting.prices.mesh)
    document = json.loads(json.dumps(asdict(made)))
    assert document["mesh"] == {"shape": [2], "ranks": [0, 1]}
    assert document["parameters"] == [
        {"path": "w1", "stored": "S(0)", "update": "S(0)"},
        {"path": "w2", "stored": "S(1)", "update": "S(1)"},
    ]
    up, down, softmax = document["operators"]
    assert up == {
        "name": "up",
        "kind": "linear",
        "members": ["up", "gelu"],
        "reads": [["x", "R", None], ["w1", "S(0)", "S(0)"]],
        "made": "S(1)",
        "result": "S(1)",
        "outputs": [["gelu", "S(1)"]],
    }
    assert (down["reads"], down["made"], down["result"]) == (
        [["gelu", "S(1)", "S(1)"], ["w2", "S(1)", "S(1)"]],
        "P",
        "R",
    )
    assert softmax["outputs"] == [["softmax", "R"]]
    assert StageSharding.from_document(document) == made


@pytest.mark.parametrize("text", ["R", "R R R", "R Q", "S(a) R", ""])
def test_a_spec_of_another_mesh_is_refused(text):
    with pytest.raises(PlanError, match=r"must be 2 of R, P and S\(dimension\), got"):
        check_spec(text, 2)


def test_a_plan_gives_back_its_strategies_and_is_refused_for_others():
    graph, setting = mlp(1, 64, 512), on_ring((2,))
    chosen = shard(graph, setting).chosen
    stage = Stage.divided(0, 1, stage_sharding(graph, chosen, setting.prices.mesh))
    assert strategies_of(stage, graph, setting) == chosen
    it = Writer()
    it.linear("up", it.input("x", 1, 64), it.weight("w1", 512, 64))
    with pytest.raises(PlanError, match=r"layers \[0, 1\): is for another model: it has down"):
        strategies_of(stage, it.graph(), setting)
    with pytest.raises(PlanError, match="w1 cannot be divided over mesh 2 as it says"):
        strategies_of(stage, mlp(1, 64, 511), setting)
    with pytest.raises(PlanError, match="mesh must be 4, got 2"):
        strategies_of(stage, graph, on_ring((4,)))
    whole = {"topology": ring(2), "batch": 2}
    with pytest.raises(PlanError, match="is for topology ring, got ring, which has other links"):
        check_topology(Plan([stage], 2, **whole), ring(3))
    with pytest.raises(PlanError, match="must have every stage on ranks of its own, got 2 stages"):
        Plan([stage, replace(stage, start=1, end=2)], 2, **whole)
    with pytest.raises(PlanError, match=r"stage 1 must start at layer 1, where .* ends, got 2"):
        Plan([stage, replace(stage, start=2, end=3)], 2, **whole)
    with pytest.raises(PlanError, match="batch of 3 samples must split into 2"):
        Plan([stage], 2, **(whole | {"batch": 3}))
    for missing in whole:
        with pytest.raises(PlanError, match=f"{missing} must be given where operators are divided"):
            Plan([stage], 2, **(whole | {missing: None}))
    for order in ("gpipe", "pe", "zb-h1"):
        assert Plan([stage], 2, order, **whole).is_divided
    with pytest.raises(PlanError, match=r"every stage on ranks of its own .* 2 stages on 1 groups .* zb-v"):
        Plan([stage, replace(stage, start=1, end=2)], 2, "zb-v", **whole)
    parts = (Segment(0, 1, Treatment.RECOMPUTE), Segment(1, 2, Treatment.KEEP))
    with pytest.raises(PlanError, match=r"results of all its layers alike, .* got recompute 1, keep 1"):
        Plan([replace(stage, end=2, segments=parts)], 2, **whole)
    with pytest.raises(PlanError, match=r"stage 1 must have a mesh of its ranks \[2\], .* got none"):
        Plan([stage, (1, 2, [2])], 2, topology=ring(3), batch=2)
    with pytest.raises(PlanError, match=r"stage 0 must have a mesh of its ranks \[1, 0\], .* ranks \[0, 1\]"):
        Plan([replace(stage, ranks=(1, 0))], 2, **whole)

"""A stage's sharding as a value: drawn, to JSON and back, and what is refused."""

from __future__ import annotations

import json

import pytest

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.sharding.program import shard
from arborcast.pipeline.sharding.stage import (
    parse_spec,
    sharding_from_document,
    sharding_to_document,
    stage_sharding,
)
from tests.sharding.examples import mlp, on_ring


def test_columns_then_rows_as_drawn_and_read_back():
    graph, setting = mlp(1, 64, 512), on_ring((2,))
    made = stage_sharding(graph, shard(graph, setting).chosen, setting.prices.mesh)
    document = json.loads(json.dumps(sharding_to_document(made)))
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
    assert sharding_from_document(document) == made


@pytest.mark.parametrize("text", ["R", "R R R", "R Q", "S(a) R", ""])
def test_a_spec_of_another_mesh_is_refused(text):
    with pytest.raises(PlanError, match=r"must be 2 of R, P and S\(dimension\), got"):
        parse_spec(text, 2)

"""The bench of divided steps: what is measured, and what rows say, with drawn ranks in place of processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from arborcast import topologies
from arborcast.bench.emulation import network
from arborcast.bench.training import sharded_step
from arborcast.bench.training.sharded_step import Case, LayoutPlan, graph_of, predicted, step_rows
from arborcast.pipeline.meshes import Mesh
from arborcast.pipeline.sharding.fabric_prices import FabricPrices
from arborcast.pipeline.sharding.plan_strategies import stage_sharding
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.sharding.sharding_program import shard
from arborcast.pipeline.sharding.slices import Sliced
from arborcast.pipeline.stages import Plan, Stage

SECONDS = {"chosen": 0.03, "data-parallel": 0.06}
"""Of a step; Megatron's layout is the choice here."""


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Of each layout on each rank, by ranks that are drawn; a layout without seconds must not be measured."""
    drawn = {"chosen": [1.0, 1.0], "data-parallel": [1.0 + 1e-7, 1.0 + 1e-7]}

    def ranks(
        _: object, __: object, ___: Case, topology: Any, found: Sequence[LayoutPlan], *rest: int, **____: Any
    ) -> Any:
        return [
            {"small": [0.001], "serial": 0.05}
            | {
                plan.layout: {
                    "seconds": [SECONDS[plan.layout]] * 2,
                    "loss": drawn[plan.layout][rank],
                    "calls": 1,
                }
                for plan in found
            }
            for rank in range(topology.ranks)
        ]

    monkeypatch.setattr(network, "emulate", nullcontext)
    monkeypatch.setattr(sharded_step, "delivered", lambda _: {"alone": None})
    monkeypatch.setattr(sharded_step, "check_delivery", lambda *_: None)
    monkeypatch.setattr(sharded_step, "delivered_fabric", lambda topology, _: topology)
    monkeypatch.setattr(sharded_step, "run_inside", ranks)
    return drawn


CASE = Case("full:2", "mlp", 384)


def test_layouts_with_one_plan_are_measured_once(losses: dict[str, list[float]]) -> None:
    found = {row["layout"]: row for row in step_rows(CASE)}
    assert [(name, row["same_plan"], row["time_us"], row["ratio"]) for name, row in found.items()] == [
        ("chosen", None, 30_000.0, 1.0),
        ("data-parallel", None, 60_000.0, 2.0),
        ("megatron", "chosen", 30_000.0, 1.0),
    ]


@pytest.mark.long
def test_stages_add_up_as_planned() -> None:
    """Where links cost nothing, a step is both stages' parts and three times the longer one, over four."""
    case, fast = Case("full:2", "mlp", 384, microbatches=4), topologies.load("full:2,bandwidth=1000000000")
    graph = graph_of(case)
    sliced, stages = Sliced(graph, 2), []
    for rank, (start, end) in enumerate([(0, 2), (2, sliced.depth)]):
        own, mesh = sliced.stage(start, end), Mesh((), (rank,))
        chosen = shard(own, Setting(FabricPrices(fast, mesh), sharded_step._CORE)).chosen
        stages.append(Stage.divided(start, end, stage_sharding(own, chosen, mesh)))
    plan = Plan(stages, 4, topology=case.topology(), model=graph.name, batch=case.batch)
    step_us, longest_us, moved_us = predicted(plan, graph, fast, 1e6, [0.0, 0.0])
    assert moved_us < 100
    assert 0.5e6 < longest_us < 0.9e6
    assert step_us == pytest.approx((1e6 + 3 * longest_us) / 4, rel=1e-3)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"chosen": [1.0, 1.0 + 1e-7]}, "ranks must see the same loss"),
        ({"data-parallel": [1.001, 1.001]}, "layouts must agree"),
    ],
)
def test_losses_that_differ_are_refused(
    losses: dict[str, list[float]], wrong: dict[str, list[float]], said: str
) -> None:
    losses.update(wrong)
    with pytest.raises(AssertionError, match=said):
        step_rows(CASE)

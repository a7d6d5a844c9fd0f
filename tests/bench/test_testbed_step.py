"""Trainings on emulated links: every plan of the bench fits its fabric, its layers sleep in turn."""

from __future__ import annotations

import pytest
import torch

from arborcast.bench.training import sleeping
from arborcast.bench.training.testbed_step import CASES, LAYERS, MICROBATCHES, SAMPLES, Case
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.simulation.pass_simulator import simulate
from tests.support.planning_cases import model


@pytest.mark.parametrize("case", CASES)
def test_every_rank_of_a_fabric_has_layers_and_can_train_them(case: Case) -> None:
    topology = case.topology()
    profile = model([(1, 2)] * LAYERS, weights=4, samples=SAMPLES)
    for each in case.plans:
        plan = each.plan(topology)
        assert sorted(plan.ranks) == list(range(topology.ranks))
        assert (plan.depth, plan.microbatches) == (LAYERS, MICROBATCHES)
        assert [len(it.ranks) for it in plan.workers] == list(each.replicas)
        simulate(plan, profile, LinkCosts(topology, by_ring=each.collectives == "gloo"), batch=SAMPLES)


def test_a_layer_sleeps_for_its_samples_in_each_of_three_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(sleeping.ALARM, "sleep", slept.append)
    layer, inputs = sleeping.Nap(3, 5.0, rows=4), torch.randn(7, 3, requires_grad=True)
    layer(inputs).sum().backward()
    assert slept == [35.0] * 3
    assert torch.equal(inputs.grad, torch.ones(7, 3))
    assert torch.equal(layer.weight.grad, torch.tensor([[7.0] * 3, *[[0.0] * 3] * 3]))

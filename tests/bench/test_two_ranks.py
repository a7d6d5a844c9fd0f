"""The plans whose steps and memory are predicted and measured, from a drawn profile."""

from __future__ import annotations

from arborcast import topologies
from arborcast.bench.training import two_ranks
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.costs.saved_bytes import Treatment
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.planning.plan_prediction import predict
from arborcast.pipeline.profiles import Layer, Profile


def test_plans_are_of_all_orders_and_treatments() -> None:
    layers = tuple(Layer(f"{it}", 10.0, 20.0 + it, 64, 64, 256, 256) for it in range(10))
    profile, network = Profile("drawn", 4, layers), LinkCosts(topologies.load("full:2"))
    found = {name: (plan, by) for name, plan, by in two_ranks._plans(profile, network)}
    assert len(found) == 12
    assert {plan.order for plan, _ in found.values()} == {*ORDERS} - {"pe"}
    assert {it for plan, _ in found.values() for it in plan.treatments} == {*Treatment}
    assert {by for plan, by in found.values() if len(plan.stages) == 1} == {"gloo", "synth"}
    times = {name: predict(plan, profile, network, batch=16).time_us for name, (plan, _) in found.items()}
    assert times["1f1b, uneven"] > times["1f1b, 4 microbatches"] > times["zb-h1, 4 microbatches"]

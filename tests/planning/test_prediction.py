"""What is predicted of a plan, and of which plans nothing is."""

from dataclasses import replace
from fractions import Fraction

import pytest

from arborcast import topologies
from arborcast.pipeline import predict
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import BatchError, PlanError
from arborcast.pipeline.planning.memory_need import plan_memory
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.stages import Plan
from arborcast.synth.topology import Link, Topology
from tests.support.planning_cases import model, wired

PAIR = wired(2, {(0, 1): 1}, name="pair")
COSTS = model([10] * 2, saved=64, weights=16, optimizer_bytes=32)


def halves(order, microbatches=4, **options):
    return Plan([(0, 1, [0]), (1, 2, [1])], microbatches, order, topology=PAIR, **options)


def test_a_plan_on_its_own_topology():
    """Two stages of 30 us and 4 microbatches take 5 · 30 us, in one of five of which each rank waits."""
    plan = halves("1f1b")
    found = predict(plan, COSTS, batch=4)
    assert found.time_us == found.timeline.time_us == 150
    assert found.bubble == pytest.approx(1 / 5)
    assert found.samples_per_s == pytest.approx(4 / 150e-6)
    assert found.peak_in_flight == (2, 1)
    assert found.memory == plan_memory(plan, COSTS, batch=4)


def test_zero_bubble_orders_leave_less_than_three_fifths_of_the_bubble():
    """Four stages, 8 microbatches, F = B = W: 9 of 33 units in 1F1B, 3 of 27, of 51 for half stages."""
    costs, fabric = model([10] * 8, weights_us=10), topologies.load("full:4")

    def bubble(order, ranks):
        each = 8 // len(ranks)
        stages = [(it * each, (it + 1) * each, [rank]) for it, rank in enumerate(ranks)]
        return predict(Plan(stages, 8, order), costs, LinkCosts(fabric), batch=8).bubble

    there, back = range(4), range(3, -1, -1)
    assert bubble("1f1b", there) == pytest.approx(9 / 33)
    assert bubble("interleaved", [*there, *there]) == pytest.approx(9 / 57)
    assert bubble("zb-h1", there) == pytest.approx(3 / 27) and 3 / 27 < 0.6 * 9 / 33
    assert bubble("zb-v", [*there, *back]) == pytest.approx(3 / 51)


def test_the_update_is_part_of_it():
    layers = tuple(replace(it, update_us=10) for it in COSTS.layers)
    found = predict(halves("1f1b"), replace(COSTS, layers=layers), batch=4)
    assert found.time_us == 160
    assert found.bubble == pytest.approx(1 - (4 * 30 + 10) / 160)


def test_the_profile_says_how_many_samples():
    whole = Profile("drawn", 4, COSTS.layers)
    found = predict(halves("1f1b"), whole)
    assert found.time_us == 150 / 4
    assert found.samples_per_s == pytest.approx(4 / 37.5e-6)


def test_the_bound_comes_with_its_condition():
    found = predict(halves("pe"), COSTS, batch=4)
    assert found.bound_us == (1 + 4 / 4) * 4 * 30
    assert found.time_us <= found.bound_us
    assert found.bound_condition.startswith("order pe without a cap; ")
    assert "; this plan" not in found.bound_condition
    assert predict(halves("gpipe"), COSTS, batch=4).bound_condition.endswith("; this plan's order is gpipe")
    capped = predict(halves("pe", max_in_flight=2), COSTS, batch=4)
    assert capped.bound_condition.endswith("; this plan has a cap of 2")
    assert capped.peak_in_flight == (2, 1)


def test_one_rank_never_waits():
    found = predict(Plan([(0, 2, [1])], 1, topology=PAIR), COSTS)
    assert (found.time_us, found.bound_us, found.bubble) == (60, 60, 0)


def test_of_what_nothing_is_predicted():
    with pytest.raises(PlanError, match="plan: must name a topology where none is given to predict it on"):
        predict(Plan([(0, 1, [0]), (1, 2, [1])], 1), COSTS)
    with pytest.raises(PlanError, match="plan: is for model other, got the profile of drawn"):
        predict(halves("pe", model="other"), COSTS, batch=4)
    three = Topology.build("three", 3, [*PAIR.links, Link(1, 2, Fraction(1))])
    with pytest.raises(PlanError, match="plan: is for topology pair, got three, which has other links"):
        predict(halves("pe"), COSTS, LinkCosts(three), batch=4)
    with pytest.raises(BatchError, match="batch of 2 samples: must have at least 4"):
        predict(halves("pe"), COSTS, batch=2)


def test_a_plan_on_faster_links_of_the_same_topology():
    faster, costs = wired(2, {(0, 1): 2}, name="pair"), model([10] * 2, output=5000)
    slow, fast = (predict(halves("1f1b"), costs, LinkCosts(it), batch=4).time_us for it in (PAIR, faster))
    assert fast < slow

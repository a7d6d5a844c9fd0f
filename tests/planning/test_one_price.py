"""One layout has one price and one memory, whichever planner it comes from."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.pipeline import predict
from arborcast.pipeline.costs.devices import with_reserve
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import MemoryShortError, PlanError
from arborcast.pipeline.planning.alternatives import data_parallel
from arborcast.pipeline.planning.divided_prediction import predict_divided
from arborcast.pipeline.planning.interop_search import JointPlan, one_stage
from arborcast.pipeline.planning.planning_problem import PlanningProblem
from arborcast.pipeline.planning.sharded_planning import (
    choose_both,
    divides_samples_alone,
    given_choice,
    replicas_of,
)
from arborcast.pipeline.profiles import Profile
from arborcast.pipeline.sharding.graph import Graph
from arborcast.pipeline.sharding.layouts import LAYOUTS
from arborcast.pipeline.sharding.slices import Sliced
from arborcast.pipeline.sharding.stage_prices import StagePrices
from arborcast.pipeline.simulation.pass_simulator import simulate
from tests.sharding.examples import UNIT, products, profile_of

models = st.builds(
    products, st.sampled_from([4, 8, 64]), st.lists(st.sampled_from([4, 8, 64]), min_size=2, max_size=4)
)


@given(models, st.sampled_from(["full:2", "ring:4"]), st.integers(1, 3))
@settings(max_examples=6, deadline=None)
def test_data_parallelism_is_one_plan_of_one_price(graph: Graph, fabric: str, microbatches: int) -> None:
    """Found as a division of operators over a mesh it is the plan of the planner of replicas."""
    topology, profile = topologies.load(fabric), profile_of(graph)
    network, batch = LinkCosts(topology), graph.samples * microbatches
    found = choose_both(graph, topology, UNIT, profile, microbatches=microbatches)
    way, ours = found.ways["data-parallel"], found.plan_by("data-parallel")
    theirs = data_parallel(PlanningProblem(profile, network, batch, microbatches))
    assert not ours.is_divided
    assert ours.passes == theirs.passes
    assert [(it.start, it.end, set(it.ranks)) for it in ours.stages] == [
        (it.start, it.end, set(it.ranks)) for it in theirs.stages
    ]
    wanted = predict(theirs, profile, network, batch=batch)
    assert way.prediction is not None
    assert way.prediction.time_us == pytest.approx(wanted.time_us)
    assert way.prediction.memory == wanted.memory
    assert found.prediction.time_us <= wanted.time_us * (1 + 1e-9)


@given(models, st.sampled_from(["full:2", "full:4"]), st.integers(1, 3))
@settings(max_examples=6, deadline=None)
def test_a_divided_stage_is_priced_by_what_its_division_changes(
    graph: Graph, fabric: str, microbatches: int
) -> None:
    """Of a division by samples alone that is nothing: passes, updates and memory are those of replicas."""
    topology, profile = topologies.load(fabric), profile_of(graph)
    sliced, network = Sliced(graph, topology.ranks), LinkCosts(topology)
    prices = StagePrices(sliced, topology, UNIT, microbatches).restricted(LAYOUTS["data-parallel"], axes=1)
    joint: JointPlan = one_stage(prices, range(topology.ranks))
    assert divides_samples_alone(joint)
    plan = replace(replicas_of(joint, sliced, topology, ""), model="")
    both = (
        predict_divided(joint, sliced, profile, network),
        predict(plan, profile, network, batch=graph.samples * microbatches),
    )
    passes = [
        sorted(
            (it.kind, it.rank, it.microbatch or 0, it.end_us - it.start_us)
            for it in found.timeline.intervals
            if it.kind in ("forward", "backward")
        )
        for found in both
    ]
    for one, other in zip(*passes, strict=True):
        assert one == (*other[:3], pytest.approx(other[3]))
    (ours,), (theirs,) = (it.memory for it in both)
    if microbatches > 1:
        assert replace(ours, activations=0) == replace(theirs, activations=0)
        assert ours.activations == pytest.approx(theirs.activations, abs=8)
    else:  # replicas have all gradients from the start
        assert replace(ours, gradients=0, activations=0) == replace(theirs, gradients=0, activations=0)
        assert ours.total <= theirs.total + 8


def test_weights_in_parts_take_their_part_of_memory_and_of_the_update() -> None:
    """ZeRO-3 on two ranks: halves of all; 16 KB gathered twice and scattered once at 2 bytes a ns."""
    graph, topology = products(4, [64, 64]), topologies.load("full:2")
    profile, network, sliced = profile_of(graph), LinkCosts(topology), Sliced(graph, 2)
    prices = StagePrices(sliced, topology, UNIT).restricted(LAYOUTS["zero-3"])
    found = predict_divided(one_stage(prices, range(2)), sliced, profile, network)
    (need,), weights = found.memory, 4 * 64 * 64
    assert (need.parameters, need.gradients, need.optimizer) == (weights // 2, weights // 2, weights)
    assert found.time_us == pytest.approx(30 / 2 + 3 * weights / 2000 + 5 / 2, rel=1e-3)


def test_a_divided_plan_is_not_priced_as_replicas() -> None:
    graph, topology = products(4, [64, 64]), topologies.load("full:2")
    profile = profile_of(graph)
    found = choose_both(graph, topology, UNIT, profile)
    divided = found.plan_by("zero-3")
    assert divided.is_divided
    with pytest.raises(PlanError, match="plan: divides operators, of which a profile of layers"):
        simulate(divided, profile, LinkCosts(topology))
    again, before = given_choice(divided, graph, topology, UNIT, profile), found.ways["zero-3"].prediction
    assert before is not None
    assert again.prediction.time_us == pytest.approx(before.time_us)
    two = Profile(profile.model, 4, (*profile.layers, replace(profile.layers[0], name="more")))
    with pytest.raises(PlanError, match="must have 1 layers, got 2"):
        given_choice(divided, graph, topology, UNIT, two)


def test_a_limit_of_memory_holds_for_what_is_predicted() -> None:
    """Operators do not know of working memory; the search is told to leave room for it."""
    graph, topology = products(4, [64, 64, 64]), topologies.load("full:2")
    profile = profile_of(graph)
    profile = replace(profile, layers=tuple(replace(it, working_bytes=20_000) for it in profile.layers))
    free = choose_both(graph, topology, UNIT, profile)
    least = min(it.memory_bytes for it in free.ways.values() if it.prediction is not None)
    found = choose_both(graph, topology, UNIT, profile, memory_bytes=with_reserve(least + 100))
    assert found.ways[found.best].memory_bytes <= least + 100
    with pytest.raises(MemoryShortError, match=r"memory: .* must have at least"):
        choose_both(graph, topology, UNIT, profile, memory_bytes=30_000)


def test_software_of_collectives_counts_on_both_levels() -> None:
    graph, topology = products(8, [8, 8]), topologies.load("full:2")
    profile = profile_of(graph)
    for name in ("data-parallel", "zero-3"):
        ways = [
            choose_both(graph, topology, UNIT, profile, network=network).ways[name].prediction
            for network in (LinkCosts(topology), LinkCosts(topology, collective_us=7))
        ]
        plain, more = (it.time_us for it in ways if it is not None)
        assert more >= plain + 2 * 7


def test_what_ranks_add_counts_on_both_levels() -> None:
    """16 KB of gradients at 0.1 GB/s, not the links' rate: by an allreduce, or half of it scattered."""
    graph, topology = products(4, [64, 64]), topologies.load("full:2")
    profile, slow = profile_of(graph), LinkCosts(topology, sum_gbps=0.1)
    for name, added in (("data-parallel", 1.0), ("zero-3", 0.5)):
        ways = [
            choose_both(graph, topology, UNIT, profile, network=network).ways[name].prediction
            for network in (LinkCosts(topology), slow)
        ]
        plain, more = (it.time_us for it in ways if it is not None)
        alone = added * 4 * 64 * 64 / 100
        assert 0.7 * alone < more - plain < alone  # less what the links took

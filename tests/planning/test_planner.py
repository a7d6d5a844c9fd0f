"""Plans against brute force over the whole space, layouts that costs alone choose, and wrong input."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.pipeline import errors
from arborcast.pipeline.costs.devices import with_reserve
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.planning.estimate import estimates_us, step_costs
from arborcast.pipeline.planning.memory_need import check_memory
from arborcast.pipeline.planning.plan_prediction import predict
from arborcast.pipeline.planning.planner import plan
from arborcast.pipeline.planning.schedule_variants import derived
from arborcast.pipeline.planning.stage_dp import PartitionProblem, partitions
from arborcast.pipeline.planning.stage_search import device_orders
from arborcast.pipeline.planning.tables import DeviceTables, LayerTables
from arborcast.pipeline.profiles import Layer, Profile, Tie
from arborcast.pipeline.simulation.pass_simulator import simulate
from arborcast.pipeline.stages import Plan
from arborcast.synth.topology import Topology
from tests.support.planning_cases import MB, PLANNED, model, profiles, wired
from tests.support.refusals import refuses
from tests.support.strategies import topologies as drawn_topologies


def uniform(count: int, output_bytes: int, gradient_bytes: int, frozen_bytes: int = 0) -> Profile:
    return model(
        [400.0] * count, samples=16, output=output_bytes, weights=gradient_bytes, frozen=frozen_bytes
    )


def hosts(count: int, gpus: int, inside: int, outside: Fraction | int) -> Topology:
    """Hosts with a switch inside, and a NIC for each GPU to one fabric."""
    ranks = range(count * gpus)
    rates = {(rank, len(ranks) + rank // gpus): inside for rank in ranks}
    rates |= {(rank, len(ranks) + count): outside for rank in ranks}
    return wired(len(ranks), rates, switches=[*(f"host{i}" for i in range(count)), "fabric"])


def every_plan(profile, network, batch, counts, recompute, limits=None):
    """The space of the search, with nothing left out."""
    layers = LayerTables(profile)
    for order in device_orders(network):
        for microbatches, name, again in product(counts, PLANNED, recompute):
            question = PartitionProblem(batch, microbatches, name, again, None, limits)
            ranks = network.topology.ranks
            for it in partitions(layers, DeviceTables(network, order), question, ranks).values():
                yield Plan(it.stages, microbatches, name, again, None, network.topology)


@given(drawn_topologies(max_ranks=4, switches=1), profiles(max_layers=4), st.integers(1, 12))
@settings(max_examples=40)
def test_the_plan_is_the_fastest_of_the_space(topology, profile, batch):
    network = LinkCosts(topology)
    counts = [it for it in range(1, batch + 1) if batch % it == 0 or it in (2, 4, 8)]
    scheduled = LinkCosts(topology, by_schedule=True)
    times = [
        simulate(it, profile, scheduled, batch=batch).time_us
        for it in every_plan(profile, network, batch, counts, [False])
    ]
    made = plan(profile, topology, batch=batch, simulated=10**6)
    assert simulate(made, profile, scheduled, batch=batch).time_us <= min(times) * (1 + 1e-6)


def test_fewer_replicas_that_no_links_join_are_no_plan():
    """Of ranks 0, 3, 1 in a star about rank 1, the first two are apart."""
    layers = (
        Layer("first", 0, 1, 0, 0, 0, gradient_bytes=1),
        Layer("last", 0, 1, 0, 0, 0, 0, backward_fixed_us=0.5),
    )
    fabric = wired(4, {(0, 1): 1, (1, 2): 1, (1, 3): 1})
    assert plan(Profile("uneven", 8, layers), fabric, batch=3).stages


@given(
    drawn_topologies(max_ranks=3, switches=1),
    profiles(max_layers=6),
    st.integers(1, 6),
    st.sampled_from(sorted(ORDERS.keys() - set(PLANNED))),
)
@settings(max_examples=30)
def test_a_plan_in_an_order_made_from_1f1b_is_the_fastest_of_those(topology, profile, batch, order):
    """Every cut of the layers that a program could make more even is tried by hand."""
    network = LinkCosts(topology)
    scheduled = LinkCosts(topology, by_schedule=True)
    straight = [it for it in every_plan(profile, network, batch, [batch], [False]) if it.order == "1f1b"]
    layers = LayerTables(profile)
    made = [other for it in straight for other in derived(it, layers, [order], batch)]
    for it in made:
        groups = len(it.workers)
        assert it.order == order and it.microbatches == batch and it.depth == profile.depth
        assert groups > 1 and len(it.stages) // groups in ((1,) if order == "zb-h1" else (2, 3, 4))
    if not made:
        with pytest.raises(PlanError, match=f"order: {order} needs "):
            plan(profile, topology, batch=batch, microbatches=batch, order=order, simulated=10**6)
        return
    best = min(simulate(it, profile, scheduled, batch=batch).time_us for it in made)
    found = plan(profile, topology, batch=batch, microbatches=batch, order=order, simulated=10**6)
    assert found.order == order
    assert simulate(found, profile, scheduled, batch=batch).time_us <= best * (1 + 1e-6)


@given(
    st.lists(st.integers(1, 9), min_size=4, max_size=8),
    st.sampled_from(["zb-v", "interleaved"]),
    st.sampled_from([[1], [1, 2]]),
)
def test_several_stages_on_a_rank_are_cut_as_evenly_as_can_be(times, order, ranks):
    straight = Plan([(0, 1, [0]), (1, len(times), ranks)], 4)
    for it in derived(straight, LayerTables(model(times, samples=8)), [order], 8):
        replicas = [stage.replicas for stage in it.stages]

        def slowest(cuts, replicas=replicas):
            each = zip(pairwise(cuts), replicas, strict=True)
            return max(sum(times[a:b]) / count for (a, b), count in each)

        inner = combinations(range(1, len(times)), len(replicas) - 1)
        assert slowest((0, *it.cuts, len(times))) == min(slowest((0, *cuts, len(times))) for cuts in inner)


@given(
    drawn_topologies(max_ranks=3, switches=1),
    profiles(max_layers=4),
    st.integers(1, 8),
    st.integers(1, 6_000_000),
)
@pytest.mark.few(3)
@settings(max_examples=40)
def test_the_plan_is_the_fastest_that_fits(topology, profile, batch, limit):
    network = LinkCosts(topology)
    counts = [it for it in range(1, batch + 1) if batch % it == 0 or it in (2, 4, 8)]
    limits = (limit,) * topology.ranks
    scheduled = LinkCosts(topology, by_schedule=True)
    times = [
        simulate(it, profile, scheduled, batch=batch).time_us
        for it in every_plan(profile, network, batch, counts, [False, True], limits)
    ]
    if not times:
        with pytest.raises(PlanError, match=r"no plan fits into memory; the closest one .* must fit into"):
            plan(profile, topology, batch=batch, memory_bytes=limit, simulated=10**6)
        return
    made = plan(profile, topology, batch=batch, memory_bytes=limit, simulated=10**6)
    check_memory(made, profile, limit, batch=batch)
    assert simulate(made, profile, scheduled, batch=batch).time_us <= min(times) * (1 + 1e-6)


@given(
    drawn_topologies(max_ranks=4, switches=1),
    profiles(),
    st.sampled_from(PLANNED),
    st.integers(1, 8),
    st.sampled_from([1, 1000]),
    st.data(),
)
@settings(max_examples=60)
def test_estimates_are_near_what_is_simulated(topology, profile, order, microbatches, scale, data):
    """Also where gradients are of several buckets, which are summed beside passes."""
    fields = [
        "forward_us",
        "forward_fixed_us",
        "backward_us",
        "backward_fixed_us",
        "gradient_bytes",
        "parameter_bytes",
    ]
    layers = [replace(it, **{name: scale * getattr(it, name) for name in fields}) for it in profile.layers]
    profile = replace(profile, layers=tuple(layers), ties=profile.ties if scale == 1 else ())
    network = LinkCosts(topology)
    batch = 4 * microbatches
    layers, devices = LayerTables(profile), DeviceTables(network, tuple(range(topology.ranks)))
    found = partitions(layers, devices, PartitionProblem(batch, microbatches), topology.ranks)
    partition = data.draw(st.sampled_from(list(found.values())))
    costs = step_costs(layers, partition, batch=batch, recompute=False, counts=[microbatches])
    (estimate_us,) = estimates_us(costs, order)
    made = Plan(partition.stages, microbatches, order)
    time_us = simulate(made, profile, network, batch=batch).time_us
    assert time_us <= 3 * estimate_us + 1e-6
    assert time_us >= estimate_us * (1 - 1e-9)


@pytest.mark.parametrize(("forward", "gradient_bytes"), [(40.0, 1_000), (100.0, 10_000), (20.0, 100_000)])
def test_latency_of_allreduces_counts(forward, gradient_bytes):
    """By bytes alone eight ranks would be fastest; their schedule takes twice as many hops as that of six."""
    fabric = topologies.load("star:8,latency=50")
    profile = model([forward] * 4, samples=16, output=10_000, weights=gradient_bytes)
    replicas = [Plan([(0, 4, range(count))], 1, "1f1b", topology=fabric) for count in range(1, 9)]
    times = [predict(it, profile).time_us for it in replicas]
    assert predict(plan(profile, fabric), profile).time_us <= min(times) * (1 + 1e-9)
    assert times[7] > min(times)


def test_large_activations_and_few_parameters_make_pure_data_parallelism():
    # 40 MB of activations per boundary, 0.1 MB of gradients: data parallelism costs next to nothing.
    made = plan(uniform(8, 40_000_000, 100_000), hosts(2, 4, 100, 1))
    assert len(made.stages) == 1
    assert len(made.ranks) == 8


def test_many_parameters_and_small_activations_put_pipelines_across_hosts():
    # 40 MB of gradients in each layer, 10 KB of activations: only messages of activations leave a host.
    made = plan(uniform(8, 10_000, 40_000_000), hosts(2, 4, 100, 1))
    assert len(made.stages) > 1
    assert all(len({rank // 4 for rank in stage.ranks}) == 1 for stage in made.stages)


def test_memory_puts_pipelines_inside_hosts_and_replicas_across():
    # Weights of 3 MB a layer, all but 50 KB frozen, must be cut to fit; 16 MB of activations at 1 GB/s
    # between hosts would take longer than the layers, while gradients cross but once.
    profile = uniform(8, 16_000_000, 50_000, frozen_bytes=3_000_000)
    made = plan(profile, hosts(2, 4, 100, 1), memory_bytes=with_reserve(20_000_000))
    assert len(made.stages) > 1
    for stage in made.stages:
        assert {rank // 4 for rank in stage.ranks} == {0, 1}
    # The reverse: small activations, and gradients that must not leave a host.
    made = plan(uniform(8, 10_000, 3_000_000), hosts(2, 4, 100, 1), memory_bytes=with_reserve(30_000_000))
    assert len(made.stages) > 1
    assert all(len({rank // 4 for rank in stage.ranks}) == 1 for stage in made.stages)


def test_free_to_choose_the_microbatches_no_plan_is_slower_than_with_a_number():
    """Orders without bubbles are best in plans that are not the best in 1F1B: here that has one stage."""
    fixed = {"optimizer_bytes": 100 * MB, "forward_fixed_us": 400, "backward_fixed_us": 800}
    profile = model([40_000] * 24, samples=8, output=13 * MB, saved=1000 * MB, weights=50 * MB, **fixed)
    fabric = hosts(4, 2, 12, Fraction(25, 8))

    def time_us(**asked):
        return predict(plan(profile, fabric, batch=64, **asked), profile, batch=64).time_us

    free = time_us()
    assert all(free <= time_us(microbatches=count) for count in (8, 16, 32))


def test_of_equally_fast_plans_the_simplest_is_taken():
    made = plan(uniform(4, 10**9, 1000), topologies.load("ring:4"))
    assert (len(made.stages), made.microbatches, made.order) == (1, 1, "1f1b")


def test_what_was_asked_for_is_kept_to():
    profile, fabric = uniform(8, 1000, 1000), topologies.load("dgx1")
    made = plan(profile, fabric, microbatches=4, order="gpipe", stages=3, recompute=True, max_in_flight=2)
    assert (made.microbatches, made.order, len(made.stages)) == (4, "gpipe", 3)
    assert (made.recompute, made.max_in_flight) == (True, 2)
    assert (made.topology, made.model, made.method) == (fabric, "drawn", "spp")


def test_the_same_input_gives_the_same_plan():
    profile, fabric = uniform(10, 10**6, 10**7), topologies.load("dgx1")
    assert plan(profile, fabric) == plan(profile, fabric)


def test_ties_can_be_kept_in_one_stage():
    tied = Profile("tied", 16, uniform(8, 1000, 10**8).layers, (Tie("weight", 1000, (0, 5)),))
    made = plan(tied, topologies.load("dgx1"), keep_ties_together=True, stages=3)
    assert made.stages[0].end > 5
    with pytest.raises(
        PlanError, match="profile tied has 2 cut points that keep ties together, so at most 3 stages, got 4"
    ):
        plan(tied, topologies.load("dgx1"), keep_ties_together=True, stages=4)


def test_a_network_with_software_costs_is_used():
    # A message that costs a second is never worth it, nor is an allreduce.
    fabric = topologies.load("full:4")
    made = plan(uniform(8, 10, 10), fabric, network=LinkCosts(fabric, message_us=1e6, collective_us=1e6))
    assert len(made.ranks) == 1


@refuses("asked", "error", "message")
def test_wrong_input_is_refused(asked, error, message):
    if "network" in asked:
        asked = {"network": LinkCosts(topologies.load(asked["network"]))}
    with pytest.raises(getattr(errors, error), match=message):
        plan(uniform(8, 1000, 1000), topologies.load("full:4"), **asked)


def test_memory_that_cannot_fit_says_by_how_much_and_where():
    # A layer's weights and gradients take 2 MB; 8 layers on 4 ranks take 4 MB on some rank. Inside, 63
    # bytes (1000 / 16 samples) come and go on both sides: eight at once, half of them gradients that were
    # sent and are not waited for.
    with pytest.raises(
        PlanError,
        match=r"^no plan fits into memory; the closest one \(4 stages, 16 microbatches, order 1f1b\) does "
        r"not: plan: stage \d \(layers .*\) on rank \d must fit into 3.15 MiB with 10 % to spare, got "
        r"3.82 MiB, 977.05 KiB too many: "
        r"parameters 1.91 MiB, gradients 1.91 MiB, messages 504 B, \d of 16 microbatches in flight$",
    ):
        plan(uniform(8, 1000, 1_000_000), topologies.load("full:4"), memory_bytes=with_reserve(3_000_000))


def test_ranks_that_do_not_reach_each_other_are_refused():
    with pytest.raises(PlanError, match="no path leads from rank 0 to rank 1"):
        plan(uniform(2, 1, 1), Topology.build("apart", 2, []))

"""The dynamic program against brute force over all partitions, replica counts and places of an order."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.pipeline.costs.devices import usable
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.planning.activation_search import ActivationOptions
from arborcast.pipeline.planning.memory_need import fits, most_memory
from arborcast.pipeline.planning.stage_dp import PartitionProblem, closest_to_fitting, partitions
from arborcast.pipeline.planning.tables import DeviceTables, LayerTables
from arborcast.pipeline.profiles import Profile, Tie
from arborcast.pipeline.stages import Plan, Stage, boundary_messages
from arborcast.synth.topology import Topology
from tests.support.planning_cases import PLANNED, divisions, every_choice, model, profiles
from tests.support.strategies import topologies as drawn_topologies

STEADY = settings(max_examples=60)


def value_us(stages, profile, network, question) -> float:
    """The busiest stage or boundary, from the definitions."""
    count = question.microbatches
    worst = 0.0
    for stage in stages:
        if question.batch < count * stage.replicas:
            return inf
        share = question.batch / count / stage.replicas
        forward = profile.forward_us(stage.start, stage.end, share)
        backward = profile.backward_us(stage.start, stage.end, share)
        gradients = profile.gradient_bytes(stage.start, stage.end)
        passes = 2 if question.recompute else 1
        worst = max(
            worst, count * (passes * forward + backward) + network.allreduce_us(stage.ranks, gradients)
        )
    for ours, theirs in pairwise(stages):
        size = profile.output_bytes(theirs.start, question.batch / count)
        forth = boundary_messages(ours.ranks, theirs.ranks, size)
        back = {(dst, src): part for (src, dst), part in forth.items()}
        worst = max(worst, *(count * network.transfer_us(way) for way in (forth, back)))
    return worst


def check_least(found, values) -> None:
    """What was found for each number of stages is the least of these, where there is any."""
    best: dict[int, float] = {}
    for stages, value in values:
        best[len(stages)] = min(best.get(len(stages), inf), value)
    assert {count: it.value_us for count, it in found.items()} == pytest.approx(
        {count: value for count, value in best.items() if value < inf}
    )


def missing_bytes(stages, profile, question) -> int:
    plan = Plan(stages, question.microbatches, question.order, question.recompute, question.max_in_flight)
    return max(
        most_memory(plan, profile, batch=question.batch, stage=index).total
        - usable(min(question.limits[rank] for rank in stage.ranks))
        for index, stage in enumerate(stages)
    )


@given(
    drawn_topologies(max_ranks=4, switches=1, symmetric=False),
    profiles(),
    st.integers(1, 16),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.data(),
)
@STEADY
def test_values_are_those_of_brute_force(topology, profile, batch, microbatches, recompute, together, data):
    network = LinkCosts(topology, message_us=3.0, collective_us=2.0)
    order = tuple(data.draw(st.permutations(range(topology.ranks))))
    question = PartitionProblem(batch, microbatches, recompute=recompute)
    layers = LayerTables(profile, together)
    found = partitions(layers, DeviceTables(network, order), question, topology.ranks)
    check_least(
        found,
        (
            (stages, value_us(stages, profile, network, question))
            for stages in divisions(profile.depth, order, layers.cuts)
        ),
    )
    for partition in found.values():
        assert partition.exact
        assert value_us(partition.stages, profile, network, question) == pytest.approx(partition.value_us)


def published_us(stages, profile, network, question) -> float:
    """The same by the formulas of the source: both ways, over the slowest link times the fewer replicas."""
    compute = replace(profile, layers=tuple(replace(it, output_bytes=0) for it in profile.layers))
    worst = value_us(stages, compute, LinkCosts(network.topology), question)
    for ours, theirs in pairwise(stages):
        ends = [pair for a in ours.ranks for b in theirs.ranks for pair in ((a, b), (b, a))]
        slowest = min(network.topology.bandwidth[hop] for a, b in ends for hop in network.path(a, b))
        size = profile.output_bytes(theirs.start, question.batch / question.microbatches)
        rate = float(slowest) * 1000 * min(ours.replicas, theirs.replicas)
        worst = max(worst, question.microbatches * 2 * size / rate)
    return worst


@given(drawn_topologies(max_ranks=4, switches=1, symmetric=False), profiles(), st.integers(1, 4))
@STEADY
def test_published_values_are_those_of_brute_force(topology, profile, microbatches):
    """All ranks have work; latencies are not in the source."""
    links = [replace(it, latency_us=Fraction(0)) for it in topology.links]
    still = Topology.build("still", topology.ranks, links, [it.name for it in topology.switches])
    network, order = LinkCosts(still), tuple(range(topology.ranks))
    question = PartitionProblem(16, microbatches)
    found = partitions(
        LayerTables(profile), DeviceTables(network, order), question, topology.ranks, published=True
    )
    check_least(
        found,
        (
            (stages, published_us(stages, profile, network, question))
            for stages in divisions(profile.depth, order, LayerTables(profile).cuts)
            if sum(stage.replicas for stage in stages) == topology.ranks
        ),
    )


@given(
    drawn_topologies(max_ranks=3, switches=1),
    profiles(max_layers=4),
    st.sampled_from(PLANNED),
    st.integers(1, 4),
    st.sampled_from([ActivationOptions(True), ActivationOptions(False, 0.5), ActivationOptions(True, 2.0)]),
    st.data(),
)
@pytest.mark.few(1)
@settings(max_examples=15)
def test_values_with_choices_by_layer_are_those_of_brute_force(
    topology, profile, order, microbatches, menu, data
):
    """Each stage of each partition with every list of segments, by the formulas of `Plan` and its memory."""
    network = LinkCosts(topology, peer_bytes=data.draw(st.sampled_from([0, 50_000])))
    ranks = tuple(range(topology.ranks))
    limits = tuple(data.draw(st.integers(1, 4000)) * 1000 for _ in ranks)
    question = PartitionProblem(8, microbatches, order, limits=limits, menu=menu)
    values_of: list[tuple[tuple[Stage, ...], float]] = []
    for stages in divisions(profile.depth, ranks, tuple(range(1, profile.depth))):
        if microbatches * max(stage.replicas for stage in stages) > 8:
            continue
        values = [value_us(stages, profile, network, question)]
        for index, stage in enumerate(stages):
            ways = []
            for segments in every_choice(stage.start, stage.end, menu):
                own = (*stages[:index], replace(stage, segments=segments), *stages[index + 1 :])
                plan = Plan(own, microbatches, order, offload_gbps=menu.offload_gbps)
                memory = most_memory(plan, profile, batch=8, stage=index)
                total = memory.total + network.peer_bytes * (stage.replicas - 1)
                if total <= usable(min(limits[rank] for rank in stage.ranks)):
                    passes = plan.pass_us(profile, index, 8 / microbatches / stage.replicas)
                    gradients = profile.gradient_bytes(stage.start, stage.end)
                    exchange = network.allreduce_us(stage.ranks, gradients)
                    ways.append(microbatches * sum(passes) + exchange)
            values.append(min(ways, default=inf))
        values_of.append((stages, max(values)))
    found = partitions(LayerTables(profile), DeviceTables(network, ranks), question, topology.ranks)
    check_least(found, values_of)
    for it in found.values():
        made = Plan(it.stages, microbatches, order, offload_gbps=menu.offload_gbps)
        assert fits(made, profile, dict(enumerate(limits)), batch=8, peer_bytes=network.peer_bytes)


@given(
    drawn_topologies(max_ranks=3, switches=1),
    profiles(max_layers=3),
    st.sampled_from(PLANNED),
    st.integers(1, 4),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 3)),
    st.data(),
)
@STEADY
def test_memory_is_kept_to_and_never_more_than_needed(
    topology, profile, order, microbatches, recompute, most, data
):
    network = LinkCosts(topology)
    ranks = tuple(range(topology.ranks))
    limits = tuple(data.draw(st.integers(1, 4_000_000)) for _ in ranks)
    question = PartitionProblem(8, microbatches, order, recompute, most, limits)
    layers, devices = LayerTables(profile), DeviceTables(network, ranks)
    found = partitions(layers, devices, question, topology.ranks)
    values = [
        (stages, value, missing_bytes(stages, profile, question))
        for stages in divisions(profile.depth, ranks, layers.cuts)
        if (value := value_us(stages, profile, network, question)) < inf
    ]
    check_least(found, ((stages, value) for stages, value, missing in values if missing <= 0))
    least = min(missing for *_, missing in values)
    closest = closest_to_fitting(layers, devices, question, range(1, topology.ranks + 1))
    assert closest.value_us == least == missing_bytes(closest.stages, profile, question)


def test_a_drawn_partition():
    # One layer of 6 units of work before three of 1: two of the three ranks take the first one.
    profile = model([(600.0, 600.0), *[(100.0, 100.0)] * 3], samples=8)
    devices = DeviceTables(LinkCosts(topologies.load("full:3")), (2, 0, 1))
    found = partitions(LayerTables(profile), devices, PartitionProblem(8, 4), 3)
    # All 8 samples take 1200 us for the first layer, 600 us for the rest; 2 of a microbatch go to 2 replicas.
    assert found[2].stages == Plan([(0, 1, [2, 0]), (1, 4, [1])], 4).stages
    assert [found[it].value_us for it in (1, 2, 3)] == [1800.0 / 2, 600.0, 1200.0]


def test_layers_that_share_a_parameter_are_kept_together():
    profile = model([100.0] * 6, ties=[Tie("weight", 0, (1, 4))])
    assert LayerTables(profile).cuts == (1, 2, 3, 4, 5)
    assert LayerTables(profile, keep_ties_together=True).cuts == (1, 5)


@given(profiles(max_layers=5))
@STEADY
def test_sums_over_layers_are_those_of_the_profile(profile):
    tied = Profile("tied", 8, profile.layers, tuple(Tie("weight", 7, tie.layers) for tie in profile.ties))
    tables = LayerTables(tied)
    for start in range(profile.depth):
        for end in range(start + 1, profile.depth + 1):
            fixed, each = tables.forward
            assert fixed[start, end] + 3 * each[start, end] == pytest.approx(tied.forward_us(start, end, 3))
            assert tables.gradient_bytes[start, end] == tied.gradient_bytes(start, end)
            assert tables.fixed_bytes[start, end] == (
                tied.parameter_bytes(start, end)
                + tied.gradient_bytes(start, end)
                + tied.optimizer_bytes(start, end)
            )


@given(drawn_topologies(max_ranks=5, symmetric=False), st.data())
@settings(max_examples=40)
def test_rates_are_never_above_the_limit_they_begin_with(topology, data):
    network = LinkCosts(topology)
    devices = DeviceTables(network, data.draw(st.permutations(range(topology.ranks))))
    limits = devices.rate.copy()
    devices.find_rates(range(len(limits)))
    assert (devices.rate <= limits * (1 + 1e-12)).all()
    for place, rate in enumerate(devices.rate):
        if devices.replicas[place] > 1:
            assert rate == float(network.allreduce_rate(devices.ranks(place)))


@given(drawn_topologies(max_ranks=5, symmetric=False), st.floats(0, 1e6))
@settings(max_examples=40)
def test_boundaries_cost_what_the_network_says(topology, size):
    network = LinkCosts(topology, message_us=1.5)
    order = tuple(range(topology.ranks))
    devices = DeviceTables(network, order)
    for index, (one, other) in enumerate(zip(devices.sender, devices.receiver, strict=True)):
        assert devices.boundary(one, other) == index
        forth = boundary_messages(devices.ranks(one), devices.ranks(other), size)
        back = {(dst, src): part for (src, dst), part in forth.items()}
        for messages, way in ((forth, devices.forward), (back, devices.backward)):
            time_us = way.latency_us[index] + size * way.us_per_byte[index]
            assert time_us == pytest.approx(network.transfer_us(messages))
            # Of the receivers the fastest with its messages alone, of the pairs the slowest alone.
            alone = [
                [network.transfer_us({it: messages[it]}) for it in messages if it[1] == receiver]
                for receiver in {dst for _, dst in messages}
            ]
            first_us = way.first_latency_us[index] + size * way.first_us_per_byte[index]
            assert first_us >= min(map(min, alone)) * (1 - 1e-12)
            whole = [
                network.transfer_us({it: messages[it] for it in messages if it[1] == receiver})
                for receiver in {dst for _, dst in messages}
            ]
            assert first_us <= min(whole) * (1 + 1e-12)
            pair_us = network.message_us + size * way.pair_us_per_byte[index]
            assert pair_us <= max(map(max, alone)) * (1 + 1e-12)

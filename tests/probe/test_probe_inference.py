"""Fabrics that are known are recognised from noisy measurements; what is not explained is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast.backends.probe.comparison import compare
from arborcast.backends.probe.inference import EXPLAINED, Inference, infer
from arborcast.backends.probe.measurements import Flow, Load, Measurements, Spread
from arborcast.backends.probe.prediction import Predictor
from arborcast.backends.probe.report import describe, topology_file
from arborcast.synth.topology import Topology
from arborcast.topologies.machines.nvidia import DGX1_NVLINKS
from tests.support.simulated_fabrics import Fabric, Jammed, boxes, mesh, star

MORE = "more at once got less than one after the other"


def check_explained(found: Inference, measured: Measurements) -> None:
    """Every rate, alone and loaded, is as the topology predicts, within what `infer` allows."""
    predictor = Predictor(found.topology)
    for rates in measured.experiments:
        for flow, predicted in predictor.rates(rates).items():
            low, high = rates[flow].minimum, rates[flow].maximum
            assert low / (1 + EXPLAINED) <= predicted <= high * (1 + EXPLAINED), (flow, sorted(rates))
    assert found.misses == ()


def latency_us(topology: Topology, flow: Flow) -> float:
    return float(sum(topology.latency_us[hop] for hop in Predictor(topology).way(flow) or ()))


def bandwidths(found: Inference) -> dict[tuple[object, object], Fraction]:
    label = found.topology.label
    return {(label(link.src), label(link.dst)): link.bandwidth for link in found.topology.links}


def test_a_full_mesh_has_links_only() -> None:
    flows = list(permutations(range(4), 2))
    measured = mesh(dict.fromkeys(flows, 12), 4).measured(noise=0.05)
    found = infer(measured)
    check_explained(found, measured)
    assert bandwidths(found) == dict.fromkeys(flows, 12)
    assert not found.topology.switches


def test_shared_ports_make_a_star() -> None:
    found = infer(star([10, 10, 10, 20], [10, 10, 10, 20]).measured(noise=0.04))
    # 3 alone never gets more than the 10 of the others' ports, but sends to several at once with 20.
    assert bandwidths(found) == {
        (0, "fabric"): 10, (1, "fabric"): 10, (2, "fabric"): 10, (3, "fabric"): 20,
        ("fabric", 0): 10, ("fabric", 1): 10, ("fabric", 2): 10, ("fabric", 3): 20,
    }  # fmt: skip


def test_a_dgx1_has_fast_slow_and_slowest_pairs() -> None:
    # Pairs without an NVLink go over PCIe at 9.
    flows = list(permutations(range(8), 2))
    rates = {(a, b): 25 * DGX1_NVLINKS[a][b] or 9 for a, b in flows}
    measured = mesh(rates, 8).measured(noise=0.05)
    found = infer(measured)
    check_explained(found, measured)
    for flow, rate in bandwidths(found).items():
        assert abs(rate / rates[flow] - 1) < Fraction(6, 100)  # type: ignore[index]
    assert len(set(bandwidths(found).values())) == 3


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 2, 4], [1, 3, 5]]])
def test_two_boxes_behind_a_slow_uplink(groups: list[list[int]], named: bool) -> None:
    measured = boxes(groups, 25, 5, named=named).measured(noise=0.05)
    found = infer(measured)
    check_explained(found, measured)
    rates = bandwidths(found)
    assert found.shape.groups == tuple(map(tuple, groups))
    assert rates["box0.up", "box1.down"] == rates["box1.up", "box0.down"] == 5
    assert all(rates[a, b] == 25 for group in groups for a, b in permutations(group, 2))


def test_an_uplink_as_fast_as_a_pair_is_found_by_the_flows_that_share_it() -> None:
    # No rate of a pair alone tells the boxes apart, nor does a host's name; latencies are made alike too.
    fabric = boxes([[0, 1, 2], [3, 4, 5]], 25, 25)
    fabric.latency_us.clear()
    measured = fabric.measured(noise=0.05)
    found = infer(measured)
    check_explained(found, measured)
    assert found.shape.groups == ((0, 1, 2), (3, 4, 5))


def test_ports_inside_boxes_are_stars_with_an_uplink() -> None:
    measured = boxes([[0, 1, 2, 3], [4, 5, 6, 7]], 25, 10, ports=True).measured(noise=0.05)
    found = infer(measured)
    check_explained(found, measured)
    assert [switch.name for switch in found.topology.switches] == ["box0", "box1"]
    assert bandwidths(found)["box0", "box1"] == bandwidths(found)["box1", "box0"] == 10
    # Inside a box a message takes 10 us, between them 20 us more.
    assert latency_us(found.topology, (0, 1)) == pytest.approx(10, rel=0.06)
    assert latency_us(found.topology, (0, 4)) == pytest.approx(30, rel=0.06)


@pytest.mark.parametrize("well", [1, 2, 3, 4])
def test_more_flows_of_a_rank_than_go_well_at_once_are_streams(well: int) -> None:
    """With all 4 at once nothing is slow, and nothing is said; nor is it where nobody asks."""
    fabric = mesh(dict.fromkeys(permutations(range(5), 2), 12), 5)
    jammed = Jammed(5, fabric.capacity, fabric.passes)
    jammed.well = well
    measured = jammed.measured(noise=0.05, streams=True)
    found = infer(measured, streams=True)
    assert found.topology.streams == ((well,) * 5 if well < 4 else ())
    assert found.misses == ()
    assert set(bandwidths(found).values()) == {12}
    assert infer(measured).topology.streams == ()
    assert bool(infer(measured).misses) == (well < 4)
    said = [line for line in describe(found, measured) if line.startswith("streams")]
    assert said == ([f"streams    5 ranks have {well}: {MORE}"] if well < 4 else [])
    assert f"streams: {well}" in topology_file(found, measured) or well == 4
    told = compare(measured, found.topology, tolerance=0.25)
    assert told.contradictions == ()
    assert bool(compare(measured, replace(found.topology, streams=()), tolerance=0.25).contradictions) == (
        well < 4
    )


def test_what_flows_share_is_no_stream() -> None:
    """All at once get what one alone gets: ports, uplinks, one resource."""
    for fabric in (star([10] * 4, [10] * 4), boxes([[0, 1], [2, 3, 4]], 25, 5)):
        assert infer(fabric.measured(noise=0.05, streams=True), streams=True).topology.streams == ()


def test_three_boxes_have_an_uplink_each() -> None:
    measured = boxes([[0, 1], [2, 3], [4, 5]], 25, 5).measured(noise=0.05)
    found = infer(measured)
    check_explained(found, measured)
    rates = bandwidths(found)
    assert rates["box0.up", "box0.away"] == rates["box2.back", "box2.down"] == 5


def test_few_cores_are_one_resource_for_all_flows() -> None:
    flows = list(permutations(range(4), 2))
    fabric = star([4] * 4, [4] * 4).share("cores", 5, flows)
    measured = fabric.measured(noise=0.05)
    found = infer(measured)
    check_explained(found, measured)
    assert bandwidths(found)["shared.in", "shared.out"] == 5


def test_two_ranks_are_a_cable() -> None:
    found = infer(mesh({(0, 1): 3, (1, 0): 6}, 2).measured(noise=0.02))
    assert bandwidths(found) == {(0, 1): 3, (1, 0): 6}


def test_what_no_shape_explains_is_told_with_both_numbers() -> None:
    measured = mesh(dict.fromkeys(permutations(range(4), 2), 10), 4).measured(noise=0)
    # Two flows that share nothing by any shape tried here slow each other down.
    odd = Load({(0, 1): Spread(3, 3, 3, 3), (2, 3): Spread(10, 10, 10, 3)})
    found = infer(replace(measured, loads=(*measured.loads, odd)))
    assert [str(miss) for miss in found.misses] == [
        "0->1 beside 1 other: measured 3 GB/s (3 to 3), the topology says 10"
    ]


RATES = st.sampled_from([1, 3, 9, 27])


@st.composite
def fabrics(draw: Callable) -> Fabric:
    kind = draw(st.sampled_from(["mesh", "star", "boxes", "starry boxes"]))
    if kind == "mesh":
        ranks = draw(st.integers(2, 5))
        rates: dict[Flow, Fraction | int] = {f: draw(RATES) for f in permutations(range(ranks), 2)}
        return mesh(rates, ranks)
    if kind == "star":
        ranks = draw(st.integers(3, 6))
        ports = st.lists(RATES, min_size=ranks, max_size=ranks)
        return star(draw(ports), draw(ports))
    sizes = draw(st.lists(st.integers(2, 3), min_size=2, max_size=3))
    order = draw(st.permutations(range(sum(sizes))))
    groups = [sorted(order[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(len(sizes))]
    uplink = draw(RATES)
    return boxes(groups, 3 * uplink, uplink, ports=kind != "boxes", named=draw(st.booleans()))


@pytest.mark.few(6)
@settings(max_examples=40)
@given(fabrics(), st.sampled_from([0.0, 0.03, 0.06]), st.integers(0, 3))
def test_every_rate_alone_and_loaded_follows_from_the_topology(
    fabric: Fabric, noise: float, seed: int
) -> None:
    measured = fabric.measured(noise=noise, seed=seed)
    check_explained(infer(measured), measured)


@settings(max_examples=10)
@given(fabrics())
def test_the_topology_found_can_be_solved(fabric: Fabric) -> None:
    found = infer(fabric.measured(noise=0.05))
    schedule = synth.solve(found.topology, "broadcast")
    assert synth.verify(schedule).correct
    assert schedule.is_optimal


def test_the_same_measurements_give_the_same_topology() -> None:
    measured = boxes([[0, 1], [2, 3]], 25, 5).measured(noise=0.05)
    assert infer(measured) == infer(measured)


def test_an_uplink_that_flows_share_unfairly_keeps_its_capacity() -> None:
    measured = boxes([[0, 1], [2, 3]], 25, 5, named=True).measured(noise=0)

    def unfair(load: Load) -> Load:
        """The first of the flows between the boxes takes nine tenths of what they get."""
        crossing = [flow for flow in load.flows if flow[0] // 2 != flow[1] // 2 and flow[0] < flow[1]]
        total = sum(load.rates[flow].median for flow in crossing)
        shares = [0.9, *[0.1 / max(1, len(crossing) - 1)] * (len(crossing) - 1)]
        if len(crossing) < 2:
            return load
        taken = {flow: total * share for flow, share in zip(crossing, shares, strict=True)}
        return Load(load.rates | {flow: Spread(rate, rate, rate, 3) for flow, rate in taken.items()})

    found = infer(replace(measured, loads=tuple(map(unfair, measured.loads))))
    assert bandwidths(found)["box0.up", "box1.down"] == 5
    assert found.misses  # and it is told

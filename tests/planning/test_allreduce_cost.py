"""The allreduce of a prediction is the synthesized schedule's own, for exactly the ranks of a stage."""

from __future__ import annotations

from fractions import Fraction

import pytest

from arborcast import synth, topologies
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.planning.plan_prediction import predict
from arborcast.pipeline.stages import BUCKET_BYTES, Plan
from arborcast.synth import features
from arborcast.synth.errors import TopologyError
from arborcast.synth.topology import Link, Topology
from tests.support.planning_cases import model, wired

SIZES = (1 << 16, 1 << 20, 1 << 26, 1 << 30)


@pytest.mark.parametrize(("spec", "ranks"), [("dgx1", (0, 1, 2, 3)), ("ring:4", (0, 1, 2, 3))])
@pytest.mark.parametrize("size_bytes", SIZES)
def test_the_prediction_has_the_schedules_own_time(spec, ranks, size_bytes):
    fabric = topologies.load(spec)
    profile = model([1.0], samples=4, weights=size_bytes)
    made = Plan([(0, 1, ranks)], 1, topology=fabric)
    time_us = sum(
        it.end_us - it.start_us
        for it in predict(made, profile).timeline.intervals
        if it.kind == "allreduce" and it.rank == 0
    )
    schedule = synth.solve(fabric.subset(ranks), "allreduce")
    full, rest = divmod(size_bytes, BUCKET_BYTES)
    buckets = [BUCKET_BYTES] * full + [rest] * bool(rest)
    assert time_us == pytest.approx(sum(synth.simulate(schedule, it).time_us for it in buckets), rel=0.01)


def test_by_its_rate_alone_a_large_allreduce_costs_the_same_and_a_small_one_less():
    fabric = topologies.load("dgx1")
    rate, schedule = LinkCosts(fabric), LinkCosts(fabric, by_schedule=True)
    ranks = (0, 1, 2, 3)
    assert schedule.allreduce_us(ranks, 1 << 30) == pytest.approx(rate.allreduce_us(ranks, 1 << 30), rel=0.02)
    assert schedule.allreduce_us(ranks, 1 << 16) > 5 * rate.allreduce_us(ranks, 1 << 16)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_of_paths_of_equal_length_the_narrowest_link_decides(order):
    """By way of one rank 1 and 10 GB/s, by way of the other 5 and 5: the last link is not what counts."""
    narrow, even = order
    rates = {(0, narrow): 1, (narrow, 3): 10, (0, even): 5, (even, 3): 5}
    network = LinkCosts(wired(4, rates, both=False))
    assert network.path(0, 3) == ((0, even), (even, 3))
    assert network.transfer_us({(0, 3): 5000}) == pytest.approx(1)


def test_messages_that_start_together_by_hand():
    """Two share the first link: the fullest one counts, and the latencies of the longest way."""
    links = [Link(0, 1, Fraction(2), Fraction(3)), Link(1, 2, Fraction(1), Fraction(4))]
    network = LinkCosts(Topology.build("line", 3, links), message_us=5)
    assert network.transfer_us({(0, 1): 4000, (0, 2): 2000}) == 5 + 7 + 3
    assert network.transfer_us({(0, 1): 400, (0, 2): 2000}) == 5 + 7 + 2
    assert network.transfer_us({(0, 1): 4000}) == 5 + 3 + 2
    assert network.transfer_us({}) == 0


def test_of_equal_paths_the_one_by_the_first_vertex_is_taken():
    ways = dict.fromkeys([(0, 1), (0, 2), (1, 3), (2, 3)], 1)
    assert LinkCosts(wired(4, ways, both=False)).path(0, 3) == ((0, 1), (1, 3))


def test_a_direct_link_is_taken_however_wide_a_longer_way_is_and_no_way_is_refused():
    network = LinkCosts(wired(3, {(0, 1): 1, (0, 2): 5, (2, 1): 5}, both=False, name="one way"))
    assert network.path(0, 1) == ((0, 1),)
    with pytest.raises(PlanError, match="topology one way: no path leads from rank 1 to rank 0"):
        network.path(1, 0)


def test_costs_are_equal_whatever_was_asked_and_kept():
    asked, fresh = (LinkCosts(topologies.load("ring:4")) for _ in range(2))
    asked.allreduce_us((0, 1), 1 << 10)
    scheduled, other = (LinkCosts(topologies.load("ring:4"), by_schedule=True) for _ in range(2))
    scheduled.allreduce_us((0, 1), 1 << 10)
    assert (asked, scheduled) == (fresh, other)
    assert repr(scheduled) == repr(other)


def test_what_prices_overlook_is_refused(monkeypatch):
    monkeypatch.delitem(features.UNDERSTOOD, "link latency_us")
    with pytest.raises(TopologyError, match="latency_us"):
        LinkCosts(Topology.build("pair", 2, [Link(0, 1, Fraction(1), Fraction(1)), Link(1, 0, Fraction(1))]))


@pytest.mark.parametrize(("by_schedule", "bytes_us"), [(False, 4), (True, 4 + 4)])
def test_one_rank_and_no_bytes_cost_nothing_and_others_their_software_too(by_schedule, bytes_us):
    """Two ranks, 2 GB/s each way: both ways at once by the rate, one by one in a single piece."""
    network = LinkCosts(topologies.load("ring:4,bandwidth=2"), collective_us=3, by_schedule=by_schedule)
    assert network.allreduce_us((2,), 1000) == network.allreduce_us((0, 1), 0) == 0
    assert network.allreduce_us((0, 1), 8000) == pytest.approx(2 * 3 + bytes_us)
    assert network.allreduce_us((0, 2), 8000) == float("inf")


def test_ranks_that_add_slower_than_links_bring_limit_an_allreduce():
    """Two links of 10 GB/s and 4 GB/s of sums: 1000 bytes take 0.25 us, and 2 for each rank beside them."""
    fabric = wired(2, {(0, 1): 10})
    assert LinkCosts(fabric, collective_us=2, sum_gbps=4).allreduce_us((0, 1), 1000) == 4.25
    assert LinkCosts(fabric, collective_us=2, sum_gbps=40).allreduce_us((0, 1), 1000) == 4.1


def test_gloos_ring_goes_by_the_numbers_of_its_ranks_and_by_way_of_others():
    """Three of four on a line of 1 GB/s: each of 2 * 2 steps sends 1000 bytes, at most by 3 links of 2 us."""
    ends = [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]
    fabric = Topology.build("line", 4, [Link(*it, Fraction(1), Fraction(2)) for it in ends])
    network = LinkCosts(fabric, by_ring=True, by_schedule=True, message_us=100, collective_us=7)
    assert network.allreduce_us((3, 0, 1), 3000) == 3 * 7 + 4 * (1 + 6)
    assert LinkCosts(fabric).allreduce_us((3, 0, 1), 3000) == float("inf")  # schedules keep to their ranks


def test_ways_of_gloos_ring_that_share_a_link_share_its_rate():
    """0 -> 1 and 1 -> 2 both go by 3 -> 4: in each of 4 steps 2000 bytes at 1 GB/s."""
    ways = dict.fromkeys([(0, 3), (1, 3), (3, 4), (4, 1), (4, 2), (2, 0)], 1)
    for sum_gbps, time_us in ((None, 8), (1, 8), (Fraction(1, 4), 12)):
        network = LinkCosts(wired(5, ways, both=False), by_ring=True, sum_gbps=sum_gbps)
        assert network.allreduce_us((0, 1, 2), 3000) == time_us

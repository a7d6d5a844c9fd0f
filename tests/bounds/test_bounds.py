"""Bounds against brute force over all cuts, against literature values, and against their certificates."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth, topologies
from arborcast.synth.bounds import bound, certified_rate
from arborcast.synth.certificate import Dual, Partition, Scope
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.topology import Link, Topology
from tests.fuzzing.limits import least_cut
from tests.support.strategies import collectives
from tests.support.strategies import topologies as drawn_topologies

TREES = [Kind.BROADCAST, Kind.REDUCE, Kind.ALLGATHER, Kind.REDUCE_SCATTER]
FLOWS = [Kind.GATHER, Kind.SCATTER]
UNIT = 25  # GB/s of a DGX-1 NVLink by the data sheet


def partitions(ranks: list[int]):
    """All set partitions."""
    if not ranks:
        yield []
        return
    first, *rest = ranks
    for blocks in partitions(rest):
        yield [[first], *blocks]
        for i, block in enumerate(blocks):
            yield [*blocks[:i], [first, *block], *blocks[i + 1 :]]


def crossing(topology: Topology, blocks: list[list[int]]) -> Fraction:
    of = {rank: i for i, block in enumerate(blocks) for rank in block}
    return sum(link.bandwidth for link in topology.links if of[link.src] < of[link.dst])


@pytest.mark.parametrize(
    ("fabric", "relays"),
    [
        ({"switches": 3, "connected": True}, False),
        ({"switches": 3, "connected": False}, False),
        ({"switches": 2, "min_ranks": 3}, True),
        ({"switches": 0, "symmetric": False, "connected": False}, False),
    ],
)
@settings(max_examples=70)
@given(st.data())
def test_bound_is_the_least_cut(fabric, relays, data):
    """On links that are alike both ways, and without switches on any."""
    topology = data.draw(drawn_topologies(max_ranks=7, **fabric))
    collective = data.draw(collectives(topology, TREES + FLOWS, relays=relays))
    assert bound(topology, collective).rate == least_cut(topology, collective)


@settings(max_examples=100)
@given(drawn_topologies(max_ranks=6, switches=0, connected=False))
def test_allreduce_is_the_strength(topology):
    found = bound(topology, Collective.on(topology, "allreduce"))
    assert found.scope is Scope.EVERY_SCHEDULE
    assert found.rate == min(
        crossing(topology, blocks) / (len(blocks) - 1)
        for blocks in partitions(list(range(topology.ranks)))
        if len(blocks) > 1
    )


@settings(max_examples=150)
@given(st.data())
def test_every_bound_is_below_every_cut_and_proved_by_its_certificate(data):
    topology = data.draw(
        drawn_topologies(
            max_ranks=6, switches=2, symmetric=data.draw(st.booleans()), connected=data.draw(st.booleans())
        )
    )
    collective = data.draw(collectives(topology, relays=data.draw(st.booleans())))
    found = bound(topology, collective)
    assert found.rate == certified_rate(topology, collective, found.certificate)
    assert found.rate <= least_cut(topology, collective)
    assert (found.rate == 0) == (least_cut(topology, collective) == 0)


def test_unbalanced_switch_is_slower_than_its_cuts():
    #  0 --1--> hub --1--> 1      one unit into the switch leaves it once, and two ranks want it
    #            └---1--> 2
    topology = Topology.build(
        "fork", 3, [Link(u, v, Fraction(1)) for u, v in [(0, 3), (3, 1), (3, 2)]], ["hub"]
    )
    collective = Collective.on(topology, "broadcast")
    assert least_cut(topology, collective) == 1
    found = bound(topology, collective)
    assert found.rate == Fraction(1, 2)
    assert found.certificate == Dual((Fraction(1), Fraction(0), Fraction(0)), Fraction(1), Fraction(2))
    mirrored = bound(topology.reversed(), Collective.on(topology, "reduce"))
    assert mirrored.rate == Fraction(1, 2)


def test_alltoall_on_a_ring_is_limited_by_lengths():
    # 4 ranks in a ring, 1 GB/s each way: 8 links, distances 1 + 1 + 2 per rank, a quarter buffer each.
    topology = topologies.load("ring:4")
    found = bound(topology, Collective.on(topology, "alltoall"))
    assert found.rate == Fraction(8) / (Fraction(4 * 4) / 4)


def test_relay_that_reduces_beats_a_switch():
    """A hub that copies and reduces lets four ranks allreduce at link rate, a switch only at 2/3 of it."""
    links = [link for rank in range(4) for link in (Link(rank, 4, Fraction(1)), Link(4, rank, Fraction(1)))]
    topology = Topology.build("hub", 5, links)
    found = bound(topology, Collective.on(topology, "allreduce", ranks=[0, 1, 2, 3]))
    assert found.rate == 1


@settings(max_examples=60)
@given(st.data())
def test_relays_do_not_lower_the_bound(data):
    topology = data.draw(drawn_topologies(max_ranks=6, switches=1, min_ranks=3))
    whole = data.draw(collectives(topology, [Kind.ALLREDUCE, Kind.BROADCAST], relays=True))
    alone = topology.subset(whole.ranks)
    among = Collective.on(alone, whole.kind, root=whole.root or 0)
    assert bound(topology, whole).rate >= bound(alone, among).rate


def test_bound_of_many_ranks_holds():
    """A thousand ranks: 128 boxes of 8, each rank 25 GB/s to the fabric, as 200 GB/s out of a box say."""
    topology = topologies.load("dgx-a100:boxes=128")
    rates = {
        kind: bound(topology, Collective.on(topology, kind)).rate
        for kind in (Kind.BROADCAST, Kind.ALLGATHER, Kind.ALLREDUCE)
    }
    # 1016 ranks' blocks enter each box through 8 x 25 GB/s; an allreduce sends them in and out.
    assert rates == {
        Kind.BROADCAST: 200,
        Kind.ALLGATHER: Fraction(200 * 1024, 1016),
        Kind.ALLREDUCE: Fraction(200 * 1024, 1016) / 2,
    }


@given(drawn_topologies(max_ranks=5, switches=1))
@settings(max_examples=30)
def test_bounds_scale_with_bandwidth(topology):
    faster = replace(
        topology, links=tuple(replace(link, bandwidth=link.bandwidth * 7 / 3) for link in topology.links)
    )
    for kind in (Kind.ALLGATHER, Kind.ALLREDUCE, Kind.ALLTOALL):
        collective = Collective.on(topology, kind)
        assert bound(faster, collective).rate == bound(topology, collective).rate * Fraction(7, 3)


def test_partition_of_a_fragment():
    topology = topologies.load("dgx1").subset((0, 2, 3))
    found = bound(topology, Collective.on(topology, "allreduce"))
    # Three ranks, 1 + 2 + 2 NVLinks: five links, two needed per tree.
    assert found.certificate == Partition(
        (frozenset({0}), frozenset({1}), frozenset({2})), Fraction(5 * UNIT)
    )


def test_alltoall_of_nine_decimals():
    """Sums of link rates of 10 digits are the costs of its linear program, which made HiGHS fail."""
    drawn = random.Random(10)
    links = [
        Link(u, v, Fraction(drawn.randint(10**8, 10**9), 10**9)) for u in range(6) for v in range(6) if u != v
    ]
    topology = Topology.build("fine", 5, links, ["s"])
    collective = Collective.on(topology, "alltoall")
    assert synth.solve(topology, "alltoall").rate == bound(topology, collective).rate

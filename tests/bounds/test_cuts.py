"""Tightest cuts against all sets of vertices: for all kinds of supplies, of orbits, of custom collectives."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth, topologies
from arborcast.synth.bounds import bound, certified_rate
from arborcast.synth.bounds.cuts import cut_out_of, orbit_lengths, tightest_cut
from arborcast.synth.bounds.demand_cuts import demand_cuts
from arborcast.synth.certificate import Cut, Dual
from arborcast.synth.collective import Collective, Demand
from arborcast.synth.errors import InfeasibleError, InputError, TopologyError
from arborcast.synth.topology import Link, Topology
from tests.fuzzing.chunk_search import best_rate
from tests.fuzzing.limits import least_cut, leaving, parts
from tests.fuzzing.tally import ROUNDED
from tests.support.strategies import custom_collectives
from tests.support.strategies import topologies as drawn_topologies


@settings(max_examples=150)
@given(st.data())
def test_tightest_cut_by_brute_force(data):
    topology = data.draw(drawn_topologies(max_ranks=5, switches=2, symmetric=False, connected=False))
    ranks = st.integers(0, topology.ranks - 1)
    supply = data.draw(st.dictionaries(ranks, st.integers(1, 9), min_size=1))
    sinks = data.draw(
        st.lists(ranks, min_size=1, unique=True).filter(lambda some: {*some} != {*supply} or len(some) > 1)
    )
    found = tightest_cut(topology, supply, sinks)
    supplied = {
        side: sum(supply.get(vertex, 0) for vertex in side)
        for size in range(1, topology.size)
        for side in map(frozenset, combinations(range(topology.size), size))
        if not side.issuperset(sinks)
    }
    rates = {side: cut_out_of(topology, side).capacity / units for side, units in supplied.items() if units}
    assert found.rate == min(rates.values()) == rates[found.cut.side]
    assert found.cut == cut_out_of(topology, found.cut.side)


def test_bandwidths_too_fine_for_int64_are_refused():
    links = [Link(0, 1, Fraction(1)), Link(1, 0, Fraction(1, 2**62))]
    with pytest.raises(TopologyError, match=r"sum in whole units must be at most 2\*\*62"):
        tightest_cut(Topology.build("fine", 2, links), {0: 1, 1: 1}, [0, 1])


def test_orbit_of_one_box_is_all_boxes():
    topology = topologies.load("dgx-a100:boxes=3")
    box = {*range(8), 24}
    lengths = dict(zip(topology.bandwidth, orbit_lengths(topology, box), strict=True))
    # Only links between a rank and a fabric switch (after the three boxes' own) leave or enter a box.
    assert lengths == {(u, v): int(max(u, v) > 26) for u, v in topology.bandwidth}


RING = topologies.load("ring:4")


def demand(sources: set[int], targets: set[int]) -> Demand:
    return Demand(frozenset(sources), frozenset(targets))


@given(st.data())
@settings(max_examples=120)
def test_cuts_by_brute_force(data: st.DataObject) -> None:
    """Valid against every cut; for what one rank gets, or gives alone, none is tighter."""
    topology = data.draw(drawn_topologies(max_ranks=5, switches=1, symmetric=False, connected=False))
    collective = data.draw(custom_collectives(topology))
    demands, least = collective.demands, least_cut(topology, collective)
    found = min(certified_rate(topology, collective, cut) for cut in demand_cuts(topology, collective))
    assert found >= least
    assert (found == 0) == (least == 0)
    for rank in collective.ranks:
        for side in parts(range(topology.size)):
            into = [d for d in demands if rank in d.targets and d.sources <= side and rank not in side]
            out = [d for d in demands if d.sources == {rank} and rank in side and not d.targets & side]
            for some in (into, out):
                assert not some or found <= leaving(topology, side) * len(demands) / len(some)
    assert bound(topology, collective).rate <= found


@given(st.data())
@settings(max_examples=60)
def test_the_limit_of_single_targets_is_what_flows_along_paths_reach(data: st.DataObject) -> None:
    topology = data.draw(drawn_topologies(max_ranks=4, switches=1, symmetric=False))
    demands = [
        demand(set(order[1 : 1 + data.draw(st.integers(1, len(order) - 1))]), {order[0]})
        for order in data.draw(st.lists(st.permutations(range(topology.ranks)), min_size=1, max_size=4))
    ]
    collective = Collective.custom(topology, demands)
    found = bound(topology, collective)
    best = best_rate(topology, collective)
    assert best <= found.rate <= best * ROUNDED
    assert certified_rate(topology, collective, found.certificate) == found.rate


@given(st.data())
@settings(max_examples=60)
def test_named_collectives_written_out_have_the_same_limit(data: st.DataObject) -> None:
    topology = data.draw(drawn_topologies(max_ranks=5, switches=0, symmetric=False))
    ranks, everyone = range(topology.ranks), set(range(topology.ranks))
    count = topology.ranks
    root = data.draw(st.sampled_from(ranks))
    others = sorted(everyone - {root})
    # The buffer of a gather, scatter or alltoall counts blocks that stay where they are as well.
    written_out = {
        "broadcast": ([demand({root}, everyone - {root})], Fraction(1)),
        "allgather": ([demand({rank}, everyone - {rank}) for rank in ranks], Fraction(1)),
        "gather": ([demand({rank}, {root}) for rank in others], Fraction(count - 1, count)),
        "scatter": ([demand({root}, {rank}) for rank in others], Fraction(count - 1, count)),
        "alltoall": ([demand({a}, {b}) for a, b in permutations(ranks, 2)], Fraction(count - 1)),
    }
    for kind, (demands, factor) in written_out.items():
        named = bound(topology, Collective.on(topology, kind, root=root))
        custom = bound(topology, Collective.custom(topology, demands))
        assert custom.rate == named.rate * factor, kind


def test_beside_a_slow_link_that_nobody_needs() -> None:
    """As the longest length is 1, those of links 1e9 times as fast are rounded to 0, and prove nothing."""
    slow = Topology.build("slow", 2, [Link(0, 1, Fraction(10)), Link(1, 0, Fraction(1, 10**8))])
    found = bound(slow, Collective.custom(slow, [demand({0}, {1})]))
    assert found.rate == 10


def test_lengths_prove_more_than_cuts_where_ways_are_long() -> None:
    """Ring of 5, a block from each i to i + 2.

    An arc has 2 GB/s out of it and at most 2 blocks to send: 5 GB/s for 5 blocks. But of each block the part
    a that goes forward passes 2 links and the rest b passes 3: 2 a <= 1 and 3 b <= 1 leave a + b = 5/6.
    """
    ring = topologies.load("ring:5")
    collective = Collective.custom(ring, [demand({i}, {(i + 2) % 5}) for i in range(5)])
    assert least_cut(ring, collective) == 5
    found = bound(ring, collective)
    assert isinstance(found.certificate, Dual) and found.rate == Fraction(25, 6)


def test_who_is_cut_off() -> None:
    one_way = Topology.build("one-way", 3, [Link(0, 1, Fraction(1)), Link(1, 2, Fraction(1))])
    collective = Collective.custom(one_way, [demand({0}, {1}), demand({1, 2}, {0})])
    found = bound(one_way, collective)
    assert found.rate == 0
    assert isinstance(found.certificate, Cut) and found.certificate.side == {1, 2}
    assert certified_rate(one_way, collective, found.certificate) == 0
    line = "custom: rank 0 cut off: nothing leads there from ranks 1, 2, where block 1 is"
    with pytest.raises(InfeasibleError, match=line):
        synth.solve(one_way, collective)


def test_a_cut_that_keeps_a_copy_outside_proves_nothing() -> None:
    collective = Collective.custom(RING, [demand({0, 2}, {1, 3})])
    with pytest.raises(InputError, match="proves nothing, no data of the custom must leave it"):
        certified_rate(RING, collective, Cut(frozenset({0}), Fraction(2)))

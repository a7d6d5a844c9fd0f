"""Tightest cuts against all sets of vertices, with all kinds of supplies; orbits of cuts."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.synth.bounds.cuts import cut_out_of, orbit_lengths, tightest_cut
from arborcast.synth.errors import TopologyError
from arborcast.synth.topology import Link, Topology
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

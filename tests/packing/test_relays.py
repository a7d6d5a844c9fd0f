"""Relays seen as switches: the same links, and for balanced relays the same bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.synth.bounds import bound
from arborcast.synth.collective import Collective
from arborcast.synth.errors import CollectiveError
from arborcast.synth.packing.relays import relays_as_switches
from tests.support.strategies import topologies as drawn_topologies


@settings(max_examples=60)
@given(st.data())
def test_nothing_is_lost_for_out_trees_on_balanced_relays(data):
    topology = data.draw(drawn_topologies(max_ranks=7, switches=2, min_ranks=3))
    ranks = range(data.draw(st.integers(2, topology.ranks)))
    for kind in ("broadcast", "allgather", "reduce-scatter"):
        collective = Collective.on(topology, kind, ranks=ranks)
        flat, there = relays_as_switches(topology, collective)
        assert flat.links == topology.links
        assert (flat.ranks, flat.size) == (len(ranks), topology.size)
        assert bound(flat, there).rate == bound(topology, collective).rate


@settings(max_examples=40)
@given(st.data())
def test_an_allreduce_through_switches_is_no_faster_than_through_relays(data):
    topology = data.draw(
        drawn_topologies(max_ranks=6, switches=1, min_ranks=3, symmetric=data.draw(st.booleans()))
    )
    collective = Collective.on(topology, "allreduce", ranks=range(data.draw(st.integers(2, topology.ranks))))
    assert bound(*relays_as_switches(topology, collective)).rate <= bound(topology, collective).rate


def test_names_and_symmetries_of_relays():
    ring, mirror = topologies.load("ring:4"), (1, 0, 3, 2)
    topology = replace(ring, symmetries=(*ring.symmetries, mirror))
    assert len(topology.symmetries) > 1
    flat, _ = relays_as_switches(topology, Collective.on(topology, "broadcast", ranks=[0, 1]))
    assert [switch.name for switch in flat.switches] == ["relay 2", "relay 3"]
    assert flat.symmetries == (mirror,)


def test_ranks_must_come_first():
    topology = topologies.load("ring:4")
    with pytest.raises(CollectiveError, match=r"numbered 0\.\.1 before their relays, got \[0, 2\]"):
        relays_as_switches(topology, Collective.on(topology, "broadcast", ranks=[0, 2]))

"""Splits of bandwidth: feasible by networkx and Fractions, and as good as the bound says is possible."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.synth.bounds import bound
from arborcast.synth.bounds.capacity_lp import (
    SplitCapacities,
    most_central,
    split_bandwidth,
    two_way,
    two_way_symmetric,
)
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import CollectiveError, InfeasibleError
from arborcast.synth.topology import Link, Topology
from tests.support.strategies import topologies as drawn_topologies


def assert_supports(topology: Topology, roots: dict[int, Fraction]) -> None:
    """Out-trees of these weights exist: switches balanced, every rank reached by all weight at once."""
    assert not topology.unbalanced(range(topology.ranks, topology.size))
    graph = nx.DiGraph()
    graph.add_nodes_from(range(topology.size))
    # Integers: networkx compares capacities with its own infinity, which fractions may not like.
    scale = math.lcm(
        *(link.bandwidth.denominator for link in topology.links), *(w.denominator for w in roots.values())
    )
    for link in topology.links:
        graph.add_edge(link.src, link.dst, capacity=int(link.bandwidth * scale))
    for root, weight in roots.items():
        graph.add_edge("all roots", root, capacity=int(weight * scale))
    for rank in range(topology.ranks):
        assert nx.maximum_flow_value(graph, "all roots", rank) == sum(roots.values()) * scale


def assert_right(topology: Topology, split: SplitCapacities, *, shared: bool) -> None:
    into = (split.into or split.out.reversed()).bandwidth if shared else {}
    for pair in {*split.out.bandwidth, *into}:
        used = split.out.bandwidth.get(pair, Fraction(0)) + into.get(pair, Fraction(0))
        assert used <= topology.bandwidth[pair]
    assert_supports(split.out, dict(split.roots))
    if split.into:
        assert_supports(split.into.reversed(), dict(split.roots))


@settings(max_examples=120)
@given(st.data())
def test_split_reaches_the_bound(data):
    """A feasible split of the rate of a proven limit: both are the optimum."""
    topology = data.draw(
        drawn_topologies(
            max_ranks=6,
            switches=3,
            symmetric=data.draw(st.booleans()),
            max_bandwidth=data.draw(st.sampled_from([4, 10**7])),  # the latter strains the LP's tolerances
        )
    )
    kind = data.draw(st.sampled_from([Kind.BROADCAST, Kind.ALLGATHER, Kind.ALLREDUCE]))
    collective = Collective.on(topology, kind)
    split = split_bandwidth(topology, collective)
    assert_right(topology, split, shared=kind is Kind.ALLREDUCE)
    assert split.rate == bound(topology, collective).rate
    assert split.rate == sum(split.roots.values())


@settings(max_examples=40)
@given(drawn_topologies(max_ranks=6, switches=2))
def test_one_root_is_as_good_as_any_mixture_on_symmetric_links(topology):
    collective = Collective.on(topology, "allreduce")
    one, any_mixture = two_way_symmetric(topology, collective), two_way(topology, collective)
    assert one.solve().rate == any_mixture.solve().rate


@settings(max_examples=60)
@given(drawn_topologies(max_ranks=8, switches=0, max_bandwidth=5))
def test_without_switches_the_split_is_as_coarse_as_the_rate(topology):
    """Frank's orientation theorem: in units in which the rate is whole, all bandwidths are."""
    split = split_bandwidth(topology, Collective.on(topology, "allreduce"))
    unit = topology.bandwidth_unit / (split.rate / topology.bandwidth_unit).denominator
    assert all((link.bandwidth / unit).denominator == 1 for link in split.out.links)
    assert list(split.roots) == [most_central(topology, range(topology.ranks))]


@pytest.mark.parametrize(
    ("spec", "rate", "common"),
    [
        ("dgx1", Fraction(600, 7), 7),
        ("dgx-a100:boxes=2", Fraction(520, 3), 3),
        ("mi250:boxes=2", Fraction(2656, 15), 15),
        ("torus:4x4", Fraction(32, 15), 15),
    ],
)
def test_known_allreduce_splits_have_small_denominators(spec, rate, common):
    topology = topologies.load(spec)
    split = split_bandwidth(topology, Collective.on(topology, "allreduce"))
    assert split.rate == rate
    assert len(split.roots) == 1
    assert math.lcm(*(link.bandwidth.denominator for link in split.out.links)) == common
    assert_right(topology, split, shared=True)


def test_asymmetric_allreduce_uses_the_links_both_ways():
    #  0 ==2==> 1 --1--> 2 --1--> 0     in: 0 -> 1 -> 2, out: 2 -> 0 -> 1
    links = [Link(0, 1, Fraction(2)), Link(1, 2, Fraction(1)), Link(2, 0, Fraction(1))]
    topology = Topology.build("loop", 3, links)
    split = split_bandwidth(topology, Collective.on(topology, "allreduce"))
    assert (split.rate, split.roots) == (1, {2: 1})
    assert split.out.bandwidth == {(0, 1): 1, (2, 0): 1}
    assert split.into is not None
    assert split.into.bandwidth == {(0, 1): 1, (1, 2): 1}


def test_unbalanced_switch_is_trimmed():
    #  0 --3--> hub --1--> 1,  hub --1--> 2: one of three units in cannot leave.
    links = [Link(0, 3, Fraction(3)), Link(3, 1, Fraction(1)), Link(3, 2, Fraction(1))]
    topology = Topology.build("fork", 3, links, ["hub"])
    split = split_bandwidth(topology, Collective.on(topology, "broadcast"))
    assert split.rate == 1
    assert split.out.bandwidth == {(0, 3): 2, (3, 1): 1, (3, 2): 1}


def test_disconnected_ranks_are_refused():
    topology = Topology.build("apart", 2, [Link(0, 1, Fraction(1))])
    with pytest.raises(InfeasibleError, match="allreduce: some rank cannot be reached"):
        split_bandwidth(topology, Collective.on(topology, "allreduce"))
    with pytest.raises(InfeasibleError, match="allgather: some rank cannot be reached"):
        split_bandwidth(topology, Collective.on(topology, "allgather"))


def test_other_kinds_and_relays_are_refused():
    topology = topologies.load("ring:4")
    with pytest.raises(CollectiveError, match=r"reduce-scatter: .* reverse the topology"):
        split_bandwidth(topology, Collective.on(topology, "reduce-scatter"))
    with pytest.raises(CollectiveError, match="broadcast: bandwidth is split among ranks and switches"):
        split_bandwidth(topology, Collective.on(topology, "broadcast", ranks=[0, 1]))


def test_a_value_below_zero_is_not_feasible() -> None:
    """As a basis of HiGHS can have where rates differ by more than it can tell, such as 1e-9 and 1e8 GB/s."""
    ring = topologies.load("ring:4")
    solution = two_way(ring, Collective.on(ring, "allreduce")).solve()
    assert solution.is_feasible()
    values = (*solution.vertex.values[:-1], Fraction(-1))
    assert not replace(solution, vertex=replace(solution.vertex, values=values)).is_feasible()


@settings(max_examples=20)
@given(drawn_topologies(max_ranks=6, switches=2, symmetric=False))
def test_the_same_split_every_time(topology):
    collective = Collective.on(topology, "allreduce")
    assert split_bandwidth(topology, collective) == split_bandwidth(topology, collective)

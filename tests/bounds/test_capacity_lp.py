"""Splits of bandwidth: feasible by networkx and Fractions, and as good as the bound says is possible.

How large fabrics and unbalanced switches come to theirs without a linear program is tried on small ones.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth, topologies
from arborcast.synth.bounds import bound, dispatch
from arborcast.synth.bounds.capacity_lp import (
    SplitCapacities,
    most_central,
    program_of,
    split_bandwidth,
    two_way,
    two_way_symmetric,
)
from arborcast.synth.bounds.cuts import tightest_cut
from arborcast.synth.bounds.switch_balance import balanced_part, sufficient_part
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import CollectiveError, InfeasibleError
from arborcast.synth.faults.faulty import without
from arborcast.synth.packing import packer, splits
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


@given(drawn_topologies(max_ranks=5, switches=3, symmetric=False))
@settings(max_examples=80)
def test_switches_send_what_they_receive_and_no_link_carries_more(topology):
    part = balanced_part(topology)
    assert not part.unbalanced(range(part.ranks, part.size))
    for link in part.links:
        assert link.bandwidth <= topology.bandwidth[link.src, link.dst]
    for link in topology.links:
        if link.src < topology.ranks and link.dst < topology.ranks:
            assert part.bandwidth[link.src, link.dst] == link.bandwidth


@given(drawn_topologies(max_ranks=5, switches=2, symmetric=False))
@settings(max_examples=60)
def test_where_a_part_is_enough_the_linear_program_agrees(topology):
    allgather = Collective.on(topology, "allgather")
    everyone = dict.fromkeys(range(topology.ranks), 1)
    part = sufficient_part(topology, everyone, allgather.ranks)
    optimum = program_of(topology, allgather).solve().rate * topology.ranks
    assert split_bandwidth(topology, allgather).rate == optimum
    if part is not None:
        assert tightest_cut(topology, everyone, allgather.ranks).rate * topology.ranks == optimum


def test_a_balanced_topology_keeps_what_its_ranks_can_use():
    fabric = topologies.load("dgx-a100:boxes=2")
    part = balanced_part(fabric)
    assert {(link.src, link.dst): link.bandwidth for link in part.links} == fabric.bandwidth


def test_what_one_direction_lost_the_other_gives_up_first():
    # Rank 0's link from the switch has lost half; the switch receives 3 GB/s and sends 5/2.
    links = [Link(rank, 3, Fraction(1)) for rank in range(3)] + [
        Link(3, rank, Fraction(1)) for rank in (1, 2)
    ]
    star = Topology.build("star", 3, [*links, Link(3, 0, Fraction(1, 2))], ["switch"])
    part = balanced_part(star)
    assert part.bandwidth[0, 3] == Fraction(1, 2)
    assert sum(link.bandwidth for link in part.links if link.dst == 3) == Fraction(5, 2)


@pytest.mark.parametrize(
    "kind",
    [
        "allgather",
        "reduce",
        *(pytest.param(it, marks=pytest.mark.long) for it in ("reduce-scatter", "broadcast")),
    ],
)
def test_a_link_that_is_slower_one_way_costs_what_its_cut_says(kind):
    fabric = topologies.load("dgx-a100:boxes=2")
    slow = without(
        fabric, slower={(19, 9): Fraction(1)} if (19, 9) in fabric.bandwidth else {(18, 9): Fraction(1)}
    ).topology
    assert slow.unbalanced(range(slow.ranks, slow.size))
    schedule = synth.solve(slow, kind)
    assert schedule.is_optimal
    assert synth.verify(schedule).errors == ()


@given(drawn_topologies(max_ranks=6, switches=3))
@settings(max_examples=50)
def test_symmetric_fabrics_lose_nothing(topology: Topology) -> None:
    optimum = split_bandwidth(topology, Collective.on(topology, "allreduce")).rate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splits, "_FREE_ROOTS_UP_TO", 0)
        patch.setattr(packer, "SMALL", 0)
        found = synth.solve(topology, "allreduce")
    assert synth.verify(found).errors == ()
    assert found.rate == found.bound.rate == optimum


@given(drawn_topologies(max_ranks=5, switches=2, symmetric=False))
@settings(max_examples=40)
def test_unequal_directions_beyond_the_program_stay_between_its_limits(topology: Topology) -> None:
    optimum = split_bandwidth(topology, Collective.on(topology, "allreduce")).rate
    with pytest.MonkeyPatch.context() as patch:
        for module in (splits, dispatch):
            patch.setattr(module, "LARGEST_TWO_WAY", 0)
        found = synth.solve(topology, "allreduce")
    assert synth.verify(found).errors == ()
    assert found.rate <= optimum <= found.bound.rate


@given(drawn_topologies(max_ranks=6, switches=2))
@settings(max_examples=40)
def test_batches_that_outlive_their_cuts_pack_exactly(topology: Topology) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packer, "SMALL", 0)
        found = synth.solve(topology, "allgather")
    assert synth.verify(found).errors == ()
    assert found.is_optimal

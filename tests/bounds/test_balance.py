"""Switches with more bandwidth in than out: what passes them, and when no linear program is needed."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings

from arborcast import synth
from arborcast import topologies as catalog
from arborcast.synth.bounds.capacity_lp import program_of, split_bandwidth
from arborcast.synth.bounds.cuts import tightest_cut
from arborcast.synth.bounds.switch_balance import balanced_part, sufficient_part
from arborcast.synth.collective import Collective
from arborcast.synth.faults.faulty import without
from arborcast.synth.topology import Link, Topology
from tests.support.strategies import topologies as graphs

F = Fraction


@given(graphs(max_ranks=5, switches=3, symmetric=False))
@settings(max_examples=80)
def test_switches_send_what_they_receive_and_no_link_carries_more(topology):
    part = balanced_part(topology)
    assert not part.unbalanced(range(part.ranks, part.size))
    for link in part.links:
        assert link.bandwidth <= topology.bandwidth[link.src, link.dst]
    for link in topology.links:
        if link.src < topology.ranks and link.dst < topology.ranks:
            assert part.bandwidth[link.src, link.dst] == link.bandwidth


@given(graphs(max_ranks=5, switches=2, symmetric=False))
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
    fabric = catalog.load("dgx-a100:boxes=2")
    part = balanced_part(fabric)
    assert {(link.src, link.dst): link.bandwidth for link in part.links} == fabric.bandwidth


def test_what_one_direction_lost_the_other_gives_up_first():
    # Rank 0's link from the switch has lost half; the switch receives 3 GB/s and sends 5/2.
    links = [Link(rank, 3, F(1)) for rank in range(3)] + [Link(3, rank, F(1)) for rank in (1, 2)]
    star = Topology.build("star", 3, [*links, Link(3, 0, F(1, 2))], ["switch"])
    part = balanced_part(star)
    assert part.bandwidth[0, 3] == F(1, 2)
    assert sum(link.bandwidth for link in part.links if link.dst == 3) == F(5, 2)


@pytest.mark.parametrize(
    "kind",
    [
        "allgather",
        "reduce",
        *(pytest.param(it, marks=pytest.mark.long) for it in ("reduce-scatter", "broadcast")),
    ],
)
def test_a_link_that_is_slower_one_way_costs_what_its_cut_says(kind):
    fabric = catalog.load("dgx-a100:boxes=2")
    slow = without(
        fabric, slower={(19, 9): F(1)} if (19, 9) in fabric.bandwidth else {(18, 9): F(1)}
    ).topology
    assert slow.unbalanced(range(slow.ranks, slow.size))
    schedule = synth.solve(slow, kind)
    assert schedule.is_optimal
    assert synth.verify(schedule).errors == ()

"""Allreduces on halves of symmetric links: against the linear program and the strength, and roots spread."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings

from arborcast import topologies as catalog
from arborcast.synth.bounds import bound
from arborcast.synth.bounds.capacity_lp import split_bandwidth
from arborcast.synth.bounds.cuts import tightest_cut
from arborcast.synth.bounds.root_demands import root_demands_of, side_lengths, spread_roots
from arborcast.synth.bounds.strength import strength
from arborcast.synth.certification import dual_of
from arborcast.synth.collective import Collective
from arborcast.synth.packing.exact import pack_exactly
from arborcast.synth.topology import Link, Topology
from tests.support.strategies import topologies as graphs

F = Fraction


def halves(topology):
    links = [Link(link.src, link.dst, link.bandwidth / 2) for link in topology.links]
    return Topology.build("halves", topology.ranks, links, topology.switches)


def cabled(ranks, cables, switches=()):
    links = [Link(a, b, F(rate)) for u, v, rate in cables for a, b in ((u, v), (v, u))]
    return Topology.build("drawn", ranks, links, switches)


@given(graphs(max_ranks=6, switches=3))
@settings(max_examples=80)
def test_halves_reach_the_optimum_where_the_sets_hold_all_ranks(topology):
    allreduce = Collective.on(topology, "allreduce")
    found = root_demands_of(topology)
    optimum = split_bandwidth(topology, allreduce).rate
    assert sum(found.demands) == found.rate <= optimum
    assert min(found.demands) >= 0
    if {rank for side in found.sides for rank in side if rank < topology.ranks} == set(range(topology.ranks)):
        dual = dual_of(topology, allreduce, side_lengths(topology, found.sides))
        assert dual.capacity / dual.distance == found.rate == optimum
        if not topology.switches:
            partition = strength(topology)
            assert found.rate == partition.capacity / (len(partition.blocks) - 1)


@given(graphs(max_ranks=6, switches=2))
@settings(max_examples=40)
def test_trees_of_these_roots_fit_halves(topology):
    found = root_demands_of(topology)
    # Raises where some cut carries less than the demands.
    packing = pack_exactly(halves(topology), dict(enumerate(found.demands)), attempts=1)
    assert sum(tree.weight for tree in packing.trees) == found.rate


@given(graphs(max_ranks=6, switches=2))
@settings(max_examples=60)
def test_spread_roots_keep_the_rate_and_every_cable(topology):
    split = split_bandwidth(topology, Collective.on(topology, "allreduce"))
    (root,) = split.roots
    out, roots = spread_roots(topology, split.out, root, split.rate)
    assert roots == dict.fromkeys(range(topology.ranks), split.rate / topology.ranks)
    for link in topology.links:
        both = (link.src, link.dst), (link.dst, link.src)
        assert sum(out.bandwidth.get(hop, 0) for hop in both) <= link.bandwidth
    assert not out.unbalanced(range(out.ranks, out.size))
    everyone = range(topology.ranks)
    assert tightest_cut(out, dict.fromkeys(everyone, 1), everyone).rate * topology.ranks >= split.rate


def test_a_star_without_a_switch_needs_uneven_halves():
    star = cabled(4, [(0, 1, 1), (0, 2, 1), (0, 3, 1)])
    assert root_demands_of(star).rate == F(3, 4)  # each leaf is left by half a link, three have to be joined
    assert bound(star, Collective.on(star, "allreduce")).rate == 1


def test_equal_roots_where_the_graph_is_regular():
    torus = catalog.load("torus:4x4")
    assert set(root_demands_of(torus).demands) == {F(32, 15) / 16}  # 32 cables join 16 ranks, 15 times


def test_boxes_with_a_failed_link_keep_the_rate_of_what_is_left():
    # Two boxes of two ranks; a cable of one box to the fabric is gone, the other carries 2 GB/s.
    switches = ["box0", "box1", "fabric"]
    inside = [(0, 4, 8), (1, 4, 8), (2, 5, 8), (3, 5, 8)]
    fabric = cabled(4, [*inside, (0, 6, 2), (2, 6, 2), (3, 6, 2)], switches)
    found = root_demands_of(fabric)
    limit = bound(fabric, Collective.on(fabric, "allreduce"))
    assert found.rate == limit.rate == 2

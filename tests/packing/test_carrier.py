"""Pairs, overlays, centres: transforms that must keep loads and weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.errors import ScheduleError
from arborcast.synth.kernels.arborescence import levels
from arborcast.synth.kernels.link_graph import LinkGraph
from arborcast.synth.packing.weighted_tree import centred, congestion, merge, mirrored, pair_up, rerooted
from arborcast.synth.topology import Link, Topology
from arborcast.synth.tree import Tree, TreeEdge
from tests.support.carriers import carrier, hops

FULL = Topology.build(
    "full", 5, [Link(u, v, Fraction(1)) for u in range(7) for v in range(7) if u != v], ["five", "six"]
)
CHAIN = Tree(0, Fraction(2), (TreeEdge(0, 1), TreeEdge(1, 2, (6,)), TreeEdge(2, 3), TreeEdge(3, 4)))


def on_full(out, into=None):
    return carrier(FULL, out, into)


@st.composite
def trees(draw, ranks=5, root=None):
    """A random tree whose edges sometimes pass switches 5 and 6, with a small whole weight."""
    order = draw(st.permutations(range(ranks)))
    if root is not None:
        order = [root, *(rank for rank in order if rank != root)]
    edges = [
        TreeEdge(order[draw(st.integers(0, position - 1))], rank, draw(st.sampled_from([(), (6,), (5, 6)])))
        for position, rank in enumerate(order)
        if position
    ]
    return Tree(order[0], Fraction(draw(st.integers(1, 6))), tuple(edges))


def total_load(carriers):
    load = Counter()
    for one in carriers:
        for hop, count in hops(one).items():
            load[hop] += one.weight * count
    return load


def turned(load):
    return Counter({(dst, src): amount for (src, dst), amount in load.items()})


def around(tree, root):
    """The edges of a tree from another root, found by walking its edges both ways."""
    ways = {}
    for edge in tree.edges:
        ways.setdefault(edge.parent, []).append(edge)
        ways.setdefault(edge.child, []).append(TreeEdge(edge.child, edge.parent, edge.via[::-1]))
    found, reached = [], [root]
    for rank in reached:
        new = [edge for edge in ways[rank] if edge.child not in reached]
        found += new
        reached += [edge.child for edge in new]
    return Tree(root, tree.weight, tuple(found))


@given(trees())
def test_what_is_written_down_is_read_back(tree):
    found = on_full(tree).tree
    assert (found.root, found.weight, set(found.edges)) == (tree.root, tree.weight, set(tree.edges))
    assert found.depth == tree.depth
    assert on_full(tree).height == tree.height


def test_a_link_that_is_not_there_is_named():
    apart = Topology.build("apart", 3, [Link(0, 1, Fraction(1)), Link(1, 2, Fraction(1))])
    with pytest.raises(ScheduleError, match="tree of root 0: apart has no link 0->2"):
        carrier(apart, Tree(0, Fraction(1), (TreeEdge(0, 1), TreeEdge(0, 2))))


def test_a_pair_of_two_different_trees_keeps_its_root():
    other = Tree(0, Fraction(2), tuple(TreeEdge(0, child) for child in range(1, 5)))
    pair = on_full(CHAIN, other)
    assert not pair.is_mirrored
    assert centred(pair) is pair


@given(trees(), st.integers(0, 4))
def test_another_root_keeps_the_undirected_edges(tree, root):
    found = replace(on_full(tree), root=root, out=rerooted(on_full(tree).out, root)).tree
    assert set(found.edges) == set(around(tree, root).edges)


@given(trees())
def test_centring_changes_no_load_and_never_heightens(tree):
    pair = on_full(tree, tree)
    assert pair.is_mirrored
    moved = centred(pair)
    assert hops(moved) == hops(pair)
    assert moved.height <= pair.height
    assert moved.height == 2 * min(around(tree, rank).height for rank in range(5))
    assert moved.out.parents[moved.root] == -1


@given(trees(), st.permutations(range(5)))
def test_the_image_of_a_carrier_uses_the_images_of_its_links(tree, order):
    images = np.array([*order, 6, 5])
    moved = on_full(tree, tree).over(LinkGraph(FULL), images)
    assert moved.is_mirrored and moved.root == order[tree.root]
    assert hops(moved) == {
        (int(images[src]), int(images[dst])): count for (src, dst), count in hops(on_full(tree, tree)).items()
    }
    depth, _ = levels(moved.out.parents)
    assert {rank: int(depth[order[rank]]) for rank in range(5)} == tree.depth


@given(st.lists(trees(root=0), min_size=1, max_size=6), st.lists(trees(root=0), min_size=1, max_size=6))
@settings(max_examples=60)
def test_pairing_up_keeps_both_sides_and_needs_few_pairs(outs, ins):
    outs = merge(map(on_full, outs))
    ins = merge(carrier(FULL.reversed(), tree) for tree in ins)
    total = sum(tree.weight for tree in outs)
    scale = total / sum(tree.weight for tree in ins)
    ins = tuple(replace(tree, weight=tree.weight * scale) for tree in ins)
    pairs = pair_up(outs, ins)
    assert len(pairs) <= len(outs) + len(ins) - 1
    assert sum(pair.weight for pair in pairs) == total
    spread = [replace(pair, into=None) for pair in pairs]
    assert total_load(spread) == total_load(outs)
    assert total_load(pairs) - total_load(spread) == turned(total_load(ins))


def test_trees_of_equal_weight_meet_first():
    def star(centre, weight):
        first = (TreeEdge(0, centre),) if centre else ()
        rest = (TreeEdge(centre, rank) for rank in range(1, 5) if rank != centre)
        return on_full(Tree(0, Fraction(weight), (*first, *rest)))

    outs = [star(0, 3), star(1, 2), star(2, 1)]
    ins = [star(0, 2), star(1, 2), star(2, 1), star(3, 1)]
    assert len(pair_up(outs, ins)) == 4  # 2+2 and 1+1 meet, 3 is cut into 2 and 1


def test_mirrored_pairs_of_one_undirected_tree_merge_once_they_are_centred():
    both = [mirrored(on_full(CHAIN)), mirrored(on_full(around(CHAIN, 4)))]
    assert len(merge(both)) == 2
    (pair,) = merge(map(centred, both))
    assert pair.weight == 4


def test_congestion_is_the_fullest_link():
    links = [Link(0, 6, Fraction(12)), Link(6, 1, Fraction(4)), Link(6, 2, Fraction(3))]
    topology = Topology.build("drawn", 5, links, ["five", "six"])
    star = Tree(0, Fraction(3), (TreeEdge(0, 1, (6,)), TreeEdge(0, 2, (6,))))
    # 3 GB/s twice of 12, once of 4, once of 3.
    assert congestion([carrier(topology, star)], topology) == 1
    assert congestion([replace(carrier(topology, star), weight=Fraction(2))], topology) == Fraction(2, 3)

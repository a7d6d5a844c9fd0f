"""Pairs, overlays, centres: transforms that must keep loads and weights."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.packing.carrier import (
    Pair,
    centred,
    congestion,
    hops,
    merge,
    mirrored,
    pair_up,
    rerooted,
    with_weight,
)
from arborcast.synth.tree import Tree, TreeEdge

CHAIN = Tree(0, Fraction(2), (TreeEdge(0, 1), TreeEdge(1, 2, (9,)), TreeEdge(2, 3), TreeEdge(3, 4)))


@st.composite
def trees(draw, ranks=5, root=None):
    """A random tree whose edges sometimes pass switch 9, with a small whole weight."""
    order = draw(st.permutations(range(ranks)))
    if root is not None:
        order = [root, *(rank for rank in order if rank != root)]
    edges = [
        TreeEdge(order[draw(st.integers(0, position - 1))], rank, draw(st.sampled_from([(), (9,), (8, 9)])))
        for position, rank in enumerate(order)
        if position
    ]
    return Tree(order[0], Fraction(draw(st.integers(1, 6))), tuple(edges))


def total_load(carriers):
    load = Counter()
    for carrier in carriers:
        for hop, count in hops(carrier).items():
            load[hop] += carrier.weight * count
    return load


def test_hops_of_a_tree_count_every_passage_of_a_link():
    star = Tree(0, Fraction(1), (TreeEdge(0, 1, (9,)), TreeEdge(0, 2, (9,))))
    assert hops(star) == {(0, 9): 2, (9, 1): 1, (9, 2): 1}


def test_hops_of_a_pair_go_there_and_back():
    edge = Tree(0, Fraction(1), (TreeEdge(0, 1, (8, 9)),))
    assert hops(Pair(edge, edge)) == {(0, 8): 1, (8, 9): 1, (9, 1): 1, (1, 9): 1, (9, 8): 1, (8, 0): 1}


def test_a_chain_is_centred_in_its_middle():
    pair = centred(Pair(CHAIN, CHAIN))
    assert pair.root == 2
    assert pair.height == 2 + 2
    assert set(pair.out.edges) == {
        TreeEdge(2, 1, (9,)),
        TreeEdge(1, 0),
        TreeEdge(2, 3),
        TreeEdge(3, 4),
    }


def test_a_pair_of_two_different_trees_keeps_its_root():
    other = Tree(0, Fraction(2), tuple(TreeEdge(0, child) for child in range(1, 5)))
    pair = Pair(CHAIN, other)
    assert centred(pair) is pair


@given(trees())
def test_centring_changes_no_load_and_never_heightens(tree):
    pair = Pair(tree, tree)
    moved = centred(pair)
    assert hops(moved) == hops(pair)
    assert moved.height <= pair.height
    assert moved.height == 2 * min(rerooted(tree, rank).height for rank in range(5))


@given(st.lists(trees(root=0), min_size=1, max_size=6), st.lists(trees(root=0), min_size=1, max_size=6))
@settings(max_examples=60)
def test_pairing_up_keeps_both_sides_and_needs_few_pairs(outs, ins):
    outs, ins = merge(outs), merge(ins)
    total = sum(tree.weight for tree in outs)
    scale = total / sum(tree.weight for tree in ins)
    ins = tuple(with_weight(tree, tree.weight * scale) for tree in ins)
    pairs = pair_up(outs, ins)
    assert len(pairs) <= len(outs) + len(ins) - 1
    assert sum(pair.weight for pair in pairs) == total
    assert all(pair.out.weight == pair.into.weight for pair in pairs)
    assert total_load(pair.out for pair in pairs) == total_load(outs)
    assert total_load(pair.into for pair in pairs) == total_load(ins)


def test_trees_of_equal_weight_meet_first():
    def star(centre, weight):
        first = (TreeEdge(0, centre),) if centre else ()
        rest = (TreeEdge(centre, rank) for rank in range(1, 5) if rank != centre)
        return Tree(0, Fraction(weight), (*first, *rest))

    outs = [star(0, 3), star(1, 2), star(2, 1)]
    ins = [star(0, 2), star(1, 2), star(2, 1), star(3, 1)]
    assert len(pair_up(outs, ins)) == 4  # 2+2 and 1+1 meet, 3 is cut into 2 and 1


def test_mirrored_pairs_of_one_undirected_tree_merge_once_they_are_centred():
    turned = rerooted(CHAIN, 4)
    assert len(merge(mirrored([CHAIN, turned]))) == 2
    (pair,) = merge(centred(pair) for pair in mirrored([CHAIN, turned]))
    assert pair.weight == 4


def test_congestion_is_the_fullest_link():
    star = Tree(0, Fraction(3), (TreeEdge(0, 1, (9,)), TreeEdge(0, 2, (9,))))
    bandwidth = {(0, 9): Fraction(8), (9, 1): Fraction(4), (9, 2): Fraction(12)}
    assert congestion([star], bandwidth) == Fraction(3, 4)

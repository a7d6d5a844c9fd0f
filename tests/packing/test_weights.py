"""Weights of given trees: the largest rate, exactly, whatever the floating solver's digits are."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.packing.weighted_tree import congestion
from arborcast.synth.topology import Link, Topology
from arborcast.synth.tree import Tree, TreeEdge
from tests.support.carriers import carrier, choice_of

LIMIT = Fraction(2000)  # more than any of these links carry


def path(*ranks):
    return Tree(ranks[0], Fraction(1), tuple(TreeEdge(u, v) for u, v in pairwise(ranks)))


def graph(ranks, rates):
    return Topology.build("graph", ranks, [Link(u, v, Fraction(rate)) for (u, v), rate in rates.items()])


def weighed(topology, groups, limit=LIMIT):
    """The trees of some groups with their best weights."""
    carriers = [[carrier(topology, tree) for tree in trees] for trees in groups]
    weights = choice_of(topology, carriers, limit).weights
    every = [one for some in carriers for one in some]
    return [replace(one, weight=its * limit) for one, its in zip(every, weights, strict=True) if its]


def test_trees_that_share_nothing_get_their_narrowest_link():
    # The paths 0 1 2 and 0 2 1 share no link: each gets its narrowest.
    topology = graph(3, {(0, 1): 2, (1, 2): 2, (0, 2): Fraction(3, 2), (2, 1): 9})
    trees = weighed(topology, ((path(0, 1, 2), path(0, 2, 1)),))
    assert [tree.weight for tree in trees] == [2, Fraction(3, 2)]


def test_trees_that_get_nothing_are_left_out():
    topology = graph(3, {(0, 1): 1, (1, 2): 1, (0, 2): 1})
    star = Tree(0, Fraction(1), (TreeEdge(0, 1), TreeEdge(0, 2)))
    trees = weighed(topology, ((path(0, 1, 2), star),))
    assert sum(tree.weight for tree in trees) == 1
    assert len(trees) == 1


def test_all_groups_carry_the_same():
    topology = graph(2, {(0, 1): 5, (1, 0): 3})
    trees = weighed(topology, ((path(0, 1),), (path(1, 0),)))
    assert [tree.weight for tree in trees] == [3, 3]


def test_a_large_denominator_is_solved_for():
    # The two rates have no small common denominator, so equations must be solved.
    rates = {(0, 1): Fraction(101, 7), (1, 2): 1000, (0, 2): Fraction(103, 11), (2, 1): 1000}
    topology = graph(3, rates)
    trees = weighed(topology, ((path(0, 1, 2), path(0, 2, 1)),))
    assert sum(tree.weight for tree in trees) == Fraction(101, 7) + Fraction(103, 11)


def test_weights_that_come_near_are_not_taken_for_the_best():
    """Halves miss what two links carry by one part in 10^12, which floating point does not see."""
    large = 10**12
    topology = graph(3, {(0, 1): large, (1, 2): 2 * large, (0, 2): large + 1, (2, 1): 2 * large})
    trees = weighed(topology, ((path(0, 1, 2), path(0, 2, 1)),), limit=Fraction(3 * large))
    assert [tree.weight for tree in trees] == [large, large + 1]


def test_a_rate_is_reached_or_missed_exactly():
    """3 of 2000 GB/s: near it floating point does not tell, and equal it must."""
    topology = graph(2, {(0, 1): 3})
    choice = choice_of(topology, [[carrier(topology, path(0, 1))]], LIMIT)
    rate, little = Fraction(3, 2000), Fraction(1, 10**9)
    for less in (Fraction(0), rate / 2, rate * (1 - little), rate):
        assert choice.reaches(less)
        assert not choice.falls_short(less)
    for more in (rate * (1 + little), rate * 2):
        assert not choice.reaches(more)
        assert choice.falls_short(more)


def test_a_group_without_carriers_reaches_nothing():
    topology = graph(2, {(0, 1): 3, (1, 0): 2})
    choice = choice_of(topology, [[carrier(topology, path(0, 1))], []], LIMIT)
    for rate in (Fraction(0), Fraction(1)):
        assert not choice.reaches(rate)
        assert choice.falls_short(rate)


def test_a_part_of_a_choice_is_the_choice_of_a_part():
    """Of two groups the second tree of one and both of the other, whatever the order they are named in."""
    topology = graph(3, {(0, 1): 2, (1, 2): 2, (0, 2): 5, (2, 1): 3, (1, 0): 4, (2, 0): 6})
    one = tuple(carrier(topology, tree) for tree in (path(0, 1, 2), path(0, 2, 1)))
    other = tuple(carrier(topology, tree) for tree in (path(1, 0, 2), path(1, 2, 0)))
    choice = choice_of(topology, (one, other), LIMIT)
    part, anew = choice.only([3, 1, 2]), choice_of(topology, (one[1:], other), LIMIT)
    assert part.trees == anew.trees
    assert part.weights == anew.weights


@given(st.data())
@settings(max_examples=40)
def test_two_trees_get_what_a_search_of_all_corners_finds(data):
    rate = st.integers(1, 6)
    links = [(0, 1), (0, 2), (0, 3), (1, 2), (2, 3), (1, 3), (3, 1), (2, 1)]
    topology = graph(4, {link: data.draw(rate) for link in links})
    shapes = [path(0, 1, 2, 3), path(0, 3, 1, 2), path(0, 2, 3, 1), path(0, 2, 1, 3)]
    first, second = data.draw(st.permutations(shapes))[:2]
    found = weighed(topology, ((first, second),))
    assert congestion(found, topology) == 1
    assert sum(tree.weight for tree in found) == best_of_two(topology, first, second)


def best_of_two(topology, first, second):
    """The largest x + y where each link holds a x + b y: at a corner of the region."""
    rows = [(Fraction(-1), Fraction(0), Fraction(0)), (Fraction(0), Fraction(-1), Fraction(0))]
    for (src, dst), room in topology.bandwidth.items():
        row = [sum((e.parent, e.child) == (src, dst) for e in tree.edges) for tree in (first, second)]
        if any(row):
            rows.append((Fraction(row[0]), Fraction(row[1]), room))
    corners = []
    for a, b, c in rows:
        for d, e, f in rows:
            if a * e - b * d:
                corners.append(((c * e - b * f) / (a * e - b * d), (a * f - c * d) / (a * e - b * d)))
    return max(x + y for x, y in corners if all(a * x + b * y <= c for a, b, c in rows))

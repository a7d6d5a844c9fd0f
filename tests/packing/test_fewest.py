"""Few trees, against a search of every choice on graphs small enough for it."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast import topologies as catalog
from arborcast.synth.bounds.capacity_lp import split_bandwidth
from arborcast.synth.collective import Collective
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InputError
from arborcast.synth.packing.exact import pack_exactly
from arborcast.synth.packing.fewest import fewest, reweave
from arborcast.synth.packing.weighted_tree import congestion, mirrored
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.topology import Topology
from arborcast.synth.tree import Tree, TreeEdge
from arborcast.synth.verification.verifier import verify
from tests.support.carriers import carrier, choice_of
from tests.support.strategies import topologies

TWENTIETH = Fraction(1, 20)


def spanning_trees(topology, root):
    """Every spanning out-tree of a graph without switches, of weight 1."""
    others = [rank for rank in range(topology.ranks) if rank != root]
    ways_in = [[src for (src, dst) in topology.bandwidth if dst == rank] for rank in others]
    for parents in product(*ways_in):
        edges, reached = [], [root]
        for parent in reached:
            children = [rank for rank, its in zip(others, parents, strict=True) if its == parent]
            edges += [TreeEdge(parent, child) for child in children]
            reached += children
        if len(reached) == topology.ranks:
            yield carrier(topology, Tree(root, Fraction(1), tuple(edges)))


def rate_of(topology, carriers):
    return choice_of(topology, [carriers], Fraction(100)).rate * 100


def best_of_all(topology, carriers, count):
    """The largest rate of any `count` of the carriers."""
    return max(rate_of(topology, some) for some in combinations(carriers, min(count, len(carriers))))


def optimum(topology, kind):
    return split_bandwidth(topology, Collective.on(topology, kind)).rate


@given(topologies(max_ranks=4, switches=0, max_bandwidth=3), st.integers(1, 2))
@settings(max_examples=20)
def test_no_choice_of_so_many_pairs_is_better(topology, most):
    # On symmetric links mirrored pairs are enough for the optimum, so the search is among those.
    every = [mirrored(tree) for tree in spanning_trees(topology, 0)][:20]
    pairing = fewest(topology, None, optimum(topology, "allreduce"), every, SolveOptions(max_trees=most))
    assert len(pairing.carriers) <= most
    assert congestion(pairing.carriers, topology) == 1
    assert sum(pair.weight for pair in pairing.carriers) >= best_of_all(topology, every, most)


@given(topologies(max_ranks=5, switches=1), st.sampled_from([Fraction(0), TWENTIETH]))
@settings(max_examples=15)
def test_with_all_roots_the_tolerance_is_kept_with_no_more_trees_than_before(topology, tolerance):
    roots = list(range(topology.ranks))
    best = optimum(topology, "allgather") / topology.ranks
    known = pack_exactly(topology, dict.fromkeys(roots, best)).carriers
    packing = fewest(topology, roots, best, known, SolveOptions(tolerance=tolerance))
    rates = {root: sum(tree.weight for tree in packing.trees if tree.root == root) for root in roots}
    assert len(set(rates.values())) == 1
    assert rates[0] >= (1 - tolerance) * best
    assert len(packing.trees) <= len(known)
    assert congestion(packing.carriers, topology) <= 1


def test_dgx1_broadcasts_at_full_rate_on_four_trees_and_not_on_three():
    topology = catalog.load("dgx1")  # rank 0 has six links of 25 GB/s: the optimum is 150
    known = pack_exactly(topology, {0: Fraction(150)}).carriers
    packing = fewest(topology, [0], Fraction(150), known, SolveOptions(tolerance=Fraction(0)))
    assert sum(tree.weight for tree in packing.trees) == 150
    # Two of rank 0's neighbours hang on double links, two on single ones: 2 + 2 + 1 + 1.
    assert sorted(tree.weight for tree in packing.trees) == [25, 25, 50, 50]
    three = fewest(topology, [0], Fraction(150), known, SolveOptions(max_trees=3))
    assert sum(tree.weight for tree in three.trees) == 125


def test_one_tree_per_root_is_the_least_there_can_be():
    topology = catalog.load("dgx-a100:boxes=2")
    roots = range(topology.ranks)
    packing = fewest(topology, roots, Fraction(65, 3), [], SolveOptions(tolerance=TWENTIETH))
    assert len(packing.trees) == topology.ranks
    assert dict(packing.settings)["proved"] == "no fewer trees are possible"


@pytest.mark.parametrize(
    ("few", "message"),
    [
        ({"max_trees": 0}, "max-trees: must be at least 1, got 0"),
        ({"max_trees": -3}, "max-trees: must be at least 1, got -3"),
        ({"tolerance": Fraction(1)}, "tolerance: must be from 0 to below 1, got 1"),
        ({"tolerance": Fraction(-1, 5)}, "tolerance: must be from 0 to below 1, got -1/5"),
    ],
)
def test_what_few_trees_are_not(few, message):
    with pytest.raises(InputError, match=message):
        fewest(catalog.load("ring:3"), [0], Fraction(1), [], SolveOptions(**few))


@given(topologies(max_ranks=6, switches=2, symmetric=True), st.integers(1, 3))
def test_trees_span_and_each_root_has_its_number(topology: Topology, count: int) -> None:
    roots = range(topology.ranks)
    trees = reweave(topology, roots, count, deadline=Deadline.after(None))
    assert sorted(tree.root for tree in trees) == sorted(list(roots) * count)
    for tree in (one.tree for one in trees):
        assert tree.weight == Fraction(1, count)
        assert set(tree.depth) == set(roots)
        for edge in tree.edges:
            path = (edge.parent, *edge.via, edge.child)
            assert all(hop in topology.bandwidth for hop in pairwise(path))


@pytest.mark.parametrize(
    ("spec", "max_trees", "part"),
    [
        ("dgx1", 1, "7/9"),
        ("dgx1", 3, "35/36"),
        ("torus:4x4", 1, "15/16"),
        pytest.param("torus:8x8", 1, "63/64", marks=pytest.mark.long),
        ("dgx-a100:boxes=2", 1, "90/91"),
    ],
)
def test_few_trees_per_root_come_this_near_to_the_optimum(spec: str, max_trees: int, part: str) -> None:
    schedule = synth.solve(catalog.load(spec), "allgather", max_trees=max_trees)
    assert verify(schedule).errors == ()
    assert schedule.rate >= schedule.bound.rate * Fraction(part)
    owners = [chunk.owner for chunk in schedule.chunks]
    assert max(owners.count(owner) for owner in owners) <= max_trees


def test_a_deadline_that_has_passed_still_leaves_one_round() -> None:
    trees = reweave(catalog.load("torus:4x4"), range(16), 1, deadline=Deadline.after(0.0))
    assert [tree.root for tree in trees] == list(range(16))

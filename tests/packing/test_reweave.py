"""Trees woven around each other: always spanning, so many per root, and better than what was there."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast import synth
from arborcast import topologies as catalog
from arborcast.synth.deadline import Deadline
from arborcast.synth.packing.fewest import reweave
from arborcast.synth.topology import Topology
from arborcast.synth.verification.verifier import verify
from tests.support.strategies import topologies as graphs


@given(graphs(max_ranks=6, switches=2, symmetric=True), st.integers(1, 3))
def test_trees_span_and_each_root_has_its_number(topology: Topology, count: int) -> None:
    roots = range(topology.ranks)
    trees = reweave(topology, roots, count, deadline=Deadline.after(None))
    assert sorted(tree.root for tree in trees) == sorted(list(roots) * count)
    for tree in (carrier.tree for carrier in trees):
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

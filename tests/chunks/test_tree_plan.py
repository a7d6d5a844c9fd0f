"""Packings made into plans: replayed by a checker of its own, with the chunks that are known to be least."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.synth.chunks.bounds.step_certificate import StepBound, TreeDual
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.trees.column_generation import StepTree, TreeBound, tree_bound
from arborcast.synth.chunks.trees.tree_schedule import (
    NoPlanError,
    chunks_of,
    plan_as_it_stands,
    plan_of,
    rounded_packing,
)
from arborcast.synth.chunks.trees.whole_trees import admissible_chunk_counts
from arborcast.synth.collective import Collective
from arborcast.synth.deadline import Deadline
from arborcast.synth.topology import Topology
from tests.support.chunk_replay import replay_plan
from tests.support.strategies import topologies as fabrics

DGX1 = (  # its automorphisms
    (0, 1, 2, 3, 4, 5, 6, 7),
    (1, 0, 3, 2, 5, 4, 7, 6),
    (4, 5, 6, 7, 0, 1, 2, 3),
    (5, 4, 7, 6, 1, 0, 3, 2),
)
RING = tuple(tuple((rank + by) % 8 for rank in range(8)) for by in range(8))


@pytest.mark.parametrize(
    ("spec", "kind", "group", "steps", "chunks", "rounds"),
    [
        ("dgx1", "broadcast", None, 2, 2, 2),
        ("dgx1", "broadcast", None, 3, 22, 9),
        ("dgx1", "broadcast", None, 4, 13, 4),
        ("dgx1", "broadcast", None, 5, 19, 5),
        ("dgx1", "broadcast", None, 6, 25, 6),
        ("dgx1", "allgather", DGX1, 2, 2, 3),
        ("dgx1", "gather", None, 2, 6, 7),
        ("dgx1", "alltoall", DGX1, 2, 3, 8),
        ("hypercube:3", "broadcast", None, 4, 6, 4),
        ("ring:8", "allgather", RING, 4, 2, 7),
        pytest.param("dgx1", "broadcast", None, 7, 31, 7, marks=pytest.mark.long),
        pytest.param("dgx1", "broadcast", None, 8, 37, 8, marks=pytest.mark.long),
        pytest.param("dgx1", "allgather", DGX1, 3, 6, 7, marks=pytest.mark.long),
    ],
)
def test_the_fewest_chunks_that_attain_the_bound(spec, kind, group, steps, chunks, rounds):
    topology = topologies.load(spec)
    problem = ChunkProblem.of(topology, Collective.on(topology, kind))
    bound = tree_bound(problem, steps, deadline=Deadline(), group=group)
    found, plan = plan_of(problem, steps, bound, group=group)
    replay_plan(problem, found, plan)
    assert (found, len(plan.rounds), sum(plan.rounds)) == (chunks, steps, rounds)


def test_the_packing_as_it_stands():
    topology = topologies.load("dgx1")
    problem = ChunkProblem.of(topology, Collective.on(topology, "broadcast"))
    bound = tree_bound(problem, 4, deadline=Deadline())
    chunks = chunks_of(bound)
    plan = plan_as_it_stands(problem, bound)
    replay_plan(problem, chunks, plan)
    assert Fraction(sum(plan.rounds), chunks) == Fraction(4, 13)


def pair() -> tuple[ChunkProblem, TreeDual]:
    """A broadcast over one link in two steps, priced 1 in each."""
    topology = topologies.load("full:2")
    problem = ChunkProblem.of(topology, Collective.on(topology, "broadcast"))
    return problem, TreeDual(((Fraction(1), Fraction(0)),) * 2)


def packed(lengths: TreeDual, first: Fraction, proved: Fraction = Fraction(1)) -> TreeBound:
    trees = [StepTree(0, weight, ((0, step),)) for step, weight in enumerate((first, 1 - first))]
    return TreeBound(
        StepBound(2, proved, lengths), (first, 1 - first), tuple(tree for tree in trees if tree.weight)
    )


def test_an_empty_step_is_filled_where_the_optimum_allows():
    problem, lengths = pair()
    late = replace(packed(lengths, Fraction(1)), candidates=((0, ((0, 1),)),))  # a tree that costs as little
    chunks, plan = plan_of(problem, 2, late)
    assert (chunks, plan.rounds) == (2, (1, 1))
    replay_plan(problem, chunks, plan)


def test_what_is_no_plan_says_why():
    problem, lengths = pair()
    gap = Fraction(1, 2)  # where the optimum is not known, nothing but the packing itself is tried
    with pytest.raises(NoPlanError, match="leaves step 2 empty"):
        plan_of(problem, 2, packed(lengths, Fraction(1), gap))
    with pytest.raises(NoPlanError, match="needs 9973 chunks, more than 2000"):
        plan_of(problem, 2, packed(lengths, Fraction(1, 9973), gap))
    assert plan_of(problem, 2, packed(lengths, Fraction(2, 3), gap))[0] == 3


def test_admissible_numbers_of_chunks():
    numbers = admissible_chunk_counts(Fraction(1, 6), 3)  # R = C / 6 must be at least 3
    assert [next(numbers) for _ in range(3)] == [18, 24, 30]


@settings(max_examples=15)
@given(fabrics(max_ranks=4, switches=1, max_bandwidth=2, min_ranks=3), st.integers(1, 9))
def test_a_plan_with_another_number_of_chunks(fabric: Topology, chunks: int) -> None:
    collective = Collective.on(fabric, "allgather")
    problem = ChunkProblem.of(fabric, collective)
    assert problem.latency is not None
    packed = tree_bound(problem, problem.latency, deadline=Deadline())
    rounded = rounded_packing(problem, packed)
    plan = rounded.plan(chunks)
    replay_plan(problem, chunks, plan)
    assert sum(plan.rounds) >= packed.bound.ratio * chunks

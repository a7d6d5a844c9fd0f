"""Cheapest trees to every rank by sets of ranks, against sets of targets; limits by them beside flows."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast.synth.chunks.bounds.flow_bound import flow_bound
from arborcast.synth.chunks.bounds.step_certificate import TreeDual
from arborcast.synth.chunks.bounds.step_check import certified_ratio
from arborcast.synth.chunks.problem.symmetry import problem_group
from arborcast.synth.chunks.trees import column_generation
from arborcast.synth.chunks.trees.column_generation import tree_bound
from arborcast.synth.chunks.trees.pricing import TreeSearch, run_exactly
from arborcast.synth.chunks.trees.spanning import SpanningSearch
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InfeasibleError, InputError
from arborcast.synth.topology import Topology
from tests.support.chunk_problems import check_tree, drawn_prices, problem_of
from tests.support.strategies import topologies


@pytest.mark.few(3)
@given(topologies(max_ranks=5), st.data())
def test_sets_of_ranks_and_sets_of_targets_give_the_same(topology: Topology, data: st.DataObject) -> None:
    problem = problem_of(topology)
    latency = problem.latency
    if latency is None:
        return
    prices = drawn_prices(data, latency, len(topology.links))
    steps = len(prices)
    for demand in range(len(problem.demands)):
        search = SpanningSearch(problem, demand, steps)
        try:
            expected = TreeSearch(problem, demand, steps).run(prices)[0]
        except InfeasibleError:
            assert steps < latency
            with pytest.raises(InfeasibleError):
                search.run(prices)
            continue
        for asked in (prices, prices.astype(np.float64)):
            cost, tree = search.run(asked)
            assert cost == expected
            check_tree(problem, demand, steps, tree)
        huge = [[price << 70 for price in row] for row in prices.tolist()]
        large = run_exactly(search.run, problem, huge, search.WHOLE_BITS)
        assert large[0] == expected << 70


@pytest.mark.few(2)
@given(topologies(max_ranks=4), st.data())
def test_both_searches_prove_the_same_limit(topology: Topology, data: st.DataObject) -> None:
    problem = problem_of(topology)
    if problem.latency is None:
        return
    steps = data.draw(st.integers(problem.latency, problem.latency + 1))
    expected = tree_bound(problem, steps, deadline=Deadline())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(column_generation, "MOST_TREE_TARGETS", 0)
        found = tree_bound(problem, steps, deadline=Deadline())
    assert found.bound.ratio == expected.bound.ratio and found.is_exact
    for tree in found.trees:
        check_tree(problem, tree.demand, steps, tree.sends)


@pytest.mark.parametrize(
    ("spec", "kind", "steps", "ratio"),
    [
        ("dgx1:boxes=2", "allgather", 2, "9/2"),
        ("dgx1:boxes=2", "allgather", 3, "1082/431"),
        ("hypercube:4", "broadcast", 5, "31/56"),
        ("star:14", "allgather", 2, "13"),
    ],
)
def test_trees_prove_more_than_flows(spec: str, kind: str, steps: int, ratio: str) -> None:
    problem = problem_of(spec, kind)
    found = tree_bound(problem, steps, deadline=Deadline(), group=problem_group(problem))
    assert found.is_exact and found.bound.ratio == Fraction(ratio)
    certificate = found.bound.certificate
    assert isinstance(certificate, TreeDual)
    assert certified_ratio(problem, steps, certificate) == Fraction(ratio)
    for tree in found.trees:
        check_tree(problem, tree.demand, steps, tree.sends)
    flows = flow_bound(problem, steps, deadline=Deadline())
    assert flows is not None and (flows.ratio < found.bound.ratio) == (spec != "star:14")


def test_spanning_certificates_of_too_few_steps_or_of_lengths_that_no_word_holds() -> None:
    problem = problem_of("ring:14")
    with pytest.raises(InputError, match="demand 0: its targets cannot all be reached in 6 steps"):
        certified_ratio(problem, 6, TreeDual(((Fraction(1, 28),) * 28,) * 6))
    lengths = ((Fraction(1, 28),) * 28, *((Fraction(0),) * 28,) * 7)
    # Seven steps are enough, and the first, which alone costs something, is not needed.
    assert certified_ratio(problem, 8, TreeDual(lengths)) == 0
    rounded = Fraction((1 << 70) - 1, 28 << 70)
    for length, most in ((Fraction(1, 28), 0), (rounded, Fraction(1, 1 << 40))):
        found = certified_ratio(problem, 7, TreeDual(((length,) * 28,) * 7))
        assert 0 <= Fraction(13, 2) - found <= most

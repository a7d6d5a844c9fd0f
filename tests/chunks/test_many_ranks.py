"""Limits and plans of many ranks: cheap trees beside the cheapest, limits by flows, and packings at them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast.synth import bound
from arborcast.synth.chunks.bounds.flow_bound import flow_bound
from arborcast.synth.chunks.bounds.step_certificate import StaticLimit, StepBound
from arborcast.synth.chunks.bounds.step_check import certified_ratio, static_ratio
from arborcast.synth.chunks.problem.symmetry import problem_group
from arborcast.synth.chunks.step_solver import is_large
from arborcast.synth.chunks.trees.column_generation import tree_bound
from arborcast.synth.chunks.trees.insertion import InsertionSearch
from arborcast.synth.chunks.trees.pricing import TreeSearch
from arborcast.synth.chunks.trees.tree_schedule import few_chunks_near
from arborcast.synth.collective import Collective
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.topology import Topology
from tests.support.chunk_problems import check_tree, drawn_prices, problem_of
from tests.support.strategies import topologies


@pytest.mark.few(3)
@given(topologies(max_ranks=5), st.data())
def test_a_cheap_tree_serves_everybody_and_costs_no_less_than_the_cheapest(
    topology: Topology, data: st.DataObject
) -> None:
    problem = problem_of(topology)
    latency = problem.latency
    if latency is None:
        return
    prices = drawn_prices(data, latency, len(topology.links))
    steps = len(prices)
    for demand in range(len(problem.demands)):
        cheap = InsertionSearch(problem, demand, steps)
        try:
            expected = TreeSearch(problem, demand, steps).run(prices)[0]
        except InfeasibleError:
            assert steps < latency
            with pytest.raises(InfeasibleError):
                cheap.run(prices.astype(np.float64))
            continue
        cost, tree = cheap.run(prices.astype(np.float64))
        assert cost >= expected
        check_tree(problem, demand, steps, tree)


@pytest.mark.parametrize(
    ("spec", "steps", "ratio"),
    [
        ("star:14", 2, "13"),  # as many blocks enter each rank over one link
        ("dgx-a100:boxes=2", 3, "2216/1873"),  # what trees prove, too
        ("dgx-a100:boxes=2", 2, "152/103"),
    ],
)
def test_limits_of_many_ranks(spec: str, steps: int, ratio: str) -> None:
    problem = problem_of(spec)
    assert is_large(problem)
    limit = flow_bound(problem, steps, deadline=Deadline())
    assert limit is not None and limit.ratio == Fraction(ratio)
    assert certified_ratio(problem, steps, limit.certificate) == Fraction(ratio)
    group = problem_group(problem)
    gap = Fraction(1, 40)
    found = tree_bound(problem, steps, deadline=Deadline(), group=group, gap=gap, known=limit)
    assert limit.ratio <= sum(found.durations) <= limit.ratio * (1 + gap) + Fraction(1, 10**6)
    near = few_chunks_near(
        problem, steps, found, group, gap=Fraction(1, 20), most_sends=10_000, deadline=Deadline()
    )
    assert near is not None
    chunks, plan = near
    assert limit.ratio <= Fraction(sum(plan.rounds), chunks) <= limit.ratio * Fraction(21, 20)
    assert chunks * problem.ranks * (problem.ranks - 1) <= 10_000


def test_a_packing_of_a_torus_attains_the_limit_of_any_steps() -> None:
    problem = problem_of("torus:4x6")
    group = problem_group(problem)
    fabric = problem.topology
    collective = Collective.on(fabric, "allgather")
    rate = bound(fabric, collective)
    limit = StepBound(5, static_ratio(fabric, collective, rate), StaticLimit(rate))
    found = tree_bound(problem, 5, deadline=Deadline(), group=group, known=limit)
    assert found.bound is limit and found.is_exact
    assert sum(found.durations) == Fraction(23, 4)
    for tree in found.trees:
        check_tree(problem, tree.demand, 5, tree.sends)
    # Trees of one step fewer, that wait in any step, are a packing already.
    seeds = [(tree.demand, tree.sends) for tree in found.trees]
    limit = StepBound(6, limit.ratio, limit.certificate)
    later = tree_bound(problem, 6, deadline=Deadline(), group=group, seeds=seeds, known=limit)
    assert later.is_exact

"""Cheapest trees to every rank by sets of ranks, against sets of targets; plans of many ranks."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast.synth import bound
from arborcast.synth.chunks.bounds.spanning_check import classes_of, spanning_costs
from arborcast.synth.chunks.bounds.step_certificate import StaticLimit, StepBound, TreeDual
from arborcast.synth.chunks.bounds.step_check import certified_ratio, static_ratio
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.symmetry import problem_group
from arborcast.synth.chunks.step_solver import is_large
from arborcast.synth.chunks.trees.column_generation import can_price, tree_bound, tree_packing
from arborcast.synth.chunks.trees.insertion import InsertionSearch
from arborcast.synth.chunks.trees.pricing import TreeSearch, run_exactly
from arborcast.synth.chunks.trees.spanning_oracle import SpanningSearch, is_spanning, twins
from arborcast.synth.chunks.trees.tree_schedule import few_chunks_near
from arborcast.synth.collective import Collective
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.topology import Topology
from tests.support.chunk_problems import check_tree, problem_of
from tests.support.strategies import topologies

NEVER = 1 << 40


def sends_of(problem: ChunkProblem, prices: np.ndarray) -> np.ndarray:
    """The cost of a send in each step from rank to rank."""
    costs = np.full((len(prices), problem.ranks, problem.ranks), NEVER, dtype=np.int64)
    for route in problem.routes:
        own = prices[:, list(route.links)].sum(axis=1)
        costs[:, route.src, route.dst] = np.minimum(costs[:, route.src, route.dst], own)
    return costs


@pytest.mark.few(3)
@given(topologies(max_ranks=5), st.data())
def test_sets_of_ranks_and_sets_of_targets_give_the_same(topology: Topology, data: st.DataObject) -> None:
    problem = problem_of(topology)
    latency = problem.latency
    if latency is None:
        return
    steps = data.draw(st.integers(max(1, latency - 1), latency + 2))
    # Prices by orbits of one, or the same for all links: then most ranks of a switch are twins.
    orbits = np.arange(len(topology.links)) * data.draw(st.integers(0, 1))
    drawn = st.lists(st.integers(0, 9), min_size=len(orbits), max_size=len(orbits))
    prices = np.array([data.draw(drawn) for _ in range(steps)], dtype=np.int64)[:, orbits]
    backwards = spanning_costs(sends_of(problem, prices), NEVER)
    for demand in range(len(problem.demands)):
        search = SpanningSearch(problem, demand, steps, twins(problem, orbits))
        if steps < latency:
            try:
                expected = TreeSearch(problem, demand, steps).run(prices)[0]
            except InfeasibleError:
                assert backwards[demand] >= NEVER
                with pytest.raises(InfeasibleError):
                    search.run(prices)
                with pytest.raises(InfeasibleError):
                    InsertionSearch(problem, demand, steps).run(prices.astype(np.float64))
                continue
        else:
            expected = TreeSearch(problem, demand, steps).run(prices)[0]
        for _ in range(2):  # the second time it knows one
            cost, tree = search.run(prices)
            assert cost == expected == backwards[demand]
            check_tree(problem, demand, steps, tree)
        cost, tree = InsertionSearch(problem, demand, steps).run(prices.astype(np.float64))
        assert cost >= expected
        check_tree(problem, demand, steps, tree)
        large = run_exactly(search.run, problem, [[price << 70 for price in row] for row in prices.tolist()])
        assert large[0] == expected << 70


def test_classes_are_ranks_that_may_be_exchanged() -> None:
    problem = problem_of("dgx-a100:boxes=2")
    prices = np.ones((2, len(problem.topology.links)), dtype=np.int64)
    fabrics = [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert sorted(map(sorted, classes_of(sends_of(problem, prices)))) == fabrics
    assert sorted(map(sorted, twins(problem, np.zeros(prices.shape[1], dtype=np.int64)))) == fabrics
    prices[1, 0] = 2  # of a link of rank 0, or of its switch
    assert sorted(map(len, classes_of(sends_of(problem, prices))))[0] == 1


@pytest.mark.parametrize(
    ("spec", "steps", "ratio"),
    [
        ("star:14", 2, "13"),  # as many blocks enter each rank over one link
        pytest.param("ndv2:boxes=2", 1, "64", marks=pytest.mark.long),
        pytest.param("dgx-a100:boxes=2", 3, "2216/1873", marks=pytest.mark.long),
        pytest.param("dgx-a100:boxes=2", 2, "152/103", marks=pytest.mark.long),
    ],
)
def test_limits_of_many_ranks(spec: str, steps: int, ratio: str) -> None:
    problem = problem_of(spec)
    assert is_spanning(problem) and is_large(problem)
    group = problem_group(problem)
    found = tree_bound(problem, steps, deadline=Deadline(), group=group)
    assert found.is_exact and found.bound.ratio == Fraction(ratio)
    certificate = found.bound.certificate
    assert isinstance(certificate, TreeDual)
    assert certified_ratio(problem, steps, certificate) == Fraction(ratio)
    near = few_chunks_near(
        problem, steps, found, group, gap=Fraction(1, 20), most_sends=10_000, deadline=Deadline()
    )
    assert near is not None
    chunks, plan = near
    assert Fraction(ratio) <= Fraction(sum(plan.rounds), chunks) <= Fraction(ratio) * Fraction(21, 20)
    assert chunks * problem.ranks * (problem.ranks - 1) <= 10_000


def test_a_packing_of_a_torus_attains_the_limit_of_any_steps() -> None:
    problem = problem_of("torus:4x6")
    group = problem_group(problem)
    assert not can_price(problem, group)
    fabric = problem.topology
    collective = Collective.on(fabric, "allgather")
    rate = bound(fabric, collective)
    limit = StepBound(5, static_ratio(fabric, collective, rate), StaticLimit(rate))
    found = tree_packing(problem, limit, deadline=Deadline(), group=group)
    assert found.bound is limit and found.is_exact
    assert sum(found.durations) == Fraction(23, 4)
    for tree in found.trees:
        check_tree(problem, tree.demand, 5, tree.sends)

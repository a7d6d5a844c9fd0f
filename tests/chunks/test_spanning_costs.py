"""What the cheapest trees to every rank cost: against paths through all sets of ranks, by networkx."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.chunks.bounds.spanning_check import spanning_costs
from arborcast.synth.chunks.bounds.step_certificate import TreeDual
from arborcast.synth.chunks.bounds.step_check import can_check_trees, certified_ratio
from arborcast.synth.errors import InputError
from tests.support.chunk_problems import problem_of

NEVER = 1 << 40


@st.composite
def costs(draw: st.DrawFn) -> np.ndarray:
    """Of up to 3 steps and 5 ranks; sends that cannot be cost `NEVER`."""
    steps, ranks = draw(st.integers(1, 3)), draw(st.integers(2, 5))
    price = st.sampled_from([0, 1, 2, 3, 5, NEVER])
    return np.array([[[draw(price) for _ in range(ranks)] for _ in range(ranks)] for _ in range(steps)])


def by_all_sets(between: np.ndarray, root: int) -> int:
    """The least cost from the root to everybody, through every set of ranks after each step."""
    steps, ranks, _ = between.shape
    graph = networkx.DiGraph()
    for step in range(steps):
        for size in range(1, ranks + 1):
            for held in combinations(range(ranks), size):
                absent = [rank for rank in range(ranks) if rank not in held]
                price = {rank: min(int(between[step, holder, rank]) for holder in held) for rank in absent}
                for many in range(len(absent) + 1):
                    for entered in combinations(absent, many):
                        cost = sum(price[rank] for rank in entered)
                        if cost < NEVER:
                            after = tuple(sorted((*held, *entered)))
                            graph.add_edge((step, held), (step + 1, after), weight=cost)
    try:
        return int(networkx.shortest_path_length(graph, (0, (root,)), (steps, tuple(range(ranks))), "weight"))
    except networkx.NetworkXNoPath:
        return NEVER


@settings(deadline=None, max_examples=60)
@given(costs())
def test_costs_are_those_of_the_cheapest_way_through_all_sets(between: np.ndarray) -> None:
    found = spanning_costs(between, NEVER)
    assert [min(cost, NEVER) for cost in found] == [by_all_sets(between, rank) for rank in range(len(found))]


def test_how_many_ranks_there_may_be() -> None:
    assert can_check_trees(problem_of("ring:18"))
    more = problem_of("ring:19")
    assert not can_check_trees(more)
    with pytest.raises(InputError, match="at most 12 targets, got 18"):
        certified_ratio(more, 9, TreeDual(((Fraction(0),) * 38,) * 9))

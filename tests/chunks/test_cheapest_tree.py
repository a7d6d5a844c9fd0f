"""The cheapest tree of the time-expanded graph against a search over who holds the block after each step."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.trees.pricing import TreeSearch, run_exactly
from arborcast.synth.collective import Demand
from arborcast.synth.errors import InfeasibleError, InputError
from arborcast.synth.topology import Link, Topology
from tests.support.chunk_problems import check_tree, problem_of, problems
from tests.support.strategies import topologies as drawn_topologies


@st.composite
def priced(draw):
    """A problem with at most 5 ranks, one of its demands, S, and small integer prices (many of them 0)."""
    problem = draw(problems(5))
    topology = problem.topology
    demand = draw(st.integers(0, len(problem.demands) - 1))
    steps = problem.latency + draw(st.integers(0, 1))
    price = st.integers(0, 9)
    row = st.lists(price, min_size=len(topology.links), max_size=len(topology.links))
    return problem, demand, steps, np.array(draw(st.lists(row, min_size=steps, max_size=steps)))


def cost_by_holders(problem: ChunkProblem, demand: Demand, steps: int, prices) -> int:
    """The least cost, by trying everything: from each set of holders every set of new ones, step by step."""
    costs = {frozenset(demand.sources): 0}
    for step in range(steps):
        after: dict[frozenset[int], int] = {}
        for holders, cost in costs.items():
            entry: dict[int, int] = {}
            for route in problem.routes:
                if route.src in holders and route.dst not in holders:
                    price = sum(int(prices[step][link]) for link in route.links)
                    entry[route.dst] = min(price, entry.get(route.dst, price))
            for count in range(len(entry) + 1):
                for new in combinations(sorted(entry), count):
                    held, total = holders | set(new), cost + sum(entry[rank] for rank in new)
                    after[held] = min(total, after.get(held, total))
        costs = after
    return min(cost for holders, cost in costs.items() if demand.targets <= holders)


@settings(max_examples=150)
@given(priced())
def test_costs_what_brute_force_finds(case):
    problem, index, steps, prices = case
    demand = problem.demands[index]
    expected = cost_by_holders(problem, demand, steps, prices)
    for kind in (np.int64, np.float64):
        cost, tree = TreeSearch(problem, index, steps).run(prices.astype(kind))
        assert cost == expected
        check_tree(problem, index, steps, tree)
        assert expected == sum(prices[t][e] for r, t in tree for e in problem.routes[r].links)


@settings(max_examples=25)
@given(priced())
def test_integers_of_any_size_are_exact(case):
    problem, index, steps, prices = case
    huge = 10**40
    whole = [[huge * int(p) for p in row] for row in prices]
    cost, tree = run_exactly(TreeSearch(problem, index, steps).run, problem, whole, TreeSearch.WHOLE_BITS)
    assert cost == huge * cost_by_holders(problem, problem.demands[index], steps, prices)
    check_tree(problem, index, steps, tree)


@settings(max_examples=40)
@given(st.data())
def test_several_sources_serve_together(data):
    topology = data.draw(drawn_topologies(max_ranks=5, min_ranks=4, switches=0))
    ranks = data.draw(st.permutations(range(topology.ranks)))
    demand = Demand(frozenset(ranks[:2]), frozenset(ranks[2:4]))
    problem = ChunkProblem(topology, (demand,), problem_of(topology).routes)
    steps = problem.latency + 1
    prices = np.array([[(3 * t + 5 * e) % 7 for e in range(len(topology.links))] for t in range(steps)])
    cost, tree = TreeSearch(problem, 0, steps).run(prices)
    assert cost == cost_by_holders(problem, demand, steps, prices)
    check_tree(problem, 0, steps, tree)


def line(ranks: int) -> ChunkProblem:
    """0 - 1 - 2 - ..., a broadcast from rank 0."""
    links = [Link(a, b, Fraction(1)) for a in range(ranks) for b in (a - 1, a + 1) if 0 <= b < ranks]
    return problem_of(Topology.build("line", ranks, links), "broadcast")


def test_waits_where_later_is_cheaper():
    problem = line(3)
    ends = [(link.src, link.dst) for link in problem.topology.links]
    prices = {(0, 1): (5, 1, 9), (1, 2): (0, 8, 2)}  # of each step; waiting costs nothing
    table = np.array([[prices.get(end, (0, 0, 0))[step] for end in ends] for step in range(3)])
    cost, tree = TreeSearch(problem, 0, 3).run(table)
    assert cost == 3
    assert [(problem.routes[route].src, problem.routes[route].dst, step) for route, step in tree] == [
        (0, 1, 1),
        (1, 2, 2),
    ]


def test_a_switch_is_paid_link_by_link():
    hub = Topology.build(
        "hub", 3, [Link(a, b, Fraction(1)) for r in range(3) for a, b in ((r, 3), (3, r))], ["hub"]
    )
    problem = problem_of(hub, "broadcast")
    prices = np.array([[10 if link.dst == 3 else 1 for link in hub.links]] * 2)
    assert TreeSearch(problem, 0, 2).run(prices)[0] == 22  # each send pays 10 to go up and 1 to go down


def test_refuses_what_has_no_answer():
    problem = line(4)
    with pytest.raises(InfeasibleError, match="rank 3 cannot be reached in 2 steps, only in 3"):
        TreeSearch(problem, 0, 2)
    with pytest.raises(InputError, match="steps must be at least 1, got 0"):
        TreeSearch(problem, 0, 0)
    oneway = Topology.build("oneway", 2, [Link(1, 0, Fraction(1))])
    with pytest.raises(InfeasibleError, match="no way leads to rank 1"):
        TreeSearch(problem_of(oneway, "broadcast"), 0, 2)


def test_refuses_what_would_take_too_long():
    problem = problem_of("full:24", "broadcast")
    with pytest.raises(InputError, match="23 targets among 24 ranks in 2 steps are too many"):
        TreeSearch(problem, 0, 2)


def test_refuses_words_that_overflow():
    problem = line(3)
    with pytest.raises(OverflowError, match="int64 prices"):
        TreeSearch(problem, 0, 2).run(np.full((2, 4), 1 << 59, dtype=np.int64))
    found = run_exactly(TreeSearch(problem, 0, 2).run, problem, [[1 << 59] * 4] * 2, TreeSearch.WHOLE_BITS)
    assert found[0] == 1 << 60

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies as catalog
from arborcast.synth.bounds import bound
from arborcast.synth.certificate import Cut
from arborcast.synth.chunks.bounds.step_certificate import StaticLimit, TreeDual
from arborcast.synth.chunks.bounds.step_check import (
    MOST_TREE_TARGETS,
    certified_ratio,
    static_ratio,
)
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.collective import Collective, Demand
from arborcast.synth.errors import InputError
from arborcast.synth.topology import Link, Topology
from tests.support.chunk_problems import least_ratio, problem_of, small_problems
from tests.support.timed_trees import all_trees, cost

HALF = Fraction(1, 2)


def drawn_table(draw: Callable, problem: ChunkProblem, steps: int) -> list[list[Fraction]]:
    """Lengths that keep the rule."""
    table = [[draw(st.integers(0, 5)) for _ in problem.topology.links] for _ in range(steps)]
    largest = max(sum(map(int.__mul__, problem.capacities, row)) for row in table)
    return [[Fraction(entry, max(largest, 1)) for entry in row] for row in table]


def frozen(table: list[list[Fraction]]) -> tuple[tuple[Fraction, ...], ...]:
    return tuple(map(tuple, table))


@given(st.data())
@settings(max_examples=60)
def test_the_ratio_of_trees_is_that_of_all_trees_listed(data):
    problem, steps = data.draw(small_problems())
    table = drawn_table(data.draw, problem, steps)
    expected = sum(
        min(cost(problem, tree, table) for tree in all_trees(problem, demand, steps))
        for demand in problem.demands
    )
    assert certified_ratio(problem, steps, TreeDual(frozen(table))) == expected


@given(st.data())
@settings(max_examples=40)
def test_no_lengths_prove_more_than_the_best_packing(data):
    problem, steps = data.draw(small_problems())
    table = drawn_table(data.draw, problem, steps)
    assert certified_ratio(problem, steps, TreeDual(frozen(table))) <= least_ratio(problem, steps)


@given(st.data())
@settings(max_examples=30)
def test_lengths_of_any_number_of_digits_are_exact(data):
    """Beyond int64 the same is done in Python integers."""
    problem, steps = data.draw(small_problems())
    table = drawn_table(data.draw, problem, steps)
    less = Fraction(10**30, 10**30 + 57)
    finer = [[length * less for length in row] for row in table]
    ratios = [certified_ratio(problem, steps, TreeDual(frozen(each))) for each in (table, finer)]
    assert ratios[1] == ratios[0] * less


# Three ranks in a line, 0 -> 1 -> 2 with 1 and 2 chunks a round: a broadcast from 0 in two steps.
LINE = Topology.build("line", 3, [Link(0, 1, Fraction(1)), Link(1, 2, Fraction(2))])
BROADCAST = problem_of(LINE, "broadcast")


ZERO = [[Fraction(0), Fraction(0)], [Fraction(0), Fraction(0)]]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (ZERO[:1], "needs a length for each of 2 links in 2 steps"),
        ([ZERO[0], [Fraction(0)]], "needs a length for each of 2 links in 2 steps"),
        ([[Fraction(-1), Fraction(0)], ZERO[0]], "step 0, link 0->1: a length .* not negative, got -1"),
        ([[0.5, Fraction(0)], ZERO[0]], "a length must be a fraction and not negative, got 0.5"),
        ([[Fraction(1), Fraction(1, 9)], ZERO[0]], "step 0: .* must add up to at most 1, got 11/9"),
    ],
)
def test_trees_that_break_a_rule_are_refused(lengths, message):
    with pytest.raises(InputError, match=message):
        certified_ratio(BROADCAST, 2, TreeDual(frozen(lengths)))


def test_too_few_steps_prove_nothing():
    one_step = [[Fraction(0), Fraction(0)]]
    with pytest.raises(InputError, match="demand 0: its targets cannot all be reached in 1 steps"):
        certified_ratio(BROADCAST, 1, TreeDual(frozen(one_step)))
    with pytest.raises(InputError, match="steps must be at least 1, got 0"):
        certified_ratio(BROADCAST, 0, TreeDual(()))


def test_without_any_link_nothing_is_reached():
    apart = Topology.build("apart", 2, [])
    problem = problem_of(apart, "broadcast")
    with pytest.raises(InputError, match="cannot all be reached"):
        certified_ratio(problem, 1, TreeDual(((),)))


def test_too_many_targets_are_refused():
    ranks = MOST_TREE_TARGETS + 2
    full = catalog.load(f"full:{ranks + 1}")
    demand = Demand(frozenset({0}), frozenset(range(1, ranks)))
    problem = ChunkProblem.of(full, Collective.custom(full, [demand]))
    lengths = TreeDual((tuple(Fraction(0) for _ in full.links),))
    with pytest.raises(InputError, match="at most 12 targets, got 13"):
        certified_ratio(problem, 1, lengths)


def test_too_many_sets_of_targets_are_refused(monkeypatch):
    """Demands of 12 targets each, with none in common, have 4,095 sets each."""
    ranks = 9 * 12 + 1
    ring = Topology.build("ring", ranks, [Link(u, (u + 1) % ranks, Fraction(1)) for u in range(ranks)])
    demands = [Demand(frozenset({0}), frozenset(range(first, first + 12))) for first in range(1, ranks, 12)]
    problem = ChunkProblem.of(ring, Collective.custom(ring, demands))
    with pytest.raises(InputError, match="at most 32768 sets of targets among its 9 demands, got more"):
        certified_ratio(problem, 1, TreeDual(((Fraction(0),) * ranks,)))
    monkeypatch.setattr("arborcast.synth.chunks.bounds.step_check.MOST_SETS", 4)
    monkeypatch.setattr("arborcast.synth.chunks.bounds.step_check.MOST_TREE_TARGETS", 2)
    lengths = frozen([[Fraction(1), Fraction(0)], [Fraction(0), HALF]])
    assert certified_ratio(BROADCAST, 2, TreeDual(lengths)) == Fraction(3, 2)
    monkeypatch.setattr("arborcast.synth.chunks.bounds.step_check.MOST_SETS", 3)
    with pytest.raises(InputError, match="at most 3 sets of targets among its 1 demands"):
        certified_ratio(BROADCAST, 2, TreeDual(lengths))


RING = problem_of("ring:5")


def test_a_tree_to_everybody_costs_each_of_its_links():
    """It takes 4 of 10 links, each of which is worth 1/10 in one step of two."""
    lengths = ((Fraction(1, 10),) * 10,) * 2
    assert certified_ratio(RING, 2, TreeDual(lengths)) == 5 * Fraction(4, 10)
    with pytest.raises(InputError, match="demand 0: its targets cannot all be reached in 1 steps"):
        certified_ratio(RING, 1, TreeDual(lengths[1:]))


FAR_APART = Topology.build(
    "far apart",
    4,
    [
        Link(*hop, Fraction(1))
        for u, v in (*pairwise((0, 4, 5, 6, 7, 8, 1)), (1, 2), (1, 3))
        for hop in ((u, v), (v, u))
    ],
    list("abcde"),
)


# One way through 200 switches, which each of 12 trees to one rank passes.
CHAIN = Topology.build(
    "chain",
    13,
    [Link(u, v, Fraction(1)) for u, v in pairwise((0, *range(13, 213)))]
    + [Link(212, rank, Fraction(1)) for rank in range(1, 13)],
    [f"s{number}" for number in range(200)],
)


@pytest.mark.parametrize(
    ("fabric", "steps", "used", "sizes"),
    [
        (catalog.load("ring:8"), 1, 16, range(48, 65)),
        (catalog.load("ring:3"), 24, 6, range(48, 65)),
        (catalog.load("ring:5"), 48, 1, range(48, 65)),
        (catalog.load("full:33"), 1, 1056, (48,)),
        (FAR_APART, 1000, 16, (49,)),
        (CHAIN, 2, 212, (46, 53)),
        pytest.param(CHAIN, 2, 212, range(47, 53), marks=pytest.mark.long),
    ],
)
def test_numbers_that_words_just_hold_or_do_not(monkeypatch, fabric, steps, used, sizes):
    """Of each size the same as with numbers that have no end, also where words would wrap around."""
    problem = problem_of(fabric, "broadcast")
    links = len(fabric.links)
    for bits in sizes:
        length = Fraction((1 << bits) - 1, (1 << bits) * (links if fabric.switches else 1))
        table = frozen([[length * (link < used) for link in range(links)]] * steps)
        said = []
        for largest in (None, 0):
            with monkeypatch.context() as patch:
                if largest is not None:
                    patch.setattr("arborcast.synth.chunks.bounds.step_check._LARGEST", largest)
                try:
                    said.append(str(certified_ratio(problem, steps, TreeDual(table))))
                except InputError as error:
                    said.append(str(error))
        assert said[0] == said[1], bits


def test_lengths_far_above_one_are_refused():
    table = frozen([[Fraction((1 << 80) + 1, 1 << 40), Fraction(0)]] * 2)
    with pytest.raises(InputError, match="must add up to at most 1"):
        certified_ratio(BROADCAST, 2, TreeDual(table))


def test_demands_of_many_and_of_few_targets():
    demands = [Demand(frozenset({0}), frozenset({1, 2, 3, 4})), Demand(frozenset({1}), frozenset({2}))]
    some = ChunkProblem.of(RING.topology, Collective.custom(RING.topology, demands))
    assert certified_ratio(some, 2, TreeDual(((Fraction(1, 10),) * 10,) * 2)) == Fraction(4 + 1, 10)


def test_a_static_limit_is_not_for_a_problem():
    limit = StaticLimit(bound(LINE, Collective.on(LINE, "broadcast", root=0)))
    with pytest.raises(InputError, match="use static_ratio"):
        certified_ratio(BROADCAST, 2, limit)


@pytest.mark.parametrize(
    ("kind", "root", "ratio"),
    [
        ("allgather", None, Fraction(7, 6)),
        ("reduce-scatter", None, Fraction(7, 6)),
        ("gather", 0, Fraction(7, 6)),
        ("scatter", 0, Fraction(7, 6)),
        ("alltoall", None, Fraction(8, 3)),
        ("broadcast", 0, Fraction(1, 6)),
        ("reduce", 0, Fraction(1, 6)),
    ],
)
def test_static_ratios_of_dgx1(kind, root, ratio):
    fabric = catalog.load("dgx1")
    collective = Collective.on(fabric, kind, root=root)
    assert static_ratio(fabric, collective, bound(fabric, collective)) == ratio


def test_static_limits_that_do_not_hold_are_refused():
    fabric = catalog.load("dgx1")
    gathered = Collective.on(fabric, "allgather")
    limit = bound(fabric, gathered)
    with pytest.raises(InputError, match=r"proves .* GB/s, the bound says"):
        static_ratio(fabric, gathered, replace(limit, rate=limit.rate - 1))
    assert isinstance(limit.certificate, Cut)
    wrong = replace(limit.certificate, capacity=limit.certificate.capacity / 2)
    with pytest.raises(InputError, match="the certificate says"):
        static_ratio(fabric, gathered, replace(limit, certificate=wrong))
    everywhere = Collective.on(fabric, "allreduce")
    with pytest.raises(InputError, match="composed of two halves"):
        static_ratio(fabric, everywhere, bound(fabric, everywhere))
    apart = Topology.build("apart", 2, [])
    broadcast = Collective.on(apart, "broadcast", root=0)
    with pytest.raises(InputError, match="no schedule of this broadcast at all, its rate is 0"):
        static_ratio(apart, broadcast, bound(apart, broadcast))

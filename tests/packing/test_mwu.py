"""Multiplicative weights: within epsilon of the optimum, and it knows the optimum's limit by itself."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies as catalog
from arborcast.synth.bounds import bound
from arborcast.synth.bounds.capacity_lp import split_bandwidth
from arborcast.synth.collective import Collective
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InfeasibleError, InputError
from arborcast.synth.packing.mwu import weigh
from arborcast.synth.packing.weighted_tree import congestion
from arborcast.synth.topology import Link, Topology
from tests.support.strategies import topologies as graphs

TENTH = Fraction(1, 10)


def optimum(topology, kind, root=0):
    """The exact rate of trees, unbalanced switches included."""
    return split_bandwidth(topology, Collective.on(topology, kind, root=root)).rate


def ring(ranks):
    return catalog.load(f"ring:{ranks}")


def assert_spanning(tree, topology):
    assert sorted(tree.depth) == list(range(topology.ranks))
    for edge in tree.edges:
        assert all(vertex >= topology.ranks for vertex in edge.via)


@pytest.mark.parametrize("kind", ["broadcast", "allgather", "allreduce"])
@given(st.booleans().flatmap(lambda symmetric: graphs(max_ranks=5, symmetric=symmetric)), st.data())
@settings(max_examples=20, deadline=None)
def test_within_epsilon_of_the_optimum_and_below_its_limit(kind, topology, data):
    everyone = list(range(topology.ranks))
    root = data.draw(st.sampled_from(everyone))
    roots = {"broadcast": [root], "allgather": everyone, "allreduce": None}[kind]
    packing = weigh(topology, roots, epsilon=TENTH)
    rates = defaultdict(Fraction)
    for carrier in packing.carriers:
        rates[carrier.root if roots else None] += carrier.weight
    (rate,) = set(rates.values())
    assert len(rates) == len(roots or [None])
    best = optimum(topology, kind, root) / len(rates)
    facts = dict(packing.settings)
    assert (1 - TENTH) * best <= rate <= best <= Fraction(facts["limit"])
    assert rate >= (1 - TENTH) * Fraction(facts["limit"])
    assert facts["stopped"] == "guarantee"
    assert congestion(packing.carriers, topology) == 1
    for carrier in packing.carriers:
        assert_spanning(carrier.tree, topology)
        if carrier.into is not None:
            assert_spanning(replace(carrier, out=carrier.into).tree, topology)


def test_a_smaller_epsilon_comes_closer():
    topology = ring(6)
    rates = []
    for epsilon in (Fraction(1, 2), Fraction(1, 50)):
        packing = weigh(topology, range(6), epsilon=epsilon)
        rates.append(sum(tree.weight for tree in packing.trees))
        assert rates[-1] >= (1 - epsilon) * Fraction(12, 5)  # 2 GB/s in, from 5 others; 6 roots
    assert rates[0] <= rates[1] <= Fraction(12, 5)


def test_what_is_enough_ends_the_run_early():
    topology = ring(6)
    best = bound(topology, Collective.on(topology, "allgather")).rate / 6
    whole = dict(weigh(topology, range(6), epsilon=Fraction(1, 50)).settings)
    packing = weigh(topology, range(6), epsilon=Fraction(1, 50), stop_at=best * 9 / 10)
    facts = dict(packing.settings)
    assert facts["stopped"] == "enough"
    assert facts["iterations"] < whole["iterations"]
    assert sum(tree.weight for tree in packing.trees) / 6 >= best * 9 / 10


def test_iterations_and_deadline_end_a_run_that_has_no_guarantee():
    topology = ring(7)
    few = weigh(topology, range(7), epsilon=Fraction(1, 1000), iterations=20)
    assert dict(few.settings)["stopped"] == "iterations"
    late = weigh(topology, range(7), epsilon=Fraction(1, 1000), deadline=Deadline.after(0))
    assert dict(late.settings)["stopped"] == "deadline"
    for packing in (few, late):
        assert congestion(packing.carriers, topology) == 1
        assert {tree.root for tree in packing.trees} == set(range(7))


def test_the_same_seed_gives_the_same_trees():
    topology = ring(5)
    first, again, other = (weigh(topology, range(5), seed=seed) for seed in (3, 3, 4))
    assert (first.trees, first.settings) == (again.trees, again.settings)
    assert first.trees != other.trees


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"epsilon": Fraction(0)}, "epsilon: must be above 0 and below 1, got 0"),
        ({"epsilon": Fraction(1)}, "epsilon: must be above 0 and below 1, got 1"),
        ({"epsilon": Fraction(-1, 2)}, "epsilon: must be above 0 and below 1, got -1/2"),
        ({"iterations": 0}, "iterations: must be at least 1, got 0"),
    ],
)
def test_numbers_out_of_range(knobs, message):
    with pytest.raises(InputError, match=message):
        weigh(ring(3), [0], **knobs)


def test_a_rank_that_cannot_be_reached_is_an_answer():
    topology = Topology.build("pair", 3, [Link(0, 1, Fraction(1)), Link(1, 0, Fraction(1))])
    with pytest.raises(InfeasibleError, match="2"):
        weigh(topology, [0])


def test_a_single_commodity_stops_at_the_deadline_inside_a_phase():
    # One phase gives the root the 6 units that it can send: at least as many trees as links out of it.
    topology = catalog.load("dgx1")
    late = weigh(topology, [0], deadline=Deadline.after(0))
    assert dict(late.settings)["stopped"] == "deadline"
    assert dict(late.settings)["iterations"] == len(late.trees) == 1
    assert congestion(late.carriers, topology) == 1


def test_a_phase_that_fills_a_narrow_link_very_often_stays_within_integers():
    cables: Any = [(1, 4, 5, 5), (2, 3, "1/4", "1/4"), (3, 4, 50, 50), (1, 0, 17, 7)]  # 3 and 4 are switches
    links = [Link(one, other, Fraction(there)) for one, other, there, _ in cables]
    links += [Link(other, one, Fraction(back)) for one, other, _, back in cables]
    packing = weigh(Topology.build("narrow", 3, links, switches=["a", "b"]), [2])
    assert sum(tree.weight for tree in packing.trees) == Fraction(1, 4)

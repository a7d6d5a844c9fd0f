"""Trees become schedules that do what the collective asks, replayed with contributor sets."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.certificate import Bound, Cut
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import CollectiveError
from arborcast.synth.packing.to_schedule import lift
from arborcast.synth.packing.weighted_tree import congestion
from arborcast.synth.schedule import Method, Transfer
from arborcast.synth.topology import Link, Topology
from arborcast.synth.tree import Tree, TreeEdge
from arborcast.synth.verification.verifier import verify
from tests.fuzzing.replay import objections
from tests.support.carriers import carrier

METHOD = Method("trees")
NO_LIMIT = Bound(Fraction(10**6), Cut(frozenset({0}), Fraction(10**6)))


def full(ranks, switches=0):
    """Everything linked with everything at 1 GB/s."""
    size = ranks + switches
    links = [Link(u, v, Fraction(1)) for u in range(size) for v in range(size) if u != v]
    return Topology.build("full", ranks, links, [f"switch{i}" for i in range(switches)])


def table(schedule):
    """(chunk, src, dst, step, reduce) of each transfer."""
    return [(t.chunk, t.src, t.dst, t.step, t.reduce) for t in schedule.transfers]


def carriers_of(topology, collective, trees):
    """Trees, or for an allreduce pairs of them, over the links that data spreads along."""
    fabric = (
        topology if collective.kind is Kind.ALLREDUCE or not collective.kind.reduces else topology.reversed()
    )
    return [carrier(fabric, *tree) if isinstance(tree, tuple) else carrier(fabric, tree) for tree in trees]


def lifted_along(topology, collective, *trees):
    return lift(topology, collective, METHOD, NO_LIMIT, carriers_of(topology, collective, trees))


def test_a_broadcast_goes_down_the_tree():
    #   0 -> 1 -> 2
    #   `--> 3
    tree = Tree(0, Fraction(1), (TreeEdge(0, 1), TreeEdge(0, 3), TreeEdge(1, 2)))
    topology = full(4)
    schedule = lifted_along(topology, Collective.on(topology, "broadcast"), tree)
    assert table(schedule) == [
        (0, 0, 1, 0, False),
        (0, 0, 3, 0, False),
        (0, 1, 2, 1, False),
    ]
    assert objections(schedule) == []


def test_a_reduce_comes_up_the_tree_as_late_as_its_subtrees_ask():
    tree = Tree(0, Fraction(1), (TreeEdge(0, 1, (4,)), TreeEdge(0, 3), TreeEdge(1, 2)))
    topology = full(4, switches=1)
    schedule = lifted_along(topology, Collective.on(topology, "reduce"), tree)
    assert schedule.transfers == (
        Transfer(0, 2, 1, 0, reduce=True),
        Transfer(0, 3, 0, 0, reduce=True),
        Transfer(0, 1, 0, 1, reduce=True, via=(4,)),
    )
    assert objections(schedule) == []


def test_an_allreduce_reduces_first_and_starts_at_the_centre():
    chain = Tree(0, Fraction(1), (TreeEdge(0, 1), TreeEdge(1, 2)))
    topology = full(3)
    schedule = lifted_along(topology, Collective.on(topology, "allreduce"), (chain, chain))
    assert schedule.chunks[0].owner == 1
    assert table(schedule) == [
        (0, 0, 1, 0, True),
        (0, 2, 1, 0, True),
        (0, 1, 0, 1, False),
        (0, 1, 2, 1, False),
    ]
    assert objections(schedule) == []


def test_vias_of_the_gathering_tree_are_turned_round():
    out = Tree(0, Fraction(1), (TreeEdge(0, 1, (2, 3)),))
    into = Tree(0, Fraction(1), (TreeEdge(0, 1, (3,)),))
    topology = full(2, switches=2)
    schedule = lifted_along(topology, Collective.on(topology, "allreduce"), (out, into))
    assert schedule.transfers == (
        Transfer(0, 1, 0, 0, reduce=True, via=(3,)),
        Transfer(0, 0, 1, 1, via=(2, 3)),
    )


def test_equal_trees_become_one_chunk():
    tree = Tree(0, Fraction(1), (TreeEdge(0, 1),))
    topology = full(2)
    collective = Collective.on(topology, "broadcast")
    schedule = lifted_along(topology, collective, tree, tree)
    assert len(schedule.chunks) == 1
    assert schedule.rate == 1


def test_a_relay_passed_twice_receives_once():
    # The edges 0 -> 1 and 1 -> 2 both pass relay 3, which has the chunk after the first.
    tree = Tree(0, Fraction(1), (TreeEdge(0, 1, (3,)), TreeEdge(1, 2, (3,))))
    topology = full(4)
    collective = Collective.on(topology, "broadcast", ranks=[0, 1, 2])
    schedule = lifted_along(topology, collective, tree)
    assert table(schedule) == [
        (0, 0, 3, 0, False),
        (0, 3, 1, 1, False),
        (0, 3, 2, 1, False),
    ]
    assert objections(schedule) == []


def test_a_relay_adds_up_and_sends_once():
    tree = Tree(0, Fraction(1), (TreeEdge(0, 1, (3,)), TreeEdge(0, 2, (3,))))
    topology = full(4)
    collective = Collective.on(topology, "reduce", ranks=[0, 1, 2])
    schedule = lifted_along(topology, collective, tree)
    assert table(schedule) == [
        (0, 1, 3, 0, True),
        (0, 2, 3, 0, True),
        (0, 3, 0, 1, True),
    ]
    assert objections(schedule) == []


def test_a_relay_that_serves_nobody_is_left_out():
    # The second edge would enter relay 3 through relay 4, but 3 already has the chunk.
    tree = Tree(0, Fraction(1), (TreeEdge(0, 1, (3,)), TreeEdge(0, 2, (4, 3))))
    collective = Collective.on(full(5), "broadcast", ranks=[0, 1, 2])
    schedule = lifted_along(full(5), collective, tree)
    assert table(schedule) == [
        (0, 0, 3, 0, False),
        (0, 3, 1, 1, False),
        (0, 3, 2, 1, False),
    ]


def test_the_ranks_of_a_collective_need_not_come_first():
    topology = full(6)
    collective = Collective.on(topology, "broadcast", root=4, ranks=[4, 5])
    schedule = lifted_along(topology, collective, Tree(4, Fraction(1), (TreeEdge(4, 5, (1,)),)))
    assert table(schedule) == [(0, 4, 1, 0, False), (0, 1, 5, 1, False)]
    assert objections(schedule) == []


@st.composite
def relayed_trees(draw, members, relays, switches, root):
    """A tree over the members whose edges pass up to three relays and switches."""
    inner = list(range(members, members + relays + switches))
    order = [root, *draw(st.permutations([rank for rank in range(members) if rank != root]))]
    edges = []
    for position, rank in enumerate(order[1:]):
        via = draw(st.lists(st.sampled_from(inner), max_size=3, unique=True)) if inner else []
        edges.append(TreeEdge(order[draw(st.integers(0, position))], rank, tuple(via)))
    return Tree(root, Fraction(draw(st.integers(1, 4))), tuple(edges))


@st.composite
def lifted(draw):
    """A collective of any kind among some ranks of a full graph, lifted from random trees."""
    members, relays, switches = draw(st.integers(2, 5)), draw(st.integers(0, 3)), draw(st.integers(0, 2))
    topology = full(members + relays, switches)
    kind = draw(st.sampled_from(["broadcast", "reduce", "allgather", "reduce-scatter", "allreduce"]))
    collective = Collective.on(topology, kind, root=members - 1, ranks=range(members))
    roots = [members - 1] if collective.root is not None else list(range(members))
    trees = [
        tree
        for root in roots
        for tree in draw(st.lists(relayed_trees(members, relays, switches, root), min_size=1, max_size=3))
    ]
    if kind == "allreduce":
        partners = [draw(relayed_trees(members, relays, switches, tree.root)) for tree in trees]
        mirror = draw(st.booleans())
        trees = [(out, out if mirror else into) for out, into in zip(trees, partners, strict=True)]
    carriers = carriers_of(topology, collective, trees)
    return carriers, lift(topology, collective, METHOD, NO_LIMIT, carriers)


@given(lifted())
@settings(max_examples=150)
def test_every_lifted_schedule_is_correct(case):
    _, schedule = case
    assert objections(schedule) == []
    verdict = verify(schedule)
    assert verdict.rate == schedule.rate
    assert not [line for line in verdict.errors if "bound" not in line and "certificate" not in line]


@given(lifted())
@settings(max_examples=100)
def test_lifting_never_adds_load(case):
    carriers, schedule = case
    rates = {}
    for one in carriers:
        rates[one.root] = rates.get(one.root, 0) + one.weight
    if schedule.collective.kind in {Kind.ALLGATHER, Kind.REDUCE_SCATTER}:
        share = {root: Fraction(1, len(rates)) / rate for root, rate in rates.items()}
    else:
        share = dict.fromkeys(rates, 1 / sum(rates.values()))
    scaled = [replace(one, weight=one.weight * share[one.root]) for one in carriers]
    assert max(schedule.load.values()) <= congestion(scaled, schedule.topology)


def test_trees_cannot_be_lifted_into_what_is_no_tree():
    topology = full(3)
    with pytest.raises(CollectiveError, match=r"alltoall: trees are lifted into broadcast, .* allreduce"):
        lift(topology, Collective.on(topology, "alltoall"), METHOD, NO_LIMIT, [])


@pytest.mark.parametrize("denominator", [7, 10**18 + 9, 10**30 + 57])
def test_the_rate_is_exact_whatever_the_weights_are(denominator):
    """Two chains of ranks and a star: link 0>1 carries the first and the star, all others less."""
    topology = full(3)
    odd = Fraction(1, denominator)
    trees = [
        Tree(0, 1 - odd, (TreeEdge(0, 1), TreeEdge(1, 2))),
        Tree(0, odd, (TreeEdge(0, 1), TreeEdge(0, 2))),
        Tree(0, odd, (TreeEdge(0, 2), TreeEdge(2, 1))),
    ]
    carriers = [carrier(topology, tree) for tree in trees]
    cut = Bound(Fraction(2), Cut(frozenset({0}), Fraction(2)))
    schedule = lift(topology, Collective.on(topology, "broadcast"), METHOD, cut, carriers)
    assert schedule.rate == 1 + odd
    assert verify(schedule).correct

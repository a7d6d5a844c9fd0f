"""Trees become schedules that do what the collective asks, replayed with contributor sets."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from operator import attrgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.certificate import Bound, Cut
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import CollectiveError
from arborcast.synth.packing.to_schedule import lift
from arborcast.synth.packing.weighted_tree import congestion
from arborcast.synth.schedule import Method
from arborcast.synth.topology import Link, Topology
from arborcast.synth.tree import Tree, TreeEdge
from arborcast.synth.verification.verifier import verify
from tests.fuzzing.replay import objections
from tests.support.carriers import carrier
from tests.support.drawn_in_network import drawn_transfers

METHOD = Method("trees")
NO_LIMIT = Bound(Fraction(10**6), Cut(frozenset({0}), Fraction(10**6)))


def full(ranks, switches=0):
    """Everything linked with everything at 1 GB/s."""
    size = ranks + switches
    links = [Link(u, v, Fraction(1)) for u in range(size) for v in range(size) if u != v]
    return Topology.build("full", ranks, links, [f"switch{i}" for i in range(switches)])


def carriers_of(topology, collective, trees):
    """Trees, or for an allreduce pairs of them, over the links that data spreads along."""
    fabric = (
        topology if collective.kind is Kind.ALLREDUCE or not collective.kind.reduces else topology.reversed()
    )
    return [carrier(fabric, *tree) if isinstance(tree, tuple) else carrier(fabric, tree) for tree in trees]


def tree_of(edges):
    """From its edges in order, each a word PARENT>via>CHILD; the first leaves the root."""
    paths = [tuple(map(int, word.split(">"))) for word in edges.split()]
    return Tree(paths[0][0], Fraction(1), tuple(TreeEdge(path[0], path[-1], path[1:-1]) for path in paths))


@pytest.mark.parametrize(
    ("kind", "fabric", "ranks", "trees", "steps"),
    [
        ("broadcast", full(4), None, ["0>1 0>3 1>2"], ["0>1:0 0>3:0", "1>2:0"]),
        # As late as its subtrees ask.
        ("reduce", full(4, 1), None, ["0>4>1 0>3 1>2"], ["2>1:0+ 3>0:0+", "1>4>0:0+"]),
        # Starts at the centre.
        ("allreduce", full(3), None, [("0>1 1>2", "0>1 1>2")], ["0>1:0+ 2>1:0+", "1>0:0 1>2:0"]),
        # Ways of the gathering tree are turned round.
        ("allreduce", full(2, 2), None, [("0>2>3>1", "0>3>1")], ["1>3>0:0+", "0>2>3>1:0"]),
        # Equal trees become one chunk.
        ("broadcast", full(2), None, ["0>1", "0>1"], ["0>1:0"]),
        # Relay 3 is passed twice: it receives once, or adds up and sends once.
        ("broadcast", full(4), [0, 1, 2], ["0>3>1 1>3>2"], ["0>3:0", "3>1:0 3>2:0"]),
        ("reduce", full(4), [0, 1, 2], ["0>3>1 0>3>2"], ["1>3:0+ 2>3:0+", "3>0:0+"]),
        # Relay 4 would lead to 3, which has the chunk already.
        ("broadcast", full(5), [0, 1, 2], ["0>3>1 0>4>3>2"], ["0>3:0", "3>1:0 3>2:0"]),
        # The ranks of a collective need not come first.
        ("broadcast", full(6), [4, 5], ["4>1>5"], ["4>1:0", "1>5:0"]),
    ],
)
def test_trees_that_are_drawn(kind, fabric, ranks, trees, steps):
    collective = Collective.on(fabric, kind, root=ranks[0] if ranks else 0, ranks=ranks)
    values = [tree_of(it) if isinstance(it, str) else tuple(map(tree_of, it)) for it in trees]
    schedule = lift(fabric, collective, METHOD, NO_LIMIT, carriers_of(fabric, collective, values))
    key = attrgetter("step", "chunk", "src", "dst")
    assert list(schedule.transfers) == sorted(drawn_transfers(steps), key=key)
    assert len(schedule.chunks) == 1
    assert schedule.chunks[0].owner == (1 if (kind, fabric.size) == ("allreduce", 3) else collective.ranks[0])
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

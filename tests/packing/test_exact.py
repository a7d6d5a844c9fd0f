"""Exact packings: brute force over all cuts says what is possible, an own checker what was packed."""

from __future__ import annotations

import time
from fractions import Fraction
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import CollectiveError, InputError, TimedOutError, TopologyError
from arborcast.synth.kernels.arborescence import LogicalGraph
from arborcast.synth.packing import packer
from arborcast.synth.packing.capacity_repair import fitting_tree
from arborcast.synth.packing.exact import pack_exactly
from arborcast.synth.packing.tight_cuts import OverloadedCutError
from arborcast.synth.topology import Link, Topology
from arborcast.topologies import load

F = Fraction


def cabled(name, ranks, cables, switches=()):
    """Links both ways from (u, v, GB/s)."""
    links = [Link(a, b, F(rate)) for u, v, rate in cables for a, b in ((u, v), (v, u))]
    return Topology.build(name, ranks, links, switches)


DGX1 = load("dgx1")
A100 = load("dgx-a100:boxes=2")


def equal(topology, rate):
    return dict.fromkeys(range(topology.ranks), rate)


def most(topology, weights):
    """The largest factor on these demands that every cut allows, by trying all cuts."""
    size, ranks = topology.size, topology.ranks
    subsets = np.arange(1 << size)
    inside = [(subsets >> vertex & 1).astype(bool) for vertex in range(size)]
    capacity = np.zeros(len(subsets), dtype=np.int64)
    for link, units in zip(topology.links, topology.capacities, strict=True):
        capacity += units * (inside[link.src] & ~inside[link.dst])
    demand = sum(int(weight) * inside[rank] for rank, weight in weights.items())
    binding = (demand > 0) & ~np.logical_and.reduce(inside[:ranks])
    pairs = set(zip(capacity[binding].tolist(), demand[binding].tolist(), strict=True))
    return min(F(c, d) for c, d in pairs) * topology.bandwidth_unit


def assert_packs(packing, topology, demands):
    """Every tree spans along real links, weights meet the demands, no link carries more than it has."""
    load = dict.fromkeys(topology.bandwidth, F(0))
    sent = dict.fromkeys(range(topology.ranks), F(0))
    for tree in packing.trees:
        assert tree.weight > 0
        sent[tree.root] += tree.weight
        reached = {tree.root}
        for edge in tree.edges:
            assert edge.parent in reached
            assert edge.child not in reached
            assert all(vertex >= topology.ranks for vertex in edge.via)
            reached.add(edge.child)
            for pair in pairwise((edge.parent, *edge.via, edge.child)):
                load[pair] += tree.weight
        assert reached == set(range(topology.ranks))
    assert sent == {rank: F(demands.get(rank, 0)) for rank in range(topology.ranks)}
    assert all(load[pair] <= topology.bandwidth[pair] for pair in load)


def assert_named_cut_is_overloaded(error, topology, demands):
    inside = error.side
    assert not set(range(topology.ranks)) <= inside
    assert error.capacity == sum(
        link.bandwidth for link in topology.links if link.src in inside and link.dst not in inside
    )
    assert error.demand == sum(rate for rank, rate in demands.items() if rank in inside)
    assert error.demand > error.capacity


def units_per_root(packing, rate):
    """k: how many trees of one common weight each root has."""
    pieces = [tree.weight / rate for tree in packing.trees]
    return int(np.lcm.reduce([piece.denominator for piece in pieces]))


rates = st.sampled_from([F(1), F(2), F(3), F(25), F(50, 3), F(1, 2), F(300)])


@st.composite
def symmetric_topologies(draw, largest=7):
    """A random spanning tree of cables and some more, over ranks and switches."""
    ranks, switches = draw(st.integers(2, largest)), draw(st.integers(0, 3))
    size = ranks + switches
    order = draw(st.permutations(range(size)))
    pairs = {(order[draw(st.integers(0, place - 1))], order[place]) for place in range(1, size)}
    for _ in range(draw(st.integers(0, 2 * size))):
        u, v = draw(st.integers(0, size - 1)), draw(st.integers(0, size - 1))
        if u != v:
            pairs.add((min(u, v), max(u, v)))
    cables = [(u, v, draw(rates)) for u, v in sorted(pairs)]
    return cabled("drawn", ranks, cables, [f"s{number}" for number in range(switches)])


@st.composite
def circulations(draw):
    """Directed cycles on top of each other: every vertex passes on what it gets, no link need have a twin."""
    ranks, switches = draw(st.integers(2, 6)), draw(st.integers(0, 3))
    links = []
    for _ in range(draw(st.integers(1, 6))):
        length = draw(st.integers(2, ranks + switches))
        cycle = draw(st.permutations(range(ranks + switches)))[:length]
        rate = draw(rates)
        links += [Link(u, v, rate) for u, v in pairwise([*cycle, cycle[0]])]
    return Topology.build("drawn", ranks, links, [f"s{number}" for number in range(switches)])


@st.composite
def digraphs(draw):
    """Any links, no switches."""
    ranks = draw(st.integers(2, 6))
    pairs = st.tuples(st.integers(0, ranks - 1), st.integers(0, ranks - 1)).filter(
        lambda pair: pair[0] != pair[1]
    )
    chosen = draw(st.lists(pairs, min_size=ranks, max_size=4 * ranks, unique=True))
    return Topology.build("drawn", ranks, [Link(u, v, draw(rates)) for u, v in chosen])


@given(
    st.one_of(symmetric_topologies(), circulations(), digraphs()),
    st.one_of(st.just([1] * 10), st.lists(st.integers(0, 5), min_size=10, max_size=10)),
    st.sampled_from([0.0, 0.1, 5.0]),
)
@settings(max_examples=120)
def test_any_demands_are_met_up_to_the_cut_and_refused_beyond(topology, weights, hop_weight):
    weights = dict(zip(range(topology.ranks), weights, strict=False))
    assume(any(weights.values()))
    best = most(topology, weights)
    assume(best > 0)
    demands = {rank: weight * best for rank, weight in weights.items()}
    packing = pack_exactly(topology, demands, hop_weight=hop_weight, attempts=1)
    assert_packs(packing, topology, demands)
    more = {rank: rate * F(1001, 1000) for rank, rate in demands.items()}
    with pytest.raises(OverloadedCutError, match=r"cut \[.*\]: its ranks must send") as caught:
        pack_exactly(topology, more)
    assert_named_cut_is_overloaded(caught.value, topology, more)


@pytest.mark.parametrize(
    ("topology", "rate", "units", "trees"),
    [
        (DGX1, F(150, 7), 6, 16),
        (load("torus:4x4"), F(4, 15), 4, 26),
        (A100, F(65, 3), 13, 26),
        (load("mi250:boxes=2"), F(166, 15), 83, 90),
        (load("dgx-a100:boxes=4"), F(25, 3), 1, 32),
        pytest.param(load("mi250:boxes=8"), F(16, 7), 1, 128, marks=pytest.mark.long),
    ],
    ids=["dgx1", "torus", "2x8 A100", "2x16 MI250", "4x8 A100", "8x16 MI250"],
)
def test_allgather_of_known_machines(topology, rate, units, trees):
    """`units` is the least possible: the rate over the common unit of it and the bandwidths, or 1."""
    packing = pack_exactly(topology, equal(topology, rate))
    assert_packs(packing, topology, equal(topology, rate))
    assert units_per_root(packing, rate) == units
    assert len(packing.trees) <= trees
    with pytest.raises(OverloadedCutError):
        pack_exactly(topology, equal(topology, rate * F(1001, 1000)))


def test_free_roots_of_different_weight():
    """A line of three with the middle one doing most: out of {0} at most 1, out of {0, 1} at most 1."""
    line = cabled("line", 3, [(0, 1, 1), (1, 2, 1)])
    demands = {0: F(1, 7), 1: F(6, 7)}
    packing = pack_exactly(line, demands)
    assert_packs(packing, line, demands)
    assert {tree.root: tree.height for tree in packing.trees} == {0: 2, 1: 1}


def test_no_demands_no_trees():
    assert pack_exactly(DGX1, {3: F(0)}).trees == ()


def test_settings_say_how_it_was_found():
    packing = pack_exactly(A100, equal(A100, F(65, 3)), seed=2, hop_weight=0.3, attempts=1)
    assert dict(packing.settings) | {"tight_cuts": 0} == {
        "tie_seed": 2, "hop_weight": "0.3", "unit": "5/3", "tight_cuts": 0,
    }  # fmt: skip


def test_disconnected_ranks_are_a_cut():
    pairs = cabled("pairs", 4, [(0, 1, 1), (2, 3, 1)])
    with pytest.raises(OverloadedCutError, match=r"cut \[0, 1\]: .* send 1/2 GB/s .* carry 0 GB/s") as caught:
        pack_exactly(pairs, {0: F(1, 2)})
    assert caught.value.side == frozenset({0, 1})


def test_a_switch_out_of_balance_is_named():
    links = [Link(0, 2, F(2)), Link(2, 1, F(1)), Link(1, 0, F(1))]
    with pytest.raises(TopologyError, match=r"switch hub: .* got 2 and 1 GB/s"):
        pack_exactly(Topology.build("odd", 2, links, ["hub"]), {0: F(1)})


@pytest.mark.parametrize(
    ("demands", "knobs", "error", "message"),
    [
        ({8: F(1)}, {}, CollectiveError, r"demand of rank 8: rank must be in 0..7"),
        ({0: F(-1)}, {}, CollectiveError, r"demand of rank 0: must not be negative, got -1 GB/s"),
        ({0: F(1)}, {"hop_weight": -1.0}, InputError, r"hop weight: must be in 0..16, got -1.0"),
        ({0: F(1)}, {"attempts": 0}, InputError, r"attempts: must be at least 1, got 0"),
        (
            {0: F(1)},
            {"deadline": Deadline.after(0.0)},
            TimedOutError,
            r"after 0 of them, did not end within the deadline of 0 s",
        ),
        ({0: F(1, 3**30), 1: F(1, 7**15)}, {}, TopologyError, r"at most 2\*\*62"),
    ],
)
def test_wrong_input_is_named(demands, knobs, error, message):
    with pytest.raises(error, match=message):
        pack_exactly(DGX1, demands, **knobs)


def test_halves_the_unit_when_no_whole_tree_fits(monkeypatch):
    """The search is made to fail as often as it takes: the trees are exact all the same, in half units."""
    failures = iter(range(packer.PATIENCE + 1))

    def stubborn(distances, parent_cost, root, remaining, random):
        if next(failures, None) is not None:
            return None, np.array([0])
        return fitting_tree(distances, parent_cost, root, remaining, random)

    monkeypatch.setattr(packer, "fitting_tree", stubborn)
    packing = pack_exactly(A100, equal(A100, F(65, 3)), attempts=1)
    assert_packs(packing, A100, equal(A100, F(65, 3)))
    assert dict(packing.settings)["unit"] == "5/6"


def test_a_link_is_kept_by_as_many_edges_as_it_has_room_for():
    """Rank 0 reaches 1, 2, 3 over one link to the hub; two of the three edges may stay on it.

    Straight ways cost 9, over the hub 2: the cheapest tree that fits is two edges over the hub, one straight.
    """
    links = [Link(0, 4, F(2)), *(Link(4, rank, F(1)) for rank in (1, 2, 3))]
    links += [Link(0, rank, F(1)) for rank in (1, 2, 3)]
    graph = LogicalGraph(Topology.build("hub", 4, links, ["hub"]))
    lengths = np.array([1 if 4 in (link.src, link.dst) else 9 for link in graph.topology.links])
    room = np.array(graph.topology.capacities)
    free = np.zeros(4, dtype=np.int64)
    routes, overused = fitting_tree(graph.distances(lengths), free, 0, room, Random(0))
    assert [graph.topology.links[index].dst for index in overused] == [4]
    assert routes.parents.tolist() == [-1, 0, 0, 0]
    assert sorted(len(routes.edge(rank)) for rank in (1, 2, 3)) == [1, 2, 2]
    assert (routes.uses() <= room).all()


def test_settings_tried_before_the_deadline_count(monkeypatch, caplog):
    """The clock jumps past the deadline when the first setting is done."""
    run, now = packer.Packer.run, [0.0]

    def slow_run(packer):
        packing = run(packer)
        now[0] = 100.0
        return packing

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(packer.Packer, "run", slow_run)
    packing = pack_exactly(DGX1, equal(DGX1, F(150, 7)), deadline=Deadline.after(10.0))
    assert_packs(packing, DGX1, equal(DGX1, F(150, 7)))
    assert "deadline after 1 of 4 settings" in caplog.text

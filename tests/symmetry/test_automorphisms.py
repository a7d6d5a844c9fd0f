"""Automorphisms of topologies, against all permutations and against networkx."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import permutations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.symmetry.automorphisms import automorphisms_of
from arborcast.synth.symmetry.permutations import closure
from arborcast.synth.topology import Link, Permutation, Switch, Topology
from arborcast.topologies import load
from tests.support.strategies import topologies


def is_automorphism(topology: Topology, images: Permutation, latencies: bool = True) -> bool:
    """The definition, with no code of the library: the set of links is the same after renaming."""

    def described(renamed: Permutation) -> set[tuple[object, ...]]:
        links = {
            (renamed[link.src], renamed[link.dst], link.bandwidth, latencies and link.latency_us)
            for link in topology.links
        }
        return links | {
            (renamed[topology.ranks + index], switch.reduces)
            for index, switch in enumerate(topology.switches)
        }

    return {images[rank] for rank in range(topology.ranks)} == set(range(topology.ranks)) and described(
        images
    ) == described(tuple(range(topology.size)))


def all_automorphisms(topology: Topology, latencies: bool = True) -> set[Permutation]:
    """By trying every permutation."""
    return {
        (*ranks, *switches)
        for ranks in permutations(range(topology.ranks))
        for switches in permutations(range(topology.ranks, topology.size))
        if is_automorphism(topology, (*ranks, *switches), latencies)
    }


def by_networkx(topology: Topology) -> int:
    """How many automorphisms networkx counts."""
    graph = nx.DiGraph()
    graph.add_nodes_from((vertex, {"switch": topology.is_switch(vertex)}) for vertex in range(topology.size))
    graph.add_edges_from(
        (link.src, link.dst, {"kind": (link.bandwidth, link.latency_us)}) for link in topology.links
    )
    matcher = nx.isomorphism.DiGraphMatcher(
        graph,
        graph,
        node_match=lambda first, second: first == second,
        edge_match=lambda first, second: first == second,
    )
    return sum(1 for _ in matcher.isomorphisms_iter())


@settings(max_examples=150)
@given(topologies(max_ranks=5, switches=2, max_bandwidth=2, connected=False), st.booleans())
def test_the_generators_give_all_automorphisms(topology: Topology, one_way: bool) -> None:
    if one_way:
        topology = replace(topology, links=tuple(link for link in topology.links if link.src < link.dst))
    expected = all_automorphisms(topology)
    found = automorphisms_of(topology)
    assert found.complete
    assert found.order == len(expected)
    group = found.elements(5040)
    assert group is not None
    assert set(group) == expected
    assert group[0] == tuple(range(topology.size))
    assert found.elements(len(expected) - 1) is None


@settings(max_examples=40)
@given(st.data(), st.integers(3, 6))
def test_rings_with_chords_have_what_brute_force_finds(data: st.DataObject, ranks: int) -> None:
    """Dense and regular graphs, where refinement alone tells little."""
    offsets = data.draw(st.sets(st.integers(1, ranks - 1), min_size=1))
    links = [Link(rank, (rank + offset) % ranks, 1) for rank in range(ranks) for offset in offsets]
    topology = Topology.build("circulant", ranks, links)
    expected = all_automorphisms(topology)
    assert set(closure(ranks, automorphisms_of(topology).generators, 720) or ()) == expected
    assert len(expected) >= ranks


def test_vertices_that_refinement_cannot_tell_apart() -> None:
    """A ring of six and two triangles: every vertex has two neighbours, and so on for ever."""
    rings = [[0, 1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11]]
    links = [
        Link(here, there, 1)
        for ring in rings
        for first, second in zip(ring, ring[1:] + ring[:1], strict=True)
        for here, there in ((first, second), (second, first))
    ]
    topology = Topology.build("rings", 12, links)
    # 12 of the ring of six, 6 of each triangle, which change places.
    assert automorphisms_of(topology).order == 12 * 6 * 6 * 2 == by_networkx(topology)


def test_a_strongly_regular_graph() -> None:
    """The Shrikhande graph (16, 6, 2, 2): 192 automorphisms, though not all pairs of strangers are alike."""
    steps = [(0, 1), (1, 0), (1, 1), (0, 3), (3, 0), (3, 3)]
    links = [
        Link(4 * x + y, 4 * ((x + dx) % 4) + (y + dy) % 4, 1)
        for x in range(4)
        for y in range(4)
        for dx, dy in steps
    ]
    topology = Topology.build("shrikhande", 16, links)
    assert automorphisms_of(topology).order == 192 == by_networkx(topology)


@pytest.mark.parametrize(
    ("spec", "order"),
    [
        ("ring:8", 16),  # dihedral
        ("hypercube:3", 48),  # 2^3 * 3!
        ("hypercube:5", 3840),  # 2^5 * 5!
        ("torus:4x4", 384),  # the 4-cube: 2^4 * 4!
        ("torus:4x8", 128),  # dihedral of 8 times dihedral of 16
        ("mesh:3x4", 4),
        ("full:8", 40320),
        ("full:16", 20922789888000),  # 16!
        ("star:16", 20922789888000),
        ("dgx1", 4),  # the two flips of its builder
        ("dgx1-p100", 48),
        ("mi250", 4),
    ],
)
def test_known_orders(spec: str, order: int) -> None:
    found = automorphisms_of(load(spec))
    assert found.complete
    assert found.order == order
    assert order > 400 or load(spec).ranks > 16 or by_networkx(load(spec)) == order


@pytest.mark.parametrize("spec", ["dgx-a100:boxes=2", "fat-tree:2x2x3", "full:16", "torus:4x8"])
def test_what_is_found_for_large_groups_are_automorphisms(spec: str) -> None:
    topology = load(spec)
    found = automorphisms_of(topology)
    assert found.complete
    chance = random.Random(1)
    for images in (*found.generators, *(found.draw(chance) for _ in range(5))):
        assert is_automorphism(topology, images)


def test_elements_are_drawn_evenly() -> None:
    found = automorphisms_of(load("hypercube:3"))
    chance = random.Random(0)
    drawn = Counter(found.draw(chance) for _ in range(4800))
    assert set(drawn) == set(found.elements(48) or ())
    # 100 times each; 5 standard deviations are 50.
    assert all(50 < times < 150 for times in drawn.values())


def test_declared_symmetries_come_first() -> None:
    topology = load("hypercube:4")
    assert topology.symmetries
    assert automorphisms_of(topology).generators[: len(topology.symmetries)] == topology.symmetries


def test_latencies_count_only_where_asked() -> None:
    slow = [Link(0, 1, 1, 5), Link(1, 0, 1, 5)]
    links = [*slow, Link(1, 2, 1), Link(2, 1, 1), Link(2, 0, 1), Link(0, 2, 1)]
    topology = Topology.build("one slow cable", 3, links)
    assert automorphisms_of(topology).elements(6) == ((0, 1, 2), (1, 0, 2))
    assert automorphisms_of(topology, latencies=False).order == 6


def test_a_switch_that_reduces_is_unlike_one_that_does_not() -> None:
    links = [Link(a, b, 1) for a, b in [(0, 2), (2, 0), (1, 2), (2, 1), (0, 3), (3, 0), (1, 3), (3, 1)]]
    alike = Topology.build("alike", 2, links, [Switch("a"), Switch("b")])
    unlike = Topology.build("unlike", 2, links, [Switch("b", reduces=True), Switch("a")])
    assert automorphisms_of(alike).elements(24) is not None
    assert set(automorphisms_of(alike).elements(24) or ()) == {
        (0, 1, 2, 3),
        (1, 0, 2, 3),
        (0, 1, 3, 2),
        (1, 0, 3, 2),
    }
    assert set(automorphisms_of(unlike).elements(24) or ()) == {(0, 1, 2, 3), (1, 0, 2, 3)}


def test_colours_and_rules_are_kept() -> None:
    ring = load("ring:6")
    fixing_0 = automorphisms_of(ring, colours=[1, 0, 0, 0, 0, 0])
    assert set(fixing_0.elements(12) or ()) == {(0, 1, 2, 3, 4, 5), (0, 5, 4, 3, 2, 1)}
    even = automorphisms_of(ring, keeps=lambda images: images[0] % 2 == 0)
    assert even.order == 6
    assert all(images[0] % 2 == 0 for images in even.elements(12) or ())


def test_a_spent_search_keeps_what_was_declared() -> None:
    topology = load("hypercube:4")
    found = automorphisms_of(topology, effort=10)
    assert not found.complete
    assert found.generators == topology.symmetries
    assert len(found.elements(100) or ()) == 16


def test_a_half_done_search_gives_some_automorphisms() -> None:
    topology = replace(load("full:12"), symmetries=())
    sizes = []
    for effort in (900, 1500, 100_000):
        found = automorphisms_of(topology, effort=effort)
        assert all(is_automorphism(topology, images) for images in found.generators)
        sizes.append(len(found.generators))
    assert sizes == sorted(sizes)
    assert 0 < sizes[0] < sizes[-1] == 11


def test_a_single_rank_has_only_the_identity() -> None:
    found = automorphisms_of(Topology.build("alone", 1, []))
    assert (found.order, found.base, found.elements(1)) == (1, (), ((0,),))

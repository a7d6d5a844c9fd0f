"""Translations that nobody declared: found whatever the numbering, checked, and never too many."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.synth.errors import TopologyError
from arborcast.synth.symmetry.abelian import joined
from arborcast.synth.symmetry.automorphisms import automorphisms_of
from arborcast.synth.symmetry.permutations import compose
from arborcast.synth.symmetry.translation_search import translations_of
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Link, Topology
from tests.support.strategies import topologies as drawn_topologies


def bare(topology: Topology) -> Topology:
    return replace(topology, symmetries=())


def renumbered(topology: Topology, seed: int) -> Topology:
    """The same with ranks, able switches and others numbered at random, and nothing declared."""
    chance = random.Random(seed)
    number = chance.sample(range(topology.ranks), topology.ranks)
    for places in (range(topology.ranks, topology.holders), range(topology.holders, topology.size)):
        number += chance.sample(places, len(places))
    switches = sorted(range(len(topology.switches)), key=lambda index: number[topology.ranks + index])
    return Topology.build(
        f"{topology.name} renumbered",
        topology.ranks,
        [replace(link, src=number[link.src], dst=number[link.dst]) for link in topology.links],
        [topology.switches[index] for index in switches],
    )


def from_networkx(graph: nx.Graph) -> Topology:
    graph = nx.convert_node_labels_to_integers(graph)
    ways = [way for u, v in graph.edges for way in ((u, v), (v, u))]
    return Topology.build("drawn", graph.number_of_nodes(), [Link(u, v, Fraction(1)) for u, v in ways])


# Regular where every rank can be taken to every other by an abelian group. A box of MI250 has four kinds of
# ranks, a dragonfly's routers are alike but not their global links; a mesh turns about its middle.
ORDERS = [
    ("dgx1", 4),
    ("dgx1-p100", 8),
    ("dgx2", 16),
    pytest.param("dgx-a100:boxes=16", 128, marks=pytest.mark.long),
    ("dgx-h100:boxes=3", 24),
    ("dgx-a100:boxes=4", 32),
    ("fat-tree:2x2x3", 12),
    ("torus:2x3x4", 24),
    ("mi250", 4),
    ("mi250:boxes=2", 8),
    pytest.param("mi250:boxes=5", 20, marks=pytest.mark.long),
    ("torus:4x4", 16),
    pytest.param("torus:8x8", 64, marks=pytest.mark.long),
    pytest.param("torus:3x4x5", 60, marks=pytest.mark.long),
    ("full:9", 9),
    ("star:12", 12),
    ("ring:15", 15),
    ("hypercube:5", 32),
    pytest.param("fat-tree:2x4x8", 64, marks=pytest.mark.long),
    ("dragonfly:4x2x2", 8),
    ("mesh:4x4", 4),
    ("mesh:3x3", 1),
]


@pytest.mark.parametrize(("spec", "order"), ORDERS)
def test_order_declared_or_not_whatever_the_numbering(spec: str, order: int) -> None:
    topology = topologies.load(spec)
    for one in (topology, bare(topology), renumbered(topology, 1)):
        found = translations_of(one)
        assert found.order == order
        found.check_automorphisms(one)


def test_declared_and_regular_is_what_is_declared() -> None:
    topology = topologies.load("torus:6x4")
    assert translations_of(topology, effort=0) == Translations.generated(topology, topology.symmetries)


def test_declared_symmetries_that_do_not_fit_together_give_powers_of_them() -> None:
    # A rotation of eight ranks, a reflection that keeps two in place, and the quarter turn once more.
    ring = topologies.load("ring:8")
    turn = tuple((rank + 1) % 8 for rank in range(8))
    flip = tuple(-rank % 8 for rank in range(8))
    for symmetries in ([flip, turn], [compose(flip, turn), flip], [flip]):
        found = translations_of(replace(ring, symmetries=tuple(symmetries)), effort=0)
        assert found.order == {True: 8, False: 1}[turn in symmetries or len(symmetries) == 2]


def test_no_effort_leaves_what_is_declared() -> None:
    topology = topologies.load("torus:4x4")
    half = replace(topology, symmetries=topology.symmetries[:1])
    assert translations_of(half, effort=0).order == 4
    assert translations_of(half).order == 16
    assert translations_of(bare(topology), effort=0) == Translations.trivial(topology)


def test_latencies_count() -> None:
    square = [
        Link(u, v, Fraction(1), Fraction(u + v == 5)) for u in range(4) for v in ((u + 1) % 4, (u - 1) % 4)
    ]
    # The links between 2 and 3 are slower to answer: only the reflection that swaps them is left.
    assert translations_of(Topology.build("square", 4, square)).generators == ((1, 0, 3, 2),)


def test_ranks_that_take_part_move_among_each_other() -> None:
    ring = topologies.load("ring:12")
    assert translations_of(ring, ranks=range(0, 12, 2)).order == 6
    assert translations_of(ring, ranks=[0, 1, 6, 7]).order == 4  # two reflections and the half turn
    assert translations_of(ring, ranks=range(12)).order == 12
    assert translations_of(bare(ring), ranks=[0, 1, 3]).order == 1
    assert translations_of(bare(ring), ranks=range(0, 12, 3)).order == 4
    with pytest.raises(TopologyError, match=r"ring:12: rank must be in 0\.\.11, got 12"):
        translations_of(ring, ranks=[12])


def test_without_symmetry_there_is_the_identity_alone() -> None:
    for seed in (1, 2):
        topology = from_networkx(nx.random_regular_graph(3, 40, seed=seed))
        assert translations_of(topology) == Translations.trivial(topology)


@pytest.mark.parametrize(
    ("name", "graph", "order"),
    [
        # Not Cayley graphs: the largest orders are those of their semiregular elements.
        ("Petersen", nx.petersen_graph(), 5),
        ("dodecahedron", nx.dodecahedral_graph(), 10),
        ("cube", nx.cubical_graph(), 8),
        ("prism of seven", nx.circular_ladder_graph(7), 14),
        ("circulant", nx.circulant_graph(24, [1, 5, 7]), 24),
        ("rook's", nx.line_graph(nx.complete_bipartite_graph(3, 4)), 12),
        ("many twins", nx.complete_multipartite_graph(3, 3, 3, 3), 12),
    ],
)
def test_known_graphs(name: str, graph: nx.Graph, order: int) -> None:
    assert translations_of(from_networkx(graph)).order == order, name


@given(drawn_topologies(max_ranks=6, switches=2, max_bandwidth=2), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_as_large_as_the_largest_there_is(topology: Topology, seed: int) -> None:
    found = translations_of(topology, seed=seed)
    found.check_automorphisms(topology)
    elements = automorphisms_of(topology).elements(2000)
    assert elements is not None
    assert found.order == _largest(Translations.trivial(topology), elements)


def _largest(group: Translations, elements: tuple) -> int:
    """The order of the largest group of translations that contains one, by trying all elements."""
    larger = {}
    for element in elements:
        more = joined(group, element)
        if more is not None:
            larger[frozenset(map(more.permutation, range(more.order)))] = more
    return max([group.order, *(_largest(more, elements) for more in larger.values())])


@given(
    st.integers(2, 6),
    st.integers(2, 6),
    st.lists(st.tuples(*[st.integers(0, 5)] * 2), min_size=1, max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_joining_powers_and_products_gives_the_group_they_generate(
    rows: int, columns: int, moves: list[tuple[int, int]]
) -> None:
    size = rows * columns
    group = Translations(size, (), (), size)
    reached = {(0, 0)}
    for down, right in moves:
        images = [
            (place // columns + down) % rows * columns + (place % columns + right) % columns
            for place in range(size)
        ]
        before = reached
        while True:
            more = reached | {((a + down) % rows, (b + right) % columns) for a, b in reached}
            if more == reached:
                break
            reached = more
        larger = joined(group, images)
        assert (larger is None) == (reached == before)
        group = larger or group
        assert group.order == len(reached)
        assert {int(group.apply(g, 0)) for g in range(group.order)} == {a * columns + b for a, b in reached}


def test_what_does_not_fit_a_group_does_not_join_it() -> None:
    quarter = Translations(4, ((1, 2, 3, 0),), (4,), 4)
    assert joined(quarter, (1, 0, 3, 2)) is None  # does not commute
    assert joined(quarter, (2, 3, 0, 1)) is None  # in it
    two = Translations(4, ((1, 0, 3, 2),), (2,), 4)
    assert joined(two, (1, 0, 2, 3)) is None  # keeps ranks
    assert joined(Translations(2, (), (), 4), (1, 0, 3, 2)) is not None
    assert joined(Translations(2, ((1, 0, 2, 3),), (2,), 4), (1, 0, 3, 2)) is None  # its product keeps ranks


@pytest.mark.long
@pytest.mark.parametrize(
    ("spec", "order"),
    [
        ("torus:32x32", 1024),
        ("dgx-a100:boxes=128", 1024),
        ("mi250:boxes=64", 256),
        ("hypercube:10", 1024),
        ("torus:64x64", 4096),
        ("dgx-a100:boxes=512", 4096),
    ],
)
def test_a_thousand_ranks_and_more_undeclared(spec: str, order: int) -> None:
    assert translations_of(renumbered(topologies.load(spec), 3)).order == order

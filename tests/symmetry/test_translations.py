"""Translations against plain composition of permutations, networkx, and every refusal."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.synth.errors import TopologyError
from arborcast.synth.symmetry.translations import MAX_IMAGES, Translations
from arborcast.synth.topology import Link, Permutation, Topology


@st.composite
def groups(draw: Callable) -> Translations:
    """Products of cycles acting on some orbits of ranks, with switches that turn with a part of the group."""
    orders = draw(st.sampled_from([(), (2,), (4,), (5,), (2, 2), (3, 2), (2, 4), (3, 3), (2, 2, 3)]))
    copies = draw(st.integers(1, 2))
    elements = list(itertools.product(*map(range, orders)))
    ranks = [(copy, element) for copy in range(copies) for element in elements]
    # A switch for each value of the first digit, and one that stays.
    switches = [("first", digit) for digit in range(orders[0])] if orders and draw(st.booleans()) else []
    switches.append(("fixed", 0))
    names = draw(st.permutations(range(len(ranks))))
    number = dict(zip(ranks, names, strict=True))
    number |= {switch: len(ranks) + index for index, switch in enumerate(switches)}
    generators = []
    for position, order in enumerate(orders):
        images = [0] * len(number)
        for thing, index in number.items():
            images[index] = number[_stepped(thing, position, order)]
        generators.append(tuple(images))
    return Translations(len(ranks), tuple(generators), orders, len(number))


def _stepped(thing: tuple, position: int, order: int) -> tuple:
    if thing[0] == "fixed":
        return thing
    if thing[0] == "first":
        return ("first", (thing[1] + 1) % order) if position == 0 else thing
    copy, element = thing
    return copy, (*element[:position], (element[position] + 1) % order, *element[position + 1 :])


def _composed(group: Translations, element: int) -> Permutation:
    """The permutation of an element, by applying generators one by one."""
    digits = np.unravel_index(element, group.orders) if group.orders else ()
    images = tuple(range(group.size))
    for generator, digit in zip(group.generators, digits, strict=True):
        for _ in range(int(digit)):
            images = tuple(generator[image] for image in images)
    return images


@given(groups(), st.data())
@settings(max_examples=60, deadline=None)
def test_elements_are_products_of_generators(group: Translations, data: st.DataObject) -> None:
    element = data.draw(st.integers(0, group.order - 1))
    other = data.draw(st.integers(0, group.order - 1))
    images, others = _composed(group, element), _composed(group, other)
    assert group.permutation(element) == images
    assert [int(group.apply(element, vertex)) for vertex in range(group.size)] == list(images)
    assert group.permutation(int(group.plus(element, other))) == tuple(images[v] for v in others)
    assert int(group.plus(group.minus(element, other), other)) == element
    assert group.permutation(0) == tuple(range(group.size))


@given(groups())
@settings(max_examples=60, deadline=None)
def test_orbits_are_what_networkx_finds(group: Translations) -> None:
    graph = nx.Graph([(v, images[v]) for images in group.generators for v in range(group.size)])
    graph.add_nodes_from(range(group.size))
    components = sorted(map(sorted, nx.connected_components(graph)))
    found: dict[int, list[int]] = {}
    for vertex, orbit in enumerate(group.orbit_of.tolist()):
        found.setdefault(orbit, []).append(vertex)
    assert list(found.values()) == components
    assert list(found) == list(range(len(components)))  # numbered by their first vertices
    assert group.representatives == tuple(part[0] for part in components if part[0] < group.ranks)


@given(groups())
@settings(max_examples=60, deadline=None)
def test_one_element_takes_a_rank_to_another_of_its_orbit(group: Translations) -> None:
    images = np.array([_composed(group, element) for element in range(group.order)])
    for src in range(group.ranks):
        for element, dst in enumerate(images[:, src]):
            assert int(group.moving(src, int(dst))) == element
    firsts = {orbit: vertex for vertex, orbit in reversed(list(enumerate(group.orbit_of.tolist())))}
    for vertex in range(group.size):
        takes = np.flatnonzero(images[:, firsts[int(group.orbit_of[vertex])]] == vertex)
        assert int(group.place[vertex]) == takes[0]


@given(groups(), st.data())
@settings(max_examples=60, deadline=None)
def test_link_orbits_are_what_moving_links_gives(group: Translations, data: st.DataObject) -> None:
    pairs = [(u, v) for u in range(group.size) for v in range(group.size) if u != v]
    chosen = data.draw(st.lists(st.sampled_from(pairs), max_size=4)) if pairs else []
    moved = {
        tuple(int(vertex) for vertex in group.apply(element, np.array(pair)))
        for pair in chosen
        for element in range(group.order)
    }
    switches = [f"switch{index}" for index in range(group.size - group.ranks)]
    topology = Topology.build(
        "moved", group.ranks, [Link(src, dst, Fraction(1)) for src, dst in moved], switches
    )
    group.check_automorphisms(topology)
    images = np.array([_composed(group, element) for element in range(group.order)])
    numbers: dict[frozenset, int] = {}
    expected = []
    for link in topology.links:
        orbit = frozenset(zip(images[:, link.src].tolist(), images[:, link.dst].tolist(), strict=True))
        expected.append(numbers.setdefault(orbit, len(numbers)))
    assert group.link_orbits(topology).tolist() == expected


def test_arrays_broadcast() -> None:
    group = Translations.generated(topology := topologies.load("torus:3x4"), topology.symmetries)
    elements, ranks = np.arange(12)[:, None], np.arange(12)[None, :]
    table = group.apply(elements, ranks)
    assert table.shape == (12, 12)
    assert all(sorted(row) == list(range(12)) for row in table.tolist())
    assert np.array_equal(group.moving(ranks, table), np.broadcast_to(elements, (12, 12)))


def test_the_first_digit_is_the_most_significant() -> None:
    group = Translations(6, ((1, 2, 0, 4, 5, 3), (3, 4, 5, 0, 1, 2)), (3, 2), 6)
    assert [int(group.apply(element, 0)) for element in range(6)] == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize(
    ("ranks", "generators", "orders", "size", "message"),
    [
        (2, ((1, 0),), (), 2, "1 generators need as many orders, got 0"),
        (2, ((1, 1),), (2,), 2, "translation 0: must name each of the 2 vertices exactly once"),
        (2, ((1, 0),), (2,), 3, "translation 0: must name each of the 3 vertices exactly once"),
        (2, ((2, 1, 0),), (2,), 3, "translation 0: must map ranks to ranks"),
        (2, ((1, 0),), (3,), 2, "translation 0: order must be .* got 3 declared and 2 found"),
        (2, ((0, 1),), (1,), 2, "translation 0: order must be at least 2 .* got 1 declared and 1 found"),
        (4, ((1, 0, 3, 2), (1, 2, 3, 0)), (2, 4), 4, "translations 0 and 1: must commute, they differ at"),
        (3, ((1, 0, 2),), (2,), 3, "keep a rank in its place, 2 elements do not divide 3 ranks"),
        (4, ((1, 0, 2, 3),), (2,), 4, "rank 2 has 1 images under 2 elements"),
        (4, ((1, 0, 3, 2), (1, 0, 3, 2)), (2, 2), 4, "rank 0 has 2 images under 4 elements"),
        # The square keeps ranks in place and turns the switches.
        (4, ((1, 0, 3, 2, 5, 6, 7, 4),), (4,), 8, "rank 0 has 2 images under 4 elements"),
    ],
)
def test_refusals(ranks: int, generators: tuple, orders: tuple, size: int, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        Translations(ranks, generators, orders, size)


def test_too_many_images_are_refused_before_they_are_listed() -> None:
    ranks, fixed = 1 << 14, MAX_IMAGES // (1 << 14)
    rotation = (*range(1, ranks), 0, *range(ranks, ranks + fixed))
    with pytest.raises(TopologyError, match=f"times elements must be at most {MAX_IMAGES}, got"):
        Translations(ranks, (rotation,), (ranks,), ranks + fixed)


def test_what_is_no_automorphism_is_refused() -> None:
    topology = topologies.load("mesh:4")
    with pytest.raises(TopologyError, match=r"symmetry \[1, 2, 3, 0\]: maps link"):
        Translations.generated(topology, [(1, 2, 3, 0)])
    with pytest.raises(TopologyError, match="of 4 ranks and 4 vertices do not fit mesh:5"):
        Translations(4, ((1, 2, 3, 0),), (4,), 4).check_automorphisms(topologies.load("mesh:5"))


def test_latencies_and_bandwidths_must_be_alike() -> None:
    for second in (Link(1, 0, Fraction(1), Fraction(2)), Link(1, 0, Fraction(2), Fraction(1))):
        topology = Topology.build("unlike", 2, [Link(0, 1, Fraction(1), Fraction(1)), second])
        with pytest.raises(TopologyError, match="both must be alike in bandwidth and latency"):
            Translations.generated(topology, [(1, 0)])

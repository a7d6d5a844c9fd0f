"""Permutations and small groups, against sets of all products."""

from __future__ import annotations

from itertools import permutations as every

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast.synth.symmetry.abelian import divisors, power
from arborcast.synth.symmetry.permutations import (
    closure,
    compose,
    extended,
    identity,
    inverse,
    least_images,
    orbit,
    orbit_numbers,
    orbits,
)
from arborcast.synth.topology import Permutation

SIZE = 5
ELEMENTS = st.permutations(range(SIZE)).map(tuple)


def generated(size: int, generators: list[Permutation]) -> set[Permutation]:
    """All products, the slow way."""
    found = {tuple(range(size))}
    while True:
        more = {tuple(outer[inner[v]] for v in range(size)) for outer in generators for inner in found}
        if more <= found:
            return found
        found |= more


def test_compose_applies_the_inner_one_first() -> None:
    #  0 -> 1 -> 2, 1 -> 0 -> 1, 2 -> 2 -> 0
    assert compose((1, 2, 0), (1, 0, 2)) == (2, 1, 0)
    assert compose((1, 0, 2), (1, 2, 0)) == (0, 2, 1)


@given(ELEMENTS)
def test_an_inverse_takes_back(element: Permutation) -> None:
    assert compose(inverse(element), element) == identity(SIZE) == compose(element, inverse(element))


@given(st.lists(ELEMENTS, max_size=3))
def test_a_closure_is_the_group_generated(generators: list[Permutation]) -> None:
    expected = generated(SIZE, generators)
    group = closure(SIZE, generators, 120)
    assert group is not None
    assert group[0] == identity(SIZE)
    assert len(group) == len(set(group))
    assert set(group) == expected
    assert closure(SIZE, generators, len(expected)) == group
    assert closure(SIZE, generators, len(expected) - 1) is None


def test_a_closure_of_a_single_vertex_is_the_identity() -> None:
    assert closure(1, [(0,)], 1) == ((0,),)


def test_an_extended_group_begins_with_the_old_one() -> None:
    rotations = ((0, 1, 2, 3), (1, 2, 3, 0), (2, 3, 0, 1), (3, 0, 1, 2))
    group = extended(rotations, [(1, 2, 3, 0)], (3, 2, 1, 0), 8)
    assert group is not None
    assert group[:4] == rotations
    assert set(group[4:]) == {(3, 2, 1, 0), (2, 1, 0, 3), (1, 0, 3, 2), (0, 3, 2, 1)}
    assert extended(rotations, [(1, 2, 3, 0)], (3, 2, 1, 0), 7) is None


@pytest.mark.parametrize(
    "generators", [[], [(1, 0, 2, 3, 4)], [(1, 2, 0, 4, 3)], list(every(range(5)))[::50]]
)
def test_orbits_are_where_the_group_takes_a_vertex(generators: list[Permutation]) -> None:
    group = generated(SIZE, generators)
    for vertex in range(SIZE):
        assert set(orbit(vertex, generators)) == {element[vertex] for element in group}
    expected = {tuple(sorted({element[vertex] for element in group})) for vertex in range(SIZE)}
    assert orbits(range(SIZE), generators) == tuple(sorted(expected))


@given(st.data(), st.integers(1, 40))
def test_least_images_are_the_least_of_what_permutations_join(data: st.DataObject, size: int) -> None:
    drawn = data.draw(st.lists(st.permutations(range(size)), max_size=3))
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(size))
    graph.add_edges_from(pair for images in drawn for pair in enumerate(images))
    parts = sorted(map(sorted, nx.connected_components(graph)))
    every_one = np.arange(size)
    least = least_images(every_one, drawn)
    assert least.tolist() == [min(part) for vertex in range(size) for part in parts if vertex in part]
    assert least_images(least_images(every_one, drawn[:1]), drawn).tolist() == least.tolist()
    numbers = [number for vertex in range(size) for number, part in enumerate(parts) if vertex in part]
    assert orbit_numbers(size, drawn).tolist() == numbers


@given(st.permutations(range(7)), st.integers(0, 15))
def test_a_power_is_a_product_of_as_many(element: list[int], exponent: int) -> None:
    product = identity(7)
    for _ in range(exponent):
        product = compose(tuple(element), product)
    assert power(np.array(element), exponent).tolist() == list(product)


@given(st.integers(1, 500))
def test_divisors(number: int) -> None:
    assert divisors(number) == [other for other in range(1, number + 1) if number % other == 0]

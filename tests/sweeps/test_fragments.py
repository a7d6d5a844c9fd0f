"""Fragments of a box up to isomorphism: classes against networkx, BLINK's counts, refusals."""

from __future__ import annotations

from itertools import combinations
from math import comb
from typing import Any

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import topologies
from arborcast.synth.errors import InputError
from arborcast.synth.sweeps.fragments import representatives
from arborcast.synth.symmetry.automorphisms import automorphisms_of
from arborcast.synth.symmetry.permutations import orbit
from arborcast.synth.topology import Topology
from tests.support.strategies import topologies as drawn_topologies


def graph_of(topology: Topology) -> Any:
    graph: Any = networkx.DiGraph()
    for vertex in range(topology.size):
        graph.add_node(vertex, switch=topology.is_switch(vertex))
    for (src, dst), rate in topology.bandwidth.items():
        graph.add_edge(src, dst, rate=rate)
    return graph


def classes_by_networkx(topology: Topology, size: int) -> list[tuple[tuple[int, ...], int]]:
    """The first set of ranks of each class, and how many sets it has."""
    found: list[list[Any]] = []
    for ranks in combinations(range(topology.ranks), size):
        graph = graph_of(topology.subset(ranks))
        for known in found:
            if networkx.is_isomorphic(
                graph, known[1], node_match=lambda a, b: a == b, edge_match=lambda a, b: a == b
            ):
                known[2] += 1
                break
        else:
            found.append([ranks, graph, 1])
    return [(ranks, count) for ranks, _, count in found]


def classes(topology: Topology, size: int) -> list[tuple[tuple[int, ...], int]]:
    return [(each.ranks, each.allocations) for each in representatives(topology, [size])]


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("spec", ["dgx1", "dgx1-p100"])
def test_classes_of_a_dgx1_are_those_of_networkx(spec: str, size: int) -> None:
    box = topologies.load(spec)

    assert classes(box, size) == classes_by_networkx(box, size)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), symmetric=st.booleans(), connected=st.booleans())
def test_classes_of_random_boxes_are_those_of_networkx(
    data: st.DataObject, symmetric: bool, connected: bool
) -> None:
    box = data.draw(drawn_topologies(max_ranks=6, symmetric=symmetric, max_bandwidth=2, connected=connected))
    size = data.draw(st.integers(2, box.ranks))

    assert classes(box, size) == classes_by_networkx(box, size)


#                       GPUs   2  3   4   5   6  7  8
@pytest.mark.parametrize(
    ("spec", "all_classes", "joined"),
    [
        ("dgx1", [3, 7, 19, 14, 10, 2, 1], [2, 5, 14, 14, 10, 2, 1]),
        ("dgx1-p100", [2, 3, 6, 3, 3, 1, 1], [1, 2, 4, 3, 3, 1, 1]),
    ],
)
def test_the_counts_are_blinks(spec: str, all_classes: list[int], joined: list[int]) -> None:
    """BLINK: 46 on the box with V100 and 14 on that with P100, of 3 to 8 GPUs that NVLinks join."""
    fragments = representatives(topologies.load(spec))

    def counts(among: list[Any]) -> list[int]:
        return [sum(len(each.ranks) == size for each in among) for size in range(2, 9)]

    connected = [each for each in fragments if networkx.is_strongly_connected(graph_of(each.topology))]
    assert counts(list(fragments)) == all_classes
    assert counts(connected) == joined
    assert sum(joined[1:]) == {"dgx1": 46, "dgx1-p100": 14}[spec]
    assert sum(each.allocations for each in fragments) == sum(comb(8, size) for size in range(2, 9))


def test_alike_fragments_need_no_automorphism_of_the_box() -> None:
    box = topologies.load("dgx1")
    generators = automorphisms_of(box).generators
    (pair,) = (each for each in representatives(box, [2]) if each.ranks == (0, 3))

    def moved(pair: tuple[int, int]) -> list[tuple[int, int]]:
        return [(image[pair[0]], image[pair[1]]) for image in generators]

    reached = {(0, 3)}
    for _ in range(8):
        reached |= {image for each in reached for image in moved(each)}
    by_automorphisms = {tuple(sorted(each)) for each in reached}
    doubled = {tuple(sorted(hop)) for hop, rate in box.bandwidth.items() if rate == 50}
    assert pair.allocations == len(doubled) == 8
    assert by_automorphisms < doubled  # the others are alike only on their own
    assert len(orbit(0, generators)) == 4


def test_a_full_graph_of_twelve_has_one_class_of_each_size() -> None:
    fragments = representatives(topologies.load("full:12"))

    assert [each.allocations for each in fragments] == [comb(12, size) for size in range(2, 13)]


@pytest.mark.parametrize(
    ("spec", "sizes", "message"),
    [
        ("ring:17", None, "topology ring:17: to list its fragments it must have at most 16 ranks, got 17"),
        ("ring:4", [1], "fragment of ring:4: must have 2 to 4 ranks, got 1"),
        ("ring:4", [3, 5], "fragment of ring:4: must have 2 to 4 ranks, got 5"),
    ],
)
def test_what_cannot_be_listed_is_refused(spec: str, sizes: list[int] | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        representatives(topologies.load(spec), sizes)

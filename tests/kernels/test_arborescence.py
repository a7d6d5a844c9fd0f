"""Arborescences against networkx, distances through switches against Dijkstra's algorithm on each rank."""

from __future__ import annotations

from fractions import Fraction

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.errors import InfeasibleError
from arborcast.synth.kernels.arborescence import (
    FORBIDDEN,
    UNREACHABLE,
    Distances,
    LogicalGraph,
    cheapest_arborescence,
)
from arborcast.synth.topology import Link, Topology
from arborcast.synth.tree import TreeEdge


@st.composite
def costs(draw, largest_size=11):
    size = draw(st.integers(2, largest_size))
    highest = draw(st.sampled_from([1, 3, 1000]))
    lowest = draw(st.sampled_from([0, -5]))
    entries = draw(st.lists(st.integers(lowest, highest), min_size=size * size, max_size=size * size))
    return np.array(entries, dtype=np.int64).reshape(size, size)


@st.composite
def switched_graphs(draw):
    """A topology with an integer length for each link; not always connected, lengths often zero."""
    ranks, switches = draw(st.integers(2, 7)), draw(st.integers(0, 4))
    pairs = [(u, v) for u in range(ranks + switches) for v in range(ranks + switches) if u != v]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=30))
    topology = Topology.build(
        "drawn", ranks, [Link(u, v, Fraction(1)) for u, v in chosen], [f"s{i}" for i in range(switches)]
    )
    lengths = draw(st.lists(st.integers(0, 4), min_size=len(chosen), max_size=len(chosen)))
    return topology, np.array(lengths, dtype=np.int64)


def assert_spans(parents, root):
    tree = nx.DiGraph([(int(parent), child) for child, parent in enumerate(parents) if child != root])
    assert parents[root] == -1
    assert nx.is_arborescence(tree)
    assert len(tree) == len(parents)


def cost_of(parents, cost):
    return sum(cost[parent, child] for child, parent in enumerate(parents) if parent >= 0)


def reference(topology, lengths, source):
    """Distances from one rank in the graph where no other rank can be left."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(topology.size))
    for link, length in zip(topology.links, lengths.tolist(), strict=True):
        if link.src == source or topology.is_switch(link.src):
            graph.add_edge(link.src, link.dst, weight=length)
    return nx.single_source_dijkstra_path_length(graph, source)


@given(costs(), st.sampled_from([np.int64, np.float64]), st.data())
def test_costs_as_little_as_networkx(cost, kind, data):
    root = data.draw(st.integers(0, len(cost) - 1))
    graph = nx.DiGraph()
    for (parent, child), value in np.ndenumerate(cost):
        if child not in (parent, root):
            graph.add_edge(parent, child, weight=int(value))
    expected = nx.minimum_spanning_arborescence(graph).size("weight")
    given_cost = cost.astype(kind)
    parents = cheapest_arborescence(given_cost, root)
    assert_spans(parents, root)
    assert cost_of(parents, cost) == expected
    assert np.array_equal(given_cost, cost)


@pytest.mark.parametrize("size", [40, pytest.param(100, marks=pytest.mark.long)])
def test_larger_graphs_with_deep_contractions(size):
    """Cheap links inside blocks of blocks make cycles of cycles."""
    numbers = np.random.default_rng(size)
    cost = numbers.integers(0, 40, (size, size))
    for width, extra in ((3, 50), (12, 200), (40, 1000)):
        block = np.arange(size) // width
        cost += extra * (block[:, None] != block[None, :])
    graph = nx.from_numpy_array(cost + 1, create_using=nx.DiGraph)
    graph.remove_edges_from([*nx.selfloop_edges(graph), *graph.in_edges(7)])
    expected = nx.minimum_spanning_arborescence(graph).size("weight") - (size - 1)
    parents = cheapest_arborescence(cost, 7)
    assert_spans(parents, 7)
    assert cost_of(parents, cost) == expected


@pytest.mark.parametrize(("kind", "none"), [(np.int64, FORBIDDEN), (np.float64, np.inf)])
def test_forbidden_edges_are_avoided_or_named(kind, none):
    cost = np.full((4, 4), none, dtype=kind)
    cost[0, 1], cost[1, 2], cost[2, 1], cost[2, 3], cost[3, 2] = 5, 7, 1, 2, 1
    assert cheapest_arborescence(cost, 0).tolist() == [-1, 0, 1, 2]
    cost[0, 1] = none
    with pytest.raises(InfeasibleError, match=r"no tree from rank 0: nothing outside ranks \[1, 2, 3\]"):
        cheapest_arborescence(cost, 0)


def test_costs_that_do_not_fit_are_refused():
    cost = np.full((4, 4), FORBIDDEN // 4, dtype=np.int64)
    with pytest.raises(OverflowError, match="exceed int64"):
        cheapest_arborescence(cost, 0)


@given(switched_graphs(), st.sampled_from([np.int64, np.float64]))
@settings(max_examples=200)
def test_distances_are_dijkstras(drawn, kind):
    topology, lengths = drawn
    found = LogicalGraph(topology).distances(lengths.astype(kind))
    for source in range(topology.ranks):
        expected = reference(topology, lengths, source)
        for target in set(range(topology.ranks)) - {source}:
            none = UNREACHABLE if kind == np.int64 else np.inf
            assert found.matrix[source, target] == expected.get(target, none)
            if target in expected:
                assert_is_way(topology, lengths, way(found, source, target), source, target, expected[target])
            else:
                with pytest.raises(InfeasibleError, match=f"from rank {source} to rank {target}"):
                    way(found, source, target)


def way(found: Distances, source: int, target: int) -> tuple[int, ...]:
    """Links of the edge between two ranks."""
    parents = np.full(found.graph.ranks, -1)
    parents[target] = source
    return tuple(found.routes(parents).links.tolist())


def assert_is_way(topology, lengths, path, source, target, distance):
    links = [topology.links[index] for index in path]
    assert [link.src for link in links] == [source, *(link.dst for link in links[:-1])]
    assert links[-1].dst == target
    assert all(topology.is_switch(link.dst) for link in links[:-1])
    assert sum(int(lengths[index]) for index in path) == distance


@pytest.mark.parametrize(("kind", "none"), [(np.int64, FORBIDDEN), (np.float64, np.inf)])
def test_forbidden_links_are_not_used(kind, none):
    """0 -> s -> 1 costs 2, the link 0 -> 1 costs 9; then the switch is forbidden."""
    topology = Topology.build(
        "pair", 2, [Link(u, v, Fraction(1)) for u, v in ((0, 1), (0, 2), (2, 1), (1, 0))], ["s"]
    )
    graph = LogicalGraph(topology)  # links sorted: 0->1, 0->2, 1->0, 2->1
    assert graph.distances(np.array([9, 1, 1, 1], dtype=kind)).matrix[0, 1] == 2
    detour = graph.distances(np.array([9, none, 1, 1], dtype=kind))
    assert detour.matrix[0, 1] == 9
    assert way(detour, 0, 1) == (0,)


def test_tree_with_its_switches_and_its_load():
    """Two boxes of two ranks, a switch in each, and one link between the switches.

    0,1 - s4 - s5 - 2,3: from 0 the cheapest tree is 0->1 by s4, 0->2 by s4 and s5, then 2->3 by s5.
    """
    cables = [(0, 4), (1, 4), (2, 5), (3, 5), (4, 5)]
    links = [Link(u, v, Fraction(1)) for pair in cables for u, v in (pair, pair[::-1])]
    topology = Topology.build("boxes", 4, links, ["s4", "s5"])
    graph = LogicalGraph(topology)
    lengths = np.array([10 if {link.src, link.dst} == {4, 5} else 1 for link in topology.links])
    found = graph.distances(lengths)
    parents = cheapest_arborescence(found.matrix, 0)
    routes = found.routes(parents)
    tree = routes.tree(Fraction(1, 3), 0)
    assert (tree.root, tree.weight) == (0, Fraction(1, 3))
    assert tree.edges == (TreeEdge(0, 1, (4,)), TreeEdge(0, 2, (4, 5)), TreeEdge(2, 3, (5,)))
    load = {
        (topology.links[index].src, topology.links[index].dst): uses
        for index, uses in enumerate(routes.uses())
        if uses
    }
    assert load == {(0, 4): 2, (4, 1): 1, (4, 5): 1, (5, 2): 1, (2, 5): 1, (5, 3): 1}

"""The cheapest tree without a matrix against the one with it, and against networkx."""

from __future__ import annotations

from fractions import Fraction

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.certification.cheapest_spanning import metric_mst_cost
from arborcast.synth.errors import InputError
from arborcast.synth.kernels.arborescence import LogicalGraph, cheapest_arborescence
from arborcast.synth.topology import Link, Topology
from tests.support.strategies import topologies


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_cheapest_tree_is_that_of_all_distances(data: st.DataObject) -> None:
    topology = data.draw(topologies(max_ranks=7, switches=3, symmetric=True))
    drawn = {
        (link.src, link.dst): data.draw(st.integers(0, 5)) for link in topology.links if link.src < link.dst
    }
    lengths = [drawn[min(link.src, link.dst), max(link.src, link.dst)] for link in topology.links]
    matrix = LogicalGraph(topology).distances(np.array(lengths, dtype=np.int64)).matrix
    root = data.draw(st.integers(0, topology.ranks - 1))
    parents = cheapest_arborescence(matrix, root).tolist()
    expected = sum(int(matrix[parent, rank]) for rank, parent in enumerate(parents) if parent >= 0)
    switches = range(topology.ranks, topology.size)
    assert metric_mst_cost(topology, lengths, range(topology.ranks), switches) == expected

    graph = nx.Graph()
    graph.add_nodes_from(range(topology.size))
    for (src, dst), length in drawn.items():
        graph.add_edge(src, dst, weight=length)
    far = dict(nx.all_pairs_dijkstra_path_length(graph))
    complete = nx.Graph()
    complete.add_weighted_edges_from((a, b, far[a][b]) for a in range(topology.ranks) for b in range(a))
    assert nx.minimum_spanning_tree(complete).size(weight="weight") == expected


def test_what_may_be_passed() -> None:
    #  0 --1-- 3 --1-- 1,  0 --5-- 2 --5-- 1,  4 --1-- 5, which nobody reaches
    ends = {(0, 3): 1, (1, 3): 1, (0, 2): 5, (1, 2): 5, (4, 5): 1}
    both = {**ends, **{(v, u): length for (u, v), length in ends.items()}}
    topology = Topology.build("chain", 6, [Link(*pair, Fraction(1)) for pair in both])
    lengths = [both[link.src, link.dst] for link in topology.links]
    assert metric_mst_cost(topology, lengths, [0, 1], [2, 3]) == 2
    assert metric_mst_cost(topology, lengths, [0, 1], range(2, 6)) == 2
    assert metric_mst_cost(topology, lengths, [0, 1], [2]) == 10
    assert metric_mst_cost(topology, lengths, range(4), []) == 7
    with pytest.raises(InputError, match="some rank cannot be reached, a cut shows that"):
        metric_mst_cost(topology, lengths, [0, 1], [])


def test_ways_pass_as_many_as_there_are_and_one_end_apart_is_one_too_many() -> None:
    #  0 --1-- 3 --2-- 4 --3-- 5 --4-- 1,  2 stands alone
    chain = {(0, 3): 1, (3, 4): 2, (4, 5): 3, (5, 1): 4}
    both = {**chain, **{(v, u): length for (u, v), length in chain.items()}}
    topology = Topology.build("row", 6, [Link(*pair, Fraction(1)) for pair in both])
    lengths = [both[link.src, link.dst] for link in topology.links]
    assert metric_mst_cost(topology, lengths, [0, 1], [3, 4, 5]) == 10
    assert metric_mst_cost(topology, lengths, [0, 1, 4], [3, 5]) == 10
    with pytest.raises(InputError, match="some rank cannot be reached, a cut shows that"):
        metric_mst_cost(topology, lengths, [0, 1, 2], [3, 4, 5])

"""The cheapest tree without a matrix against the one with it, and against networkx."""

from __future__ import annotations

from fractions import Fraction

import networkx as nx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import topologies

from synth.arborescence import LogicalGraph, cheapest_arborescence
from synth.bounds.spanning import joining_cost
from synth.topology import Link, Topology


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
    assert joining_cost(topology, lengths) == expected

    graph = nx.Graph()
    graph.add_nodes_from(range(topology.size))
    for (src, dst), length in drawn.items():
        graph.add_edge(src, dst, weight=length)
    far = dict(nx.all_pairs_dijkstra_path_length(graph))
    complete = nx.Graph()
    complete.add_weighted_edges_from((a, b, far[a][b]) for a in range(topology.ranks) for b in range(a))
    assert nx.minimum_spanning_tree(complete).size(weight="weight") == expected


def line(*lengths: int) -> tuple[Topology, list[int]]:
    """Links 0->1, 1->0, 1->2, 2->1 of these lengths, those of length -1 left out."""
    ends = [(0, 1), (1, 0), (1, 2), (2, 1)]
    kept = [(pair, length) for pair, length in zip(ends, lengths, strict=True) if length >= 0]
    topology = Topology.build("line", 3, [Link(*pair, Fraction(1)) for pair, _ in kept])
    return topology, [length for _, length in sorted(kept)]


def test_lengths_that_differ_by_direction_and_parts_are_left_to_others() -> None:
    assert joining_cost(*line(2, 2, 3, 3)) == 5
    assert joining_cost(*line(2, 1, 3, 3)) is None
    assert joining_cost(*line(2, 2, 3, -1)) is None
    assert joining_cost(*line(2, 2, -1, -1)) is None  # rank 2 is cut off

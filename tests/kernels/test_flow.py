"""Flows against networkx; the cut that comes with a flow is as large as the flow."""

from __future__ import annotations

from fractions import Fraction

import networkx as nx
import numpy as np
import pytest
from hypothesis import given

from arborcast.synth.errors import TopologyError
from arborcast.synth.kernels.max_flow import (
    LARGEST_TOTAL,
    dinic,
    link_arrays,
    reachable,
    residual_capacity,
    residual_graph,
)
from arborcast.synth.topology import Link, Topology
from tests.support.strategies import topologies


def max_flow(topology, source, sink):
    """The largest flow in GB/s between two vertices, and the source side of a minimum cut."""
    graph = residual_graph(topology.size, *link_arrays(topology))
    capacity = residual_capacity(topology.capacities)
    flow = dinic(*graph, capacity, source, sink, LARGEST_TOTAL)
    side = np.flatnonzero(reachable(*graph, capacity, source)).tolist()
    return int(flow) * topology.bandwidth_unit, side


def as_graph(topology: Topology) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(topology.size))
    for link in topology.links:
        graph.add_edge(link.src, link.dst, capacity=link.bandwidth)
    return graph


@given(topologies(max_ranks=9, switches=2, symmetric=False, connected=False, max_bandwidth=9))
def test_flow_equals_networkx_and_its_cut(topology):
    value, side = max_flow(topology, 0, 1)
    assert value == nx.maximum_flow_value(as_graph(topology), 0, 1)
    assert 0 in side
    assert 1 not in side
    assert value == sum(
        link.bandwidth for link in topology.links if link.src in side and link.dst not in side
    )


@given(topologies(max_ranks=7, switches=2, symmetric=False, connected=False, max_bandwidth=9))
def test_what_is_left_is_a_flow(topology):
    """Residual arcs add up to the capacities, and what passes a vertex is conserved."""
    src = np.array([link.src for link in topology.links], dtype=np.int64)
    dst = np.array([link.dst for link in topology.links], dtype=np.int64)
    graph = residual_graph(topology.size, src, dst)
    full = residual_capacity(topology.capacities)
    left = full.copy()
    value = dinic(*graph, left, 0, 1, 2**60)
    passed = left[1::2]
    assert (left >= 0).all()
    assert (left[0::2] + passed == full[0::2]).all()
    surplus = np.zeros(topology.size, dtype=np.int64)
    np.add.at(surplus, dst, passed)
    np.subtract.at(surplus, src, passed)
    assert surplus[0] == -value
    assert surplus[1] == value
    assert (surplus[2:] == 0).all()


def test_flow_stops_at_its_limit_and_goes_on():
    # 0 -> 1 -> 2 carries 5 and 0 -> 2 carries 4.
    graph = residual_graph(3, np.array([0, 1, 0]), np.array([1, 2, 2]))
    capacity = residual_capacity([5, 7, 4])
    assert dinic(*graph, capacity, 0, 2, 6) == 6
    assert dinic(*graph, capacity, 0, 2, 100) == 3
    assert reachable(*graph, capacity, 0).tolist() == [True, False, False]


def test_residual_arcs_of_a_vertex_are_in_order():
    start, arcs, head = residual_graph(3, np.array([0, 1, 0]), np.array([1, 2, 2]))
    assert start.tolist() == [0, 2, 4, 6]
    assert arcs.tolist() == [0, 4, 1, 2, 3, 5]
    assert head.tolist() == [1, 0, 2, 1, 2, 0]


def test_large_capacities_are_exact():
    # scipy's int32 flow gives 0 here.
    topology = Topology.build("wide", 2, [Link(0, 1, Fraction(3_000_000_001)), Link(1, 0, Fraction(1))])
    assert max_flow(topology, 0, 1)[0] == 3_000_000_001


def test_capacities_beyond_int64_are_refused():
    with pytest.raises(TopologyError, match=r"must be at most 2\*\*62 .* got 9223372036854775809"):
        residual_capacity([2**63, 1])

"""Proposed trees: taken as far as cuts allow, grown where edges are lost, and the packing stays exact."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arborcast.synth.errors import InfeasibleError
from arborcast.synth.kernels.arborescence import LogicalGraph, cheapest_arborescence, levels
from arborcast.synth.packing.exact import pack_exactly
from arborcast.synth.packing.warm_start import (
    cheapest_root,
    grown,
    rebound,
    shares_of,
    tops_of,
)
from arborcast.synth.packing.weighted_tree import WeightedTree, rerooted
from arborcast.synth.topology import Topology
from arborcast.synth.tree import Tree, TreeEdge
from tests.packing.test_exact import (
    assert_packs,
    cabled,
    circulations,
    digraphs,
    equal,
    most,
    symmetric_topologies,
)

F = Fraction


def some_tree(topology, root, draw):
    """A spanning tree over drawn lengths."""
    graph = LogicalGraph(topology)
    lengths = np.array([draw(st.integers(0, 9)) for _ in topology.links], dtype=np.int64)
    distances = graph.distances(lengths)

    return WeightedTree(root, F(1), distances.routes(cheapest_arborescence(distances.matrix, root)))


@given(st.one_of(symmetric_topologies(7), circulations(), digraphs()), st.data())
@settings(max_examples=60)
def test_any_proposals_leave_the_packing_exact(topology, data):
    weights = {rank: data.draw(st.integers(0, 3)) for rank in range(topology.ranks)}
    assume(any(weights.values()))
    best = most(topology, weights)
    assume(best > 0)
    demands = {rank: weight * best for rank, weight in weights.items()}
    proposals = []
    for root in data.draw(st.lists(st.sampled_from([r for r, w in weights.items() if w]), max_size=6)):
        try:
            proposals.append(some_tree(topology, root, data.draw))
        except InfeasibleError:
            assume(False)
    packing, again = (pack_exactly(topology, demands, known=proposals) for _ in range(2))
    assert_packs(packing, topology, demands)
    assert (packing.trees, packing.settings) == (again.trees, again.settings)


@given(symmetric_topologies(7))
@settings(max_examples=40)
def test_a_packing_that_is_proposed_comes_back(topology):
    demands = equal(topology, most(topology, equal(topology, 1)))
    packing = pack_exactly(topology, demands, attempts=1)
    again = pack_exactly(topology, demands, known=packing.carriers)
    assert {(tree.root, tree.edges, tree.weight) for tree in again.trees} == {
        (tree.root, tree.edges, tree.weight) for tree in packing.trees
    }
    assert dict(again.settings)["repaired"].startswith("100.0% on old trees")


@given(symmetric_topologies(6), st.data())
@settings(max_examples=60)
def test_stumps_of_any_root_are_grown_or_left(topology, data):
    demands = equal(topology, most(topology, equal(topology, 1)))
    graph = LogicalGraph(topology)
    partials = []
    for root in range(topology.ranks):
        tree = some_tree(topology, root, data.draw)
        lost = data.draw(st.sets(st.integers(0, len(topology.links) - 1), max_size=3))
        fewer = Topology.build(
            "fewer",
            topology.ranks,
            [link for place, link in enumerate(topology.links) if place not in lost],
            topology.switches,
        )
        left = rebound(rebound(tree, LogicalGraph(fewer)), graph)
        partials.append(WeightedTree(root, F(1), left.out, free=data.draw(st.booleans())))
    packing = pack_exactly(topology, demands, known=partials)
    assert_packs(packing, topology, demands)


def test_shares_are_whole_and_use_up_each_demand():
    graph = LogicalGraph(cabled("pair", 2, [(0, 1, 1)]))
    routes = WeightedTree.of(graph, Tree(0, F(1), (TreeEdge(0, 1),))).out
    partials = [WeightedTree(0, F(weight), routes) for weight in (1, 2, 4)]
    # 1/7, 2/7 and 4/7 of 10 units are 1.43, 2.86 and 5.71: 1, 2 and 5, and one more where most is cut off.
    assert shares_of(partials, np.array([10, 0])) == [1, 3, 6]
    free = [WeightedTree(0, F(1), routes, free=True)] * 2
    assert shares_of(free, np.array([3, 4])) == [4, 3]
    assert shares_of(partials[:1], np.array([0, 5])) == [0]


@given(symmetric_topologies(8), st.data())
@settings(max_examples=60)
def test_the_cheapest_root_costs_least(topology, data):
    tree = some_tree(topology, data.draw(st.integers(0, topology.ranks - 1)), data.draw)
    depth, height = levels(tree.out.parents)
    assert dict(enumerate(depth.tolist())) == tree.tree.depth
    assert height[tree.root] == tree.tree.height
    # What turning costs, link by link.
    lengths = np.arange(1, len(topology.links) + 1, dtype=np.int64)
    wanted = np.ones(topology.ranks, dtype=np.bool_)
    costs = [int(lengths[rerooted(tree.out, root).links].sum()) for root in range(topology.ranks)]
    found = cheapest_root(WeightedTree(tree.root, F(1), tree.out, free=True), lengths, wanted)
    assert costs[found] == min(costs)


def test_what_hangs_on_a_lost_edge_is_joined_at_the_least_cost():
    # 0-1-2-3 in a row, lost between 1 and 2; 3 is joined to 0 by a cable of its own.
    topology = cabled("drawn", 4, [(0, 1, 1), (1, 2, 1), (2, 3, 1), (0, 3, 1)])
    graph = LogicalGraph(topology)
    whole = WeightedTree.of(graph, Tree(0, F(1), (TreeEdge(0, 1), TreeEdge(1, 2), TreeEdge(2, 3))))
    fewer = Topology.build("fewer", 4, [link for link in topology.links if {link.src, link.dst} != {1, 2}])
    left = rebound(whole, LogicalGraph(fewer))
    assert tops_of(left.out.parents).tolist() == [0, 0, 2, 2]
    routes = grown(left, np.ones(6, dtype=np.int64), np.zeros(4, dtype=np.int64))
    assert routes is not None
    assert routes.tree(F(1), 0).edges == (TreeEdge(0, 1), TreeEdge(0, 3), TreeEdge(3, 2))

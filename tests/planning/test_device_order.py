"""Recursive minimum cuts against brute force and networkx; drawn machines keep their hosts together."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise

import networkx
import pytest
from hypothesis import given, settings

from arborcast import topologies
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.planning.device_order import device_order, minimum_cut, path_weights, transposed
from arborcast.synth.topology import Topology
from tests.support.planning_cases import wired
from tests.support.strategies import topologies as drawn_topologies


def hosts_behind_a_switch(hosts: int, gpus: int, inside: Fraction | int, outside: Fraction | int) -> Topology:
    """GPUs of a host in a clique of cables; each host has one NIC, which they reach over a PCIe switch."""
    ranks = hosts * gpus
    rates = {(a, b): inside for a, b in combinations(range(ranks), 2) if a // gpus == b // gpus}
    rates |= {(rank, ranks + rank // gpus): 16 for rank in range(ranks)}
    rates |= {(ranks + host, ranks + hosts): outside for host in range(hosts)}
    return wired(ranks, rates, switches=[*(f"pcie{host}" for host in range(hosts)), "fabric"])


def cut_value(side, ranks, weights) -> int:
    return sum(weights[a].get(b, 0) for a in side for b in set(ranks) - set(side))


@given(drawn_topologies(max_ranks=6, symmetric=False))
@settings(max_examples=60)
def test_the_cut_is_a_minimum_cut(topology):
    weights = path_weights(LinkCosts(topology))
    ranks = range(topology.ranks)
    side, other = minimum_cut(ranks, weights)
    assert sorted(side + other) == list(ranks)
    assert side
    assert other
    least = min(
        cut_value(half, ranks, weights)
        for size in range(1, topology.ranks)
        for half in combinations(ranks, size)
    )
    assert cut_value(side, ranks, weights) == least
    graph = networkx.Graph()
    graph.add_nodes_from(ranks)
    graph.add_weighted_edges_from((a, b, weights[a][b]) for a in ranks for b in weights[a])
    if networkx.is_connected(graph):
        assert least == networkx.stoer_wagner(graph)[0]


@given(drawn_topologies(max_ranks=6, symmetric=False))
@settings(max_examples=40)
def test_each_half_of_the_cut_is_a_run_of_the_order(topology):
    order = device_order(topology)
    assert sorted(order) == list(range(topology.ranks))
    first, second = minimum_cut(range(topology.ranks), path_weights(LinkCosts(topology)))
    assert set(order[: len(first)]) == set(first)
    assert set(order[len(first) :]) == set(second)


@pytest.mark.parametrize("inside", [8, 13, 100])
def test_four_hosts_of_two_gpus_at_50_gbit_stay_together(inside):
    order = device_order(hosts_behind_a_switch(4, 2, inside, Fraction(25, 4)))
    assert [order[place] // 2 for place in (0, 2, 4, 6)] == [order[place] // 2 for place in (1, 3, 5, 7)]


@pytest.mark.parametrize("spec", ["ring:6", "torus:4x4", "dgx1"])
def test_neighbours_in_the_order_are_linked(spec):
    topology = topologies.load(spec)
    for a, b in pairwise(device_order(topology)):
        assert (a, b) in topology.bandwidth


def test_weights_are_exact_and_go_through_switches_only():
    # 0 - switch - 1 at 1/3 and 1/2 GB/s, narrowest 1/3 each way; 1 - 2 at 1/7; 0 to 2 leads through rank 1.
    rates = {(0, 3): Fraction(1, 3), (3, 1): Fraction(1, 2), (1, 2): Fraction(1, 7)}
    weights = path_weights(LinkCosts(wired(3, rates, switches=["switch"])))
    # 2/3 and 2/7 in units of 1/21
    assert weights == {0: {1: 14}, 1: {0: 14, 2: 6}, 2: {1: 6}}


def test_one_rank_is_an_order():
    assert device_order(Topology.build("one", 1, [])) == (0,)


def test_ranks_that_do_not_reach_each_other_are_refused():
    one_way = wired(2, {(0, 1): 1}, both=False, name="one-way")
    with pytest.raises(PlanError, match="topology one-way: no path leads from rank 1 to rank 0"):
        device_order(one_way)


def test_transposed_orders_go_across_hosts_first():
    topology = hosts_behind_a_switch(2, 3, 100, 6)
    assert transposed((0, 1, 2, 5, 4, 3), LinkCosts(topology)) == ((0, 3, 1, 4, 2, 5),)


def test_where_all_links_are_alike_there_are_no_hosts():
    assert transposed(tuple(range(6)), LinkCosts(topologies.load("ring:6"))) == ()


def test_rails_are_followed_across_boxes():
    network = LinkCosts(topologies.load("dgx-a100:boxes=2,rails=8"))
    (across,) = transposed(device_order(network.topology), network)
    assert [(a % 8, b % 8) for a, b in zip(across[::2], across[1::2], strict=True)] == [
        (gpu, gpu) for gpu in range(8)
    ]

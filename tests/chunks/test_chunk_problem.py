"""What a chunk schedule has to do: routes through switches, demands, distances."""

from __future__ import annotations

from fractions import Fraction

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast.synth.chunks.problem import instance as module
from arborcast.synth.chunks.problem.instance import ChunkProblem, TooManyRoutesError, demands_of, routes_of
from arborcast.synth.collective import Collective, Demand
from arborcast.synth.errors import CollectiveError
from arborcast.synth.topology import Link, Topology
from arborcast.topologies import load
from tests.support.chunk_problems import COPIES
from tests.support.strategies import collectives, topologies


@given(topologies(max_ranks=5, switches=3, connected=False))
def test_routes_are_all_simple_paths_through_switches(topology: Topology) -> None:
    expected = set()
    for src in range(topology.ranks):
        for dst in range(topology.ranks):
            if src == dst:
                continue
            graph = nx.DiGraph()
            graph.add_nodes_from([src, dst])
            inside = {src, dst, *range(topology.ranks, topology.size)}
            graph.add_edges_from((a, b) for a, b in topology.bandwidth if a in inside and b in inside)
            expected |= set(map(tuple, nx.all_simple_paths(graph, src, dst)))
    routes = routes_of(topology)
    assert [(r.src, *r.via, r.dst) for r in routes] == sorted(
        expected, key=lambda path: (path[0], path[-1], path[1:-1])
    )
    for route in routes:
        ends = [(topology.links[i].src, topology.links[i].dst) for i in route.links]
        assert ends == list(zip((route.src, *route.via), (*route.via, route.dst), strict=True))


@given(st.data())
def test_distances_and_latency_are_those_of_the_graph_of_routes(data: st.DataObject) -> None:
    topology = data.draw(topologies(max_ranks=6, switches=2, connected=False, symmetric=False))
    problem = ChunkProblem.of(topology, data.draw(collectives(topology, COPIES, relays=True)))
    graph = nx.DiGraph((route.src, route.dst) for route in problem.routes)
    graph.add_nodes_from(range(topology.ranks))
    away = dict(nx.all_pairs_shortest_path_length(graph))
    for rank in range(topology.ranks):
        assert problem.steps_from(frozenset({rank})) == tuple(map(away[rank].get, range(topology.ranks)))
        assert problem.steps_to(rank) == tuple(away[other].get(rank) for other in range(topology.ranks))
    needed = [
        min((away[s][t] for s in demand.sources if t in away[s]), default=None)
        for demand in problem.demands
        for t in demand.targets
    ]
    assert problem.latency == (None if None in needed else max(needed))  # type: ignore[type-var]


def test_demands_follow_the_buffer() -> None:
    fabric = load("full:3")

    def demands(kind: str) -> list[tuple[list[int], list[int]]]:
        found = demands_of(Collective.on(fabric, kind, root=1))
        return [(sorted(demand.sources), sorted(demand.targets)) for demand in found]

    assert demands("broadcast") == [([1], [0, 2])]
    assert demands("allgather") == [([0], [1, 2]), ([1], [0, 2]), ([2], [0, 1])]
    assert demands("gather") == [([0], [1]), ([2], [1])]
    assert demands("scatter") == [([1], [0]), ([1], [2])]
    assert demands("alltoall")[:3] == [([0], [1]), ([0], [2]), ([1], [0])]


def test_a_custom_collective_is_its_demands() -> None:
    fabric = load("ring:4")
    wanted = (Demand(frozenset({0, 2}), frozenset({1})), Demand(frozenset({3}), frozenset({0, 1})))
    problem = ChunkProblem.of(fabric, Collective.custom(fabric, wanted))
    assert problem.demands == wanted
    assert problem.latency == 2  # from rank 3 to rank 1


@pytest.mark.parametrize("kind", ["reduce", "reduce-scatter", "allreduce"])
def test_a_reduction_is_no_problem_of_copies(kind: str) -> None:
    with pytest.raises(CollectiveError, match=f"{kind}: reduces, and a problem only copies"):
        ChunkProblem.of(load("full:3"), Collective.on(load("full:3"), kind))


def test_too_many_ways_through_switches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ROUTES", 55)
    with pytest.raises(TooManyRoutesError, match="more than 55 ways from rank to rank"):
        routes_of(load("dgx-a100"))  # 8 * 7 = 56 ways through its one switch


def test_two_switches_in_a_row_are_three_links() -> None:
    links = [Link(0, 2, Fraction(1)), Link(2, 3, Fraction(1)), Link(3, 1, Fraction(1))]
    topology = Topology.build("row", 2, links, ["left", "right"])
    (route,) = routes_of(topology)
    assert (route.src, route.dst, route.via, len(route.links)) == (0, 1, (2, 3), 3)

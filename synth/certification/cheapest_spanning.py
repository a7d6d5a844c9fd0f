"""The cheapest tree that joins ranks where links are as long one way as the other.

Then every rank's cheapest out-tree is the same undirected tree, which needs no matrix of distances between
ranks: thousands of them take a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from arborcast.synth.errors import InputError
from arborcast.synth.topology import Topology, Vertex


def metric_mst_cost(
    topology: Topology, lengths: list[int], ends: Iterable[Vertex], through: Iterable[Vertex]
) -> int:
    """The length of the cheapest tree of shortest ways that joins some vertices, in O(links log links).

    Every edge of such a tree runs between ranks whose regions (what is nearer to them than to any other)
    touch, along the touching link (Mehlhorn 1988).

    Args:
        topology: whose links may be used.
        lengths: one per link, not negative, the same for its reverse.
        ends: what is joined.
        through: other vertices, through which ways may lead.

    Raises:
        InputError: they cannot be joined.
    """
    leader = {end: end for end in ends}
    there = {*leader, *through}
    length = {
        (link.src, link.dst): cost
        for link, cost in zip(topology.links, lengths, strict=True)
        if link.src in there and link.dst in there
    }
    nearest, far = _regions(list(leader), there, length)
    bridges = sorted(
        (far[src] + cost + far[dst], nearest[src], nearest[dst])
        for (src, dst), cost in length.items()
        if src < dst and src in nearest and dst in nearest and nearest[src] != nearest[dst]
    )
    total, parts = 0, len(leader)
    for cost, first, second in bridges:
        one, other = _leader(leader, first), _leader(leader, second)
        if one != other:
            leader[one] = other
            total += cost
            parts -= 1
    if parts > 1:
        raise InputError("dual: some rank cannot be reached, a cut shows that")
    return total


def _regions(
    ends: list[Vertex], there: set[Vertex], length: dict[tuple[int, int], int]
) -> tuple[dict[int, int], dict[int, int]]:
    """The nearest end of each vertex that any can reach, and how far it is (Dijkstra 1959)."""
    leaving: dict[int, list[tuple[int, int]]] = {vertex: [] for vertex in there}
    for (src, dst), cost in length.items():
        leaving[src].append((dst, cost))
    # Ends are their own from the start: where lengths are zero, others are as near to them.
    nearest = {end: end for end in ends}
    far = dict.fromkeys(nearest, 0)
    queue = [(cost, vertex, rank) for rank in ends for vertex, cost in leaving[rank]]
    heapify(queue)
    while queue:
        distance, vertex, rank = heappop(queue)
        if vertex in nearest:
            continue
        nearest[vertex], far[vertex] = rank, distance
        for beyond, cost in leaving[vertex]:
            if beyond not in nearest:
                heappush(queue, (distance + cost, beyond, rank))
    return nearest, far


def _leader(leader: dict[int, int], rank: int) -> int:
    """The rank that stands for all that are joined to one; ways to it are halved as they are walked."""
    while leader[rank] != rank:
        leader[rank] = leader[leader[rank]]
        rank = leader[rank]
    return rank

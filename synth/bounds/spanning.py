"""The cheapest tree that joins all ranks where links are as long one way as the other.

Then every rank's cheapest out-tree is the same undirected tree, which needs no matrix of distances between
ranks: thousands of them take a fraction of a second.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from synth.topology import Topology


def joining_cost(topology: Topology, lengths: list[int]) -> int | None:
    """The length of the cheapest tree of shortest ways that joins all ranks, in O(links log links).

    Every edge of such a tree runs between ranks whose regions (what is nearer to them than to any other)
    touch, along the touching link (Mehlhorn 1988).

    Args:
        topology: ranks and switches, through which ways may lead.
        lengths: one per link, not negative.

    Returns:
        None where some link is not as long as its reverse, or the ranks are not connected.
    """
    length = {(link.src, link.dst): cost for link, cost in zip(topology.links, lengths, strict=True)}
    if any(length.get((dst, src)) != cost for (src, dst), cost in length.items()):
        return None
    nearest, far = _regions(topology, length)
    bridges = sorted(
        (far[src] + cost + far[dst], nearest[src], nearest[dst])
        for (src, dst), cost in length.items()
        if src < dst and src in nearest and dst in nearest and nearest[src] != nearest[dst]
    )
    leader = list(range(topology.ranks))
    total, parts = 0, topology.ranks
    for cost, first, second in bridges:
        one, other = _leader(leader, first), _leader(leader, second)
        if one != other:
            leader[one] = other
            total += cost
            parts -= 1
    return total if parts == 1 else None


def _regions(topology: Topology, length: dict[tuple[int, int], int]) -> tuple[dict[int, int], dict[int, int]]:
    """The nearest rank of each vertex that any can reach, and how far it is (Dijkstra 1959)."""
    leaving: dict[int, list[tuple[int, int]]] = {vertex: [] for vertex in range(topology.size)}
    for (src, dst), cost in length.items():
        leaving[src].append((dst, cost))
    # Ranks are their own from the start: where lengths are zero, others are as near to them.
    nearest = {rank: rank for rank in range(topology.ranks)}
    far = dict.fromkeys(nearest, 0)
    queue = [(cost, there, rank) for rank in nearest for there, cost in leaving[rank]]
    heapify(queue)
    while queue:
        distance, vertex, rank = heappop(queue)
        if vertex in nearest:
            continue
        nearest[vertex], far[vertex] = rank, distance
        for there, cost in leaving[vertex]:
            if there not in nearest:
                heappush(queue, (distance + cost, there, rank))
    return nearest, far


def _leader(leader: list[int], rank: int) -> int:
    """The rank that stands for all that are joined to one; ways to it are halved as they are walked."""
    while leader[rank] != rank:
        leader[rank] = leader[leader[rank]]
        rank = leader[rank]
    return rank

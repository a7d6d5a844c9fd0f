"""Maximum flow in exact integers: the kernel under every cut bound and every packing.

Edges become pairs of residual arcs (edge `i` has arcs `2i` forward and `2i + 1` backward, so that the
partner of an arc is `arc ^ 1`). The kernels work in place on int64 residual capacities and can be called
from other compiled kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from arborcast.synth.errors import TopologyError
from arborcast.synth.kernels.compiled import Flags, Ints, kernel
from arborcast.synth.topology import Topology, Vertex

LARGEST_TOTAL = 2**62
"""No sum of capacities may exceed this: a residual arc holds up to its own and its partner's capacity."""


def residual_graph(size: int, src: Ints, dst: Ints) -> tuple[Ints, Ints, Ints]:
    """Adjacency of the residual arcs of a directed graph.

    Args:
        size: number of vertices.
        src: vertex that each edge leaves.
        dst: vertex that each edge enters.

    Returns:
        `(start, arcs, head)`: the arcs that leave vertex v are `arcs[start[v]:start[v + 1]]`, in the order
        of their numbers, and `head[a]` is the vertex that arc a enters.
    """
    count = len(src)
    tail = np.empty(2 * count, dtype=np.int64)
    head = np.empty(2 * count, dtype=np.int64)
    tail[0::2], tail[1::2] = src, dst
    head[0::2], head[1::2] = dst, src
    return *by_vertex(tail, size), head


def by_vertex(ends: Ints, size: int) -> tuple[Ints, Ints]:
    """Edges or arcs by one of their ends: those of vertex v are `order[start[v]:start[v + 1]]`, ascending.

    Args:
        ends: that end of each edge.
        size: number of vertices.

    Returns:
        `(start, order)`.
    """
    start = np.zeros(size + 1, dtype=np.int64)
    np.cumsum(np.bincount(ends, minlength=size), out=start[1:])
    return start, np.argsort(ends, kind="stable").astype(np.int64)


def residual_capacity(capacity: Iterable[int]) -> Ints:
    """Residual capacities of a zero flow: each edge's own on its forward arc, nothing backward.

    Raises:
        TopologyError: the capacities add up to more than int64 arithmetic can hold.
    """
    forward = checked_int64(list(capacity))
    residual = np.zeros(2 * len(forward), dtype=np.int64)
    residual[0::2] = forward
    return residual


def checked_int64(capacity: Sequence[int], factor: int = 1) -> Ints:
    """The capacities times `factor` as int64.

    Raises:
        TopologyError: they add up to more than int64 arithmetic can hold (it would wrap round silently).
    """
    total = sum(int(value) for value in capacity) * factor
    if total > LARGEST_TOTAL:
        raise TopologyError(
            f"bandwidths: their sum in whole units must be at most 2**62 for exact flows, got {total}; "
            "give the bandwidths with fewer digits"
        )
    return np.array([int(value) * factor for value in capacity], dtype=np.int64)


@kernel
def distances_to(start: Ints, arcs: Ints, head: Ints, capacity: Ints, source: int, sink: int) -> Ints:
    """Fewest residual arcs from each vertex to the sink, -1 where unknown.

    The search ends at the source; -1 stands for none and gives all distances.
    """
    size = start.shape[0] - 1
    distance = np.full(size, -1, dtype=np.int64)
    queue = np.empty(size, dtype=np.int64)
    distance[sink] = 0
    queue[0] = sink
    done, found = 0, 1
    while done < found:
        vertex = queue[done]
        done += 1
        if vertex == source:
            break
        for k in range(start[vertex], start[vertex + 1]):
            arc = arcs[k]
            neighbour = head[arc]
            if distance[neighbour] < 0 and capacity[arc ^ 1] > 0:
                distance[neighbour] = distance[vertex] + 1
                queue[found] = neighbour
                found += 1
    return distance


@kernel
def block(
    start: Ints, arcs: Ints, head: Ints, capacity: Ints, distance: Ints, source: int, sink: int, limit: int
) -> int:
    """Send a blocking flow of at most `limit` along arcs that come one closer to the sink."""
    position = start[:-1].copy()
    path = np.empty(start.shape[0], dtype=np.int64)
    flow, depth, vertex = 0, 0, source
    while flow < limit:
        if vertex == sink:
            amount = limit - flow
            for i in range(depth):
                amount = min(amount, capacity[path[i]])
            full = depth
            for i in range(depth - 1, -1, -1):
                capacity[path[i]] -= amount
                capacity[path[i] ^ 1] += amount
                if capacity[path[i]] == 0:
                    full = i
            flow += amount
            if full == depth:  # only the limit stopped it
                break
            depth = full
            vertex = head[path[full] ^ 1]
            continue
        advanced = False
        while position[vertex] < start[vertex + 1]:
            arc = arcs[position[vertex]]
            if capacity[arc] > 0 and distance[head[arc]] == distance[vertex] - 1:
                advanced = True
                path[depth] = arc
                depth += 1
                vertex = head[arc]
                break
            position[vertex] += 1
        if not advanced:
            if vertex == source:
                break
            distance[vertex] = -2  # a dead end: no vertex may step here again in this phase
            depth -= 1
            vertex = head[path[depth] ^ 1]
            position[vertex] += 1
    return flow


@kernel
def dinic(start: Ints, arcs: Ints, head: Ints, capacity: Ints, source: int, sink: int, limit: int) -> int:
    """Send as much flow as possible, at most `limit`, from source to sink; returns the amount.

    `capacity` holds the residual capacities and is changed in place, so that flows can be continued,
    rerouted or read off. Dinic 1970, O(V²E); in practice a few searches.
    """
    flow = 0
    while flow < limit:
        distance = distances_to(start, arcs, head, capacity, source, sink)
        if distance[source] < 0:
            break
        flow += block(start, arcs, head, capacity, distance, source, sink, limit - flow)
    return flow


@kernel
def reachable(start: Ints, arcs: Ints, head: Ints, capacity: Ints, source: int) -> Flags:
    """The vertices that residual arcs lead to; after a maximum flow, the source side of a minimum cut."""
    return _closure(start, arcs, head, capacity, source, 0)


@kernel
def reaching(start: Ints, arcs: Ints, head: Ints, capacity: Ints, sink: int) -> Flags:
    """The vertices from which residual arcs lead to the sink; the rest is the largest minimum cut's side."""
    return _closure(start, arcs, head, capacity, sink, 1)


@kernel
def _closure(start: Ints, arcs: Ints, head: Ints, capacity: Ints, origin: int, against: int) -> Flags:
    """All that can be walked to along residual arcs, or with `against` = 1 against their direction."""
    size = start.shape[0] - 1
    found = np.zeros(size, dtype=np.bool_)
    queue = np.empty(size, dtype=np.int64)
    found[origin] = True
    queue[0] = origin
    done, count = 0, 1
    while done < count:
        vertex = queue[done]
        done += 1
        for k in range(start[vertex], start[vertex + 1]):
            arc = arcs[k]
            if capacity[arc ^ against] > 0 and not found[head[arc]]:
                found[head[arc]] = True
                queue[count] = head[arc]
                count += 1
    return found


def link_arrays(topology: Topology) -> tuple[Ints, Ints]:
    """The vertices that the links leave and enter, in the order of `topology.links`."""
    src = np.array([link.src for link in topology.links], dtype=np.int64)
    dst = np.array([link.dst for link in topology.links], dtype=np.int64)
    return src, dst


def members(mask: npt.NDArray[Any]) -> frozenset[Vertex]:
    """The vertices that a mask marks."""
    return frozenset(np.flatnonzero(mask).tolist())

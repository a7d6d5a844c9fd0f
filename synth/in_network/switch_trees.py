"""Cheap trees over all ranks and switches that both add and multicast, at any size.

For fabrics too large for exact Steiner trees. A tree without direction serves both ways of an allreduce. The
cheapest over the ranks and some chosen switches is a minimum spanning tree of their metric closure; switches
that then serve nobody are dropped and the rest is spanned again (Kou, Markowsky and Berman 1981).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

import numpy as np

from arborcast.synth.in_network.steiner_tree import SteinerTree
from arborcast.synth.kernels.compiled import Flags, Ints, kernel
from arborcast.synth.kernels.link_graph import LinkGraph
from arborcast.synth.topology import Topology, Vertex
from arborcast.synth.tree import TreeEdge

Way = tuple[Vertex, ...]
"""The vertices that an edge passes: its ends, and between them switches that only forward."""


@dataclass(frozen=True)
class SpanningTree:
    """Edges without direction between ranks and switches that have at least three of them."""

    ways: tuple[Way, ...]

    @cached_property
    def around(self) -> dict[Vertex, list[Way]]:
        """Of each end its edges, seen from there."""
        found: dict[Vertex, list[Way]] = defaultdict(list)
        for way in self.ways:
            found[way[0]].append(way)
            found[way[-1]].append(way[::-1])
        return dict(found)

    def rooted(self, topology: Topology, root: Vertex) -> SteinerTree:
        """The tree from a root, the way back of switches with loopback included."""
        edges: list[TreeEdge] = []
        returns: list[TreeEdge] = []
        waiting = [(root, root)]
        for vertex, parent in waiting:
            for way in sorted(self.around[vertex], key=lambda way: (way[-1], way)):
                child = way[-1]
                if child == parent:
                    continue
                edges.append(TreeEdge(vertex, child, way[1:-1]))
                waiting.append((child, vertex))
                if vertex < topology.ranks <= child and topology.switches[child - topology.ranks].loopback:
                    returns.append(TreeEdge(child, vertex, way[-2:0:-1]))
        return SteinerTree(root, tuple(edges), tuple(returns))

    def centre(self, roots: Iterable[Vertex]) -> Vertex:
        """The one of these ends from which the farthest is the fewest edges away; the lowest of equals."""
        first = self._distances(min(self.around))
        one_end = max(first, key=first.__getitem__)
        from_one = self._distances(one_end)
        from_other = self._distances(max(from_one, key=from_one.__getitem__))
        return min(
            (vertex for vertex in roots if vertex in self.around),
            key=lambda vertex: (max(from_one[vertex], from_other[vertex]), vertex),
        )

    def _distances(self, start: Vertex) -> dict[Vertex, int]:
        distance = {start: 0}
        for vertex in (waiting := [start]):
            for way in self.around[vertex]:
                if way[-1] not in distance:
                    distance[way[-1]] = distance[vertex] + 1
                    waiting.append(way[-1])
        return distance


@dataclass(frozen=True, eq=False)
class Spanning:
    """Finds cheap trees of one fabric, each of whose links has a reverse, under any lengths."""

    topology: Topology

    @cached_property
    def _graph(self) -> LinkGraph:
        return LinkGraph(self.topology)

    def cheapest(self, lengths: Ints, through: Iterable[Vertex]) -> SpanningTree:
        """A tree over all ranks, which must be connected.

        Args:
            lengths: of each link, whole numbers of at least 1; an edge costs both directions.
            through: switches at which it may branch.
        """
        both = lengths + lengths[self._graph.reverse]
        chosen = frozenset(through)
        while True:
            tree = SpanningTree(self._pruned(self._over(both, chosen)))
            branching = frozenset(vertex for vertex in tree.around if self.topology.is_switch(vertex))
            if branching == chosen:
                return tree
            chosen = branching

    def _over(self, lengths: Ints, through: frozenset[Vertex]) -> list[Way]:
        stops = np.zeros(self.topology.size, dtype=np.bool_)
        stops[: self.topology.ranks] = True
        stops[sorted(through)] = True
        graph = self._graph
        ends, vertices = _grown(*graph.leaving, graph.heads, graph.tails, lengths, stops)
        return [tuple(way.tolist()) for way in np.split(vertices, ends)[:-1]]

    def _pruned(self, ways: list[Way]) -> tuple[Way, ...]:
        """Without switches at the ends of the tree; one with two edges only forwards."""
        around: dict[Vertex, set[Way]] = defaultdict(set)
        for way in ways:
            around[way[0]].add(way)
            around[way[-1]].add(way[::-1])
        waiting = sorted(filter(self.topology.is_switch, around))
        for vertex in waiting:
            if len(around[vertex]) > 2:
                continue
            its = sorted(around.pop(vertex, ()))
            for way in its:
                around[way[-1]].discard(way[::-1])
                if self.topology.is_switch(way[-1]):
                    waiting.append(way[-1])
            if len(its) == 2:
                joined = (*its[0][::-1], *its[1][1:])
                around[joined[0]].add(joined)
                around[joined[-1]].add(joined[::-1])
        return tuple(sorted(way for its in around.values() for way in its if way[0] < way[-1]))


@kernel
def _grown(
    start: Ints, order: Ints, heads: Ints, tails: Ints, lengths: Ints, stops: Flags
) -> tuple[Ints, Ints]:
    """Prim's tree over the stops, by shortest ways that pass no other stop.

    Returns:
        Where the way of each edge ends, and the vertices of all ways, each from the stop that joined to the
        one that it joined.
    """
    size, count = stops.shape[0], stops.sum()
    far = np.int64(1) << 62
    distance, last = np.full(size, far), np.full(size, -1)
    done = np.zeros(size, np.bool_)
    ends = np.empty(count - 1, np.int64)
    passed = [0 for _ in range(0)]  # the empty comprehension tells numba what the list holds
    queue = [(np.int64(0), 0)]
    distance[0] = joined = 0
    while len(queue) > 0 and joined < count:
        reached, here = heappop(queue)
        if done[here] or reached > distance[here]:
            continue
        if stops[here]:
            done[here] = True
            if joined > 0:
                vertex = here
                passed.append(vertex)
                while vertex == here or not stops[vertex]:
                    vertex = tails[last[vertex]]
                    passed.append(vertex)
                ends[joined - 1] = len(passed)
            joined += 1
            reached = np.int64(0)
        for place in range(start[here], start[here + 1]):
            link = order[place]
            there = heads[link]
            if not done[there] and reached + lengths[link] < distance[there]:
                distance[there] = reached + lengths[link]
                last[there] = link
                heappush(queue, (distance[there], there))
    return ends, np.array(passed)

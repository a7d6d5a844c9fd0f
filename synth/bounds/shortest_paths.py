"""Shortest ways from one vertex after another, where every vertex may forward, in exact integers.

Under the limits of all-to-all collectives and under the search for their routes, whatever the sizes of their
blocks. On sparse fabrics this is what lets a thousand ranks be certified in a fraction of a second (Dijkstra
1959 with a binary heap).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arborcast.synth.kernels.compiled import Ints, kernel
from arborcast.synth.kernels.edmonds import LengthArray
from arborcast.synth.kernels.link_graph import LinkGraph

FAR = 1 << 60
"""The distance of what cannot be reached; sums of lengths must stay below it."""


@dataclass(frozen=True, eq=False)
class ShortestPaths(LinkGraph):
    """A topology made ready for many searches with other lengths."""

    def tree(self, lengths: Ints, source: int) -> ShortestTree:
        """A tree of shortest ways from one vertex; ties fall to the link that was looked at first.

        Args:
            lengths: one per link, at least 0.
            source: where all ways start.
        """
        start, links = self.leaving
        distance, entering, order = shortest_tree(start, links, self.heads, lengths, source)
        return ShortestTree(distance, entering, order)

    def distances(self, lengths: Ints, sources: Ints) -> Ints:
        """Row i holds the distances from `sources[i]` to all vertices, `FAR` where no way leads."""
        found = np.empty((len(sources), self.topology.size), dtype=np.int64)
        for row, source in enumerate(sources.tolist()):
            found[row] = self.tree(lengths, source).distance
        return found


@dataclass(frozen=True, eq=False)
class ShortestTree:
    """Shortest ways from one vertex.

    Attributes:
        distance: to each vertex, `FAR` where no way leads.
        entering: the last link of the way to each vertex, -1 for the source and what cannot be reached.
        order: the vertices that can be reached, nearest first.
    """

    distance: Ints
    entering: Ints
    order: Ints


@kernel
def shortest_tree(
    start: Ints, links: Ints, heads: Ints, lengths: LengthArray, source: int
) -> tuple[LengthArray, Ints, Ints]:
    """What `ShortestTree` holds, for other kernels; a link of a negative length is closed.

    Dijkstra with lazy deletion; the heap holds pairs of a distance and a vertex.
    """
    size = len(start) - 1
    distance = np.full(size, FAR, dtype=lengths.dtype)
    entering = np.full(size, -1, dtype=np.int64)
    order = np.empty(size, dtype=np.int64)
    keys = np.empty(len(heads) + 1, dtype=lengths.dtype)
    held = np.empty(len(heads) + 1, dtype=np.int64)
    done = np.zeros(size, dtype=np.bool_)
    keys[0], held[0], count, reached = 0, source, 1, 0
    distance[source] = 0
    while count > 0:
        vertex = held[0]
        count -= 1
        _sift_down(keys, held, count, keys[count], held[count])
        if done[vertex]:
            continue
        done[vertex] = True
        order[reached] = vertex
        reached += 1
        for position in range(start[vertex], start[vertex + 1]):
            link = links[position]
            if lengths[link] < 0:
                continue
            head = heads[link]
            far = distance[vertex] + lengths[link]
            if far < distance[head]:
                distance[head] = far
                entering[head] = link
                _sift_up(keys, held, count, far, head)
                count += 1
    return distance, entering, order[:reached]


@kernel
def _sift_up(keys: LengthArray, held: Ints, place: int, key: float, vertex: int) -> None:
    """Put a pair at the end of the heap, then where it belongs."""
    while place > 0:
        above = (place - 1) // 2
        if keys[above] <= key:
            break
        keys[place], held[place] = keys[above], held[above]
        place = above
    keys[place], held[place] = key, vertex


@kernel
def _sift_down(keys: LengthArray, held: Ints, count: int, key: float, vertex: int) -> None:
    """Put a pair at the top of the heap of `count` pairs, then where it belongs."""
    place = 0
    while 2 * place + 1 < count:
        below = 2 * place + 1
        if below + 1 < count and keys[below + 1] < keys[below]:
            below += 1
        if keys[below] >= key:
            break
        keys[place], held[place] = keys[below], held[below]
        place = below
    keys[place], held[place] = key, vertex

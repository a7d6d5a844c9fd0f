"""Trees down to their links, as arrays: what packings of a thousand trees are made of until the last step.

A tree of 1,024 ranks is three arrays here and a thousand objects as a `Tree`; the transforms on trees that
large schedules need (another root, the root in the middle) are kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Self

import numpy as np

from arborcast.synth.errors import ScheduleError
from arborcast.synth.kernels.arborescence import Routes, levels
from arborcast.synth.kernels.compiled import Ints, kernel
from arborcast.synth.kernels.link_graph import LinkGraph
from arborcast.synth.tree import Tree


@dataclass(frozen=True, eq=False)
class ArrayTree:
    """A spanning out-tree with a weight.

    Attributes:
        root: where it starts.
        weight: the GB/s that it carries.
        routes: the parent of each rank and the links of each edge.
    """

    root: int
    weight: Fraction
    routes: Routes

    @classmethod
    def of(cls, graph: LinkGraph, tree: Tree) -> Self:
        """A tree of the graph's topology as arrays.

        Raises:
            ScheduleError: an edge passes a link that the topology lacks.
        """
        index = {(link.src, link.dst): place for place, link in enumerate(graph.topology.links)}
        parents = np.full(graph.topology.ranks, -1, dtype=np.int64)
        ways: dict[int, list[int]] = {}
        for edge in tree.edges:
            path = (edge.parent, *edge.via, edge.child)
            parents[edge.child] = edge.parent
            for src, dst in pairwise(path):
                if (src, dst) not in index:
                    raise ScheduleError(
                        f"tree of root {tree.root}: {graph.topology.name} has no link {src}->{dst}"
                    )
            ways[edge.child] = [index[hop] for hop in pairwise(path)]
        lengths = [len(ways.get(child, ())) for child in range(graph.topology.ranks)]
        links = [link for child in sorted(ways) for link in ways[child]]
        starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        return cls(tree.root, tree.weight, Routes(graph, parents, starts, np.array(links, dtype=np.int64)))

    @property
    def key(self) -> tuple[bytes, bytes]:
        """Tells apart trees of any weight over one graph."""
        return self.routes.parents.tobytes(), self.routes.links.tobytes()

    @property
    def tree(self) -> Tree:
        """The same as a value."""
        return self.routes.tree(self.weight, self.root)


def over(graph: LinkGraph, tree: ArrayTree) -> ArrayTree:
    """The tree over a graph that has at least its links."""
    number = same_links(tree.routes.graph, graph)
    routes = tree.routes
    links = routes.links if number is None else number[routes.links]
    return replace(tree, routes=Routes(graph, routes.parents, routes.starts, links))


def same_links(old: LinkGraph, new: LinkGraph) -> Ints | None:
    """For each link of a graph its number in another one of the same vertices, -1 where it lacks it.

    None where both have the same links.
    """
    if old is new or (np.array_equal(old.tails, new.tails) and np.array_equal(old.heads, new.heads)):
        return None
    return new.numbers(old.tails, old.heads)


def rerooted_routes(routes: Routes, root: int, reverse: Ints) -> Routes:
    """The same undirected edges, with another rank as the root; every link needs its reverse."""
    return Routes(routes.graph, *_rerooted(routes.parents, routes.starts, routes.links, root, reverse))


def centred_routes(tree: ArrayTree, reverse: Ints) -> ArrayTree:
    """The tree with its root moved to the centre, as `synth.packing.carrier.centred` does."""
    root = int(_centre(tree.routes.parents, tree.root))
    if root == tree.root:
        return tree
    return ArrayTree(root, tree.weight, rerooted_routes(tree.routes, root, reverse))


@kernel
def _centre(parents: Ints, root: int) -> int:
    """The root where it is a middle of a longest path, else the lowest middle."""
    size = parents.shape[0]
    depth, _ = levels(parents)
    first = 0
    for vertex in range(size):
        if depth[vertex] > depth[first]:
            first = vertex
    # Walking away from one end of a longest path ends at the other.
    before, last = _walk(parents, first)
    length, here = 0, last
    while here != first:
        length += 1
        here = before[here]
    here = last
    for _ in range(length // 2):
        here = before[here]
    other = here if length % 2 == 0 else before[here]
    if root in (here, other):
        return root
    lowest: int = min(here, other)
    return lowest


@kernel
def _walk(parents: Ints, first: int) -> tuple[Ints, int]:
    """Breadth first over the edges both ways: from where each rank was reached, and which was the last."""
    size = parents.shape[0]
    start = np.zeros(size + 2, dtype=np.int64)
    for child in range(size):
        if parents[child] >= 0:
            start[child + 2] += 1
            start[parents[child] + 2] += 1
    for vertex in range(size):
        start[vertex + 2] += start[vertex + 1]
    around = np.empty(max(1, start[size + 1]), np.int64)
    for child in range(size):
        if parents[child] >= 0:
            around[start[child + 1]] = parents[child]
            start[child + 1] += 1
            around[start[parents[child] + 1]] = child
            start[parents[child] + 1] += 1
    before, queue = np.full(size, -1), np.empty(size, np.int64)
    queue[0] = first
    before[first] = first
    found = 1
    for place in range(size):
        if place == found:
            break
        here = queue[place]
        for position in range(start[here], start[here + 1]):
            there = around[position]
            if before[there] < 0:
                before[there] = here
                queue[found] = there
                found += 1
    return before, queue[found - 1]


@kernel
def _rerooted(parents: Ints, starts: Ints, links: Ints, root: int, reverse: Ints) -> tuple[Ints, Ints, Ints]:
    size = parents.shape[0]
    above, begin, length = parents.copy(), starts[:-1].copy(), starts[1:] - starts[:-1]
    turned = np.zeros(size, dtype=np.bool_)
    child, here = root, parents[root]
    above[root] = -1
    while here >= 0:  # the edge into `child` becomes the one into its parent
        following = parents[here]
        above[here] = child
        begin[here], length[here] = starts[child], starts[child + 1] - starts[child]
        turned[here] = True
        child, here = here, following
    length[root] = 0
    fresh, ways = np.zeros(size + 1, dtype=np.int64), np.empty(links.shape[0], np.int64)
    for vertex in range(size):
        place = fresh[vertex]
        for step in range(length[vertex]):
            if turned[vertex]:
                ways[place + step] = reverse[links[begin[vertex] + length[vertex] - 1 - step]]
            else:
                ways[place + step] = links[begin[vertex] + step]
        fresh[vertex + 1] = place + length[vertex]
    return above, fresh, ways

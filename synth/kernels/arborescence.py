"""Cheapest spanning out-trees of the ranks, where an edge is a shortest way through switches.

A kernel of the packings: `LogicalGraph.distances` closes the graph over its switches (each rank sees the
others directly), `cheapest_arborescence` finds the tree, and `Distances.routes` says which links it loads.
Lengths and costs are float64 or int64; with int64 every answer is exact and the same on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from arborcast.synth.errors import InfeasibleError
from arborcast.synth.kernels.compiled import Ints, kernel
from arborcast.synth.kernels.edmonds import LOST, LengthArray, edmonds
from arborcast.synth.kernels.link_graph import LinkGraph
from arborcast.synth.tree import Tree, TreeEdge

UNREACHABLE = 1 << 62
"""The int64 distance of what cannot be reached (float64: infinity)."""

FORBIDDEN = 1 << 60
"""int64 lengths and costs from here on mean "do not use" (float64: infinity)."""


def cheapest_arborescence(cost: LengthArray, root: int) -> Ints:
    """The parents of a minimum-cost spanning out-tree of a dense graph (Edmonds 1967), in O(n^2).

    Args:
        cost: `cost[parent, child]`, n x n, float64 or int64, of any sign; infinity or at least `FORBIDDEN`
            for an edge that must not be used. The diagonal is ignored and the argument is not changed.
        root: where the tree starts.

    Returns:
        The parent of each vertex, -1 for the root. Ties fall to the lowest parent: no randomness.

    Raises:
        InfeasibleError: some vertices cannot be reached from the root.
        OverflowError: int64 costs so large that sums of n of them might not fit.
    """
    entering = np.array(cost.T, dtype=_arithmetic(cost), order="C")
    limit = _limit(entering)
    usable = entering[entering < limit]
    if entering.dtype == np.int64 and usable.size and int(np.abs(usable).max()) * len(entering) >= FORBIDDEN:
        raise OverflowError(f"costs up to {np.abs(usable).max()} on {len(entering)} vertices exceed int64")
    return arborescence_destroying(entering, root)


def arborescence_destroying(entering: LengthArray, root: int) -> Ints:
    """`cheapest_arborescence` for hot loops: takes `entering[child, parent]` and overwrites it.

    The caller sees to it that n int64 costs add up to less than `FORBIDDEN`.
    """
    parents = edmonds(entering, root, _limit(entering))
    lost = np.flatnonzero(parents == LOST)
    if lost.size:
        raise InfeasibleError(f"no tree from rank {root}: nothing outside ranks {lost.tolist()} reaches them")
    return parents


@dataclass(frozen=True, eq=False)
class LogicalGraph(LinkGraph):
    """A topology made ready for closing it over its switches, again and again with other lengths."""

    def distances(self, lengths: LengthArray, children: Ints | None = None) -> Distances:
        """Shortest ways from each rank to each other rank that pass switches only, never a third rank.

        Args:
            lengths: one per link of the topology, float64 or int64, not negative; infinity or at least
                `FORBIDDEN` for a link that must not be used. int64 lengths must be small enough that
                the longest way through the switches stays under `FORBIDDEN`.
            children: the ranks whose incoming distances are wanted, the others' rows are left unfilled;
                None for all.
        """
        ranks, switches = self.topology.ranks, len(self.topology.switches)
        kind = _arithmetic(lengths)
        lengths = np.ascontiguousarray(lengths, dtype=kind)
        far = np.inf if kind == np.float64 else UNREACHABLE
        limit = np.inf if kind == np.float64 else FORBIDDEN
        toward = np.full((switches, ranks), far, dtype=kind)
        last_link = np.full((switches, ranks), -1, dtype=np.int64)
        _close_switches(ranks, *self.leaving, self.tails, self.heads, lengths, limit, toward, last_link)
        entering = np.empty((ranks, ranks), dtype=kind)
        wanted = np.arange(ranks, dtype=np.int64) if children is None else children
        _close_ranks(*self.arriving, self.tails, lengths, limit, far, toward, wanted, entering)
        return Distances(self, lengths, entering, toward, last_link)


@dataclass(frozen=True, eq=False)
class Distances:
    """What `LogicalGraph.distances` found.

    Attributes:
        graph: what was closed.
        lengths: the link lengths it was closed with.
        entering: `entering[child, parent]`, the transpose of `matrix`, contiguous, for the tree kernel.
        toward: `toward[switch - ranks, rank]`, the distance from the rank to the switch.
        last_link: the link on which the shortest way from the rank arrives at the switch, -1 for none.
    """

    graph: LogicalGraph
    lengths: LengthArray
    entering: LengthArray
    toward: LengthArray
    last_link: Ints

    @property
    def matrix(self) -> LengthArray:
        """`matrix[src, dst]`; infinite (float64) or `UNREACHABLE` (int64) where there is no way."""
        return self.entering.T

    def routes(self, parents: Ints) -> Routes:
        """The links behind the tree edges `parents[child] -> child`; vertices with parent -1 have none.

        Raises:
            InfeasibleError: an edge joins two ranks without a way between them.
        """
        graph = self.graph
        starts, links = _trace(
            parents,
            *graph.arriving,
            graph.tails,
            self.lengths,
            _limit(self.lengths),
            self.entering,
            self.toward,
            self.last_link,
        )
        if starts[-1] < 0:
            child = int(-starts[-1] - 1)
            raise InfeasibleError(f"no way through switches from rank {parents[child]} to rank {child}")
        return Routes(graph, parents, starts, links)


@dataclass(frozen=True, eq=False)
class Routes:
    """A tree down to its links: the edge into `child` passes `links[starts[child]:starts[child + 1]]`."""

    graph: LinkGraph
    parents: Ints
    starts: Ints
    links: Ints

    def edge(self, child: int) -> Ints:
        """Link indices of the edge into a rank, from its parent on."""
        return self.links[self.starts[child] : self.starts[child + 1]]

    @property
    def height(self) -> int:
        """The most edges between the root and a rank."""
        return int(levels(self.parents)[0].max())

    def uses(self) -> Ints:
        """How many edges of the tree pass each link."""
        return np.bincount(self.links, minlength=len(self.graph.tails)).astype(np.int64)

    def joined(self, more: Routes) -> Routes:
        """One tree of the edges of both, over one graph; of two into a rank the second counts."""
        mine = self.parents, self.starts, self.links
        return Routes(self.graph, *_joined(*mine, more.parents, more.starts, more.links))

    def over(self, graph: LinkGraph, images: Ints | None = None) -> Routes:
        """The same tree over the links of another graph, which may have more ranks.

        Args:
            graph: of the same vertices or of their images; a link that it lacks becomes -1.
            images: what each vertex is called there; None where it keeps its number.
        """
        old = self.graph
        if images is None and graph.ranks == old.ranks and graph.numbers_as(old):
            return replace(self, graph=graph)
        tails, heads = old.tails[self.links], old.heads[self.links]
        parents = np.full(graph.ranks, -1, dtype=np.int64)
        counts = np.zeros(graph.ranks + 1, dtype=np.int64)
        if images is None:
            parents[: len(self.parents)] = self.parents
            counts[1 : len(self.starts)] = np.diff(self.starts)
        else:
            children = np.flatnonzero(self.parents >= 0)
            parents[images[children]] = images[self.parents[children]]
            counts[images[children] + 1] = np.diff(self.starts)[children]
            order = np.argsort(images[np.repeat(children, np.diff(self.starts)[children])], kind="stable")
            tails, heads = images[tails[order]], images[heads[order]]
        return Routes(graph, parents, np.cumsum(counts), graph.numbers(tails, heads))

    def tree(self, weight: Fraction, root: int) -> Tree:
        """The tree as a value, parents before children."""
        children: dict[int, list[int]] = {}
        for child, parent in enumerate(self.parents.tolist()):
            children.setdefault(parent, []).append(child)
        heads, starts = self.graph.heads[self.links].tolist(), self.starts.tolist()
        edges: list[TreeEdge] = []
        wave = [root]
        for parent in wave:  # grows while it is walked: breadth first
            for child in children.get(parent, ()):
                edges.append(TreeEdge(parent, child, tuple(heads[starts[child] : starts[child + 1] - 1])))
                wave.append(child)
        return Tree(root, weight, tuple(edges))


@kernel
def levels(parents: Ints) -> tuple[Ints, Ints]:
    """For each rank the edges from its tree's top, and the most edges from it down to a leaf."""
    size = parents.shape[0]
    depth, height = np.full(size, -1), np.zeros(size, dtype=np.int64)
    way = np.empty(size, np.int64)
    for start in range(size):
        length, here = 0, start
        while here >= 0 and depth[here] < 0:
            way[length] = here
            length += 1
            here = parents[here]
        above = depth[here] if here >= 0 else -1
        for place in range(length - 1, -1, -1):
            above += 1
            depth[way[place]] = above
    for start in range(size):
        here, steps = start, 0
        while parents[here] >= 0:
            here = parents[here]
            steps += 1
            if height[here] >= steps:
                break
            height[here] = steps
    return depth, height


def _arithmetic(values: LengthArray) -> type[np.int64] | type[np.float64]:
    return np.int64 if np.issubdtype(values.dtype, np.integer) else np.float64


def _limit(values: LengthArray) -> int | float:
    return np.inf if values.dtype == np.float64 else FORBIDDEN


@kernel
def _close_switches(
    ranks: int,
    start: Ints,
    order: Ints,
    tails: Ints,
    heads: Ints,
    lengths: LengthArray,
    limit: float,
    toward: LengthArray,
    last_link: Ints,
) -> None:
    """Fill the distances from ranks to switches: Bellman and Ford's algorithm, a row of ranks at a time."""
    switches = toward.shape[0]
    queue, queued = np.empty(switches + 1, np.int64), np.zeros(switches, dtype=np.bool_)
    first, last = 0, 0
    for link in range(lengths.shape[0]):
        switch = heads[link] - ranks
        if tails[link] < ranks <= heads[link] and lengths[link] < limit:
            toward[switch, tails[link]] = lengths[link]
            last_link[switch, tails[link]] = link
            if not queued[switch]:
                queued[switch] = True
                queue[last] = switch
                last += 1
    while first != last:
        here = queue[first]
        first = (first + 1) % (switches + 1)
        queued[here] = False
        for place in range(start[here + ranks], start[here + ranks + 1]):
            link = order[place]
            there = heads[link] - ranks
            if there < 0 or lengths[link] >= limit:
                continue
            if (
                _relax(toward[here], lengths[link], toward[there], link, last_link[there])
                and not queued[there]
            ):
                queued[there] = True
                queue[last] = there
                last = (last + 1) % (switches + 1)


@kernel
def _relax(here: LengthArray, length: float, there: LengthArray, link: int, last_link: Ints) -> bool:
    shorter = False
    for rank in range(here.shape[0]):
        through = here[rank] + length
        if through < there[rank]:
            there[rank] = through
            last_link[rank] = link
            shorter = True
    return shorter


@kernel
def _close_ranks(
    start: Ints,
    order: Ints,
    tails: Ints,
    lengths: LengthArray,
    limit: float,
    far: float,
    toward: LengthArray,
    children: Ints,
    entering: LengthArray,
) -> None:
    """Fill the distances from ranks to some ranks, the last link being one from a rank or from a switch."""
    ranks = entering.shape[0]
    for child in children:
        row = entering[child]
        row[:] = far
        for place in range(start[child], start[child + 1]):
            link = order[place]
            tail, length = tails[link], lengths[link]
            if length >= limit:
                continue
            if tail < ranks:
                row[tail] = min(row[tail], length)
            else:
                by_switch = toward[tail - ranks]
                for parent in range(ranks):
                    row[parent] = min(row[parent], by_switch[parent] + length)


@kernel
def _trace(
    parents: Ints,
    start: Ints,
    order: Ints,
    tails: Ints,
    lengths: LengthArray,
    limit: float,
    entering: LengthArray,
    toward: LengthArray,
    last_link: Ints,
) -> tuple[Ints, Ints]:
    """Links of every tree edge, child by child; `starts` ends in -(child + 1) where a child has no way in."""
    ranks = parents.shape[0]
    starts, links = np.zeros(ranks + 1, np.int64), np.empty(8 * ranks, np.int64)
    count = 0
    for child in range(ranks):
        parent, begin = parents[child], count
        at = child if parent >= 0 else parent
        while at != parent:
            found = -1
            if at >= ranks:
                found = last_link[at - ranks, parent]
            else:
                for place in range(start[at], start[at + 1]):
                    link = order[place]
                    tail, length = tails[link], lengths[link]
                    if length < limit and (tail == parent or tail >= ranks):
                        before = toward[tail - ranks, parent] if tail >= ranks else length - length
                        if before + length == entering[at, parent] and before + length < limit:
                            found = link
                            break
            if found < 0:
                starts[ranks] = -(child + 1)
                return starts, links
            if count == links.shape[0]:
                links = np.concatenate((links, np.empty(count, np.int64)))
            links[count] = found
            count += 1
            at = tails[found]
        links[begin:count] = links[begin:count][::-1].copy()
        starts[child + 1] = count
    return starts, links[:count].copy()


@kernel
def _joined(
    parents: Ints, starts: Ints, links: Ints, more: Ints, more_starts: Ints, more_links: Ints
) -> tuple[Ints, Ints, Ints]:
    """One tree from two sets of edges; where both have one into a rank, the second counts."""
    size = parents.shape[0]
    both, ways = parents.copy(), np.empty(links.shape[0] + more_links.shape[0], np.int64)
    fresh = np.zeros(size + 1, dtype=np.int64)
    count = 0
    for child in range(size):
        if more[child] >= 0:
            both[child] = more[child]
            for place in range(more_starts[child], more_starts[child + 1]):
                ways[count] = more_links[place]
                count += 1
        elif parents[child] >= 0:
            for place in range(starts[child], starts[child + 1]):
                ways[count] = links[place]
                count += 1
        fresh[child + 1] = count
    return both, fresh, ways[:count].copy()

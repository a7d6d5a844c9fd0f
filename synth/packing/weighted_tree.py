"""What carries a part of the buffer: a spanning tree with a weight; for an allreduce also one that gathers.

All packings work with these, down to the links: a tree of 1,024 ranks is three arrays here and a thousand
objects as a `Tree`, which is for reading. Here are the transforms on them, too: pair up trees by weight, move
a root to the centre, merge what is the same, see how full the links are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

import numpy as np

from arborcast.synth.errors import ScheduleError
from arborcast.synth.kernels.arborescence import Routes, levels
from arborcast.synth.kernels.compiled import Ints, kernel
from arborcast.synth.kernels.link_graph import LinkGraph
from arborcast.synth.kernels.max_flow import LARGEST_TOTAL
from arborcast.synth.schedule import Settings
from arborcast.synth.topology import Topology
from arborcast.synth.tree import Tree


@dataclass(frozen=True, eq=False)
class WeightedTree:
    """A spanning out-tree with a weight; for an allreduce a pair of trees.

    Attributes:
        root: where it starts; in an allreduce the sum is complete there.
        weight: the GB/s of the buffer that it carries.
        out: the parent of each rank and the links of each edge.
        into: for an allreduce the tree along which is gathered, as an out-tree over the links turned round.
        free: of what is proposed to a packing, whether it may start at any rank as well: its edges exist in
            both directions. Besides the root, ranks whose edge a fault took then have parent -1.
    """

    root: int
    weight: Fraction
    out: Routes
    into: Routes | None = None
    free: bool = False

    @classmethod
    def of(cls, graph: LinkGraph, tree: Tree) -> WeightedTree:
        """A tree that was written down, over the links of a graph.

        Raises:
            ScheduleError: an edge passes a link that the graph lacks.
        """
        hops = [
            (edge.child, src, dst)
            for edge in sorted(tree.edges, key=lambda edge: edge.child)
            for src, dst in pairwise((edge.parent, *edge.via, edge.child))
        ]
        child, src, dst = np.array(hops, dtype=np.int64).reshape(-1, 3).T
        links = graph.numbers(src, dst)
        if (links < 0).any():
            _, here, there = hops[int(np.argmin(links))]
            raise ScheduleError(
                f"tree of root {tree.root}: {graph.topology.name} has no link {here}->{there}"
            )
        parents = np.full(graph.ranks, -1, dtype=np.int64)
        for edge in tree.edges:
            parents[edge.child] = edge.parent
        starts = np.searchsorted(child, np.arange(graph.ranks + 1)).astype(np.int64)
        return cls(tree.root, tree.weight, Routes(graph, parents, starts, links))

    @property
    def tree(self) -> Tree:
        """The tree along which is spread, to be read."""
        return self.out.tree(self.weight, self.root)

    @property
    def key(self) -> tuple[bytes, ...]:
        """Tells apart carriers of any weight over one graph."""
        trees = (self.out,) if self.into is None else (self.out, self.into)
        return tuple(part.tobytes() for routes in trees for part in (routes.parents, routes.links))

    @cached_property
    def uses(self) -> Ints:
        """How often it passes each link."""
        return self.out.uses() if self.into is None else self.out.uses() + self.into.uses()

    @cached_property
    def height(self) -> int:
        """Steps from the first rank that sends to the last one that receives."""
        return self.out.height + (0 if self.into is None else self.into.height)

    @property
    def is_whole(self) -> bool:
        """Whether it spans all ranks; what faults leave of a tree does not."""
        return int((self.out.parents < 0).sum()) == 1

    @property
    def is_mirrored(self) -> bool:
        """Whether it gathers along exactly the edges on which it spreads, turned round."""
        return self.into is not None and all(
            np.array_equal(*parts)
            for parts in (
                (self.out.parents, self.into.parents),
                (self.out.starts, self.into.starts),
                (self.out.graph.heads[self.out.links], self.into.graph.heads[self.into.links]),
            )
        )

    def over(self, graph: LinkGraph, images: Ints | None = None) -> WeightedTree:
        """The same over another graph, which has all its links; see `Routes.over`."""
        root = self.root if images is None else int(images[self.root])
        into = None if self.into is None else self.into.over(graph.turned_round, images)
        moved = WeightedTree(root, self.weight, self.out.over(graph, images), into)
        assert all((routes.links >= 0).all() for routes in (moved.out, into) if routes is not None)
        return moved


@dataclass(frozen=True, slots=True)
class Packing:
    """Carriers whose weighted loads fit the links together.

    Attributes:
        carriers: each root's together carry its demand; the weights of an allreduce's add up to its rate.
        settings: facts about how they were found (epsilon, iterations, ...), for `Method.settings`.
    """

    carriers: tuple[WeightedTree, ...]
    settings: Settings = ()

    @property
    def trees(self) -> tuple[Tree, ...]:
        """Those along which is spread, to be read."""
        return tuple(carrier.tree for carrier in self.carriers)


def merge(carriers: Iterable[WeightedTree]) -> tuple[WeightedTree, ...]:
    """The carriers with equal ones put together by adding their weights, in order of appearance."""
    first: dict[tuple[bytes, ...], WeightedTree] = {}
    weight: dict[tuple[bytes, ...], Fraction] = defaultdict(Fraction)
    for carrier in carriers:
        key = carrier.key
        first.setdefault(key, carrier)
        weight[key] += carrier.weight
    return tuple(replace(carrier, weight=weight[key]) for key, carrier in first.items())


def congestion(carriers: Iterable[WeightedTree], topology: Topology) -> Fraction:
    """The fullest link: load over bandwidth, 1 is full."""
    chosen = tuple(carriers)
    return fullest_link(topology, [one.uses for one in chosen], [one.weight for one in chosen])


def fullest_link(topology: Topology, uses: Iterable[Ints], amounts: Sequence[Fraction]) -> Fraction:
    """The largest of all loads over bandwidths, exactly.

    Args:
        topology: whose links are used.
        uses: of each carrier, how often it passes each link: at most once for each rank and direction.
        amounts: that each carries.
    """
    parts = math.lcm(*(amount.denominator for amount in amounts))
    whole = [int(amount * parts) for amount in amounts]
    # Python's integers where int64 might not do.
    fits = sum(whole) * 2 * topology.ranks < LARGEST_TOTAL
    load = np.zeros(len(topology.links), dtype=np.int64 if fits else object)
    for counts, amount in zip(uses, whole, strict=True):
        load += counts.astype(load.dtype, copy=False) * amount
    loads = zip(load.tolist(), topology.links, strict=True)
    return max((Fraction(amount, parts) / link.bandwidth for amount, link in loads), default=Fraction(0))


def mirrored(carrier: WeightedTree) -> WeightedTree:
    """The pair that gathers along the tree on which it spreads; every link needs its reverse."""
    graph, out = carrier.out.graph, carrier.out
    into = Routes(graph.turned_round, out.parents, out.starts, graph.reverse[out.links])
    return replace(carrier, into=into)


def centred(carrier: WeightedTree) -> WeightedTree:
    """A mirrored pair with its root moved to the centre of the tree, which about halves the height.

    Whatever the root, each edge is used once in each direction, so the loads stay as they are. A pair
    that is not mirrored comes back unchanged.
    """
    if not carrier.is_mirrored:
        return carrier
    root = int(_centre(carrier.out.parents, carrier.root))
    if root == carrier.root:
        return carrier
    return mirrored(WeightedTree(root, carrier.weight, rerooted(carrier.out, root)))


def rerooted(routes: Routes, root: int) -> Routes:
    """The same undirected edges, with another rank as the root; every link needs its reverse."""
    graph = routes.graph
    return Routes(graph, *_rerooted(routes.parents, routes.starts, routes.links, root, graph.reverse))


def pair_up(outs: Iterable[WeightedTree], ins: Iterable[WeightedTree]) -> tuple[WeightedTree, ...]:
    """Overlay the out-trees and in-trees of each root by their weights, as intervals laid side by side.

    Args:
        outs: out-trees of the topology.
        ins: out-trees of the reversed topology; for each root as much weight as the out-trees have.

    Returns:
        Pairs, fewer than there are trees. Trees of equal weight meet first, because each such pair saves
        one; among the rest the tall meet the low, which keeps the schedule short.
    """
    spreading, gathering = _by_root(outs), _by_root(ins)
    assert {root: sum(tree.weight for tree in trees) for root, trees in spreading.items()} == {
        root: sum(tree.weight for tree in trees) for root, trees in gathering.items()
    }, "each root must gather as much as it spreads"
    pairs: list[WeightedTree] = []
    for root in sorted(spreading):
        tall_first = sorted(spreading[root], key=lambda tree: -tree.height)
        low_first = sorted(gathering[root], key=lambda tree: tree.height)
        pairs += _equal_weights(tall_first, low_first)
        pairs += _side_by_side(tall_first, low_first)
    return merge(pairs)


def pair(out: WeightedTree, into: WeightedTree, weight: Fraction) -> WeightedTree:
    """An out-tree of a topology and one of the reversed topology, of the same root."""
    return WeightedTree(out.root, weight, out.out, into.over(out.out.graph.turned_round).out)


def _by_root(trees: Iterable[WeightedTree]) -> dict[int, list[WeightedTree]]:
    found: dict[int, list[WeightedTree]] = defaultdict(list)
    for tree in merge(trees):
        found[tree.root].append(tree)
    return found


def _equal_weights(outs: list[WeightedTree], ins: list[WeightedTree]) -> list[WeightedTree]:
    """Pairs of trees of one weight; what was paired is taken out of both lists."""
    pairs = []
    for out in list(outs):
        partner = next((into for into in ins if into.weight == out.weight), None)
        if partner is not None:
            outs.remove(out)
            ins.remove(partner)
            pairs.append(pair(out, partner, out.weight))
    return pairs


def _side_by_side(outs: Iterable[WeightedTree], ins: Iterable[WeightedTree]) -> list[WeightedTree]:
    """Lay both lists along one line and cut it wherever a tree of either ends."""
    pairs = []
    waiting_out, waiting_in = list(outs)[::-1], list(ins)[::-1]
    while waiting_out and waiting_in:
        out, into = waiting_out.pop(), waiting_in.pop()
        weight = min(out.weight, into.weight)
        pairs.append(pair(out, into, weight))
        if out.weight > weight:
            waiting_out.append(replace(out, weight=out.weight - weight))
        if into.weight > weight:
            waiting_in.append(replace(into, weight=into.weight - weight))
    return pairs


@kernel
def _centre(parents: Ints, root: int) -> int:
    """The root where it is a middle of a longest path, else the lowest middle."""
    depth, _ = levels(parents)
    first = int(np.argmax(depth))
    # Turned round to start at one end of a longest path, the tree ends at the other.
    before, child, here = parents.copy(), -1, first
    while here >= 0:
        before[here] = child
        child, here = here, parents[here]
    depth, _ = levels(before)
    here = int(np.argmax(depth))
    length = depth[here]
    for _ in range(length // 2):
        here = before[here]
    other = here if length % 2 == 0 else before[here]
    if root in (here, other):
        return root
    lowest: int = min(here, other)
    return lowest


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

"""What carries a part of the buffer: a tree, or for an allreduce one that gathers and one that spreads.

Packings end as carriers, and carriers are lifted into schedules. Here are the transforms on them: pair up
trees by weight, move a root to the centre, merge what is the same, count the links that are used.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import TypeAlias, TypeVar, overload

from arborcast.synth.schedule import Settings
from arborcast.synth.topology import Hop, Vertex
from arborcast.synth.tree import Tree, TreeEdge


@dataclass(frozen=True, slots=True)
class Pair:
    """One part of an allreduce: it is summed along `into` to the root, then spread along `out`.

    Attributes:
        out: an out-tree of the topology.
        into: an out-tree of the reversed topology, with the same root and weight.
    """

    out: Tree
    into: Tree

    @property
    def root(self) -> int:
        """Where the sum is complete."""
        return self.out.root

    @property
    def weight(self) -> Fraction:
        """GB/s of the buffer that both trees carry."""
        return self.out.weight

    @property
    def height(self) -> int:
        """Steps from the first leaf to the last: up one tree and down the other."""
        return self.into.height + self.out.height

    @property
    def is_mirrored(self) -> bool:
        """Whether it gathers along exactly the edges on which it spreads, turned round."""
        return set(self.into.edges) == set(self.out.edges)


@dataclass(frozen=True, slots=True)
class Pairing:
    """Pairs whose weighted loads fit the links together: what a `Packing` is for the other collectives.

    Attributes:
        pairs: their weights add up to the rate, GB/s.
        settings: facts about how they were found, for `Method.settings`.
    """

    pairs: tuple[Pair, ...]
    settings: Settings = ()


Carrier: TypeAlias = Tree | Pair
AnyCarrier = TypeVar("AnyCarrier", Tree, Pair)


def hops(carrier: Carrier) -> Counter[Hop]:
    """How often a carrier uses each link of the topology (for a tree: of the one it was packed on)."""
    match carrier:
        case Tree(edges=edges):
            return Counter(hop for edge in edges for hop in pairwise((edge.parent, *edge.via, edge.child)))
        case Pair(out=out, into=into):
            return hops(out) + Counter({(dst, src): count for (src, dst), count in hops(into).items()})


def with_weight(carrier: AnyCarrier, weight: Fraction) -> AnyCarrier:
    """The same carrier with another weight, GB/s."""
    if isinstance(carrier, Tree):
        return replace(carrier, weight=weight)
    return Pair(replace(carrier.out, weight=weight), replace(carrier.into, weight=weight))


def shape(carrier: Carrier) -> tuple[object, ...]:
    """What tells carriers of any weight apart: the root and the edges."""
    match carrier:
        case Tree(root=root, edges=edges):
            return (root, frozenset(edges))
        case Pair(out=out, into=into):
            return (out.root, frozenset(out.edges), frozenset(into.edges))


def merge(carriers: Iterable[AnyCarrier]) -> tuple[AnyCarrier, ...]:
    """The carriers with those of one shape put together by adding their weights, in order of appearance."""
    first: dict[tuple[object, ...], AnyCarrier] = {}
    weight: dict[tuple[object, ...], Fraction] = defaultdict(Fraction)
    for carrier in carriers:
        key = shape(carrier)
        first.setdefault(key, carrier)
        weight[key] += carrier.weight
    return tuple(with_weight(carrier, weight[key]) for key, carrier in first.items())


def congestion(carriers: Iterable[Carrier], bandwidth: Mapping[Hop, Fraction]) -> Fraction:
    """The fullest link: load over bandwidth, 1 is full. Carriers must use links that exist."""
    load: dict[Hop, Fraction] = defaultdict(Fraction)
    for carrier in carriers:
        for hop, count in hops(carrier).items():
            load[hop] += carrier.weight * count
    return max((amount / bandwidth[hop] for hop, amount in load.items()), default=Fraction(0))


def pair_up(outs: Iterable[Tree], ins: Iterable[Tree]) -> tuple[Pair, ...]:
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
    pairs: list[Pair] = []
    for root in sorted(spreading):
        tall_first = sorted(spreading[root], key=lambda tree: -tree.height)
        low_first = sorted(gathering[root], key=lambda tree: tree.height)
        pairs += _equal_weights(tall_first, low_first)
        pairs += _side_by_side(tall_first, low_first)
    return merge(pairs)


def mirrored(trees: Iterable[Tree]) -> tuple[Pair, ...]:
    """The pairs that gather along the trees on which they spread."""
    return tuple(Pair(tree, tree) for tree in trees)


def centred(pair: Pair) -> Pair:
    """A mirrored pair with its root moved to the centre of the tree, which about halves the height.

    Whatever the root, each edge is used once in each direction, so the loads stay as they are. A pair
    that is not mirrored comes back unchanged.
    """
    if not pair.is_mirrored:
        return pair
    tree = pair.out
    # The middle of a longest path is a centre, and walking away from anywhere ends at an end of one.
    way = _longest_way(rerooted(tree, _longest_way(tree)[-1]))
    middles = {way[(len(way) - 1) // 2], way[len(way) // 2]}
    if tree.root in middles:
        return pair
    moved = rerooted(tree, min(middles))
    return Pair(moved, moved)


def rerooted(tree: Tree, root: int) -> Tree:
    """The tree with the same undirected edges that starts at another of its ranks."""
    neighbours: dict[int, list[TreeEdge]] = defaultdict(list)
    for edge in tree.edges:
        neighbours[edge.parent].append(edge)
        neighbours[edge.child].append(TreeEdge(edge.child, edge.parent, edge.via[::-1]))
    return Tree(root, tree.weight, breadth_first(root, neighbours))


@overload
def relabelled(carrier: Tree, images: Sequence[Vertex]) -> Tree: ...
@overload
def relabelled(carrier: Pair, images: Sequence[Vertex]) -> Pair: ...
@overload
def relabelled(carrier: Carrier, images: Sequence[Vertex]) -> Carrier: ...
def relabelled(carrier: Carrier, images: Sequence[Vertex]) -> Carrier:
    """The carrier with every vertex replaced by its image."""
    if isinstance(carrier, Pair):
        out = relabelled(carrier.out, images)
        return Pair(out, out if carrier.into is carrier.out else relabelled(carrier.into, images))
    edges = (
        TreeEdge(images[edge.parent], images[edge.child], tuple(images[vertex] for vertex in edge.via))
        for edge in carrier.edges
    )
    return Tree(images[carrier.root], carrier.weight, tuple(edges))


def _longest_way(tree: Tree) -> list[int]:
    """The ranks from the root to a deepest one."""
    depth = tree.depth
    above = {edge.child: edge.parent for edge in tree.edges}
    way = [max(depth, key=lambda rank: (depth[rank], -rank))]
    while way[-1] in above:
        way.append(above[way[-1]])
    return way[::-1]


def breadth_first(root: int, leaving: Mapping[int, Sequence[TreeEdge]]) -> tuple[TreeEdge, ...]:
    """Edges that reach from the root all that can be reached, each once, with the fewest edges."""
    edges: list[TreeEdge] = []
    reached = {root}
    frontier = [root]
    for rank in frontier:
        for edge in sorted(leaving.get(rank, ()), key=lambda edge: (edge.child, len(edge.via), edge.via)):
            if edge.child not in reached:
                reached.add(edge.child)
                frontier.append(edge.child)
                edges.append(edge)
    return tuple(edges)


def _by_root(trees: Iterable[Tree]) -> dict[int, list[Tree]]:
    found: dict[int, list[Tree]] = defaultdict(list)
    for tree in merge(trees):
        found[tree.root].append(tree)
    return found


def _equal_weights(outs: list[Tree], ins: list[Tree]) -> list[Pair]:
    """Pairs of trees of one weight; what was paired is taken out of both lists."""
    pairs = []
    for out in list(outs):
        partner = next((into for into in ins if into.weight == out.weight), None)
        if partner is not None:
            outs.remove(out)
            ins.remove(partner)
            pairs.append(Pair(out, partner))
    return pairs


def _side_by_side(outs: Iterable[Tree], ins: Iterable[Tree]) -> list[Pair]:
    """Lay both lists along one line and cut it wherever a tree of either ends."""
    pairs = []
    waiting_out, waiting_in = list(outs)[::-1], list(ins)[::-1]
    while waiting_out and waiting_in:
        out, into = waiting_out.pop(), waiting_in.pop()
        weight = min(out.weight, into.weight)
        pairs.append(Pair(with_weight(out, weight), with_weight(into, weight)))
        if out.weight > weight:
            waiting_out.append(with_weight(out, out.weight - weight))
        if into.weight > weight:
            waiting_in.append(with_weight(into, into.weight - weight))
    return pairs

"""Trees into a schedule: the last, pure step of every tree method, for a million transfers at once.

A chunk per carrier, a transfer per edge, the depth as the step. What reduces was packed on the reversed
topology and is turned round here; relays, which the packings pass like switches, become ranks that
receive and send on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

from arborcast.synth.certificate import Bound
from arborcast.synth.collective import TREE_KINDS, Collective, Kind
from arborcast.synth.errors import CollectiveError
from arborcast.synth.kernels.arborescence import Routes, levels
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.kernels.link_graph import LinkGraph
from arborcast.synth.packing.weighted_tree import WeightedTree, centred, fullest_link, merge, mirrored
from arborcast.synth.schedule import Chunk, Method, Schedule
from arborcast.synth.topology import Topology
from arborcast.synth.transfers import Transfers, Way, in_order
from arborcast.synth.tree import Tree, TreeEdge


@dataclass(frozen=True, eq=False)
class Lifted:
    """What one chunk moves along, on links as the topology numbers them.

    Attributes:
        root: the owner of the chunk.
        weight: in proportion to its share.
        into: the tree along which it is gathered, over the links turned round; None for no reduction.
        out: the tree along which it is spread; None where only the root needs the sum.
    """

    root: int
    weight: Fraction
    into: Routes | None
    out: Routes | None

    @property
    def uses(self) -> Ints:
        """How often it passes each link."""
        parts = [routes.uses() for routes in (self.into, self.out) if routes is not None]
        return parts[0] + parts[1] if len(parts) == 2 else parts[0]


def lift(
    topology: Topology, collective: Collective, method: Method, bound: Bound, carriers: Iterable[WeightedTree]
) -> Schedule:
    """A schedule of a collective along trees.

    Args:
        topology: the fabric, relays included.
        collective: a broadcast, reduce, allgather, reduce-scatter or allreduce.
        method: what made the trees.
        bound: the limit of the rate.
        carriers: from the root, or from each rank, to all ranks of the collective, passing switches and
            relays; for reduce and reduce-scatter trees of `topology.reversed()`. Each root's carriers carry
            its block in proportion to their weights, those of an allreduce the whole buffer; there a single
            tree gathers along the edges on which it spreads.

    Raises:
        CollectiveError: a kind that trees cannot do.
    """
    kind = collective.kind
    if kind not in TREE_KINDS:
        raise CollectiveError(f"{kind}: trees are lifted into {', '.join(TREE_KINDS)}")
    found = lifted(topology, kind, carriers)
    if not found:
        return Schedule.build(topology, collective, method, bound, (), ())
    carried: dict[int, Fraction] = defaultdict(Fraction)
    for one in found:
        carried[0 if kind is Kind.ALLREDUCE else one.root] += one.weight
    shares = [one.weight / carried[0 if kind is Kind.ALLREDUCE else one.root] / len(carried) for one in found]
    chunks = tuple(Chunk(share, one.root) for share, one in zip(shares, found, strict=True))
    rate = _rate(topology, shares, found)
    return Schedule(topology, collective, method, bound, chunks, transfers_of(found), rate)


def lifted(topology: Topology, kind: Kind, carriers: Iterable[WeightedTree]) -> list[Lifted]:
    """The carriers on the links of a topology: equal ones merged, mirrored ones from their centre."""
    graph, gathers = LinkGraph(topology), kind.reduces
    if kind is not Kind.ALLREDUCE:
        over = graph.turned_round if gathers else graph
        trees = [(one, _relayed(one.root, one.out)) for one in merge([one.over(over) for one in carriers])]
        return [
            Lifted(tree.root, tree.weight, way if gathers else None, None if gathers else way)
            for tree, way in trees
        ]
    placed = [carrier.over(graph) for carrier in carriers]
    pairs = [centred(mirrored(one) if one.into is None else one) for one in placed]
    return [
        Lifted(
            pair.root,
            pair.weight,
            None if pair.into is None else _relayed(pair.root, pair.into),
            _relayed(pair.root, pair.out),
        )
        for pair in merge(pairs)
    ]


def transfers_of(found: Sequence[Lifted]) -> Transfers:
    """The transfers of all chunks in the order of schedules.

    Each rank sends to its children one step after it has received, and to its parent one step after it has
    added up what its children sent; what is spread is first gathered.
    """
    gathered = [(chunk, one.into, 0) for chunk, one in enumerate(found) if one.into is not None]
    steps = [0] * len(found)
    for chunk, routes, _ in gathered:
        steps[chunk] = routes.height
    spread = [(chunk, one.out, steps[chunk]) for chunk, one in enumerate(found) if one.out is not None]
    number: dict[Way, int] = {}
    moves = [_moves(trees, reduce, number) for trees, reduce in ((spread, False), (gathered, True)) if trees]
    chunks, src, dst, step, way = (np.concatenate(column) for column in list(zip(*moves, strict=True))[:5])
    reduces = np.repeat([rows[5] for rows in moves], [len(rows[0]) for rows in moves])
    return in_order(Transfers(chunks, src, dst, step, reduces, way, tuple(number)))


def _moves(
    trees: Sequence[tuple[int, Routes, int]], reduce: bool, number: dict[Way, int]
) -> tuple[Ints, Ints, Ints, Ints, Ints, bool]:
    """Chunk, src, dst, step and way of every edge of trees in one direction, and whether it adds.

    Args:
        trees: the number of the chunk, its tree and the step in which the tree starts.
        reduce: whether children send to their parents.
        number: of the ways through switches; those that are new are put in.
    """
    every = [routes for _, routes, _ in trees]
    ranks, heads = len(every[0].parents), every[0].graph.heads
    parents = np.concatenate([routes.parents for routes in every])
    edges = parents >= 0
    numbers, firsts = (np.array([tree[place] for tree in trees], dtype=np.int64) for place in (0, 2))
    chunk, first = np.repeat(numbers, ranks)[edges], np.repeat(firsts, ranks)[edges]
    parent, child = parents[edges], np.tile(np.arange(ranks, dtype=np.int64), len(trees))[edges]
    counts = np.concatenate([np.diff(routes.starts) for routes in every])[edges]
    passed = heads[np.concatenate([routes.links for routes in every])]
    way = _ways(counts, passed, number, turned=reduce)
    depths, heights = (np.concatenate(part) for part in zip(*(levels(r.parents) for r in every), strict=True))
    if not reduce:
        return chunk, parent, child, first + depths[edges] - 1, way, reduce
    return chunk, child, parent, first + heights[edges], way, reduce


def _ways(counts: Ints, heads: Ints, number: dict[Way, int], *, turned: bool) -> Ints:
    """The number of the switches of each edge, or of them turned round."""
    ends = np.cumsum(counts)
    ways = np.full(len(counts), number.setdefault((), len(number)), dtype=np.int64)
    for count in (2 + np.flatnonzero(np.bincount(counts)[2:])).tolist():
        rows = np.flatnonzero(counts == count)
        passed = heads[(ends[rows] - count)[:, None] + np.arange(count - 1)]
        if count == 2:
            distinct, which = np.unique(passed[:, 0], return_inverse=True)
            tuples = [(switch,) for switch in distinct.tolist()]
        else:
            distinct, which = np.unique(passed, axis=0, return_inverse=True)
            tuples = [tuple(way) for way in distinct.tolist()]
        known = [number.setdefault(way[::-1] if turned else way, len(number)) for way in tuples]
        ways[rows] = np.array(known, dtype=np.int64)[which.reshape(-1)]
    return ways


def _rate(topology: Topology, shares: Sequence[Fraction], found: Sequence[Lifted]) -> Fraction:
    """What `Schedule.build` works out from the transfers, from the links of the trees."""
    busy = fullest_link(topology, (one.uses for one in found), shares)
    return 1 / busy if busy else Fraction(0)


def _relayed(root: int, routes: Routes) -> Routes:
    """The tree with the relays on its edges made into ranks of their own.

    Two edges may pass the same relay. It then receives once and sends on twice (turned round: it adds up
    and sends once), so that loads only fall and no contribution counts twice. Relays that serve nobody
    after that are left out.
    """
    graph, heads = routes.graph, routes.graph.heads[routes.links]
    inner = np.ones(len(heads), dtype=np.bool_)
    inner[routes.starts[1:][np.diff(routes.starts) > 0] - 1] = False
    if not (inner & (heads < graph.ranks)).any():
        return routes
    value = routes.tree(Fraction(1), root)
    leaving: dict[int, list[TreeEdge]] = defaultdict(list)
    for edge in value.edges:
        path = (edge.parent, *edge.via, edge.child)
        stops = [position for position, vertex in enumerate(path) if vertex < graph.ranks]
        for start, end in pairwise(stops):
            leaving[path[start]].append(TreeEdge(path[start], path[end], path[start + 1 : end]))
    needed = set(value.depth)
    kept = []
    for edge in reversed(breadth_first(root, leaving)):  # children before their parents
        if edge.child in needed:
            needed.add(edge.parent)
            kept.append(edge)
    return WeightedTree.of(graph, Tree(root, Fraction(1), tuple(kept[::-1]))).out


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

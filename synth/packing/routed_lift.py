"""Trees as arrays into a schedule: what `synth.packing.lift` does, for a million transfers at once.

Chunks, steps and order are the same, so that who asks cannot tell which of the two lifted. Relays and pairs
whose trees differ are for `lift` alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.kernels.arborescence import LogicalGraph
from arborcast.synth.kernels.compiled import Flags, Ints
from arborcast.synth.kernels.max_flow import LARGEST_TOTAL
from arborcast.synth.packing.routed import RoutedTree, centred_routes, levels, merged, over, reverse_links
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Topology, Vertex


@dataclass(frozen=True, eq=False)
class _Moves:
    """Transfers in one direction: columns of equal length; `links` of row i are those of `edge[i]`."""

    chunk: Ints
    src: Ints
    dst: Ints
    step: Ints
    reduce: Flags
    via: list[tuple[Vertex, ...]]


def lift_routed(
    topology: Topology, collective: Collective, method: Method, bound: Bound, trees: Sequence[RoutedTree]
) -> Schedule:
    """A schedule of a tree collective without relays.

    Args:
        topology: the fabric.
        collective: for an allreduce each tree gathers along the edges on which it spreads.
        method: what made the trees.
        bound: the limit of the rate.
        trees: out-trees of the topology; for reduce and reduce-scatter of the reversed one.
    """
    if not trees:
        return Schedule.build(topology, collective, method, bound, (), ())
    # Trees may have been packed on some of the links; turning one round needs the others.
    turned = collective.kind.reduces and collective.kind is not Kind.ALLREDUCE
    graph = LogicalGraph(topology.reversed() if turned else topology)
    trees = [over(graph, tree) for tree in trees]
    if collective.kind is Kind.ALLREDUCE:
        reverse = reverse_links(graph)
        trees = merged(centred_routes(tree, reverse) for tree in trees)
        total = sum((tree.weight for tree in trees), Fraction(0))
        shares = [tree.weight / total for tree in trees]
    else:
        trees = merged(trees)
        carried: dict[int, Fraction] = {}
        for tree in trees:
            carried[tree.root] = carried.get(tree.root, Fraction(0)) + tree.weight
        shares = [tree.weight / carried[tree.root] / len(carried) for tree in trees]
    chunks = tuple(Chunk(share, tree.root) for share, tree in zip(shares, trees, strict=True))
    transfers = tuple(_transfers(graph, collective.kind, trees))
    rate = _rate(topology, collective.kind, shares, trees)
    return Schedule(topology, collective, method, bound, chunks, transfers, rate)


def _rate(
    topology: Topology, kind: Kind, shares: Sequence[Fraction], trees: Sequence[RoutedTree]
) -> Fraction:
    """What `Schedule.build` works out from the transfers, from the links of the trees."""
    parts = math.lcm(*(share.denominator for share in shares))
    graph = trees[0].routes.graph
    # Python's integers where int64 might not do: a link carries a share at most once for each rank.
    fits = parts * 2 * topology.ranks < LARGEST_TOTAL
    load = np.zeros(len(graph.tails), dtype=np.int64 if fits else object)
    for share, tree in zip(shares, trees, strict=True):
        load += tree.routes.uses() * int(share * parts)
    if kind is Kind.ALLREDUCE:
        load = load + load[reverse_links(graph)]
    busy = max(
        (Fraction(int(amount), parts) / link.bandwidth)
        for amount, link in zip(load.tolist(), graph.topology.links, strict=True)
    )
    return 1 / busy if busy else Fraction(0)


def _transfers(graph: LogicalGraph, kind: Kind, trees: Sequence[RoutedTree]) -> list[Transfer]:
    """All transfers in the order of schedules."""
    edges = _edges(graph, trees)
    depths, heights = (np.concatenate(parts) for parts in zip(*map(_levels, trees), strict=True))
    depths, heights = depths[edges.has_parent], heights[edges.has_parent]
    if kind is Kind.ALLREDUCE:
        tallest = np.repeat([_levels(tree)[0].max() for tree in trees], edges.per_tree)
        moves = [_spread(edges, tallest + depths - 1), _gather(edges, heights)]
    elif kind.reduces:
        moves = [_gather(edges, heights)]
    else:
        moves = [_spread(edges, depths - 1)]
    columns = [np.concatenate([getattr(move, name) for move in moves]) for name in _COLUMNS]
    chunk, src, dst, step, reduce = columns
    order = np.lexsort((dst, src, chunk, step))
    via = [way for move in moves for way in move.via]
    return Transfer.many(
        chunk[order].tolist(),
        src[order].tolist(),
        dst[order].tolist(),
        step[order].tolist(),
        reduce[order].tolist(),
        [via[place] for place in order.tolist()],
    )


_COLUMNS = ("chunk", "src", "dst", "step", "reduce")


@dataclass(frozen=True, eq=False)
class _Edges:
    """The edges of all trees, tree by tree and child by child."""

    per_tree: int
    has_parent: Flags
    tree: Ints
    parent: Ints
    child: Ints
    via: list[tuple[Vertex, ...]]


def _edges(graph: LogicalGraph, trees: Sequence[RoutedTree]) -> _Edges:
    ranks = graph.topology.ranks
    parents = np.concatenate([tree.routes.parents for tree in trees])
    has_parent = parents >= 0
    tree = np.repeat(np.arange(len(trees), dtype=np.int64), ranks)
    child = np.tile(np.arange(ranks, dtype=np.int64), len(trees))
    counts = np.concatenate([np.diff(one.routes.starts) for one in trees])[has_parent]
    heads = graph.heads[np.concatenate([one.routes.links for one in trees])]
    return _Edges(
        ranks - 1,
        has_parent,
        tree[has_parent],
        parents[has_parent],
        child[has_parent],
        _ways(counts, heads),
    )


def _ways(counts: Ints, heads: Ints) -> list[tuple[Vertex, ...]]:
    """The switches of each edge; equal ways are one tuple."""
    ends = np.cumsum(counts)
    ways: list[tuple[Vertex, ...]] = [()] * len(counts)
    for count in np.unique(counts).tolist():
        if count < 2:
            continue
        rows = np.flatnonzero(counts == count)
        passed = heads[(ends[rows] - count)[:, None] + np.arange(count - 1)]
        if count == 2:
            distinct, which = np.unique(passed[:, 0], return_inverse=True)
            tuples = [(switch,) for switch in distinct.tolist()]
        else:
            distinct, which = np.unique(passed, axis=0, return_inverse=True)
            tuples = [tuple(way) for way in distinct.tolist()]
        for row, place in zip(rows.tolist(), which.reshape(-1).tolist(), strict=True):
            ways[row] = tuples[place]
    return ways


def _levels(tree: RoutedTree) -> tuple[Ints, Ints]:
    return levels(tree.routes.parents)


def _spread(edges: _Edges, step: Ints) -> _Moves:
    copies = np.zeros(len(step), dtype=np.bool_)
    return _Moves(edges.tree, edges.parent, edges.child, step, copies, edges.via)


def _gather(edges: _Edges, step: Ints) -> _Moves:
    turned: dict[tuple[Vertex, ...], tuple[Vertex, ...]] = {}
    via = [turned.setdefault(way, way[::-1]) for way in edges.via]
    return _Moves(edges.tree, edges.child, edges.parent, step, np.ones(len(step), dtype=np.bool_), via)

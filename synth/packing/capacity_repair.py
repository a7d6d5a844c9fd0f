"""One tree that fits the links: repairs trees whose edges share a link more often than it has units left.

The cheapest tree may send several of its edges over one link between a rank and a switch. Taking such a
tree at a fraction would make the common denominator of all trees explode, so the edges that the link has
room for keep it, the link is closed to the others, and the search goes on.
"""

from __future__ import annotations

from random import Random
from typing import TypeAlias

import numpy as np

from arborcast.synth.errors import InfeasibleError
from arborcast.synth.kernels.arborescence import FORBIDDEN, Distances, Routes, arborescence_destroying
from arborcast.synth.kernels.compiled import Flags, Ints, kernel

REPAIRS = 12
"""Repairs of one tree before its links are priced anew instead."""

_Pinned: TypeAlias = dict[tuple[int, int], tuple[Ints, int]]
"""(parent, child): links and cost of an edge that keeps its way."""

_GRANTED, _REFUSED = 1, 2


def fitting_tree(
    distances: Distances, parent_cost: Ints, root: int, remaining: Ints, random: Random
) -> tuple[Routes | None, Ints]:
    """A cheap tree that passes no link more often than `remaining` allows.

    Args:
        distances: the graph, closed with the int64 lengths that the tree is to minimise.
        parent_cost: what each rank charges for every child that it takes.
        root: where the tree starts.
        remaining: how often each link may be passed.
        random: breaks ties between the edges that compete for a link.

    Returns:
        The tree and the links that were overused on the way to it; no tree where the repairs failed, or
        where the links with anything left do not connect the root to all ranks (then none is overused).
    """
    pinned: _Pinned = {}
    closed = np.zeros(len(remaining), dtype=np.bool_)
    lengths = distances.lengths
    cost = np.empty_like(distances.entering)
    for _ in range(REPAIRS):
        np.add(distances.entering, parent_cost, out=cost)
        for (parent, child), (_, pinned_cost) in pinned.items():
            cost[child, parent] = pinned_cost + parent_cost[parent]
        try:
            parents = arborescence_destroying(cost, root)
        except InfeasibleError:
            break
        routes = _routed(distances, parents, pinned)
        overused = routes.uses() > remaining
        if not overused.any():
            return routes, np.flatnonzero(closed)
        _pin(pinned, routes, distances, overused, remaining, random)
        closed |= overused
        distances = distances.graph.distances(np.where(closed, FORBIDDEN, lengths))
    return None, np.flatnonzero(closed)


def _routed(distances: Distances, parents: Ints, pinned: _Pinned) -> Routes:
    """The tree's links, those of pinned edges as they were pinned."""
    above = parents.tolist()
    kept = sorted(child for parent, child in pinned if above[child] == parent)
    if not kept:
        return distances.routes(parents)
    others, pins = parents.copy(), np.full(len(above), -1, dtype=np.int64)
    others[kept], pins[kept] = -1, parents[kept]
    ways = [pinned[above[child], child][0] for child in kept]
    starts = np.zeros(len(above) + 1, dtype=np.int64)
    starts[np.array(kept) + 1] = list(map(len, ways))
    found = distances.routes(others)
    return found.joined(Routes(distances.graph, pins, np.cumsum(starts), np.concatenate(ways)))


def _pin(
    pinned: _Pinned, routes: Routes, distances: Distances, overused: Flags, remaining: Ints, random: Random
) -> None:
    """Give each overused link to as many edges as it has units, large subtrees before small ones."""
    children = np.flatnonzero(routes.parents >= 0)
    chances = np.array([random.random() for _ in range(len(children))])
    in_turn = children[np.argsort(-_subtree_sizes(routes.parents)[children] * chances, kind="stable")]
    room = np.where(overused, remaining, -1)
    served = _served(in_turn, routes.starts, routes.links, room)
    for child in np.flatnonzero(served).tolist():
        edge = (int(routes.parents[child]), child)
        if served[child] == _REFUSED:
            pinned.pop(edge, None)
        elif edge not in pinned:
            pinned[edge] = (routes.edge(child), int(distances.entering[child, edge[0]]))


@kernel
def _served(in_turn: Ints, starts: Ints, links: Ints, room: Ints) -> Ints:
    """Of each rank whether the edge into it gets units of all overused links that it passes, or not.

    Args:
        in_turn: the ranks, who comes first.
        starts: the edge into a rank passes `links[starts[rank]:starts[rank + 1]]`.
        links: see `starts`.
        room: the units of overused links, which is used up; -1 for all other links.
    """
    served = np.zeros(starts.shape[0] - 1, dtype=np.int64)
    for child in in_turn:
        shared, least = 0, 1
        for place in range(starts[child], starts[child + 1]):
            if room[links[place]] >= 0:
                shared += 1
                least = min(least, room[links[place]])
        if shared and least > 0:
            for place in range(starts[child], starts[child + 1]):
                if room[links[place]] >= 0:
                    room[links[place]] -= 1
            served[child] = _GRANTED
        elif shared:
            served[child] = _REFUSED
    return served


@kernel
def _subtree_sizes(parents: Ints) -> Ints:
    """How many ranks hang on each, itself included."""
    size = parents.shape[0]
    sizes, waiting = np.ones(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    for child in range(size):
        if parents[child] >= 0:
            waiting[parents[child]] += 1
    for leaf in range(size):
        here = leaf if waiting[leaf] == 0 else -1
        while here >= 0:  # up to the first whose other children are not counted yet
            waiting[here] = -1
            above = parents[here]
            if above >= 0:
                sizes[above] += sizes[here]
                waiting[above] -= 1
            here = above if above >= 0 and waiting[above] == 0 else -1
    return sizes

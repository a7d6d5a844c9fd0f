"""One tree that fits the links: repairs trees whose edges share a link more often than it has units left.

The cheapest tree may send several of its edges over one link between a rank and a switch. Taking such a
tree at a fraction would make the common denominator of all trees explode, so the edges that the link has
room for keep it, the link is closed to the others, and the search goes on.
"""

from __future__ import annotations

from random import Random

import numpy as np

from arborcast.synth.errors import InfeasibleError
from arborcast.synth.kernels.arborescence import FORBIDDEN, Distances, Routes, arborescence_destroying
from arborcast.synth.kernels.compiled import Flags, Ints

REPAIRS = 12
"""Repairs of one tree before its links are priced anew instead."""


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
    pinned: dict[tuple[int, int], tuple[Ints, int]] = {}  # (parent, child): links, cost
    closed = np.zeros(len(remaining), dtype=np.bool_)
    lengths = distances.lengths
    for _ in range(REPAIRS):
        cost = distances.entering + parent_cost
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


def _routed(distances: Distances, parents: Ints, pinned: dict[tuple[int, int], tuple[Ints, int]]) -> Routes:
    """The tree's links, those of pinned edges as they were pinned."""
    kept = {
        child: pinned[parent, child][0]
        for child, parent in enumerate(parents.tolist())
        if (parent, child) in pinned
    }
    if not kept:
        return distances.routes(parents)
    others = parents.copy()
    others[list(kept)] = -1
    found = distances.routes(others)
    pieces = [kept[child] if child in kept else found.edge(child) for child in range(len(parents))]
    starts = np.concatenate(([0], np.cumsum([len(piece) for piece in pieces])))
    return Routes(distances.graph, parents, starts, np.concatenate(pieces))


def _pin(
    pinned: dict[tuple[int, int], tuple[Ints, int]],
    routes: Routes,
    distances: Distances,
    overused: Flags,
    remaining: Ints,
    random: Random,
) -> None:
    """Give each overused link to as many edges as it has units, large subtrees before small ones."""
    room = {int(link): int(remaining[link]) for link in np.flatnonzero(overused)}
    below = _subtree_sizes(routes.parents)
    children = [child for child, parent in enumerate(routes.parents.tolist()) if parent >= 0]
    for child in sorted(children, key=lambda child: -below[child] * random.random()):
        edge = (int(routes.parents[child]), child)
        shared = [link for link in routes.edge(child).tolist() if link in room]
        if shared and all(room[link] > 0 for link in shared):
            for link in shared:
                room[link] -= 1
            if edge not in pinned:
                cost = int(distances.entering[child, edge[0]])
                pinned[edge] = (routes.edge(child), cost)
        elif shared:
            pinned.pop(edge, None)


def _subtree_sizes(parents: Ints) -> list[int]:
    sizes = [1] * len(parents)
    above = parents.tolist()
    waiting = [0] * len(above)
    for parent in above:
        if parent >= 0:
            waiting[parent] += 1
    ready = [vertex for vertex, count in enumerate(waiting) if count == 0]
    for vertex in ready:  # grows while it is walked: leaves before their parents
        parent = above[vertex]
        if parent >= 0:
            sizes[parent] += sizes[vertex]
            waiting[parent] -= 1
            if waiting[parent] == 0:
                ready.append(parent)
    return sizes

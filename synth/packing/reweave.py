"""A fixed number of equal trees per root: each is woven again around all the others, until none gains.

The many small choices of an allgather with few trees are beyond an integer program, and picking among trees
that were made for other purposes picks badly. Here every tree is the cheapest arborescence under lengths that
grow with what the other trees load on each link, more steeply in each round, as in the routing of chips
(negotiated congestion; McMurchie and Ebeling, PathFinder, 1995).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.deadline import Deadline
from arborcast.synth.kernels.arborescence import LogicalGraph, Routes, cheapest_arborescence
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.topology import Topology
from arborcast.synth.tree import Tree

_ROUNDS = 24
_LONGEST = 1 << 20  # the length of the most crowded link


def reweave(
    topology: Topology, roots: Sequence[int], trees_per_root: int, *, deadline: Deadline
) -> tuple[Tree, ...]:
    """Equal trees, so many for each root, that crowd the fullest link as little as was found.

    Args:
        topology: connected from every root.
        roots: all send at one rate.
        trees_per_root: each tree carries that part of its root's rate.
        deadline: once it has passed, the best complete round so far is what counts.

    Returns:
        Trees of weight 1 / `trees_per_root`; equal ones are not merged. Nothing here is random.
    """
    graph = LogicalGraph(topology)
    capacities = np.array(topology.capacities, dtype=np.float64)
    load = np.zeros(len(topology.links), dtype=np.int64)
    woven: dict[tuple[int, int], Routes] = {}
    best: list[Routes] = []
    least = np.inf
    for steepness in range(2, _ROUNDS + 2):
        for slot in ((root, copy) for copy in range(trees_per_root) for root in roots):
            if slot in woven:
                load -= woven[slot].uses()
            distances = graph.distances(_lengths(load, capacities, steepness))
            woven[slot] = distances.routes(cheapest_arborescence(distances.matrix, slot[0]))
            load += woven[slot].uses()
        crowd = float((load / capacities).max())
        if crowd < least:
            best, least = list(woven.values()), crowd
        if deadline.has_passed:
            break
    return tuple(routes.tree(Fraction(1, trees_per_root)) for routes in best)


def _lengths(load: Ints, capacities: NDArray[np.float64], steepness: int) -> Ints:
    """What one more tree on each link costs: its crowding then, to the power of `steepness`.

    Powers are multiplications, which every machine rounds alike; exponentials are not.
    """
    crowding = (load + 1) / capacities
    crowding /= crowding.max()
    cost = 1 / capacities
    for _ in range(steepness):
        cost = cost * crowding
    cost /= cost.max()
    return np.maximum(1, np.round(cost * _LONGEST)).astype(np.int64)

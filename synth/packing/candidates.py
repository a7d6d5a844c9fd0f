"""Trees to choose few from: the widest, the heaviest of a packing, and trees woven around each other.

The many small choices of an allgather with few trees are beyond an integer program, and picking among trees
that were made for other purposes picks badly. `reweave` makes a fixed number of equal trees per root: each is
the cheapest arborescence under lengths that grow with what the others load on each link, more steeply in each
round (negotiated congestion in the routing of chips; McMurchie and Ebeling, PathFinder, 1995).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import chain, product

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.bounds.capacity_lp import most_central
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.kernels.arborescence import FORBIDDEN, LogicalGraph, Routes, cheapest_arborescence
from arborcast.synth.kernels.compiled import Flags, Ints
from arborcast.synth.packing.carrier import Carrier, merge, mirrored, pair
from arborcast.synth.topology import Topology

CANDIDATES = 200
"""In all, besides the known ones; the heaviest of each group are kept."""


def widest(topology: Topology, roots: Sequence[int] | None) -> list[Carrier]:
    """Trees from each root that use only links from some bandwidth on, the cheapest and the shallowest.

    Without switches the widest single tree is among them. For an allreduce (`roots` None) pairs of them; on
    symmetric links one root stands for all.
    """
    if roots is not None:
        graph = LogicalGraph(topology)
        return [tree for root in roots for tree in _widest_trees(graph, root)]
    if topology.is_symmetric:
        root = most_central(topology, range(topology.ranks))
        return [mirrored(tree) for tree in _widest_trees(LogicalGraph(topology), root)]
    here, back = LogicalGraph(topology), LogicalGraph(topology.reversed())
    return [
        pair(out, into, out.weight)
        for root in range(topology.ranks)
        for out, into in product(_widest_trees(here, root), _widest_trees(back, root))
        if out.weight == into.weight
    ]


def _widest_trees(graph: LogicalGraph, root: int) -> Iterator[Carrier]:
    topology = graph.topology
    capacities = np.array(topology.capacities, dtype=np.int64)
    for narrowest in sorted(set(topology.capacities), reverse=True)[:CANDIDATES]:
        distances = graph.distances(np.where(capacities >= narrowest, 1, FORBIDDEN).astype(np.int64))
        try:
            cheapest = cheapest_arborescence(distances.matrix, root)
        except InfeasibleError:
            continue
        for parents in (cheapest, _shallow(distances.matrix < FORBIDDEN, root)):
            yield Carrier(root, Fraction(narrowest) * topology.bandwidth_unit, distances.routes(parents))


def _shallow(reaches: Flags, root: int) -> Ints:
    """Parents with the fewest edges between the root and each rank; `reaches[parent, child]`."""
    parents = np.full(len(reaches), -1, dtype=np.int64)
    missing = np.arange(len(reaches)) != root
    wave = [root]
    for parent in wave:
        children = np.flatnonzero(reaches[parent] & missing)
        parents[children] = parent
        missing[children] = False
        wave += children.tolist()
    return parents


def candidates(known: Iterable[Carrier], others: Iterable[Carrier], most: int) -> tuple[Carrier, ...]:
    """The known carriers and the heaviest of the others, each shape once."""
    heaviest = sorted(merge(others), key=lambda carrier: -carrier.weight)[:most]
    return merge(chain(known, heaviest))


_ROUNDS = 24
_LONGEST = 1 << 20  # the length of the most crowded link


def reweave(
    topology: Topology, roots: Sequence[int], trees_per_root: int, *, deadline: Deadline
) -> tuple[Carrier, ...]:
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
    best: dict[tuple[int, int], Routes] = {}
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
            best, least = dict(woven), crowd
        if deadline.has_passed:
            break
    return tuple(Carrier(root, Fraction(1, trees_per_root), routes) for (root, _), routes in best.items())


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

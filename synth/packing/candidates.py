"""Trees to choose few from: the widest single trees, and the heaviest of those that a packing found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import chain, product

import numpy as np

from arborcast.synth.bounds.capacity_lp import most_central
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.kernels.arborescence import FORBIDDEN, LogicalGraph, cheapest_arborescence
from arborcast.synth.kernels.compiled import Flags, Ints
from arborcast.synth.packing.carrier import AnyCarrier, Carrier, Pair, merge, with_weight
from arborcast.synth.topology import Topology
from arborcast.synth.tree import Tree

CANDIDATES = 200
"""In all, besides the known ones; the heaviest of each group are kept."""


def widest_trees(topology: Topology, root: int) -> Iterator[Tree]:
    """Trees that use only links from some bandwidth on, the cheapest and the shallowest.

    Without switches the widest single tree is among them.
    """
    graph = LogicalGraph(topology)
    capacities = np.array(topology.capacities, dtype=np.int64)
    for narrowest in sorted(set(topology.capacities), reverse=True)[:CANDIDATES]:
        distances = graph.distances(np.where(capacities >= narrowest, 1, FORBIDDEN).astype(np.int64))
        try:
            cheapest = cheapest_arborescence(distances.matrix, root)
        except InfeasibleError:
            continue
        for parents in (cheapest, _shallow(distances.matrix < FORBIDDEN, root)):
            yield distances.routes(parents).tree(Fraction(narrowest) * topology.bandwidth_unit)


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


def wide_pairs(topology: Topology) -> list[Pair]:
    """Pairs of the widest trees; on symmetric links one root stands for all."""
    if topology.is_symmetric:
        root = most_central(topology, range(topology.ranks))
        return [Pair(tree, tree) for tree in widest_trees(topology, root)]
    back = topology.reversed()
    return [
        Pair(out, with_weight(into, out.weight))
        for root in range(topology.ranks)
        for out, into in product(widest_trees(topology, root), widest_trees(back, root))
        if out.weight == into.weight
    ]


def candidates(
    known: Iterable[AnyCarrier], others: Iterable[AnyCarrier], most: int
) -> tuple[AnyCarrier, ...]:
    """The known carriers and the heaviest of the others, each shape once."""
    heaviest = sorted(merge(others), key=_descending_weight)[:most]
    return merge(chain(known, heaviest))


def _descending_weight(carrier: Carrier) -> Fraction:
    return -carrier.weight

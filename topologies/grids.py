"""Regular graphs without switches: torus, mesh, ring, hypercube, full mesh.

All links have one bandwidth (1 GB/s each way unless told) and one latency (0 us unless told); they stand
for no product, so there is nothing to cite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from arborcast.synth.errors import TopologyError
from arborcast.synth.topology import Link, Topology
from arborcast.topologies.builders import (
    cable,
    check_size,
    coordinates,
    grid_images,
    number_of,
    rotation,
    without_identity,
)


def torus(*, name: str, extents: Sequence[int], bandwidth: Fraction, latency: Fraction) -> Topology:
    """A grid that wraps round in every dimension; along an extent of 2 the two ways round are one cable.

    Symmetries: the translations, so all ranks are alike.
    """
    links = _grid(name, extents, bandwidth, latency, wraps=True)
    symmetries = [
        grid_images(extents, dimension, rotation(extent).__getitem__)
        for dimension, extent in enumerate(extents)
    ]
    return Topology.build(name, math.prod(extents), links, symmetries=without_identity(symmetries))


def mesh(*, name: str, extents: Sequence[int], bandwidth: Fraction, latency: Fraction) -> Topology:
    """A grid that does not wrap round. Symmetries: the reflection of each dimension."""
    links = _grid(name, extents, bandwidth, latency, wraps=False)
    symmetries = [
        grid_images(extents, dimension, range(extent)[::-1].__getitem__)
        for dimension, extent in enumerate(extents)
    ]
    return Topology.build(name, math.prod(extents), links, symmetries=without_identity(symmetries))


def ring(*, name: str, ranks: int, bandwidth: Fraction, latency: Fraction) -> Topology:
    """Ranks in a circle, linked both ways. Symmetries: the rotation."""
    links = _grid(name, [ranks], bandwidth, latency, wraps=True)
    return Topology.build(name, ranks, links, symmetries=without_identity([rotation(ranks)]))


def hypercube(*, name: str, dimension: int, bandwidth: Fraction, latency: Fraction) -> Topology:
    """Two to the power of `dimension` ranks, linked where their numbers differ in one bit.

    Symmetries: flipping one bit.
    """
    if dimension > 16:
        raise TopologyError(f"{name}: dimension must be at most 16, got {dimension}")
    ranks = 1 << dimension
    check_size(name, ranks, ranks * dimension)
    links = [
        link
        for rank in range(ranks)
        for bit in range(dimension)
        if not rank >> bit & 1
        for link in cable(rank, rank | 1 << bit, bandwidth, latency)
    ]
    symmetries = [tuple(rank ^ 1 << bit for rank in range(ranks)) for bit in range(dimension)]
    return Topology.build(name, ranks, links, symmetries=symmetries)


def full(*, name: str, ranks: int, bandwidth: Fraction, latency: Fraction) -> Topology:
    """Every rank linked to every other. Symmetries: the rotation."""
    check_size(name, ranks, ranks * (ranks - 1))
    links = [
        link
        for second in range(ranks)
        for first in range(second)
        for link in cable(first, second, bandwidth, latency)
    ]
    return Topology.build(name, ranks, links, symmetries=without_identity([rotation(ranks)]))


def _grid(
    name: str, extents: Sequence[int], bandwidth: Fraction, latency: Fraction, *, wraps: bool
) -> list[Link]:
    ranks = math.prod(extents)
    check_size(name, ranks, 2 * ranks * len(extents))
    links: list[Link] = []
    for rank in range(ranks):
        place = coordinates(rank, extents)
        for dimension, extent in enumerate(extents):
            step = place[dimension] + 1
            if step == extent and not (wraps and extent > 2):
                continue
            neighbour = (*place[:dimension], step % extent, *place[dimension + 1 :])
            links += cable(rank, number_of(neighbour, extents), bandwidth, latency)
    return links

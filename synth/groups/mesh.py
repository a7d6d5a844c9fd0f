"""The groups of a mesh of ranks: one on every line along an axis."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.topology import Topology


def along(topology: Topology, shape: Sequence[int], axis: int, kind: Kind | str) -> list[Collective]:
    """A collective for every line of a mesh along an axis.

    Args:
        topology: the fabric, of as many ranks as the mesh holds.
        shape: sides of the mesh; along its last axis ranks are consecutive, as in torch's `DeviceMesh`.
        axis: from 0 on.
        kind: what each line does; the root is its first rank.

    Raises:
        InputError: the mesh does not hold the ranks, or there is no such axis or kind.

    Examples:
        >>> [row.ranks for row in groups.along(topologies.load("torus:2x2"), (2, 2), 0, "allreduce")]
        [(0, 2), (1, 3)]
    """
    if prod(shape) != topology.ranks:
        sides = "x".join(map(str, shape))
        raise InputError(f"mesh {sides}: must hold the {topology.ranks} ranks of the topology")
    if not 0 <= axis < len(shape):
        raise InputError(f"axis must be from 0 to {len(shape) - 1}, got {axis}")
    strides = [prod(shape[place + 1 :]) for place in range(len(shape))]
    others = (range(1 if place == axis else side) for place, side in enumerate(shape))
    corners = (sum(at * stride for at, stride in zip(it, strides, strict=True)) for it in product(*others))
    return [
        Collective.on(
            topology, kind, root=first, ranks=[first + strides[axis] * step for step in range(shape[axis])]
        )
        for first in corners
    ]

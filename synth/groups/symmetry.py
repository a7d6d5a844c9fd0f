"""Symmetries of a fabric that only permute the groups: what holds of one group then holds of its images.

Elements of the group of permutations that the declared symmetries generate are listed up to a limit, and
those under which every group becomes a group of the same kind and weight are kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from arborcast.synth.collective import Collective
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.topology import Topology

MOST_ELEMENTS = 4096
"""So many products of the declared symmetries are looked at; fewer symmetries make a larger program."""


@dataclass(frozen=True, eq=False)
class Move:
    """A symmetry of the fabric that takes groups to groups.

    Attributes:
        vertices: the image of each vertex.
        groups: the image of each group.
    """

    vertices: Ints
    groups: Ints


def moves(
    topology: Topology, collectives: Sequence[Collective], weights: Sequence[Fraction]
) -> Iterator[Move]:
    """The symmetries that are found, without the identity."""
    places: dict[object, list[int]] = defaultdict(list)
    for index, (collective, weight) in enumerate(zip(collectives, weights, strict=True)):
        places[collective.kind, collective.members, collective.root, weight].append(index)
    # Of groups that are alike in everything, the first becomes the first, the second the second.
    rank_among = {index: position for found in places.values() for position, index in enumerate(found)}
    for images in _elements(topology):
        groups = np.empty(len(collectives), dtype=np.int64)
        for index, (collective, weight) in enumerate(zip(collectives, weights, strict=True)):
            members = frozenset(images[list(collective.ranks)].tolist())
            root = None if collective.root is None else int(images[collective.root])
            alike = places.get((collective.kind, members, root, weight), [])
            if rank_among[index] >= len(alike):
                break
            groups[index] = alike[rank_among[index]]
        else:
            yield Move(images, groups)


def _elements(topology: Topology) -> Iterator[Ints]:
    """Products of the declared symmetries, each once, by their number of factors; not the identity."""
    generators = [np.array(images, dtype=np.int64) for images in topology.symmetries]
    identity = np.arange(topology.size, dtype=np.int64)
    seen = {identity.tobytes()}
    queue = [identity]
    for element in queue:  # grows while it is walked
        for generator in generators:
            product = generator[element]
            if product.tobytes() not in seen and len(seen) < MOST_ELEMENTS:
                seen.add(product.tobytes())
                queue.append(product)
                yield product


def inverse(images: Ints) -> Ints:
    """The permutation that takes everything back."""
    back = np.empty_like(images)
    back[images] = np.arange(len(images), dtype=np.int64)
    return back

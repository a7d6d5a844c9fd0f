"""One tight cut and all its images under the declared symmetries, as link lengths.

On a topology whose ranks are alike the images of one cut say together what no cut says alone: how often
every tree crosses them.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import numpy as np

from arborcast.synth.kernels.max_flow import link_arrays
from arborcast.synth.topology import Topology, Vertex


def orbit_lengths(topology: Topology, side: Iterable[Vertex]) -> tuple[Fraction, ...]:
    """How many images of a set each link leaves or enters, one length per link.

    The orbit is cut off at four images per vertex: fewer still give valid lengths, only not the best.

    Args:
        topology: one without symmetries has a single image.
        side: the set.
    """
    mask = np.zeros(topology.size, dtype=np.bool_)
    mask[list(side)] = True
    src, dst = link_arrays(topology)
    lengths = np.zeros(len(src), dtype=np.int64)
    seen, queue = {mask.tobytes()}, [mask]
    for member in queue:  # grows while it is walked
        lengths += member[src] != member[dst]
        for images in topology.symmetries:
            moved = np.zeros_like(member)
            moved[list(images)] = member
            if moved.tobytes() not in seen and len(seen) < 4 * topology.size:
                seen.add(moved.tobytes())
                queue.append(moved)
    return tuple(Fraction(int(length)) for length in lengths)

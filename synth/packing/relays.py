"""Ranks that take no part in a collective, seen as switches, for methods that know ranks and switches only.

Relays may copy and reduce, switches only forward. For out-trees on relays whose bandwidth in equals their
bandwidth out this loses nothing (Bang-Jensen, Frank, Jackson 1995); elsewhere it may, and the bound of the
original topology shows how much.
"""

from __future__ import annotations

from dataclasses import replace

from arborcast.synth.collective import Collective
from arborcast.synth.errors import CollectiveError
from arborcast.synth.topology import Switch, Topology


def relays_as_switches(topology: Topology, collective: Collective) -> tuple[Topology, Collective]:
    """The same graph in which the relays are switches, and the collective on it.

    Vertex numbers do not change, so that trees found on the result are trees of the original: the ranks
    that take part must come first (`Topology.reordered` puts them there).

    Raises:
        CollectiveError: some relay has a lower number than a rank that takes part.
    """
    count = len(collective.ranks)
    if set(collective.ranks) != set(range(count)):
        raise CollectiveError(
            f"{collective.kind}: ranks must be numbered 0..{count - 1} before their relays, "
            f"got {sorted(collective.ranks)} (use Topology.reordered)"
        )
    if count == topology.ranks:
        return topology, collective
    taken = {switch.name for switch in topology.switches}
    relays = []
    for rank in range(count, topology.ranks):
        name = f"relay {rank}"
        while name in taken:
            name += "'"
        relays.append(Switch(name))
    flat = replace(
        topology,
        ranks=count,
        switches=(*relays, *topology.forwarding.switches),
        symmetries=tuple(
            images for images in topology.symmetries if set(images[:count]) == set(range(count))
        ),
    )
    return flat, collective

"""What one group sees of the fabric: its ranks first, and the others as switches, or not at all.

Reductions and gathers are turned round, so that everything after this spreads: a broadcast, an allgather, a
scatter, an allreduce or an alltoall on ranks 0..k-1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from arborcast.synth.collective import Collective, Kind
from arborcast.synth.topology import Link, Topology, Vertex, on_some_way

_SPREADING = {
    Kind.REDUCE: Kind.BROADCAST,
    Kind.REDUCE_SCATTER: Kind.ALLGATHER,
    Kind.GATHER: Kind.SCATTER,
}


@dataclass(frozen=True, eq=False)
class GroupView:
    """A group's own fabric, renumbered.

    Attributes:
        topology: the links that the group may use, turned round where `is_reversed`; its ranks are those of
            the group, and other ranks that it may pass are switches.
        collective: what it does there, as spreading from the root or roots.
        vertices: which vertex of the whole fabric each one is.
        links: which link of the whole fabric each one is.
        is_reversed: whether data moves against these links.
    """

    topology: Topology
    collective: Collective
    vertices: tuple[Vertex, ...]
    links: tuple[int, ...]
    is_reversed: bool

    @property
    def is_routed(self) -> bool:
        """Whether its data is never copied or combined on the way, so that it moves along paths."""
        return self.collective.kind in {Kind.SCATTER, Kind.ALLTOALL}


def spreading_kind(kind: Kind) -> Kind:
    """The kind that a view of a group of this kind has."""
    return _SPREADING.get(kind, kind)


def view_of(topology: Topology, collective: Collective, *, relays: bool) -> GroupView:
    """The view of a group.

    Args:
        topology: the whole fabric.
        collective: of the group, checked, and no custom one.
        relays: whether ranks outside the group may forward for it, like switches. Those at which nothing
            can pass are left out, and so are switches.
    """
    others = range(0 if relays else topology.ranks, topology.size)
    useful = on_some_way(topology.links, collective.members | set(others), collective.members)
    order = [*collective.ranks, *sorted(useful - collective.members)]
    number = {vertex: position for position, vertex in enumerate(order)}
    is_reversed = collective.kind in _SPREADING
    links: list[Link] = []
    whole: dict[tuple[Vertex, Vertex], int] = {}
    for index, link in enumerate(topology.links):
        if link.src in useful and link.dst in useful:
            ends = (number[link.src], number[link.dst])
            src, dst = ends[::-1] if is_reversed else ends
            links.append(replace(link, src=src, dst=dst, addresses=None, lanes=()))  # relays become switches
            whole[src, dst] = index
    local = Topology.build(
        topology.name,
        len(collective.ranks),
        links,
        [str(vertex) for vertex in order[len(collective.ranks) :]],
    )
    kind = spreading_kind(collective.kind)
    root = None if collective.root is None else number[collective.root]
    return GroupView(
        local,
        Collective(kind, tuple(range(len(collective.ranks))), root),
        tuple(order),
        tuple(whole[link.src, link.dst] for link in local.links),
        is_reversed,
    )

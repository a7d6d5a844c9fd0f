"""Schedules through switches that add and multicast, written by hand."""

from __future__ import annotations

from fractions import Fraction

from arborcast.synth.certificate import Bound, Cut
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Switch, Topology
from tests.support.able_fabrics import of_cables

ABLE = Switch("s", reduces=True, multicasts=True, turns=True)


def star(ranks: int, switch: Switch = ABLE) -> Topology:
    """Ranks around one switch."""
    return of_cables(f"star-{ranks}", ranks, [(rank, ranks) for rank in range(ranks)], [switch])


def two_levels(leaves: int, each: int) -> Topology:
    """A switch above `leaves` switches with `each` ranks below them."""
    ranks = leaves * each
    switches = [Switch(f"leaf{leaf}", reduces=True, multicasts=True, turns=True) for leaf in range(leaves)]
    top = Switch("top", reduces=True, multicasts=True, turns=True)
    pairs = [(rank, ranks + rank // each) for rank in range(ranks)]
    pairs += [(ranks + leaf, ranks + leaves) for leaf in range(leaves)]
    return of_cables(f"leaves-{leaves}x{each}", ranks, pairs, [*switches, top])


def turning(topology: Topology) -> Schedule:
    """An allreduce in one chunk: sums up to the last switch, which multicasts what it has made."""
    top = topology.size - 1
    parent, depth = {top: top}, {top: 0}
    for vertex in (queue := [top]):
        for link in topology.links:
            if link.src == vertex and link.dst not in parent:
                parent[link.dst], depth[link.dst] = vertex, depth[vertex] + 1
                queue.append(link.dst)
    height = max(depth.values())
    below = [vertex for vertex in parent if vertex != top]
    up = [Transfer(0, vertex, parent[vertex], height - depth[vertex], True) for vertex in below]
    down = [Transfer(0, parent[vertex], vertex, height + depth[vertex] - 1) for vertex in below]
    return _schedule(topology, Kind.ALLREDUCE, [Chunk(Fraction(1), 0)], [*up, *down])


def shared_roots(topology: Topology) -> Schedule:
    """An allreduce on a star without turning: chunk c is summed for rank c, and multicast from there."""
    ranks = range(topology.ranks)
    hub = topology.ranks
    loopback = topology.switches[0].loopback
    chunks = [Chunk(Fraction(1, len(ranks)), owner) for owner in ranks]
    transfers = []
    for chunk in ranks:
        others = [rank for rank in ranks if rank != chunk or loopback]
        transfers += [Transfer(chunk, rank, hub, 0, True) for rank in others]
        transfers.append(Transfer(chunk, hub, chunk, 1, not loopback))
        transfers.append(Transfer(chunk, chunk, hub, 2))
        transfers += [Transfer(chunk, hub, rank, 3) for rank in others]
    return _schedule(topology, Kind.ALLREDUCE, chunks, transfers)


def one_way(topology: Topology, kind: Kind) -> Schedule:
    """A reduce to rank 0, or a broadcast from it, over the switch of a star."""
    hub, others = topology.ranks, range(1, topology.ranks)
    if kind is Kind.REDUCE:
        transfers = [Transfer(0, rank, hub, 0, True) for rank in others] + [Transfer(0, hub, 0, 1, True)]
    else:
        transfers = [Transfer(0, 0, hub, 0)] + [Transfer(0, hub, rank, 1) for rank in others]
    return _schedule(topology, kind, [Chunk(Fraction(1), 0)], transfers)


def _schedule(topology: Topology, kind: Kind, chunks: list[Chunk], transfers: list[Transfer]) -> Schedule:
    """Its bound is that of the data which must leave rank 0, or reach it."""
    alone = frozenset({0})
    bound = Bound(Fraction(1), Cut(alone, Fraction(1)))
    if kind is Kind.REDUCE:
        bound = Bound(Fraction(1), Cut(frozenset(range(topology.size)) - alone, Fraction(1)))
    collective = Collective.on(topology, kind, root=0)
    return Schedule.build(topology, collective, Method("drawn"), bound, chunks, transfers)

"""Who is cut off: the words for a bound of zero, by walking the links."""

from __future__ import annotations

from collections.abc import Iterable

from arborcast.synth.collective import Collective, Kind
from arborcast.synth.topology import Topology, Vertex

_DOWNSTREAM = frozenset({Kind.BROADCAST, Kind.SCATTER})
_UPSTREAM = frozenset({Kind.REDUCE, Kind.GATHER})


def who_is_cut_off(topology: Topology, collective: Collective) -> str:
    """One line that names the ranks that cannot take part, and which way is missing.

    Seen from the root, or from the first rank where there is none; for a custom collective the first block
    that cannot get where it must.
    """
    if collective.kind is Kind.CUSTOM:
        return _which_block_is_stuck(topology, collective)
    start = collective.ranks[0] if collective.root is None else collective.root
    if collective.kind in _DOWNSTREAM:
        reached = reachable_from(topology, start)
        way = f"nothing leads there from rank {start}"
    elif collective.kind in _UPSTREAM:
        reached = reachable_from(topology.reversed(), start)
        way = f"nothing leads from there to rank {start}"
    else:
        reached = reachable_from(topology, start) & reachable_from(topology.reversed(), start)
        way = f"there is no way from rank {start} and back"
    lost = [rank for rank in collective.ranks if rank not in reached]
    noun = "rank" if len(lost) == 1 else "ranks"
    return f"{collective.kind}: {noun} {', '.join(map(str, lost))} cut off: {way}"


def _which_block_is_stuck(topology: Topology, collective: Collective) -> str:
    for index, demand in enumerate(collective.demands):
        reached = set[Vertex]().union(*(reachable_from(topology, source) for source in demand.sources))
        lost = sorted(demand.targets - reached)
        if lost:
            from_where = f"{'rank' if len(demand.sources) == 1 else 'ranks'} {_listed(demand.sources)}"
            who = f"{'rank' if len(lost) == 1 else 'ranks'} {_listed(lost)}"
            return f"custom: {who} cut off: nothing leads there from {from_where}, where block {index} is"
    raise AssertionError("a bound of zero has a block that cannot get where it must")


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def reachable_from(topology: Topology, start: Vertex) -> set[Vertex]:
    """The vertices to which links lead, the start included."""
    neighbours: dict[Vertex, list[Vertex]] = {}
    for link in topology.links:
        neighbours.setdefault(link.src, []).append(link.dst)
    reached, frontier = {start}, [start]
    for vertex in frontier:
        for after in neighbours.get(vertex, ()):
            if after not in reached:
                reached.add(after)
                frontier.append(after)
    return reached

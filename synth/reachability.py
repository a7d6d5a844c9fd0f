"""Who is cut off: the words for a bound of zero, by walking the links."""

from __future__ import annotations

from synth.collective import Collective, Kind
from synth.topology import Topology, Vertex

_DOWNSTREAM = frozenset({Kind.BROADCAST, Kind.SCATTER})
_UPSTREAM = frozenset({Kind.REDUCE, Kind.GATHER})


def who_is_cut_off(topology: Topology, collective: Collective) -> str:
    """One line that names the ranks that cannot take part, and which way is missing.

    Seen from the root, or from the first rank where there is none.
    """
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

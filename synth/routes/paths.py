"""Parts of blocks on paths: flows are taken apart into them, and schedules are made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TypeAlias

from arborcast.synth.collective import Collective
from arborcast.synth.schedule import Chunk, Transfer
from arborcast.synth.topology import Hop, Topology, Vertex

Path: TypeAlias = tuple[Vertex, ...]


@dataclass(frozen=True, slots=True)
class PathShare:
    """A part of one block on one path, from its owner to its target; `share` of that block."""

    path: Path
    share: Fraction


def routes_of_flow(
    flow: MutableMapping[Hop, int | Fraction], source: Vertex, demands: Mapping[Vertex, int | Fraction]
) -> Iterator[PathShare]:
    """Paths that carry a flow from the source to some targets, those of the fewest links first.

    Args:
        flow: over each link, positive; the paths are taken out of it, cycles and others' parts stay.
        source: where these paths start.
        demands: what stays at each target, positive.
    """
    for target, demand in demands.items():
        missing = demand
        while missing:
            path = _shortest(flow, source, target)
            taken = min(missing, *(flow[hop] for hop in pairwise(path)))
            missing -= taken
            for hop in pairwise(path):
                flow[hop] -= taken
                if not flow[hop]:
                    del flow[hop]
            yield PathShare(path, Fraction(taken) / demand)


def _shortest(flow: Iterable[Hop], source: Vertex, target: Vertex) -> Path:
    """A path of the fewest links along links that carry something."""
    after: dict[Vertex, list[Vertex]] = {}
    for src, dst in flow:
        after.setdefault(src, []).append(dst)
    before = {source: source}
    queue = [source]
    for vertex in queue:
        for neighbour in sorted(after.get(vertex, ())):
            if neighbour not in before:
                before[neighbour] = vertex
                queue.append(neighbour)
    assert target in before, "a flow that leaves something at the target leads there"
    path = [target]
    while path[-1] != source:
        path.append(before[path[-1]])
    return tuple(path[::-1])


def lift_routes(
    topology: Topology, collective: Collective, routes: Iterable[PathShare], *, together: bool = False
) -> tuple[list[Chunk], list[Transfer]]:
    """A chunk per route, one step for each hop from rank to rank: the last step of every method of paths.

    Args:
        topology: the fabric.
        collective: what the routes are for.
        routes: in the order of the chunks.
        together: whether all chunks arrive in the last step; else all set out in the first.
    """
    block = Fraction(1, len(collective.ranks))
    found = list(routes)
    stops = [[i for i, vertex in enumerate(route.path) if not topology.is_switch(vertex)] for route in found]
    most = max(map(len, stops), default=0)
    chunks = [Chunk(block * route.share, route.path[0], route.path[-1]) for route in found]
    transfers = [
        Transfer(number, route.path[start], route.path[end], step, via=route.path[start + 1 : end])
        for number, (route, at) in enumerate(zip(found, stops, strict=True))
        for step, (start, end) in enumerate(pairwise(at), start=most - len(at) if together else 0)
    ]
    return chunks, transfers

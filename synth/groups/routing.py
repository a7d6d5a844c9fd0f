"""Flows to paths to a schedule, for groups that gather, scatter or exchange blocks, in exact arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.topology import Hop, Topology, Vertex


@dataclass(frozen=True, slots=True)
class Way:
    """A part of one block on one path: `share` is its part of that block."""

    path: tuple[Vertex, ...]
    share: Fraction


def ways_of_flow(
    source: Vertex, targets: Iterable[Vertex], amount: Fraction, flow: Mapping[Hop, Fraction]
) -> Iterator[Way]:
    """Paths that carry a flow from the source which leaves the same amount at each target.

    Args:
        source: where all of it starts.
        targets: other vertices.
        amount: what each of them keeps, positive.
        flow: over each link; what runs in circles is left out.
    """
    left = {hop: value for hop, value in flow.items() if value}
    for target in targets:
        missing = amount
        while missing:
            path = _shortest(left, source, target)
            taken = min(missing, *(left[hop] for hop in pairwise(path)))
            missing -= taken
            for hop in pairwise(path):
                left[hop] -= taken
                if not left[hop]:
                    del left[hop]
            yield Way(path, taken / amount)


def _shortest(flow: Iterable[Hop], source: Vertex, target: Vertex) -> tuple[Vertex, ...]:
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


def lift_ways(
    topology: Topology, collective: Collective, method: Method, limit: Bound, ways: Sequence[Way]
) -> Schedule:
    """A chunk per way; it moves one step from each rank on its path to the next."""
    block = Fraction(1, len(collective.ranks))
    chunks: list[Chunk] = []
    transfers: list[Transfer] = []
    for way in ways:
        stops = [place for place, vertex in enumerate(way.path) if not topology.is_switch(vertex)]
        for step, (start, end) in enumerate(pairwise(stops)):
            src, *via, dst = way.path[start : end + 1]
            transfers.append(Transfer(len(chunks), src, dst, step, via=tuple(via)))
        chunks.append(Chunk(block * way.share, way.path[0], way.path[-1]))
    return Schedule.build(topology, collective, method, limit, chunks, transfers)

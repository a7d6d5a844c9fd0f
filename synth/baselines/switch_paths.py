"""Ways between two ranks that pass nothing but switches: the edges that every pattern is made of.

For each pair: the direct link, the ways with the fewest switches (parallel planes of switches give
several), and the widest way, up to a fixed number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import TypeAlias

from arborcast.synth.topology import Hop, Topology, Vertex

Pair: TypeAlias = tuple[int, int]
PATHS_PER_PAIR = 8


@dataclass(frozen=True, eq=False)
class Path:
    """From one rank to another through switches; `width` is its narrowest link, GB/s.

    Compared by identity: searches keep paths in sets, and each is made once.
    """

    src: int
    dst: int
    via: tuple[Vertex, ...]
    width: Fraction

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """The links it passes."""
        return tuple(pairwise((self.src, *self.via, self.dst)))


Paths: TypeAlias = Mapping[Pair, tuple[Path, ...]]


def switch_paths(topology: Topology, ranks: Sequence[int], sources: Sequence[int] = ()) -> Paths:
    """The ways between each two of the ranks that have one, the widest first, then the shortest.

    Where `sources` are given, only the ways that begin there. The last ones are kept: patterns are laid over
    one graph after each other.
    """
    return _switch_paths(topology, tuple(ranks), tuple(sources))


@lru_cache(maxsize=2)
def _switch_paths(topology: Topology, ranks: tuple[int, ...], sources: tuple[int, ...]) -> Paths:
    receivers: dict[Vertex, list[Vertex]] = {vertex: [] for vertex in range(topology.size)}
    taking_part = set(ranks)
    for link in topology.links:
        if topology.is_switch(link.dst) or link.dst in taking_part:
            receivers[link.src].append(link.dst)
    return {
        (src, dst): ways for src in sources or ranks for dst, ways in _sorted_ways(topology, src, receivers)
    }


def widest(ways: Sequence[Path]) -> tuple[Path, ...]:
    """Those of sorted ways that are as wide and as short as the first."""
    return tuple(way for way in ways if way.width == ways[0].width and len(way.via) == len(ways[0].via))


def _sorted_ways(
    topology: Topology, src: int, receivers: Mapping[Vertex, Sequence[Vertex]]
) -> Iterator[tuple[int, tuple[Path, ...]]]:
    for dst, ways in sorted(_ways_from(topology, src, receivers).items()):
        paths = [_path(topology, way) for way in sorted(ways)]
        paths.sort(key=lambda path: (-path.width, len(path.via), path.via))
        yield dst, tuple(paths[:PATHS_PER_PAIR])


def _ways_from(
    topology: Topology, src: int, receivers: Mapping[Vertex, Sequence[Vertex]]
) -> dict[int, set[tuple[Vertex, ...]]]:
    ways: dict[int, set[tuple[Vertex, ...]]] = {}
    for dst in receivers[src]:
        if not topology.is_switch(dst):
            ways.setdefault(dst, set()).add((src, dst))
    for way in [*_shortest(topology, src, receivers), *_widest(topology, src, receivers)]:
        ways.setdefault(way[-1], set()).add(way)
    return ways


def _shortest(
    topology: Topology, src: int, receivers: Mapping[Vertex, Sequence[Vertex]]
) -> list[tuple[Vertex, ...]]:
    """All ways with the fewest switches, at least one, to each rank; at most PATHS_PER_PAIR to a vertex."""
    done: list[tuple[Vertex, ...]] = []
    reached = {src}
    level: dict[Vertex, list[tuple[Vertex, ...]]] = {src: [(src,)]}
    while level:
        following: dict[Vertex, list[tuple[Vertex, ...]]] = {}
        for vertex, ways in level.items():
            for receiver in receivers[vertex]:
                direct = vertex == src and not topology.is_switch(receiver)
                if receiver not in reached and not direct:
                    arrived = following.setdefault(receiver, [])
                    arrived.extend((*way, receiver) for way in ways[: PATHS_PER_PAIR - len(arrived)])
        reached.update(following)
        done += [way for vertex in following if not topology.is_switch(vertex) for way in following[vertex]]
        level = {vertex: ways for vertex, ways in following.items() if topology.is_switch(vertex)}
    return done


def _widest(
    topology: Topology, src: int, receivers: Mapping[Vertex, Sequence[Vertex]]
) -> list[tuple[Vertex, ...]]:
    """One widest way to each rank, among the widest one of the fewest switches."""
    done: list[tuple[Vertex, ...]] = []
    closed: set[Vertex] = set()
    # Nothing is wider than all links together.
    queue: list[tuple[Fraction, int, tuple[Vertex, ...]]] = [
        (-sum((link.bandwidth for link in topology.links), Fraction(0)), 0, (src,))
    ]
    while queue:
        narrowness, length, way = heappop(queue)
        vertex = way[-1]
        if vertex in closed:
            continue
        closed.add(vertex)
        if vertex != src and not topology.is_switch(vertex):
            done.append(way)
            continue
        for receiver in receivers[vertex]:
            width = min(-narrowness, topology.bandwidth[vertex, receiver])
            heappush(queue, (-width, length + 1, (*way, receiver)))
    return done


def _path(topology: Topology, way: tuple[Vertex, ...]) -> Path:
    width = min(topology.bandwidth[hop] for hop in pairwise(way))
    return Path(way[0], way[-1], way[1:-1], width)

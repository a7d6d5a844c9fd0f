"""What the builders of topologies share: cables, rotations, products of symmetries, limits of size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

from arborcast.synth.errors import TopologyError
from arborcast.synth.topology import Link, Switch, Topology, Vertex

MAX_VERTICES = 1 << 16
MAX_LINKS = 1 << 21


IN_NETWORK = {
    "none": Switch("none"),
    "reduce": Switch("reduce", reduces=True),
    "multicast": Switch("multicast", multicasts=True),
    "both": Switch("both", reduces=True, multicasts=True),
    "turn": Switch("turn", reduces=True, multicasts=True, turns=True),
    "loopback": Switch("loopback", reduces=True, multicasts=True, loopback=True),
}
"""What a switch can do beside forwarding, by the words of specs: with InfiniBand SHARP it turns, with NVLink
SHARP it loops back."""


def switch_that(name: str, what: str) -> Switch:
    """A switch of this name that can do what a word of `IN_NETWORK` says."""
    return replace(IN_NETWORK[what], name=name)


def cable(
    first: Vertex, second: Vertex, bandwidth: Fraction | int, latency_us: Fraction | int = 0
) -> tuple[Link, Link]:
    """A full-duplex cable: one link each way."""
    rate, latency = Fraction(bandwidth), Fraction(latency_us)
    return Link(first, second, rate, latency), Link(second, first, rate, latency)


def assuming(links: Iterable[Link], *, rate: str = "", latency: str = "") -> list[Link]:
    """The links with why their rates or latencies are assumed; where nothing is said, as they were."""
    return [
        replace(
            link,
            rate_assumed=rate or link.rate_assumed,
            latency_assumed=latency or link.latency_assumed,
        )
        for link in links
    ]


def assumed(topology: Topology, *, rate: str = "", latency: str = "") -> Topology:
    """The topology with `assuming` of all its links."""
    return replace(topology, links=tuple(assuming(topology.links, rate=rate, latency=latency)))


def check_size(name: str, vertices: int, links: int) -> None:
    """Raise TopologyError when a builder is asked for more than fits into memory.

    `links` counts both directions.
    """
    if vertices > MAX_VERTICES:
        raise TopologyError(f"{name}: must have at most {MAX_VERTICES} vertices, got {vertices}")
    if links > MAX_LINKS:
        raise TopologyError(f"{name}: must have at most {MAX_LINKS} links, got {links}")


def coordinates(index: int, extents: Sequence[int]) -> tuple[int, ...]:
    """Where the vertex of this number stands in a grid, the last dimension counting fastest."""
    place = []
    for extent in reversed(extents):
        index, digit = divmod(index, extent)
        place.append(digit)
    return tuple(reversed(place))


def number_of(place: Sequence[int], extents: Sequence[int]) -> int:
    """The inverse of `coordinates`."""
    index = 0
    for digit, extent in zip(place, extents, strict=True):
        index = index * extent + digit
    return index


def grid_images(extents: Sequence[int], dimension: int, move: Callable[[int], int]) -> tuple[Vertex, ...]:
    """Images of all grid positions when one coordinate is moved by a permutation of its values."""
    stride = math.prod(extents[dimension + 1 :])
    extent = extents[dimension]

    def image(index: int) -> int:
        digit = index // stride % extent
        return index + (move(digit) - digit) * stride

    return tuple(image(index) for index in range(math.prod(extents)))


def rotation(count: int, by: int = 1) -> tuple[int, ...]:
    """The permutation that moves each of `count` places on by `by`, in a circle."""
    return tuple((index + by) % count for index in range(count))


def side_by_side(*blocks: Iterable[int]) -> tuple[Vertex, ...]:
    """One permutation out of those of consecutive runs of vertices, each counted from 0."""
    images: list[int] = []
    for block in blocks:
        start = len(images)
        images.extend(start + image for image in block)
    return tuple(images)


def without_identity(symmetries: Iterable[tuple[Vertex, ...]]) -> tuple[tuple[Vertex, ...], ...]:
    """Those that move a vertex: a rotation among one box says nothing."""
    return tuple(images for images in symmetries if list(images) != list(range(len(images))))


def joined(count: int, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, ...]]:
    """The sets of numbers below `count` that pairs join, directly or over others; by the least of each."""
    sets = {number: [number] for number in range(count)}
    for pair in pairs:
        small, large = sorted((sets[number] for number in pair), key=len)
        if small is not large:
            large += small
            sets.update(dict.fromkeys(small, large))
    return sorted({id(each): tuple(sorted(each)) for each in sets.values()}.values())


def holding(topology: Topology, candidates: Iterable[tuple[Vertex, ...]]) -> Iterator[tuple[Vertex, ...]]:
    """Those of the permutations that are symmetries of the topology, as they are asked for."""
    for images in candidates:
        with suppress(TopologyError):
            topology.check_symmetry(images)
            yield images


def with_obvious_symmetries(topology: Topology) -> Topology:
    """The topology with those rotations and bit flips of its ranks declared that are symmetries of it.

    For readers of files that say nothing of symmetries; switches keep their place. At most one candidate
    per bit of the number of ranks is tried, each in O(links).
    """
    ranks, switches = topology.ranks, range(len(topology.switches))
    turns = [rotation(ranks)] if ranks > 1 else []
    if ranks & (ranks - 1) == 0:
        bits = range(ranks.bit_length() - 1)
        turns += [tuple(rank ^ 1 << bit for rank in range(ranks)) for bit in bits]
    candidates = [side_by_side(turn, switches) for turn in turns]
    # Where the rotation moves every rank everywhere, flips would add nothing.
    turning = list(holding(topology, candidates[:1]))
    return replace(topology, symmetries=tuple(turning or holding(topology, candidates[1:])))

"""Graphs that stand for no product: torus, mesh, ring, hypercube, full mesh; star, fat tree, dragonfly.

All links have one bandwidth (1 GB/s each way unless told) and one latency (0 us unless told), and
nothing to cite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from arborcast.synth.errors import TopologyError
from arborcast.synth.topology import Link, Topology
from arborcast.topologies.builders import (
    cable,
    check_size,
    coordinates,
    grid_images,
    number_of,
    rotation,
    side_by_side,
    switch_that,
    without_identity,
)
from arborcast.topologies.entries import IN_NETWORK, Entry, Parameter, bandwidth, count, extents, latency


def torus(*, name: str, extents: Sequence[int], bandwidth: Fraction, latency: Fraction) -> Topology:
    """A grid that wraps round in every dimension; along an extent of 2 the two ways round are one cable.

    Symmetries: the translations, so all ranks are alike.
    """
    return lattice(name, extents, [bandwidth] * len(extents), latency, [True] * len(extents))


def mesh(*, name: str, extents: Sequence[int], bandwidth: Fraction, latency: Fraction) -> Topology:
    """A grid that does not wrap round. Symmetries: the reflection of each dimension."""
    return lattice(name, extents, [bandwidth] * len(extents), latency, [False] * len(extents))


def ring(*, name: str, ranks: int, bandwidth: Fraction, latency: Fraction) -> Topology:
    """Ranks in a circle, linked both ways. Symmetries: the rotation."""
    return lattice(name, [ranks], [bandwidth], latency, [True])


def lattice(
    name: str,
    extents: Sequence[int],
    bandwidths: Sequence[Fraction],
    latency: Fraction,
    wraps: Sequence[bool],
    twists: Mapping[int, Sequence[int]] | None = None,
) -> Topology:
    """A grid, some dimensions of which wrap round, perhaps to elsewhere than they began.

    Symmetries: of each dimension one step on where it wraps round, else the reflection.

    Args:
        name: of the topology.
        extents: ranks along each dimension; the last counts fastest.
        bandwidths: GB/s each way of the links along each dimension.
        latency: us of every link.
        wraps: whether each dimension wraps round.
        twists: what the step over the end of a dimension adds to the coordinates (Camara et al., TPDS 2010);
            nothing for those that are left out.
    """
    ranks = math.prod(extents)
    check_size(name, ranks, 2 * ranks * len(extents))
    links: list[Link] = []
    symmetries: list[tuple[int, ...]] = []
    for dimension, extent in enumerate(extents):
        twist = (twists or {}).get(dimension, [0] * len(extents))
        onward = [_onward(coordinates(rank, extents), dimension, extents, twist) for rank in range(ranks)]
        stride = math.prod(extents[dimension + 1 :])
        for rank, end in enumerate(onward):
            if rank // stride % extent < extent - 1 or (wraps[dimension] and extent > 2):
                links += cable(rank, end, bandwidths[dimension], latency)
        mirror = grid_images(extents, dimension, range(extent)[::-1].__getitem__)
        symmetries.append(tuple(onward) if wraps[dimension] else mirror)
    return Topology.build(name, ranks, links, symmetries=without_identity(symmetries))


def _onward(place: Sequence[int], dimension: int, extents: Sequence[int], twist: Sequence[int]) -> int:
    """The rank one step on along a dimension, over its end and twisted there."""
    moved = list(place)
    moved[dimension] += 1
    if moved[dimension] == extents[dimension]:
        moved[dimension] = 0
        moved = [(at + by) % extent for at, by, extent in zip(moved, twist, extents, strict=True)]
    return number_of(moved, extents)


def hypercube(*, name: str, dimension: int, bandwidth: Fraction, latency: Fraction) -> Topology:
    """Two to the power of `dimension` ranks, linked where their numbers differ in one bit.

    Symmetries: flipping one bit.
    """
    if dimension > 16:
        raise TopologyError(f"{name}: dimension must be at most 16, got {dimension}")
    ranks = 1 << dimension
    check_size(name, ranks, ranks * dimension)
    links = [
        link
        for rank in range(ranks)
        for bit in range(dimension)
        if not rank >> bit & 1
        for link in cable(rank, rank | 1 << bit, bandwidth, latency)
    ]
    symmetries = [tuple(rank ^ 1 << bit for rank in range(ranks)) for bit in range(dimension)]
    return Topology.build(name, ranks, links, symmetries=symmetries)


def full(*, name: str, ranks: int, bandwidth: Fraction, latency: Fraction) -> Topology:
    """Every rank linked to every other. Symmetries: the rotation."""
    check_size(name, ranks, ranks * (ranks - 1))
    links = [
        link
        for second in range(ranks)
        for first in range(second)
        for link in cable(first, second, bandwidth, latency)
    ]
    return Topology.build(name, ranks, links, symmetries=without_identity([rotation(ranks)]))


def star(
    *,
    name: str,
    ranks: int,
    in_network: str,
    bandwidth: Fraction,
    latency: Fraction,
    switch: str = "switch",
) -> Topology:
    """Ranks around one switch, which can do what a word of `IN_NETWORK` says. Symmetries: the rotation."""
    check_size(name, ranks + 1, 2 * ranks)
    links = [link for rank in range(ranks) for link in cable(rank, ranks, bandwidth, latency)]
    symmetries = without_identity([side_by_side(rotation(ranks), [0])])
    return Topology.build(name, ranks, links, [switch_that(switch, in_network)], symmetries)


def fat_tree(
    *,
    name: str,
    extents: Sequence[int],
    oversubscription: Fraction,
    in_network: str,
    bandwidth: Fraction,
    latency: Fraction,
) -> Topology:
    """A tree of switches whose links grow towards the top (Leiserson 1985).

    `extents` counts children from the top: 2x4x8 is one core over 2 pods of 4 leaves of 8 ranks. The switches
    that a multipath fabric (folded Clos) has in the place of one fat switch are one vertex here. A switch's
    link upwards carries what all its links downwards carry, divided by `oversubscription` once per level.
    All switches can do what a word of `IN_NETWORK` says. Symmetries: rotations among the children, at every
    level.
    """
    if oversubscription < 1:
        raise TopologyError(f"{name}: oversubscription must be at least 1, got {oversubscription}")
    # counts[level]: vertices that far below the core, the ranks last.
    counts = [math.prod(extents[:level]) for level in range(len(extents) + 1)]
    ranks = counts[-1]
    check_size(name, sum(counts), 2 * (sum(counts) - 1))
    # starts[level]: the first vertex of a level; switches are numbered from the core down.
    starts = [ranks + sum(counts[:level]) for level in range(len(extents))] + [0]
    links: list[Link] = []
    rate = bandwidth
    for level in range(len(extents), 0, -1):
        width = extents[level - 1]
        for child in range(counts[level]):
            parent = starts[level - 1] + child // width
            links += cable(starts[level] + child, parent, rate, latency)
        rate = rate * width / oversubscription
    symmetries = []
    for turned in range(len(extents)):
        turn = rotation(extents[turned])
        blocks = [
            grid_images(extents[:level], turned, turn.__getitem__) if level > turned else tuple(range(count))
            for level, count in enumerate(counts)
        ]
        symmetries.append(side_by_side(blocks[-1], *blocks[:-1]))
    switches = [switch_that(switch, in_network) for switch in _switch_names(extents, counts)]
    return Topology.build(name, ranks, links, switches, without_identity(symmetries))


def _switch_names(extents: Sequence[int], counts: Sequence[int]) -> list[str]:
    """`core`, then by level from the top: `pod3` or `level1.3`, and `leaf5` for those above the ranks."""
    names = ["core"]
    for level in range(1, len(extents)):
        word = "leaf" if level == len(extents) - 1 else "pod" if len(extents) == 3 else f"level{level}."
        names += [f"{word}{index}" for index in range(counts[level])]
    return names


def dragonfly(
    *,
    name: str,
    extents: Sequence[int],
    bandwidth: Fraction,
    local: Fraction | None,
    between: Fraction | None,
    latency: Fraction,
) -> Topology:
    """Groups of fully joined routers, one cable between each two groups (Kim et al., ISCA 2008).

    `extents` is groups x routers in a group x ranks at a router. Rates each way: rank to router
    `bandwidth`, router to router in a group `local`, between groups `between` (both `bandwidth` unless
    told). The cable that leads `distance` groups onward leaves from router (distance - 1) // h, where h is
    the number of such cables a router takes, so that the rotation of the groups is a symmetry; the other one
    declared is the rotation of the ranks at each router.
    """
    if len(extents) != 3:
        raise TopologyError(f"{name}: must be groups x routers x ranks, such as dragonfly:4x2x2")
    groups, routers, hosts = extents
    ranks = groups * routers * hosts
    cables = ranks + groups * routers * (routers - 1) // 2 + groups * (groups - 1) // 2
    check_size(name, ranks + groups * routers, 2 * cables)
    local, between = local or bandwidth, between or bandwidth
    links: list[Link] = []
    for rank in range(ranks):
        links += cable(rank, ranks + rank // hosts, bandwidth, latency)
    for group in range(groups):
        start = ranks + group * routers
        for second in range(routers):
            for first in range(second):
                links += cable(start + first, start + second, local, latency)
    per_router = max(1, math.ceil((groups - 1) / routers))

    def router(group: int, distance: int) -> int:
        return ranks + group * routers + (distance - 1) // per_router

    for second in range(groups):
        for first in range(second):
            onward = second - first
            links += cable(router(first, onward), router(second, groups - onward), between, latency)
    symmetries = (
        side_by_side(rotation(ranks, routers * hosts), rotation(groups * routers, routers)),
        side_by_side(grid_images(extents, 2, rotation(hosts).__getitem__), range(groups * routers)),
    )
    switches = [f"group{group}.router{index}" for group in range(groups) for index in range(routers)]
    return Topology.build(name, ranks, links, switches, without_identity(symmetries))


_BANDWIDTH = Parameter("bandwidth", "GB/s", bandwidth, Fraction(1))
_LATENCY = Parameter("latency", "US", latency, Fraction(0))
_LINKS = (_BANDWIDTH, _LATENCY)
_RANKS = Parameter("ranks", "N", count, required=True)


def _shape(shown: str) -> Parameter:
    return Parameter("extents", shown, extents, required=True)


ENTRIES: Sequence[Entry] = (
    Entry("torus", "a grid that wraps round", torus, (_shape("4x4"), *_LINKS)),
    Entry("mesh", "a grid that does not wrap round", mesh, (_shape("3x4"), *_LINKS)),
    Entry("ring", "ranks in a circle, both ways", ring, (_RANKS, *_LINKS)),
    Entry(
        "hypercube",
        "2 to the power of D ranks",
        hypercube,
        (Parameter("dimension", "D", count, required=True), *_LINKS),
    ),
    Entry("full", "every rank linked to every other", full, (_RANKS, *_LINKS)),
    Entry("star", "ranks around one switch", star, (_RANKS, IN_NETWORK, *_LINKS)),
    Entry(
        "fat-tree",
        "switches over switches over ranks, children counted from the top",
        fat_tree,
        (_shape("2x4x8"), Parameter("oversubscription", "R", bandwidth, Fraction(1)), IN_NETWORK, *_LINKS),
    ),
    Entry(
        "dragonfly",
        "groups x routers x ranks, a cable between each two groups",
        dragonfly,
        (
            _shape("4x2x2"),
            _BANDWIDTH,
            Parameter("local", "GB/s", bandwidth),
            Parameter("global", "GB/s", bandwidth, keyword="between"),
            _LATENCY,
        ),
    ),
)

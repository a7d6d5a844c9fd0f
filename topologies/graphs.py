"""Switched networks in general: star, fat tree, dragonfly.

Links are 1 GB/s each way with no latency unless told; they stand for no product, so there is nothing to
cite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from arborcast.synth.errors import TopologyError
from arborcast.synth.topology import Link, Topology
from arborcast.topologies.builders import (
    cable,
    check_size,
    grid_images,
    rotation,
    side_by_side,
    without_identity,
)


def star(*, name: str, ranks: int, bandwidth: Fraction, latency: Fraction) -> Topology:
    """Ranks around one switch. Symmetries: the rotation."""
    check_size(name, ranks + 1, 2 * ranks)
    links = [link for rank in range(ranks) for link in cable(rank, ranks, bandwidth, latency)]
    symmetries = without_identity([side_by_side(rotation(ranks), [0])])
    return Topology.build(name, ranks, links, ["switch"], symmetries)


def fat_tree(
    *,
    name: str,
    extents: Sequence[int],
    oversubscription: Fraction,
    bandwidth: Fraction,
    latency: Fraction,
) -> Topology:
    """A tree of switches whose links grow towards the top (Leiserson 1985).

    `extents` counts children from the top: 2x4x8 is one core over 2 pods of 4 leaves of 8 ranks. The switches
    that a multipath fabric (folded Clos) has in the place of one fat switch are one vertex here. A switch's
    link upwards carries what all its links downwards carry, divided by `oversubscription` once per level.
    Symmetries: rotations among the children, at every level.
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
    return Topology.build(name, ranks, links, _switch_names(extents, counts), without_identity(symmetries))


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

"""Checks the translations of an implicit schedule anew, from the images of their generators alone.

The proof that a schedule is correct if its representatives are rests on them. Nothing here is taken from
`synth.symmetry.translations`: orders come from cycles, orbits from the least member of each cycle, and that
only the identity keeps a rank in its place from the sizes of those orbits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.topology import LinkKind, Topology
from arborcast.synth.verification.replay import Errors

if TYPE_CHECKING:
    from arborcast.synth.implicit_schedule import ImplicitSchedule

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class CheckedGroup:
    """Translations that have passed every check.

    Attributes:
        order: number of elements.
        generators: images of all vertices, a row per generator.
        link_images: images of all links, in the order of the topology, a row per generator.
        orders: of the generators.
        vertex_orbit: the least vertex of each vertex's orbit.
        link_orbit: the first link of each link's orbit.
    """

    order: int
    generators: Integers
    link_images: Integers
    orders: Integers
    vertex_orbit: Integers
    link_orbit: Integers


def identity_alone(topology: Topology) -> CheckedGroup:
    """The group by which a schedule that is written out is its own representatives."""
    vertices, links = topology.size, len(topology.links)
    rows, each = np.zeros((0, vertices), np.int64), np.zeros((0, links), np.int64)
    return CheckedGroup(1, rows, each, np.zeros(0, np.int64), np.arange(vertices), np.arange(links))


def check_group(schedule: ImplicitSchedule, errors: Errors) -> CheckedGroup | None:
    """The translations of a schedule with what follows from them; None, and why not, if they are none.

    They are permutations of the vertices that keep ranks, links (bandwidth and latency) and the ranks of the
    collective among themselves, map its blocks to others of their size, commute, have their declared orders,
    and no product of them but the identity keeps a rank in its place.
    """
    before = errors.count
    topology = schedule.topology
    declared = schedule.translations
    if (declared.ranks, declared.size) != (topology.ranks, topology.size):
        errors.add(
            f"translations: are of {declared.ranks} ranks and {declared.size} vertices, {topology.name} has "
            f"{topology.ranks} and {topology.size}"
        )
    if len(declared.orders) != len(declared.generators):
        errors.add(
            f"translations: {len(declared.generators)} generators need as many orders, "
            f"got {len(declared.orders)}"
        )
    rows = [
        checked_link_images(f"translation {index}", images, topology, errors)
        for index, images in enumerate(declared.generators)
    ]
    found = [row for row in rows if row is not None]
    if len(found) < len(rows) or len(declared.orders) != len(rows):
        return None
    generators = np.array(declared.generators, dtype=np.int64).reshape(len(rows), topology.size)
    link_images = np.array(found, dtype=np.int64).reshape(len(rows), len(topology.links))
    _check_orders(generators, declared.orders, errors)
    _check_commuting(generators, errors)
    _check_members(generators, schedule, errors)
    _check_sizes(generators, schedule, errors)
    if errors.count > before:
        return None
    order = math.prod(declared.orders)
    vertex_orbit = _orbits(generators)
    rank_orbit = vertex_orbit[: topology.ranks]
    sizes = np.bincount(rank_orbit)[rank_orbit]
    # The images of a rank are as many as the elements exactly if only the identity keeps it.
    wrong = np.flatnonzero(sizes != order)
    if wrong.size:
        errors.add(
            f"translations: only the identity may keep a rank in its place, rank {wrong[0]} has "
            f"{sizes[wrong[0]]} images under {order} elements"
        )
        return None
    orders = np.array(declared.orders, dtype=np.int64)
    return CheckedGroup(order, generators, link_images, orders, vertex_orbit, _orbits(link_images))


def checked_link_images(
    name: str, images: Sequence[int], topology: Topology, errors: Errors
) -> Integers | None:
    """Which link each link is mapped to by images of the vertices; None where they are no permutation.

    Objects, under a name, to what an automorphism would do otherwise: to vertices, to links, to what switches
    can do. Links are looked at only where vertices are mapped rightly.
    """
    if sorted(images) != list(range(topology.size)):
        errors.add(f"{name}: must name each of the {topology.size} vertices exactly once")
        return None
    for vertex, image in enumerate(images):
        if topology.is_switch(vertex) != topology.is_switch(image):
            errors.add(
                f"{name}: must map ranks to ranks and switches to switches, "
                f"maps {topology.label(vertex)} to {topology.label(image)}"
            )
            return None
        if topology.abilities(vertex) != topology.abilities(image):
            errors.add(
                f"{name}: maps switch {topology.label(vertex)} to {topology.label(image)}; "
                "both must be able to do the same"
            )
            return None
    kinds: dict[LinkKind, int] = {}
    kind = np.array([kinds.setdefault(link.kind, len(kinds)) for link in topology.links], dtype=np.int64)
    ends = np.array([(link.src, link.dst) for link in topology.links], dtype=np.int64).reshape(-1, 2)
    keys = ends[:, 0] * topology.size + ends[:, 1]  # in ascending order, as the links are
    moved = np.array(images, dtype=np.int64)[ends]
    wanted = moved[:, 0] * topology.size + moved[:, 1]
    found = np.searchsorted(keys, wanted)
    found[found == len(keys)] = 0
    wrong = np.flatnonzero((keys[found] != wanted) | (kind[found] != kind))
    if wrong.size:
        src, dst = map(topology.label, ends[wrong[0]].tolist())
        to, into = map(topology.label, moved[wrong[0]].tolist())
        errors.add(
            f"{name}: maps link {src}->{dst} to {to}->{into}; "
            "there must be such a link, of the same bandwidth and latency"
        )
    return found


def _check_orders(generators: Integers, orders: tuple[int, ...], errors: Errors) -> None:
    for index, (images, order) in enumerate(zip(generators.tolist(), orders, strict=True)):
        found = _order(images)
        if not 2 <= order <= len(images):
            errors.add(
                f"translation {index}: order must be in 2..{len(images)}, the vertices there are, got {order}"
            )
        elif order % found:
            errors.add(
                f"translation {index}: order {order} declared, but applied so often it does not lead back"
            )
        elif order > found:
            errors.add(
                f"translation {index}: order {order} declared, but applied {found} times "
                "it leads back already"
            )


def _order(images: Sequence[int]) -> int:
    """How often a permutation must be applied to lead back: a common multiple of its cycles' lengths."""
    found, seen = 1, [False] * len(images)
    for start in range(len(images)):
        vertex, length = start, 0
        while not seen[vertex]:
            seen[vertex] = True
            vertex, length = images[vertex], length + 1
        found = math.lcm(found, max(length, 1))
    return found


def _check_commuting(generators: Integers, errors: Errors) -> None:
    for later, second in enumerate(generators):
        for earlier, first in enumerate(generators[:later]):
            wrong = np.flatnonzero(first[second] != second[first])
            if wrong.size:
                errors.add(
                    f"translations {earlier} and {later}: must commute, they differ at vertex {wrong[0]}"
                )


def _check_members(generators: Integers, schedule: ImplicitSchedule, errors: Errors) -> None:
    members = np.zeros(schedule.topology.size, dtype=np.bool_)
    members[list(schedule.collective.ranks)] = True
    for index, images in enumerate(generators):
        wrong = np.flatnonzero(members & ~members[images])
        if wrong.size:
            errors.add(
                f"translation {index}: maps rank {wrong[0]}, which takes part, to {images[wrong[0]]}, "
                "which does not"
            )


def _check_sizes(generators: Integers, schedule: ImplicitSchedule, errors: Errors) -> None:
    """Of an alltoall whose blocks differ, all images of a block are as large as it."""
    collective, ranks = schedule.collective, schedule.topology.ranks
    if not collective.sizes:
        return
    sizes = np.zeros((ranks, ranks), dtype=np.int64)
    sizes[np.ix_(collective.ranks, collective.ranks)] = collective.sizes
    np.fill_diagonal(sizes, 0)  # what a rank keeps is no block
    for index, images in enumerate(generators[:, :ranks]):
        moved = sizes[np.ix_(images, images)]
        for src, dst in np.argwhere(moved != sizes)[:1]:
            errors.add(
                f"translation {index}: maps the block from rank {src} to rank {dst}, of {sizes[src, dst]} "
                f"bytes, to one of {moved[src, dst]} bytes"
            )


def _orbits(generators: Integers) -> Integers:
    """The least member of each orbit of commuting permutations, given as rows of images.

    The least on a cycle is found by doubling the part of it that is looked at. As they commute, the least
    over the cycles of one after the other is the least over all products.
    """
    least = np.arange(generators.shape[1], dtype=np.int64)
    for images in generators:
        step, covered = images, 1
        while covered < len(images):
            least = np.minimum(least, least[step])
            step, covered = step[step], 2 * covered
    return least

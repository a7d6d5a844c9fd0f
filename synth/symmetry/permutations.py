"""Permutations of vertices and the groups they generate, as tuples of images.

Small groups are listed element by element; large ones are kept as generators, with orbits worked out from
those. What permutations are good for is the business of `synth.symmetry.automorphisms` and
`synth.chunks.problem.symmetry`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import itemgetter
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.topology import Permutation, Vertex

Numbers: TypeAlias = NDArray[np.int64]
T = TypeVar("T", bound=Hashable)


def identity(size: int) -> Permutation:
    """The permutation of so many vertices that moves none."""
    return tuple(range(size))


def compose(outer: Permutation, inner: Permutation) -> Permutation:
    """The permutation that applies `inner` first and `outer` to its images."""
    return tuple(map(outer.__getitem__, inner))


def inverse(element: Permutation) -> Permutation:
    """The permutation that takes every image back."""
    images = [0] * len(element)
    for vertex, image in enumerate(element):
        images[image] = vertex
    return tuple(images)


def closure(size: int, generators: Iterable[Permutation], limit: int) -> tuple[Permutation, ...] | None:
    """All elements of the group that some permutations of `size` vertices generate.

    Returns:
        The elements, the identity first; None where there are more than `limit`.
    """
    group: tuple[Permutation, ...] | None = (identity(size),)
    known: list[Permutation] = []
    for generator in generators:
        if group is None:
            return None
        group = extended(group, known, generator, limit)
        known.append(generator)
    return group if group is None or len(group) <= limit else None


def extended(
    group: tuple[Permutation, ...], generators: Sequence[Permutation], element: Permutation, limit: int
) -> tuple[Permutation, ...] | None:
    """The group that one more element generates together with a group that `generators` generate.

    The new group is a union of cosets of the old one (Dimino's algorithm): it takes one product for each
    element, and for each coset and generator one look-up.

    Returns:
        The elements, those of `group` first; None where there are more than `limit`.
    """
    elements = list(group)
    known = set(group)
    if element in known:
        return group
    # Applied to images, `itemgetter` composes with the generator, which comes first; faster than `compose`.
    products = [itemgetter(*generator) for generator in (*generators, element)]
    representatives = [group[0]]
    for representative in representatives:
        for product in products:
            image = product(representative)
            if image in known:
                continue
            if len(elements) + len(group) > limit:
                return None
            coset = list(map(itemgetter(*image), group))
            elements += coset
            known.update(coset)
            representatives.append(image)
    return tuple(elements)


def orbit(vertex: Vertex, generators: Sequence[Permutation]) -> tuple[Vertex, ...]:
    """The vertices to which a group takes one, itself first, from generators of the group."""
    return images_of(vertex, generators, lambda generator, here: generator[here])


def images_of(
    thing: T, generators: Sequence[Permutation], move: Callable[[Permutation, T], T]
) -> tuple[T, ...]:
    """All to which a group takes a thing, itself first; `move` says to what a generator takes it."""
    found, known = [thing], {thing}
    for here in found:
        for generator in generators:
            there = move(generator, here)
            if there not in known:
                known.add(there)
                found.append(there)
    return tuple(found)


def orbits(vertices: Iterable[Vertex], generators: Sequence[Permutation]) -> tuple[tuple[Vertex, ...], ...]:
    """The orbits of some vertices, each in ascending order, those with the least vertices first."""
    known: set[Vertex] = set()
    found = []
    for vertex in sorted(vertices):
        if vertex not in known:
            found.append(tuple(sorted(orbit(vertex, generators))))
            known.update(found[-1])
    return tuple(found)


def least_images(labels: Numbers, images: Iterable[Sequence[int] | Numbers]) -> Numbers:
    """Of each of 0, 1, 2... the least element of its orbit under the group that some permutations generate.

    Labels travel along the permutations, both ways, and along themselves: long cycles take few passes.

    Args:
        labels: what is known: of each an element of its orbit that is not larger; itself to begin with.
        images: of each permutation.
    """
    moved = [np.asarray(image, dtype=np.int64) for image in images]
    while True:
        before = labels
        for image in moved:
            both = np.minimum(labels, labels[image])
            labels = both.copy()
            labels[image] = np.minimum(both[image], both)
        labels = labels[labels]
        if np.array_equal(before, labels):
            return labels


def orbit_numbers(count: int, images: Iterable[Sequence[int] | Numbers]) -> Numbers:
    """The number of the orbit of each of 0..count-1 under some permutations, by their first elements."""
    least = least_images(np.arange(count, dtype=np.int64), images)
    return np.unique(least, return_inverse=True)[1].astype(np.int64)

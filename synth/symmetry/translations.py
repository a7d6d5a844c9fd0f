"""Translations: an abelian group of automorphisms in which only the identity keeps any rank in its place.

Whatever is said of one rank of an orbit is said of all of them, and exactly one translation takes one to the
other. Elements are numbers 0..order-1, in mixed radix over the orders of the generators, so that products are
sums and the image of any vertex is a look-up: 4,096 ranks need a few arrays, never a table of 4,096 x 4,096.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.errors import TopologyError
from arborcast.synth.symmetry.permutations import least_images, orbit_numbers
from arborcast.synth.topology import Permutation, Topology, Vertex

Integers = NDArray[np.int64]

MAX_IMAGES = 1 << 26
"""How many images of orbits' first vertices are listed at most: half a gigabyte."""


@dataclass(frozen=True)
class Translations:
    """The group that some commuting, independent permutations generate.

    Element `a` is the product of `generators[i] ** digit i`, with the digits of `a` in mixed radix over
    `orders`, the first digit the most significant. Element 0 is the identity.

    Attributes:
        ranks: number of ranks; vertices from there on are switches, which translations may keep in place.
        generators: images of all vertices, ranks to ranks.
        orders: how often each generator must be applied to get back to the start, at least 2.
        size: number of vertices, switches included.

    Raises:
        TopologyError: generators do not commute, have other orders, or some element but the identity keeps a
            rank in its place. Whether they are automorphisms is checked by `check_automorphisms`.
    """

    ranks: int
    generators: tuple[Permutation, ...]
    orders: tuple[int, ...]
    size: int

    @classmethod
    def generated(cls, topology: Topology, generators: Iterable[Sequence[Vertex]]) -> Translations:
        """The translations of a topology that some of its automorphisms generate; orders are worked out.

        Raises:
            TopologyError: see the class; or a generator is no automorphism of the topology.
        """
        images = tuple(tuple(generator) for generator in generators)
        found = cls(
            topology.ranks, images, tuple(order_of(one, topology.size) for one in images), topology.size
        )
        found.check_automorphisms(topology)
        return found

    @classmethod
    def trivial(cls, topology: Topology) -> Translations:
        """The identity alone, for a topology without symmetry."""
        return cls(topology.ranks, (), (), topology.size)

    def __post_init__(self) -> None:
        """Check every rule of the class docstring."""
        if len(self.generators) != len(self.orders):
            raise TopologyError(
                f"translations: {len(self.generators)} generators need as many orders, got {len(self.orders)}"
            )
        for index, images in enumerate(self.generators):
            if len(images) != self.size or sorted(images) != list(range(self.size)):
                raise TopologyError(
                    f"translation {index}: must name each of the {self.size} vertices exactly once"
                )
            if any(image >= self.ranks for image in images[: self.ranks]):
                raise TopologyError(f"translation {index}: must map ranks to ranks and switches to switches")
            order = order_of(images, self.size)
            if order != self.orders[index] or order < 2:
                raise TopologyError(
                    f"translation {index}: order must be at least 2 and that of its images, "
                    f"got {self.orders[index]} declared and {order} found"
                )
        self._check_commuting()
        self._check_size()
        # Distinct images of every rank under all elements: independence and freedom in one.
        for orbit in range(len(self._images)):
            first = int(self._images[orbit, 0])
            if first < self.ranks and len(np.unique(self._images[orbit])) != self.order:
                raise TopologyError(
                    f"translations: only the identity may keep a rank in its place, rank {first} has "
                    f"{len(np.unique(self._images[orbit]))} images under {self.order} elements"
                )

    def _check_commuting(self) -> None:
        arrays = [np.array(images, dtype=np.int64) for images in self.generators]
        for later, second in enumerate(arrays):
            for earlier, first in enumerate(arrays[:later]):
                wrong = np.flatnonzero(first[second] != second[first])
                if wrong.size:
                    raise TopologyError(
                        f"translations {earlier} and {later}: must commute, they differ at vertex {wrong[0]}"
                    )

    def _check_size(self) -> None:
        """Refuse what cannot be, or what strangers' files would fill the memory with, before listing it."""
        if self.ranks % self.order:
            raise TopologyError(
                f"translations: only the identity may keep a rank in its place, {self.order} elements "
                f"do not divide {self.ranks} ranks"
            )
        vertices = np.arange(self.size, dtype=np.int64)
        images = int(np.count_nonzero(least_images(vertices, self.generators) == vertices)) * self.order
        if images > MAX_IMAGES:
            raise TopologyError(
                f"translations: orbits of vertices times elements must be at most {MAX_IMAGES}, got {images}"
            )

    def check_automorphisms(self, topology: Topology) -> None:
        """Raise TopologyError unless every generator maps each link to one of equal bandwidth and latency."""
        if (topology.ranks, topology.size) != (self.ranks, self.size):
            raise TopologyError(
                f"translations of {self.ranks} ranks and {self.size} vertices do not fit {topology.name} "
                f"with {topology.ranks} and {topology.size}"
            )
        for images in self.generators:
            if images not in topology.symmetries:  # those were checked when it was made
                topology.check_symmetry(images)

    @cached_property
    def order(self) -> int:
        """Number of elements; divides the number of ranks."""
        return math.prod(self.orders)

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        """What one step of each digit adds to the number of an element."""
        return tuple(math.prod(self.orders[position + 1 :]) for position in range(len(self.orders)))

    def plus(self, first: int | Integers, second: int | Integers) -> Integers:
        """The numbers of the products of elements; arrays broadcast."""
        return self._digitwise(np.asarray(first, dtype=np.int64), np.asarray(second, dtype=np.int64), 1)

    def minus(self, first: int | Integers, second: int | Integers) -> Integers:
        """The numbers of the products of elements with the inverses of others; arrays broadcast."""
        return self._digitwise(np.asarray(first, dtype=np.int64), np.asarray(second, dtype=np.int64), -1)

    def _digitwise(self, first: Integers, second: Integers, sign: int) -> Integers:
        total = np.zeros(np.broadcast_shapes(first.shape, second.shape), dtype=np.int64)
        for order, stride in zip(self.orders, self._strides, strict=True):
            total += (first // stride % order + sign * (second // stride % order)) % order * stride
        return total

    @cached_property
    def _orbits(self) -> tuple[Integers, Integers, Integers]:
        """The orbit of each vertex, the element that takes the orbit's first vertex to it, and all images."""
        orbit_of = np.full(self.size, -1, dtype=np.int64)
        place = np.zeros(self.size, dtype=np.int64)
        rows: list[Integers] = []
        arrays = [np.array(images, dtype=np.int64) for images in self.generators]
        for vertex in range(self.size):
            if orbit_of[vertex] >= 0:
                continue
            row = np.array([vertex], dtype=np.int64)
            # The last digit is the fastest: each generator multiplies what is to its right.
            for images, order in zip(reversed(arrays), reversed(self.orders), strict=True):
                powers = [row]
                for _ in range(order - 1):
                    powers.append(images[powers[-1]])
                row = np.concatenate(powers)
            orbit_of[row] = len(rows)
            # Several elements may take a switch to one place; the least of them is kept.
            place[row[::-1]] = np.arange(self.order, dtype=np.int64)[::-1]
            rows.append(row)
        return orbit_of, place, np.array(rows).reshape(len(rows), self.order)

    @property
    def orbit_of(self) -> Integers:
        """The number of each vertex's orbit; orbits are numbered by their first vertex, ranks come first."""
        return self._orbits[0]

    @property
    def place(self) -> Integers:
        """For each vertex the least element that takes the first vertex of its orbit to it."""
        return self._orbits[1]

    @property
    def _images(self) -> Integers:
        return self._orbits[2]

    @cached_property
    def representatives(self) -> tuple[int, ...]:
        """The first rank of each orbit of ranks, in ascending order."""
        first = self._images[:, 0]
        return tuple(int(vertex) for vertex in first if vertex < self.ranks)

    def apply(self, element: int | Integers, vertex: int | Integers) -> Integers:
        """The images of vertices under elements; arrays broadcast."""
        vertices = np.asarray(vertex, dtype=np.int64)
        return np.asarray(self._images[self.orbit_of[vertices], self.plus(element, self.place[vertices])])

    def moving(self, src: int | Integers, dst: int | Integers) -> Integers:
        """The one element that takes a rank to another of its orbit; arrays broadcast.

        Ranks of different orbits have none: the caller sees to it that they are of one.
        """
        return self.minus(self.place[np.asarray(dst)], self.place[np.asarray(src)])

    def permutation(self, element: int) -> Permutation:
        """The images of all vertices under one element."""
        return tuple(self.apply(element, np.arange(self.size, dtype=np.int64)).tolist())

    def link_orbits(self, topology: Topology) -> Integers:
        """The number of the orbit of each link, in the order of `topology.links`; by their first links.

        A link of an orbit with k links is kept in its place by `order / k` elements.
        """
        ends = np.array([(link.src, link.dst) for link in topology.links], dtype=np.int64).reshape(-1, 2)
        # Links are sorted by (src, dst): the number of a pair is found by bisection.
        keys = ends[:, 0] * self.size + ends[:, 1]
        moved = [
            np.searchsorted(keys, np.array(images)[ends[:, 0]] * self.size + np.array(images)[ends[:, 1]])
            for images in self.generators
        ]
        return orbit_numbers(len(keys), moved)


def order_of(images: Sequence[Vertex], size: int) -> int:
    """The least number of applications that take every vertex back: the common multiple of all cycles."""
    seen = [False] * size
    order = 1
    for start in range(min(size, len(images))):
        length, vertex = 0, start
        while 0 <= vertex < size and not seen[vertex]:
            seen[vertex] = True
            vertex = images[vertex]
            length += 1
        order = math.lcm(order, max(1, length))
    return order

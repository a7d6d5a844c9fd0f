"""A problem cut down by a group of symmetries: one representative of each orbit of chunks, of links.

Schedules that a group maps to themselves are determined by what they do with one chunk of each orbit, so a
solver needs variables for those alone. The group must act freely on the chunks: a demand that `h` elements
map to itself has its chunks permuted by them in orbits of `h`, which needs `h` to divide the number of
chunks. The trivial group leaves the problem as it is. Every encoding takes a `ChunkOrbits` and knows nothing
of groups; `unfold` gives the sends of all chunks from those of the representatives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from arborcast.synth.chunks.problem.demand_action import DemandAction
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.symmetry.permutations import inverse
from arborcast.synth.topology import Permutation, Topology, Vertex

Group: TypeAlias = tuple[Permutation, ...]
"""All elements of a group of automorphisms, the identity first, each the images of all vertices."""


@dataclass(frozen=True, slots=True)
class ChunkClass:
    """Representative chunks that are all alike: a solver may exchange them.

    Attributes:
        demand: the index of the block they belong to.
        count: how many.
    """

    demand: int
    count: int


@dataclass(frozen=True, slots=True)
class LinkLimit:
    """What one representative link can carry in a step.

    Attributes:
        capacity: chunks per round.
        users: pairs (chunk class, route) of the representatives: each send of a chunk of that class over
            that route counts once for each time the pair is listed.
    """

    capacity: int
    users: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class OrbitSend:
    """One representative chunk over one route in one step.

    Attributes:
        chunk_class: the index of its class.
        member: which chunk of the class, from 0.
        route: the index of the route.
        step: when, from 0.
    """

    chunk_class: int
    member: int
    route: int
    step: int


@dataclass(frozen=True, slots=True)
class ChunkSend:
    """One chunk of the whole problem over one route in one step: demand, chunk 0..C-1 of it, route, step."""

    demand: int
    chunk: int
    route: int
    step: int


@dataclass(frozen=True)
class ChunkOrbits:
    """A problem with C chunks per demand under a group.

    Attributes:
        problem: the whole problem.
        chunks: C, the chunks of each demand.
        group: see `Group`; the identity alone for the problem as it is.

    Raises:
        ValueError: the group does not map the demands to each other, or not freely (see the module), or
            not every route to a route.
    """

    problem: ChunkProblem
    chunks: int
    group: Group

    def __post_init__(self) -> None:
        """Check that the group acts freely on the chunks."""
        for demand, stabilizer in enumerate(self._stabilizers):
            if self.chunks % len(stabilizer):
                raise ValueError(
                    f"demand {demand}: {len(stabilizer)} symmetries keep it, which must divide "
                    f"its {self.chunks} chunks"
                )

    @classmethod
    def trivial(cls, problem: ChunkProblem, chunks: int) -> ChunkOrbits:
        """The problem as it is."""
        return cls(problem, chunks, (tuple(range(problem.topology.size)),))

    @property
    def movers(self) -> Group:
        """The elements whose images of a representative are different chunks: here all of them."""
        return self.group

    @cached_property
    def classes(self) -> tuple[ChunkClass, ...]:
        """The representatives, one class for each orbit of demands, in the order of their first demands."""
        return tuple(
            ChunkClass(demand, self.chunks // len(self._stabilizers[demand]))
            for demand, least in enumerate(map(min, zip(*self._demand_images, strict=True)))
            if demand == least
        )

    @cached_property
    def limits(self) -> tuple[LinkLimit, ...]:
        """One limit for each orbit of links."""
        limits = []
        classes = range(len(self.classes))
        least = least_links(self.problem.topology, self.group)
        every_origin = list(map(inverse, self._route_images))
        for link, (first, capacity) in enumerate(zip(least, self.problem.capacities, strict=True)):
            if link != first:
                continue
            # A representative's send over `route` is, moved by g, a send over g(route): it loads this link
            # once for each g that takes the route there.
            users = tuple(
                (chunk_class, route)
                for origins in every_origin
                for route in (origins[passing] for passing in self.problem.passing[link])
                for chunk_class in classes
            )
            limits.append(LinkLimit(capacity, users))
        return tuple(limits)

    def unfold(self, sends: Iterable[OrbitSend]) -> Iterator[ChunkSend]:
        """The sends of all chunks, from those of the representatives."""
        for send in sends:
            demand = self.classes[send.chunk_class].demand
            for element, images in enumerate(self._demand_images):
                image = images[demand]
                order = len(self._stabilizers[demand])
                chunk = send.member * order + self._position[demand][element]
                yield ChunkSend(image, chunk, self._route_images[element][send.route], send.step)

    @cached_property
    def _position(self) -> dict[int, tuple[int, ...]]:
        """For each representative demand and mover, which of the chunks of the image demand it gives."""
        positions = {}
        for chunk_class in self.classes:
            seen: dict[int, int] = {}
            order = []
            for images in self._demand_images:
                image = images[chunk_class.demand]
                order.append(seen.get(image, 0))
                seen[image] = seen.get(image, 0) + 1
            positions[chunk_class.demand] = tuple(order)
        return positions

    @cached_property
    def _stabilizers(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the movers that map each demand to itself."""
        return tuple(
            tuple(element for element, image in enumerate(images) if image == demand)
            for demand, images in enumerate(zip(*self._demand_images, strict=True))
        )

    @cached_property
    def _demand_images(self) -> tuple[tuple[int, ...], ...]:
        """The demand to which each mover maps each."""
        if len(self.group) == 1:
            return (tuple(range(len(self.problem.demands))),)
        action = DemandAction(self.problem.topology, self.problem.demands)
        return tuple(map(action.images, self.movers))

    @cached_property
    def _route_images(self) -> tuple[tuple[int, ...], ...]:
        """The route to which each mover maps each."""
        return self._images_of_routes(self.movers)

    def _images_of_routes(self, elements: Group) -> tuple[tuple[int, ...], ...]:
        """The route to which each of some elements maps each."""
        return _images(
            [(route.src, *route.via, route.dst) for route in self.problem.routes], elements, "route"
        )


def least_links(topology: Topology, group: Group) -> list[int]:
    """Of each link the least one to which a group maps it.

    Raises:
        ValueError: it does not map every link to a link.
    """
    images = _images([(link.src, link.dst) for link in topology.links], group, "link")
    return list(map(min, zip(*images, strict=True)))


def _images(paths: Sequence[tuple[Vertex, ...]], elements: Group, what: str) -> tuple[tuple[int, ...], ...]:
    """The index of the path to which each element maps each path."""
    index = {path: position for position, path in enumerate(paths)}
    try:
        return tuple(
            tuple(index[tuple([element[vertex] for vertex in path])] for path in paths)
            for element in elements
        )
    except KeyError:
        raise ValueError(f"the group must map every {what} to a {what}") from None

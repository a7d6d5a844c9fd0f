"""A problem cut down by a group of symmetries: one representative of each orbit of chunks, of links.

Schedules that a group maps to themselves are determined by what they do with one chunk of each orbit, so a
solver needs variables for those alone. The group must act freely on the chunks: a demand that `h` elements
map to itself has its chunks permuted by them in orbits of `h`, which needs `h` to divide the number of
chunks. The trivial group leaves the problem as it is. Every encoding takes an `Orbits` and knows nothing of
groups; `unfold` gives the sends of all chunks from those of the representatives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from synth.chunks.problem import Problem
from synth.collective import Demand
from synth.topology import Permutation

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
class Send:
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
class Orbits:
    """A problem with C chunks per demand under a group.

    Attributes:
        problem: the whole problem.
        chunks: C, the chunks of each demand.
        group: see `Group`; the identity alone for the problem as it is.

    Raises:
        ValueError: the group does not map the demands to each other, or not freely (see the module).
    """

    problem: Problem
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
    def trivial(cls, problem: Problem, chunks: int) -> Orbits:
        """The problem as it is."""
        return cls(problem, chunks, (tuple(range(problem.topology.size)),))

    @cached_property
    def classes(self) -> tuple[ChunkClass, ...]:
        """The representatives, one class for each orbit of demands, in the order of their first demands."""
        return tuple(
            ChunkClass(demand, self.chunks // len(self._stabilizers[demand]))
            for demand in range(len(self.problem.demands))
            if demand == min(images[demand] for images in self._demand_images)
        )

    @cached_property
    def limits(self) -> tuple[LinkLimit, ...]:
        """One limit for each orbit of links."""
        limits = []
        for link, capacity in enumerate(self.problem.capacities):
            images = {index[link] for index in self._link_images}
            if link != min(images):
                continue
            # A representative's send over `route` is, moved by g, a send over g(route): it loads this link
            # once for each g that takes the route there.
            users = tuple(
                (chunk_class, route)
                for inverse in self._inverse_routes
                for route in (inverse[passing] for passing in self.problem.passing[link])
                for chunk_class in range(len(self.classes))
            )
            limits.append(LinkLimit(capacity, users))
        return tuple(limits)

    def unfold(self, sends: Iterable[Send]) -> Iterator[ChunkSend]:
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
        """For each representative demand and element, which of the chunks of the image demand it gives."""
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
        """The indices of the elements that map each demand to itself."""
        return tuple(
            tuple(g for g, images in enumerate(self._demand_images) if images[demand] == demand)
            for demand in range(len(self.problem.demands))
        )

    @cached_property
    def _demand_images(self) -> tuple[tuple[int, ...], ...]:
        demands = self.problem.demands
        if len(self.group) == 1:
            return (tuple(range(len(demands))),)
        index = {demand: position for position, demand in enumerate(demands)}
        if len(index) < len(demands):
            raise ValueError("no two demands may be alike where a group acts on them")
        images = tuple(tuple(index.get(_moved(demand, g), -1) for demand in demands) for g in self.group)
        if any(-1 in moved for moved in images):
            raise ValueError("the group must map every demand to a demand")
        return images

    @cached_property
    def _route_images(self) -> tuple[tuple[int, ...], ...]:
        routes = self.problem.routes
        index = {(route.src, *route.via, route.dst): position for position, route in enumerate(routes)}
        return tuple(
            tuple(index[tuple(element[v] for v in (route.src, *route.via, route.dst))] for route in routes)
            for element in self.group
        )

    @cached_property
    def _inverse_routes(self) -> tuple[tuple[int, ...], ...]:
        inverses = []
        for images in self._route_images:
            inverse = [0] * len(images)
            for route, image in enumerate(images):
                inverse[image] = route
            inverses.append(tuple(inverse))
        return tuple(inverses)

    @cached_property
    def _link_images(self) -> tuple[tuple[int, ...], ...]:
        links = self.problem.topology.links
        index = {(link.src, link.dst): position for position, link in enumerate(links)}
        return tuple(
            tuple(index[element[link.src], element[link.dst]] for link in links) for element in self.group
        )


def _moved(demand: Demand, element: Permutation) -> Demand:
    return Demand(
        frozenset(element[rank] for rank in demand.sources),
        frozenset(element[rank] for rank in demand.targets),
    )

"""Automorphisms of a topology: permutations of its vertices that change no link.

The declared symmetries come first; the others are found by refining colours along a base, one vertex after
the other made special (`synth.symmetry.refinement`). That gives a strong generating set: few generators even
where the group is astronomically large (a full graph), its exact order, and evenly drawn elements. The work
is bounded by a count, never by a clock, so that every machine finds the same; what is returned was checked
link by link.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from arborcast.synth.symmetry.permutations import closure, compose, identity, orbit
from arborcast.synth.symmetry.refinement import BaseVertex, OrderedPartition, Refiner, SpentError, around
from arborcast.synth.topology import Permutation, Topology, Vertex

EFFORT = 1_000_000
"""How many ends of links a search looks at, unless told otherwise: about a second."""


class _Arrival(NamedTuple):
    """The last step of a way from one vertex to another: from where, and by which generator."""

    before: Vertex
    generator: Permutation


@dataclass(frozen=True)
class Automorphisms:
    """A group of automorphisms, by generators.

    Attributes:
        size: number of vertices that each permutes.
        base: vertices such that only the identity fixes them all.
        generators: the declared ones first; for every i, those among them that fix the first i vertices of
            the base generate the subgroup that fixes these.
        complete: whether these are all automorphisms; otherwise the effort allowed was spent before, and
            they are some of them.
    """

    size: int
    base: tuple[Vertex, ...]
    generators: tuple[Permutation, ...]
    complete: bool

    @cached_property
    def order(self) -> int:
        """How many elements there are; a lower bound where the search was not completed."""
        return math.prod(len(level) for level in self._levels)

    def elements(self, limit: int) -> tuple[Permutation, ...] | None:
        """All elements, the identity first; None where there are more than `limit`."""
        return None if self.order > limit else closure(self.size, self.generators, limit)

    def draw(self, chance: random.Random) -> Permutation:
        """One element; where the search was completed each has the same probability."""
        element = identity(self.size)
        for depth, level in enumerate(self._levels):
            element = compose(element, self._moving(depth, chance.choice(tuple(level))))
        return element

    def _moving(self, depth: int, image: Vertex) -> Permutation:
        """An element that fixes the base before a place in it and takes the vertex there to an image."""
        if (depth, image) not in self._moved:
            element = identity(self.size)
            here = image
            while (arrival := self._levels[depth][here]) is not None:
                element = compose(element, arrival.generator)
                here = arrival.before
            self._moved[depth, image] = element
        return self._moved[depth, image]

    @cached_property
    def _moved(self) -> dict[tuple[int, Vertex], Permutation]:
        """What `_moving` has worked out."""
        return {}

    @cached_property
    def _levels(self) -> tuple[dict[Vertex, _Arrival | None], ...]:
        """How the subgroups that fix no vertex of the base, the first one, the first two... move the next.

        For each vertex in its orbit, the last step of a shortest way there.
        """
        levels = []
        generators = self.generators
        for vertex in self.base:
            levels.append(_arrivals(vertex, generators))
            generators = tuple(generator for generator in generators if generator[vertex] == vertex)
        return tuple(levels)


def automorphisms_of(
    topology: Topology,
    *,
    latencies: bool = True,
    colours: Sequence[int] | None = None,
    keeps: Callable[[Permutation], bool] | None = None,
    effort: int = EFFORT,
) -> Automorphisms:
    """The automorphisms of a topology: ranks to ranks, switches to switches, links to links like them.

    Args:
        topology: the graph.
        latencies: whether links must be alike in latency too, not only in bandwidth.
        colours: one for each vertex, of which the automorphisms must keep all; None for no such rule.
        keeps: what else an automorphism must fulfil. Those that do must be a group.
        effort: how many ends of links to look at before the search ends with those found so far.
    """
    search = _GeneratorSearch(
        topology, latencies, colours or [0] * topology.size, keeps or (lambda element: True)
    )
    return search.run(effort)


class _GeneratorSearch:
    """The search for a strong generating set."""

    def __init__(
        self,
        topology: Topology,
        latencies: bool,
        colours: Sequence[int],
        keeps: Callable[[Permutation], bool],
    ) -> None:
        self.topology = topology
        self.colours = [
            (topology.is_switch(vertex), topology.abilities(vertex), colours[vertex])
            for vertex in range(topology.size)
        ]
        self.alike = topology.link_kinds if latencies else topology.link_kinds_without_latency
        self.keeps = keeps

    def run(self, effort: int) -> Automorphisms:
        """Search from the end of the base to its start, where fewer and fewer vertices are fixed."""
        found: list[Permutation] = [image for image in self.topology.symmetries if self._accepts(image)]
        base: tuple[Vertex, ...] = ()
        complete = False
        try:
            refiner = Refiner(around(self.topology.size, self.alike), effort)
            levels, last = refiner.base(refiner.refined(OrderedPartition.of(self.colours)))
            base = tuple(level.vertex for level in levels)
            for depth in reversed(range(len(levels))):
                self._complete(refiner, levels, last, depth, found)
            complete = True
        except SpentError:
            pass
        return Automorphisms(self.topology.size, base, tuple(dict.fromkeys(found)), complete)

    def _complete(
        self,
        refiner: Refiner,
        levels: Sequence[BaseVertex],
        last: OrderedPartition,
        depth: int,
        found: list[Permutation],
    ) -> None:
        """Add generators until they take the vertex of a level wherever any automorphism does.

        Only automorphisms that fix the vertices of the levels before count. Where none reaches a vertex,
        none reaches what those known take it to.
        """
        level = levels[depth]
        fixed = [earlier.vertex for earlier in levels[:depth]]
        known = [element for element in found if all(element[vertex] == vertex for vertex in fixed)]
        settled = set(orbit(level.vertex, known))
        for image in sorted(level.before.cell_of(level.vertex)):
            if image in settled:
                continue
            reaching = refiner.matchings(level.before, levels[depth:], last, (image,))
            element = next(filter(self._accepts, reaching), None)
            if element is not None:
                found.append(element)
                known.append(element)
                settled.update(orbit(level.vertex, known))
            settled.update(orbit(image, known))

    def _accepts(self, element: Permutation) -> bool:
        """Whether a permutation is one of those looked for, checked link by link."""
        return (
            all(self.colours[image] == self.colours[vertex] for vertex, image in enumerate(element))
            and all(
                self.alike.get((element[src], element[dst])) == kind
                for (src, dst), kind in self.alike.items()
            )
            and self.keeps(element)
        )


def _arrivals(vertex: Vertex, generators: Sequence[Permutation]) -> dict[Vertex, _Arrival | None]:
    arrivals: dict[Vertex, _Arrival | None] = {vertex: None}
    reached = [vertex]
    for here in reached:
        for generator in generators:
            if generator[here] not in arrivals:
                arrivals[generator[here]] = _Arrival(here, generator)
                reached.append(generator[here])
    return arrivals

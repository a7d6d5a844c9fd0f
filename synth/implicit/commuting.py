"""Automorphisms that commute with some translations and look like a further translation.

The graph gets an arc from every vertex to where each generator takes it, so that its automorphisms are those
that commute. One that takes rank r to rank v is then built chain by chain: where does v go, and the image of
that, until the chain is back at the orbit it came from. All chains of translations are of one length, and
ranks of one kind see alike what follows them, which leaves little to choose; what is left is tried in order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, zip_longest

from synth.implicit.translations import Translations
from synth.refinement import Partition, Refiner, Trace, around
from synth.topology import Hop, Permutation, Topology, Vertex

TURNS = 6
"""How many second steps of the first chain are tried, for each first step."""


class Commuting:
    """The automorphisms that commute with some translations, as far as refinement and chains tell.

    Attributes:
        group: the translations.
        limit: what the order of any larger group of translations divides: in each colour of ranks, such a
            group moves every rank.
        refiner: what looks at the graph; says how much effort is left.
    """

    def __init__(
        self,
        topology: Topology,
        group: Translations,
        members: Iterable[int] | None,
        turns: Sequence[int],
        effort: int,
    ) -> None:
        """Refine the colours of the graph with its arcs.

        Args:
            topology: the graph.
            group: the translations.
            members: the ranks that only move among each other; None for all.
            turns: for each vertex its turn among those that are alike otherwise.
            effort: how many ends of links may be looked at.

        Raises:
            SpentError: the effort was spent.
        """
        self.topology = topology
        self.group = group
        self.turns = turns
        self._kinds = _with_arcs(topology, group)
        self.refiner = Refiner(around(topology.size, self._kinds), effort)
        self.base = self.refiner.refined(Partition.of(_colours(topology, group, members)))
        self.cells = list(self._rank_cells())
        self.limit = math.gcd(*map(len, self.cells))
        self.start = min(min(cell) for cell in self.cells if len(cell) == min(map(len, self.cells)))
        self._seen: dict[Vertex, Partition | None] = {}
        self._traces: dict[int, Trace] = {}

    def _rank_cells(self) -> Iterator[list[Vertex]]:
        for colour in sorted({self.base.colours[rank] for rank in range(self.topology.ranks)}):
            yield self.base.members(colour)

    def seen_from(self, rank: Vertex) -> Partition | None:
        """The colours once a rank is special; None where the first of its colour sees something else."""
        if rank not in self._seen:
            self.refiner.left -= self.topology.size
            colour = self.base.colours[rank]
            if colour not in self._traces:
                self._seen[rank], self._traces[colour] = self.refiner.individualized(self.base, rank)
            else:
                self._seen[rank] = self.refiner.followed(self.base, rank, self._traces[colour])
        return self._seen[rank]

    @property
    def trace(self) -> Trace:
        """What refinement sees once the start is special."""
        assert self.seen_from(self.start) is not None, "the start is the first of its colour"
        return self._traces[self.base.colours[self.start]]

    def targets(self) -> list[Vertex]:
        """Where the start may go, outside its orbit: the nearest of each kind, then all second nearest..."""
        home = self.group.orbit_of[self.start]
        choices = (rank for rank in self.base.cell_of(self.start) if self.group.orbit_of[rank] != home)
        return self.by_kind(choices)

    def by_kind(self, vertices: Iterable[Vertex]) -> list[Vertex]:
        """Vertices in turns by how the start sees them, so that the first are as different as can be."""
        colours = self.seen_from(self.start)
        assert colours is not None, "the start is the first of its colour"
        kinds: dict[int, list[Vertex]] = defaultdict(list)
        for vertex in sorted(vertices, key=lambda vertex: (self._distance[vertex], self.turns[vertex])):
            kinds[colours.colours[vertex]].append(vertex)
        turns = zip_longest(*kinds.values())
        return [vertex for vertex in chain.from_iterable(turns) if vertex is not None]

    @cached_property
    def _distance(self) -> list[int]:
        """How many links each vertex is from the start, either way."""
        neighbours: list[list[Vertex]] = [[] for _ in range(self.topology.size)]
        for link in self.topology.links:
            neighbours[link.src].append(link.dst)
            neighbours[link.dst].append(link.src)
        distance = [self.topology.size] * self.topology.size
        distance[self.start] = 0
        reached = [self.start]
        for here in reached:
            for vertex in neighbours[here]:
                if distance[vertex] > distance[here] + 1:
                    distance[vertex] = distance[here] + 1
                    reached.append(vertex)
        return distance

    def elements(self, most: int) -> Iterator[Permutation]:
        """Automorphisms that commute and may be translations, from the first so many targets.

        Raises:
            SpentError: the effort was spent.
        """
        given: set[Permutation] = set()
        for target in self.targets()[:most]:
            for turn in range(TURNS):
                walk = Walk(self, target, turn)
                element = walk.run()
                if element is not None and element not in given and self._keeps(element):
                    given.add(element)
                    yield element
                if not walk.turned:
                    break

    def _keeps(self, element: Sequence[Vertex]) -> bool:
        """Whether every link and arc is mapped to one like it."""
        kinds = self._kinds
        return all(kinds.get((element[src], element[dst])) == kind for (src, dst), kind in kinds.items())


class Walk:
    """One permutation in the making: two partitions, of the vertices and of their images, refined alike.

    Attributes:
        turned: whether there was such a turn to take; otherwise there are no more of them.
    """

    def __init__(self, commuting: Commuting, target: Vertex, turn: int) -> None:
        self._of = commuting
        self._orbit_of = commuting.group.orbit_of
        self._target = target
        self._turn = turn
        self.turned = False
        self._period: int | None = None
        self._closing = 0
        self._profiles: dict[int, list[int]] = {}
        self._before = commuting.base.copy()
        self._after = commuting.base.copy()
        commuting.refiner.left -= 2 * commuting.topology.size

    def run(self) -> Permutation | None:
        """The permutation; None where the choices led nowhere."""
        topology = self._of.topology
        seen = self._of.trace
        self._of.refiner.single_out(self._before, self._of.start)
        if self._of.refiner.single_out(self._after, self._target, seen) is None:
            # No turn was taken, but neither would another one do.
            return None
        if not self._follow(self._of.start):
            return None
        for vertex in range(topology.size):
            if len(self._before.cell_of(vertex)) > 1 and not self._follow(vertex):
                return None
        return tuple(self._after.members(colour)[0] for colour in self._before.colours)

    def _follow(self, start: Vertex) -> bool:
        """Settle the images of a vertex, of its image, and so on until its orbit; whether that went well."""
        here, length = start, 0
        chain_of = [start]
        is_rank = start < self._of.topology.ranks
        while True:
            if len(self._before.cell_of(here)) > 1:
                image = self._choice(start, here, length) if is_rank else self._place(start, here, length)
                if image is None or not self._assign(here, image):
                    return False
            here = self._after.members(self._before.colours[here])[0]
            length += 1
            if self._orbit_of[here] == self._orbit_of[start]:
                break
            if self._period is not None and length >= self._period:
                return False
            chain_of.append(here)
        if not is_rank:
            return self._period is not None and self._period % length == 0
        closing = int(self._of.group.moving(start, here))
        if self._period is None:
            self._period, self._closing = length, closing
            if length == 1 or (self._of.limit // self._of.group.order) % length:
                return False
        self._remember(start, chain_of)
        return (length, closing) == (self._period, self._closing)

    def _assign(self, vertex: Vertex, image: Vertex) -> bool:
        trace = self._of.refiner.single_out(self._before, vertex)
        return self._of.refiner.single_out(self._after, image, trace) is not None

    def _remember(self, start: Vertex, chain_of: list[Vertex]) -> None:
        """What the first chain from a rank of each colour passes, as that rank sees it."""
        colour = self._of.base.colours[start]
        if colour not in self._profiles:
            seen = self._of.seen_from(start)
            if seen is not None:
                self._profiles[colour] = [seen.colours[vertex] for vertex in chain_of]

    def _choice(self, start: Vertex, here: Vertex, length: int) -> Vertex | None:
        """The image of a rank whose colour several have, `length` steps from the start of its chain."""
        choices = sorted(self._after.members(self._before.colours[here]), key=self._of.turns.__getitem__)
        home = self._orbit_of[start]
        onwards = [rank for rank in choices if self._orbit_of[rank] != home]
        if self._period is None:
            # Back at once, or as late as can be: long chains are of few orbits.
            back = [rank for rank in choices if self._orbit_of[rank] == home]
            if length != 1:
                return next(iter([*onwards, *back]), None)
            back.sort(key=lambda rank: rank != start)
            turns = [*self._of.by_kind(onwards)[: TURNS - 1], *back[:1]]
            self.turned = self._turn < len(turns) - 1
            return turns[self._turn] if self._turn < len(turns) else None
        if length + 1 == self._period:
            end = int(self._of.group.apply(self._closing, start))
            return end if end in choices else None
        profile = self._profiles.get(self._of.base.colours[start])
        seen = self._of.seen_from(start) if profile else None
        if profile and seen:
            alike = [rank for rank in onwards if seen.colours[rank] == profile[length + 1]]
            onwards = alike or onwards
        return next(iter(onwards), None)

    def _place(self, start: Vertex, here: Vertex, length: int) -> Vertex | None:
        """The image of a switch whose colour several have: back to the start if that may be."""
        choices = sorted(self._after.members(self._before.colours[here]), key=self._of.turns.__getitem__)
        end = int(self._of.group.apply(self._closing, start))
        if length + 1 == self._period:
            return end if end in choices else None
        back = [switch for switch in choices if self._orbit_of[switch] == self._orbit_of[start]]
        return start if start in back else next(iter(choices), None)


def _with_arcs(topology: Topology, group: Translations) -> dict[Hop, tuple[object, ...]]:
    """What pairs of vertices must have in common: the link, if there is one, and the arcs of generators."""
    kinds: dict[Hop, list[object]] = {pair: [kind] for pair, kind in topology.link_kinds.items()}
    for number, images in enumerate(group.generators):
        for vertex, image in enumerate(images):
            if vertex != image:
                kinds.setdefault((vertex, image), [None]).append(number)
    return {pair: tuple(kind) for pair, kind in kinds.items()}


def _colours(
    topology: Topology, group: Translations, members: Iterable[int] | None
) -> list[tuple[bool, bool, bool, tuple[bool, ...]]]:
    """What no commuting automorphism changes in a vertex."""
    taking_part = set(range(topology.ranks) if members is None else members)
    return [
        (
            topology.is_switch(vertex),
            topology.is_switch(vertex) and topology.switches[vertex - topology.ranks].reduces,
            vertex in taking_part,
            tuple(images[vertex] == vertex for images in group.generators),
        )
        for vertex in range(topology.size)
    ]

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
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest

from arborcast.synth.symmetry.refinement import OrderedPartition, Refiner, Trace, around
from arborcast.synth.symmetry.translations import Translations
from arborcast.synth.topology import Hop, LinkKind, Permutation, Topology, Vertex

TURNS = 6
"""How many second steps of the first chain are tried, for each first step."""

MOST_SEEN = 256
"""For how many ranks it is remembered what they see: as many numbers each as there are vertices."""


@dataclass(frozen=True, slots=True)
class ChoiceOrder:
    """Which of several choices come first.

    Attributes:
        turns: for each vertex its turn among those that are alike otherwise.
        many_first: whether a chain goes on to those of whom the start sees many alike.
    """

    turns: tuple[int, ...]
    many_first: bool


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
        taste: ChoiceOrder,
        effort: int,
    ) -> None:
        """Refine the colours of the graph with its arcs.

        Args:
            topology: the graph.
            group: the translations.
            members: the ranks that only move among each other; None for all.
            taste: which of several choices come first.
            effort: how many ends of links may be looked at.

        Raises:
            SpentError: the effort was spent.
        """
        self.topology = topology
        self.group = group
        self.taste = taste
        self._kinds = _with_arcs(topology, group)
        self.refiner = Refiner(around(topology.size, self._kinds), effort)
        self.base = self.refiner.refined(OrderedPartition.of(_colours(topology, group, members)))
        self.cells = list(self._rank_cells())
        self.limit = math.gcd(*map(len, self.cells))
        self.start = min(min(cell) for cell in self.cells if len(cell) == min(map(len, self.cells)))
        self._seen: dict[Vertex, OrderedPartition | None] = {}
        self._traces: dict[int, Trace] = {}

    def _rank_cells(self) -> Iterator[list[Vertex]]:
        for colour in sorted({self.base.colours[rank] for rank in range(self.topology.ranks)}):
            yield self.base.members(colour)

    def seen_from(self, rank: Vertex) -> OrderedPartition | None:
        """The colours once a rank is special; None where the first of its colour sees something else."""
        if rank not in self._seen:
            if len(self._seen) >= MOST_SEEN:
                self._seen.clear()
            self.refiner.left -= self.topology.size
            colour = self.base.colours[rank]
            if colour not in self._traces:
                self._seen[rank], self._traces[colour] = self.refiner.individualized(self.base, rank)
            else:
                self._seen[rank] = self.refiner.followed(self.base, rank, self._traces[colour])
        return self._seen[rank]

    def targets(self) -> list[Vertex]:
        """Where the start may go, outside its orbit: the nearest of each kind, then all second nearest..."""
        home = self.group.orbit_of[self.start]
        choices = (rank for rank in self.base.cell_of(self.start) if self.group.orbit_of[rank] != home)
        kinds = self._kinds_of(choices)
        # Few of a kind first: what stands in one box or one row is what a chain comes back from soonest.
        kinds.sort(key=lambda kind: (self._distance[kind[0]], len(kind)))
        return _in_turns(kinds)

    def second_steps(self, choices: Iterable[Vertex]) -> list[Vertex]:
        """Where the image of the start may go: many of a kind first, which keeps a chain going longest."""
        kinds = self._kinds_of(choices)
        kinds.sort(key=lambda kind: (self._distance[kind[0]], -len(kind)))
        return _in_turns(kinds)

    def _kinds_of(self, vertices: Iterable[Vertex]) -> list[list[Vertex]]:
        """Vertices divided by how the start sees them, in each kind those in turn first."""
        kinds: dict[int, list[Vertex]] = defaultdict(list)
        for vertex in sorted(vertices, key=self.taste.turns.__getitem__):
            kinds[self._from_start.colours[vertex]].append(vertex)
        return list(kinds.values())

    def alike_to(self, vertex: Vertex) -> int:
        """How many vertices the start sees as it sees one."""
        return len(self._from_start.cell_of(vertex))

    @cached_property
    def _from_start(self) -> OrderedPartition:
        colours = self.seen_from(self.start)
        assert colours is not None, "the start is the first of its colour"
        return colours

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
        before = self._from_start
        for target in self.targets()[:most]:
            after = self.seen_from(target)
            if after is None:
                continue
            for turn in range(TURNS):
                self.refiner.left -= 2 * self.topology.size
                builder = AutomorphismBuilder(self, before.copy(), after.copy(), turn)
                element = builder.run()
                if element is not None and element not in given and self._keeps(element):
                    given.add(element)
                    yield element
                if not builder.turned:
                    break

    def _keeps(self, element: Sequence[Vertex]) -> bool:
        """Whether every link and arc is mapped to one like it."""
        kinds = self._kinds
        return all(kinds.get((element[src], element[dst])) == kind for (src, dst), kind in kinds.items())


class AutomorphismBuilder:
    """One permutation in the making: two partitions, of the vertices and of their images, refined alike.

    Attributes:
        turned: whether there was such a turn to take; otherwise there are no more of them.
    """

    def __init__(
        self, commuting: Commuting, before: OrderedPartition, after: OrderedPartition, turn: int
    ) -> None:
        """Begin with the start special among the vertices, and its image among the images.

        Args:
            commuting: what the permutation must commute with.
            before: the colours of the vertices; changed on the way.
            after: the colours of the images; changed on the way.
            turn: which of the possible second steps to take.
        """
        self._of = commuting
        self._orbit_of = commuting.group.orbit_of
        self._before = before
        self._after = after
        self._turn = turn
        self.turned = False
        self._period: int | None = None
        self._closing = 0
        self._profiles: dict[int, list[int]] = {}

    def run(self) -> Permutation | None:
        """The permutation; None where the choices led nowhere."""
        if not self._follow(self._of.start):
            return None
        for vertex in self._starts():
            if not self._follow(vertex):
                return None
        return tuple(self._after.members(colour)[0] for colour in self._before.colours)

    def _starts(self) -> Iterator[Vertex]:
        """Where further chains start, colour by colour.

        First in each a rank whose image is settled already, if there is one: the others will do as it does.
        """
        own = self._of.base.cell_of(self._of.start)
        switches = range(self._of.topology.ranks, self._of.topology.size)
        for cell in (own, *(cell for cell in self._of.cells if cell is not own), switches):
            first = next((vertex for vertex in cell if not self._is_open(vertex)), None)
            if first is not None and cell is not switches and any(map(self._is_open, cell)):
                yield first
            yield from filter(self._is_open, cell)

    def _is_open(self, vertex: Vertex) -> bool:
        """Whether the image of a vertex is still to be chosen."""
        return len(self._before.cell_of(vertex)) > 1

    def _follow(self, start: Vertex) -> bool:
        """Settle the images of a vertex, of its image, and so on until its orbit; whether that went well."""
        here, length = start, 0
        chain_of = [start]
        is_rank = start < self._of.topology.ranks
        while True:
            if self._is_open(here):
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
        choices = sorted(
            self._after.members(self._before.colours[here]), key=self._of.taste.turns.__getitem__
        )
        home = self._orbit_of[start]
        onwards = [rank for rank in choices if self._orbit_of[rank] != home]
        if self._period is None:
            # Back at once, or as late as can be: long chains are of few orbits.
            back = [rank for rank in choices if self._orbit_of[rank] == home]
            if length != 1:
                if self._of.taste.many_first:
                    # Coming back to few in between would leave no room for the chains of those.
                    onwards.sort(key=lambda rank: -self._of.alike_to(rank))
                return next(iter([*onwards, *back]), None)
            back.sort(key=lambda rank: rank != start)
            onwards = self._of.second_steps(onwards)[: TURNS - 1]
            turns = [*onwards[:1], *back[:1], *onwards[1:]]
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
        choices = sorted(
            self._after.members(self._before.colours[here]), key=self._of.taste.turns.__getitem__
        )
        end = int(self._of.group.apply(self._closing, start))
        if length + 1 == self._period:
            return end if end in choices else None
        back = [switch for switch in choices if self._orbit_of[switch] == self._orbit_of[start]]
        return start if start in back else next(iter(choices), None)


def _in_turns(kinds: Sequence[Sequence[Vertex]]) -> list[Vertex]:
    """The first of each kind, then all second ones, and so on."""
    return [vertex for vertex in chain.from_iterable(zip_longest(*kinds)) if vertex is not None]


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
) -> list[tuple[bool, LinkKind, bool, tuple[bool, ...]]]:
    """What no commuting automorphism changes in a vertex."""
    taking_part = set(range(topology.ranks) if members is None else members)
    return [
        (
            topology.is_switch(vertex),
            topology.abilities(vertex),
            vertex in taking_part,
            tuple(images[vertex] == vertex for images in group.generators),
        )
        for vertex in range(topology.size)
    ]

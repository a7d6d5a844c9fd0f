"""Colours of vertices, refined until alike vertices have alike neighbours.

Two vertices that end up with different colours cannot be taken to each other by any automorphism that keeps
the colours at the start. Making a vertex special (giving it a colour of its own) and refining again is the
step of which the search in `synth.symmetry.automorphisms` consists.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from arborcast.synth.topology import Hop, Permutation, Vertex

Around: TypeAlias = tuple[tuple[tuple[int, Vertex], ...], ...]
"""For each vertex, those that have a link from or to it: in what way (a number), and which."""

Signature: TypeAlias = tuple[tuple[int, int], ...]
"""How a vertex is linked to those that changed colour: the ways and the colours, in ascending order."""


class Split(NamedTuple):
    """What one round of refinement did to one colour.

    Attributes:
        colour: which.
        untouched: how many vertices of it have no link to those that changed.
        touched: the signatures of the others, ascending, with how many have each.
    """

    colour: int
    untouched: int
    touched: tuple[tuple[Signature, int], ...]


Trace: TypeAlias = list[Split]
"""All splits of a refinement in order; the same for partitions that an automorphism takes to each other."""


class SpentError(Exception):
    """The effort allowed was spent; caught by the search."""


class OrderedPartition:
    """The vertices divided by colour.

    The colour of a cell is the number of vertices in the cells before it, so that equal colours mean the same
    place in partitions that were refined alike. Values are never changed once they are handed out.
    """

    def __init__(self, colours: list[int], cells: dict[int, list[Vertex]]) -> None:
        self.colours = colours
        self._cells = cells

    @classmethod
    def of(cls, keys: Sequence[Any]) -> OrderedPartition:
        """The partition by keys that can be ordered, one for each vertex."""
        by_key: dict[Hashable, list[Vertex]] = defaultdict(list)
        for vertex, key in enumerate(keys):
            by_key[key].append(vertex)
        colours = [0] * len(keys)
        cells = {}
        colour = 0
        for _, members in sorted(by_key.items()):
            cells[colour] = members
            for vertex in members:
                colours[vertex] = colour
            colour += len(members)
        return cls(colours, cells)

    def members(self, colour: int) -> list[Vertex]:
        """The vertices of a colour."""
        return self._cells[colour]

    def cell_of(self, vertex: Vertex) -> list[Vertex]:
        """The vertices of the same colour as one."""
        return self._cells[self.colours[vertex]]

    def least_ambiguous(self) -> Vertex | None:
        """The least vertex of the first colour that several have; None where no colour is shared."""
        shared = [colour for colour, members in self._cells.items() if len(members) > 1]
        return min(self._cells[min(shared)]) if shared else None

    def copy(self) -> OrderedPartition:
        """A partition to be split, whose cells are still shared with this one."""
        return OrderedPartition(self.colours.copy(), self._cells.copy())

    def single_out(self, vertex: Vertex) -> None:
        """Give a vertex the last place in its cell and a colour of its own."""
        colour = self.colours[vertex]
        others = [member for member in self._cells[colour] if member != vertex]
        self._cells[colour] = others
        self.colours[vertex] = colour + len(others)
        self._cells[colour + len(others)] = [vertex]

    def split(self, colour: int, untouched: list[Vertex], parts: Sequence[list[Vertex]]) -> list[Vertex]:
        """Divide a cell; its first part, the untouched where there are any, keeps the colour.

        Returns:
            The vertices that changed colour.
        """
        parts = [untouched, *parts] if untouched else parts
        self._cells[colour] = parts[0]
        changed: list[Vertex] = []
        position = colour + len(parts[0])
        for members in parts[1:]:
            self._cells[position] = members
            for vertex in members:
                self.colours[vertex] = position
            changed += members
            position += len(members)
        return changed


class BaseVertex(NamedTuple):
    """A vertex of a base, which are made special one after the other.

    Attributes:
        vertex: which.
        before: the colours when those before it are special.
        trace: what the refinement sees once it is special too.
    """

    vertex: Vertex
    before: OrderedPartition
    trace: Trace

    @property
    def colour(self) -> int:
        """Its own, when those before it are special."""
        return self.before.colours[self.vertex]


class Refiner:
    """Refines partitions of the vertices of one graph, as far as the effort allowed lasts.

    Attributes:
        left: how many more ends of links it may look at.
    """

    def __init__(self, neighbours: Around, effort: int) -> None:
        self._around = neighbours
        self.left = effort

    def refined(self, partition: OrderedPartition) -> OrderedPartition:
        """The coarsest partition, finer than one, in which alike vertices have alike neighbours."""
        partition = partition.copy()
        self._refine(partition, list(range(len(partition.colours))), None)
        return partition

    def individualized(self, partition: OrderedPartition, vertex: Vertex) -> tuple[OrderedPartition, Trace]:
        """The refinement of a refined partition once a vertex is special, and what it saw."""
        after = partition.copy()
        trace = self.single_out(after, vertex)
        assert trace is not None, "nothing was expected of it"
        return after, trace

    def followed(
        self, partition: OrderedPartition, vertex: Vertex, expected: Trace
    ) -> OrderedPartition | None:
        """The same, or None as soon as it sees anything else than expected."""
        after = partition.copy()
        return None if self.single_out(after, vertex, expected) is None else after

    def base(self, partition: OrderedPartition) -> tuple[list[BaseVertex], OrderedPartition]:
        """Vertices of a refined partition made special, one by one, until each has a colour of its own.

        Returns:
            What was made special, and the colours at the end.
        """
        levels = []
        while (vertex := partition.least_ambiguous()) is not None:
            after, trace = self.individualized(partition, vertex)
            levels.append(BaseVertex(vertex, partition, trace))
            partition = after
        return levels, partition

    def matchings(
        self,
        partition: OrderedPartition,
        levels: Sequence[BaseVertex],
        last: OrderedPartition,
        first: Iterable[Vertex] | None = None,
    ) -> Iterator[Permutation]:
        """All ways to take the vertices of a base to vertices that the refinement cannot tell from them.

        Args:
            partition: refined, with the colours of the first level.
            levels: of a base of this graph or of another one.
            last: the colours at its end.
            first: where the vertex of the first level may go; None for wherever its colour is.

        Yields:
            For each vertex the one that ends with its colour. Whether all links agree is still to be seen.

        Raises:
            SpentError: the effort was spent.
        """
        if not levels:
            yield tuple(partition.members(colour)[0] for colour in last.colours)
            return
        begin = partition.members(levels[0].colour) if first is None else first
        ways: list[tuple[OrderedPartition, Iterator[Vertex]]] = [(partition, iter(begin))]
        while ways:
            here, images = ways[-1]
            candidate = next(images, None)
            if candidate is None:
                ways.pop()
                continue
            after = self.followed(here, candidate, levels[len(ways) - 1].trace)
            if after is None:
                continue
            if len(ways) == len(levels):
                yield tuple(after.members(colour)[0] for colour in last.colours)
                continue
            following = levels[len(ways)]
            # The vertex itself first: elements that move little are found with the least search.
            choices = sorted(after.members(following.colour))
            ways.append((after, iter(sorted(choices, key=following.vertex.__ne__))))

    def single_out(
        self, partition: OrderedPartition, vertex: Vertex, expected: Trace | None = None
    ) -> Trace | None:
        """Make a vertex of a refined partition special and refine again, in place.

        Returns:
            What it saw; None as soon as that is anything else than expected, if anything is. The partition
            is of no further use then.
        """
        partition.single_out(vertex)
        return self._refine(partition, [vertex], expected)

    def _refine(
        self, partition: OrderedPartition, changed: list[Vertex], expected: Trace | None
    ) -> Trace | None:
        """Refine in rounds, each of which looks only at the neighbours of what changed in the last one.

        That is enough: vertices of one colour had alike neighbours before, so where they agree about those
        that changed they agree about those that did not.
        """
        trace: Trace = []
        while changed:
            entries = self._entries(partition, changed)
            touched: dict[int, dict[Signature, list[Vertex]]] = defaultdict(lambda: defaultdict(list))
            for vertex, entry in entries.items():
                touched[partition.colours[vertex]][tuple(sorted(entry))].append(vertex)
            changed = []
            for colour, parts in sorted(touched.items()):
                cell = partition.members(colour)
                signatures = sorted(parts)
                untouched = len(cell) - sum(map(len, parts.values()))
                counts = tuple((signature, len(parts[signature])) for signature in signatures)
                trace.append(Split(colour, untouched, counts))
                if expected is not None and expected[len(trace) - 1 : len(trace)] != trace[-1:]:
                    return None
                if untouched or len(parts) > 1:
                    rest = [vertex for vertex in cell if vertex not in entries] if untouched else []
                    changed += partition.split(colour, rest, [parts[signature] for signature in signatures])
        return trace if expected is None or len(trace) == len(expected) else None

    def _entries(
        self, partition: OrderedPartition, changed: Sequence[Vertex]
    ) -> dict[Vertex, list[tuple[int, int]]]:
        """For each neighbour of the vertices that changed, in what ways it is linked to which colours."""
        entries: dict[Vertex, list[tuple[int, int]]] = defaultdict(list)
        for vertex in changed:
            colour = partition.colours[vertex]
            self.left -= len(self._around[vertex])
            for way, neighbour in self._around[vertex]:
                entries[neighbour].append((way, colour))
        if self.left < 0:
            raise SpentError
        return entries


def around(size: int, kinds: Mapping[Hop, Any]) -> Around:
    """The neighbours of each vertex of a graph whose links have kinds.

    Args:
        size: number of vertices.
        kinds: what links must have in common to be alike, for each link, by its ends.
    """
    number = {kind: index for index, kind in enumerate(dict.fromkeys(kinds.values()))}
    neighbours: list[list[tuple[int, Vertex]]] = [[] for _ in range(size)]
    for (src, dst), kind in kinds.items():
        neighbours[src].append((2 * number[kind], dst))
        neighbours[dst].append((2 * number[kind] + 1, src))
    return tuple(map(tuple, neighbours))

"""A tree that may join and fork at switches, and what it uses of links and adders.

Trees are always written as out-trees; one that gathers is an out-tree over the links turned round, as in
`synth.tree`. Where a switch with loopback has a rank as its parent, the tree also holds the way back.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

from arborcast.synth.topology import Hop, Topology, Vertex
from arborcast.synth.tree import TreeEdge


@dataclass(frozen=True, slots=True)
class SteinerTree:
    """From a root to all that take part.

    Attributes:
        root: a rank, or in an allreduce a switch.
        edges: parents before children; ends are ranks and switches that fork, and what `via` names forwards.
        returns: for each edge from a rank to a switch with loopback, the way back from there.
    """

    root: Vertex
    edges: tuple[TreeEdge, ...]
    returns: tuple[TreeEdge, ...] = ()

    @property
    def hops(self) -> Iterator[Hop]:
        """All that it passes, as often as it does."""
        for edge in (*self.edges, *self.returns):
            yield from pairwise((edge.parent, *edge.via, edge.child))

    @property
    def children(self) -> dict[Vertex, list[Vertex]]:
        """Of each vertex that has some."""
        found: dict[Vertex, list[Vertex]] = defaultdict(list)
        for edge in self.edges:
            found[edge.parent].append(edge.child)
        return found

    @property
    def height(self) -> int:
        """The most edges between the root and a leaf."""
        depth = {self.root: 0}
        for edge in self.edges:
            depth[edge.child] = depth[edge.parent] + 1
        return max(depth.values())


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of the linear program: the links, then the adders that are limited.

    Attributes:
        topology: whose they are.
    """

    topology: Topology

    @cached_property
    def of_link(self) -> dict[Hop, int]:
        """The row of each link."""
        return {(link.src, link.dst): row for row, link in enumerate(self.topology.links)}

    @cached_property
    def of_adder(self) -> dict[Vertex, int]:
        """The row of each switch whose adder is limited."""
        return {
            vertex: row for row, vertex in enumerate(self.topology.limited_adders, len(self.topology.links))
        }

    @property
    def capacities(self) -> tuple[Fraction, ...]:
        """GB/s of each row."""
        topology = self.topology
        adders = (topology.switches[vertex - topology.ranks].adder or Fraction(0) for vertex in self.of_adder)
        return (*(link.bandwidth for link in topology.links), *adders)

    def used(self, out: SteinerTree | None, into: SteinerTree | None) -> dict[int, int]:
        """How often a tree that spreads and one that gathers use each row together."""
        counts: Counter[int] = Counter()
        for hop in out.hops if out is not None else ():
            counts[self.of_link[hop]] += 1
        for src, dst in into.hops if into is not None else ():
            counts[self.of_link[dst, src]] += 1
        for vertex, inputs in into.children.items() if into is not None else ():
            if vertex in self.of_adder and len(inputs) > 1:
                counts[self.of_adder[vertex]] += 1
        return dict(sorted(counts.items()))


@dataclass(frozen=True, eq=False)
class SteinerColumn:
    """What carries a part of the buffer.

    Attributes:
        group: whose part: 0 but for the kinds in which each rank has its own trees.
        out: along which it is spread; None for a reduction.
        into: along which it is gathered; None where nothing is reduced. Of an allreduce both have one root.
        used: how often it uses each row.
        weight: GB/s of the buffer.
    """

    group: int
    out: SteinerTree | None
    into: SteinerTree | None
    used: Mapping[int, int]
    weight: Fraction = Fraction(0)

    @property
    def key(self) -> tuple[int, SteinerTree | None, SteinerTree | None]:
        """Tells apart columns of any weight."""
        return self.group, self.out, self.into

    @property
    def height(self) -> int:
        """Edges from the first that sends to the last that receives."""
        return sum(tree.height for tree in self.trees)

    @property
    def trees(self) -> tuple[SteinerTree, ...]:
        """Those that there are."""
        return tuple(tree for tree in (self.into, self.out) if tree is not None)

    def switches(self, ranks: int) -> frozenset[Vertex]:
        """The switches at which it joins or forks, which count towards `Switch.trees`."""
        return frozenset(
            vertex
            for tree in self.trees
            for vertex, its in tree.children.items()
            if vertex >= ranks and len(its) > 1
        )


def trimmed(
    root: Vertex, arcs: Iterable[TreeEdge], needed: Iterable[int], ranks: int, loops: Sequence[bool]
) -> list[TreeEdge]:
    """An arborescence within arcs that reach all that is needed, with no more switches than it takes.

    Each vertex is reached once, by as few edges as there are; branches that end at nothing needed are gone,
    and a switch with one child only forwards. Arcs are only left out or put together, so that loads fall.

    Args:
        root: where it starts.
        arcs: their ends are ranks and able switches.
        needed: what must be reached.
        ranks: vertices from there on are switches.
        loops: of each end, whether it has loopback. What such a switch gets from a switch stays so.
    """
    leaving: dict[Vertex, list[TreeEdge]] = defaultdict(list)
    for arc in arcs:
        leaving[arc.parent].append(arc)
    above: dict[Vertex, TreeEdge] = {}
    order = [root]
    for vertex in order:
        for arc in leaving.get(vertex, ()):
            if arc.child != root and arc.child not in above:
                above[arc.child] = arc
                order.append(arc.child)
    kept = set(needed) - {root}
    below: Counter[Vertex] = Counter()
    for vertex in reversed(order):
        if vertex != root and (vertex in kept or below[vertex]):
            below[above[vertex].parent] += 1

    def only_forwards(vertex: Vertex, child: Vertex) -> bool:
        return vertex != root and vertex >= ranks and below[vertex] == 1 and not loops[child]

    edges = []
    passed: set[Vertex] = set()
    for vertex in reversed(order[1:]):  # children before their parents
        if vertex in passed or not (vertex in kept or below[vertex]):
            continue
        edge = above[vertex]
        while only_forwards(edge.parent, vertex):
            passed.add(edge.parent)
            before = above[edge.parent]
            edge = TreeEdge(before.parent, vertex, (*before.via, edge.parent, *edge.via))
        edges.append(edge)
    return edges[::-1]

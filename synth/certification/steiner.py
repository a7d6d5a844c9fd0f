"""How far data must travel where more than the ranks that take part may join and fork what passes.

Relays may, and so may switches that reduce or multicast; all others only forward. A schedule, whatever its
order, holds the trees measured here. Follow what the ranks of a broadcast, or of one block of an allgather,
end with back to where it came from: the first time that each vertex got it makes these ways an out-tree,
which forks at ranks and at switches that multicast. Follow a finished sum back, and each contribution is in
it once: these ways are an in-tree, which joins at ranks and at switches that reduce. Passing a switch that
does neither costs its links and nothing else, as often as a way does so.

    switch with loopback   multicasts what a rank sent: the way back to that rank besides
                           gives a sum to a rank: the way from that rank besides
    limited adder          its price, once for each sum that it makes
    allreduce              an in-tree to a vertex and an out-tree from it: any vertex but a switch at which
                           the one joins and the other forks without its being able to turn

A content that came to the switch from another able one has no rank to go back to, which is allowed for.
Ranks that ways of length zero join both ways are one: what reaches one reaches all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from arborcast.synth.certification.exact_paths import FAR, Matrix, ways_between
from arborcast.synth.certification.tree_costs import cheapest_cost, cheapest_costs
from arborcast.synth.collective import Collective
from arborcast.synth.errors import InputError
from arborcast.synth.kernels.compiled import Ints, kernel
from arborcast.synth.topology import Topology, Vertex

MOST_APART = 16
"""Ranks that are apart beside vertices that may join or fork, where no two are alike."""

MOST_PARTS = 3**MOST_APART
"""Pairs of numbers of terminals that are looked at: the effort triples with each that is like no other."""


@dataclass(frozen=True, eq=False)
class Trees:
    """The cheapest trees of one direction, from each of the points.

    Attributes:
        any: what the cheapest tree costs; `FAR` for none.
        forked: what it costs where it joins or forks at the point, of switches alone.
    """

    any: Ints
    forked: Ints


@dataclass(frozen=True, eq=False)
class Steiner:
    """What is apart under link lengths, and the trees between.

    Attributes:
        topology: whose links they are.
        lengths: one per link, whole.
        adders: of each switch that has a limited adder, what a sum costs.
        collective: whose ranks must be reached.
    """

    topology: Topology
    lengths: Ints
    adders: dict[Vertex, int]
    collective: Collective

    @cached_property
    def heads(self) -> Ints:
        """The least vertex of those that ways of length zero join each vertex with, both ways."""
        import networkx

        graph: networkx.DiGraph[int] = networkx.DiGraph()
        links = zip(self.topology.links, self.lengths.tolist(), strict=True)
        graph.add_edges_from((link.src, link.dst) for link, length in links if not length)
        found = np.arange(self.topology.size)
        for joined in networkx.strongly_connected_components(graph):
            found[list(joined)] = min(joined)
        return found

    @cached_property
    def terminals(self) -> tuple[Vertex, ...]:
        """The vertices that stand for ranks that take part; ranks come first, so that they are ranks."""
        return tuple(sorted({int(self.heads[rank]) for rank in self.collective.ranks}))

    @cached_property
    def relays(self) -> tuple[Vertex, ...]:
        """The ranks that stand for relays which are apart from ranks that take part."""
        apart = {int(self.heads[rank]) for rank in range(self.topology.ranks)}
        return tuple(sorted(apart.difference(self.terminals)))

    @cached_property
    def switches(self) -> tuple[Vertex, ...]:
        """The able switches that are apart from ranks: what one at a rank can do, the rank can."""
        able = range(self.topology.ranks, self.topology.holders)
        return tuple(vertex for vertex in able if self.heads[vertex] >= self.topology.ranks)

    @cached_property
    def points(self) -> tuple[Vertex, ...]:
        """Where trees start, join, fork and end."""
        return (*self.terminals, *self.relays, *self.switches)

    def place(self, rank: int) -> int:
        """The point that stands for a rank."""
        return self._places[int(self.heads[rank])]

    @cached_property
    def _places(self) -> dict[Vertex, int]:
        return {vertex: place for place, vertex in enumerate(self.points)}

    @cached_property
    def out(self) -> Trees:
        """Trees that spread."""
        return self._trees(turned=False)

    @cached_property
    def into(self) -> Trees:
        """Trees that gather."""
        return self._trees(turned=True)

    @cached_property
    def pairs(self) -> Ints:
        """What in-trees to each point and out-trees from it cost together; the cheapest pair is among them.

        What joins at one switch and forks at another is counted at the latter.
        """
        both: Ints = self.into.any + self.out.any
        first = len(self.points) - len(self.switches)
        for place, vertex in enumerate(self.switches, first):
            if not self.topology.switches[vertex - self.topology.ranks].turns:
                near = self._between_holders[list(self.switches), vertex]
                near[place - first] = FAR
                both[place] = (near + self.into.forked[first:]).min() + self.out.any[place]
        return both

    @cached_property
    def ways(self) -> Matrix:
        """The shortest ways between points, through whatever there is."""
        return ways_between(self.topology, self.lengths, self.points, range(self.topology.size))

    @cached_property
    def _between_holders(self) -> Matrix:
        """The shortest ways between ranks and able switches that pass switches only."""
        through = range(self.topology.ranks, self.topology.size)
        return ways_between(self.topology, self.lengths, range(self.topology.holders), through)

    def _trees(self, *, turned: bool) -> Trees:
        """The trees of one direction; those that gather are out-trees over the links turned round."""
        ways = self.ways.T if turned else self.ways
        count, ranks = len(self.terminals), len(self.terminals) + len(self.relays)
        costs, forked = np.full((2, len(self.points)), FAR)
        able = [self.topology.switches[vertex - self.topology.ranks] for vertex in self.switches]
        forks = [
            place for place, switch in enumerate(able) if (switch.reduces if turned else switch.multicasts)
        ]
        if not forks and not self.relays:
            among = ways[:count, :count]
            if self.collective.root is None:
                costs[:count] = cheapest_costs(among)
            else:  # which need not be reached from others
                root = self.place(self.collective.root)
                costs[root] = cheapest_cost(among, root)
            return Trees(costs, forked)
        onward = np.full_like(ways, FAR)
        onward[:, :ranks] = ways[:, :ranks]
        for place in forks:
            onward[:, ranks + place] = self._ways_to_fork(ways, place, turned=turned)
        paid = np.zeros(len(self.points), dtype=np.int64)
        if turned:
            paid[ranks:] = [self.adders.get(vertex, 0) for vertex in self.switches]
        kinds = self._kinds(onward)
        sizes = np.bincount(kinds)
        order, ends = np.argsort(kinds, kind="stable"), np.cumsum(sizes)
        firsts, lasts = order[ends - sizes], order[ends - 1]
        others = range(count, len(self.points))
        # From the first of a class to the last of it is the way between any two.
        between = np.ascontiguousarray(onward[np.ix_([*firsts, *others], [*lasts, *others])])
        strides = np.cumprod([1, *(sizes + 1)])
        few, many = (np.full((strides[-1], len(between)), FAR) for _ in range(2))
        _fork(between, paid[[*firsts, *others]], sizes, strides, few, many)
        # A terminal reaches all others, which is one less of its own class.
        costs[:count] = np.minimum(few, many)[strides[-1] - 1 - strides[kinds], kinds]
        costs[count:] = few[-1, len(sizes) :]
        at = ranks + np.array(forks, dtype=np.int64)
        forked[at] = many[-1, at - count + len(sizes)] + paid[at]
        return Trees(costs, forked)

    def _ways_to_fork(self, ways: Matrix, place: int, *, turned: bool) -> Ints:
        """What it costs to come from each point to a switch and fork there."""
        vertex, first = self.switches[place], len(self.terminals) + len(self.relays)
        if not self.topology.switches[vertex - self.topology.ranks].loopback:
            straight: Ints = ways[:, first + place]
            return straight
        near = self._between_holders.T if turned else self._between_holders
        ranks = self.topology.ranks
        others = [other for other in range(ranks, self.topology.holders) if other != vertex]
        from_ranks = np.minimum(
            near[:ranks, vertex] + near[vertex, :ranks],
            # A rank's data that another switch hands on do not come back.
            (near[:ranks, others] + near[others, vertex]).min(axis=1, initial=FAR),
        )
        found: Ints = (ways[:, [self.place(rank) for rank in range(ranks)]] + from_ranks).min(axis=1)
        found[first:] = np.minimum(found[first:], near[list(self.switches), vertex])
        return found

    def _kinds(self, onward: Matrix) -> Ints:
        """The class of each terminal: those that may be exchanged without any way changing.

        Raises:
            InputError: there are too many.
        """
        kinds: list[int] = []
        firsts: list[int] = []
        for terminal in range(len(self.terminals)):
            alike = (kind for kind, first in enumerate(firsts) if _are_alike(onward, first, terminal))
            kinds.append(next(alike, len(firsts)))
            if kinds[-1] == len(firsts):
                firsts.append(terminal)
            sizes = np.bincount(kinds).tolist()
            if math.prod((size + 1) * (size + 2) // 2 for size in sizes) > MOST_PARTS:
                raise InputError(
                    f"dual for {self.collective.kind}: with relays or able switches at most {MOST_APART} "
                    f"ranks may be apart, or more that are alike, got {len(self.terminals)}"
                )
        return np.array(kinds)


def _are_alike(ways: Matrix, first: int, other: int) -> bool:
    """Whether two points may be exchanged."""
    order = np.arange(len(ways))
    order[[first, other]] = other, first
    return np.array_equal(ways[first][order], ways[other]) and np.array_equal(
        ways[order, first], ways[:, other]
    )


@kernel
def _fork(ways: Matrix, paid: Ints, sizes: Ints, strides: Ints, costs: Matrix, forked: Matrix) -> None:
    """What the cheapest trees from each point to so many terminals of each class cost.

    Dreyfus and Wagner 1971, over numbers of terminals that are alike rather than over sets: a tree to some of
    them costs what one to any others costs. A tree is a way to a point where it forks, or to a terminal from
    where it goes on. Trees from a terminal go to others: what is found of one and all of its class is unused.

    Args:
        ways: from each point to where a tree goes on; `FAR` to what may not fork. A class of terminals, which
            come first, is one point, with the way between two of them.
        paid: what it costs to fork at each point, in however many.
        sizes: how many terminals each class has.
        strides: how many rows one of each class is worth, and at the end the number of rows.
        costs: gets those of trees, `FAR` before. A row per numbers of terminals, in mixed radix, the first
            class the fastest.
        forked: gets those of trees that fork where they start, without what that costs.
    """
    points, classes, rows = len(ways), len(sizes), strides[-1]
    costs[0] = 0
    wanted, part = np.zeros(classes, dtype=np.int64), np.zeros(classes, dtype=np.int64)
    for row in range(1, rows):
        for place in range(classes):
            wanted[place] = row // strides[place] % (sizes[place] + 1)
        part[:] = 0
        one = 0
        while True:  # all parts of what is wanted, like digits, ascending
            place = 0
            while part[place] == wanted[place]:
                one -= part[place] * strides[place]
                part[place] = 0
                place += 1
            part[place] += 1
            one += strides[place]
            other = row - one
            if one > other:
                break  # the other half of the pairs is the same
            for point in range(points):
                both = min(costs[one, point], forked[one, point])
                both += min(costs[other, point], forked[other, point])
                forked[row, point] = min(forked[row, point], both)
        for point in range(points):
            for target in range(points):
                if target < classes and wanted[target] > 0:
                    rest = row - strides[target]
                    reached = ways[point, target] + min(costs[rest, target], forked[rest, target])
                else:
                    reached = ways[point, target] + forked[row, target] + paid[target]
                costs[row, point] = min(costs[row, point], reached)

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
        passed_on: what it costs where the point, a switch, hands on to another one that joins or forks.
    """

    any: Ints
    passed_on: Ints


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
        """What the cheapest in-tree to each point and the cheapest out-tree from it cost together."""
        both = self.into.any + self.out.any
        first = len(self.points) - len(self.switches)
        for place, vertex in enumerate(self.switches, first):
            if not self.topology.switches[vertex - self.topology.ranks].turns:
                both[place] = min(
                    self.into.any[place] + self.out.passed_on[place],
                    self.into.passed_on[place] + self.out.any[place],
                )
        least: Ints = np.minimum(both, FAR)
        return least

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
        nowhere = np.full(len(self.points), FAR)
        able = [self.topology.switches[vertex - self.topology.ranks] for vertex in self.switches]
        forks = [
            place for place, switch in enumerate(able) if (switch.reduces if turned else switch.multicasts)
        ]
        if count == 1:
            return Trees(ways[:, 0].copy(), nowhere)
        if not forks and not self.relays:
            costs, among = nowhere.copy(), ways[:count, :count]
            if self.collective.root is None:
                costs[:count] = cheapest_costs(among)
            else:  # which need not be reached from others
                root = self.place(self.collective.root)
                costs[root] = cheapest_cost(among, root)
            return Trees(costs, nowhere)
        to_forks = np.full_like(ways, FAR)
        to_forks[:, :ranks] = ways[:, :ranks]
        for place in forks:
            to_forks[:, ranks + place] = self._ways_to_fork(ways, place, turned=turned)
        paid = np.zeros(len(self.points), dtype=np.int64)
        if turned:
            paid[ranks:] = [self.adders.get(vertex, 0) for vertex in self.switches]
        alike = _alike(ways, to_forks, count)
        sizes = np.bincount(alike)
        if math.prod((size + 1) * (size + 2) // 2 for size in sizes.tolist()) > MOST_PARTS:
            raise InputError(
                f"dual for {self.collective.kind}: with relays or able switches at most {MOST_APART} ranks "
                f"may be apart, or more that are alike, got {count}"
            )
        first = np.unique(alike, return_index=True)[1]
        kept = np.array([*first.tolist(), *range(count, len(self.points))])
        of_class = np.array([*range(len(sizes)), *[-1] * (len(kept) - len(sizes))])
        chosen = np.ix_(kept, kept)
        few, many = _fork(
            np.ascontiguousarray(ways[chosen]),
            np.ascontiguousarray(to_forks[chosen]),
            paid[kept],
            sizes,
            of_class,
            _within(ways, alike),
        )
        # A terminal reaches all others, which is one less of its own class.
        own = np.cumprod([1, *(sizes[:-1] + 1)])
        costs, forked = np.full(len(self.points), FAR), np.full(len(self.points), FAR)
        costs[count:], forked[count:] = few[-1, len(sizes) :], many[-1, len(sizes) :]
        for terminal, kind in enumerate(alike.tolist()):
            row = len(few) - 1 - own[kind]
            costs[terminal] = min(few[row, kind], many[row, kind])
        passed_on = nowhere.copy()
        for place, vertex in enumerate(self.switches):
            for fork in forks:
                if fork != place:
                    way = self._near(vertex, self.switches[fork], turned=turned)
                    passed_on[ranks + place] = min(
                        passed_on[ranks + place], way + forked[ranks + fork] + paid[ranks + fork]
                    )
        return Trees(costs, passed_on)

    def _near(self, src: Vertex, dst: Vertex, *, turned: bool) -> int:
        near = self._between_holders
        return int(near[dst, src] if turned else near[src, dst])

    def _ways_to_fork(self, ways: Matrix, place: int, *, turned: bool) -> Ints:
        """What it costs to come from each point to a switch and fork there."""
        vertex, first = self.switches[place], len(self.terminals) + len(self.relays)
        if not self.topology.switches[vertex - self.topology.ranks].loopback:
            found: Ints = ways[:, first + place]
            return found
        near = self._between_holders.T if turned else self._between_holders
        ranks = self.topology.ranks
        others = [other for other in range(ranks, self.topology.holders) if other != vertex]
        from_ranks = near[:ranks, vertex] + near[vertex, :ranks]
        if others:  # a rank's data that another switch hands on do not come back
            from_ranks = np.minimum(from_ranks, (near[:ranks, others] + near[others, vertex]).min(axis=1))
        found = np.full(len(self.points), FAR)
        for rank, cost in enumerate(from_ranks.tolist()):
            found = np.minimum(found, ways[:, self.place(rank)] + cost)
        for other, point in enumerate(self.switches, first):
            found[other] = 0 if point == vertex else min(found[other], near[point, vertex])
        return np.minimum(found, FAR)


def _alike(ways: Matrix, to_forks: Matrix, count: int) -> Ints:
    """The class of each of the first `count` points: those that may be exchanged without any way changing."""
    classes = np.full(count, -1)
    for first in range(count):
        if classes[first] >= 0:
            continue
        found = classes.max() + 1
        if found > MOST_APART:  # too many, whatever the others are
            classes[classes < 0] = np.arange(found, found + np.count_nonzero(classes < 0))
            break
        classes[first] = found
        for other in range(first + 1, count):
            if classes[other] < 0 and _may_be_exchanged((ways, to_forks), first, other):
                classes[other] = found
    return classes


def _may_be_exchanged(matrices: tuple[Matrix, ...], first: int, other: int) -> bool:
    order = np.arange(len(matrices[0]))
    order[[first, other]] = other, first
    return all(
        np.array_equal(matrix[first][order], matrix[other])
        and np.array_equal(matrix[order, first], matrix[:, other])
        for matrix in matrices
    )


def _within(ways: Matrix, alike: Ints) -> Ints:
    """The way between two terminals of each class; `FAR` where it has only one."""
    found = np.full(alike.max() + 1, FAR)
    for kind in range(len(found)):
        members = np.flatnonzero(alike == kind)
        if len(members) > 1:
            found[kind] = ways[members[0], members[1]]
    return found


@kernel
def _fork(  # noqa: PLR0912
    ways: Matrix, to_forks: Matrix, paid: Ints, sizes: Ints, of_class: Ints, within: Ints
) -> tuple[Matrix, Matrix]:
    """What the cheapest trees from each point to so many terminals of each class cost.

    Dreyfus and Wagner 1971, over numbers of terminals that are alike rather than over sets: a tree to some of
    them costs what one to any others costs. Trees from a terminal go to others. A tree is a way to a point
    where it forks, or to a terminal from where it goes on.

    Args:
        ways: the way between points; a class of terminals, which come first, is one point.
        to_forks: the way from each point to where each one forks; `FAR` where it may not, 0 to itself.
        paid: what it costs to fork at each point, in however many.
        sizes: how many terminals each class has.
        of_class: of each point, its class; -1 for those that are no terminals.
        within: the way between two terminals of each class.

    Returns:
        Trees, and trees that fork where they start without what that costs. A row per numbers of terminals,
        in mixed radix, the first class the fastest.
    """
    points, classes = ways.shape[0], sizes.shape[0]
    stride = np.ones(classes + 1, dtype=np.int64)
    for place in range(classes):
        stride[place + 1] = stride[place] * (sizes[place] + 1)
    rows = stride[classes]
    costs, forked = np.full((rows, points), FAR), np.full((rows, points), FAR)
    costs[0] = 0
    wanted, part = np.zeros(classes, dtype=np.int64), np.zeros(classes, dtype=np.int64)
    for row in range(1, rows):
        for place in range(classes):
            wanted[place] = row // stride[place] % (sizes[place] + 1)
        part[:] = 0
        one = 0
        while True:  # all parts of what is wanted, like digits; each half of the pairs is enough
            place = 0
            while place < classes and part[place] == wanted[place]:
                one -= part[place] * stride[place]
                part[place] = 0
                place += 1
            if place == classes:
                break
            part[place] += 1
            one += stride[place]
            other = row - one
            if one > other:
                continue
            for point in range(points):
                both = min(costs[one, point], forked[one, point]) + min(
                    costs[other, point], forked[other, point]
                )
                forked[row, point] = min(forked[row, point], both)
        for point in range(points):
            its = of_class[point]
            if to_forks[point, point] >= FAR or (its >= 0 and wanted[its] == sizes[its]):
                forked[row, point] = FAR
        for point in range(points):
            its = of_class[point]
            if its >= 0 and wanted[its] == sizes[its]:
                continue  # there are not so many others
            for target in range(points):
                kind = of_class[target]
                if kind >= 0 and wanted[kind] > 0:
                    way = within[kind] if point == target else ways[point, target]
                    rest = row - stride[kind]
                    reached = way + min(costs[rest, target], forked[rest, target])
                else:
                    reached = to_forks[point, target] + forked[row, target] + paid[target]
                costs[row, point] = min(costs[row, point], reached)
    return costs, forked

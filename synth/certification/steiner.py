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

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from arborcast.synth.certification.trees import cheapest_cost, cheapest_costs
from arborcast.synth.certification.ways import FAR, Matrix, ways_between
from arborcast.synth.collective import Collective
from arborcast.synth.errors import InputError
from arborcast.synth.kernels.compiled import Ints, kernel
from arborcast.synth.topology import Topology, Vertex

MOST_APART = 16
"""Ranks that are apart beside vertices that may join or fork: the effort triples with each."""


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
        if count > MOST_APART:
            raise InputError(
                f"dual for {self.collective.kind}: with relays or able switches at most {MOST_APART} ranks "
                f"may be apart, got {count}"
            )
        to_forks = np.full_like(ways, FAR)
        to_forks[:, :ranks] = ways[:, :ranks]
        for place in forks:
            to_forks[:, ranks + place] = self._ways_to_fork(ways, place, turned=turned)
        paid = np.zeros(len(self.points), dtype=np.int64)
        if turned:
            paid[ranks:] = [self.adders.get(vertex, 0) for vertex in self.switches]
        costs, forked = _fork(np.ascontiguousarray(ways[:, :count]), to_forks, paid)
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


@kernel
def _fork(to_terminals: Matrix, to_forks: Matrix, paid: Ints) -> tuple[Ints, Ints]:
    """What the cheapest trees from each vertex to all terminals cost, and those that fork there first.

    Dreyfus and Wagner 1971 over subsets of the terminals: a tree is a way to a vertex where it forks.

    Args:
        to_terminals: the way from each vertex to each terminal.
        to_forks: the way from each vertex to where each one forks; `FAR` where it may not, 0 to itself.
        paid: what it costs to fork at each vertex, in however many.

    Returns:
        Trees, and trees that fork where they start without what that costs.
    """
    size, count = to_terminals.shape
    costs = np.full((1 << count, size), FAR)
    forked = np.full((1 << count, size), FAR)
    for bit in range(count):
        costs[1 << bit] = to_terminals[:, bit]
    for group in range(1, 1 << count):  # its parts have lower numbers and are done before
        lowest = group & -group
        rest = group ^ lowest
        if rest == 0:
            continue
        part = rest
        while part:
            part = (part - 1) & rest
            one, other = part | lowest, group ^ part ^ lowest
            for vertex in range(size):
                # Either part may be a fork at the same vertex, for which nothing more is paid.
                both = min(costs[one, vertex], forked[one, vertex]) + min(
                    costs[other, vertex], forked[other, vertex]
                )
                forked[group, vertex] = min(forked[group, vertex], both)
        for vertex in range(size):
            if to_forks[vertex, vertex] >= FAR:
                forked[group, vertex] = FAR
                continue
            for start in range(size):
                through = to_forks[start, vertex] + forked[group, vertex] + paid[vertex]
                costs[group, start] = min(costs[group, start], through)
    return costs[-1], forked[-1]

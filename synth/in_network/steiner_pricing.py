"""The cheapest trees under prices of links and adders: the pricing of `synth.in_network.steiner_program`.

A tree is a set of vertices at which it forks, and the cheapest arborescence over them and the ranks that take
part. Dreyfus and Wagner (1971) find that set exactly, over subsets of what is apart: ranks joined by ways
that cost nothing, both ways, are one. Where too many are apart, switches are taken in and left out while that
helps (key-vertex insertion), which finds a good tree and proves nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.in_network.steiner_tree import SteinerTree, trimmed
from arborcast.synth.kernels.arborescence import cheapest_arborescence
from arborcast.synth.kernels.compiled import Flags, Ints, kernel
from arborcast.synth.kernels.link_graph import LinkGraph
from arborcast.synth.topology import Topology, Vertex
from arborcast.synth.tree import TreeEdge

FAR = 1 << 60
"""The cost of what cannot be reached."""

MOST_APART = 16
"""Ranks that are apart, up to which cheapest trees are found exactly: the effort triples with each."""

HOP = 12
"""Bits by which prices are raised so that each link costs one more: of equal trees the one of fewer links. A
cheapest tree passes less than 2**12 links."""

LARGEST_PRICE = 1 << 32
"""What prices may be at most: a raised one of a whole tree then stays far below `FAR`."""


@dataclass(frozen=True, eq=False)
class Side:
    """One direction of trees: out of a root, or into it over the links turned round.

    Attributes:
        topology: the fabric.
        ends: the ranks that take part.
        turned: whether trees gather.
    """

    topology: Topology
    ends: tuple[int, ...]
    turned: bool = False

    @cached_property
    def graph(self) -> LinkGraph:
        """The links in this direction."""
        graph = LinkGraph(self.topology)
        return graph.turned_round if self.turned else graph

    @cached_property
    def forks(self) -> Flags:
        """Of the ranks and able switches, which may join or fork in this direction."""
        able = self.topology.switches[: self.topology.holders - self.topology.ranks]
        switches = [switch.reduces if self.turned else switch.multicasts for switch in able]
        return np.array([True] * self.topology.ranks + switches, dtype=np.bool_)

    @cached_property
    def loops(self) -> Flags:
        """Of the same, which have a parent that is a rank pay the way back."""
        able = self.topology.switches[: self.topology.holders - self.topology.ranks]
        return np.array([False] * self.topology.ranks + [switch.loopback for switch in able], dtype=np.bool_)

    @cached_property
    def barred(self) -> Flags:
        """Of the ranks, which a switch with loopback cannot give a sum: relays have nothing to send it."""
        relays = [self.turned and rank not in self.ends for rank in range(self.topology.ranks)]
        return np.array(relays, dtype=np.bool_)

    def hands_on(self, root: Vertex) -> bool:
        """Whether trees must not fork at this root: a switch that could not multicast its own sum."""
        ranks = self.topology.ranks
        return self.turned and root >= ranks and not self.topology.switches[root - ranks].turns

    @cached_property
    def optional(self) -> tuple[Vertex, ...]:
        """Where a tree may fork and need not come: relays and able switches."""
        return tuple(vertex for vertex in np.flatnonzero(self.forks).tolist() if vertex not in self.ends)


@dataclass(frozen=True, eq=False)
class Priced:
    """All ways of one side under prices.

    Attributes:
        side: the direction.
        lengths: of each link, raised by `HOP` bits.
        joining: what it costs to fork at each rank or able switch, likewise raised.
        plain: the shortest way between each of them and each vertex that passes switches only.
        last: the last link of that way.
        ways: the shortest way to fork at each, which may pass ranks.
        middle: the rank that it passes last; -1 for none.
        spare: the switch that hands on what a rank sends to one with loopback, which then has no rank to give
            it back to, where that is cheaper; -1 for none.
    """

    side: Side
    lengths: Ints
    joining: Ints
    plain: Ints
    last: Ints
    ways: Ints
    middle: Ints
    spare: Ints

    @classmethod
    def of(cls, side: Side, prices: Sequence[int], joining: dict[Vertex, int]) -> Priced:
        """Under whole prices, up to `LARGEST_PRICE`.

        Args:
            side: the direction.
            prices: of each link, in the order of the topology.
            joining: of a sum made at a switch, where that costs anything; trees that spread pay nothing.
        """
        topology = side.topology
        lengths = (np.array(prices, dtype=np.int64) << HOP) + 1
        paid = np.zeros(topology.holders, dtype=np.int64)
        for vertex, price in joining.items() if side.turned else ():
            paid[vertex] = price << HOP
        plain, last = _plain_ways(
            *side.graph.leaving, side.graph.heads, lengths, topology.ranks, topology.holders
        )
        ways, middle, spare = _all_ways(plain, topology.ranks, side.forks, side.loops, side.barred)
        return cls(side, lengths, paid, plain, last, ways, middle, spare)

    @cached_property
    def terminals(self) -> tuple[int, ...]:
        """One rank of each set that is joined by ways without a price."""
        ends = np.array(self.side.ends)
        free = self.ways[np.ix_(ends, ends)] >> HOP
        alike = np.maximum(free, free.T) == 0
        return tuple(sorted({int(ends[np.argmax(row)]) for row in alike}))

    def tree(self, root: Vertex, forks: Sequence[Vertex], first: Vertex | None = None) -> SteinerTree:
        """The cheapest tree over given vertices, trimmed.

        Args:
            root: where it starts.
            forks: switches and relays at which it may fork.
            first: where it forks first, where the root, a switch, only hands on; None for the root.

        Raises:
            InfeasibleError: some rank cannot be reached.
        """
        start = root if first is None else first
        nodes = [start, *(vertex for vertex in (*self.side.ends, *forks) if vertex != start)]
        nodes = list(dict.fromkeys(nodes))
        parents = cheapest_arborescence(self._entering(nodes), 0)
        arcs = [] if first is None else self._arcs(root, first)
        for child, parent in enumerate(parents.tolist()):
            if parent >= 0:
                arcs += self._arcs(nodes[parent], nodes[child])
        ranks, loops = self.side.topology.ranks, self.side.loops.tolist()
        edges = trimmed(root, arcs, self.side.ends, ranks, loops)
        forking = {vertex for vertex, count in Counter(edge.parent for edge in edges).items() if count > 1}
        back = (edge for edge in edges if edge.parent < ranks and loops[edge.child] and edge.child in forking)
        returns = tuple(
            TreeEdge(edge.child, edge.parent, self._via(edge.child, edge.parent)) for edge in back
        )
        return SteinerTree(root, tuple(edges), returns)

    def cost(self, root: Vertex, forks: Sequence[Vertex]) -> int:
        """What the cheapest tree over given vertices costs before it is trimmed; `FAR` without one."""
        nodes = list(dict.fromkeys([root, *self.side.ends, *forks]))
        entering = self._entering(nodes)
        try:
            parents = cheapest_arborescence(entering, 0)
        except InfeasibleError:
            return FAR
        return int(entering[parents[1:], np.arange(1, len(nodes))].sum())

    def improved(self, root: Vertex, forks: Sequence[Vertex], deadline: Deadline) -> list[Vertex]:
        """Vertices to fork at, taken in and left out one at a time as long as that lowers the cost."""
        chosen, best = list(forks), self.cost(root, forks)
        while not deadline.has_passed:
            toggled = [
                [other for other in chosen if other != vertex] if vertex in chosen else [*chosen, vertex]
                for vertex in self.side.optional
                if vertex != root
            ]
            costs = [self.cost(root, some) for some in toggled]
            if not costs or min(costs) >= best:
                break
            best = min(costs)
            chosen = toggled[costs.index(best)]
        return chosen

    def _entering(self, nodes: Sequence[Vertex]) -> Ints:
        chosen = np.array(nodes)
        ways = self.ways[np.ix_(chosen, chosen)]
        entering: Ints = np.minimum(ways + self.joining[chosen][None, :], FAR)
        return entering

    def _arcs(self, src: Vertex, dst: Vertex) -> list[TreeEdge]:
        """The way between two vertices, in parts between the ranks that it passes."""
        arcs: list[TreeEdge] = []
        while (middle := int(self.middle[src, dst])) >= 0:
            arcs += self._arc(middle, dst)
            dst = middle
        return [*arcs, *self._arc(src, dst)]

    def _arc(self, src: Vertex, dst: Vertex) -> list[TreeEdge]:
        stop = int(self.spare[src, dst])
        if stop < 0:
            return [TreeEdge(src, dst, self._via(src, dst))]
        return [TreeEdge(stop, dst, self._via(stop, dst)), TreeEdge(src, stop, self._via(src, stop))]

    def _via(self, src: Vertex, dst: Vertex) -> tuple[Vertex, ...]:
        tails, here = self.side.graph.tails, int(self.side.graph.tails[self.last[src, dst]])
        passed = []
        while here != src:
            passed.append(here)
            here = int(tails[self.last[src, here]])
        return tuple(passed[::-1])


@dataclass(frozen=True, eq=False)
class Cheapest:
    """The cheapest trees of one side from every root, exactly.

    Attributes:
        priced: the side and its ways.
        costs: row `group` holds, for each vertex, the cost of a tree to the terminals whose bits are set.
        forked: the same for trees that fork at the vertex, without what it costs to join there.
    """

    priced: Priced
    costs: Ints = field(repr=False)
    forked: Ints = field(repr=False)

    @classmethod
    def of(cls, priced: Priced) -> Cheapest:
        """Exponential in the number of terminals; at most `MOST_APART`."""
        terminals = np.array(priced.terminals, dtype=np.int64)
        assert len(terminals) <= MOST_APART, "who asks has counted them"
        return cls(priced, *_forks(priced.ways, terminals, priced.side.forks, priced.joining))

    def total(self, root: Vertex) -> int:
        """What the cheapest tree costs, in prices as they were given; `FAR` where there is none."""
        hands_on = self.priced.side.hands_on(root)
        cost = int(self._handed_on(root).min()) if hands_on else int(self.costs[-1, root])
        return cost >> HOP if cost < FAR else FAR

    def tree(self, root: Vertex) -> SteinerTree:
        """A cheapest tree.

        Raises:
            InfeasibleError: there is none.
        """
        priced = self.priced
        ranks, forks = priced.side.topology.ranks, priced.side.forks
        first = None
        if root >= ranks:
            handed_on = self._handed_on(root)
            here = self.forked[-1, root] + priced.joining[root] if forks[root] else FAR
            if priced.side.hands_on(root) or handed_on.min() < here:
                first = int(np.argmin(handed_on))
                if handed_on[first] >= FAR:
                    raise InfeasibleError(f"no tree from switch {root}")
        chosen = _fork_set(
            self.costs,
            self.forked,
            priced.ways,
            forks,
            priced.joining,
            len(self.costs) - 1,
            root if first is None else first,
            root >= ranks,
        )
        chosen[root] = False
        return priced.tree(root, np.flatnonzero(chosen).tolist(), first)

    def _handed_on(self, root: Vertex) -> Ints:
        """What trees cost that start at a switch and fork first at each vertex, the root aside."""
        priced = self.priced
        ways = priced.plain[root, : len(priced.joining)] if priced.side.hands_on(root) else priced.ways[root]
        costs: Ints = np.minimum(ways + np.minimum(self.forked[-1] + priced.joining, FAR), FAR)
        costs[~priced.side.forks] = FAR
        costs[root] = FAR
        if priced.side.hands_on(root):
            costs[: priced.side.topology.ranks] = FAR  # they are roots themselves
        return costs


@kernel
def _plain_ways(
    start: Ints, order: Ints, heads: Ints, lengths: Ints, ranks: int, holders: int
) -> tuple[Ints, Ints]:
    """Dijkstra from each rank and able switch, over switches only."""
    size = start.shape[0] - 1
    ways = np.full((holders, size), FAR)
    last = np.full((holders, size), -1)
    for source in range(holders):
        done = np.zeros(size, dtype=np.bool_)
        here = source
        reached = 0
        while here >= 0:
            done[here] = True
            for place in range(start[here], start[here + 1]):
                link = order[place]
                there = heads[link]
                if there != source and reached + lengths[link] < ways[source, there]:
                    ways[source, there] = reached + lengths[link]
                    last[source, there] = link
            here = -1
            for vertex in range(ranks, size):
                if done[vertex] or ways[source, vertex] >= FAR:
                    continue
                if here < 0 or ways[source, vertex] < ways[source, here]:
                    here = vertex
            if here >= 0:
                reached = ways[source, here]
        ways[source, source] = 0
    return ways, last


@kernel
def _all_ways(plain: Ints, ranks: int, forks: Flags, loops: Flags, barred: Flags) -> tuple[Ints, Ints, Ints]:
    """Ways that pass ranks, too; to a switch with loopback the last rank pays the way back."""
    holders = plain.shape[0]
    ways = np.full((holders, holders), FAR)
    middle = np.full((holders, holders), -1)
    spare = np.full((holders, holders), -1)
    for src in range(holders):
        for dst in range(holders):
            if src == dst:
                ways[src, dst] = 0
            elif forks[dst]:
                ways[src, dst] = plain[src, dst]
                if loops[dst] and src < ranks:
                    ways[src, dst] = FAR if barred[src] else min(FAR, plain[src, dst] + plain[dst, src])
                    for stop in range(ranks, holders):
                        handed_on = plain[src, stop] + plain[stop, dst]
                        if stop != dst and handed_on < ways[src, dst]:
                            ways[src, dst] = handed_on
                            spare[src, dst] = stop
    for through in range(ranks):
        for src in range(holders):
            for dst in range(holders):
                if ways[src, through] + ways[through, dst] < ways[src, dst] and through != dst:
                    ways[src, dst] = ways[src, through] + ways[through, dst]
                    middle[src, dst] = through if middle[through, dst] < 0 else middle[through, dst]
    return ways, middle, spare


@kernel
def _forks(ways: Ints, terminals: Ints, forks: Flags, joining: Ints) -> tuple[Ints, Ints]:
    holders, count = ways.shape[0], terminals.shape[0]
    costs = np.full((1 << count, holders), FAR)
    forked = np.full((1 << count, holders), FAR)
    least = np.full((1 << count, holders), FAR)  # with or without another fork at the same vertex
    for bit in range(count):
        for vertex in range(holders):
            costs[1 << bit, vertex] = ways[vertex, terminals[bit]]
            least[1 << bit, vertex] = ways[vertex, terminals[bit]]
    for group in range(1, 1 << count):  # its parts have lower numbers and are done before
        lowest = group & -group
        rest = group ^ lowest
        if rest == 0:
            continue
        part = rest
        while part:
            part = (part - 1) & rest
            here, there = part | lowest, group ^ part ^ lowest
            for vertex in range(holders):
                both = costs[here, vertex] + least[there, vertex]
                forked[group, vertex] = min(forked[group, vertex], both)
        for vertex in range(holders):
            complete = forked[group, vertex] + joining[vertex]
            if not forks[vertex] or complete >= FAR:
                continue
            for src in range(holders):
                costs[group, src] = min(costs[group, src], ways[src, vertex] + complete)
        for vertex in range(holders):
            least[group, vertex] = costs[group, vertex]
            if forks[vertex] and forked[group, vertex] < costs[group, vertex]:
                least[group, vertex] = forked[group, vertex]
    return costs, forked


@kernel
def _fork_set(
    costs: Ints, forked: Ints, ways: Ints, forks: Flags, joining: Ints, everything: int, root: int, here: bool
) -> Flags:
    """Where a cheapest tree forks; with `here` it does so at the root."""
    holders = ways.shape[0]
    chosen = np.zeros(holders, dtype=np.bool_)
    groups, places = np.empty(4 * holders + 64, np.int64), np.empty(4 * holders + 64, np.int64)
    joined = np.zeros(4 * holders + 64, dtype=np.bool_)  # whether this is one more branch of a fork there
    groups[0], places[0], joined[0] = everything, root, here
    waiting = 1
    while waiting > 0:
        waiting -= 1
        group, vertex = groups[waiting], places[waiting]
        if group & (group - 1) == 0:
            continue
        if not joined[waiting]:
            for fork in range(holders):
                if (
                    forks[fork]
                    and ways[vertex, fork] + forked[group, fork] + joining[fork] == costs[group, vertex]
                ):
                    vertex = fork
                    break
        chosen[vertex] = True
        lowest = group & -group
        rest = group ^ lowest
        part = rest
        while part:
            part = (part - 1) & rest
            one, other = part | lowest, group ^ part ^ lowest
            again = forked[other, vertex] < costs[other, vertex] and other & (other - 1) != 0
            if costs[one, vertex] + min(costs[other, vertex], forked[other, vertex]) == forked[group, vertex]:
                groups[waiting], places[waiting], joined[waiting] = one, vertex, False
                groups[waiting + 1], places[waiting + 1], joined[waiting + 1] = other, vertex, again
                waiting += 2
                break
    return chosen

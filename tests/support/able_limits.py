"""The limit with able switches by brute force: a linear program over all trees, in fractions.

Prices of links and adders of total worth 1 are sought under which the cheapest trees are as dear as can be:
each time a cheaper tree is found than thought, it becomes a row. Trees are found by trying every set of
vertices at which to fork, with the cheapest arborescence over it (Chu and Liu 1965). No code is shared with
what is tested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import combinations, pairwise

from arborcast.synth.collective import Collective, Kind
from arborcast.synth.topology import Switch, Topology, Vertex
from tests.fuzzing.exact_lp import Program

Edge = tuple[Vertex, Vertex]
Key = Edge | Vertex  # a link, or a switch whose adder is limited
Loads = Counter[Key]
Prices = Mapping[Key, Fraction]


@dataclass(frozen=True)
class Answer:
    """The rate of the best trees, and the prices that prove it."""

    rate: Fraction
    lengths: tuple[Fraction, ...]
    adders: tuple[Fraction, ...]


def best_rate(topology: Topology, collective: Collective) -> Answer:
    """The limit of a collective of trees whose ranks reach each other."""
    limited = {
        vertex: switch.adder
        for vertex, switch in enumerate(topology.switches, topology.ranks)
        if switch.adder is not None
    }
    worth: dict[Key, Fraction] = {**topology.bandwidth, **limited}
    roots: tuple[int | None, ...] = (collective.root,)
    if collective.kind in {Kind.ALLGATHER, Kind.REDUCE_SCATTER}:
        roots = collective.ranks
    program = Program()
    program.at_most(worth, 1)
    program.at_most({"all": len(roots), **{("of", root): -1 for root in roots}})
    for root in roots:  # what no price is on costs nothing: a start that bounds the program
        program.at_most({("of", root): 1}, 10**6)
    while True:
        program.maximum("all")
        prices = {key: program.values.get(key, Fraction(0)) for key in worth}
        trees = Trees(topology, collective, prices)
        found = True
        for root in roots:
            cost, loads = trees.cheapest(root)
            if cost < program.values[("of", root)]:
                program.at_most({("of", root): 1, **{key: -count for key, count in loads.items()}})
                found = False
        if found:
            lengths = tuple(prices[link.src, link.dst] for link in topology.links)
            adders = tuple(prices[vertex] for vertex in topology.limited_adders)
            return Answer(1 / program.values["all"], lengths, adders)


def distance(topology: Topology, collective: Collective, prices: Prices) -> Fraction:
    """The least cost of moving one unit of the buffer."""
    roots: tuple[int | None, ...] = (collective.root,)
    if collective.kind in {Kind.ALLGATHER, Kind.REDUCE_SCATTER}:
        roots = collective.ranks
    trees = Trees(topology, collective, prices)
    return sum((trees.cheapest(root)[0] for root in roots), Fraction(0)) / len(roots)


@dataclass(frozen=True)
class Trees:
    """Trees under prices."""

    topology: Topology
    collective: Collective
    prices: Prices

    def cheapest(self, root: int | None) -> tuple[Fraction, Loads]:
        """The cheapest tree of a root, or the cheapest pair of an allreduce."""
        match self.collective.kind:
            case Kind.BROADCAST | Kind.ALLGATHER:
                return self._any(root, turned=False)
            case Kind.REDUCE | Kind.REDUCE_SCATTER:
                return self._any(root, turned=True)
        pairs = []
        for vertex in range(self.topology.holders):
            into, out = self._any(vertex, turned=True), self._any(vertex, turned=False)
            if vertex < self.topology.ranks or self._switch(vertex).turns:
                pairs.append((into, out))
            else:
                pairs += [(into, self._passed_on(vertex, turned=False))]
                pairs += [(self._passed_on(vertex, turned=True), out)]
        into, out = min(pairs, key=lambda pair: pair[0][0] + pair[1][0])
        return into[0] + out[0], into[1] + out[1]

    def _switch(self, vertex: Vertex) -> Switch:
        return self.topology.switches[vertex - self.topology.ranks]

    def _is_fork(self, vertex: Vertex, *, turned: bool) -> bool:
        if vertex < self.topology.ranks:
            return True
        return self._switch(vertex).reduces if turned else self._switch(vertex).multicasts

    def _optional(self, *, turned: bool) -> list[Vertex]:
        holders = range(self.topology.holders)
        return [v for v in holders if v not in self.collective.ranks and self._is_fork(v, turned=turned)]

    def _any(self, root: Vertex, *, turned: bool) -> tuple[Fraction, Loads]:
        """The cheapest tree from (turned: to) a vertex; a switch that may not fork has one child."""
        found = [(Fraction(10**9), Loads())]
        if self._is_fork(root, turned=turned):
            for chosen in _subsets(self._optional(turned=turned)):
                found.append(self._over({root, *self.collective.ranks, *chosen}, root, turned=turned))
        if root >= self.topology.ranks:
            found.append(self._passed_on(root, turned=turned))
            for rank in range(self.topology.ranks):
                edge = self._edge(root, rank, turned=turned)
                if edge:
                    cost, loads = self._any(rank, turned=turned)
                    found.append((edge[0] + cost, edge[1] + loads))
        return min(found, key=lambda entry: entry[0])

    def _passed_on(self, root: Vertex, *, turned: bool) -> tuple[Fraction, Loads]:
        """The same where the root, a switch, leaves forking to another switch."""
        found = [(Fraction(10**9), Loads())]
        optional = self._optional(turned=turned)
        for first in optional:
            edge = self._edge(root, first, turned=turned)
            if first == root or first < self.topology.ranks or not edge:
                continue
            for chosen in _subsets(optional):
                cost, loads = self._over({first, *self.collective.ranks, *chosen}, first, turned=turned)
                found.append((edge[0] + cost, edge[1] + loads))
        return min(found, key=lambda entry: entry[0])

    def _over(self, vertices: set[Vertex], root: Vertex, *, turned: bool) -> tuple[Fraction, Loads]:
        """The cheapest arborescence over given vertices."""
        edges = {}
        for u in vertices:
            for v in vertices - {u, root}:
                edge = self._edge(u, v, turned=turned)
                if edge:
                    edges[u, v] = edge
        parents = arborescence({pair: cost for pair, (cost, _) in edges.items()}, vertices, root)
        if parents is None:
            return Fraction(10**9), Loads()
        loads: Loads = Loads()
        for child, parent in parents.items():
            loads += edges[parent, child][1]
        children = Counter(parents.values())
        for vertex in children:
            if turned and children[vertex] > 1 and vertex in self.topology.limited_adders:
                loads[vertex] += 1
        return sum((self.prices[key] * count for key, count in loads.items()), Fraction(0)), loads

    def _edge(self, src: Vertex, dst: Vertex, *, turned: bool) -> tuple[Fraction, Loads] | None:
        """A way of a tree away from its root; to fork at a switch with loopback some come back."""
        straight = self._way(src, dst, turned=turned)
        if (
            src >= self.topology.ranks
            or dst < self.topology.ranks
            or not self._switch(dst).loopback
            or not self._is_fork(dst, turned=turned)
        ):
            return straight
        ways = [_put(straight, self._way(dst, src, turned=turned))]
        for other in range(self.topology.ranks, self.topology.holders):
            if other != dst:
                ways.append(_put(self._way(src, other, turned=turned), self._way(other, dst, turned=turned)))
        return min((way for way in ways if way), key=lambda way: way[0], default=None)

    def _way(self, src: Vertex, dst: Vertex, *, turned: bool) -> tuple[Fraction, Loads] | None:
        path = self._paths.get((dst, src) if turned else (src, dst))
        if path is None:
            return None
        loads: Loads = Loads(pairwise(path))
        return sum((self.prices[hop] for hop in loads), Fraction(0)), loads

    @cached_property
    def _paths(self) -> dict[Edge, tuple[Vertex, ...]]:
        """The cheapest path between any two vertices over switches (Floyd and Warshall)."""
        paths = {(v, v): (v,) for v in range(self.topology.size)}
        paths |= {hop: hop for hop in self.topology.bandwidth}
        cost = {
            pair: sum((self.prices[hop] for hop in pairwise(path)), Fraction(0))
            for pair, path in paths.items()
        }
        for through in range(self.topology.ranks, self.topology.size):
            for src in range(self.topology.size):
                for dst in range(self.topology.size):
                    if (src, through) not in paths or (through, dst) not in paths:
                        continue
                    length = cost[src, through] + cost[through, dst]
                    if (src, dst) not in paths or length < cost[src, dst]:
                        cost[src, dst] = length
                        paths[src, dst] = (*paths[src, through], *paths[through, dst][1:])
        return paths


def _put(
    first: tuple[Fraction, Loads] | None, second: tuple[Fraction, Loads] | None
) -> tuple[Fraction, Loads] | None:
    return (first[0] + second[0], first[1] + second[1]) if first and second else None


def _subsets(vertices: list[Vertex]) -> Iterator[tuple[Vertex, ...]]:
    for size in range(len(vertices) + 1):
        yield from combinations(vertices, size)


def arborescence(
    cost: dict[Edge, Fraction], vertices: set[Vertex], root: Vertex
) -> dict[Vertex, Vertex] | None:
    """The parents in the cheapest spanning out-tree; None where there is none."""
    parent = {}
    for v in vertices - {root}:
        entering = [(cost[u, v], u) for u in vertices if (u, v) in cost and u != v]
        if not entering:
            return None
        parent[v] = min(entering)[1]
    cycle = _cycle(parent, root)
    if cycle is None:
        return parent
    inside, new = set(cycle), max(vertices) + 1
    smaller: dict[Edge, Fraction] = {}
    meant: dict[Edge, Edge] = {}
    for (u, v), price in cost.items():
        if u not in vertices or v not in vertices or (u in inside and v in inside):
            continue
        ends = (new if u in inside else u, new if v in inside else v)
        more = price - cost[parent[v], v] if v in inside else price
        if ends not in smaller or more < smaller[ends]:
            smaller[ends], meant[ends] = more, (u, v)
    found = arborescence(smaller, (vertices - inside) | {new}, root)
    if found is None:
        return None
    result = {v: parent[v] for v in inside}
    for v, u in found.items():
        tail, head = meant[u, v]
        result[head] = tail
    return result


def _cycle(parent: dict[Vertex, Vertex], root: Vertex) -> list[Vertex] | None:
    for start in parent:
        seen = [start]
        while seen[-1] != root and parent[seen[-1]] not in seen:
            seen.append(parent[seen[-1]])
        if seen[-1] != root:
            return seen[seen.index(parent[seen[-1]]) :]
    return None

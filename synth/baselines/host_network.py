"""Hosts on a network, and how loaded its links are when hosts send to each other.

A message between two hosts is shared out evenly over their lanes, GPU i to GPU i, as NCCL does with a channel
for each NIC. On its way it passes switches alone and keeps to the shortest ways, over which it spreads evenly
at each switch (equal-cost multipath). Hosts whose lanes hang on the same switches by equal links share a
*place*: an order may exchange them.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import inf
from typing import TypeAlias

import networkx

from arborcast.synth.errors import InputError
from arborcast.synth.topology import Hop, Topology, Vertex

Port: TypeAlias = tuple[int, Vertex]
"""Which lane of a host, and the switch at the other end of its link."""
Sight: TypeAlias = tuple[tuple[Vertex, Fraction], ...]
"""The switches of the network next to a lane of a host, with the GB/s of the link."""


@dataclass(frozen=True, slots=True)
class Host:
    """One host: its name, and its ranks in the topology."""

    name: str
    ranks: tuple[int, ...]


def check_names(names: Sequence[str]) -> None:
    """Raise InputError where a host is named twice."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InputError(f"hosts: each must be named once, got {twice[0]} twice")


def in_blocks(names: Sequence[str], counts: Sequence[int]) -> tuple[Host, ...]:
    """Hosts whose ranks follow each other: the first has the first `counts[0]`, and so on.

    Raises:
        InputError: a name stands twice, or a host has no rank.
    """
    check_names(names)
    hosts, first = [], 0
    for name, count in zip(names, counts, strict=True):
        if count < 1:
            raise InputError(f"hosts: {name}: must have at least one rank, got {count}")
        hosts.append(Host(name, tuple(range(first, first + count))))
        first += count
    return tuple(hosts)


@dataclass(frozen=True, slots=True)
class PathLoad:
    """What a byte from one host to another loads, in parts of it.

    Attributes:
        out: of the sender's links to the network.
        into: of the receiver's links from it.
        inner: of the links between switches.
    """

    out: dict[Port, Fraction]
    into: dict[Port, Fraction]
    inner: dict[Hop, Fraction]


@dataclass(frozen=True, slots=True)
class Busiest:
    """The link that ends last.

    Attributes:
        load: bytes that pass it for each byte of a message of weight 1.
        bandwidth: of the link, GB/s.
        ends: what it leads from and to, by name.
    """

    load: Fraction
    bandwidth: Fraction
    ends: tuple[str, str]

    @property
    def rate(self) -> Fraction:
        """GB/s at which all messages of weight 1 go on."""
        return self.bandwidth / self.load


class HostNetwork:
    """Some hosts of a topology, as an order of them sees it; ranks do not forward.

    Attributes:
        topology: the fabric.
        hosts: those that take part.
        places: for each host the number of its place, counted from the first host on.
        of_place: the hosts of each place.
    """

    def __init__(self, topology: Topology, hosts: Sequence[Host]) -> None:
        self.topology, self.hosts = topology, tuple(hosts)
        self._owner = {rank: number for number, host in enumerate(self.hosts) for rank in host.ranks}
        self._heads: dict[Vertex, list[Vertex]] = defaultdict(list)
        self._tails: dict[Vertex, list[Vertex]] = defaultdict(list)
        self._rates: dict[Hop, Fraction] = {}
        self._names: dict[Vertex, str] = {}
        self._links = list(self._through_switches())
        sides = [
            tuple(self._side(host, rank, outward) for rank in host.ranks)
            for host in self.hosts
            for outward in (True, False)
        ]
        self._out, self._into = sides[::2], sides[1::2]
        known: dict[object, int] = {}
        both = zip(self._out, self._into, strict=True)
        self.places = tuple(known.setdefault(sight, len(known)) for sight in both)
        found: list[list[int]] = [[] for _ in known]
        for number, place in enumerate(self.places):
            found[place].append(number)
        self.of_place = tuple(map(tuple, found))
        self._steps: dict[frozenset[Vertex], dict[Vertex, int]] = {}
        self._messages: dict[tuple[int, int], PathLoad | None] = {}

    def message(self, src: int, dst: int) -> PathLoad | None:
        """From one place to another, or within one; None where no way passes switches alone."""
        if (src, dst) not in self._messages:
            self._messages[src, dst] = self._spread(self.of_place[src][0], self.of_place[dst][0])
        return self._messages[src, dst]

    def distance(self, src: int, dst: int) -> int | None:
        """The links of a shortest way from a place to another; None where there is no way."""
        out, into = self._out[self.of_place[src][0]], self._into[self.of_place[dst][0]]
        found = (self._reach(lane, end) for lane in out for end in into)
        return min((steps for steps in found if steps is not None), default=None)

    def busiest(self, messages: Iterable[tuple[int, int, Fraction]]) -> Busiest | None:
        """The link that is loaded most for its rate, by messages from host to host and what each weighs.

        None where one of them has no way.
        """
        pairs: dict[tuple[int, int], Fraction] = defaultdict(Fraction)
        sent: dict[int, dict[int, Fraction]] = defaultdict(lambda: defaultdict(Fraction))
        got: dict[int, dict[int, Fraction]] = defaultdict(lambda: defaultdict(Fraction))
        for src, dst, weight in messages:
            one, other = self.places[src], self.places[dst]
            pairs[one, other] += weight
            sent[src][other] += weight
            got[dst][one] += weight
        told: dict[tuple[int, int], PathLoad] = {}
        for pair in pairs:
            if (message := self.message(*pair)) is None:
                return None
            told[pair] = message
        inner: dict[Hop, Fraction] = defaultdict(Fraction)
        for pair, weight in pairs.items():
            for hop, part in told[pair].inner.items():
                inner[hop] += weight * part
        loads = [(load / self._rates[hop], load, hop) for hop, load in inner.items()]
        seen: set[object] = set()  # hosts of one place that send and get alike are loaded alike
        for host in range(len(self.hosts)):
            place, out, into = self.places[host], sent[host], got[host]
            alike = (place, frozenset(out.items()), frozenset(into.items()))
            if alike in seen:
                continue
            seen.add(alike)
            ranks = self.hosts[host].ranks
            ports: dict[Hop, Fraction] = defaultdict(Fraction)
            for other, weight in out.items():
                for (lane, there), part in told[place, other].out.items():
                    ports[ranks[lane], there] += weight * part
            for other, weight in into.items():
                for (lane, there), part in told[other, place].into.items():
                    ports[there, ranks[lane]] += weight * part
            loads += [(load / self._rates[hop], load, hop) for hop, load in ports.items()]
        if not loads:
            return None
        _, load, (tail, head) = max(loads)
        return Busiest(load, self._rates[tail, head], (self._name(tail), self._name(head)))

    def access(self, host: int) -> tuple[Fraction, Fraction]:
        """GB/s of all links between a host and the network: out of it, and into it."""
        out, into = (
            sum((rate for lane in sides[host] for _, rate in lane), Fraction(0))
            for sides in (self._out, self._into)
        )
        return out, into

    def cut(self, places: Collection[int]) -> tuple[Fraction, Fraction]:
        """GB/s out of the hosts of some places with the switches nearest to them, and into these.

        Whatever goes from one of them to another host passes the first, whatever comes back the second.
        """
        near = self._nearness(places)
        far = self._nearness([place for place in range(len(self.of_place)) if place not in places])
        inside = {vertex for vertex, steps in near.items() if steps < far.get(vertex, inf)}
        inside |= {rank for p in places for host in self.of_place[p] for rank in self.hosts[host].ranks}
        out = into = Fraction(0)
        for tail, head in self._links:
            if (tail in inside) != (head in inside):
                rate = self._rates[tail, head]
                out += rate * (tail in inside)
                into += rate * (head in inside)
        return out, into

    # --- the graph ----------------------------------------------------------------------------------------

    def _through_switches(self) -> Iterable[Hop]:
        """All links that lead to other hosts; one from host to host passes a switch of its own."""
        reached = self._hosts_reached()
        fresh = self.topology.size
        for link in self.topology.links:
            src, dst = self._owner.get(link.src), self._owner.get(link.dst)
            if src is not None and dst is not None:
                if src != dst:
                    self._names[fresh] = f"cable {self._name(link.src)}-{self._name(link.dst)}"
                    yield from (
                        self._add(link.src, fresh, link.bandwidth),
                        self._add(fresh, link.dst, link.bandwidth),
                    )
                    fresh += 1
                continue
            switches = [v for v in (link.src, link.dst) if self.topology.is_switch(v)]
            passes = not any(v < self.topology.ranks and v not in self._owner for v in (link.src, link.dst))
            if passes and any(len(reached[switch]) > 1 for switch in switches):
                yield self._add(link.src, link.dst, link.bandwidth)

    def _add(self, tail: Vertex, head: Vertex, rate: Fraction) -> Hop:
        self._heads[tail].append(head)
        self._tails[head].append(tail)
        self._rates[tail, head] = rate
        return tail, head

    def _hosts_reached(self) -> dict[Vertex, set[int]]:
        """For each switch the hosts that it is joined to by switches, whichever way links lead."""
        switches = range(self.topology.ranks, self.topology.size)
        graph, beside = networkx.empty_graph(switches), defaultdict[Vertex, set[int]](set)
        for link in self.topology.links:
            for one, other in ((link.src, link.dst), (link.dst, link.src)):
                if one in switches and other in switches:
                    graph.add_edge(one, other)
                elif one in switches and other in self._owner:
                    beside[one].add(self._owner[other])
        reached: dict[Vertex, set[int]] = {}
        for joined in networkx.connected_components(graph):
            reached |= dict.fromkeys(joined, set().union(*(beside[switch] for switch in joined)))
        return reached

    def _side(self, host: Host, rank: int, outward: bool) -> Sight:
        there = (self._heads if outward else self._tails)[rank]
        return tuple(sorted((v, self._rates[(rank, v) if outward else (v, rank)]) for v in there))

    def _name(self, vertex: Vertex) -> str:
        if vertex in self._owner:
            host = self.hosts[self._owner[vertex]]
            return f"{host.name}:{host.ranks.index(vertex)}" if len(host.ranks) > 1 else host.name
        return self._names.get(vertex) or str(self.topology.label(vertex))

    def _nearness(self, places: Iterable[int]) -> dict[Vertex, int]:
        hosts = (self.of_place[place][0] for place in places)
        return self._steps_from(frozenset(v for host in hosts for lane in self._into[host] for v, _ in lane))

    def _steps_from(self, tails: frozenset[Vertex]) -> dict[Vertex, int]:
        """Links on a shortest way through switches to what these switches lead to."""
        if tails not in self._steps:
            steps = dict.fromkeys(tails, 1)
            queue = deque(tails)
            while queue:
                here = queue.popleft()
                for tail in self._tails[here]:
                    if tail not in steps and tail not in self._owner:
                        steps[tail] = steps[here] + 1
                        queue.append(tail)
            self._steps[tails] = steps
        return self._steps[tails]

    def _reach(self, lane: Sight, end: Sight) -> int | None:
        steps = self._steps_from(frozenset(vertex for vertex, _ in end))
        return min((steps[vertex] + 1 for vertex, _ in lane if vertex in steps), default=None)

    def _spread(self, src: int, dst: int) -> PathLoad | None:
        """Lane i to lane i, as often as the host with more lanes has them; else from each to the nearest."""
        ours = [number for number, lane in enumerate(self._out[src]) if lane]
        theirs = [number for number, lane in enumerate(self._into[dst]) if lane]
        if not ours or not theirs:
            return None
        count = max(len(ours), len(theirs))
        pairs = [(ours[i % len(ours)], theirs[i % len(theirs)]) for i in range(count)]
        reach = {
            (one, other): self._reach(self._out[src][one], self._into[dst][other])
            for one in ours
            for other in theirs
        }
        if any(reach[pair] is None for pair in pairs):
            ways = [[(reach[one, other], other) for other in theirs if reach[one, other]] for one in ours]
            pairs = [(one, min(found)[1]) for one, found in zip(ours, ways, strict=True) if found]
        if not pairs:
            return None
        message = PathLoad(defaultdict(Fraction), defaultdict(Fraction), defaultdict(Fraction))
        for one, other in pairs:
            self._flow(src, one, dst, other, Fraction(1, len(pairs)), message)
        return message

    def _flow(self, src: int, lane: int, dst: int, end: int, amount: Fraction, message: PathLoad) -> None:
        steps = self._steps_from(frozenset(vertex for vertex, _ in self._into[dst][end]))
        left = self._reach(self._out[src][lane], self._into[dst][end])
        assert left is not None
        front: dict[Vertex, Fraction] = {}
        heads = [vertex for vertex, _ in self._out[src][lane] if steps.get(vertex) == left - 1]
        for head in heads:
            message.out[lane, head] += amount / len(heads)
            front[head] = amount / len(heads)
        for next_ in range(left - 2, 0, -1):
            onward: dict[Vertex, Fraction] = defaultdict(Fraction)
            for here, held in front.items():
                heads = [v for v in self._heads[here] if steps.get(v) == next_]
                for head in heads:
                    message.inner[here, head] += held / len(heads)
                    onward[head] += held / len(heads)
            front = onward
        for here, held in front.items():
            message.into[end, here] += held

"""What a topology becomes: addresses, wires with their rates, and the routes between all vertices.

Nothing here touches the machine. A wire is one pair of virtual devices, which joins two vertices and carries
the link of each direction. Packets between vertices that share no wire are forwarded, through switches where
that is possible, else through ranks, as a vendor's library does on a machine that has no such link. Several
cables of two ranks are a wire each, of which packets take the fastest where wires are no cables.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from arborcast.synth.errors import InputError
from arborcast.synth.schedule import Schedule
from arborcast.synth.topology import Link, Topology, Vertex

RETURN_SHARE = Fraction(1, 10)
"""Of a link's rate that the way back of a wire gets where no link goes back: acknowledgements need one."""

MOST_VERTICES = 64
"""More namespaces than that would share two handfuls of cores."""


@dataclass(frozen=True, slots=True)
class Wire:
    """A pair of devices.

    Attributes:
        ends: the two vertices, the lower first.
        bits_per_s: rate out of the first end, and out of the second.
        links: whether the topology has the link of that direction.
    """

    ends: tuple[Vertex, Vertex]
    bits_per_s: tuple[int, int]
    links: tuple[bool, bool]


@dataclass(frozen=True)
class EmulationPlan:
    """Everything to be set up, as values.

    Attributes:
        topology: what is emulated.
        scale: bits per second on a wire for each GB/s of the topology.
        wires: by number; device `w<number>` at both ends.
        next_hop: of (vertex, target), the vertex that packets are handed to.
    """

    topology: Topology
    scale: Fraction
    wires: tuple[Wire, ...]
    next_hop: dict[tuple[Vertex, Vertex], Vertex]

    @staticmethod
    def address(vertex: Vertex) -> str:
        """Of a vertex."""
        return f"10.99.{vertex // 250}.{vertex % 250 + 1}"

    @staticmethod
    def ends(number: int) -> tuple[str, str]:
        """Where the two ends of a wire are reached if it is a cable, which has a subnet of its own."""
        return f"10.1.{number}.1", f"10.1.{number}.2"

    @property
    def cabled(self) -> Topology:
        """The topology with these addresses on its links, all of which must join two ranks."""
        links = []
        for link in self.topology.links:
            cables = []
            for cable, number in zip(link.cables, self.wires_of[link.src, link.dst], strict=True):
                first, second = self.ends(number)
                ends = (first, second) if link.src < link.dst else (second, first)
                cables.append(replace(cable, addresses=ends))
            links.append(Link.bundle(cables))
        return replace(self.topology, links=tuple(links), symmetries=())

    @cached_property
    def wires_of(self) -> dict[tuple[Vertex, Vertex], tuple[int, ...]]:
        """The numbers of the wires that join two vertices, in both orders."""
        found: dict[tuple[Vertex, Vertex], tuple[int, ...]] = {}
        for number, wire in enumerate(self.wires):
            numbers = (*found.get(wire.ends, ()), number)
            found[wire.ends] = found[wire.ends[::-1]] = numbers
        return found

    @cached_property
    def wire_of(self) -> dict[tuple[Vertex, Vertex], int]:
        """The fastest of them."""
        return {
            (src, dst): max(numbers, key=lambda number: self.wires[number].bits_per_s[src > dst])
            for (src, dst), numbers in self.wires_of.items()
        }

    def rates(self, src: Vertex, dst: Vertex) -> list[int]:
        """Bits per second of each wire between two vertices in one direction."""
        return [self.wires[number].bits_per_s[src > dst] for number in self.wires_of[src, dst]]

    def rate(self, src: Vertex, dst: Vertex) -> int:
        """Bits per second of all of them together."""
        return sum(self.rates(src, dst))

    def path(self, src: Vertex, dst: Vertex) -> tuple[Vertex, ...]:
        """The vertices that packets pass, both ends included."""
        path = [src]
        while path[-1] != dst:
            path.append(self.next_hop[path[-1], dst])
        return tuple(path)

    def strays(self, schedule: Schedule) -> tuple[str, ...]:
        """Transfers of a schedule that would take another way than it says, each in words.

        Addresses know one way between two ranks; a schedule may use several ways through switches.
        """
        found = {}
        for transfer in schedule.transfers:
            ends = (transfer.src, transfer.dst)
            said = (transfer.src, *transfer.via, transfer.dst)
            if ends not in found and self.path(*ends) != said:
                found[ends] = f"{ends[0]} -> {ends[1]} goes by {self.path(*ends)}, not by {said}"
        return tuple(found.values())


def plan_emulation(topology: Topology, slowest_mbit: Fraction | int) -> EmulationPlan:
    """The namespaces and wires of a topology.

    Args:
        topology: what to emulate; of one-way links the way back carries `RETURN_SHARE`, for acknowledgements.
        slowest_mbit: Mbit/s of the slowest cable; the others are in proportion.

    Raises:
        InputError: too many vertices, a rate that is not positive, or ranks that cannot reach each other.
    """
    if topology.size > MOST_VERTICES:
        raise InputError(
            f"{topology.name}: at most {MOST_VERTICES} ranks and switches can be had, got {topology.size}"
        )
    if not topology.links:
        raise InputError(f"{topology.name}: must have links to be emulated, and has none")
    if slowest_mbit <= 0:
        raise InputError(f"rate {slowest_mbit}: must be a positive number of Mbit/s")
    scale = Fraction(slowest_mbit) * 10**6 / min(link.bandwidth for link in topology.cables)
    return EmulationPlan(topology, scale, _wires(topology, scale), _routes(topology))


def at_rates(topology: Topology, slowest_mbit: Fraction | int) -> Topology:
    """The topology with the rates that its emulation has, in GB/s as ever.

    What depends on how fast links are, as the number of pieces, is to be decided on this one.

    Args:
        topology: what is emulated.
        slowest_mbit: Mbit/s of the slowest cable; the others are in proportion.
    """
    slowest = min((link.bandwidth for link in topology.cables), default=Fraction(1))
    factor = Fraction(slowest_mbit, 8000) / slowest
    return Topology.build(
        topology.name,
        topology.ranks,
        (replace(link, bandwidth=link.bandwidth * factor) for link in topology.links),
        topology.switches,
        topology.symmetries,
    )


def _wires(topology: Topology, scale: Fraction) -> tuple[Wire, ...]:
    wires = []
    links = {(link.src, link.dst): link for link in topology.links}
    for first, second in sorted({(min(pair), max(pair)) for pair in links}):
        ways = links.get((first, second)), links.get((second, first))
        either = next(link for link in ways if link is not None)
        for lane, cable in enumerate(either.cables):
            back_only = cable.bandwidth * RETURN_SHARE
            rates = [back_only if it is None else it.cables[lane].bandwidth for it in ways]
            out, back = (int(scale * rate) for rate in rates)
            wires.append(Wire((first, second), (out, back), (ways[0] is not None, ways[1] is not None)))
    return tuple(wires)


def _routes(topology: Topology) -> dict[tuple[Vertex, Vertex], Vertex]:
    """By target: least ranks on the way, then least links, then the widest, then the lowest numbers."""
    back: dict[Vertex, list[tuple[Vertex, Fraction]]] = {}
    for (src, dst), bandwidth in topology.bandwidth.items():
        back.setdefault(dst, []).append((src, bandwidth))
        if (dst, src) not in topology.bandwidth:  # the way back of a one-way link, for acknowledgements only
            back.setdefault(src, []).append((dst, Fraction(0)))
    found = {}
    for target in range(topology.size):
        costs = _costs_to(topology, target, back)
        for vertex, (_, hop) in costs.items():
            found[vertex, target] = hop
        missing = [rank for rank in range(topology.ranks) if rank != target and rank not in costs]
        if missing and target < topology.ranks:
            raise InputError(f"{topology.name}: rank {missing[0]} has no way to rank {target}")
    return found


_Cost = tuple[int, int, int, Fraction]


def _costs_to(
    topology: Topology, target: Vertex, back: dict[Vertex, list[tuple[Vertex, Fraction]]]
) -> dict[Vertex, tuple[_Cost, Vertex]]:
    """Of each vertex that can reach the target, the cost and the next vertex on the way."""
    widest = max(topology.bandwidth.values())
    settled: dict[Vertex, tuple[_Cost, Vertex]] = {}
    heap: list[tuple[_Cost, Vertex, Vertex]] = [((0, 0, 0, -widest), target, target)]
    while heap:
        cost, vertex, hop = heapq.heappop(heap)
        if vertex in settled:
            continue
        settled[vertex] = cost, hop
        ghosts, relays, hops, width = cost
        relays += vertex != target and vertex < topology.ranks
        for before, bandwidth in back.get(vertex, []):
            if before not in settled:
                through = -bandwidth if bandwidth else width
                step = (ghosts + (not bandwidth), relays, hops + 1, max(width, through))
                heapq.heappush(heap, (step, before, vertex))
    del settled[target]
    return settled

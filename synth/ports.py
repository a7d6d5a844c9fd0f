"""Streams as a graph: where a rank cannot use all of its links at once, what it sends passes a port.

With k streams at most the k fastest links out of a rank are busy at once (and as many into it). So all that
it sends may as well pass a switch that only forwards, over a link as fast as these k together:

    0 --> [0 sends] --> [1 receives] --> 1
               `------> [2 receives] --> 2

What limits this graph limits every schedule that keeps to the streams, in rate and in time: limits and their
certificates are about it, and name its ports. What is found on it becomes a schedule of the fabric by leaving
them out. Where the links of a rank are alike, the graph says all that there is to say of loads: any that fit
are a sum of steps in which no rank has more than k messages (a bipartite graph of degree k has k matchings,
Koenig 1916). Where they differ, a message over a slow one holds its stream for longer than its port is busy;
the rate of a schedule counts that (`Schedule.held`), the limit does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from heapq import nlargest
from math import ceil
from typing import TYPE_CHECKING

from arborcast.synth.topology import Link, Switch, Topology, Vertex

if TYPE_CHECKING:
    from arborcast.synth.schedule import Schedule
    from arborcast.synth.transfers import Transfer


@dataclass(frozen=True)
class Ports:
    """A topology beside its graph with ports.

    Attributes:
        topology: whose ranks may have streams.
        fabric: the same without streams; ports come after all other switches.
        out: of each rank that cannot use all of its links out at once, the port.
        into: the same of its links in.
    """

    topology: Topology
    fabric: Topology
    out: Mapping[Vertex, Vertex]
    into: Mapping[Vertex, Vertex]

    @classmethod
    def of(cls, topology: Topology) -> Ports:
        """The graph, in time linear in the links."""
        leaving: dict[Vertex, list[Fraction]] = {}
        entering: dict[Vertex, list[Fraction]] = {}
        for link in topology.links:
            leaving.setdefault(link.src, []).append(link.bandwidth)
            entering.setdefault(link.dst, []).append(link.bandwidth)
        names = [switch.name for switch in topology.switches]
        links: list[Link] = []
        ports: dict[str, dict[Vertex, Vertex]] = {"sends": {}, "receives": {}}
        for what, rates_of in (("sends", leaving), ("receives", entering)):
            for rank, count in enumerate(topology.streams):
                rates = rates_of.get(rank, [])
                if count is None or count >= len(rates):
                    continue
                port = ports[what][rank] = topology.ranks + len(names)
                names.append(_free(f"{rank} {what}", names))
                ends = (rank, port) if what == "sends" else (port, rank)
                links.append(Link(*ends, sum(nlargest(count, rates), Fraction(0))))
        out, into = ports["sends"], ports["receives"]
        links += (
            replace(link, src=out.get(link.src, link.src), dst=into.get(link.dst, link.dst))
            for link in topology.links
        )
        fabric = Topology(
            topology.name,
            topology.ranks,
            tuple(sorted(links, key=lambda link: (link.src, link.dst))),
            (*topology.switches, *map(Switch, names[len(topology.switches) :])),
            tuple(_with_ports(images, (out, into), (out, into)) for images in topology.symmetries),
            topology.message_us,
        )
        return cls(topology, fabric, out, into)

    def lift(self, found: Schedule) -> Schedule:
        """A schedule of the graph as one of the fabric; rate and rounds count how long streams are held."""
        size = self.topology.size
        lifted = replace(
            found,
            topology=self.topology,
            transfers=tuple(
                replace(move, via=tuple(vertex for vertex in move.via if vertex < size))
                for move in found.transfers
            ),
        )
        if found.rounds is not None:
            moves: dict[int, list[Transfer]] = {}
            for move in lifted.transfers:
                moves.setdefault(move.step, []).append(move)
            # So many rounds are a second for each GB of the buffer.
            rounds = (found.unit or self.topology.bandwidth_unit) / found.chunks[0].share
            held = (lifted.held(moves.get(step, ())).values() for step in range(len(found.rounds)))
            needed = (ceil(rounds * max(times, default=0)) for times in held)
            lifted = replace(lifted, rounds=tuple(map(max, found.rounds, needed)))
        return lifted.rated()


def ported(topology: Topology) -> Topology:
    """The graph that limits are about: itself where no rank has streams."""
    return Ports.of(topology).fabric if topology.streams else topology


def ported_alike(
    before: Topology, after: Topology, images: Sequence[Vertex]
) -> tuple[Topology, Topology, Sequence[Vertex]]:
    """The graphs of two topologies that are the same by renumbering, and the images of ports among them."""
    if not before.streams:
        return before, after, images
    one, other = Ports.of(before), Ports.of(after)
    return one.fabric, other.fabric, _with_ports(images, (one.out, one.into), (other.out, other.into))


def _with_ports(
    images: Sequence[Vertex],
    before: tuple[Mapping[Vertex, Vertex], ...],
    after: tuple[Mapping[Vertex, Vertex], ...],
) -> tuple[Vertex, ...]:
    """The images of all vertices: a port goes where its rank does."""
    moved = {
        port: theirs[images[rank]]
        for mine, theirs in zip(before, after, strict=True)
        for rank, port in mine.items()
    }
    return (*images, *(moved[port] for port in sorted(moved)))


def _free(name: str, taken: Sequence[str]) -> str:
    """The name, or with as many dashes behind it as it takes to be nobody's."""
    while name in taken:
        name += "-"
    return name

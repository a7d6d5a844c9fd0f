"""What is left of a topology when links fail, links slow down and ranks are gone.

The first step of every repair: a `Faulty` holds the topology that is left and says which vertex of the
healthy one each of its vertices was, so that what is known of the healthy one can be carried over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from arborcast.synth.errors import TopologyError
from arborcast.synth.topology import Hop, Topology, Vertex

_NAMED = 3  # faults that the name of a topology lists
_ENDS = 8  # ends of links that an error lists


@dataclass(frozen=True)
class Faulty:
    """A topology with faults.

    Attributes:
        healthy: the topology before.
        topology: what is left: ranks renumbered 0, 1, 2... in their order, switches under their names.
        kept: the healthy vertex behind each vertex of `topology`.
    """

    healthy: Topology
    topology: Topology
    kept: tuple[Vertex, ...]

    @cached_property
    def number(self) -> dict[Vertex, Vertex]:
        """For each healthy vertex that is left, its number now."""
        return {before: now for now, before in enumerate(self.kept)}


def left_of(fabric: Topology | Faulty) -> Topology:
    """The topology of a fabric that may have faults."""
    return fabric.topology if isinstance(fabric, Faulty) else fabric


def without(
    topology: Topology,
    *,
    links: Iterable[Hop | str] = (),
    ranks: Iterable[int] = (),
    slower: Mapping[Hop, Fraction] | None = None,
) -> Faulty:
    """The topology without some links and ranks.

    Args:
        topology: the healthy one.
        links: pairs of vertices, or text as `parse_link` reads it; links of both directions go.
        ranks: these, with all their links. Switches that lead nowhere any more go too.
        slower: what links of one direction still carry, GB/s; at most what they did.

    Returns:
        What is left. Declared symmetries that move a fault are dropped.

    Raises:
        TopologyError: a link or rank that there is not, or that is named twice; a bandwidth out of its range;
            or no rank is left.

    Examples:
        >>> left = synth.without(topologies.load("ring:4"), links=["0-1"])
        >>> synth.bound(left.topology, "allreduce").rate
        Fraction(1, 1)
    """
    slower = {} if slower is None else slower
    gone = _gone_links(topology, links)
    lost = list(ranks)
    if lost:
        topology.check_ranks(lost)
    for hop, rate in slower.items():
        _check_slower(topology, hop, rate, gone)
    faults = [_text(topology, hop) for hop in gone] + [f"rank {rank}" for rank in lost]
    faults += [f"full {_text(topology, hop, '->')}" for hop in slower]
    closed = {*gone, *((dst, src) for src, dst in gone)}
    for vertex, (link, *_) in topology.parallels.items():  # slower links beside one that is gone go with it
        if (link.src, link.dst) in closed:
            closed |= {way for end in (link.src, link.dst) for way in ((vertex, end), (end, vertex))}
    left = replace(
        topology,
        links=tuple(
            replace(link, bandwidth=slower.get((link.src, link.dst), link.bandwidth))
            for link in topology.links
            if (link.src, link.dst) not in closed
        ),
        symmetries=tuple(
            images
            for images in topology.symmetries
            if {(images[src], images[dst]) for src, dst in closed} == closed
            and all(slower.get((images[src], images[dst])) == rate for (src, dst), rate in slower.items())
        ),
    )
    kept = [rank for rank in range(topology.ranks) if rank not in lost]
    if not kept:
        raise TopologyError(f"topology {topology.name}: no rank is left without all {topology.ranks}")
    left = left.subset(kept)
    return Faulty(topology, replace(left, name=_name(topology, faults)), _origins(topology, left, kept))


def _origins(topology: Topology, left: Topology, kept: Sequence[int]) -> tuple[Vertex, ...]:
    """The vertex of the whole topology that each vertex of what is left was."""
    numbers = {switch.name: vertex for vertex, switch in enumerate(topology.switches, topology.ranks)}
    named = range(left.ranks, left.size - len(left.parallels))
    found = [*kept, *(numbers[str(left.label(vertex))] for vertex in named)]
    beside = {
        (frozenset((link.src, link.dst)), link.latency_us): vertex
        for vertex, (link, *_) in topology.parallels.items()
    }
    for link, *_ in left.parallels.values():  # they are called by the new numbers of their ends
        found.append(beside[frozenset((found[link.src], found[link.dst])), link.latency_us])
    return tuple(found)


def parse_link(topology: Topology, text: str) -> Hop:
    """The vertices of a link from "A-B": rank numbers or names of switches, which may hold dashes.

    Raises:
        TopologyError: no such link in either direction, or the text can be read in two ways.
    """
    readings = []
    for place, letter in enumerate(text):
        if letter == "-":
            ends = (_vertex(topology, text[:place]), _vertex(topology, text[place + 1 :]))
            if None not in ends:
                readings.append(ends)
    if not readings:
        raise TopologyError(
            f"link {text!r}: must be two ranks in 0..{topology.ranks - 1} or names of switches with a dash "
            f"between them, as in 0-{_example(topology)}"
        )
    found = [(a, b) for a, b in readings if a is not None and b is not None and _joined(topology, (a, b))]
    if len(found) > 1:
        raise TopologyError(f"link {text!r}: can be read as {len(found)} links of {topology.name}")
    if not found:
        a, b = (end for end in readings[0] if end is not None)
        raise TopologyError(f"link {text!r}: {_no_such_link(topology, (a, b))}")
    return found[0]


def _vertex(topology: Topology, text: str) -> Vertex | None:
    """A rank by its number or a switch by its name; numbers are ranks."""
    text = text.strip()
    if text.isascii() and text.isdigit() and int(text) < topology.ranks:
        return int(text)
    names = {switch.name: place for place, switch in enumerate(topology.switches, topology.ranks)}
    return names.get(text)


def _example(topology: Topology) -> int | str:
    return next((topology.label(link.dst) for link in topology.links if link.src == 0), 1)


def _joined(topology: Topology, hop: Hop) -> bool:
    return hop in topology.bandwidth or hop[::-1] in topology.bandwidth


def _no_such_link(topology: Topology, hop: Hop) -> str:
    """What is wrong, and where the first end does lead: which rail a rank is on is easily mistaken."""
    first = hop[0]
    if not 0 <= first < topology.size:
        return f"{topology.name} has no such link"
    far = [link.dst for link in topology.links if link.src == first]
    far += [link.src for link in topology.links if link.dst == first]
    names = [str(topology.label(end)) for end in dict.fromkeys(far)]
    more = f" and {len(names) - _ENDS} more" if len(names) > _ENDS else ""
    where = f"to {', '.join(names[:_ENDS])}{more}" if names else "nowhere"
    return f"{topology.name} has no such link, {topology.label(first)} is linked {where}"


def _gone_links(topology: Topology, links: Iterable[Hop | str]) -> list[Hop]:
    gone: list[Hop] = []
    for link in links:
        hop = parse_link(topology, link) if isinstance(link, str) else (link[0], link[1])
        if not _joined(topology, hop):
            raise TopologyError(f"link {_text(topology, hop)}: {_no_such_link(topology, hop)}")
        if hop in gone or hop[::-1] in gone:
            raise TopologyError(f"link {_text(topology, hop)}: must be named once, got it twice")
        gone.append(hop)
    return gone


def _check_slower(topology: Topology, hop: Hop, rate: Fraction, gone: Sequence[Hop]) -> None:
    shown = _text(topology, hop, "->")
    if hop not in topology.bandwidth:
        raise TopologyError(f"link {shown}: {topology.name} has no such link")
    if hop in gone or hop[::-1] in gone:
        raise TopologyError(f"link {shown}: cannot be both gone and slower")
    if not 0 < rate <= topology.bandwidth[hop]:
        raise TopologyError(
            f"link {shown}: what is left must be positive and at most {topology.bandwidth[hop]} GB/s, "
            f"got {rate}"
        )


def _text(topology: Topology, hop: Hop, dash: str = "-") -> str:
    return dash.join(str(topology.label(end) if 0 <= end < topology.size else end) for end in hop)


def _name(topology: Topology, faults: Sequence[str]) -> str:
    if not faults:
        return topology.name
    more = f" and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
    return f"{topology.name} without {', '.join(faults[:_NAMED])}{more}"

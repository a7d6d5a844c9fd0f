"""The least time that a certificate of a rate proves: a link carries nothing of use at first and at the end.

What passes a link of use comes from a rank that has something to give and goes on to one that lacks it. With
`w` = latencies from the nearest such rank to the link, over it, and on to the nearest such rank, the link is
of use for at most T - w of a run of T microseconds. A certificate gives each link a length y and says that
lengths times bytes add up to at least d for each byte of the buffer (1 on the links out of a cut; 1 between
the sets of a partition), hence

    sum over links of  y * bandwidth * max(0, T - w)  >=  d * bytes.

The left side is the largest over all sets of links of what they carry by T, so that T is the least of as
many lines; only links in ascending order of w matter. The line of all links rises by 1 / rate a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from itertools import groupby
from typing import TypeVar

from arborcast.synth.certificate import Certificate, Cut, Dual, Partition
from arborcast.synth.certification.proven_rates import share_leaving
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.ports import ported
from arborcast.synth.topology import Topology, Vertex

Wait = TypeVar("Wait", int, Fraction)


@dataclass(frozen=True, slots=True)
class Line:
    """A time of `latency_us` and `us_per_byte` for each byte of the buffer."""

    latency_us: Fraction
    us_per_byte: Fraction

    def at(self, size_bytes: int) -> Fraction:
        """Microseconds for a buffer of so many bytes."""
        return self.latency_us + size_bytes * self.us_per_byte


def window_lines(topology: Topology, collective: Collective, certificate: Certificate) -> tuple[Line, ...]:
    """The lines of which no schedule is below all, for a buffer of any size.

    Args:
        topology: the fabric.
        collective: on it.
        certificate: that proves a rate above zero (`certified_rate` accepts it), in the same scope.
    """
    topology = ported(topology)
    sources, targets = sources_and_targets(collective, certificate)
    latencies = [link.latency_us for link in topology.links]
    before = nearest(topology, latencies, sources, turned=False)
    after = nearest(topology, latencies, targets, turned=True)
    lengths, distance = link_lengths(topology, collective, certificate)
    offers = [
        (before[link.src] + link.latency_us + after[link.dst], length * link.bandwidth)
        for link, length in zip(topology.links, lengths, strict=True)
        if length and link.src in before and link.dst in after
    ]
    if isinstance(certificate, Dual):
        offers += [
            (before[switch] + after[switch], price * (topology.switches[switch - topology.ranks].adder or 0))
            for switch, price in zip(topology.limited_adders, certificate.adders, strict=False)
            if price and switch in before and switch in after
        ]
    lines = []
    offered = waiting = Fraction(0)
    for wait_us, together in groupby(sorted(offers), key=lambda offer: offer[0]):
        offer = sum((each for _, each in together), Fraction(0))
        offered += offer
        waiting += offer * wait_us
        lines.append(Line(waiting / offered, distance / offered / 1000))
    return tuple(lines)


def sources_and_targets(
    collective: Collective, certificate: Certificate
) -> tuple[frozenset[Vertex], frozenset[Vertex]]:
    """The ranks that what a certificate counts comes from at the start, and those that it ends at."""
    sources, targets = _ends(collective)
    if isinstance(certificate, Cut):  # counts what comes from inside and goes outside
        return sources & certificate.side, targets - certificate.side
    return sources, targets


def _ends(collective: Collective) -> tuple[frozenset[Vertex], frozenset[Vertex]]:
    """The ranks that have something at the start, and those that want something."""
    if collective.kind is Kind.CUSTOM:
        asked = collective.demands
        return (
            frozenset().union(*(demand.sources for demand in asked)),
            frozenset().union(*(demand.targets for demand in asked)),
        )
    everyone = frozenset(collective.ranks)
    root = everyone if collective.root is None else frozenset({collective.root})
    match collective.kind:
        case Kind.BROADCAST | Kind.SCATTER:
            return root, everyone - root
        case Kind.REDUCE | Kind.GATHER:
            return everyone - root, root
        case _:
            return everyone, everyone


def nearest(
    topology: Topology,
    waits: Sequence[Wait],
    ends: Iterable[Vertex],
    *,
    turned: bool,
    passes: Callable[[Vertex], bool] | None = None,
) -> dict[Vertex, Wait]:
    """The least sum of waits, one per link, from one of some vertices to each, or back (Dijkstra 1959).

    What no way joins is missing; ways lead on from those vertices alone that `passes` is true of, if given.
    """
    leaving: dict[Vertex, list[tuple[Vertex, Wait]]] = {}
    for link, wait in zip(topology.links, waits, strict=True):
        src, dst = (link.dst, link.src) if turned else (link.src, link.dst)
        leaving.setdefault(src, []).append((dst, wait))
    found: dict[Vertex, Wait] = {}
    queue = [(0 * waits[0], end) for end in ends]  # a heap, as all are as near
    while queue:
        far, vertex = heappop(queue)
        if vertex not in found:
            found[vertex] = far
            if passes is None or passes(vertex):
                for onward, wait in leaving.get(vertex, ()):
                    heappush(queue, (far + wait, onward))
    return found


def link_lengths(
    topology: Topology, collective: Collective, certificate: Certificate
) -> tuple[tuple[Fraction, ...], Fraction]:
    """The length of each link, and how far each byte of the buffer must travel."""
    match certificate:
        case Dual(lengths, _, distance):
            return lengths, distance
        case Cut(side):
            leaves = (link.src in side and link.dst not in side for link in topology.links)
            return tuple(map(Fraction, leaves)), share_leaving(collective, side)
        case Partition(blocks):
            block = {vertex: number for number, each in enumerate(blocks) for vertex in each}
            crosses = (block[link.src] != block[link.dst] for link in topology.links)
            return tuple(map(Fraction, crosses)), Fraction(2 * (len(blocks) - 1))

"""Limits where switches reduce or multicast: exact programs over all trees, and parts of large fabrics.

A cut limits whatever switches do. Where trees of a fabric whose switches only forward reach a cut, able
switches add nothing, and that is so more often than one might think:

    Balanced fabrics. Let every switch have as much bandwidth in as out. Splitting off (Bang-Jensen, Frank and
    Jackson 1995) puts a link u -> v in the place of u -> s -> v at a switch s, pair by pair, such that no
    rank can get less from the roots, until nothing is left at s. Then only ranks are left, whose trees reach
    the least cut (Edmonds 1973), and each of the new links is a way through switches. So forwarding reaches
    the cut in a broadcast and an allgather and, turned round, in a reduce and a reduce-scatter. No multicast
    and no sum in a switch is worth anything there. An allreduce needs both directions of the same links:
    no cut says how they share them, and sums in switches are worth up to twice as much.

    A star of n ranks with links of rate 1. Forwarding, each of a tree's n - 1 edges is two links, and a pair
    of trees takes 4 (n - 1) of the 2n that there are: n / (2 (n - 1)), towards 1/2 for many ranks. With a
    switch that turns each rank sends one unit and hears one: 1, as the cut round a rank says. Without turning
    all others send to one rank, the root, which hears their sum, adds its own part and says it to the others
    once: again one unit each way on every link. With loopback the root's part goes up to be summed, too, and
    what it says comes back to it: n + 1 units up and n + 1 down. Lengths of 1 prove n / (n + 1), which is
    2n / (2 (n + 1)), and roots that take turns load all links alike, which reaches it.

Blocks that one rank alone must get (gather, scatter, alltoall) have nothing to add and nobody to copy for:
the limits of forwarding hold and are reached as they are. Those of a custom collective hold, too: no block is
nearer to its farthest target because it is copied on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from arborcast.synth.certificate import Certificate, Cut, Dual, Partition
from arborcast.synth.certification import certified_rate, dual_or_none
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InputError
from arborcast.synth.in_network.steiner_program import solved_steiner_program
from arborcast.synth.topology import Link, Topology, Vertex

EXACT_UP_TO = 16
"""Ranks up to which the program over all trees is solved; of more ranks, parts are."""

LARGEST_PART = 10
"""Ranks of a part up to which that program is solved: a second or two."""

_LARGEST = 2**40  # of the whole numbers that stand for prices: distances are added up in int64

BoundOf = Callable[[Topology, Collective, Deadline], Certificate]


def able_certificates(
    topology: Topology, collective: Collective, deadline: Deadline, known: Fraction, of_part: BoundOf
) -> Iterator[Certificate]:
    """Limits beside cuts of a collective along trees, on a fabric with able switches.

    Args:
        topology: the fabric.
        collective: a broadcast, reduce, allgather, reduce-scatter or allreduce.
        deadline: of each linear program; once it has passed none is worked out.
        known: a limit; parts that reach it where their switches only forward are passed over.
        of_part: the limit of a fabric that is a part of this one.
    """
    if deadline.has_passed:
        return
    if len(collective.ranks) <= EXACT_UP_TO:
        yield from _priced(topology, collective, deadline)
    elif collective.kind in {Kind.ALLREDUCE, Kind.BROADCAST, Kind.REDUCE}:
        yield from _even(topology, collective)
        for part in _parts(topology, collective):
            plain = part.topology.forwarding
            reached = certified_rate(plain, part.collective, of_part(plain, part.collective, deadline))
            if reached >= known and not part.collective.relays(plain):
                continue
            is_small = len(part.collective.ranks) <= LARGEST_PART
            if is_small or plain is part.topology:
                yield part.lifted(topology, of_part(part.topology, part.collective, deadline))
            else:
                for dual in _even(part.topology, part.collective):
                    yield part.lifted(topology, dual)


def _even(topology: Topology, collective: Collective) -> Iterator[Dual]:
    """All links at able switches of one length, all others of none, of the same or of twice that.

    Where many ranks around a switch are alike, these are often the prices of the optimum.
    """
    for other in (0, 1, 2):
        lengths = tuple(
            Fraction(1 if topology.ranks <= max(link.src, link.dst) < topology.holders else other)
            for link in topology.links
        )
        try:
            dual = dual_or_none(topology, collective, lengths)
        except InputError:  # too many ranks are apart that are not alike
            continue
        if dual is not None:
            yield dual


def _priced(topology: Topology, collective: Collective, deadline: Deadline) -> Iterator[Dual]:
    """The prices of the program over all trees, as a certificate."""
    program = solved_steiner_program(topology, collective, deadline)
    if program.limit is None:
        return
    prices = _whole((*program.lengths, *program.adders))
    lengths, adders = prices[: len(topology.links)], prices[len(topology.links) :]
    dual = dual_or_none(topology, collective, lengths, adders if any(adders) else ())
    if dual is not None:
        yield dual


def _whole(prices: tuple[Fraction, ...]) -> tuple[Fraction, ...]:
    """The same proportions in small whole numbers; rounded where these are too large to be added up."""
    scale = math.lcm(*(price.denominator for price in prices))
    whole = [int(price * scale) for price in prices]
    common = math.gcd(*whole) or 1
    largest = max(whole) // common
    if largest > _LARGEST:
        return tuple(Fraction(price * _LARGEST // (common * largest)) for price in whole)
    return tuple(Fraction(price // common) for price in whole)


@dataclass(frozen=True, eq=False)
class _ContractedFabric:
    """A fabric in which sets of vertices are one rank each, which can do anything for nothing.

    Attributes:
        topology: what is left.
        collective: among the ranks that are left.
        images: the vertex of it that each vertex of the whole fabric becomes.
    """

    topology: Topology
    collective: Collective
    images: tuple[Vertex, ...]

    def lifted(self, whole: Topology, certificate: Certificate) -> Certificate:
        """The limit of the part as one of the whole fabric: all within a set is free."""
        match certificate:
            case Cut(side, capacity):
                return Cut(self._held_by(side), capacity)
            case Partition(blocks, capacity):
                return Partition(tuple(map(self._held_by, blocks)), capacity)
            case Dual(lengths, capacity, distance, adders):
                of_link = dict(zip(self.topology.bandwidth, lengths, strict=True))
                of_switch = dict(zip(self.topology.limited_adders, adders, strict=False))
                pairs = ((self.images[link.src], self.images[link.dst]) for link in whole.links)
                prices = tuple(
                    of_switch.get(self.images[vertex], Fraction(0)) for vertex in whole.limited_adders
                )
                return Dual(
                    tuple(of_link.get(pair, Fraction(0)) for pair in pairs),
                    capacity,
                    distance,
                    prices if any(prices) else (),
                )

    def _held_by(self, side: frozenset[Vertex]) -> frozenset[Vertex]:
        return frozenset(vertex for vertex, image in enumerate(self.images) if image in side)


def _parts(topology: Topology, collective: Collective) -> Iterator[_ContractedFabric]:
    """Boxes as single ranks, and each box of its kind with all others as one rank.

    A box is what switches of the same abilities join directly: the ranks of an NVSwitch domain, of a leaf.
    """
    seen = set()
    for family in sorted({switch.abilities for switch in topology.switches}):
        switches = [v for v in range(topology.ranks, topology.size) if topology.abilities(v) == family]
        boxes = _boxes(topology, collective, switches)
        everyone = frozenset(range(topology.size))
        choices = [boxes] if len(boxes) > 1 else []
        choices += [[everyone - box] for box in boxes if collective.members - box]
        for merged in choices:
            part = _merged(topology, collective, merged)
            if part is None or part.topology.ranks >= topology.ranks or part.topology in seen:
                continue
            seen.add(part.topology)
            yield part


def _boxes(topology: Topology, collective: Collective, switches: Sequence[Vertex]) -> list[frozenset[Vertex]]:
    """The sets of ranks and of the given switches that links between them join, with two ranks or more."""
    import networkx

    graph: networkx.Graph[Vertex] = networkx.Graph()
    among = set(switches)
    graph.add_edges_from(
        (link.src, link.dst)
        for link in topology.links
        if (link.src in among) != (link.dst in among) and min(link.src, link.dst) < topology.ranks
    )
    found = map(frozenset, networkx.connected_components(graph))
    return sorted((box for box in found if len(box & collective.members) > 1), key=min)


def _merged(
    topology: Topology, collective: Collective, sets: Sequence[frozenset[Vertex]]
) -> _ContractedFabric | None:
    """Each of the sets as one rank that takes part; None where only one would."""
    head = list(range(topology.size))
    for merged in sets:
        least = min(merged & collective.members)
        for vertex in merged:
            head[vertex] = least
    kept = sorted(set(head))
    number = {vertex: place for place, vertex in enumerate(kept)}
    images = tuple(number[vertex] for vertex in head)
    ranks = sum(vertex < topology.ranks for vertex in kept)
    members = tuple(sorted({images[rank] for rank in collective.ranks}))
    if len(members) < 2:
        return None
    root = None if collective.root is None else images[collective.root]
    links = (
        Link(images[link.src], images[link.dst], link.bandwidth)
        for link in topology.links
        if images[link.src] != images[link.dst]
    )
    switches = [  # names that make parts which are alike equal
        replace(topology.switches[vertex - topology.ranks], name=f"s{place}")
        for place, vertex in enumerate(kept[ranks:])
    ]
    part = Topology.build("part", ranks, links, switches)
    return _ContractedFabric(part, Collective(collective.kind, members, root), images)

"""What a certificate proves, recomputed from the certificate alone and in exact arithmetic.

`certified_rate` is how tests and the verifier check every bound; it knows nothing of how certificates are
found. Everything here is a lower bound on the traffic that a collective causes somewhere, against what the
links offer there.
"""

from __future__ import annotations

from fractions import Fraction

from arborcast.synth.certificate import Certificate, Cut, Dual, Partition, Scope
from arborcast.synth.certification.metric import Metric
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.features import check_features
from arborcast.synth.ports import ported
from arborcast.synth.topology import Topology, Vertex


def certified_rate(topology: Topology, collective: Collective, certificate: Certificate) -> Fraction:
    """The rate that a certificate proves, algbw in GB/s of the whole buffer.

    Args:
        topology: the fabric; ranks outside the collective are relays that may forward, copy and reduce.
        collective: what is limited.
        certificate: what limits it; what it says of itself must agree with the topology.

    Raises:
        InputError: the certificate does not fit or proves nothing.
    """
    check_features(topology, "certificate check")
    topology = ported(topology)
    match certificate:
        case Cut():
            return _rate_of_cut(topology, collective, certificate)
        case Partition():
            return _rate_of_partition(topology, collective, certificate)
        case Dual():
            return _rate_of_dual(topology, collective, certificate)


def certified_scope(topology: Topology, collective: Collective, certificate: Certificate) -> Scope:
    """Over which schedules the rate is proved.

    A dual speaks of every schedule too, with one exception: an allreduce need not follow trees, and only
    where lengths are (nearly) the same both ways do all other schedules travel as far. Then the transfers
    of at least length t number 2 (blocks - 1) or more, where the blocks are the ranks joined by shorter
    ways, and summed over all t that is two minimum spanning trees. Relays and able switches may be in blocks,
    whatever they do there, but none may be apart from all ranks that take part.
    """
    if not isinstance(certificate, Dual) or collective.kind is not Kind.ALLREDUCE:
        return Scope.EVERY_SCHEDULE
    metric = Metric.of(ported(topology), certificate.lengths, certificate.adders)
    tree = metric.undirected_tree(collective)
    if tree is None or Fraction(2 * tree, metric.scale) < certificate.distance:
        return Scope.TREES
    return Scope.EVERY_SCHEDULE


def dual_of(
    topology: Topology,
    collective: Collective,
    lengths: tuple[Fraction, ...],
    adders: tuple[Fraction, ...] = (),
) -> Dual:
    """The certificate that link lengths and prices of adders make: what they offer, and how far data travel.

    Raises:
        InputError: lengths that do not fit the links, are negative, or prove nothing; prices likewise.
    """
    dual = dual_or_none(topology, collective, lengths, adders)
    if dual is None:
        raise InputError(f"dual for {collective.kind}: nothing travels a positive distance")
    return dual


def dual_or_none(
    topology: Topology,
    collective: Collective,
    lengths: tuple[Fraction, ...],
    adders: tuple[Fraction, ...] = (),
) -> Dual | None:
    """As `dual_of`; None where lengths prove nothing, as rounded ones may."""
    distance = Metric.of(topology, lengths, adders).distance(collective)
    capacity = sum(
        (link.bandwidth * length for link, length in zip(topology.links, lengths, strict=True)), Fraction(0)
    )
    limits = [switch.adder for switch in topology.switches if switch.adder is not None]
    capacity += sum((limit * price for limit, price in zip(limits, adders, strict=False)), Fraction(0))
    return Dual(lengths, capacity, distance, adders) if distance > 0 else None


def share_leaving(collective: Collective, side: frozenset[Vertex]) -> Fraction:
    """The least share of the buffer that must leave a set of vertices."""
    count = len(collective.ranks)
    inside = len(side.intersection(collective.ranks))
    outside = count - inside
    rooted = collective.root in side
    share = Fraction(0)
    match collective.kind:
        case Kind.BROADCAST if rooted and outside:
            share = Fraction(1)
        case Kind.REDUCE if not rooted and inside:
            share = Fraction(1)
        case Kind.ALLREDUCE if inside and outside:
            share = Fraction(1)
        case Kind.ALLGATHER if outside:
            share = Fraction(inside, count)
        case Kind.REDUCE_SCATTER if inside:
            share = Fraction(outside, count)
        case Kind.GATHER if not rooted:
            share = Fraction(inside, count)
        case Kind.SCATTER if rooted:
            share = Fraction(outside, count)
        case Kind.ALLTOALL if collective.sizes:
            within = [rank in side for rank in collective.ranks]
            leaving = sum(
                size
                for row, is_sender in zip(collective.sizes, within, strict=True)
                for size, stays in zip(row, within, strict=True)
                if is_sender and not stays
            )
            share = Fraction(leaving * count, collective.total)
        case Kind.ALLTOALL:
            share = Fraction(inside * outside, count)
        case Kind.CUSTOM:
            leaving = sum(
                demand.sources <= side and not demand.targets <= side for demand in collective.demands
            )
            share = Fraction(leaving, len(collective.demands))
    return share


def _rate_of_cut(topology: Topology, collective: Collective, cut: Cut) -> Fraction:
    named = _names(topology, cut.side)
    _check_vertices(topology, cut.side)
    leaving = (link.bandwidth for link in topology.links if link.src in cut.side and link.dst not in cut.side)
    capacity = sum(leaving, Fraction(0))
    if capacity != cut.capacity:
        raise InputError(f"cut {named}: {capacity} GB/s leave it, the certificate says {cut.capacity} GB/s")
    share = share_leaving(collective, cut.side)
    if share == 0:
        raise InputError(f"cut {named}: proves nothing, no data of the {collective.kind} must leave it")
    return capacity / share


def _rate_of_partition(topology: Topology, collective: Collective, partition: Partition) -> Fraction:
    if collective.kind is not Kind.ALLREDUCE:
        raise InputError(f"partition: limits an allreduce, not a {collective.kind}")
    if len(partition.blocks) < 2:
        raise InputError(f"partition: needs at least 2 blocks, got {len(partition.blocks)}")
    block_of: dict[Vertex, int] = {}
    for number, block in enumerate(partition.blocks):
        _check_vertices(topology, block)
        if not block.intersection(collective.ranks):
            raise InputError(f"partition: block {_names(topology, block)} holds no rank that takes part")
        for vertex in block:
            if vertex in block_of:
                raise InputError(f"partition: vertex {topology.label(vertex)} is in two blocks")
            block_of[vertex] = number
    for vertex in range(topology.size):
        if vertex not in block_of:
            raise InputError(f"partition: vertex {topology.label(vertex)} is in no block")
    between = (link.bandwidth for link in topology.links if block_of[link.src] != block_of[link.dst])
    capacity = sum(between, Fraction(0)) / 2
    if capacity != partition.capacity:
        raise InputError(
            f"partition: {capacity} GB/s between its blocks, the certificate says {partition.capacity} GB/s"
        )
    return capacity / (len(partition.blocks) - 1)


def _rate_of_dual(topology: Topology, collective: Collective, dual: Dual) -> Fraction:
    found = dual_of(topology, collective, dual.lengths, dual.adders)
    if (found.capacity, found.distance) != (dual.capacity, dual.distance):
        raise InputError(
            f"dual: capacity {found.capacity} and distance {found.distance} by its lengths, "
            f"the certificate says {dual.capacity} and {dual.distance}"
        )
    return found.capacity / found.distance


def _check_vertices(topology: Topology, vertices: frozenset[Vertex]) -> None:
    for vertex in vertices:
        if not 0 <= vertex < topology.size:
            raise InputError(f"certificate: vertex must be in 0..{topology.size - 1}, got {vertex}")


def _names(topology: Topology, vertices: frozenset[Vertex]) -> str:
    listed = [str(topology.label(v)) if 0 <= v < topology.size else str(v) for v in sorted(vertices)]
    return "{" + ", ".join(listed[:6]) + (", ..." if len(listed) > 6 else "") + "}"

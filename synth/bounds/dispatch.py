"""How fast a collective can be on a topology, exactly, with the certificate that proves it.

Out-trees are limited by cuts (broadcast, allgather), and so are flows (gather); reduce, reduce-scatter and
scatter are their mirror images on the reversed topology. Switches that cannot send on all they receive
need link lengths instead of a cut, an allreduce is limited by a partition of the ranks or by lengths, an
alltoall by lengths, a custom collective by a cut or by lengths. Switches that reduce or multicast have limits
of their own (`synth.in_network.switch_limits`), where forwarding does not reach a cut. Every rate is
recomputed from its certificate before it is returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import partial

from arborcast.synth.bounds.cuts import cut_out_of, orbit_lengths, tightest_cut
from arborcast.synth.bounds.root_demands import (
    LARGEST_TWO_WAY,
    is_connected,
    root_demands_of,
    side_lengths,
    symmetric_part,
)
from arborcast.synth.bounds.strength import strength
from arborcast.synth.bounds.switch_balance import sufficient_part
from arborcast.synth.certificate import Bound, Certificate, Cut, Dual
from arborcast.synth.certification import certified_rate, certified_scope, dual_of, dual_or_none
from arborcast.synth.certification.proven_rates import share_leaving
from arborcast.synth.certification.steiner import MOST_APART
from arborcast.synth.collective import TREE_KINDS, Collective, Kind
from arborcast.synth.deadline import NO_DEADLINE, Deadline, LastAnswers
from arborcast.synth.features import check_features
from arborcast.synth.ports import ported
from arborcast.synth.topology import Topology

_MIRRORED = {
    Kind.REDUCE: Kind.BROADCAST,
    Kind.REDUCE_SCATTER: Kind.ALLGATHER,
    Kind.SCATTER: Kind.GATHER,
}

_FINEST = 2**30
"""Lengths with a larger common denominator are rounded: distances are added up in int64."""

_answers: LastAnswers[Bound] = LastAnswers(8)  # a comparison asks about the same fabric in every method


def bound(topology: Topology, collective: Collective, deadline: Deadline = NO_DEADLINE) -> Bound:
    """The proven limit of a collective's rate, algbw in GB/s of the whole buffer.

    Exact (some schedule reaches it) without relays: for trees by Edmonds 1973 and Bang-Jensen, Frank,
    Jackson 1995, for an allreduce among schedules along trees, for gather and scatter always, for an
    alltoall unless its lengths had to be rounded, which beyond 600 orbits of links and ranks they are
    (`synth.bounds.routing_trees`). Prices of a linear program with a common denominator beyond 2**30 are
    rounded, which loosens the limit by as little and keeps it valid. With relays it is a limit that need
    not be reached: finding the best trees that may leave vertices out is NP-hard, and an allreduce among more
    than `MOST_APART` ranks has only its cut. The limit of a custom collective is as exact as that of an
    alltoall where every block has one target, and need not be reached elsewhere. With able switches a cut
    that forwarding reaches is exact, and so is what up to `in_network.limits.EXACT_UP_TO` ranks reach along
    trees; among more ranks it is the least limit of parts of the fabric, which need not be reached.

    Where ranks have streams, all of this is said of the graph with ports (`synth.ports`), whose limits hold
    for every schedule that keeps to the streams.

    Args:
        topology: the fabric; ranks outside the collective are relays that may forward, copy and reduce.
        collective: what is asked of it.
        deadline: of the linear program of an alltoall, a custom collective or one through able switches;
            without its answer the limit is looser.

    Returns:
        Rate zero with a cut that nothing leaves where the ranks are not connected.

    Raises:
        CollectiveError: the collective does not fit the topology.
        TopologyError: bandwidths too fine for exact int64 arithmetic.
        ArithmeticError: HiGHS fails on the linear program.
    """
    collective.check(topology)
    check_features(topology, "bound")
    topology = ported(topology)

    def work_out() -> Bound:
        found = _best(topology, collective, deadline)
        rate = certified_rate(topology, collective, found)
        return Bound(rate, found, certified_scope(topology, collective, found))

    return _answers.of((topology, collective), deadline, work_out)


def _best(topology: Topology, collective: Collective, deadline: Deadline) -> Certificate:
    if topology.holders > topology.ranks and collective.kind in TREE_KINDS:
        return _of_able_switches(topology, collective, deadline)
    return _turned_to_spread(topology, collective, partial(_certificate, deadline=deadline))


def _turned_to_spread(
    topology: Topology, collective: Collective, limit: Callable[[Topology, Collective], Certificate]
) -> Certificate:
    """A limit of what spreads or gathers, of other kinds through their image on the reversed topology."""
    if collective.kind not in _MIRRORED:
        return limit(topology, collective)
    mirrored = topology.reversed()
    there = Collective(_MIRRORED[collective.kind], collective.ranks, collective.root)
    return _mirror(topology, mirrored, limit(mirrored, there))


def _of_able_switches(topology: Topology, collective: Collective, deadline: Deadline) -> Certificate:
    """The cut that limits switches which only forward, too; else the least of what limits able ones."""
    from arborcast.synth.in_network.switch_limits import able_certificates

    forwarding = _best(topology.forwarding, collective, deadline)
    if isinstance(forwarding, Cut):
        return forwarding
    of_kind = _allreduce_cut if collective.kind is Kind.ALLREDUCE else _tree_cut
    cut = _turned_to_spread(topology, collective, of_kind)
    known = certified_rate(topology, collective, cut)
    return _least(
        topology, collective, [cut, *able_certificates(topology, collective, deadline, known, _best)]
    )


def _certificate(topology: Topology, collective: Collective, deadline: Deadline) -> Certificate:
    match collective.kind:
        case Kind.GATHER:
            return _gather_cut(topology, collective)
        case Kind.CUSTOM:
            return _of_custom(topology, collective, deadline)
        case Kind.ALLTOALL:
            return _of_alltoall(topology, collective, deadline)
        case Kind.ALLREDUCE:
            return _of_allreduce(topology, collective)
        case _:
            return _of_out_trees(topology, collective)


def _mirror(topology: Topology, mirrored: Topology, certificate: Certificate) -> Certificate:
    """The certificate of a reversed topology, read on the topology itself."""
    match certificate:
        case Cut(side, capacity):
            return Cut(frozenset(range(topology.size)) - side, capacity)
        case Dual(lengths, capacity, distance):
            of_link = {
                (link.dst, link.src): length for link, length in zip(mirrored.links, lengths, strict=True)
            }
            return Dual(tuple(of_link[link.src, link.dst] for link in topology.links), capacity, distance)
        case _:
            raise AssertionError("partitions limit an allreduce, which is never mirrored")


def _gather_cut(topology: Topology, collective: Collective) -> Cut:
    assert collective.root is not None, "checked by the collective"
    senders = [rank for rank in collective.ranks if rank != collective.root]
    return tightest_cut(topology, dict.fromkeys(senders, 1), [collective.root]).cut


def _tree_cut(topology: Topology, collective: Collective) -> Cut:
    """The cut that limits out-trees: of the root of a broadcast, of all ranks of another collective."""
    if collective.root is None:
        return tightest_cut(topology, dict.fromkeys(collective.ranks, 1), collective.ranks).cut
    others = [rank for rank in collective.ranks if rank != collective.root]
    return tightest_cut(topology, {collective.root: 1}, others).cut


def _of_out_trees(topology: Topology, collective: Collective) -> Certificate:
    """A cut; lengths where a switch takes in more than it can send on or the other way round."""
    cut = _tree_cut(topology, collective)
    balanced = not topology.unbalanced(range(topology.ranks, topology.size))
    if cut.capacity == 0 or balanced or not _is_priced(topology, collective):
        return cut
    roots = collective.ranks if collective.root is None else (collective.root,)
    whole = not collective.relays(topology)
    if whole and sufficient_part(topology, dict.fromkeys(roots, 1), collective.ranks) is not None:
        return cut
    return _least(topology, collective, [cut, *_priced(topology, collective)])


def _of_allreduce(topology: Topology, collective: Collective) -> Certificate:
    """The least of what is known, cheap limits first and the linear program only where they leave a gap."""
    cut = _allreduce_cut(topology, collective)
    if cut.capacity == 0:
        return cut
    relays = collective.relays(topology)
    if topology.is_symmetric and not topology.switches and not relays:
        return strength(topology)
    candidates: list[Certificate] = [cut]
    if topology.is_symmetric and not relays:
        gathered = _tree_cut(topology, Collective(Kind.ALLGATHER, collective.ranks))
        candidates.append(dual_of(topology, collective, orbit_lengths(topology, gathered.side)))
        best = _least(topology, collective, candidates)
        balanced = not topology.unbalanced(range(topology.ranks, topology.size))
        halves = gathered.capacity / len(gathered.side.intersection(collective.ranks)) / 2
        # Half of every link for an allgather and half for a reduce-scatter is an allreduce.
        if balanced and certified_rate(topology, collective, best) == halves * len(collective.ranks):
            return best
        found = root_demands_of(topology)
        candidates.append(dual_of(topology, collective, side_lengths(topology, found.sides)))
        best = _least(topology, collective, candidates)
        if certified_rate(topology, collective, best) == found.rate:
            return best
    if not topology.is_symmetric and not relays and topology.ranks > LARGEST_TWO_WAY:
        part = symmetric_part(topology)
        if is_connected(part):
            sides = root_demands_of(part).sides
            candidates.append(dual_of(topology, collective, side_lengths(topology, sides)))
            return _least(topology, collective, candidates)
    if _is_priced(topology, collective):
        candidates.extend(_priced(topology, collective))
    return _least(topology, collective, candidates)


def _allreduce_cut(topology: Topology, collective: Collective) -> Cut:
    """The least bandwidth that leaves some ranks towards others."""
    first, *others = collective.ranks
    away = tightest_cut(topology, {first: 1}, others).cut
    back = tightest_cut(topology.reversed(), {first: 1}, others).cut
    towards = cut_out_of(topology, frozenset(range(topology.size)) - back.side)
    return away if away.capacity <= towards.capacity else towards


def _of_alltoall(topology: Topology, collective: Collective, deadline: Deadline) -> Certificate:
    """Lengths, or a cut that proves as much."""
    from arborcast.synth.bounds.routing_lp import routing_duals

    everything = frozenset(range(topology.size))
    supply = dict.fromkeys(collective.ranks, 1)
    into, out = dict.fromkeys(collective.ranks, Fraction(0)), dict.fromkeys(collective.ranks, Fraction(0))
    for link in topology.links:
        if link.dst in into:
            into[link.dst] += link.bandwidth
        if link.src in out:
            out[link.src] += link.bandwidth
    # As much must enter and leave every rank: the one with the least bandwidth stands for all.
    sides = [everything - {min(into, key=into.__getitem__)}, everything - {min(out, key=out.__getitem__)}]
    sides.append(tightest_cut(topology, supply, collective.ranks).cut.side)
    sides.append(everything - tightest_cut(topology.reversed(), supply, collective.ranks).cut.side)
    sides.extend([everything - side for side in sides])
    cuts = [cut_out_of(topology, side) for side in sides if share_leaving(collective, side)]
    best = _least(topology, collective, cuts)
    if certified_rate(topology, collective, best) == 0:
        return best
    return _least(topology, collective, [best, *routing_duals(topology, collective, deadline)])


def _of_custom(topology: Topology, collective: Collective, deadline: Deadline) -> Certificate:
    """A cut, or lengths that prove more."""
    from arborcast.synth.bounds.demand_cuts import demand_cuts
    from arborcast.synth.bounds.routing_lp import routing_duals

    best = _least(topology, collective, demand_cuts(topology, collective))
    if certified_rate(topology, collective, best) == 0:
        return best
    return _least(topology, collective, [best, *routing_duals(topology, collective, deadline)])


def _is_priced(topology: Topology, collective: Collective) -> bool:
    """Whether lengths can be certified: beside relays they need Steiner trees, exponential in the ranks."""
    return not collective.relays(topology) or len(collective.ranks) <= MOST_APART


def _priced(topology: Topology, collective: Collective) -> list[Dual]:
    """The prices of bandwidth in the linear program, as a certificate."""
    from arborcast.synth.bounds.capacity_lp import solved_program

    lengths = solved_program(topology, collective).lengths
    if math.lcm(*(length.denominator for length in lengths)) > _FINEST:
        lengths = tuple(Fraction(round(length * _FINEST), _FINEST) for length in lengths)
    dual = dual_or_none(topology, collective, lengths)
    return [] if dual is None else [dual]


def _least(topology: Topology, collective: Collective, certificates: Iterable[Certificate]) -> Certificate:
    """The certificate of the lowest rate; the first of equals."""
    rates: list[tuple[Fraction, int, Certificate]] = [
        (certified_rate(topology, collective, certificate), position, certificate)
        for position, certificate in enumerate(certificates)
    ]
    return min(rates, key=lambda entry: entry[:2])[2]

"""Allreduces on symmetric links, switches included, as demands of roots on half of every link.

A spanning tree that gathers along the edges on which it spreads may have its root anywhere: turning it
round loads no cable more. On half of every link for each direction the roots can send `d` to all ranks when
every set Y of vertices with a rank has d(Y) >= rate - boundary(Y) / 2 (Edmonds 1973; Bang-Jensen, Frank,
Jackson 1995), where the boundary counts each cable once. The right side is supermodular on sets that share
a rank, so that demands of a rate exist exactly when no disjoint sets Y1..Yk allow less:
rate <= sum of boundaries / (2 (k - 1)). Where those sets hold all ranks no trees exceed that, as each tree
joins all k; elsewhere, as in a star without a switch, links must be split unevenly to reach the optimum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from arborcast.synth.kernels.compiled import Flags, Ints, kernel
from arborcast.synth.kernels.max_flow import checked_int64, dinic, link_arrays, reachable, residual_graph
from arborcast.synth.topology import Hop, Topology, Vertex, gcd_of_fractions

LARGEST_TWO_WAY = 128
"""Ranks up to which the linear program for links of unequal directions ends in time. Beyond, the common part
of both directions is shared in halves; its sets limit the whole fabric to little more, if to any."""


@dataclass(frozen=True, slots=True)
class RootDemands:
    """The best that halves of links do.

    Attributes:
        rate: GB/s of the buffer.
        demands: what each rank's trees carry on half of every link, GB/s; together the rate.
        sides: the sets of vertices that allow no more.
    """

    rate: Fraction
    demands: tuple[Fraction, ...]
    sides: tuple[frozenset[Vertex], ...]


def root_demands_of(topology: Topology) -> RootDemands:
    """The largest rate that trees of any roots reach on symmetric links, and roots that reach it.

    Newton on violated families of sets, a maximum flow per rank (Dilworth truncation, as in
    `synth.bounds.strength`). The demands are as equal as the sets allow, which keeps trees low.

    Args:
        topology: at least two ranks, connected, every link with a reverse of its bandwidth.

    Raises:
        TopologyError: bandwidths are too fine for int64 arithmetic.
    """
    assert topology.is_symmetric, "trees can be turned round on symmetric links only"
    ranks, size = topology.ranks, topology.size
    checked_int64(topology.capacities, factor=4 * ranks)
    capacity = checked_int64(topology.capacities)
    src, dst = link_arrays(topology)
    everyone = np.arange(ranks, dtype=np.int64)
    graph = residual_graph(
        size + 1, np.concatenate([src, everyone]), np.concatenate([dst, np.full(ranks, size)])
    )
    sides = np.zeros((ranks, size), dtype=np.bool_)
    sides[everyone, everyone] = True
    rate = _allowed(sides, src, dst, capacity)
    while True:
        need, labels = _demands(*graph, src, capacity, rate.numerator, rate.denominator, size)
        if int(need.sum()) <= 2 * rate.numerator:
            break
        parts = [np.flatnonzero(labels == label) for label in np.unique(labels[labels >= 0])]
        sides = np.array([_tightest(*graph, capacity, part, size) for part in parts])
        lower = _allowed(sides, src, dst, capacity)
        assert len(parts) > 1 and lower < rate, "the sets that forbid a rate allow less"
        rate = lower
    need[0] += 2 * rate.numerator - int(need.sum())
    _even_out(*graph, capacity, rate.numerator, rate.denominator, size, need)
    unit = topology.bandwidth_unit / (2 * rate.denominator)
    return RootDemands(
        rate * topology.bandwidth_unit,
        tuple(int(amount) * unit for amount in need),
        tuple(frozenset(np.flatnonzero(side).tolist()) for side in sides),
    )


def symmetric_part(topology: Topology) -> Topology:
    """What both directions of each cable carry; links without a reverse are gone."""
    links = tuple(
        replace(link, bandwidth=min(link.bandwidth, topology.bandwidth[link.dst, link.src]))
        for link in topology.links
        if (link.dst, link.src) in topology.bandwidth
    )
    return replace(topology, links=links, symmetries=())


def is_connected(topology: Topology) -> bool:
    """Whether ways lead from the first rank to all others."""
    graph = residual_graph(topology.size, *link_arrays(topology))
    capacity = np.zeros(len(graph[2]), dtype=np.int64)
    capacity[0::2] = 1
    return bool(reachable(*graph, capacity, 0)[: topology.ranks].all())


def spread_roots(
    fabric: Topology, out: Topology, root: int, rate: Fraction
) -> tuple[Topology, dict[int, Fraction]]:
    """The bandwidths of out-trees of one root, turned so that every rank is the root of as much.

    A flow from the root that leaves an equal part of the rate at each rank is turned round, link by link:
    a set without the root is then entered by as much less as its ranks send themselves, and no cable
    carries more in both directions together. Trees of all ranks are lower than many trees of one.

    Args:
        fabric: the symmetric topology whose cables both directions share.
        out: what out-trees of the root use of it, `rate` to each rank; every switch sends what it receives.
        root: the rank.
        rate: GB/s.

    Returns:
        What out-trees use of the fabric then, and the GB/s of each root's.

    Raises:
        TopologyError: bandwidths are too fine for int64 arithmetic.
    """
    each = rate / fabric.ranks
    unit = gcd_of_fractions(out.bandwidth_unit, each)
    capacity = checked_int64([int(link.bandwidth / unit) for link in out.links], factor=2)
    src, dst = link_arrays(out)
    everyone = np.arange(fabric.ranks, dtype=np.int64)
    graph = residual_graph(
        out.size + 1,
        np.concatenate([src, everyone]),
        np.concatenate([dst, np.full(fabric.ranks, out.size)]),
    )
    residual = np.zeros(len(graph[2]), dtype=np.int64)
    residual[0::2] = np.concatenate([capacity // 2, np.full(fabric.ranks, int(each / unit))])
    before = residual.copy()
    sent = dinic(*graph, residual, root, out.size, int(rate / unit))
    assert sent == int(rate / unit), "the root reaches every rank at the rate"
    turned: dict[Hop, int] = {}
    for link, whole, left in zip(out.links, before[0::2].tolist(), residual[0::2].tolist(), strict=False):
        for hop, amount in (((link.src, link.dst), left), ((link.dst, link.src), whole - left)):
            turned[hop] = turned.get(hop, 0) + amount
    links = tuple(
        replace(link, bandwidth=turned[link.src, link.dst] * unit)
        for link in fabric.links
        if turned.get((link.src, link.dst))
    )
    return replace(fabric, links=links, symmetries=()), dict.fromkeys(range(fabric.ranks), each)


def side_lengths(topology: Topology, sides: tuple[frozenset[Vertex], ...]) -> tuple[Fraction, ...]:
    """How many of some sets each link leaves or enters: as lengths they prove what the sets allow."""
    inside = np.zeros((len(sides), topology.size), dtype=np.bool_)
    for row, side in zip(inside, sides, strict=True):
        row[list(side)] = True
    src, dst = link_arrays(topology)
    counts = (inside[:, src] != inside[:, dst]).sum(axis=0)
    return tuple(Fraction(count) for count in counts.tolist())


def _allowed(sides: Flags, src: Ints, dst: Ints, capacity: Ints) -> Fraction:
    """The rate in bandwidth units that some sets allow."""
    boundary = int(((sides[:, src] & ~sides[:, dst]) * capacity).sum())
    return Fraction(boundary, 2 * (len(sides) - 1))


def _tightest(start: Ints, arcs: Ints, head: Ints, capacity: Ints, part: Ints, size: int) -> Flags:
    """The set of least boundary whose ranks are exactly those of a part."""
    links, ranks = len(capacity), len(head) // 2 - len(capacity)
    everything = int(capacity.sum()) + 1
    residual = np.zeros(len(head), dtype=np.int64)
    residual[0 : 2 * links : 2] = capacity
    outside = np.ones(ranks, dtype=np.bool_)
    outside[part] = False
    residual[2 * links :: 2] = np.where(outside, everything, 0)
    # The part is one vertex: links from its first rank to the others, both ways, without limit.
    first, others = int(part[0]), part[1:]
    wired = residual_graph(
        size + 1,
        np.concatenate([head[1::2], np.full(len(others), first)]),
        np.concatenate([head[0::2], others]),
    )
    residual = np.concatenate([residual, np.full(2 * len(others), everything)])
    dinic(*wired, residual, first, size, everything)
    return reachable(*wired, residual, first)[:size]


@kernel
def _demands(
    start: Ints, arcs: Ints, head: Ints, src: Ints, capacity: Ints, above: int, below: int, size: int
) -> tuple[Ints, Ints]:
    """The least demands for the rate `above / below`, in parts of 1 / (2 below), and the tight set of each.

    A rank's demand can fall until some set with it is tight. First none falls below the mean; then they
    fall, rank by rank, until nothing is too much. Ranks whose tight sets meet have one label, those that
    need nothing -1.
    """
    links, total = src.shape[0], 2 * above
    ranks = head.shape[0] // 2 - links
    need, labels = np.full(ranks, total), np.full(ranks, -1)
    excess = total * (ranks - 1)
    residual = np.empty(head.shape[0], dtype=np.int64)
    for floor in (total // ranks, 0):
        for rank in range(ranks):
            if excess <= 0:
                return need, labels
            _lay_out(residual, capacity, below, need, rank)
            flow = dinic(start, arcs, head, residual, rank, size, total)
            least = max(floor, total - flow)
            if floor == 0:
                least = max(least, need[rank] - excess)
            excess -= need[rank] - least
            need[rank] = least
            if floor == 0 and 0 < least == total - flow:
                _join(labels, reachable(start, arcs, head, residual, rank), rank)
    return need, labels


@kernel
def _lay_out(residual: Ints, capacity: Ints, below: int, need: Ints, rank: int) -> None:
    """Residual capacities of the flow whose minimum cut is the set with a rank that leaves least to spare."""
    links = capacity.shape[0]
    residual[:] = 0
    for link in range(links):
        residual[2 * link] = below * capacity[link]
    for other in range(need.shape[0]):
        if other != rank:
            residual[2 * (links + other)] = need[other]


@kernel
def _even_out(
    start: Ints, arcs: Ints, head: Ints, capacity: Ints, above: int, below: int, size: int, need: Ints
) -> None:
    """Share what one rank must send among the ranks of its smallest tight set, as far as others allow.

    Every tight set with the rank holds that one, so that the sum in each tight set stays.
    """
    links, ranks, total = capacity.shape[0], need.shape[0], 2 * above
    residual = np.empty(head.shape[0], dtype=np.int64)
    for rank in range(ranks):
        if need[rank] <= 2 * (total // ranks):
            continue
        _lay_out(residual, capacity, below, need, rank)
        dinic(start, arcs, head, residual, rank, size, 2 * total)
        side = reachable(start, arcs, head, residual, rank)
        members, inside = 0, 0
        for other in range(ranks):
            if side[other]:
                members += 1
                inside += need[other]
        mean = inside // members
        for other in range(ranks):
            wanted = min(mean - need[other], need[rank] - mean)
            if not side[other] or other == rank or wanted <= 0:
                continue
            # Sets with the one and without the other have this much to spare.
            _lay_out(residual, capacity, below, need, rank)
            residual[2 * (links + other)] = 2 * total
            flow = dinic(start, arcs, head, residual, rank, size, total + wanted - need[rank])
            moved = max(0, min(wanted, flow + need[rank] - total))
            need[rank] -= moved
            need[other] += moved


@kernel
def _join(labels: Ints, side: Flags, rank: int) -> None:
    """Give the ranks of a set, and all that share a label with any of them, one label."""
    for other in range(labels.shape[0]):
        if side[other] and labels[other] >= 0 and labels[other] != rank:
            joined = labels[other]
            for one in range(labels.shape[0]):
                if labels[one] == joined:
                    labels[one] = rank
    for other in range(labels.shape[0]):
        if side[other]:
            labels[other] = rank

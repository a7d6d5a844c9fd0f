"""What a certificate proves, recomputed from the certificate alone and in exact arithmetic.

`certified_rate` is how tests and the verifier check every bound; it knows nothing of how certificates are
found. Everything here is a lower bound on the traffic that a collective causes somewhere, against what the
links offer there.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from synth.arborescence import FORBIDDEN, UNREACHABLE, LogicalGraph, cheapest_arborescence
from synth.bounds.cuts import cut_out_of
from synth.bounds.shortest_ways import Ways
from synth.bounds.spanning import joining_cost
from synth.certificate import Certificate, Cut, Dual, Partition, Scope
from synth.collective import Collective, Kind
from synth.compiled import Ints, kernel
from synth.errors import InfeasibleError, InputError
from synth.topology import Topology, Vertex

RANKS_BESIDE_RELAYS = 16
"""With relays a dual needs Steiner trees: exponential in the ranks, hence only up to so many."""

SMALL = 256
"""Vertices up to which all distances come from the closure; beyond, on sparse fabrics, from searches."""

Matrix: TypeAlias = NDArray[Any]


def certified_rate(topology: Topology, collective: Collective, certificate: Certificate) -> Fraction:
    """The rate that a certificate proves, algbw in GB/s of the whole buffer.

    Args:
        topology: the fabric; ranks outside the collective are relays that may forward, copy and reduce.
        collective: what is limited.
        certificate: what limits it; what it says of itself must agree with the topology.

    Raises:
        InputError: the certificate does not fit or proves nothing.
    """
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
    ways, and summed over all t that is two minimum spanning trees.
    """
    if not isinstance(certificate, Dual) or collective.kind is not Kind.ALLREDUCE:
        return Scope.EVERY_SCHEDULE
    if collective.relays(topology):
        return Scope.TREES
    lengths, scale = _integers(topology, certificate.lengths)
    one_tree = joining_cost(topology, lengths.tolist())
    if one_tree is None:
        matrix = LogicalGraph(topology).distances(lengths).matrix
        one_tree = _tree_cost(np.minimum(matrix, matrix.T), 0)
    two_trees = Fraction(2 * one_tree, scale)
    return Scope.EVERY_SCHEDULE if two_trees >= certificate.distance else Scope.TREES


def dual_of(topology: Topology, collective: Collective, lengths: tuple[Fraction, ...]) -> Dual:
    """The certificate that link lengths make: what they offer, and how far the collective must travel.

    Raises:
        InputError: lengths that do not fit the links, are negative, or prove nothing.
    """
    offered = zip(topology.links, lengths, strict=False)
    capacity = sum((link.bandwidth * length for link, length in offered), Fraction(0))
    whole, scale = _integers(topology, lengths)
    distance = _distance(topology, collective, whole) / scale
    if distance <= 0:
        raise InputError(f"dual for {collective.kind}: nothing travels a positive distance")
    return Dual(lengths, capacity, distance)


def distance_of(topology: Topology, collective: Collective, lengths: tuple[Fraction, ...]) -> Fraction:
    """How far each unit of the buffer must travel at least, under link lengths; 0 where it need not.

    Raises:
        InputError: lengths that do not fit the links, are negative, or leave a rank unreachable.
    """
    whole, scale = _integers(topology, lengths)
    return _distance(topology, collective, whole) / scale


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
    found = cut_out_of(topology, cut.side)
    if found.capacity != cut.capacity:
        raise InputError(
            f"cut {named}: {found.capacity} GB/s leave it, the certificate says {cut.capacity} GB/s"
        )
    share = share_leaving(collective, cut.side)
    if share == 0:
        raise InputError(f"cut {named}: proves nothing, no data of the {collective.kind} must leave it")
    return found.capacity / share


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
    found = dual_of(topology, collective, dual.lengths)
    if (found.capacity, found.distance) != (dual.capacity, dual.distance):
        raise InputError(
            f"dual: capacity {found.capacity} and distance {found.distance} by its lengths, "
            f"the certificate says {dual.capacity} and {dual.distance}"
        )
    return found.capacity / found.distance


def _distance(topology: Topology, collective: Collective, lengths: Ints) -> Fraction:
    """How far a unit of the buffer must travel at least, under whole lengths."""
    if collective.kind is Kind.CUSTOM:
        return _distance_of_demands(topology, collective, lengths)
    count = len(collective.ranks)
    if collective.kind in {Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL}:
        everyone = np.array(collective.ranks)
        root = np.array([collective.root])
        owners = root if collective.kind is Kind.SCATTER else everyone
        targets = root if collective.kind is Kind.GATHER else everyone
        far = _shortest_ways(topology, lengths)[np.ix_(owners, targets)]
        if (far >= FORBIDDEN).any():
            raise InputError(f"dual for {collective.kind}: some rank cannot be reached, a cut shows that")
        return Fraction(int(far.astype(object).sum()), count)
    if not collective.relays(topology):
        same_for_all = joining_cost(topology, lengths.tolist())  # the cheapest tree, whatever its root
        if same_for_all is not None:
            return Fraction(2 * same_for_all if collective.kind is Kind.ALLREDUCE else same_for_all)
    matrix = LogicalGraph(topology).distances(lengths).matrix
    if collective.kind in {Kind.REDUCE, Kind.REDUCE_SCATTER}:
        matrix = matrix.T
    if collective.kind is Kind.ALLREDUCE:
        out = _costs_by_root(topology, collective, matrix)
        into = out if (matrix == matrix.T).all() else _costs_by_root(topology, collective, matrix.T)
        both = [cost + into[root] for root, cost in out.items() if root in into]
        if not both:
            raise InputError(f"dual for {collective.kind}: no rank reaches all others, a cut shows that")
        return Fraction(min(both))
    if collective.root is not None:
        roots: tuple[int, ...] = (collective.root,)
    else:
        roots = collective.ranks
    costs = _costs_by_root(topology, collective, matrix, roots)
    if len(costs) < len(roots):
        raise InputError(f"dual for {collective.kind}: some rank cannot be reached, a cut shows that")
    return Fraction(sum(costs.values()), len(roots))


def _distance_of_demands(topology: Topology, collective: Collective, lengths: Ints) -> Fraction:
    """The mean over the blocks of how far the farthest target is from the nearest source."""
    ways = _shortest_ways(topology, lengths)
    total = 0
    for demand in collective.demands:
        nearest = ways[np.ix_(sorted(demand.sources), sorted(demand.targets))].min(axis=0)
        if (nearest >= FORBIDDEN).any():
            raise InputError("dual for custom: some rank cannot be reached, a cut shows that")
        total += int(nearest.max())
    return Fraction(total, len(collective.demands))


def _costs_by_root(
    topology: Topology, collective: Collective, matrix: Matrix, roots: tuple[int, ...] | None = None
) -> dict[int, int]:
    """The cost of the cheapest tree from each root (any rank or relay, where None) to all that take part."""
    if roots is None:
        roots = tuple(range(topology.ranks))
    if collective.relays(topology):
        costs = _steiner_costs(matrix, collective)
        return {root: int(costs[root]) for root in roots if costs[root] < FORBIDDEN}
    if (matrix == matrix.T).all():  # the cheapest tree is the same from every root
        return dict.fromkeys(roots, _tree_cost(matrix, roots[0]))
    return {root: _tree_cost(matrix, root) for root in roots}


def _tree_cost(matrix: Matrix, root: int) -> int:
    try:
        parents = cheapest_arborescence(matrix, root)
    except InfeasibleError as wrong:
        raise InputError(f"dual: {wrong}; a cut shows that") from wrong
    return sum(int(matrix[parent, child]) for child, parent in enumerate(parents) if parent >= 0)


def _steiner_costs(matrix: Matrix, collective: Collective) -> Matrix:
    """The cost of the cheapest out-tree from each rank or relay to all ranks that take part.

    Dreyfus and Wagner 1971 over subsets of those ranks: a tree is a way to a vertex where it forks.
    """
    terminals = collective.ranks
    if len(terminals) > RANKS_BESIDE_RELAYS:
        raise InputError(
            f"dual for {collective.kind}: with relays at most {RANKS_BESIDE_RELAYS} ranks may take part, "
            f"got {len(terminals)}"
        )
    ways = _closure(np.ascontiguousarray(np.minimum(matrix, FORBIDDEN)))
    costs: Matrix = _fork(ways, np.array(terminals))[-1]
    return costs


@kernel
def _fork(ways: Matrix, terminals: Ints) -> Matrix:
    """Row `group` holds the costs from each vertex to the terminals whose bits are set in `group`."""
    size, count = ways.shape[0], terminals.shape[0]
    costs = np.full((1 << count, size), FORBIDDEN)
    for bit in range(count):
        costs[1 << bit] = ways[:, terminals[bit]]
    forked = np.empty(size, dtype=np.int64)
    for group in range(1, 1 << count):  # its parts have lower numbers and are done before
        lowest = group & -group
        rest = group ^ lowest
        if rest == 0:
            continue
        forked[:] = FORBIDDEN
        part = rest
        while part:
            part = (part - 1) & rest
            for vertex in range(size):
                forked[vertex] = min(
                    forked[vertex], costs[part | lowest, vertex] + costs[group ^ part ^ lowest, vertex]
                )
        for start in range(size):
            for vertex in range(size):
                costs[group, start] = min(costs[group, start], ways[start, vertex] + forked[vertex])
    return costs


def _shortest_ways(topology: Topology, lengths: Ints) -> Matrix:
    """All distances where every vertex may forward."""
    if topology.size > SMALL and len(topology.links) * 16 < topology.size**2:
        return Ways(topology).distances(lengths, np.arange(topology.size))
    ways = np.full((topology.size, topology.size), FORBIDDEN, dtype=np.int64)
    for link, length in zip(topology.links, lengths.tolist(), strict=True):
        ways[link.src, link.dst] = length
    return _closure(ways)


@kernel
def _closure(ways: Matrix) -> Matrix:
    """All shortest distances from those of single links (Floyd 1962, Warshall 1962)."""
    closed = ways.copy()
    size = len(closed)
    for vertex in range(size):
        closed[vertex, vertex] = 0
    for between in range(size):
        for start in range(size):
            first = closed[start, between]
            if first < FORBIDDEN:
                for end in range(size):
                    closed[start, end] = min(closed[start, end], first + closed[between, end])
    return closed


def _integers(topology: Topology, lengths: tuple[Fraction, ...]) -> tuple[Ints, int]:
    """The lengths in whole units, and how many units are 1."""
    if len(lengths) != len(topology.links):
        raise InputError(f"dual: needs one length per link ({len(topology.links)}), got {len(lengths)}")
    for link, length in zip(topology.links, lengths, strict=True):
        if length < 0:
            raise InputError(
                f"dual: length of link {link.src}->{link.dst} must not be negative, got {length}"
            )
    scale = math.lcm(*(length.denominator for length in lengths))
    whole = [int(length * scale) for length in lengths]
    if sum(whole) * max(2, topology.ranks) >= min(FORBIDDEN, UNREACHABLE):
        raise InputError("dual: lengths have too many digits for exact int64 arithmetic")
    return np.array(whole, dtype=np.int64), scale


def _check_vertices(topology: Topology, vertices: frozenset[Vertex]) -> None:
    for vertex in vertices:
        if not 0 <= vertex < topology.size:
            raise InputError(f"certificate: vertex must be in 0..{topology.size - 1}, got {vertex}")


def _names(topology: Topology, vertices: frozenset[Vertex]) -> str:
    listed = [str(topology.label(v)) if 0 <= v < topology.size else str(v) for v in sorted(vertices)]
    return "{" + ", ".join(listed[:6]) + (", ..." if len(listed) > 6 else "") + "}"

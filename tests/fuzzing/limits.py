"""The best rates there can be, by linear programs over all cuts and all ways through switches.

Trees of the ranks exist for a rate where every set of ranks sends what those outside need of it (Edmonds
1973), and an edge of a tree is a way from rank to rank through switches. So a program divides the links among
the ways, with a row for every set of ranks. Paths are flows. All of it is exact, and meant for seven ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise

from arborcast.synth.collective import Collective, Kind
from arborcast.synth.topology import Topology
from tests.fuzzing.exact_lp import Program

Way = tuple[int, ...]
TREES = (Kind.BROADCAST, Kind.REDUCE, Kind.ALLGATHER, Kind.REDUCE_SCATTER, Kind.ALLREDUCE)


def ways(topology: Topology, ranks: Sequence[int], through: Sequence[int]) -> list[Way]:
    """The simple ways between two of the ranks whose inner vertices are among `through`."""
    found: list[Way] = []
    stack: list[Way] = [(rank,) for rank in ranks]
    following: dict[int, list[int]] = {}
    for link in topology.links:
        following.setdefault(link.src, []).append(link.dst)
    while stack:
        way = stack.pop()
        for after in following.get(way[-1], ()):
            if after in way:
                continue
            if after in ranks:
                found.append((*way, after))
            elif after in through:
                stack.append((*way, after))
    return sorted(found)


def parts(ranks: Sequence[int]) -> Iterator[frozenset[int]]:
    """All sets of them but none and all."""
    for size in range(1, len(ranks)):
        yield from map(frozenset, combinations(ranks, size))


def add_trees(
    program: Program, name: str, routes: Sequence[Way], collective: Collective, rate: object
) -> None:
    """Rows that let the ways, named (name, way), carry what a collective along trees needs at a rate."""
    kind, ranks = collective.kind, collective.ranks
    count = Fraction(1, len(ranks))
    if kind is Kind.ALLREDUCE:
        program.equal({rate: 1, **{(name, "root", rank): -1 for rank in ranks}})
    for side in parts(ranks):
        outside = frozenset(ranks) - side
        out = {(name, way): -1 for way in routes if way[0] in side and way[-1] in outside}
        into = {(name, "in", way): -1 for way in routes if way[0] in outside and way[-1] in side}
        match kind:
            case Kind.BROADCAST if collective.root in side:
                program.at_most({rate: 1, **out})
            case Kind.REDUCE if collective.root not in side:
                program.at_most({rate: 1, **out})
            case Kind.ALLGATHER:
                program.at_most({rate: len(side) * count, **out})
            case Kind.REDUCE_SCATTER:
                program.at_most({rate: len(outside) * count, **out})
            case Kind.ALLREDUCE:
                roots = {(name, "root", rank): 1 for rank in side}
                program.at_most({**roots, **out})
                program.at_most({**roots, **into})


def uses(
    name: str, routes: Sequence[Way], collective: Collective
) -> dict[tuple[int, int], dict[object, int]]:
    """Which variables of `add_trees` load each link."""
    found: dict[tuple[int, int], dict[object, int]] = {}
    for way in routes:
        for hop in pairwise(way):
            found.setdefault(hop, {})[name, way] = 1
            if collective.kind is Kind.ALLREDUCE:
                found[hop][name, "in", way] = 1
    return found


def add_flows(
    program: Program, name: str, topology: Topology, collective: Collective, rate: object
) -> dict[tuple[int, int], dict[object, int]]:
    """Rows for blocks along paths, one flow from each owner; returns which variables load each link."""
    ranks, root = collective.ranks, collective.root
    share = Fraction(1, len(ranks))
    owners = {Kind.GATHER: ranks, Kind.SCATTER: (root,), Kind.ALLTOALL: ranks}[collective.kind]
    loads: dict[tuple[int, int], dict[object, int]] = {}
    for owner in owners:
        targets = {rank for rank in ranks if rank != owner}
        if collective.kind is Kind.GATHER:
            targets &= {root}
        for link in topology.links:
            loads.setdefault((link.src, link.dst), {})[name, owner, link.src, link.dst] = 1
        for vertex in range(topology.size):
            if vertex == owner:
                continue
            row: dict[object, Fraction | int] = {}
            for link in topology.links:
                if vertex in {link.src, link.dst}:
                    row[name, owner, link.src, link.dst] = 1 if link.src == vertex else -1
            # What enters and stays: at least the block for this vertex.
            program.at_most({**row, **({rate: share} if vertex in targets else {})})
    return loads


def best_rate(topology: Topology, collective: Collective) -> Fraction:
    """The best rate along trees or along paths; other ranks are passed like switches."""
    program = Program()
    if collective.kind in TREES:
        others = [vertex for vertex in range(topology.size) if vertex not in collective.ranks]
        routes = ways(topology, collective.ranks, others)
        add_trees(program, "tree", routes, collective, "rate")
        loads = uses("tree", routes, collective)
    else:
        loads = add_flows(program, "flow", topology, collective, "rate")
    for hop, users in loads.items():
        program.at_most(users, topology.bandwidth[hop])
    return program.maximum("rate")


def least_cut(topology: Topology, collective: Collective) -> Fraction:
    """The least bandwidth out of a set of vertices, over the share of the buffer that must leave it."""
    shares = {side: must_leave(collective, side) for side in parts(range(topology.size))}
    return min(leaving(topology, side) / share for side, share in shares.items() if share)


def leaving(topology: Topology, side: frozenset[int]) -> Fraction:
    """GB/s of the links out of a set of vertices."""
    return sum(
        (rate for (src, dst), rate in topology.bandwidth.items() if src in side and dst not in side),
        Fraction(0),
    )


def must_leave(collective: Collective, side: frozenset[int]) -> Fraction:
    """What some rank outside needs and those outside cannot make alone, of the buffer."""
    if collective.kind is Kind.CUSTOM:
        demands = collective.demands
        return Fraction(sum(d.sources <= side and bool(d.targets - side) for d in demands), len(demands))
    inside = len(side.intersection(collective.ranks))
    outside = len(collective.ranks) - inside
    if not inside or not outside:
        return Fraction(0)
    rooted, count = collective.root in side, len(collective.ranks)
    return {
        Kind.BROADCAST: Fraction(rooted),
        Kind.REDUCE: Fraction(not rooted),
        Kind.ALLGATHER: Fraction(inside, count),
        Kind.REDUCE_SCATTER: Fraction(outside, count),
        Kind.ALLREDUCE: Fraction(1),
        Kind.GATHER: Fraction(inside * (not rooted), count),
        Kind.SCATTER: Fraction(outside * rooted, count),
        Kind.ALLTOALL: Fraction(inside * outside, count),
    }[collective.kind]

"""The best rate of trees of a bounded height, exactly: every tree, and a simplex in Fractions.

Shares nothing with the packers: no prices, no floating point, no HiGHS.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise, product

from arborcast.synth.collective import Collective, Kind
from arborcast.synth.topology import Hop, Topology

Uses = Counter[Hop]


def best_rate(topology: Topology, collective: Collective, height: int) -> Fraction:
    """GB/s of a broadcast, allgather or allreduce along trees of at most a height; zero without any."""
    if collective.kind is Kind.ALLREDUCE:
        groups = [[*pairs(topology, height)]]
    else:
        roots = collective.ranks if collective.root is None else [collective.root]
        groups = [[*trees(topology, root, height)] for root in roots]
    return best_of(topology, groups) * len(groups)


def best_of(topology: Topology, groups: Sequence[Sequence[Uses]]) -> Fraction:
    """What each group can carry at the same time; its first tree makes up for the others."""
    if not all(groups):
        return Fraction(0)
    # Maximise the rate: of each group, the rate less the other trees' weights is the first tree's weight.
    columns: list[dict[object, Fraction]] = [{"rate": Fraction(1)}]
    for uses in (group[0] for group in groups):
        for hop, count in uses.items():
            columns[0][hop] = columns[0].get(hop, Fraction(0)) + count
    limits: dict[object, Fraction] = dict(topology.bandwidth)
    for index, group in enumerate(groups):
        limits["group", index] = Fraction(0)  # the others carry no more than the rate
        columns[0]["group", index] = Fraction(-1)
        for other in group[1:]:
            change = {hop: Fraction(other[hop] - group[0][hop]) for hop in {*other, *group[0]}}
            columns.append({**change, ("group", index): Fraction(1)})
    return simplex(columns, limits)


def simplex(columns: Sequence[dict[object, Fraction]], limits: dict[object, Fraction]) -> Fraction:
    """The largest x[0] with columns x <= limits (not negative) and x >= 0: Bland's rule, a dense tableau."""
    names = list(limits)
    width = len(columns) + len(names)
    rows = []
    for place, name in enumerate(names):
        row = [column.get(name, Fraction(0)) for column in columns]
        row += [Fraction(int(place == slack)) for slack in range(len(names))]
        rows.append([*row, limits[name]])
    basis = [len(columns) + place for place in range(len(names))]
    gains = [Fraction(-int(column == 0)) for column in range(width)] + [Fraction(0)]
    while True:
        entering = next((column for column in range(width) if gains[column] < 0), None)
        if entering is None:
            return gains[-1]
        ratios = [
            (row[-1] / row[entering], basis[place], place)
            for place, row in enumerate(rows)
            if row[entering] > 0
        ]
        leaving = min(ratios)[2]
        pivot = rows[leaving] = [value / rows[leaving][entering] for value in rows[leaving]]
        basis[leaving] = entering
        for place, row in enumerate(rows):
            if place != leaving and row[entering]:
                rows[place] = [a - row[entering] * b if b else a for a, b in zip(row, pivot, strict=True)]
        gains = [a - gains[entering] * b if b else a for a, b in zip(gains, pivot, strict=True)]


def pairs(topology: Topology, height: int) -> Iterator[Uses]:
    """Every way up a tree and down another one with the same root, each use of links once."""
    seen = set()
    for root in range(topology.ranks):
        ins = [
            Counter({(dst, src): count for (src, dst), count in tree.items()})
            for tree in trees(topology.reversed(), root, height)
        ]
        for out, into in product(trees(topology, root, height), ins):
            both = out + into
            key = frozenset(both.items())
            if key not in seen:
                seen.add(key)
                yield both


def trees(topology: Topology, root: int, height: int) -> Iterator[Uses]:
    """Every tree from the root to all ranks, with every way through switches."""
    others = [rank for rank in range(topology.ranks) if rank != root]
    ways = {
        (src, dst): list(_ways(topology, (src,), dst))
        for src in range(topology.ranks)
        for dst in others
        if src != dst
    }
    for parents in product(range(topology.ranks), repeat=len(others)):
        above = dict(zip(others, parents, strict=True))
        if all(_depth(above, rank, root) <= height for rank in others):
            for chosen in product(*(ways[parent, rank] for rank, parent in above.items())):
                yield Counter(hop for way in chosen for hop in pairwise(way))


def _depth(above: dict[int, int], rank: int, root: int) -> int:
    depth = 0
    while rank != root:
        rank, depth = above[rank], depth + 1
        if depth > len(above):
            return 1 << 30  # a cycle
    return depth


def _ways(topology: Topology, way: tuple[int, ...], dst: int) -> Iterator[tuple[int, ...]]:
    for src, here in topology.bandwidth:
        if src == way[-1] and here not in way:
            if here == dst:
                yield (*way, dst)
            elif topology.is_switch(here):
                yield from _ways(topology, (*way, here), dst)

"""Sharing links among groups by brute force: one column for every tree that a group can use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product

from arborcast.synth.collective import Collective, Kind
from arborcast.synth.lp.linear_program import LinearProgram
from arborcast.synth.topology import Topology, Vertex

Path = tuple[Vertex, ...]


def fair_rates(topology: Topology, groups: Sequence[Collective], relays: bool) -> list[float]:
    """The max-min fair rates in GB/s, by trying which group alone can still be faster than the slowest."""
    carriers = [list(_carriers(topology, group, relays)) for group in groups]
    given: dict[int, float] = {}
    while len(given) < len(groups):
        least = _best(topology, carriers, given, {})
        floors = {group: least for group in range(len(groups)) if group not in given}
        stuck = [
            group for group in floors if _best(topology, carriers, given, floors, group) < least * (1 + 1e-6)
        ]
        given |= dict.fromkeys(stuck, least)
    return [given[group] for group in range(len(groups))]


def _best(topology, carriers, given, floors, raised=None) -> float:
    """The largest least rate, or with floors the largest rate of one group."""
    first = [1 + sum(map(len, carriers[:group])) for group in range(len(carriers))]
    program = LinearProgram((1, *[0] * sum(map(len, carriers))), scale=1)
    for hop, bandwidth in topology.bandwidth.items():
        users = [
            (first[g] + i, n[hop]) for g, of in enumerate(carriers) for i, n in enumerate(of) if hop in n
        ]
        program.add_row([column for column, _ in users], [count for _, count in users], upper=bandwidth)
    for group, of_group in enumerate(carriers):
        columns = [first[group] + i for i in range(len(of_group))]
        if group == raised or (raised is None and group not in given):
            program.add_row([0, *columns], [-1, *[1] * len(columns)], lower=0)
        floor = given.get(group, floors.get(group, 0.0))
        program.add_row(columns, [1] * len(columns), lower=floor * (1 - 1e-9))
    return float(program.solve()[0])


def _carriers(topology: Topology, group: Collective, relays: bool) -> Iterator[dict]:
    """How often each link is used, per GB/s of the rate, by each way to do the whole collective."""
    paths = _paths(topology, group, relays)
    turned = {(dst, src): [path[::-1] for path in found] for (src, dst), found in paths.items()}
    match group.kind:
        case Kind.BROADCAST:
            yield from _trees(paths, group.ranks, group.root)
        case Kind.REDUCE:
            for tree in _trees(turned, group.ranks, group.root):
                yield {(dst, src): count for (src, dst), count in tree.items()}
        case Kind.ALLREDUCE:
            for root in group.ranks:
                ins = [
                    {(d, s): n for (s, d), n in tree.items()} for tree in _trees(turned, group.ranks, root)
                ]
                for out, into in product(_trees(paths, group.ranks, root), ins):
                    yield {hop: out.get(hop, 0) + into.get(hop, 0) for hop in {*out, *into}}


def _trees(paths, ranks, root) -> Iterator[dict]:
    others = [rank for rank in ranks if rank != root]
    for parents in product(ranks, repeat=len(others)):
        above = dict(zip(others, parents, strict=True))
        if all(_reaches(above, rank, root) for rank in others):
            for chosen in product(*(paths[above[rank], rank] for rank in others)):
                tree: dict = {}
                for path in chosen:
                    for hop in pairwise(path):
                        tree[hop] = tree.get(hop, 0) + 1
                yield tree


def _reaches(above, rank, root) -> bool:
    for _ in above:
        if rank == root:
            break
        rank = above[rank]
    return rank == root


def _paths(topology: Topology, group: Collective, relays: bool) -> dict[tuple[int, int], list[Path]]:
    """Simple paths between ranks of the group whose inner vertices only forward."""
    inner = set(range(0 if relays else topology.ranks, topology.size)) - set(group.ranks)
    found: dict[tuple[int, int], list[Path]] = {(s, d): [] for s in group.ranks for d in group.ranks}
    for start in group.ranks:
        stack: list[Path] = [(start,)]
        while stack:
            path = stack.pop()
            for src, dst in topology.bandwidth:
                if src == path[-1] and dst not in path:
                    if dst in group.ranks:
                        found[start, dst].append((*path, dst))
                    elif dst in inner:
                        stack.append((*path, dst))
    return found

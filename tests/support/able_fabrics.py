"""Fabrics with switches that reduce and multicast, drawn at random, and their best trees by brute force."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import combinations

import networkx as nx

from arborcast.synth.collective import Collective, Kind
from arborcast.synth.topology import Link, Switch, Topology

ABLE = (
    {"reduces": True},
    {"multicasts": True},
    {"reduces": True, "multicasts": True},
    {"reduces": True, "multicasts": True, "turns": True},
    {"reduces": True, "multicasts": True, "loopback": True},
)


def star(ranks: int, bandwidth: int | Fraction = 1, **abilities: object) -> Topology:
    """Ranks on one switch."""
    ends = [(rank, ranks) for rank in range(ranks)]
    return of_cables("star", ranks, ends, [Switch("s", **abilities)], bandwidth)


def of_cables(name, ranks, ends, switches, bandwidth=1) -> Topology:
    """Cables of one bandwidth, or of the bandwidth of each."""
    rates = bandwidth if isinstance(bandwidth, dict) else dict.fromkeys(ends, bandwidth)
    links = [Link(*hop, Fraction(rates[src, dst])) for src, dst in ends for hop in ((src, dst), (dst, src))]
    return Topology.build(name, ranks, links, switches)


def drawn(seed: int, most: int = 8) -> Topology:
    """Three to `most` vertices, some links one way or of unequal rates, switches of any abilities."""
    rng = random.Random(seed)
    able, plain = rng.randint(1, 3), rng.randint(0, 1)
    ranks = rng.randint(2, max(2, min(6, most - able - plain)))
    switches = []
    for number in range(able):
        abilities = dict(rng.choice(ABLE))
        if abilities.get("reduces") and rng.random() < 0.3:
            abilities["adder"] = Fraction(rng.randint(1, 6), 2)
        switches.append(Switch(f"s{number}", **abilities))
    switches += [Switch(f"p{number}") for number in range(plain)]
    size = ranks + len(switches)
    rates: dict[tuple[int, int], int] = {}
    order = rng.sample(range(size), size)
    for place in range(1, size):
        pair = (order[place], order[rng.randrange(place)])
        rates[pair], rates[pair[::-1]] = rng.randint(1, 4), rng.randint(1, 4)
    for _ in range(rng.randint(0, size + 2)):
        src, dst = rng.sample(range(size), 2)
        rates[src, dst] = rng.randint(1, 4)
        if rng.random() < 0.7:
            rates[dst, src] = rates[src, dst]
    return Topology.build(
        f"drawn {seed}", ranks, (Link(*hop, Fraction(rate)) for hop, rate in rates.items()), switches
    )


def cheapest_by_force(topology: Topology, collective: Collective, lengths, adders) -> Fraction:
    """The least cost of moving one unit of the buffer: every choice of forks, networkx for each.

    A tree is what a set of able switches and relays makes of shortest ways through switches: an arborescence
    over them and the ranks that take part. Which of several inputs are added does not matter to its cost.
    """
    kind, ends = collective.kind, collective.ranks
    outs = _costs(topology, ends, lengths, None) if kind not in {Kind.REDUCE, Kind.REDUCE_SCATTER} else {}
    ins = _costs(topology, ends, lengths, adders) if kind.reduces else {}
    if kind is Kind.ALLREDUCE:
        both = [_sum(outs[root][0], ins[root][0]) for root in range(topology.ranks)]
        for vertex in range(topology.ranks, topology.holders):
            if topology.switches[vertex - topology.ranks].turns:
                both.append(_sum(outs[vertex][0], ins[vertex][0]))
            else:  # it may do one of the two
                both += [_sum(outs[vertex][0], ins[vertex][1]), _sum(outs[vertex][1], ins[vertex][0])]
        return min(cost for cost in both if cost is not None)
    found = ins or outs
    if collective.root is not None:
        return found[collective.root][0]
    return sum((found[root][0] for root in ends), Fraction(0)) / len(ends)


def _sum(one, other):
    return None if one is None or other is None else one + other


def _costs(topology, ends, lengths, adders) -> dict[int, tuple[Fraction | None, Fraction | None]]:
    """The cheapest tree from each rank and able switch; with adders, into it.

    The second one is of those that a switch hands on to another one, where they fork.
    """
    gathers = adders is not None
    ranks, size = topology.ranks, topology.size
    graph = nx.DiGraph()
    graph.add_nodes_from(range(size))
    for link, length in zip(topology.links, lengths, strict=True):
        graph.add_edge(*((link.dst, link.src) if gathers else (link.src, link.dst)), length=length)
    holders = range(topology.holders)
    ways: dict[tuple[int, int], Fraction] = {}
    for src in holders:
        for dst in holders:
            if src != dst:
                through = graph.subgraph({src, dst, *range(ranks, size)})
                if nx.has_path(through, src, dst):
                    ways[src, dst] = nx.shortest_path_length(through, src, dst, weight="length")
    optional = [rank for rank in range(ranks) if rank not in ends]
    for vertex in range(ranks, topology.holders):
        switch = topology.switches[vertex - ranks]
        if switch.reduces if gathers else switch.multicasts:
            optional.append(vertex)
    best = {}
    for root in holders:
        trees = []
        if root < ranks or root in optional:
            trees += _over_all_forks(topology, ends, ways, root, optional, adders)
        passed = []
        for fork in optional:
            if root >= ranks and fork >= ranks and fork != root and (root, fork) in ways:
                rest = [vertex for vertex in optional if vertex != root]
                below = _over_all_forks(topology, ends, ways, fork, rest, adders)
                passed += [ways[root, fork] + cost for cost in below]
        if root >= ranks:  # handed on to a rank, which may be its only child
            below = [_over_all_forks(topology, ends, ways, rank, optional, adders) for rank in range(ranks)]
            trees += [
                ways[root, rank] + cost
                for rank in range(ranks)
                if (root, rank) in ways
                for cost in below[rank]
            ]
        best[root] = min([*trees, *passed], default=None), min(passed, default=None)
    return best


def _over_all_forks(topology, ends, ways, root, optional, adders):
    others = [vertex for vertex in optional if vertex != root]
    costs = [
        _arborescence(topology, ends, ways, root, {root, *ends, *forks}, adders)
        for count in range(len(others) + 1)
        for forks in combinations(others, count)
    ]
    return [cost for cost in costs if cost is not None]


def _arborescence(topology, ends, ways, root, nodes, adders):
    graph = nx.DiGraph()
    graph.add_nodes_from(nodes)
    able = range(topology.ranks, topology.holders)
    for src in nodes:
        for dst in nodes - {root, src}:
            cost = ways.get((src, dst))
            if (
                dst >= topology.ranks
                and topology.switches[dst - topology.ranks].loopback
                and src < topology.ranks
            ):
                has_part = adders is None or src in ends
                back = ways.get((dst, src)) if has_part else None
                costs = [None if cost is None or back is None else cost + back]
                costs += [_sum(ways.get((src, stop)), ways.get((stop, dst))) for stop in able if stop != dst]
                cost = min((one for one in costs if one is not None), default=None)
            if cost is None:
                continue
            if dst >= topology.ranks and adders is not None:
                cost += adders[dst - topology.ranks]
            graph.add_edge(src, dst, weight=cost)
    try:
        tree = nx.minimum_spanning_arborescence(graph)
    except nx.NetworkXException:
        return None
    cost = sum((data["weight"] for _, _, data in tree.edges(data=True)), Fraction(0))
    if adders is not None and root >= topology.ranks:
        cost += adders[root - topology.ranks]
    return cost

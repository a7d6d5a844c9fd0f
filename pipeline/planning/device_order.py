"""In which order a pipeline visits the ranks of a topology: neighbours in the order are near each other.

SPP's recursive device ordering (RDO): the minimum cut falls where the bandwidth is least, so that each half
of it, ordered on its own, has the fast links inside. `transposed` gives the orders in which consecutive
ranks are at the same place of different hosts, for replicas across hosts and pipelines inside them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from itertools import combinations
from math import lcm
from typing import TypeAlias

from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.planning.hosts import levels
from arborcast.synth.topology import Topology

Weights: TypeAlias = Mapping[int, Mapping[int, int]]
"""Of the edges of each rank, by neighbour."""


def device_order(topology: Topology) -> tuple[int, ...]:
    """The ranks so that cutting the order anywhere cuts little bandwidth.

    The graph has an edge between two ranks where the path of a message leads through switches only; its
    weight is the narrowest bandwidth of the path, both directions together. It is cut in two by Stoer and
    Wagner's minimum cut, each half is ordered likewise, and the two orders are joined. SPP leaves open
    which half comes first and which way round: here the half with the lowest rank comes first, and each
    half is turned so that the two ranks that meet have the widest edge (as it is where both ways are equal).
    Of the minimum cuts that are found (`minimum_cut`) the most balanced one counts; of those, the one whose
    first half is nearest to what was last cut off; of those, the one with the lowest ranks.

    Complexity: O(n^4) for n ranks.

    Raises:
        PlanError: some rank does not reach another.

    Source: SPP (arXiv 2204.10562), section IV.
    """
    return _ordered(tuple(range(topology.ranks)), path_weights(LinkCosts(topology)), ())


def path_weights(network: LinkCosts) -> Weights:
    """Weights of the graph that is cut, whole numbers in proportion to GB/s.

    Raises:
        PlanError: some rank does not reach another.
    """
    ranks = range(network.topology.ranks)
    rates = {
        (a, b): _direct_rate(network, a, b) + _direct_rate(network, b, a) for a, b in combinations(ranks, 2)
    }
    unit = lcm(*(rate.denominator for rate in rates.values()))
    weights: dict[int, dict[int, int]] = {rank: {} for rank in ranks}
    for (a, b), rate in rates.items():
        if rate:
            weights[a][b] = weights[b][a] = int(rate * unit)
    return weights


def minimum_cut(
    ranks: Sequence[int], weights: Weights, near: Collection[int] = ()
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The two sides of a minimum cut of the graph on at least two ranks, ascending, lowest rank first.

    Chosen among the cuts of Stoer and Wagner's phases and those that cut one rank off, of which at least one
    is a minimum cut: the most balanced; then the one whose side away from most ranks has most bandwidth to
    the ranks `near`; then the lowest ranks.
    """
    cuts = {frozenset([rank]) for rank in ranks} | _phase_cuts(ranks, weights)
    values = {cut: _between(cut, set(ranks) - cut, weights) for cut in cuts}
    least = min(values.values())
    small = [
        sorted(cut) if 2 * len(cut) <= len(ranks) else sorted(set(ranks) - cut)
        for cut, value in values.items()
        if value == least
    ]
    side = min(small, key=lambda cut: (-len(cut), -_between(cut, near, weights), cut))
    halves = (tuple(side), tuple(sorted(set(ranks) - set(side))))
    return min(halves), max(halves)


def transposed(order: Sequence[int], network: LinkCosts) -> tuple[tuple[int, ...], ...]:
    """The orders that go across hosts before they go on inside them, one for each level of hosts.

    What a host is comes from the rates (`hosts.levels`: also racks, or pairs of dies). Hosts, and the ranks
    in them, come as in `order`; a rank is followed by those of the other hosts that it reaches best: at the
    widest, over the fewest links.

        hosts 0 1 2 3 | 4 5 6 7  ->  0 4 1 5 2 6 3 7
    """
    place = {rank: position for position, rank in enumerate(order)}
    found = []
    for groups in levels(network)[:-1]:
        hosts = sorted(
            (sorted(group, key=place.__getitem__) for group in groups), key=lambda it: place[it[0]]
        )
        found.append(_across(hosts, network))
    return tuple(found)


def _across(hosts: list[list[int]], network: LinkCosts) -> tuple[int, ...]:
    """A rank of the first host, its nearest rank in each other host that is left, the next rank, ..."""
    left = [list(host) for host in hosts[1:]]
    order = []
    for rank in hosts[0]:
        order.append(rank)
        for others in left:
            nearest = min(others, key=lambda it: (-network.width(rank, it), len(network.path(rank, it)), it))
            others.remove(nearest)
            order.append(nearest)
    return tuple(order)


def _ordered(ranks: tuple[int, ...], weights: Weights, near: Collection[int]) -> tuple[int, ...]:
    if len(ranks) == 1:
        return ranks
    halves = minimum_cut(ranks, weights, near)
    first, second = (_ordered(half, weights, other) for half, other in (halves, halves[::-1]))
    ways = [(a, b) for a in (first, first[::-1]) for b in (second, second[::-1])]
    before, after = max(ways, key=lambda way: weights[way[0][-1]].get(way[1][0], 0))
    return before + after


def _phase_cuts(ranks: Sequence[int], weights: Weights) -> set[frozenset[int]]:
    """Of each phase of Stoer and Wagner's algorithm the cut that sets its last group apart."""
    groups = [frozenset([rank]) for rank in sorted(ranks)]
    cuts = set()
    while len(groups) > 1:
        seen, waiting = [groups[0]], groups[1:]
        inside = set(groups[0])
        while waiting:
            tightest = max(waiting, key=lambda group: _between(group, inside, weights))
            waiting.remove(tightest)
            seen.append(tightest)
            inside |= tightest
        cuts.add(seen[-1])
        groups = [*seen[:-2], seen[-2] | seen[-1]]
    return cuts


def _between(one: Collection[int], other: Collection[int], weights: Weights) -> int:
    """Weight of the edges between two sets of ranks."""
    return sum(weights[a].get(b, 0) for a in one for b in other)


def _direct_rate(network: LinkCosts, src: int, dst: int) -> Fraction:
    """The narrowest bandwidth of a path; 0 where it leads through another rank, whose links are its own."""
    hops = network.path(src, dst)
    through_a_rank = any(not network.topology.is_switch(vertex) for _, vertex in hops[:-1])
    return Fraction(0) if through_a_rank else network.width(src, dst)

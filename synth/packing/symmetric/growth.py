"""A cheapest out-tree that is as low as its costs allow, grown level by level inside a nest of sets.

Of all trees that a contraction leaves possible the growth takes one in which every rank is reached as early
as it goes; where several edges reach it, prices decide, which rise with the use of a link orbit, so that the
tree spreads over links that are alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from arborcast.synth.kernels.arborescence import FORBIDDEN, Routes
from arborcast.synth.kernels.compiled import Flags, Ints, kernel
from arborcast.synth.kernels.link_graph import LinkGraph
from arborcast.synth.packing.symmetric.contraction import LaminarFamily

Network: TypeAlias = tuple[Ints, Ints, Ints, Ints, Ints, Ints]
"""For the kernels: tails, heads and lengths of links, offsets of vertices, both orbits of links."""

_REFRESHED = 16
"""Ways through switches are priced anew after this part of the ranks that are left of a level."""


@dataclass(frozen=True, eq=False)
class Orbits:
    """Which orbits a tree's use of a link counts for.

    Attributes:
        of_link: the orbit of each link.
        twin: a second orbit that counts too (of the link turned round, for trees that also gather), or -1.
        count: how many orbits there are.
    """

    of_link: Ints
    twin: Ints
    count: int

    def spread(self, lengths: Ints) -> Ints:
        """Lengths of orbits as what one use of each link costs."""
        of_links: Ints = lengths[self.of_link] + np.where(self.twin >= 0, lengths[self.twin], 0)
        return of_links

    def counted(self, links: Ints) -> tuple[int, ...]:
        """How often a tree that passes some links uses each orbit."""
        twins = self.twin[links]
        uses = np.bincount(self.of_link[links], minlength=self.count)
        return tuple((uses + np.bincount(twins[twins >= 0], minlength=self.count)).tolist())


def grow(
    graph: LinkGraph, nest: LaminarFamily, orbits: Orbits, root: int, base: Ints, steepness: Ints
) -> tuple[Routes, tuple[int, ...]]:
    """A low one of the cheapest out-trees from a root, and how often it uses each orbit.

    Args:
        graph: what the nest was made of.
        nest: which edges are cheap enough.
        orbits: what the uses are counted by.
        root: where the tree starts.
        base: the price of each orbit that is not used yet; at least 1.
        steepness: by how much each use raises it.
    """
    network = (graph.tails, graph.heads, nest.lengths, nest.offsets, orbits.of_link, orbits.twin)
    sets = (nest.gains, nest.members, nest.starts, nest.around, nest.around_starts)
    parents, levels, links, starts, uses = _grow(
        graph.ranks, graph.size, network, graph.leaving, graph.arriving, nest.needs.copy(), sets,
        base.astype(np.int64), steepness.astype(np.int64), root,
    )  # fmt: skip
    assert (levels >= 0).all(), "every rank of a connected nest is reached"
    return Routes(graph, parents, starts, links), tuple(uses.tolist())


@kernel
def _grow(
    ranks: int,
    size: int,
    network: Network,
    leaving: tuple[Ints, Ints],
    arriving: tuple[Ints, Ints],
    needs: Ints,
    sets: tuple[Ints, Ints, Ints, Ints, Ints],
    base: Ints,
    steepness: Ints,
    root: int,
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    levels, into = np.full(ranks, -1), np.full(ranks, -1)
    touched = np.zeros(len(sets[0]), np.bool_)
    uses = np.zeros(len(base), np.int64)
    chains = np.empty((2, 4 * ranks + size), np.int64)  # links of edges, each with the place of the next one
    chained = 0
    toward = np.empty((3, size - ranks), np.int64)  # of each switch: length, price and last link of a way
    wave = np.array([root])
    levels[root] = 0
    _enter(root, needs, sets, touched)
    while len(wave) > 0:
        _approach(ranks, network, leaving, base + uses * steepness, wave, toward)
        level = levels[wave[0]]
        candidates = _candidates(network, arriving, needs, levels, level, toward)
        following = np.empty(len(candidates), np.int64)
        joined, since = 0, 0
        for position, rank in enumerate(candidates):
            if since * _REFRESHED > len(candidates) - position and size > ranks:
                _approach(ranks, network, leaving, base + uses * steepness, wave, toward)
                since = 0
            link = _least_priced(rank, network, arriving, needs, levels, level, toward, base, uses, steepness)
            if link < 0:
                continue  # its set has been entered elsewhere in the meantime
            if chained + size >= chains.shape[1]:
                chains = np.concatenate((chains, np.empty_like(chains)), axis=1)
            into[rank], chained = _hang(ranks, link, network, toward, uses, chains, chained)
            levels[rank] = level + 1
            _enter(rank, needs, sets, touched)
            following[joined] = rank
            joined += 1
            since += 1
        wave = following[:joined].copy()
    return _edges(levels, into, chains, chained, network[0], uses)


@kernel
def _candidates(
    network: Network, arriving: tuple[Ints, Ints], needs: Ints, levels: Ints, level: int, toward: Ints
) -> Ints:
    """The ranks that the last level can reach; those with one way in first, the others can balance them."""
    start = arriving[0]
    found, options = np.empty(len(levels), np.int64), np.empty(len(levels), np.int64)
    count = 0
    for rank in range(len(levels)):
        if levels[rank] >= 0:
            continue
        ways = 0
        for place in range(start[rank], start[rank + 1]):
            if _fits(arriving[1][place], network, needs[rank], levels, level, toward):
                ways += 1
        if ways:
            found[count], options[count] = rank, ways
            count += 1
    return found[np.argsort(options[:count], kind="mergesort")]


@kernel
def _fits(link: int, network: Network, need: int, levels: Ints, level: int, toward: Ints) -> bool:
    """Whether a link is the end of an edge from the last level that costs just what its end may pay."""
    tails, _, lengths, offsets, _, _ = network
    tail = tails[link]
    if lengths[link] >= FORBIDDEN:
        return False
    if tail < len(levels):
        return bool(levels[tail] == level and lengths[link] + offsets[tail] == need)
    so_far = toward[0, tail - len(levels)]
    return bool(so_far < FORBIDDEN and so_far + lengths[link] == need)


@kernel
def _least_priced(
    rank: int,
    network: Network,
    arriving: tuple[Ints, Ints],
    needs: Ints,
    levels: Ints,
    level: int,
    toward: Ints,
    base: Ints,
    uses: Ints,
    steepness: Ints,
) -> int:
    """The last link of the edge into a rank that pays least by now; -1 for none."""
    tails, _, _, _, orbit, twin = network
    best, least = -1, np.int64(0)
    for place in range(arriving[0][rank], arriving[0][rank + 1]):
        link = arriving[1][place]
        if not _fits(link, network, needs[rank], levels, level, toward):
            continue
        one, other = orbit[link], twin[link]
        cost = base[one] + uses[one] * steepness[one]
        if other >= 0:
            cost += base[other] + uses[other] * steepness[other]
        if tails[link] >= len(levels):
            cost += toward[1, tails[link] - len(levels)]
        if best < 0 or cost < least:
            best, least = link, cost
    return best


@kernel
def _hang(
    ranks: int, link: int, network: Network, toward: Ints, uses: Ints, chains: Ints, chained: int
) -> tuple[int, int]:
    """Write down an edge from its last link back to its rank; its first place, and the next free one."""
    tails, _, _, _, orbit, twin = network
    after = -1
    while True:
        chains[0, chained], chains[1, chained] = link, after
        after = chained
        chained += 1
        uses[orbit[link]] += 1
        if twin[link] >= 0:
            uses[twin[link]] += 1
        if tails[link] < ranks:
            return after, chained
        link = toward[2, tails[link] - ranks]


@kernel
def _edges(
    levels: Ints, into: Ints, chains: Ints, chained: int, tails: Ints, uses: Ints
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """The edges by the rank they lead to: parents, levels, links, where each edge's links start, uses."""
    ranks = len(levels)
    parents, starts = np.full(ranks, -1), np.zeros(ranks + 1, np.int64)
    links, count = np.empty(chained, np.int64), 0
    for rank in range(ranks):
        place = into[rank]
        if place >= 0:
            parents[rank] = tails[chains[0, place]]
        while place >= 0:
            links[count] = chains[0, place]
            count += 1
            place = chains[1, place]
        starts[rank + 1] = count
    return parents, levels, links, starts, uses


@kernel
def _enter(rank: int, needs: Ints, sets: tuple[Ints, Ints, Ints, Ints, Ints], touched: Flags) -> None:
    """Whoever shares a set with a rank that is reached need not pay for entering that set any more."""
    gains, members, starts, around, around_starts = sets
    for place in range(around_starts[rank], around_starts[rank + 1]):
        one = around[place]
        if touched[one]:
            return  # so are all sets around it
        touched[one] = True
        for position in range(starts[one], starts[one + 1]):
            needs[members[position]] -= gains[one]


@kernel
def _approach(
    ranks: int, network: Network, leaving: tuple[Ints, Ints], costs: Ints, wave: Ints, toward: Ints
) -> None:
    """The shortest ways from a level to all switches, the least priced of equals (Bellman and Ford)."""
    toward[:2] = FORBIDDEN
    toward[2] = -1
    switches = toward.shape[1]
    if switches == 0:
        return
    queue, queued = np.empty(switches + 1, np.int64), np.zeros(switches, np.bool_)
    last = 0
    for here in wave:
        last = _relax(here, network[3][here], 0, ranks, network, leaving, costs, toward, queue, queued, last)
    first = 0
    while first != last:
        switch = queue[first]
        first = (first + 1) % (switches + 1)
        queued[switch] = False
        last = _relax(
            switch + ranks, toward[0, switch], toward[1, switch], ranks, network, leaving, costs,
            toward, queue, queued, last,
        )  # fmt: skip


@kernel
def _relax(
    here: int,
    so_far: int,
    paid: int,
    ranks: int,
    network: Network,
    leaving: tuple[Ints, Ints],
    costs: Ints,
    toward: Ints,
    queue: Ints,
    queued: Flags,
    last: int,
) -> int:
    """Offer the switches beside a vertex the way through it; the end of the queue then."""
    _, heads, lengths, _, orbit, twin = network
    for place in range(leaving[0][here], leaving[0][here + 1]):
        link = leaving[1][place]
        switch = heads[link] - ranks
        if switch < 0 or lengths[link] >= FORBIDDEN:
            continue
        cost = paid + costs[orbit[link]]
        if twin[link] >= 0:
            cost += costs[twin[link]]
        length = so_far + lengths[link]
        if length < toward[0, switch] or (length == toward[0, switch] and cost < toward[1, switch]):
            toward[0, switch], toward[1, switch], toward[2, switch] = length, cost, link
            if not queued[switch]:
                queued[switch] = True
                queue[last] = switch
                last = (last + 1) % len(queue)
    return last

"""A cheapest out-tree that is as low as its costs allow, grown level by level inside a nest of sets.

Of all trees that a contraction leaves possible the growth takes one in which every rank is reached as early
as it goes; where several edges reach it, prices decide, which rise with the use of a link orbit, so that the
tree spreads over links that are alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from synth.arborescence import FORBIDDEN
from synth.compiled import Flags, Ints, kernel
from synth.packing.symmetric.contraction import Graph, Nest
from synth.tree import Tree, TreeEdge

_REFRESHED = 16
"""Ways through switches are priced anew after this part of the ranks of a level."""


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


@dataclass(frozen=True, eq=False)
class Grown:
    """A tree down to its links.

    Attributes:
        root: where it starts.
        parents: of each rank, -1 for the root.
        levels: of each rank.
        links: the edge into rank v passes `links[starts[v]:starts[v + 1]]`.
        starts: see `links`.
        uses: how often it uses each orbit.
    """

    root: int
    parents: Ints
    levels: Ints
    links: Ints
    starts: Ints
    uses: tuple[int, ...]

    @property
    def height(self) -> int:
        """The largest level."""
        return int(self.levels.max())

    def tree(self, graph: Graph, weight: Fraction) -> Tree:
        """As a value: an out-tree of the graph, parents before children."""
        heads, starts = graph.heads[self.links].tolist(), self.starts.tolist()
        parents = self.parents.tolist()
        order = np.lexsort((np.arange(len(parents)), self.parents, self.levels)).tolist()
        edges = tuple(
            TreeEdge(parents[child], child, tuple(heads[starts[child] : starts[child + 1] - 1]))
            for child in order
            if child != self.root
        )
        return Tree(self.root, weight, edges)


def grow(graph: Graph, nest: Nest, orbits: Orbits, root: int, base: Ints, steepness: Ints) -> Grown:
    """A low one of the cheapest out-trees from a root.

    Args:
        graph: what the nest was made of.
        nest: which edges are cheap enough.
        orbits: what the uses are counted by.
        root: where the tree starts.
        base: the price of each orbit that is not used yet; at least 1.
        steepness: by how much each use raises it.
    """
    parents, levels, links, starts, uses = _grow(
        graph.ranks,
        graph.size,
        graph.tails,
        graph.heads,
        *graph.leaving,
        *graph.arriving,
        nest.lengths,
        nest.offsets,
        FORBIDDEN,
        nest.needs.copy(),
        nest.gains,
        nest.members,
        nest.starts,
        nest.around,
        nest.around_starts,
        orbits.of_link,
        orbits.twin,
        np.asarray(base, dtype=np.int64),
        np.asarray(steepness, dtype=np.int64),
        root,
    )
    assert (levels >= 0).all(), "every rank of a connected nest is reached"
    return Grown(root, parents, levels, links, starts, tuple(uses.tolist()))


@kernel
def _grow(
    ranks: int,
    size: int,
    tails: Ints,
    heads: Ints,
    out_start: Ints,
    out_order: Ints,
    in_start: Ints,
    in_order: Ints,
    lengths: Ints,
    offsets: Ints,
    limit: int,
    needs: Ints,
    gains: Ints,
    members: Ints,
    starts: Ints,
    around: Ints,
    around_starts: Ints,
    orbit: Ints,
    twin: Ints,
    base: Ints,
    steepness: Ints,
    root: int,
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    parents, levels = np.full(ranks, -1), np.full(ranks, -1)
    touched = np.zeros(len(gains), np.bool_)
    uses = np.zeros(len(base), np.int64)
    first_link = np.full(ranks, -1)  # the chain of links of each edge, from its end back to its start
    chain_link, chain_next = np.empty(8 * ranks + size, np.int64), np.empty(8 * ranks + size, np.int64)
    chained = 0
    near, price = np.empty(size - ranks, np.int64), np.empty(size - ranks, np.int64)
    last_link = np.empty(size - ranks, np.int64)
    frontier, following = np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    levels[root] = 0
    _enter(root, needs, gains, members, starts, around, around_starts, touched)
    frontier[0], waves, level = root, 1, 0
    options, candidates = np.zeros(ranks, np.int64), np.empty(ranks, np.int64)
    while waves:
        costs = base + uses * steepness
        _approach(
            ranks, tails, heads, out_start, out_order, lengths, offsets, limit, orbit, twin, costs,
            frontier[:waves], near, price, last_link,
        )  # fmt: skip
        found = 0
        for rank in range(ranks):
            if levels[rank] >= 0:
                continue
            count = 0
            for place in range(in_start[rank], in_start[rank + 1]):
                link = in_order[place]
                tail, length = tails[link], lengths[link] + offsets[tails[link]]
                if length >= limit:
                    continue
                if tail < ranks:
                    if levels[tail] == level and length == needs[rank]:
                        count += 1
                elif near[tail - ranks] < limit and near[tail - ranks] + length == needs[rank]:
                    count += 1
            if count:
                options[found], candidates[found] = count, rank
                found += 1
        # Ranks with one way in leave no choice: they come first, so that the others can balance them.
        turn = np.argsort(options[:found], kind="mergesort")
        joined, since = 0, 0
        for position in turn:
            rank = candidates[position]
            if since * _REFRESHED > found and size > ranks:
                costs = base + uses * steepness
                _approach(
                    ranks, tails, heads, out_start, out_order, lengths, offsets, limit, orbit, twin, costs,
                    frontier[:waves], near, price, last_link,
                )  # fmt: skip
                since = 0
            best, least = -1, np.int64(0)
            for place in range(in_start[rank], in_start[rank + 1]):
                link = in_order[place]
                tail, length = tails[link], lengths[link] + offsets[tails[link]]
                if length >= limit:
                    continue
                cost = base[orbit[link]] + uses[orbit[link]] * steepness[orbit[link]]
                if twin[link] >= 0:
                    cost += base[twin[link]] + uses[twin[link]] * steepness[twin[link]]
                if tail < ranks:
                    if levels[tail] != level or length != needs[rank]:
                        continue
                elif near[tail - ranks] >= limit or near[tail - ranks] + length != needs[rank]:
                    continue
                else:
                    cost += price[tail - ranks]
                if best < 0 or cost < least:
                    best, least = link, cost
            if best < 0:
                continue  # its set has been entered elsewhere in the meantime
            link = best
            while True:
                if chained == len(chain_link):
                    chain_link = np.concatenate((chain_link, np.empty(chained, np.int64)))
                    chain_next = np.concatenate((chain_next, np.empty(chained, np.int64)))
                chain_link[chained], chain_next[chained] = link, first_link[rank]
                first_link[rank] = chained
                chained += 1
                uses[orbit[link]] += 1
                if twin[link] >= 0:
                    uses[twin[link]] += 1
                if tails[link] < ranks:
                    break
                link = last_link[tails[link] - ranks]
            parents[rank] = tails[link]
            levels[rank] = level + 1
            _enter(rank, needs, gains, members, starts, around, around_starts, touched)
            following[joined] = rank
            joined += 1
            since += 1
        frontier, following = following, frontier
        waves = joined
        level += 1
    edge_starts, links, count = np.zeros(ranks + 1, np.int64), np.empty(chained, np.int64), 0
    for rank in range(ranks):
        place = first_link[rank]
        while place >= 0:
            links[count] = chain_link[place]
            count += 1
            place = chain_next[place]
        edge_starts[rank + 1] = count
    return parents, levels, links, edge_starts, uses


@kernel
def _enter(
    rank: int,
    needs: Ints,
    gains: Ints,
    members: Ints,
    starts: Ints,
    around: Ints,
    around_starts: Ints,
    touched: Flags,
) -> None:
    """Whoever shares a set with a rank that is reached need not pay for entering that set any more."""
    for place in range(around_starts[rank], around_starts[rank + 1]):
        one = around[place]
        if touched[one]:
            return  # so are all sets around it
        touched[one] = True
        for position in range(starts[one], starts[one + 1]):
            needs[members[position]] -= gains[one]


@kernel
def _approach(
    ranks: int,
    tails: Ints,
    heads: Ints,
    start: Ints,
    order: Ints,
    lengths: Ints,
    offsets: Ints,
    limit: int,
    orbit: Ints,
    twin: Ints,
    costs: Ints,
    frontier: Ints,
    near: Ints,
    price: Ints,
    last_link: Ints,
) -> None:
    """The shortest ways from a level to all switches, the least priced of equals."""
    near[:] = limit
    price[:] = limit
    last_link[:] = -1
    switches = len(near)
    if switches == 0:
        return
    queue, queued = np.empty(switches + 1, np.int64), np.zeros(switches, np.bool_)
    first, last = 0, 0
    for here in frontier:
        for place in range(start[here], start[here + 1]):
            link = order[place]
            there = heads[link] - ranks
            if there < 0 or lengths[link] >= limit:
                continue
            cost = costs[orbit[link]]
            if twin[link] >= 0:
                cost += costs[twin[link]]
            length = lengths[link] + offsets[here]
            if length < near[there] or (length == near[there] and cost < price[there]):
                near[there], price[there], last_link[there] = length, cost, link
                if not queued[there]:
                    queued[there] = True
                    queue[last] = there
                    last = (last + 1) % (switches + 1)
    while first != last:
        here = queue[first]
        first = (first + 1) % (switches + 1)
        queued[here] = False
        for place in range(start[here + ranks], start[here + ranks + 1]):
            link = order[place]
            there = heads[link] - ranks
            if there < 0 or lengths[link] >= limit:
                continue
            cost = price[here] + costs[orbit[link]]
            if twin[link] >= 0:
                cost += costs[twin[link]]
            length = near[here] + lengths[link]
            if length < near[there] or (length == near[there] and cost < price[there]):
                near[there], price[there], last_link[there] = length, cost, link
                if not queued[there]:
                    queued[there] = True
                    queue[last] = there
                    last = (last + 1) % (switches + 1)

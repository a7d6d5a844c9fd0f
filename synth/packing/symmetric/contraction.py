"""Which edges cheapest out-trees may use, for all roots at once: Edmonds' contraction on a sparse graph.

Groups of ranks that enter each other at the least cost are contracted, round by round, until one is left.
What is left behind is a nest of sets with a gain each: a tree is cheapest for its root exactly if it enters
every set of positive gain once, through edges that cost no more than the gains they pay for. Edges through
switches are never written out: a switch knows the nearest ranks of two different groups, which is all that
the contraction asks. Memory grows with links, not with pairs of ranks.

Source: Edmonds (1967), Fulkerson (1974) for the gains as a dual, Boruvka's rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arborcast.synth.errors import InfeasibleError
from arborcast.synth.kernels.arborescence import FORBIDDEN
from arborcast.synth.kernels.compiled import Flags, Ints, kernel
from arborcast.synth.kernels.link_graph import LinkGraph


@dataclass(frozen=True, eq=False)
class LaminarFamily:
    """The sets of a contraction whose gain is positive, one inside or beside the other.

    Attributes:
        lengths: of the links, with which the contraction was made.
        offsets: what an edge costs on top, by the rank that it starts at.
        needs: for each rank the sum of the gains of all sets around it.
        gains: of each set.
        members: the ranks of set s are `members[starts[s]:starts[s + 1]]`.
        starts: see `members`.
        around: the sets around rank v are `around[around_starts[v]:around_starts[v + 1]]`, smallest first.
        around_starts: see `around`.
    """

    lengths: Ints
    offsets: Ints
    needs: Ints
    gains: Ints
    members: Ints
    starts: Ints
    around: Ints
    around_starts: Ints

    def cost(self, root: int) -> int:
        """Of the cheapest out-tree from a rank: every set without it must be entered."""
        return int(self.gains.sum() - self.needs[root])


def contract(graph: LinkGraph, lengths: Ints, offsets: Ints | None = None) -> LaminarFamily:
    """The nest of a graph.

    Args:
        graph: whose ranks all reach each other.
        lengths: of its links, whole and not negative; `FORBIDDEN` and more closes a link.
        offsets: what edges that start at a rank cost on top; None for nothing.

    Raises:
        InfeasibleError: some ranks cannot be reached from some others.
    """
    starting = np.zeros(graph.size, dtype=np.int64)
    if offsets is not None:
        starting[: graph.ranks] = offsets
    parents, gains, count = _contract(
        graph.ranks, graph.size, graph.tails, graph.heads, *graph.leaving, lengths, starting, FORBIDDEN
    )
    if count < 0:
        raise InfeasibleError("some ranks cannot be reached from some others")
    return LaminarFamily(lengths, starting, *_nested(graph.ranks, parents[:count], gains[:count]))


@kernel
def _nested(ranks: int, parents: Ints, gains: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
    """The sets of positive gain, numbered anew, with who is in which."""
    number = np.full(len(parents), -1)
    count = 0
    for one in range(len(parents)):
        if gains[one] > 0:
            number[one] = count
            count += 1
    kept = np.zeros(count, np.int64)
    sizes = np.zeros(count + 1, np.int64)
    around_starts = np.zeros(ranks + 1, np.int64)
    needs = np.zeros(ranks, np.int64)
    for one in range(len(parents)):
        if number[one] >= 0:
            kept[number[one]] = gains[one]
    for rank in range(ranks):
        around_starts[rank + 1] = around_starts[rank]
        one = rank
        while one >= 0:
            if number[one] >= 0:
                sizes[number[one] + 1] += 1
                around_starts[rank + 1] += 1
                needs[rank] += gains[one]
            one = parents[one]
    starts = np.cumsum(sizes)
    filled = starts[:count].copy()
    members = np.zeros(starts[count], np.int64)
    around = np.zeros(around_starts[ranks], np.int64)
    for rank in range(ranks):
        place = around_starts[rank]
        one = rank
        while one >= 0:
            if number[one] >= 0:
                members[filled[number[one]]] = rank
                filled[number[one]] += 1
                around[place] = number[one]
                place += 1
            one = parents[one]
    return needs, kept, members, starts, around, around_starts


@kernel
def _contract(
    ranks: int,
    size: int,
    tails: Ints,
    heads: Ints,
    start: Ints,
    order: Ints,
    lengths: Ints,
    offsets: Ints,
    limit: int,
) -> tuple[Ints, Ints, int]:
    """Parents and gains of all sets, those of single ranks first; -1 sets where ranks are cut off."""
    parents, gains = np.full(2 * ranks, -1), np.zeros(2 * ranks, np.int64)
    top = np.arange(ranks)  # the largest set around each rank
    needs = np.zeros(ranks, np.int64)  # the gains of all sets around it
    sets, left = ranks, ranks
    near = np.empty((size - ranks, 2), np.int64)
    whose = np.empty((size - ranks, 2), np.int64)
    slack = np.empty(2 * ranks, np.int64)
    while left > 1:
        _nearest(ranks, tails, heads, start, order, lengths, offsets, limit, top, near, whose)
        slack[:] = limit
        for link in range(len(tails)):
            rank, tail, length = heads[link], tails[link], lengths[link] + offsets[tails[link]]
            if rank >= ranks or length >= limit:
                continue
            if tail < ranks:
                if top[tail] != top[rank]:
                    slack[top[rank]] = min(slack[top[rank]], length - needs[rank])
            else:
                best = 0 if whose[tail - ranks, 0] != top[rank] else 1
                if near[tail - ranks, best] < limit:
                    offered = near[tail - ranks, best] + length - needs[rank]
                    slack[top[rank]] = min(slack[top[rank]], offered)
        for rank in range(ranks):
            if slack[top[rank]] >= limit // 2:
                return parents, gains, -1
        for rank in range(ranks):
            needs[rank] += slack[top[rank]]
        for one in range(sets):
            if parents[one] < 0 and slack[one] < limit:
                gains[one] += slack[one]
        parts = _joined(ranks, size, tails, heads, lengths, offsets, limit, top, needs, near, sets)
        sets, left = _merged(top, parts, parents, sets)
    return parents, gains, sets


@kernel
def _nearest(
    ranks: int,
    tails: Ints,
    heads: Ints,
    start: Ints,
    order: Ints,
    lengths: Ints,
    offsets: Ints,
    limit: int,
    top: Ints,
    near: Ints,
    whose: Ints,
) -> None:
    """For each switch the distances of the nearest two ranks in different sets, and those sets."""
    near[:] = limit
    whose[:] = -1
    switches = len(near)
    queue, queued = np.empty(switches + 1, np.int64), np.zeros(switches, np.bool_)
    first, last = 0, 0
    for link in range(len(tails)):
        switch = heads[link] - ranks
        if tails[link] < ranks and switch >= 0 and lengths[link] < limit:
            length = lengths[link] + offsets[tails[link]]
            offered = _offer(near[switch], whose[switch], length, top[tails[link]])
            if offered and not queued[switch]:
                queued[switch] = True
                queue[last] = switch
                last += 1
    while first != last:
        here = queue[first]
        first = (first + 1) % (switches + 1)
        queued[here] = False
        for place in range(start[here + ranks], start[here + ranks + 1]):
            link = order[place]
            there = heads[link] - ranks
            if there < 0 or lengths[link] >= limit:
                continue
            better = False
            for which in range(2):
                if near[here, which] < limit:
                    cost = near[here, which] + lengths[link]
                    if _offer(near[there], whose[there], cost, whose[here, which]):
                        better = True
            if better and not queued[there]:
                queued[there] = True
                queue[last] = there
                last = (last + 1) % (switches + 1)


@kernel
def _offer(near: Ints, whose: Ints, cost: int, one: int) -> bool:
    """Let a set be one of the nearest two if it is; whether anything changed."""
    if whose[0] == one:
        if cost >= near[0]:
            return False
        near[0] = cost
        return True
    if cost < near[0]:
        near[1], whose[1] = near[0], whose[0]
        near[0], whose[0] = cost, one
        return True
    if cost < near[1]:  # nearer than what the same set, or another one, offered before
        near[1], whose[1] = cost, one
        return True
    return False


@kernel
def _joined(
    ranks: int,
    size: int,
    tails: Ints,
    heads: Ints,
    lengths: Ints,
    offsets: Ints,
    limit: int,
    top: Ints,
    needs: Ints,
    near: Ints,
    sets: int,
) -> Ints:
    """The strong component of each set, where edges cost nothing more; a switch is two vertices.

    Its two distances stand for two vertices because a way must keep to one of them: every way from rank to
    rank then has exactly the length that the needs of its end pay for.
    """
    switches = size - ranks
    count = sets + 2 * switches
    edge_tails, edge_heads = np.empty(4 * len(tails), np.int64), np.empty(4 * len(tails), np.int64)
    edges = 0
    for link in range(len(tails)):
        tail, head, length = tails[link], heads[link], lengths[link] + offsets[tails[link]]
        if length >= limit:
            continue
        for i in range(1 if tail < ranks else 2):
            if tail < ranks:
                source, so_far = top[tail], 0
            else:
                source, so_far = sets + 2 * (tail - ranks) + i, near[tail - ranks, i]
            if so_far >= limit:
                continue
            for j in range(1 if head < ranks else 2):
                if head < ranks:
                    target, wanted = top[head], needs[head]
                else:
                    target, wanted = sets + 2 * (head - ranks) + j, near[head - ranks, j]
                if so_far + length == wanted and source != target:
                    edge_tails[edges], edge_heads[edges] = source, target
                    edges += 1
    return strong_components(count, edge_tails[:edges], edge_heads[:edges])


@kernel
def _merged(top: Ints, parts: Ints, parents: Ints, sets: int) -> tuple[int, int]:
    """Make one set of those in each component; how many sets there are then, and how many outermost."""
    first = np.full(len(parts), -1)
    made = np.full(len(parts), -1)
    before = sets
    for rank in range(len(top)):
        part = parts[top[rank]]
        if first[part] < 0:
            first[part] = top[rank]
        elif first[part] != top[rank]:
            if made[part] < 0:
                made[part] = sets
                parents[first[part]] = sets
                sets += 1
            parents[top[rank]] = made[part]
    left = 0
    seen: Flags = np.zeros(len(parts), np.bool_)
    for rank in range(len(top)):
        part = parts[top[rank]]
        if not seen[part]:
            seen[part] = True
            left += 1
        if made[part] >= 0:
            top[rank] = made[part]
    assert sets > before, "some sets enter each other at no cost"
    return sets, left


@kernel
def strong_components(count: int, tails: Ints, heads: Ints) -> Ints:
    """The number of the strong component of each vertex of a directed graph (Tarjan 1972)."""
    start = np.zeros(count + 1, np.int64)
    for tail in tails:
        start[tail + 1] += 1
    start = np.cumsum(start)
    place = start[:count].copy()
    targets = np.empty(len(tails), np.int64)
    for edge in range(len(tails)):
        targets[place[tails[edge]]] = heads[edge]
        place[tails[edge]] += 1
    place = start[:count].copy()
    number, lowest = np.full(count, -1), np.zeros(count, np.int64)
    component = np.full(count, -1)
    waiting, path = np.empty(count, np.int64), np.empty(count, np.int64)
    waits, numbers, components = 0, 0, 0
    for begin in range(count):
        if number[begin] >= 0:
            continue
        path[0], depth = begin, 1
        while depth:
            here = path[depth - 1]
            if number[here] < 0:
                number[here] = lowest[here] = numbers
                numbers += 1
                waiting[waits] = here
                waits += 1
            if place[here] < start[here + 1]:
                there = targets[place[here]]
                place[here] += 1
                if number[there] < 0:
                    path[depth] = there
                    depth += 1
                elif component[there] < 0:
                    lowest[here] = min(lowest[here], number[there])
                continue
            depth -= 1
            if depth:
                lowest[path[depth - 1]] = min(lowest[path[depth - 1]], lowest[here])
            if lowest[here] == number[here]:
                while component[here] < 0:
                    waits -= 1
                    component[waiting[waits]] = components
                components += 1
    return component

"""Parts of blocks on ways through the fabric, moved until no link has more than it may carry; in integers.

Each block starts on one way. A link that has too much gives up parts to the shortest ways that have room,
where links that are often asked for too much become longer (negotiated congestion: McMurchie and Ebeling's
PathFinder, FPGA 1995). Everything is in whole numbers, so that all ranks of a job that plan alone plan alike.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.bounds.shortest_paths import shortest_tree
from arborcast.synth.kernels.compiled import Ints, kernel

Floats: TypeAlias = NDArray[np.float64]

PENALTY = 64
"""How many times as long a link counts that has no room, so that a detour around it is looked for first."""

MOST_HISTORY = 1 << 10


class LinkArrays(NamedTuple):
    """The links of a fabric as arrays.

    Attributes:
        start: of each vertex, the start of the links that leave it in `order`; one more at the end.
        order: the links by the vertices that they leave.
        tails: of each link, the vertex that it leaves.
        heads: of each link, the vertex that it enters.
    """

    start: Ints
    order: Ints
    tails: Ints
    heads: Ints


class Parts(NamedTuple):
    """Parts of blocks, each on a way; what kernels are given may have room behind them.

    Attributes:
        first: of each part, the start of its way in `links`; one more at the end.
        links: the ways, one after another.
        block: of each part, source times ranks plus target.
        amount: of each part, in whole units.
    """

    first: Ints
    links: Ints
    block: Ints
    amount: Ints

    def load(self, count: int) -> Ints:
        """What passes each of `count` links."""
        found = np.zeros(count, dtype=np.int64)
        add_up(self, found)
        return found


@kernel
def add_up(parts: Parts, load: Ints) -> None:
    """Add what passes each link."""
    first, links, _, amount = parts
    for part in range(len(amount)):
        for place in range(first[part], first[part + 1]):
            load[links[place]] += amount[part]


@kernel
def _room(link: int, load: Ints, limit: Ints, own: Ints, mark: int, amount: int) -> int:
    """What more a link takes of a part that may already pass it."""
    free: int = max(limit[link] - load[link], 0)
    return max(free, amount) if own[link] == mark else free


@kernel
def _is_on(parts: Parts, part: int, link: int, own: Ints, mark: int) -> bool:
    """Whether a part passes a link; the links that it passes are marked."""
    found = False
    for place in range(parts.first[part], parts.first[part + 1]):
        own[parts.links[place]] = mark
        if parts.links[place] == link:
            found = True
    return found


@kernel
def _trace(last: Ints, tails: Ints, source: int, target: int, way: Ints) -> int:
    """The links of a way, the last one first; how many there are."""
    hops, here = 0, target
    while here != source:
        way[hops] = last[here]
        here = tails[way[hops]]
        hops += 1
    return hops


@kernel
def _append(way: Ints, hops: int, of: int, moved: int, parts: Parts, count: int) -> bool:
    """Write down a part of a block on a way that was traced; whether there is room for it."""
    first, links, block, amount = parts
    if count + 1 >= len(first) or first[count] + hops > len(links):
        return False
    for hop in range(hops):
        links[first[count] + hop] = way[hops - 1 - hop]
    first[count + 1] = first[count] + hops
    block[count] = of
    amount[count] = moved
    return True


@kernel
def _relieve(
    link: int,
    ways: LinkArrays,
    lengths: Ints,
    limit: Ints,
    load: Ints,
    parts: Parts,
    count: int,
    ranks: int,
    searches: Ints,
) -> int:
    """Move parts away from one link until it has no more than its limit; how many parts there are then."""
    start, order, tails, heads = ways
    first, _, block, amount = parts
    own = np.zeros(len(heads), dtype=np.int64)
    prices = np.empty(len(heads), dtype=np.int64)
    way = np.empty(len(start) - 1, np.int64)
    for part in range(count):
        if load[link] <= limit[link]:
            break
        if amount[part] == 0 or not _is_on(parts, part, link, own, part + 1):
            continue
        source, target = block[part] // ranks, block[part] % ranks
        while amount[part] > 0 and load[link] > limit[link] and searches[0] > 0:
            searches[0] -= 1
            for other in range(len(prices)):
                full = _room(other, load, limit, own, part + 1, amount[part]) == 0
                prices[other] = lengths[other] * (PENALTY if full else 1)
            prices[link] = -1
            last = shortest_tree(start, order, heads, prices, source)[1]
            if last[target] < 0:
                break
            hops = _trace(last, tails, source, target, way)
            moved = min(amount[part], load[link] - limit[link])
            for hop in range(hops):
                free = _room(way[hop], load, limit, own, part + 1, amount[part])
                if free > 0:
                    moved = min(moved, free)
            if not _append(way, hops, block[part], moved, parts, count):
                searches[0] = 0
                break
            count += 1
            amount[part] -= moved
            for place in range(first[part], first[part + 1]):
                load[parts.links[place]] -= moved
            for hop in range(hops):
                load[way[hop]] += moved
    return count


@kernel
def reroute(
    ways: LinkArrays,
    lengths: Ints,
    limit: Ints,
    load: Ints,
    parts: Parts,
    count: int,
    ranks: int,
    passes: int,
    most: int,
) -> int:
    """Move parts until no link has more than its limit; how many parts there are then.

    It ends early after so many passes over the links, `most` searches for a way, or where there is no room
    any more behind the `count` parts. `load` is kept up to date.
    """
    history = np.ones(len(lengths), dtype=np.int64)
    searches = np.full(1, most, dtype=np.int64)
    for _ in range(passes):
        is_over = False
        for link in range(len(lengths)):
            if load[link] > limit[link] and searches[0] > 0:
                is_over = True
                history[link] = min(2 * history[link], MOST_HISTORY)
                longer = lengths * history
                count = _relieve(link, ways, longer, limit, load, parts, count, ranks, searches)
        if not is_over:
            break
    return count


@kernel
def peel(
    ways: LinkArrays, flow: Ints, wanted: Ints, source: int, parts: Parts, count: int, ranks: int
) -> int:
    """Ways of the fewest links that carry a flow from a rank, taken out of it; how many parts there are then.

    What rounding has left without a way stays in `wanted`, what each rank is to get.
    """
    start, order, tails, heads = ways
    size = len(start) - 1
    before = np.empty(size, dtype=np.int64)
    queue = np.empty(size, dtype=np.int64)
    way = np.empty(size, dtype=np.int64)
    for target in range(ranks):
        while target != source and wanted[target] > 0:
            for vertex in range(size):
                before[vertex] = -1
            queue[0], ahead, behind = source, 0, 1
            while ahead < behind and before[target] < 0:
                here = queue[ahead]
                ahead += 1
                for place in range(start[here], start[here + 1]):
                    link = order[place]
                    there = heads[link]
                    if flow[link] > 0 and before[there] < 0 and there != source:
                        before[there] = link
                        queue[behind] = there
                        behind += 1
            if before[target] < 0:
                break
            hops, moved = _trace(before, tails, source, target, way), wanted[target]
            for hop in range(hops):
                moved = min(moved, flow[way[hop]])
            if not _append(way, hops, source * ranks + target, moved, parts, count):
                return count
            for hop in range(hops):
                flow[way[hop]] -= moved
            wanted[target] -= moved
            count += 1
    return count


@kernel
def _lengthen(load: Floats, capacity: Floats, lengths: Floats) -> None:
    """Links as long as the twelfth power of their use, against that of the busiest, makes them."""
    busiest = 0.0
    for link in range(len(load)):
        busiest = max(busiest, load[link] / capacity[link])
    for link in range(len(load)):
        use = 0.05 + (load[link] / capacity[link] / busiest if busiest > 0 else 0.0)
        square = use * use
        fourth = square * square
        lengths[link] = (fourth * fourth * fourth + 1e-3) / capacity[link]


@kernel
def spread(
    ways: LinkArrays, capacity: Floats, amounts: Floats, rounds: int, flow: Floats, lengths: Floats
) -> None:
    """Flows of all sources that share the links evenly, as a start where nothing exact is known.

    Frank and Wolfe's method (1956), source by source: in each of so many rounds each moves a part of its
    flow to the tree of its shortest ways, where links are long by a power of their use. There are only sums,
    products and quotients of floats, which are the same on every machine. `flow`, of each source over each
    link, starts as zeros; `lengths` are in the end those in which the last source found its ways.
    """
    start, order, tails, heads = ways
    size, ranks = len(start) - 1, len(amounts)
    load = np.zeros(len(heads), dtype=np.float64)
    for turn in range(rounds):
        step = 1.0 if turn == 0 else 2.0 / (turn + 2)
        for source in range(ranks):
            _lengthen(load, capacity, lengths)
            _, last, settled = shortest_tree(start, order, heads, lengths, source)
            for link in range(len(heads)):
                load[link] -= step * flow[source, link]
                flow[source, link] *= 1.0 - step
            needed = np.zeros(size, dtype=np.float64)
            for target in range(ranks):
                needed[target] = amounts[source, target]
            for place in range(len(settled) - 1, 0, -1):  # the farthest first
                link = last[settled[place]]
                passing = needed[settled[place]]
                needed[tails[link]] += passing
                flow[source, link] += step * passing
                load[link] += step * passing

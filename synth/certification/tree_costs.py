"""What every spanning tree costs at least, proved by prices of sets (Edmonds 1967, Fulkerson 1974).

Sets carry prices such that what an edge enters costs no more than the edge. A tree from a root enters every
set without the root, so it costs at least the sum of their prices. `proved_costs` checks that rule, pair by
pair, and adds up: it is the proof, wherever the sets come from. `priced_sets` finds sets that prove the most
for all roots at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arborcast.synth.certification.exact_paths import FAR, Matrix
from arborcast.synth.errors import InputError
from arborcast.synth.kernels.compiled import Ints


@dataclass(frozen=True, eq=False)
class PricedSets:
    """Sets of vertices that are ranges of an order, with their prices.

    Attributes:
        order: every vertex once.
        starts: where each set begins in that order.
        stops: where it ends, exclusive.
        prices: at least 0.
    """

    order: Ints
    starts: Ints
    stops: Ints
    prices: Ints


def cheapest_costs(ways: Matrix) -> Ints:
    """The cost of the cheapest spanning out-tree from each vertex; `ways[u, v]` is what the edge costs.

    Raises:
        InputError: some vertex does not reach all others.
    """
    return proved_costs(ways, priced_sets(ways))


def cheapest_cost(ways: Matrix, root: int) -> int:
    """The cost of the cheapest spanning out-tree from one vertex, which need not be reached from others.

    Raises:
        InputError: it does not reach all others.
    """
    closed = ways.copy()
    closed[:, root] = 0  # so that no set with the root has a price
    return int(cheapest_costs(closed)[root])


def proved_costs(ways: Matrix, sets: PricedSets) -> Ints:
    """What the prices prove of the trees from each root.

    Args:
        ways: the cost of each edge, `FAR` for none, from rows to columns.
        sets: any sets with prices that keep the rule.

    Raises:
        InputError: a price is negative, or an edge enters sets that cost more than it does.

    Time and memory are quadratic in the vertices, and time is linear in the squared sizes of the sets.
    """
    if (sets.prices < 0).any():
        raise InputError(f"dual: prices of sets must not be negative, got {sets.prices.min()}")
    count = len(ways)
    shared = np.zeros((count, count), dtype=np.int64)  # prices of the sets that hold both
    for start, stop, price in zip(sets.starts, sets.stops, sets.prices, strict=True):
        if price:
            shared[start:stop, start:stop] += price
    holding = shared.diagonal().copy()
    entered = holding[np.newaxis, :] - shared
    over = entered > ways[np.ix_(sets.order, sets.order)]
    if over.any():
        src, dst = np.argwhere(over)[0]
        u, v = sets.order[src], sets.order[dst]
        raise InputError(
            f"dual: sets that hold {v} without {u} cost {entered[src, dst]}, the way is {ways[u, v]} long"
        )
    costs = np.empty(count, dtype=np.int64)
    costs[sets.order] = sets.prices.sum() - holding
    return costs


def priced_sets(ways: Matrix) -> PricedSets:
    """The sets that Edmonds' contraction forms, in O(n^2): they prove the exact cost from every root.

    A path grows backwards along the cheapest edge into its last set, whose price that is; where it meets
    itself, the cycle becomes one set, which is entered for what its parts cost beyond their prices. It ends
    when one set holds all (path growing after Gabow, Galil, Spencer and Tarjan 1986).

    Raises:
        InputError: some vertex does not reach all others.
    """
    count = len(ways)
    entering = np.array(ways.T, order="C")  # rows are sets, columns remain vertices
    np.fill_diagonal(entering, FAR)
    held = [np.array([vertex]) for vertex in range(count)]
    row_of = np.arange(count)
    sets: list[tuple[int, int, int]] = []  # first vertex, size, price
    path = [0]
    on_path = np.zeros(count, dtype=np.bool_)
    on_path[0] = True
    while len(held[path[-1]]) < count:
        here = path[-1]
        row = entering[here]
        tail = int(row.argmin())
        price = int(row[tail])
        if price >= FAR:
            raise InputError("dual: some rank cannot be reached, a cut shows that")
        sets.append((int(held[here][0]), len(held[here]), price))
        np.subtract(row, price, out=row, where=row < FAR)
        before = int(row_of[tail])
        if not on_path[before]:
            path.append(before)
            on_path[before] = True
            continue
        while path[-1] != before:
            merged = path.pop()
            np.minimum(entering[before], entering[merged], out=entering[before])
            row_of[held[merged]] = before
            held[before] = np.concatenate((held[before], held[merged]))
        entering[before, held[before]] = FAR
    order = held[path[-1]]
    place = np.empty(count, dtype=np.int64)
    place[order] = np.arange(count)
    first, sizes, prices = np.array(sets, dtype=np.int64).reshape(-1, 3).T
    return PricedSets(order, place[first], place[first] + sizes, prices)

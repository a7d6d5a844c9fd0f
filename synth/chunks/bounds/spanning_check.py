"""What the cheapest trees to every rank cost, recomputed backwards from the last step, for all roots at once.

A block that every rank must get is at some ranks after each step, and what the sends still to come cost
depends on those ranks alone. So a table of all sets of ranks, from the last step back to the first, ends
with the cost of each root.
"""

from __future__ import annotations

import numpy as np

from arborcast.synth.kernels.compiled import Ints, kernel

MOST_SPANNED = 18
"""Ranks up to which costs are recomputed: the time triples with each one more, to a second for each step."""

PLAIN_WORK = 100_000
"""Pairs of sets, one in the other, of all steps, up to which that may run as plain Python."""


def spanning_costs(costs: Ints, never: int) -> list[int]:
    """The cost of the cheapest tree from each rank to all others; `never` or more where there is none.

    Args:
        costs: of a send in each step (first axis) from each rank to each; `never` where there is none.
        never: more than any tree costs; its product with the number of ranks fits a word.
    """
    steps, ranks, _ = costs.shape
    to_come = _costs_to_come.compiled() if steps * 3**ranks > PLAIN_WORK else _costs_to_come
    table = to_come(np.ascontiguousarray(costs), never)
    return [int(table[1 << rank]) for rank in range(ranks)]


@kernel
def _costs_to_come(costs: Ints, never: int) -> Ints:
    """For each set of ranks that have the block before the first step what brings it to all others."""
    steps, ranks, _ = costs.shape
    size = 1 << ranks
    later = np.full(size, never, np.int64)
    later[size - 1] = 0
    joined, added = np.zeros((2, size), np.int64)  # sets that may join, the empty one first; their costs
    for step in range(steps - 1, -1, -1):
        now = later.copy()
        for held in range(1, size - 1):
            count = 1
            for rank in range(ranks):
                if held >> rank & 1:
                    continue
                price = never
                for holder in range(ranks):
                    if held >> holder & 1:
                        price = min(price, costs[step, holder, rank])
                if price >= never:
                    continue
                for part in range(count):
                    joined[count + part] = joined[part] | 1 << rank
                    added[count + part] = added[part] + price
                count *= 2
            for part in range(count):
                now[held] = min(now[held], added[part] + later[held | joined[part]])
        later = now
    return later

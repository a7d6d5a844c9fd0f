"""The cheapest spanning out-tree of at most a given height, which prices the shallow packings.

A tree of height h is a chain of growing sets of ranks, from the root to all: who joins in a layer hangs on
the nearest rank of the layers before. For few ranks a recursion over the sets finds the best chain. Finding
it is NP-hard.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arborcast.synth.kernels.compiled import Ints, kernel
from arborcast.synth.kernels.edmonds import LengthArray

LARGEST_EXACT = 16
"""Ranks up to which `cheapest_bounded` may be asked: its tables hold a number per set of ranks."""

UNUSABLE = 1 << 54
"""The cost of an edge that must not be used; what costs that much is no tree."""

LARGEST_COST = 1 << 48
"""Of one edge: those of a tree must add up to less than `UNUSABLE`."""


@dataclass(frozen=True, eq=False)
class BoundedTrees:
    """A tree for each root that was asked for.

    Attributes:
        cost: of each tree; `UNUSABLE` and more where there is none within the height.
        parents: a row per tree, -1 for its root.
    """

    cost: Ints
    parents: Ints


def effort_of(ranks: int, roots: int, height: int) -> int:
    """About how many additions `cheapest_bounded` takes."""
    sets: int = 3 ** (ranks - 1) if roots == 1 else 3**ranks
    subsets: int = 2**ranks
    return max(0, height - 2) * sets + (roots + ranks * ranks) * subsets


def cheapest_bounded(entering: LengthArray, roots: Ints, height: int) -> BoundedTrees:
    """The cheapest out-tree from each root among those of at most so many layers, exactly.

    Args:
        entering: `entering[child, parent]`, n x n integers from 0 to `LARGEST_COST`; more forbids an edge.
        roots: where the trees start.
        height: at least 1.

    Returns:
        The trees. Takes O(height 3^n) time and O(height 2^n) space for n ranks (3^(n - 1) for one root).
    """
    usable = np.where(entering <= LARGEST_COST, entering, UNUSABLE).astype(np.int64)
    height = min(height, len(entering) - 1)
    # Made here, so that the work of the kernel shows in the arrays that it is given.
    table = np.full((max(1, height - 1), 1 << len(entering)), UNUSABLE)
    return BoundedTrees(*_recursion(usable, roots, height, table))


@kernel
def _recursion(entering: Ints, roots: Ints, height: int, table: Ints) -> tuple[Ints, Ints]:
    """`table[d, joined]` becomes the least cost of hanging all other ranks on a set in d + 1 more layers."""
    size = entering.shape[0]
    every = (1 << size) - 1
    wanted = 0
    for root in roots:
        wanted |= 1 << root
    sums, sets = np.zeros(every + 1, np.int64), np.zeros(every + 1, np.int64)
    _fill(table, entering, wanted, sums, sets)
    nearest = np.zeros(size, np.int64)
    costs = np.full(roots.shape[0], UNUSABLE)
    parents = np.full((roots.shape[0], size), -1)
    for index, root in enumerate(roots):
        joined, level, cost = 1 << root, 1, np.int64(0)
        while joined != every and cost < UNUSABLE:
            left = height - level  # layers that may follow this one
            if left == 0:
                cost, joining = table[0, joined], every ^ joined
            else:
                cost, joining = _best_step(entering, joined, table[left - 1], sums, sets, nearest)
            if level == 1:
                costs[index] = cost
            for rank in range(size):
                if joining >> rank & 1:
                    parents[index, rank] = _nearest(entering, joined, rank)
            joined |= joining
            level += 1
    return costs, parents


@kernel
def _fill(table: Ints, entering: Ints, wanted: int, sums: Ints, sets: Ints) -> None:
    """The table of `_recursion`, for the sets that have a root in them; scratch is overwritten."""
    size = entering.shape[0]
    every = (1 << size) - 1
    nearest = np.zeros(size, np.int64)
    table[:, every] = 0
    for joined in range(1, every):
        if joined & wanted:
            _hang(entering, joined, nearest)
            total = np.int64(0)
            for rank in range(size):
                if not joined >> rank & 1:
                    total += nearest[rank]
            table[0, joined] = total if total < UNUSABLE else np.int64(UNUSABLE)
    for layer in range(1, table.shape[0]):
        for joined in range(1, every):
            if joined & wanted:
                table[layer, joined] = _best_step(entering, joined, table[layer - 1], sums, sets, nearest)[0]


@kernel
def _hang(entering: Ints, joined: int, nearest: Ints) -> None:
    """What it costs each rank to hang on the nearest of a set."""
    size = entering.shape[0]
    for rank in range(size):
        nearest[rank] = UNUSABLE
        for parent in range(size):
            if joined >> parent & 1 and entering[rank, parent] < nearest[rank]:
                nearest[rank] = entering[rank, parent]


@kernel
def _nearest(entering: Ints, joined: int, rank: int) -> int:
    best = -1
    for parent in range(entering.shape[0]):
        if joined >> parent & 1 and (best < 0 or entering[rank, parent] < entering[rank, best]):
            best = parent
    return best


@kernel
def _best_step(
    entering: Ints, joined: int, table: Ints, sums: Ints, sets: Ints, nearest: Ints
) -> tuple[np.int64, np.int64]:
    """The least cost of a layer and what follows it, and who joins in the layer; scratch is overwritten."""
    size = entering.shape[0]
    _hang(entering, joined, nearest)
    best, joining, count = np.int64(UNUSABLE), np.int64(0), 1
    sums[0], sets[0] = 0, 0
    for rank in range(size):
        if joined >> rank & 1 or nearest[rank] >= UNUSABLE:
            continue
        # All sets so far once more, each with this rank.
        cost, member = nearest[rank], 1 << rank
        for place in range(count):
            total, now = sums[place] + cost, sets[place] | member
            sums[count + place], sets[count + place] = total, now
            total += table[joined | now]
            if total < best:
                best, joining = total, now
        count *= 2
    return best, joining

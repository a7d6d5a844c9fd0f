"""What the cheapest trees to every rank cost, recomputed backwards from the last step, for all roots at once.

A block that every rank must get is at some ranks after each step. What the sends still to come cost depends
on those ranks alone, so that a table of all sets of ranks, from the last step back to the first, ends with
the cost of each root. Ranks that may be exchanged without changing any cost count as a class: a set of ranks
has none of a class, or some, or all, and all that are still missing may as well come at once, from wherever
and whenever one of them comes cheapest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.errors import InputError
from arborcast.synth.kernels.compiled import Ints, kernel

MOST_MARKS = 16
"""Marks of a set of ranks (one for a class of one rank, two for others) up to which costs are recomputed."""

PLAIN_WORK = 100_000
"""Pairs of sets, one in the other, of all steps, up to which that may run as plain Python."""


def spanning_costs(costs: Ints, never: int) -> list[int]:
    """The cost of the cheapest tree from each rank to all others; `never` or more where there is none.

    Args:
        costs: of a send in each step (first axis) from each rank to each; `never` where there is none.
        never: more than any tree costs; its product with the number of ranks fits a word.

    Raises:
        InputError: there are too many classes of ranks.
    """
    ranks = costs.shape[1]
    classes = classes_of(costs)
    marks = sum(1 if len(members) == 1 else 2 for members in classes)
    if marks > MOST_MARKS:
        raise InputError(
            f"cheapest trees to {ranks - 1} targets can be recomputed for at most {MOST_MARKS} marks of "
            f"classes of ranks that are alike, got {marks}"
        )
    larger = [members for members in classes if len(members) > 1]
    ordered = larger + [members for members in classes if len(members) == 1]
    first = [members[0] for members in ordered]
    other = [members[min(1, len(members) - 1)] for members in ordered]
    between = costs[:, first][:, :, first].copy()
    every = np.arange(len(first))
    between[:, every, every] = costs[:, first, other]
    missing = np.array([len(members) - 1 for members in larger], dtype=np.int64)
    # Few numbers, but work that grows with the pairs of sets, one in the other.
    costs_to_come = _costs_to_come.compiled() if len(costs) * 3**marks > PLAIN_WORK else _costs_to_come
    table = costs_to_come(np.ascontiguousarray(between), missing, marks, never)
    return [
        int(table[1 << next(at for at, members in enumerate(ordered) if rank in members)])
        for rank in range(ranks)
    ]


def classes_of(costs: Ints) -> list[list[int]]:
    """The ranks divided into those of which any two may be exchanged without changing the cost of a send."""
    classes: list[list[int]] = []
    for rank in range(costs.shape[1]):
        alike = next((members for members in classes if _alike(costs, members[0], rank)), None)
        if alike is None:
            classes.append([rank])
        else:
            alike.append(rank)
    return classes


def _alike(costs: NDArray[np.int64], one: int, other: int) -> bool:
    exchanged = np.arange(costs.shape[1])
    exchanged[[one, other]] = other, one
    off_diagonal = ~np.eye(costs.shape[1], dtype=np.bool_)
    moved = costs[:, exchanged][:, :, exchanged]
    return bool((moved == costs)[:, off_diagonal].all())


@kernel
def _costs_to_come(between: Ints, missing: Ints, marks: int, never: int) -> Ints:
    """For each set of ranks before the first step what brings all others the block.

    The low bits of a set say of which classes it has some, the high ones of which of the first it has all.
    """
    steps, classes = between.shape[0], between.shape[1]
    size, several = 1 << marks, missing.shape[0]
    later = np.full(size, never, np.int64)
    later[size - 1] = 0
    price, added = np.empty(marks, np.int64), np.empty(size, np.int64)
    for step in range(steps - 1, -1, -1):
        now = later.copy()
        for held in range(1, size):
            if (held >> classes) & ~held:
                continue  # all of a class, and none of it: there is no such set, and it stays at never
            for entered in range(classes):
                least = never
                for holder in range(classes):
                    if held >> holder & 1 and between[step, holder, entered] < least:
                        least = between[step, holder, entered]
                price[entered] = least
                if entered < several:
                    price[classes + entered] = min(never, least * missing[entered])
            absent = (size - 1) & ~held
            usable = 0
            for mark in range(marks):
                if absent >> mark & 1 and price[mark] < never:
                    usable |= 1 << mark
            best = later[held]
            added[0] = 0
            # Ascending submasks, so that each is one mark more than one before it.
            part = 0
            while part != usable:
                part = (part - usable) & usable
                count = 0
                while not part >> count & 1:
                    count += 1
                added[part] = added[part & (part - 1)] + price[count]
                best = min(best, added[part] + later[held | part])
            now[held] = best
        later = now
    return later

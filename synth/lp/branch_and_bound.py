"""Whether no choice of a few trees reaches a rate: a branch and bound whose every limit is exact.

HiGHS proposes at each vertex the prices of links and of using a tree at all; what the prices prove is
computed in whole numbers (`TreeRows.limit`), so that a "no" does not rest on its tolerances.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from arborcast.synth.deadline import Deadline
from arborcast.synth.lp.tree_program import TreeProgram, TreeRows, Weighable, is_below

_WHOLE = 1 << 20  # what the full use of a tree counts, so that parts of it are whole numbers
EFFORT = 150_000
"""Entries in all linear programs together that a proof is worth: about a quarter of a second."""

_USED = 1e-7  # a smaller weight is none


@dataclass(frozen=True, eq=False)
class _Counted:
    """A tree that also uses a part of its group's number of trees."""

    group: int
    used: Mapping[int, int]


def is_ruled_out(
    rows: TreeRows,
    trees: Sequence[Weighable],
    most: int,
    rate: Fraction,
    *,
    strictly: bool,
    deadline: Deadline,
    effort: int = EFFORT,
) -> bool:
    """Whether it is proved that at most so many trees of each group do not reach a rate.

    Args:
        rows: what the trees share.
        trees: to choose from.
        most: trees of each group.
        rate: the sum of the shares.
        strictly: whether the rate itself must be out of reach; otherwise any larger one.
        deadline: when to give up.
        effort: entries of linear programs after which to give up, the same on any machine.
    """
    largest = [rows.alone(tree) for tree in trees]
    part = [int(_WHOLE / one) for one in largest]  # downwards: trees count for too little, never too much
    waiting: list[tuple[frozenset[int], frozenset[int]]] = [(frozenset(), frozenset())]
    while waiting:
        taken, left_out = waiting.pop()
        counts = Counter(trees[index].group for index in taken)
        allowed = [
            index
            for index in range(len(trees))
            if index in taken or (index not in left_out and counts[trees[index].group] < most)
        ]
        if effort <= 0 or deadline.has_passed:
            return False
        effort -= sum(len(trees[index].used) for index in allowed)
        counted, capacities = [], [*rows.capacities]
        row_of: dict[int, int] = {}
        for group in range(len(rows.share_of)):
            if counts[group] < most:
                row_of[group] = len(capacities)
                capacities.append(Fraction((most - counts[group]) * _WHOLE))
        for index in allowed:
            tree = trees[index]
            extra = {} if index in taken else {row_of[tree.group]: part[index]}
            counted.append(_Counted(tree.group, {**tree.used, **extra}))
        program = TreeProgram(TreeRows(tuple(capacities), rows.share_of), counted)
        weighed = program.solve()
        if is_below(program, weighed, rate, strictly=strictly):
            continue
        carrying = {
            index: weight / float(largest[index])
            for index, weight in zip(allowed, weighed.weights.tolist(), strict=True)
            if weight > _USED and index not in taken
        }
        used = counts + Counter(trees[index].group for index in carrying)
        crowded = [index for index in carrying if used[trees[index].group] > most]
        if not crowded:
            return False  # this choice reaches it, or nearly
        branch = max(crowded, key=carrying.__getitem__)
        waiting += [(taken | {branch}, left_out), (taken, left_out | {branch})]
    return True

"""Few trees per root: which of the trees that were met carry the most together.

Few trees mean few and long messages. An integer program chooses among the trees of the pool; what it proves
holds for the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from arborcast.synth.deadline import Deadline
from arborcast.synth.lp.tree_program import CLOSE, TreeProgram, few
from arborcast.synth.packing.ruling_out import is_ruled_out
from arborcast.synth.packing.symmetric.columns import Column
from arborcast.synth.packing.symmetric.problem import Problem
from arborcast.synth.packing.symmetric.weights import exact_rate
from arborcast.synth.schedule import Settings

_SEARCH_LIMIT = 200  # vertices of the branch and bound
_MOST_COLUMNS = 120  # a larger choice takes too long


def within_tolerance(
    problem: Problem, columns: Sequence[Column], tolerance: Fraction, deadline: Deadline
) -> tuple[list[Column], Settings]:
    """The trees with the fewest per group that lose at most a part of the rate of all of them."""
    wanted = exact_rate(problem, columns) * (1 - tolerance)
    most = max(np.bincount([column.group for column in columns]))
    number = 1
    while True:
        chosen, facts = few_trees(problem, columns, number, deadline)
        if number >= most or exact_rate(problem, chosen) >= wanted:
            return chosen, facts
        number += 1


def few_trees(
    problem: Problem, columns: Sequence[Column], most: int, deadline: Deadline
) -> tuple[list[Column], Settings]:
    """At most so many trees per group, at the best rate that was found.

    Returns:
        The trees, and whether better ones among all that were met are ruled out ("few").
    """
    kept = _likely(problem, columns)
    found, closed = few(
        problem.rows,
        kept,
        most=most,
        rate=None,
        start=(),
        search_limit=_SEARCH_LIMIT,
        seed=0,
        seconds=deadline.left_s,
    )
    if found is None:
        return _heaviest(problem, columns, most), (("few", "found: the heaviest"),)
    chosen = [kept[index] for index in found]
    rate = exact_rate(problem, chosen)
    if closed and is_ruled_out(problem.rows, columns, most, rate, strictly=False, deadline=deadline):
        return chosen, (("few", "best of the trees met"),)
    return chosen, (("few", "found: HiGHS calls them the best" if closed else "found: good trees"),)


def _likely(problem: Problem, columns: Sequence[Column]) -> list[Column]:
    """Those that carry something, then those that carry most alone."""
    if len(columns) <= _MOST_COLUMNS:
        return list(columns)
    weights = TreeProgram(problem.rows, columns).solve().weights
    alone = [
        max(uses / float(b) for uses, b in zip(column.uses, problem.budgets, strict=True))
        for column in columns
    ]
    ranked = sorted(range(len(columns)), key=lambda index: (weights[index] <= CLOSE, alone[index], index))
    return [columns[index] for index in sorted(ranked[:_MOST_COLUMNS])]


def _heaviest(problem: Problem, columns: Sequence[Column], most: int) -> list[Column]:
    """The trees of each group that carry most in the optimum of all."""
    weights = TreeProgram(problem.rows, columns).solve().weights
    chosen: list[int] = []
    for group in range(len(problem.groups)):
        members = [index for index, column in enumerate(columns) if column.group == group]
        chosen += sorted(members, key=lambda index: (-weights[index], index))[:most]
    return [columns[index] for index in sorted(chosen)]

"""Few trees per root: which of the trees that were met carry the most together.

Few trees mean few and long messages. An integer program chooses among the trees of the pool; what it proves
holds for the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from synth.deadline import Deadline
from synth.highs import limit_time, new_model
from synth.packing.symmetric.generation import CLOSE
from synth.packing.symmetric.master import Column, Master
from synth.packing.symmetric.problem import Problem
from synth.schedule import Settings

_SEARCH_LIMIT = 200  # vertices of the branch and bound
_MOST_COLUMNS = 120  # a larger choice takes too long


def within_tolerance(
    problem: Problem, columns: Sequence[Column], tolerance: Fraction, deadline: Deadline
) -> tuple[list[Column], Settings]:
    """The trees with the fewest per group that lose at most a part of the rate of all of them."""
    wanted = Master(problem, columns).solve().rate * (1 - float(tolerance)) * (1 - CLOSE)
    most = max(np.bincount([column.group for column in columns]))
    number = 1
    while True:
        chosen, facts = few_trees(problem, columns, number, deadline)
        if number >= most or Master(problem, chosen).solve().rate >= wanted:
            return chosen, facts
        number += 1


def few_trees(
    problem: Problem, columns: Sequence[Column], most: int, deadline: Deadline
) -> tuple[list[Column], Settings]:
    """At most so many trees per group, at the best rate that was found.

    Returns:
        The trees, and whether better ones among all that were met are ruled out ("few").
    """
    import highspy

    kept = _likely(problem, columns)
    budgets = np.array([float(budget) for budget in problem.budgets])
    orbits, groups = len(budgets), len(problem.groups)
    model = new_model(mip_max_nodes=_SEARCH_LIMIT)
    limit_time(model, deadline.left_s)
    nothing = (0, np.array([], dtype=np.int32), np.array([], dtype=np.float64))
    for _ in range(orbits):
        model.addRow(-np.inf, 1.0, *nothing)
    for _ in range(groups):
        model.addRow(0.0, 0.0, *nothing)
    for _ in range(groups):
        model.addRow(-np.inf, float(most), *nothing)
    for share in range(problem.shares):
        carried = [orbits + i for i, group in enumerate(problem.groups) if group.share == share]
        model.addCol(
            -1.0, 0.0, np.inf, len(carried), np.array(carried, dtype=np.int32), np.full(len(carried), -1.0)
        )
    for column in kept:
        uses = np.array(column.uses)
        used = np.flatnonzero(uses)
        rows = np.append(used, orbits + column.group).astype(np.int32)
        model.addCol(0.0, 0.0, np.inf, len(rows), rows, np.append(uses[used] / budgets[used], 1.0))
    for index, column in enumerate(kept):
        largest = float(min(budgets[o] / uses for o, uses in enumerate(column.uses) if uses))
        place = problem.shares + index
        model.addRow(-np.inf, 0.0, 1, np.array([place], dtype=np.int32), np.array([1.0]))
        rows = np.array([orbits + groups + column.group, model.getNumRow() - 1], dtype=np.int32)
        model.addCol(0.0, 0.0, 1.0, 2, rows, np.array([1.0, -largest]))
        model.changeColIntegrality(model.getNumCol() - 1, highspy.HighsVarType.kInteger)
    model.run()
    optimal = model.modelStatusToString(model.getModelStatus()) == "Optimal"
    solution = model.getSolution()
    if not solution.value_valid:
        return _heaviest(problem, columns, most), (("few", "heaviest"),)
    values = np.array(solution.col_value)
    switches = values[problem.shares + len(kept) :]
    chosen = [column for column, on in zip(kept, switches, strict=True) if on > 0.5]
    proved = optimal and len(kept) == len(columns)
    return chosen, (("few", "best of the trees met" if proved else "good among the trees met"),)


def _likely(problem: Problem, columns: Sequence[Column]) -> list[Column]:
    """Those that carry something, then those that carry most alone."""
    if len(columns) <= _MOST_COLUMNS:
        return list(columns)
    weights = Master(problem, columns).solve().weights
    alone = [
        max(uses / float(b) for uses, b in zip(column.uses, problem.budgets, strict=True))
        for column in columns
    ]
    ranked = sorted(range(len(columns)), key=lambda index: (weights[index] <= CLOSE, alone[index], index))
    return [columns[index] for index in sorted(ranked[:_MOST_COLUMNS])]


def _heaviest(problem: Problem, columns: Sequence[Column], most: int) -> list[Column]:
    """The trees of each group that carry most in the optimum of all."""
    weights = Master(problem, columns).solve().weights
    chosen: list[int] = []
    for group in range(len(problem.groups)):
        members = [index for index, column in enumerate(columns) if column.group == group]
        chosen += sorted(members, key=lambda index: (-weights[index], index))[:most]
    return [columns[index] for index in sorted(chosen)]

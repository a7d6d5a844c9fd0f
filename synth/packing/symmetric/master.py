"""The trees known so far, and the linear program that weighs them and prices the link orbits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from synth.highs import new_model
from synth.packing.symmetric.growth import Grown
from synth.packing.symmetric.problem import Problem

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Column:
    """A tree of a group.

    Attributes:
        group: its index in the problem.
        grown: the tree.
    """

    group: int
    grown: Grown

    @property
    def height(self) -> int:
        """Of the tree."""
        return self.grown.height

    @property
    def uses(self) -> tuple[int, ...]:
        """How often it uses each orbit; of a mirrored tree, both ways together."""
        return self.grown.uses


@dataclass
class Pool:
    """All trees met so far; of those that a group cannot tell apart by their uses, the lowest."""

    columns: list[Column] = field(default_factory=list)
    _place: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)

    def add(self, column: Column) -> bool:
        """Put a tree in; whether its uses are new. A lower tree takes the place of a higher one."""
        key = (column.group, column.uses)
        if key in self._place:
            place = self._place[key]
            if column.height < self.columns[place].height:
                self.columns[place] = column
            return False
        self._place[key] = len(self.columns)
        self.columns.append(column)
        return True

    def up_to(self, height: int) -> list[Column]:
        """The trees of at most a height."""
        return [column for column in self.columns if column.height <= height]


@dataclass(frozen=True, eq=False)
class Weighed:
    """What the linear program answers.

    Attributes:
        rate: the sum of the shares, as a part of the target.
        weights: of the columns, likewise.
        prices: of using an orbit once, by orbit.
        values: what a tree of each group is worth: a cheaper one would raise the rate.
    """

    rate: float
    weights: Floats
    prices: Floats
    values: Floats


class Master:
    """The program: orbits within their budgets, the trees of each group together carry its share."""

    def __init__(self, problem: Problem, columns: Iterable[Column] = ()) -> None:
        import highspy

        self.problem = problem
        self.budgets = np.array([float(budget) for budget in problem.budgets])
        self.columns: list[Column] = []
        self._infinity = highspy.kHighsInf
        self._solver = model = new_model(solver="simplex", presolve="off")
        nothing = (0, np.array([], dtype=np.int32), np.array([], dtype=np.float64))
        for _ in problem.budgets:
            model.addRow(-self._infinity, 1.0, *nothing)
        for _ in problem.groups:
            model.addRow(0.0, 0.0, *nothing)
        for share in range(problem.shares):
            rows = [len(problem.budgets) + i for i, g in enumerate(problem.groups) if g.share == share]
            entries = np.full(len(rows), -1.0)
            model.addCol(-1.0, 0.0, self._infinity, len(rows), np.array(rows, dtype=np.int32), entries)
        for column in columns:
            self.add(column)

    def add(self, column: Column) -> None:
        """One more tree."""
        uses = np.array(column.uses)
        orbits = np.flatnonzero(uses)
        rows = np.append(orbits, len(self.budgets) + column.group).astype(np.int32)
        entries = np.append(uses[orbits] / self.budgets[orbits], 1.0)
        self._solver.addCol(0.0, 0.0, self._infinity, len(rows), rows, entries)
        self.columns.append(column)

    def solve(self) -> Weighed:
        """The best weights of the trees there are."""
        self._solver.run()
        status = self._solver.modelStatusToString(self._solver.getModelStatus())
        if status != "Optimal":
            raise ArithmeticError(f"HiGHS ended with {status}")
        solution = self._solver.getSolution()
        values, duals = np.array(solution.col_value), np.array(solution.row_dual)
        count = len(self.budgets)
        return Weighed(
            float(values[: self.problem.shares].sum()),
            np.maximum(values[self.problem.shares :], 0.0),
            np.maximum(-duals[:count], 0.0) / self.budgets,
            duals[count:],
        )


def load_of(problem: Problem, columns: Sequence[Column], weights: Sequence[Fraction]) -> Fraction:
    """The fullest orbit: 1 where the weights, as parts of the target, are just what it carries."""
    loads = [Fraction(0)] * len(problem.budgets)
    for column, weight in zip(columns, weights, strict=True):
        if weight:
            for orbit, count in enumerate(column.uses):
                loads[orbit] += weight * count
    return max(load / budget for load, budget in zip(loads, problem.budgets, strict=True))

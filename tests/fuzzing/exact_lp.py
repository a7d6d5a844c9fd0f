"""The optimum of a linear program in fractions: HiGHS proposes a basis, exact numbers decide.

    max c x   with   A x <= b,  x >= 0,  where b >= 0, so that x = 0 is a start

A basis is believed where its primal and dual solutions, in fractions, are feasible: that proves the optimum.
Where they are not, z3 has the last word.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import highspy
import numpy as np
import z3

Row = dict[int, Fraction]


@dataclass
class Program:
    """Variables by any name; `maximum` solves it."""

    columns: dict[Hashable, int] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    bounds: list[Fraction] = field(default_factory=list)
    values: dict[Hashable, Fraction] = field(default_factory=dict)

    def at_most(self, coefficients: Mapping[Hashable, Fraction | int], bound: Fraction | int = 0) -> None:
        """Add a row."""
        assert bound >= 0
        row: Row = {}
        for name, coefficient in coefficients.items():
            if coefficient:
                row[self.columns.setdefault(name, len(self.columns))] = Fraction(coefficient)
        self.rows.append(row)
        self.bounds.append(Fraction(bound))

    def equal(self, coefficients: Mapping[Hashable, Fraction | int]) -> None:
        """Add a row that is zero."""
        self.at_most(coefficients)
        self.at_most({name: -coefficient for name, coefficient in coefficients.items()})

    def maximum(self, name: Hashable) -> Fraction:
        """The largest value of one variable, exactly; `values` then holds all of them."""
        target = self.columns.setdefault(name, len(self.columns))
        found = self._by_basis(target)
        if found is None:
            found = self.by_z3(target)
        self.values = {name: found.get(column, Fraction(0)) for name, column in self.columns.items()}
        return found.get(target, Fraction(0))

    def _by_basis(self, target: int) -> dict[int, Fraction] | None:
        """The solution of HiGHS's last basis, if exact numbers prove it."""
        basic = _proposed(self.rows, self.bounds, len(self.columns), target)
        if basic is None:
            return None
        inside, tight = basic
        square = [
            {column: row[column] for column in inside if column in row}
            for row in map(self.rows.__getitem__, tight)
        ]
        primal = _solved(square, [self.bounds[row] for row in tight])
        transposed: dict[int, Row] = {column: {} for column in inside}
        for place, row in enumerate(square):
            for column, value in row.items():
                transposed[column][place] = value
        prices = _solved(
            [transposed[column] for column in inside], [Fraction(column == target) for column in inside]
        )
        if primal is None or prices is None or min([*primal.values(), *prices.values()], default=0) < 0:
            return None
        if any(_dot(row, primal) > bound for row, bound in zip(self.rows, self.bounds, strict=True)):
            return None
        needed: Row = {}
        for place, price in prices.items():
            for column, value in self.rows[tight[place]].items():
                needed[column] = needed.get(column, Fraction(0)) + price * value
        if needed.get(target, Fraction(0)) < 1 or any(value < 0 for value in needed.values()):
            return None
        return primal

    def by_z3(self, target: int) -> dict[int, Fraction]:
        """What z3's own simplex method in fractions finds."""
        model = z3.Optimize()
        values = [z3.Real(f"x{column}") for column in range(len(self.columns))]
        model.add([value >= 0 for value in values])
        for row, bound in zip(self.rows, self.bounds, strict=True):
            terms = [z3.Q(*factor.as_integer_ratio()) * values[column] for column, factor in row.items()]
            model.add(z3.Sum([*terms, z3.RealVal(0)]) <= z3.Q(*bound.as_integer_ratio()))
        model.maximize(values[target])
        assert model.check() == z3.sat, "all zeros are allowed"
        found = [model.model().eval(value, model_completion=True) for value in values]
        return {column: Fraction(value.as_fraction()) for column, value in enumerate(found)}


def _proposed(
    rows: list[Row], bounds: list[Fraction], count: int, target: int
) -> tuple[list[int], list[int]] | None:
    """The columns that HiGHS leaves in its basis, and the rows whose slack it does not."""
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("threads", 1)
    model.setOptionValue("solver", "simplex")
    model.addVars(count, np.zeros(count), np.full(count, highspy.kHighsInf))
    model.changeColCost(target, -1.0)
    widest = max([bound for bound in bounds if bound], default=Fraction(1))
    for row, bound in zip(rows, bounds, strict=True):
        model.addRow(
            -highspy.kHighsInf,
            float(bound / widest),
            len(row),
            np.array(list(row), dtype=np.int32),
            np.array([float(value) for value in row.values()]),
        )
    model.run()
    basis = model.getBasis()
    if not basis.valid:
        return None
    is_basic = highspy.HighsBasisStatus.kBasic
    inside = [column for column, status in enumerate(basis.col_status) if status == is_basic]
    tight = [row for row, status in enumerate(basis.row_status) if status != is_basic]
    return (inside, tight) if len(inside) == len(tight) else None


def _solved(rows: list[Row], right: list[Fraction]) -> dict[int, Fraction] | None:
    """The only solution of as many equations as unknowns; None where there is not exactly one."""
    left = [({**row}, value) for row, value in zip(rows, right, strict=True)]
    taken: list[tuple[int, Row, Fraction]] = []
    while left:
        left.sort(key=lambda entry: -len(entry[0]))
        row, value = left.pop()  # the shortest keeps the others short
        if not row:
            return None
        pivot = next(iter(row))
        scale = row[pivot]
        row, value = {column: entry / scale for column, entry in row.items()}, value / scale
        changed = []
        for other, rest in left:
            if pivot in other:
                factor = other[pivot]
                _subtract(other, row, factor)
                rest -= factor * value  # noqa: PLW2901
            changed.append((other, rest))
        left = changed
        taken.append((pivot, row, value))
    found: dict[int, Fraction] = {}
    for pivot, row, value in reversed(taken):
        found[pivot] = value - sum(
            (entry * found[column] for column, entry in row.items() if column != pivot), Fraction(0)
        )
    return found


def _subtract(row: Row, other: Row, factor: Fraction) -> None:
    for column, value in other.items():
        changed = row.get(column, Fraction(0)) - factor * value
        if changed:
            row[column] = changed
        else:
            row.pop(column, None)


def _dot(row: Row, values: Mapping[int, Fraction]) -> Fraction:
    return sum((value * values[column] for column, value in row.items() if column in values), Fraction(0))

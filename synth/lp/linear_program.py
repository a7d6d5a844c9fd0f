"""A small linear program in integers: solved in floating point by HiGHS, then made exact.

The optimal basis that HiGHS ends with says which rows are tight; solving those rows exactly gives the
vertex and its prices as Fractions. Rows can be added and the program solved again from where it stood.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.deadline import NO_DEADLINE, Deadline
from arborcast.synth.errors import NumericalError
from arborcast.synth.lp.exact_system import solve_basis
from arborcast.synth.lp.highs import new_model, run

_COST_BITS = 20
"""The largest cost that HiGHS sees has no more; its tolerances are absolute."""


@dataclass(frozen=True, slots=True)
class ExactVertex:
    """A basic solution in exact arithmetic.

    Attributes:
        values: one per column.
        prices: one per row; what one unit more on its right side is worth.
    """

    values: tuple[Fraction, ...]
    prices: tuple[Fraction, ...]


@dataclass(frozen=True, slots=True)
class _SparseRow:
    columns: tuple[int, ...]
    coefficients: tuple[int, ...]
    lower: int | None
    upper: int | None


@dataclass
class LinearProgram:
    """Maximise `objective · x` over x >= 0 and the rows.

    Attributes:
        objective: one integer per column.
        scale: HiGHS sees all right sides divided by it, so that its tolerances mean the same for every unit.
    """

    objective: Sequence[int]
    scale: int
    _rows: list[_SparseRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Hand the columns to HiGHS: one thread and the dual simplex, hence the same vertex every time."""
        import highspy

        solver = new_model(
            solver="simplex",
            presolve="off",
            primal_feasibility_tolerance=1e-9,
            dual_feasibility_tolerance=1e-9,
        )
        count = len(self.objective)
        solver.addVars(count, np.zeros(count), np.full(count, highspy.kHighsInf))
        # Costs of many digits make HiGHS fail; powers of two change no other.
        largest = max(map(abs, self.objective), default=0)
        self._cost_unit = 2.0 ** max(0, largest.bit_length() - _COST_BITS)
        costs = np.array(self.objective, dtype=np.float64) / self._cost_unit
        solver.changeColsCost(count, np.arange(count, dtype=np.int32), costs)
        solver.changeObjectiveSense(highspy.ObjSense.kMaximize)
        self._infinity = highspy.kHighsInf
        self._upper = highspy.HighsBasisStatus.kUpper
        self._solver = solver

    def add_row(
        self,
        columns: Sequence[int],
        coefficients: Sequence[int],
        *,
        lower: int | None = None,
        upper: int | None = None,
    ) -> int:
        """Require `lower <= coefficients · x[columns] <= upper`; returns the row's number."""
        self._rows.append(_SparseRow(tuple(columns), tuple(coefficients), lower, upper))
        self._solver.addRow(
            -self._infinity if lower is None else lower / self.scale,
            self._infinity if upper is None else upper / self.scale,
            len(columns),
            np.array(columns, dtype=np.int32),
            np.array(coefficients, dtype=np.float64),
        )
        return len(self._rows) - 1

    def solve(self, deadline: Deadline = NO_DEADLINE) -> NDArray[np.float64]:
        """The values of the columns, in floating point.

        Raises:
            TimedOutError: the deadline passed.
            NumericalError: HiGHS ended without an optimum.
        """
        if (status := run(self._solver, deadline, what="a linear program")) != "Optimal":
            raise NumericalError(f"HiGHS ended with {status}")
        return np.array(self._solver.getSolution().col_value, dtype=np.float64) * self.scale

    def prices(self) -> NDArray[np.float64]:
        """What one unit more on each row's right side is worth, in floating point."""
        return np.array(self._solver.getSolution().row_dual, dtype=np.float64) * self._cost_unit

    def exact(self) -> ExactVertex:
        """The vertex of the last `solve`, exactly.

        It satisfies its tight rows exactly; the others hold up to the tolerance of HiGHS, so that who
        relies on one must check it.

        Raises:
            ArithmeticError: the basis is singular.
        """
        values, prices = solve_basis(self._solver, self._matrix, self._side, self.objective.__getitem__)
        none = Fraction(0)
        return ExactVertex(
            tuple(values.get(column, none) for column in range(len(self.objective))),
            tuple(prices.get(row, none) for row in range(len(self._rows))),
        )

    def _matrix(self, rows: Sequence[int], columns: Sequence[int]) -> NDArray[np.int64]:
        position = {column: k for k, column in enumerate(columns)}
        matrix = np.zeros((len(rows), len(columns)), dtype=np.int64)
        for k, row in enumerate(rows):
            entries = self._rows[row]
            for column, coefficient in zip(entries.columns, entries.coefficients, strict=True):
                if column in position:
                    matrix[k, position[column]] = coefficient
        return matrix

    def _side(self, row: int, status: object) -> int:
        """The limit at which a tight row stands."""
        lower, upper = self._rows[row].lower, self._rows[row].upper
        if lower is None or (upper is not None and status == self._upper):
            assert upper is not None, "every row has a limit"
            return upper
        return lower


_DENOMINATORS = range(1, 241)
_CLOSE = 1e-7  # how near floating lengths, the largest 1, must be to fractions to be taken for them


def rationalize(lengths: NDArray[np.float64], parts: int = 2**30) -> tuple[Fraction, ...]:
    """The fractions of smallest common denominator that are close; else the nearest of many parts.

    Args:
        lengths: not negative, the largest 1.
        parts: how finely lengths without a small common denominator are rounded.
    """
    for denominator in _DENOMINATORS:
        whole = np.round(lengths * denominator)
        if np.abs(lengths - whole / denominator).max() < _CLOSE:
            return tuple(Fraction(int(value), denominator) for value in whole)
    return tuple(Fraction(round(float(length) * parts), parts) for length in lengths)

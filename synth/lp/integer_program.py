"""An integer program in whole numbers for HiGHS, whose solutions are rounded and checked exactly.

Every coefficient is an integer, so that what HiGHS finds in floating point is brought to whole numbers and
put into every row before anybody sees it. That it finds nothing is checked by nobody, and proves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, TypeAlias

import numpy as np

from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import NumericalError
from arborcast.synth.lp.highs import limit_time, new_model

Values: TypeAlias = list[int]
"""The value of each column."""

_UNLIMITED = float("inf")
_FEASIBLE = 2  # how HiGHS says that what it ended with keeps all bounds


class IntegerProgram:
    """The least cost of whole numbers within bounds, whose sums keep bounds, too.

    Attributes:
        terms: entries of all rows together.
    """

    def __init__(self) -> None:
        """Without columns and rows."""
        self.terms = 0
        self._columns: list[tuple[int, int, float]] = []  # least, most, cost
        self._rows: list[tuple[float, float, Sequence[int], Sequence[int]]] = []

    def add_column(self, most: int, *, least: int = 0, cost: float = 0) -> int:
        """A new integer from `least` to `most`; its number."""
        self._columns.append((least, most, cost))
        return len(self._columns) - 1

    def add_row(
        self,
        columns: Sequence[int],
        coefficients: Sequence[int],
        *,
        least: float = -_UNLIMITED,
        most: float = _UNLIMITED,
    ) -> None:
        """The sum of coefficient times column is from `least` to `most`; no column may be named twice."""
        self._rows.append((least, most, columns, coefficients))
        self.terms += len(columns)

    def best(self, nodes: int, deadline: Deadline, *, seed: int = 0, **options: Any) -> Values | None:
        """What one branch and bound of HiGHS ends with, the least cost or not.

        Args:
            nodes: of its search.
            deadline: when to end it.
            seed: of HiGHS's own ties.
            options: any others by HiGHS's names.

        Returns:
            None where it found nothing, or what it found does not keep every bound in whole numbers.
        """
        model = new_model(seed=seed, mip_max_nodes=nodes, **options)
        self.pass_to(model)
        limit_time(model, deadline.left_s)
        model.run()
        if model.getInfo().primal_solution_status != _FEASIBLE:
            return None
        try:
            return self.solution_of(model)
        except NumericalError:
            return None

    def pass_to(self, model: Any) -> None:
        """State it in an empty model of HiGHS."""
        import highspy

        least, most, costs = np.array(self._columns, dtype=np.float64).T
        row_least, row_most, columns, coefficients = zip(*self._rows, strict=True)
        model.passModel(
            len(self._columns),
            len(self._rows),
            self.terms,
            int(highspy.MatrixFormat.kRowwise),
            int(highspy.ObjSense.kMinimize),
            0.0,
            np.ascontiguousarray(costs),
            np.ascontiguousarray(least),
            np.ascontiguousarray(most),
            np.array(row_least, dtype=np.float64),
            np.array(row_most, dtype=np.float64),
            np.array([0, *accumulate(map(len, columns))][:-1], dtype=np.int32),
            np.array([*chain(*columns)], dtype=np.int32),
            np.array([*chain(*coefficients)], dtype=np.float64),
            np.full(len(self._columns), int(highspy.HighsVarType.kInteger), dtype=np.int32),
        )

    def solution_of(self, model: Any) -> Values:
        """What HiGHS found, in whole numbers.

        Raises:
            NumericalError: these do not keep every bound exactly.
        """
        values = list(map(round, model.getSolution().col_value))
        sums = (
            (least, most, sum(c * values[column] for column, c in zip(columns, coefficients, strict=True)))
            for least, most, columns, coefficients in self._rows
        )
        bounds = ((least, most, value) for (least, most, _), value in zip(self._columns, values, strict=True))
        for what, rules in (("row", sums), ("column", bounds)):
            for number, (least, most, value) in enumerate(rules):
                if not least <= value <= most:
                    raise NumericalError(
                        f"HiGHS: {what} {number} must be from {least} to {most}, its solution in whole "
                        f"numbers gives {value}"
                    )
        return values

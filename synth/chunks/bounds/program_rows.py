"""Rows of a linear program, gathered to be handed to HiGHS at once, of which prices alone are asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import NumericalError
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.lp.highs import new_model, run

Prices: TypeAlias = NDArray[np.float64]


@dataclass
class ProgramRows:
    """Rows of a linear program, gathered to be handed over at once."""

    count: int = 0
    lower: list[Prices] = field(default_factory=list)
    upper: list[Prices] = field(default_factory=list)
    row: list[Ints] = field(default_factory=list)
    column: list[Ints] = field(default_factory=list)
    value: list[Prices] = field(default_factory=list)

    def add(self, lower: Iterable[float], upper: Iterable[float]) -> Ints:
        """New rows between these limits; returns their numbers."""
        self.lower.append(np.array(list(lower), dtype=np.float64))
        self.upper.append(np.array(list(upper), dtype=np.float64))
        first, self.count = self.count, self.count + len(self.lower[-1])
        return np.arange(first, self.count, dtype=np.int64)

    def add_at_most_zero(self, count: int) -> Ints:
        """So many rows that must not be positive."""
        return self.add(np.full(count, -np.inf), np.zeros(count))

    def put(self, row: Ints, column: Ints, value: float | Prices) -> None:
        """Entries of the matrix; where the row is -1 there is none."""
        there = row >= 0
        self.row.append(row[there])
        self.column.append(column[there])
        self.value.append(np.broadcast_to(value, row.shape)[there].astype(np.float64))

    def prices(self, columns: int, costly: int, deadline: Deadline) -> Prices:
        """The prices of the rows at the least sum of the first `costly` of so many columns, none negative.

        They are those of a vertex, the same on every machine.

        Raises:
            TimedOutError: the deadline passed.
            NumericalError: HiGHS failed.
        """
        import highspy

        # The interior point method, which ends at a vertex too: many flows are alike, which the simplex
        # method takes ten times as long to sort out.
        model = new_model(solver="ipm", primal_feasibility_tolerance=1e-9, dual_feasibility_tolerance=1e-9)
        none = np.zeros(0, dtype=np.int32)
        costs = np.zeros(columns)
        costs[:costly] = 1
        ranges = (np.zeros(columns), np.full(columns, highspy.kHighsInf))
        model.addCols(columns, costs, *ranges, 0, none, none, np.zeros(0))
        order = np.argsort(np.concatenate(self.row), kind="stable")
        row = np.concatenate(self.row)[order]
        model.addRows(
            self.count,
            np.concatenate(self.lower),
            np.concatenate(self.upper),
            len(row),
            np.searchsorted(row, np.arange(self.count)).astype(np.int32),
            np.concatenate(self.column)[order].astype(np.int32),
            np.concatenate(self.value)[order],
        )
        if (status := run(model, deadline, what="the limit by flows")) != "Optimal":
            raise NumericalError(f"HiGHS ended with {status}")
        return np.array(model.getSolution().row_dual, dtype=np.float64)

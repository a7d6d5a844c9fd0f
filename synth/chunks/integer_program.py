"""An integer program of which any solution will do: how chunk schedules are put to HiGHS.

`synth.chunks.ilp` and `synth.chunks.flow_ilp` write their columns and rows down here, one by one, and hand
them over at once. Every coefficient is an integer, so that what HiGHS finds in floating point is rounded and
checked exactly against every row before anybody sees it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from synth.chunks.orbits import Orbits
from synth.chunks.outcome import Impossible, Unfinished
from synth.highs import new_model

Values: TypeAlias = NDArray[np.int64]
"""The value of each column."""

SendColumns: TypeAlias = Mapping[tuple[int, int, int], Sequence[int]]
"""The columns of all sends by (chunk class, route, step)."""

TERMS_PER_EFFORT = 250
"""So many nonzeros make HiGHS search for about a millisecond between two looks at its limits (measured)."""

_UNLIMITED = float("inf")

# HiGHS looks up between the searches of a program inside the program, and these alone take seconds. Without
# them what is infeasible is proved faster, what is feasible is found as fast.
_NO_PROGRAMS_INSIDE = {
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_root_reduced_cost": False,
}


class IntegerProgram:
    """Columns with bounds, rows with bounds, and a cost that only says where to look first."""

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed
        self._costs: list[int] = []
        self._least: list[int] = []
        self._most: list[int] = []
        self._row_least: list[float] = []
        self._row_most: list[float] = []
        self._starts = [0]
        self._columns: list[int] = []
        self._coefficients: list[int] = []
        self._allowed = 0
        self._spent = 0

    def add_column(self, most: int, *, least: int = 0, cost: int = 0) -> int:
        """A new integer from `least` to `most`; its number."""
        self._costs.append(cost)
        self._least.append(least)
        self._most.append(most)
        return len(self._costs) - 1

    def add_row(
        self,
        columns: Sequence[int],
        coefficients: Sequence[int],
        *,
        least: float = -_UNLIMITED,
        most: float = _UNLIMITED,
    ) -> None:
        """The sum of coefficient times column is from `least` to `most`; no column may be named twice."""
        self._columns += columns
        self._coefficients += coefficients
        self._starts.append(len(self._columns))
        self._row_least.append(least)
        self._row_most.append(most)

    def run(self, effort: int | None) -> Values | Impossible | Unfinished:
        """Any solution.

        HiGHS cannot go on where it stopped. So effort is saved up until there is twice as much as the last
        time, and spent at once: all attempts together cost what was allowed.

        Args:
            effort: how much more may be spent, in units of about a millisecond; None for no limit.

        Raises:
            ArithmeticError: HiGHS failed, or its solution is none when it is rounded.
        """
        if effort is None:
            return self._attempt(None)
        self._allowed += effort
        if self._allowed < 2 * self._spent:
            return Unfinished()
        self._spent, self._allowed = self._allowed, 0
        return self._attempt(self._spent)

    def _attempt(self, effort: int | None) -> Values | Impossible | Unfinished:
        import highspy

        untyped: Any = highspy
        # The first solution is as good as any other: the cost is no goal.
        model = new_model(seed=self._seed, mip_max_improving_sols=1, **_NO_PROGRAMS_INSIDE)
        self._pass_to(model, untyped)
        if effort is not None:
            _stop_after(model, max(1, effort * TERMS_PER_EFFORT // max(1, len(self._columns))))
        model.run()
        status = model.getModelStatus()
        reasons = untyped.HighsModelStatus
        if status in {reasons.kOptimal, reasons.kSolutionLimit}:
            return self._checked(np.rint(np.array(model.getSolution().col_value)).astype(np.int64))
        if status in {reasons.kInfeasible, reasons.kUnboundedOrInfeasible}:  # all columns have bounds
            return Impossible()
        if status == reasons.kInterrupt:
            return Unfinished()
        raise ArithmeticError(f"HiGHS ended with {model.modelStatusToString(status)}")

    def _pass_to(self, model: Any, highspy: Any) -> None:
        columns, rows = len(self._costs), len(self._row_least)
        model.passModel(
            columns,
            rows,
            len(self._columns),
            int(highspy.MatrixFormat.kRowwise),
            int(highspy.ObjSense.kMinimize),
            0.0,
            np.array(self._costs, dtype=np.float64),
            np.array(self._least, dtype=np.float64),
            np.array(self._most, dtype=np.float64),
            np.array(self._row_least),
            np.array(self._row_most),
            np.array(self._starts[:-1], dtype=np.int32),
            np.array(self._columns, dtype=np.int32),
            np.array(self._coefficients, dtype=np.float64),
            np.full(columns, int(highspy.HighsVarType.kInteger), dtype=np.int32),
        )

    def _checked(self, values: Values) -> Values:
        """The same values, if they keep every bound exactly."""
        terms = np.array(self._coefficients, dtype=np.int64) * values[np.array(self._columns, dtype=np.int64)]
        sums = np.diff(np.concatenate([[0], np.cumsum(terms)])[self._starts])
        within = (np.array(self._row_least) <= sums) & (sums <= np.array(self._row_most))
        if not within.all():
            row = int(np.argmin(within))
            raise ArithmeticError(
                f"HiGHS: row {row} must be from {self._row_least[row]} to {self._row_most[row]}, its "
                f"solution in whole numbers gives {sums[row]}"
            )
        bounded = (np.array(self._least) <= values) & (values <= np.array(self._most))
        if not bounded.all():
            column = int(np.argmin(bounded))
            raise ArithmeticError(
                f"HiGHS: column {column} must be from {self._least[column]} to {self._most[column]}, "
                f"its solution in whole numbers gives {values[column]}"
            )
        return values


def add_rounds(program: IntegerProgram, steps: int, rounds: int) -> list[int]:
    """A column for the rounds of each step, at least one each, and the row that adds them up."""
    columns = [program.add_column(rounds - steps + 1, least=1) for _ in range(steps)]
    program.add_row(columns, [1] * steps, least=rounds, most=rounds)
    return columns


def add_limits(program: IntegerProgram, orbits: Orbits, rounds: Sequence[int], sends: SendColumns) -> None:
    """A row for each link and step: what is sent over it fits into the step's rounds.

    Args:
        program: to add to.
        orbits: whose links.
        rounds: the column of each step's rounds.
        sends: see `SendColumns`.
    """
    for limit in orbits.limits:
        loads: list[Counter[int]] = [Counter() for _ in rounds]
        for (chunk_class, route), times in Counter(limit.users).items():
            for step, load in enumerate(loads):
                for column in sends.get((chunk_class, route, step), ()):
                    load[column] += times
        for load, duration in zip(loads, rounds, strict=True):
            if load:
                program.add_row([*load, duration], [*load.values(), -limit.capacity], most=0)


def _stop_after(model: Any, looks: int) -> None:
    """Interrupt the next run when HiGHS has looked up so many times, which does not depend on the clock."""
    import highspy

    untyped: Any = highspy
    left = looks

    def look(kind: object, message: str, data: object, answer: Any, user: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            answer.user_interrupt = True

    model.setCallback(look, None)
    model.startCallback(untyped.cb.kCallbackMipInterrupt)

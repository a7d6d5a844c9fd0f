"""An integer program of which any solution will do: how chunk schedules are put to HiGHS.

`synth.chunks.encodings.ilp` and `synth.chunks.encodings.flow_ilp` write their columns and rows down here, one
by one, and hand them over at once. Every coefficient is an integer, so that what HiGHS finds in floating
point is rounded and checked exactly against every row before anybody sees it. That it finds nothing is
checked by nobody: such an `Infeasible` is no proof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.chunks.problem.orbits import ChunkOrbits
from arborcast.synth.chunks.problem.outcome import Infeasible, Unknown
from arborcast.synth.errors import NumericalError, Prover
from arborcast.synth.lp.highs import new_model, run

Values: TypeAlias = NDArray[np.int64]
"""The value of each column."""

SendColumns: TypeAlias = Mapping[tuple[int, int, int], Sequence[int]]
"""The columns of all sends by (chunk class, route, step)."""

TERMS_PER_EFFORT = 100
"""So many nonzeros make HiGHS search for about a millisecond between two looks at its limits (measured)."""

FIRST_EFFORT = 100
"""What the first attempt may spend; every further one twice as much as the one before."""

FIRST_LOOKS = 4
"""Looks at its limits that HiGHS needs to come to anything at all."""

_UNLIMITED = float("inf")

# HiGHS may search programs inside the program, each for seconds without a look at the limits.
_PROGRAMS_INSIDE = (
    "mip_heuristic_run_rens",
    "mip_heuristic_run_rins",
    "mip_heuristic_run_root_reduced_cost",
)


class IntegerProgram:
    """Columns with bounds, rows with bounds, and a cost that only says where to look first."""

    def __init__(self) -> None:
        self._costs: list[int] = []
        self._least: list[int] = []
        self._most: list[int] = []
        self._row_least: list[float] = []
        self._row_most: list[float] = []
        self._starts = [0]
        self._columns: list[int] = []
        self._coefficients: list[int] = []

    def copy(self) -> IntegerProgram:
        """The same program, to which other rows may be added."""
        twin = IntegerProgram()
        for name, entries in vars(self).items():
            setattr(twin, name, list(entries))
        return twin

    @property
    def terms(self) -> int:
        """Nonzeros of all rows together."""
        return len(self._columns)

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

    def solve(
        self, effort: int | None, *, seed: int = 0, programs_inside: bool = False
    ) -> Values | Infeasible | Unknown:
        """Any solution.

        Args:
            effort: in units of about a millisecond; None for no limit.
            seed: of HiGHS's own ties.
            programs_inside: whether HiGHS also tries programs with most columns fixed. Where it does, what
                is infeasible takes longer to prove, and some solutions are found sooner.

        Raises:
            NumericalError: HiGHS failed, or its solution is none when it is rounded.
        """
        # The first solution is as good as any other: the cost is no goal.
        inside = dict.fromkeys(_PROGRAMS_INSIDE, programs_inside)
        model = new_model(seed=seed, mip_max_improving_sols=1, **inside)
        self.pass_to(model)
        if effort is not None:
            _stop_after(model, effort * TERMS_PER_EFFORT // max(1, self.terms))
        match status := run(model):
            case "Optimal" | "Solution limit reached":
                return self.solution_of(model)
            case "Infeasible" | "Primal infeasible or unbounded":  # all columns have bounds
                return Infeasible(Prover.HIGHS)
            case "Interrupted by user":
                return Unknown()
        raise NumericalError(f"HiGHS ended with {status}")

    def pass_to(self, model: Any) -> None:
        """State it in an empty model of HiGHS."""
        import highspy

        columns, rows = len(self._costs), len(self._row_least)
        model.passModel(
            columns,
            rows,
            self.terms,
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

    def solution_of(self, model: Any) -> Values:
        """What HiGHS found, in whole numbers.

        Raises:
            NumericalError: these do not keep every bound exactly.
        """
        values: Values = np.rint(np.array(model.getSolution().col_value)).astype(np.int64)
        terms = np.array(self._coefficients, dtype=np.int64) * values[np.array(self._columns, dtype=np.int64)]
        sums = np.diff(np.concatenate([[0], np.cumsum(terms)])[self._starts])
        within = (np.array(self._row_least) <= sums) & (sums <= np.array(self._row_most))
        if not within.all():
            row = int(np.argmin(within))
            raise NumericalError(
                f"HiGHS: row {row} must be from {self._row_least[row]} to {self._row_most[row]}, its "
                f"solution in whole numbers gives {sums[row]}"
            )
        bounded = (np.array(self._least) <= values) & (values <= np.array(self._most))
        if not bounded.all():
            column = int(np.argmin(bounded))
            raise NumericalError(
                f"HiGHS: column {column} must be from {self._least[column]} to {self._most[column]}, "
                f"its solution in whole numbers gives {values[column]}"
            )
        return values


class Attempts:
    """The search for a solution by one attempt after the other, each with twice the effort.

    HiGHS takes a thousand times as long with one seed, or one way to write a program down, as with another,
    and it cannot go on where it stopped. So attempts take turns at the programs, with new seeds, and with
    and without programs inside: one that is lucky ends soon.
    """

    def __init__(self, programs: Sequence[IntegerProgram], *, seed: int) -> None:
        """Of programs that have the same columns and are solvable alike; the preferred one first."""
        self._programs = programs
        self._seed = seed
        self._number = 0
        self._saved = 0

    def run(self, effort: int | None) -> Values | Infeasible | Unknown:
        """Make the attempts for which there is enough effort, what was left by earlier calls included.

        Args:
            effort: in units of about a millisecond; None until there is an answer. The very first attempt
                is made in any case, and what it takes too much is missing later.

        Raises:
            NumericalError: HiGHS failed.
        """
        self._saved += effort or 0
        while effort is None or self._number == 0 or self._cost <= self._saved:
            self._saved -= 0 if effort is None else self._cost
            round_, turn = divmod(self._number, len(self._programs))
            answer = self._programs[turn].solve(
                self._cost, seed=self._seed + self._number, programs_inside=round_ % 2 == 1
            )
            if not isinstance(answer, Unknown):
                return answer
            self._number += 1
        return Unknown()

    @property
    def _cost(self) -> int:
        """Of the next attempt."""
        least = -(-FIRST_LOOKS * self._programs[0].terms // TERMS_PER_EFFORT)
        return max(FIRST_EFFORT, least) * int(2**self._number)


def add_rounds(program: IntegerProgram, steps: int, rounds: int) -> list[int]:
    """A column for the rounds of each step, at least one each, and the row that adds them up."""
    columns = [program.add_column(rounds - steps + 1, least=1) for _ in range(steps)]
    program.add_row(columns, [1] * steps, least=rounds, most=rounds)
    return columns


def add_limits(
    program: IntegerProgram, orbits: ChunkOrbits, rounds: Sequence[int], sends: SendColumns
) -> None:
    """A row for each link and step: what is sent over it fits into the step's rounds."""
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

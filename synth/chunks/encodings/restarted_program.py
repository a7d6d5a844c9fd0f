"""An integer program of which any solution will do, searched again and again by HiGHS.

HiGHS takes a thousand times as long with one seed as with another, and it cannot go on where it stopped. So
it is searched by one attempt after the other, each with a new seed and twice the effort: one that is lucky
ends soon. That it finds nothing is checked by nobody: such an `Infeasible` is no proof.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from arborcast.synth.chunks.problem.outcome import Infeasible, Unknown
from arborcast.synth.errors import NumericalError, Prover
from arborcast.synth.lp.highs import new_model, run
from arborcast.synth.lp.integer_program import IntegerProgram, Values

TERMS_PER_EFFORT = 100
"""So many nonzeros make HiGHS search for about a millisecond between two looks at its limits (measured)."""

FIRST_EFFORT = 100
"""What the first attempt may spend; every further one twice as much as the one before."""

FIRST_LOOKS = 4
"""Looks at its limits that HiGHS needs to come to anything at all."""

# HiGHS may search programs inside the program, each for seconds without a look at the limits.
_PROGRAMS_INSIDE = (
    "mip_heuristic_run_rens",
    "mip_heuristic_run_rins",
    "mip_heuristic_run_root_reduced_cost",
)


class RestartedProgram(IntegerProgram):
    """Searched by attempts, two of them without programs inside, two with, and so on."""

    def __init__(self, *, seed: int = 0) -> None:
        """Without columns and rows; `seed` is of HiGHS's own ties."""
        super().__init__()
        self._seed = seed

    def search(self, effort: int | None) -> Values | Infeasible | Unknown:
        """Make the attempts for which there is enough effort.

        Args:
            effort: in units of about a millisecond; None until there is an answer. The very first attempt
                is made in any case.

        Raises:
            NumericalError: HiGHS failed, or its solution is none when it is rounded.
        """
        least = max(FIRST_EFFORT, -(-FIRST_LOOKS * self.terms // TERMS_PER_EFFORT))
        for attempt in count():
            cost = least << attempt
            if effort is not None and attempt and cost > effort:
                break
            seed, programs_inside = self._seed + attempt, attempt % 4 >= 2
            answer = self.solve(cost, seed=seed, programs_inside=programs_inside)
            if not isinstance(answer, Unknown):
                return answer
            effort = None if effort is None else effort - cost
        return Unknown()

    def solve(
        self, effort: int | None, *, seed: int = 0, programs_inside: bool = False
    ) -> Values | Infeasible | Unknown:
        """One attempt to find any solution.

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

"""The errors a caller may meet, one class for each kind of answer.

Wrong input is an `InputError` and becomes exit status 2 at the command line, as does a `NumericalError`;
"there is none" and "out of time" carry what was proved or found so far and become exit status 1 and 3.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from arborcast.synth.certificate import Bound
    from arborcast.synth.chunks.bounds.step_certificate import StepBound
    from arborcast.synth.implicit_schedule import AnySchedule


class InputError(ValueError):
    """The input breaks a rule; the message names the object, the value and the rule, in one line."""


class TopologyError(InputError):
    """A topology, a topology file or a topology spec breaks a rule."""


class CollectiveError(InputError):
    """A collective does not fit its topology: an unknown kind, a root that takes no part, too few ranks."""


class ScheduleError(InputError):
    """A schedule or a schedule file breaks a rule of the format."""


class NumericalError(ArithmeticError):
    """Numbers that neither int64 nor a floating solver can hold; bandwidths of fewer digits may do."""


class Prover(StrEnum):
    """Who says that something does not exist."""

    LIMIT = "exact limit"
    EXHAUSTION = "exhaustive search"
    CADICAL = "CaDiCaL"
    Z3 = "z3"
    HIGHS = "HiGHS, floating point"

    @property
    def is_exact(self) -> bool:
        """Whether its word is a proof: what rounds may lose a solution."""
        return self is not Prover.HIGHS


class InfeasibleError(Exception):
    """No schedule exists as asked.

    Attributes:
        proof: the exact limit where one proves it.
        proved_by: all whose word that rests on; empty where nobody proved it, which the message says.
        proof_file: where a DRAT proof was written; its formula stands in the file of that name and `.cnf`.
    """

    def __init__(
        self,
        message: str,
        proof: Bound | StepBound | None = None,
        *,
        proved_by: Iterable[Prover] = (),
        proof_file: Path | None = None,
    ) -> None:
        super().__init__(message)
        self.proof = proof
        self.proof_file = proof_file
        limit = () if proof is None else (Prover.LIMIT,)
        self.proved_by = tuple(dict.fromkeys((*limit, *proved_by)))

    @property
    def is_proved(self) -> bool:
        """Whether all of those are exact, and there are some."""
        return bool(self.proved_by) and all(prover.is_exact for prover in self.proved_by)


class TimedOutError(Exception):
    """The deadline passed; `best` is the best correct schedule found until then, if there is one."""

    def __init__(self, message: str, best: AnySchedule | None = None) -> None:
        super().__init__(message)
        self.best = best


class SolverDiedError(TimedOutError):
    """A solver crashed or needed more memory than it may have: not an answer, and no deadline's fault."""

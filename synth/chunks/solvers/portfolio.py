"""An instance is searched under several groups and as it is, in turns, in one process, by counted effort.

Every member searches in slices of effort that grow by `GROWTH`, each from the beginning. Effort is counted in
steps of the solver, so the slice in which a member answers is a property of the instance and the seed, and so
is the order:

             slice 0   slice 1      slice 2
    first    1 ---->   3 --------->
    second   2 ---->   4 ---answers: this counts

Who finds that there is no schedule at all, of the problem as it is, ends it for everybody; whether that is a
proof depends on the solver's arithmetic.

What the others' turns cost: a third of the winner's last slice for each of them, itself included, and as much
as that slice for each that is preferred to it. An order of preference that is right more often than not makes
it less.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

from arborcast.synth.chunks.encodings.registry import ENCODINGS, Encoding, search
from arborcast.synth.chunks.problem.orbits import ChunkOrbits
from arborcast.synth.chunks.problem.outcome import (
    Feasible,
    Inconclusive,
    Infeasible,
    Instance,
    Outcome,
    Unknown,
)
from arborcast.synth.chunks.solvers.solver_child import SolverProcess, WorkerDiedError
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import TimedOutError
from arborcast.synth.progress import report

log = logging.getLogger(__name__)

FIRST_EFFORT = 100
"""Effort of the first slice, in units of about a millisecond."""

GROWTH = 4
"""How much more effort each slice is than the one before."""


@dataclass(frozen=True)
class PortfolioMember:
    """One way to answer.

    Attributes:
        encoding: a name in `ENCODINGS`.
        orbits: the problem, its chunks and a group; the trivial group for the problem as it is.
    """

    encoding: str
    orbits: ChunkOrbits

    @property
    def is_whole(self) -> bool:
        """Whether it searches all schedules and not only those that a group maps to themselves."""
        return len(self.orbits.group) == 1

    def __str__(self) -> str:
        """The encoding and how many symmetries help it."""
        return self.encoding if self.is_whole else f"{self.encoding} with {len(self.orbits.group)} symmetries"


@dataclass(frozen=True, slots=True)
class NoneSymmetric(Inconclusive):
    """No group maps any schedule to itself, and nobody searched the problem as it is.

    Whether there is a schedule is not known, and more effort would not tell.
    """


@dataclass(frozen=True, slots=True)
class PortfolioResult:
    """What came out.

    Attributes:
        outcome: `Feasible`, `Infeasible` (there is no schedule at all), `NoneSymmetric`, or `Unknown` where
            the slices ended without an answer.
        member: who found it; None unless `Feasible`.
        slices: how many slices it needed; 0 unless `Feasible`.
    """

    outcome: Outcome
    member: PortfolioMember | None = None
    slices: int = 0


def effort_of(index: int) -> int:
    """The effort of a slice, counted from 0: a little more than `GROWTH` times that of the one before."""
    return sum(FIRST_EFFORT * int(GROWTH**each) for each in range(index + 1))


def run_portfolio(
    members: Sequence[PortfolioMember],
    *,
    steps: int,
    rounds: int,
    seed: int,
    deadline: Deadline,
    child: SolverProcess,
    slices: int | None = None,
    encodings: Mapping[str, Encoding] = ENCODINGS,
) -> PortfolioResult:
    """The answer of the member that is first in the order of (slice, preference).

    Args:
        members: the preferred one first; at least one.
        steps: S, at least the latency of the problem.
        rounds: R, at least S.
        seed: of the solvers; the same seed gives the same result on any machine.
        deadline: when the child is killed.
        child: where the solvers run.
        slices: how many each may spend; None for as many as it takes.
        encodings: by name.

    Raises:
        TimedOutError: the deadline passed first.
        WorkerDiedError: solvers crashed or ran out of memory, and none is left that could answer. While
            others are left it is a warning in the log.
    """
    left = list(members)
    lost: WorkerDiedError | None = None
    for index in islice(count(), slices):
        for member in members:
            if member not in left:
                continue
            report(f"({member.orbits.chunks}, {steps}, {rounds}) by {member}", index, slices or 0)
            asked = encodings[member.encoding].place, Instance(member.orbits, steps, rounds), seed
            outcome: Outcome
            try:
                outcome = child.run(member.encoding, search, *asked, effort_of(index), deadline=deadline)
            except TimedOutError:
                raise deadline.missed_by("the search") from None
            except WorkerDiedError as error:
                log.warning("left out of the search: %s", error)
                lost, outcome = error, Inconclusive()
            match outcome:
                case Feasible():
                    return PortfolioResult(outcome, member, index + 1)
                case Infeasible() if member.is_whole:
                    return PortfolioResult(outcome)
                case Infeasible() if outcome.is_proof:
                    left = [other for other in left if other.orbits.group != member.orbits.group]
                case Infeasible() | Inconclusive():
                    left.remove(member)
        if not left:
            break
    if left:
        return PortfolioResult(Unknown())
    if lost is not None:
        raise lost
    return PortfolioResult(NoneSymmetric())

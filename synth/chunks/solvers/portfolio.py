"""An instance is searched under several groups and as it is, in turns, in one process, by counted effort.

Every member searches in slices of effort that grow by `GROWTH`. Effort is counted in steps of the solver,
so the slice in which a member answers is a property of the instance and the seed, and so is the order:

             slice 0   slice 1      slice 2
    first    1 ---->   3 --------->
    second   2 ---->   4 ---answers: this counts

Who finds that there is no schedule at all, of the problem as it is, ends it for everybody; whether that is a
proof depends on the solver's arithmetic.

What the others' turns cost: a third of the winner's last slice for each of them that goes on from slice to
slice and each that starts every slice anew, and as much as that slice for each that is preferred to it. An
order of preference that is right more often than not makes it less.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

from arborcast.synth.chunks.encodings.registry import ENCODINGS, Encoding, search_slice
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
    """The effort of a slice, counted from 0."""
    return FIRST_EFFORT * int(GROWTH**index)


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
    instances = [Instance(member.orbits, steps, rounds) for member in members]
    places = [encodings[member.encoding].place for member in members]
    portfolio = _Portfolio(members, instances, places, seed, deadline, child)
    for index in islice(count(), slices):
        for number in range(len(members)):
            if number in portfolio.left:
                member = members[number]
                report(f"({member.orbits.chunks}, {steps}, {rounds}) by {member}", index, slices or 0)
                answer = portfolio.judge(number, index, portfolio.slice_of(number, effort_of(index)))
                if answer is not None:
                    return answer
        if not portfolio.left:
            break
    return portfolio.without_answer()


class _Portfolio:
    """Who is still in it, and what is known so far.

    Attributes:
        left: the numbers of the members that may still answer.
    """

    def __init__(
        self,
        members: Sequence[PortfolioMember],
        instances: Sequence[Instance],
        places: Sequence[str],
        seed: int,
        deadline: Deadline,
        child: SolverProcess,
    ) -> None:
        self.left = set(range(len(members)))
        self._members = members
        self._instances = instances
        self._places = places
        self._seed = seed
        self._deadline = deadline
        self._child = child
        self._held: set[int] = set()  # searches that are in the child
        self._holder = 0  # which process that is
        self._alone: set[int] = set()  # who died in it beside others
        self._lost: WorkerDiedError | None = None

    def slice_of(self, number: int, effort: int) -> Outcome:
        """What comes of the next slice of a member; `Inconclusive` where its solver ended the child."""
        name = self._members[number].encoding
        holder = self._child.start()
        if holder != self._holder:
            self._holder = holder
            self._held.clear()
        others = frozenset() if number in self._alone else frozenset(self._held & self.left - {number})
        instance = None if number in self._held else self._instances[number]
        self._held = {*others, number}
        asked = number, self._places[number], instance, self._seed, effort, others
        try:
            return self._child.run(name, search_slice, *asked, deadline=self._deadline)
        except TimedOutError:
            raise self._deadline.missed_by("the search") from None
        except WorkerDiedError as error:
            if others:  # they may have had the memory that it lacked: it goes on alone, and they begin anew
                self._alone.add(number)
                return self.slice_of(number, effort)
            log.warning("left out of the search: %s", error)
            self._lost = error
            return Inconclusive()

    def judge(self, number: int, index: int, outcome: Outcome) -> PortfolioResult | None:
        """The answer of all, where that is known now; otherwise note who may still answer."""
        member = self._members[number]
        match outcome:
            case Feasible():
                return PortfolioResult(outcome, member, index + 1)
            case Infeasible() if member.is_whole:
                return PortfolioResult(outcome)
            case Infeasible() if outcome.is_proof:
                group = member.orbits.group
                self.left = {other for other in self.left if self._members[other].orbits.group != group}
            case Infeasible() | Inconclusive():
                self.left.remove(number)
        return None

    def without_answer(self) -> PortfolioResult:
        """What is known where nobody answers any more, or may not go on.

        Raises:
            WorkerDiedError: solvers are gone, and all others are through.
        """
        if self.left:
            return PortfolioResult(Unknown())
        if self._lost is not None:
            raise self._lost
        return PortfolioResult(NoneSymmetric())

"""Several encodings and groups race for one instance, and who wins does not depend on the machine.

Every member searches in slices of effort that grow by `GROWTH`. Effort is counted in steps of the solver,
so the slice in which a member answers is a property of the instance and the seed. The winner is the first
in the order of (slice, preference) among those that answer, not the first by the clock:

             slice 0   slice 1      slice 2
    first    ---->     --------->   (answers here by the clock first: has to wait for the second)
    second   ---->     ---answers   and loses, because slice 1 comes before slice 2

An answer therefore waits for the members that could still answer before it in that order, and whatever comes
after it is stopped at once. A proof that there is no schedule at all needs no order: it is final for
everybody as soon as anybody has it. That HiGHS, in floating point, finds none is no proof: the other
encodings that search all schedules go on, to confirm or to disprove it, and nobody else.

What that costs, against a race by the clock (two members on two cores, who need from 0.2 to 100 s with
equal chances of each magnitude, neither preferred for good reason): nothing in the median, 1.5 times the
time in the mean and 4.2 at worst where both go on from slice to slice, 1.7 and 5.3 where the second starts
every slice anew; an answer that comes sooner than the first slice ends waits for the end of it, a tenth of a
second. An order of preference that is right more often than not makes it less.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

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
from arborcast.synth.chunks.solvers.worker import Worker, WorkerDiedError, Workers, wait
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import TimedOutError
from arborcast.synth.progress import report

log = logging.getLogger(__name__)

FIRST_EFFORT = 100
"""Effort of the first slice, in units of about a millisecond."""

GROWTH = 4
"""How much more effort each slice is than the one before."""

Priority: TypeAlias = tuple[int, int]
"""A slice of a member: (slice, preference), in the order in which answers count."""


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
    """No group of the race maps any schedule to itself, and nobody searched the problem as it is.

    Whether there is a schedule is not known, and more effort would not tell.
    """


@dataclass(frozen=True, slots=True)
class RaceResult:
    """What came out of a race.

    Attributes:
        outcome: `Feasible`, `Infeasible` (there is no schedule at all; no proof where no exact solver
            confirmed it in the slices that were allowed), `NoneSymmetric`, or `Unknown` where the slices
            ended without an answer.
        member: who found it, None unless `Feasible`: who first proves that there is none depends on the
            clock.
        slices: how many slices the winner needed; 0 unless `Feasible`.
    """

    outcome: Outcome
    member: PortfolioMember | None
    slices: int


def effort_of(index: int) -> int:
    """The effort of a slice, counted from 0."""
    return FIRST_EFFORT * int(GROWTH**index)


def race(
    members: Sequence[PortfolioMember],
    *,
    steps: int,
    rounds: int,
    seed: int,
    deadline: Deadline,
    workers: Workers,
    slices: int | None = None,
    encodings: Mapping[str, Encoding] = ENCODINGS,
) -> RaceResult:
    """The answer of the member that is first in the order of (slice, preference).

    As many as `workers.count` search at once; the others queue in that order.

    Args:
        members: the preferred one first; at least one.
        steps: S, at least the latency of the problem.
        rounds: R, at least S.
        seed: of the solvers; the same seed gives the same result on any machine.
        deadline: when the children are killed.
        workers: where the solvers run.
        slices: how many each may spend; None for as many as it takes.
        encodings: by name.

    Raises:
        TimedOutError: the deadline passed first.
        WorkerDiedError: solvers crashed or ran out of memory, and none is left that could answer. While
            others are left it is a warning in the log.
    """
    instances = [Instance(member.orbits, steps, rounds) for member in members]
    runners = [
        _Runner(preference, member, instance, encodings[member.encoding].place, seed)
        for preference, (member, instance) in enumerate(zip(members, instances, strict=True))
    ]
    try:
        return _Race(runners, workers, slices).run(deadline)
    finally:
        for runner in runners:
            runner.leave(workers)


@dataclass(eq=False)
class _Runner:
    """A member on its way.

    Attributes:
        preference: its place in the order of the members.
        member: which.
        instance: what it is asked.
        place: of its `Search`.
        seed: of its solver.
        index: of the slice it is in or will be in next.
        worker: the child that holds its search, from its first slice on.
        is_out: whether it will never answer.
    """

    preference: int
    member: PortfolioMember
    instance: Instance
    place: str
    seed: int
    index: int = 0
    worker: Worker | None = None
    is_out: bool = False

    @property
    def priority(self) -> Priority:
        return self.index, self.preference

    def may_judge(self, other: _Runner) -> bool:
        """Whether it can confirm or disprove that there is no schedule at all, as the other one says."""
        return self.member.is_whole and self.member.encoding != other.member.encoding

    @property
    def is_running(self) -> bool:
        return self.worker is not None and self.worker.is_busy

    def go(self, workers: Workers) -> None:
        """Begin the slice."""
        instance = None
        if self.worker is None:
            self.worker = workers.take(self.member.encoding)
            instance = self.instance
        effort = effort_of(self.index)
        self.worker.start(self.member.encoding, search_slice, self.place, instance, self.seed, effort)

    def leave(self, workers: Workers) -> None:
        """Stop, in the middle of a slice where it is in one."""
        if self.worker is not None:
            workers.give_back(self.worker)
            self.worker = None


@dataclass
class _Race:
    """Who is still in it, and what is known so far.

    Attributes:
        runners: all of them, in the order of preference.
        workers: where they run.
        slices: how many each may spend.
        winner: the first in the order of turns among those that found something, and what it was.
        none_at_all: who proved that there is no schedule at all, or says so without proof.
        lost: why the solver of some member is no longer there.
    """

    runners: list[_Runner]
    workers: Workers
    slices: int | None
    winner: tuple[_Runner, Feasible] | None = None
    none_at_all: Infeasible | None = None
    lost: WorkerDiedError | None = None

    def run(self, deadline: Deadline) -> RaceResult:
        """Until no answer that may still come can change the result."""
        while not self._is_refuted and (counting := self._counting()):
            for runner in self.runners:
                if runner not in counting:
                    runner.leave(self.workers)
            running = self._go(counting)
            done = wait([runner.worker for runner in running if runner.worker], deadline)
            if not done:
                claim = (
                    f": there is none according to {self.none_at_all.proved_by}" if self.none_at_all else ""
                )
                raise TimedOutError(f"{deadline.missed_by('the search')}{claim}")
            for runner in running:
                if runner.worker in done and self._counts(runner):
                    self._note(runner)
        return self._result()

    def _go(self, counting: Sequence[_Runner]) -> list[_Runner]:
        """Let as many search as may; those that do."""
        running = [runner for runner in counting if runner.is_running]
        resting = [runner for runner in counting if not runner.is_running]
        for runner in resting[: self.workers.count - len(running)]:
            runner.go(self.workers)
            running.append(runner)
        instance = running[0].instance
        size = f"({instance.orbits.chunks}, {instance.steps}, {instance.rounds})"
        names = ", ".join(str(runner.member) for runner in running)
        report(f"{size} by {names}", counting[0].index, self.slices or 0)
        return running

    def _note(self, runner: _Runner) -> None:
        assert runner.worker is not None, "its slice is over"
        try:
            outcome: Outcome = runner.worker.result()
        except WorkerDiedError as error:
            log.warning("left out of the search: %s", error)
            self.lost = error
            runner.is_out = True
            return
        match outcome:
            case Feasible():
                self.winner = runner, outcome  # of those heard, each counts more than those before
            case Infeasible() if runner.member.is_whole:
                self.none_at_all = outcome
                for other in self.runners:
                    other.is_out |= outcome.is_proof or not other.may_judge(runner)
            case Infeasible():
                group = runner.member.orbits.group
                for other in self.runners:
                    of_group = other.member.orbits.group == group
                    other.is_out |= other is runner or (of_group and outcome.is_proof)
            case Inconclusive():
                runner.is_out = True
            case Unknown():
                runner.index += 1

    def _result(self) -> RaceResult:
        assert not (self._is_refuted and self.winner), "the encodings contradict each other"
        if self.winner is not None:
            runner, found = self.winner
            if self.none_at_all is not None:
                who, claim = runner.member, self.none_at_all.proved_by
                log.warning("%s found what does not exist according to %s", who, claim)
            return RaceResult(found, runner.member, runner.index + 1)
        if self.none_at_all is not None:
            return RaceResult(self.none_at_all, None, 0)
        if not all(runner.is_out for runner in self.runners):
            return RaceResult(Unknown(), None, 0)
        if self.lost is not None:
            raise self.lost
        return RaceResult(NoneSymmetric(), None, 0)

    @property
    def _is_refuted(self) -> bool:
        return self.none_at_all is not None and self.none_at_all.is_proof

    def _counting(self) -> list[_Runner]:
        """Those whose answer would still count, in the order of their turns."""
        return sorted(filter(self._counts, self.runners), key=lambda runner: runner.priority)

    def _counts(self, runner: _Runner) -> bool:
        if runner.is_out or (self.slices is not None and runner.index >= self.slices):
            return False
        return self.winner is None or runner.priority < self.winner[0].priority

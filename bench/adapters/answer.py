"""What a contender answers to one question, and how its output becomes schedules that can be checked.

Ours and every peer give the same value, so that `bench/peers.py` measures and judges them alike. A contender
that cannot be asked, runs out of time, fails or writes what is no schedule says so in its verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Protocol

from arborcast.bench.harness.processes import Finished
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective
from arborcast.synth.schedule import Schedule
from arborcast.synth.topology import Topology


@dataclass(frozen=True, slots=True)
class Question:
    """What everybody is asked.

    Attributes:
        spec: that gives the topology.
        topology: itself.
        collective: on it.
        bound: the proven limit of its rate.
        ranks: of the spec, which the topology has; None for all.
    """

    spec: str
    topology: Topology
    collective: Collective
    bound: Bound
    ranks: tuple[int, ...] | None = None

    @property
    def fabric(self) -> str:
        """What the topology is called in results."""
        return self.spec if self.ranks is None else self.topology.name


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One of the algorithms that a contender found.

    Attributes:
        label: what tells it from the contender's others, such as "(6,3,7)"; empty where there is one only.
        schedule: the same in our terms; not verified yet.
        claimed: the rate in GB/s that the contender itself states; None where it states none.
        trees: how many it is made of; None where it is not made of trees.
    """

    label: str
    schedule: Schedule
    claimed: Fraction | None = None
    trees: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What one run of a contender gave.

    Attributes:
        finished: the whole process, start-up included.
        verdict: "found", "impossible", "out of time", "failed" or "unreadable".
        why: in words where it is not "found".
        call_seconds: of the synthesis alone, as the contender counts it, in a process that has answered the
            question before (see `without_repeat`); None where it does not count.
        algorithms: what it found, also where the time ran out after that.
    """

    finished: Finished
    verdict: str
    why: str | None = None
    call_seconds: float | None = None
    algorithms: tuple[Algorithm, ...] = ()


class CannotAskError(Exception):
    """A contender does not know this topology or collective; the message says what it would take."""


class Contender(Protocol):
    """Whoever answers questions: ours, or a peer from a checkout."""

    @property
    def name(self) -> str:
        """For the column `method`."""

    def check(self) -> None:
        """Raise InputError where it is not there."""

    def ask(self, question: Question, limit_s: float) -> Answer:
        """Run it once, in a process of its own; raise CannotAskError where it does not know such things."""


Reading = tuple[float | None, Sequence[Algorithm]]
"""Seconds of the call alone, and what was found."""


def answer_of(
    finished: Finished, read: Callable[[], Reading], *, read_partial: Callable[[], Reading] | None = None
) -> Answer:
    """The answer of a run.

    Args:
        finished: the run.
        read: turns what it wrote into schedules; whatever it raises about their form makes the answer
            "unreadable" and is told in `why`.
        read_partial: the same for a run that was stopped; None where it writes nothing before its end.
    """
    if finished.timed_out:
        stopped = Answer(finished, "out of time", f"stopped after {finished.seconds:.0f} s")
        return stopped if read_partial is None else _with(stopped, read_partial)
    if finished.status:
        return Answer(finished, "failed", last_line(finished.errors))
    found = _with(Answer(finished, "found"), read)
    if found.verdict == "found" and not found.algorithms:
        return Answer(finished, "impossible", "it ended without an algorithm")
    return found


LONGEST_REPEATED_S = 10.0
"""A first call that took longer is not repeated: what a process loads once hardly counts in it."""


def without_repeat(answer: Answer, told: Mapping[str, float]) -> Answer:
    """The answer with the time of a whole process that asks once.

    A contender that can be called again answers again in its process: the whole process until the first
    answer is what asking costs at first, the last call what it costs from then on.

    Args:
        answer: of a process that may have called again.
        told: `repeat_seconds` and `repeat_cpu_seconds`, what that took; nothing without it.
    """
    spent, cpu_spent = told.get("repeat_seconds", 0.0), told.get("repeat_cpu_seconds", 0.0)
    once = replace(
        answer.finished,
        seconds=answer.finished.seconds - spent,
        cpu_seconds=answer.finished.cpu_seconds - cpu_spent,
    )
    return replace(answer, finished=once)


def _with(answer: Answer, read: Callable[[], Reading]) -> Answer:
    try:
        seconds, algorithms = read()
    except (ValueError, LookupError, TypeError, OSError, ArithmeticError) as error:
        return replace(answer, verdict="unreadable", why=f"{type(error).__name__}: {error}")
    return replace(answer, call_seconds=seconds, algorithms=tuple(algorithms))


def last_line(text: str) -> str:
    """Where a traceback says what happened."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message"

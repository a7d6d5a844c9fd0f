"""When to stop: one deadline for a whole question, handed down to everything that may take long.

It is made once, where the question is asked; whatever works on a part of it reads the same one, or a `share`.
Seconds are those of the wall clock, by which a user waits, so that solvers in child processes have the same.
What nothing can be handed down to, as a simulation or machine code that is yet to be made, asks `running`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from arborcast.synth.errors import InputError, TimedOutError

if TYPE_CHECKING:
    from arborcast.synth.implicit_schedule import AnySchedule

Clock: TypeAlias = Callable[[], float]
"""Tells seconds since any moment; never goes back."""


def wall_clock() -> float:
    """The clock by which users wait."""
    return time.monotonic()


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time at which the computation stops.

    Attributes:
        allowed_s: the seconds that were given at the start; None for no limit.
        end: the moment, of the clock; None for no limit.
        clock: tells the time; tests have their own.
    """

    allowed_s: float | None = None
    end: float | None = None
    clock: Clock = wall_clock

    @classmethod
    def after(cls, seconds: Limit, clock: Clock = wall_clock) -> Deadline:
        """So many seconds from now; None never comes, and a deadline that runs already stays what it is."""
        if isinstance(seconds, Deadline):
            return seconds
        return cls() if seconds is None else cls(seconds, clock() + seconds, clock)

    def __reduce__(self) -> tuple[object, ...]:
        """Another process may have another clock: it is sent what is left."""
        return _arrived, (self.allowed_s, self.left_s)

    def __str__(self) -> str:
        """As messages name it: by the seconds that the user gave."""
        return f"the deadline of {self.allowed_s:g} s"

    @property
    def left_s(self) -> float | None:
        """Seconds that are left, 0 once it has passed; None without a limit."""
        return None if self.end is None else max(self.end - self.clock(), 0.0)

    @property
    def has_passed(self) -> bool:
        """Whether it is too late."""
        return self.end is not None and self.clock() > self.end

    @property
    def is_overdue(self) -> bool:
        """Whether a tenth more has passed, too: then even what is begun to have any answer is broken off."""
        return self.end is not None and self.clock() > self.end + (self.allowed_s or 0) / 10

    def share(self, parts: float) -> Deadline:
        """The deadline of the first of so many parts that are still to come; messages name the whole."""
        return self if self.left_s is None else self._in(self.left_s / parts)

    def at_least(self, seconds: float) -> Deadline:
        """The same, but so many seconds from now where less is left."""
        return self if self.left_s is None or self.left_s >= seconds else self._in(seconds)

    def _in(self, seconds: float) -> Deadline:
        return replace(self, end=self.clock() + seconds)

    def check(self, what: str) -> None:
        """Go on while there is time.

        Args:
            what: what would be late, as in "the search for a ring".

        Raises:
            TimedOutError: the deadline has passed.
        """
        if self.has_passed:
            raise self.missed_by(what)

    def missed_by(self, what: str, best: AnySchedule | None = None) -> TimedOutError:
        """The error that says so."""
        return TimedOutError(f"{what} did not end within {self}", best)


Limit: TypeAlias = float | Deadline | None
"""How long something may take: seconds, what is left of a deadline that runs, or None for no limit."""

NO_DEADLINE = Deadline()
"""Never comes."""


def check_seconds(limit: Limit) -> None:
    """Refuse seconds that are not positive.

    Raises:
        InputError: says how many.
    """
    if isinstance(limit, int | float) and limit <= 0:
        raise InputError(f"deadline must be positive, got {limit} s")


def _arrived(allowed_s: float | None, left_s: float | None) -> Deadline:
    return NO_DEADLINE if left_s is None else Deadline(allowed_s, wall_clock() + left_s)


_running: ContextVar[Deadline] = ContextVar("deadline", default=NO_DEADLINE)


def running() -> Deadline:
    """That of the question on which this thread works."""
    return _running.get()


@contextmanager
def run_until(deadline: Deadline) -> Iterator[Deadline]:
    """Make it the one that is `running`."""
    token = _running.set(deadline)
    try:
        yield deadline
    finally:
        _running.reset(token)


Answer = TypeVar("Answer")


class LastAnswers(Generic[Answer]):
    """The last answers to questions that several parts of one comparison ask; none that was cut short."""

    def __init__(self, most: int) -> None:
        """Without any.

        Args:
            most: how many are kept.
        """
        self._most = most
        self._known: OrderedDict[Hashable, Answer] = OrderedDict()

    def of(self, question: Hashable, deadline: Deadline, work_out: Callable[[], Answer]) -> Answer:
        """The answer to a question, worked out where it is none of the last.

        Args:
            question: equal where the answer is the same.
            deadline: of working it out; once it has passed, the answer may be less than it could be.
            work_out: makes the answer.
        """
        known = self._known.get(question)
        if known is not None:
            return known
        found = work_out()
        if not deadline.has_passed:
            self._known[question] = found
            if len(self._known) > self._most:
                self._known.popitem(last=False)
        return found

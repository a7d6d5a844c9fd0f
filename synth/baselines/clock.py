"""The two limits of the searches: a deadline in seconds, and a budget of search steps.

Only the budget shapes results, so that a fast and a slow machine find the same; the deadline ends in an
error.
"""

from __future__ import annotations

import time

from synth.errors import TimedOutError


class BudgetError(Exception):
    """A search took all its steps without an answer; its caller has another way or says "not proved"."""


class Clock:
    """A deadline that long searches look at."""

    def __init__(self, deadline_s: float | None = None) -> None:
        self._deadline_s = deadline_s
        self._end = None if deadline_s is None else time.monotonic() + deadline_s

    @property
    def left_s(self) -> float | None:
        """Seconds that are left, None without a deadline."""
        return None if self._end is None else max(self._end - time.monotonic(), 0.0)

    def check(self) -> None:
        """Raise TimedOutError when the deadline has passed."""
        if self._end is not None and time.monotonic() > self._end:
            raise TimedOutError(f"the search for a pattern did not end within {self._deadline_s} s")


class Budget:
    """Steps that a search may take; looks at the clock now and then."""

    def __init__(self, steps: int, clock: Clock) -> None:
        self._left = steps
        self._clock = clock

    def spend(self) -> None:
        """Count one step.

        Raises:
            BudgetError: there is none left.
            TimedOutError: the deadline has passed.
        """
        self._left -= 1
        if self._left < 0:
            raise BudgetError
        if self._left % 256 == 0:
            self._clock.check()

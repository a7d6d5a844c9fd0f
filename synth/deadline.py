"""When to stop: one deadline for a whole question, handed down to everything that may take long."""

from __future__ import annotations

import time
from dataclasses import dataclass

from arborcast.synth.errors import TimedOutError


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time at which the computation stops.

    Attributes:
        allowed_s: the seconds that were given at the start; None for no limit.
        end: the moment, of `time.monotonic()`; None for no limit.
    """

    allowed_s: float | None = None
    end: float | None = None

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """So many seconds from now; None never comes."""
        return cls() if seconds is None else cls(seconds, time.monotonic() + seconds)

    @property
    def left_s(self) -> float | None:
        """Seconds that are left, 0 once it has passed; None without a limit."""
        return None if self.end is None else max(self.end - time.monotonic(), 0.0)

    @property
    def has_passed(self) -> bool:
        """Whether it is too late."""
        return self.end is not None and time.monotonic() > self.end

    def share(self, parts: int) -> Deadline:
        """The deadline of the first of so many parts that are still to come; messages name the whole."""
        if self.end is None or self.left_s is None:
            return self
        return Deadline(self.allowed_s, time.monotonic() + self.left_s / parts)

    def check(self, what: str) -> None:
        """Go on while there is time.

        Args:
            what: what would be late, as in "the search for a ring".

        Raises:
            TimedOutError: the deadline has passed.
        """
        if self.has_passed:
            raise TimedOutError(f"{what} did not end within {self.allowed_s} s")


NO_DEADLINE = Deadline()
"""Never comes."""

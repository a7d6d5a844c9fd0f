"""How many steps a search may take.

A budget shapes results, so that a fast and a slow machine find the same; a deadline ends in an error.
"""

from __future__ import annotations

from arborcast.synth.deadline import Deadline


class BudgetError(Exception):
    """A search took all its steps without an answer; its caller has another way or says "not proved"."""


_WHAT = "the search for a pattern"


class Budget:
    """Steps that a search may take; looks at the deadline before the first and now and then.

    Raises:
        TimedOutError: the deadline has passed already.
    """

    def __init__(self, steps: int, deadline: Deadline) -> None:
        self._left = steps
        self._deadline = deadline
        deadline.check(_WHAT)

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
            self._deadline.check(_WHAT)

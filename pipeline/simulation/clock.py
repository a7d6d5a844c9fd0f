"""The clock of the simulator: what happens when."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")


class Clock:
    """Events in the order of their times; those of one time in the order in which they were set."""

    def __init__(self) -> None:
        """Nothing to happen yet."""
        self._events: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._ticket = count()

    def at(self, time_us: float, happen: Callable[[float, T], None], subject: T) -> None:
        """Set an event; it is told its time and its subject."""
        heapq.heappush(self._events, (time_us, next(self._ticket), happen, subject))

    def run(self) -> None:
        """Let everything happen, also what events set."""
        events = self._events
        while events:
            time_us, _, happen, subject = heapq.heappop(events)
            happen(time_us, subject)

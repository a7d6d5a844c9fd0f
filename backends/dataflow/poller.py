"""Sleeping until a channel has something to do, and noticing at once when a peer goes.

What is polled for changes all the time in a run; this keeps the kernel's list in step with as few calls as
possible. Descriptors that hung up and of which nothing more is wanted are taken off, since they would wake
every later sleep at once.
"""

from __future__ import annotations

import select

READ = select.POLLIN
LONGEST_SLEEP_S = 86400.0  # `poll` knows no more than 24.8 days; who wakes looks at his deadline
GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL
"""Events which say that a peer will send no more."""

LEAVING = select.POLLRDHUP
"""To be asked for where only the peer's going is of interest."""


class Poller:
    """A list of descriptors with what is wanted of each."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._wanted: dict[int, int] = {}

    def want(self, descriptor: int, events: int) -> None:
        """From now on look for these events of a descriptor; 0 takes it off the list."""
        known = self._wanted.get(descriptor, 0)
        if known == events:
            return
        if not events:
            self._poll.unregister(descriptor)
            del self._wanted[descriptor]
        else:
            self._poll.register(descriptor, events)  # changes one that is there
            self._wanted[descriptor] = events

    def clear(self) -> None:
        """Take everything off the list."""
        for descriptor in list(self._wanted):
            self.want(descriptor, 0)

    def sleep(self, seconds: float) -> list[tuple[int, int]]:
        """Descriptors with their events, none where the time is over first."""
        # Rounded up: a sleep that ends too early would be repeated without rest.
        return self._poll.poll(int(min(seconds, LONGEST_SLEEP_S) * 1000) + 1 if seconds else 0)

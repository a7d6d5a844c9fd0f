"""Messages of the simulator on their way: in order between two ranks, sharing links with all others.

A message occupies its pair of ranks for the software's time and for its bytes; it is there after the
latency of its path, while the next one may already be under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from arborcast.pipeline.costs.link_costs import BYTES_PER_US, LinkCosts
from arborcast.pipeline.simulation.clock import Clock
from arborcast.pipeline.simulation.link_sharing import MessageInFlight, SharedLinks
from arborcast.pipeline.simulation.timeline import Interval
from arborcast.synth.topology import Hop

T = TypeVar("T")
Arrival: TypeAlias = Callable[[float, T], None]
"""What happens when a message is there: it is told the time and what the message is for."""


class Pair:
    """Two ranks, one of which sends to the other.

    Attributes:
        rate: bytes per us where no other pair uses any of its links; None where messages share.
        free_us: when all messages so far are sent; only where nothing is shared.
        waiting: messages that have not begun; only where something is shared.
    """

    __slots__ = ("busy", "dst", "free_us", "latency_us", "path", "rate", "src", "waiting")

    def __init__(self, src: int, dst: int, network: LinkCosts) -> None:
        """No message yet."""
        self.src = src
        self.dst = dst
        self.path = network.path(src, dst)
        self.latency_us = float(network.latency_us(src, dst))
        self.rate: float | None = None
        self.free_us = 0.0
        self.busy = False
        self.waiting: deque[_SharedMessage] = deque()


class _SharedMessage(MessageInFlight):
    """One that shares links."""

    __slots__ = ("arrive", "microbatch", "pair", "start_us", "subject")

    def __init__(
        self, pair: Pair, size_bytes: float, microbatch: int, arrive: Arrival[Any], subject: Any
    ) -> None:
        super().__init__(pair.path, size_bytes)
        self.pair = pair
        self.microbatch = microbatch
        self.arrive = arrive
        self.subject = subject
        self.start_us = 0.0


class Deliveries:
    """All messages of a step.

    Args:
        network: of the links.
        pairs: who sends to whom.
        clock: which is told of every arrival.

    Attributes:
        intervals: of the messages so far.
    """

    def __init__(self, network: LinkCosts, clock: Clock, pairs: list[Pair]) -> None:
        """Find out who shares links with nobody: the times of those are known without any event."""
        self._message_us = network.message_us
        self._clock = clock
        users: dict[Hop, int] = {}
        for pair in pairs:
            for hop in pair.path:
                users[hop] = users.get(hop, 0) + 1
        bandwidth = {hop: float(network.topology.bandwidth[hop]) * BYTES_PER_US for hop in users}
        for pair in pairs:
            if all(users[hop] == 1 for hop in pair.path):
                pair.rate = min(bandwidth[hop] for hop in pair.path)
        self._links: SharedLinks[_SharedMessage] = SharedLinks(bandwidth)
        self.intervals: list[Interval] = []

    def send(
        self, pair: Pair, size_bytes: float, microbatch: int, now: float, arrive: Arrival[T], subject: T
    ) -> None:
        """Send a message behind those that the pair was given before."""
        if pair.rate is not None:
            start = max(now, pair.free_us)
            pair.free_us = start + self._message_us + size_bytes / pair.rate
            self._arrives(pair, microbatch, start, pair.free_us, arrive, subject)
            return
        pair.waiting.append(_SharedMessage(pair, size_bytes, microbatch, arrive, subject))
        if not pair.busy:
            self._next(pair, now)

    def _arrives(
        self, pair: Pair, microbatch: int, start: float, sent: float, arrive: Arrival[T], subject: T
    ) -> None:
        there = sent + pair.latency_us
        self.intervals.append(Interval(pair.src, "communication", microbatch, start, there, pair.dst))
        self._clock.at(there, arrive, subject)

    def _next(self, pair: Pair, now: float) -> None:
        pair.busy = bool(pair.waiting)
        if pair.busy:
            message = pair.waiting.popleft()
            message.start_us = now
            self._clock.at(now + self._message_us, self._begin, message)

    def _begin(self, now: float, message: _SharedMessage) -> None:
        self._foretell(self._links.begin(message, now))

    def _foretell(self, changed: list[_SharedMessage]) -> None:
        for message in changed:
            self._clock.at(message.end_us, self._end, (message, message.version))

    def _end(self, now: float, foretold: tuple[_SharedMessage, int]) -> None:
        message, version = foretold
        if message.version != version:  # its rate has changed since
            return
        self._foretell(self._links.end(message, now))
        self._arrives(
            message.pair, message.microbatch, message.start_us, now, message.arrive, message.subject
        )
        self._next(message.pair, now)

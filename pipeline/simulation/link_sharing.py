"""How messages share links: max-min fair, as long as each has bytes left.

Of the messages on a link none gets more than its even share unless others cannot use theirs (progressive
filling; Bertsekas and Gallager, Data Networks, section 6.5.2). Rates change only where a message begins or
ends, and only for those that it shares a link with, directly or through others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from arborcast.synth.topology import Hop


class MessageInFlight:
    """A message under way.

    Attributes:
        path: the links that it takes, at least one.
        left: bytes not sent yet, as of `since_us`.
        rate: bytes per us.
        since_us: when `left` and `rate` were set.
        version: how often they were, to tell an end that was foretold before from the one that holds.
    """

    __slots__ = ("left", "path", "rate", "since_us", "version")

    def __init__(self, path: Sequence[Hop], size_bytes: float) -> None:
        """A message that has not begun."""
        self.path = path
        self.left = size_bytes
        self.rate = 0.0
        self.since_us = 0.0
        self.version = 0

    @property
    def end_us(self) -> float:
        """When its last byte is sent if no rate changes before."""
        return self.since_us + self.left / self.rate

    def change(self, rate: float, now_us: float) -> None:
        """Go on at another rate."""
        self.left = max(0.0, self.left - (now_us - self.since_us) * self.rate)
        self.rate = rate
        self.since_us = now_us
        self.version += 1


F = TypeVar("F", bound=MessageInFlight)


class SharedLinks(Generic[F]):
    """The links of a fabric and the messages on them now.

    Args:
        bandwidth: of each link, in bytes per us.
    """

    def __init__(self, bandwidth: Mapping[Hop, float]) -> None:
        """All links idle."""
        self._bandwidth = bandwidth
        self._flows: dict[Hop, dict[F, None]] = {hop: {} for hop in bandwidth}  # dicts keep order

    def begin(self, flow: F, now_us: float) -> list[F]:
        """Let a message begin; those whose rate changed, itself included."""
        for hop in flow.path:
            self._flows[hop][flow] = None
        flow.since_us = now_us
        return self._share(self._neighbourhood([flow]), now_us)

    def end(self, flow: F, now_us: float) -> list[F]:
        """Take a message off its links; those whose rate changed."""
        for hop in flow.path:
            del self._flows[hop][flow]
        others = dict.fromkeys(other for hop in flow.path for other in self._flows[hop])
        return self._share(self._neighbourhood(list(others)), now_us)

    def _neighbourhood(self, flows: list[F]) -> list[F]:
        """The messages that share links with these, and those that share links with them, and so on."""
        found = dict.fromkeys(flows)
        for flow in flows:  # it grows meanwhile
            for hop in flow.path:
                for other in self._flows[hop]:
                    if other not in found:
                        found[other] = None
                        flows.append(other)
        return flows

    def _share(self, flows: list[F], now_us: float) -> list[F]:
        changed = []
        for flow, rate in self._fair_rates(flows):
            if rate != flow.rate:
                flow.change(rate, now_us)
                changed.append(flow)
        return changed

    def _fair_rates(self, flows: list[F]) -> list[tuple[F, float]]:
        """Progressive filling: the link with the least left for each of its messages fixes their rate."""
        if len(flows) == 1:
            return [(flows[0], min(self._bandwidth[hop] for hop in flows[0].path))]
        waiting = {hop: dict(self._flows[hop]) for flow in flows for hop in flow.path}
        left = {hop: self._bandwidth[hop] for hop in waiting}
        rates: dict[F, float] = {}
        while len(rates) < len(flows):
            share, narrowest = min((left[hop] / len(on), hop) for hop, on in waiting.items() if on)
            for flow in list(waiting[narrowest]):
                rates[flow] = share
                for hop in flow.path:
                    left[hop] -= share
                    del waiting[hop][flow]
        return list(rates.items())

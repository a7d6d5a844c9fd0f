"""What was measured: latencies, rates of flows alone, rates of flows that run at once, each with its spread.

A *flow* is the data from one rank to another. Everything that thinks about measurements (`inference`,
`comparison`, `report`) takes these values and needs no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

Flow: TypeAlias = tuple[int, int]
"""The rank that sends, the rank that receives; along a further cable its numbers (`transport.lanes`)."""


@dataclass(frozen=True, slots=True)
class Spread:
    """One quantity measured several times."""

    minimum: float
    median: float
    maximum: float
    repeats: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of at least one value."""
        ordered = sorted(values)
        return cls(ordered[0], statistics.median(ordered), ordered[-1], len(ordered))

    def to_document(self) -> list[float]:
        """Minimum, median and maximum, rounded to four digits as nobody measures more."""
        return [float(f"{value:.4g}") for value in (self.minimum, self.median, self.maximum)]


@dataclass(frozen=True, slots=True)
class Load:
    """Flows that ran at once, each with its rate in GB/s; all at the same moments."""

    rates: Mapping[Flow, Spread]

    @property
    def flows(self) -> tuple[Flow, ...]:
        """In ascending order."""
        return tuple(sorted(self.rates))


@dataclass(frozen=True, slots=True)
class Measurements:
    """A fabric as its ranks found it.

    Attributes:
        ranks: number of ranks.
        latency_us: one way, half of a round trip, of every ordered pair that was measured.
        solo: GB/s of these. With `exact` nothing else ran, else disjoint pairs did, and the
            rounds in which they did are among the loads.
        loads: flows that ran at once.
        hosts: the name of each rank's host.
        transports: how the bytes of each pair travel; may be empty.
        exact: whether pairs were measured one at a time.
        message_us: for how long a short message keeps one of its ends at work, of all ranks; None where that
            was not measured.
        piece_us: the same of a message of `backends.probe.traffic.PIECE_BYTES`.
    """

    ranks: int
    latency_us: Mapping[Flow, Spread]
    solo: Mapping[Flow, Spread]
    loads: tuple[Load, ...]
    hosts: tuple[str, ...]
    transports: Mapping[Flow, str]
    exact: bool = True
    message_us: Spread | None = None
    piece_us: Spread | None = None

    @property
    def experiments(self) -> Iterator[Mapping[Flow, Spread]]:
        """The rates of everything that ran: flows alone first, then the loads."""
        if self.exact:
            for flow in sorted(self.solo):
                yield {flow: self.solo[flow]}
        for load in self.loads:
            yield load.rates

    def lowest_loaded(self, flow: Flow) -> Spread | None:
        """The flow's rate under the load that slowed it most; None where it ran alone only."""
        found = [load.rates[flow] for load in self.loads if flow in load.rates]
        return min(found, key=lambda spread: spread.median, default=None)

"""Who did what when, in a step of training: predicted by the simulator or measured by the trainer.

Both are the same value, so that pictures and traces set one above the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

KINDS = ("forward", "backward", "weights", "communication", "waiting", "allreduce", "update")


@dataclass(frozen=True, slots=True)
class Interval:
    """What one rank was busy with for a while.

    Attributes:
        rank: of the job.
        kind: one of `KINDS`; "weights" is the second half of a split backward pass, "communication" a message
            on its way from this rank, which may overlap computation; "waiting" is when the rank had nothing
            to do.
        microbatch: None for allreduce, update and waiting.
        start_us: since the beginning of the step.
        end_us: likewise.
        peer: the rank a message goes to.
        stage: of a pass.
    """

    rank: int
    kind: str
    microbatch: int | None
    start_us: float
    end_us: float
    peer: int | None = None
    stage: int | None = None


@dataclass(frozen=True)
class Timeline:
    """A step on all ranks; intervals are sorted by start.

    Those of a rank do not overlap, except for communication and allreduce.
    """

    intervals: tuple[Interval, ...]

    @property
    def time_us(self) -> float:
        """From the beginning to the end of the step."""
        return max((interval.end_us for interval in self.intervals), default=0.0)

    def busy_us(self, rank: int) -> float:
        """Time in which a rank computed."""
        return sum(
            interval.end_us - interval.start_us
            for interval in self.intervals
            if interval.rank == rank and interval.kind in ("forward", "backward", "weights", "update")
        )


def waiting(rank: int, spans: Iterable[tuple[float, float]], end_us: float) -> list[Interval]:
    """When a rank did nothing until the end of a step, where it was busy in these spans (start, end)."""
    found = []
    now = 0.0
    for start, stop in sorted(spans):
        if start > now:
            found.append(Interval(rank, "waiting", None, now, start))
        now = max(now, stop)
    if end_us > now:
        found.append(Interval(rank, "waiting", None, now, end_us))
    return found

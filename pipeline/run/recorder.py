"""Records what each rank does in a step of training, and gathers it as a timeline like the predicted one.

The trainer keeps one recorder per rank; it takes no notes where nothing is to be recorded.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch.distributed as dist

from arborcast.backends.transport.addresses import boot_id
from arborcast.pipeline.simulation.timeline import KINDS, Interval, Timeline, waiting

NS_PER_US = 1000

Note: TypeAlias = tuple[str, int | None, int, int, int | None, int | None]
"""Kind, microbatch, begin and end in ns of the rank's own clock, peer, stage."""


class PassRecorder:
    """Notes of one rank about one step; any thread may add to them.

    Args:
        clock: gives ns; the same for all processes of a host.
        is_on: whether anything is recorded.
    """

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns, *, is_on: bool = True) -> None:
        self._clock, self.is_on = clock, is_on
        self._origin = clock()
        self._notes: list[Note] = []

    def start(self, group: dist.ProcessGroup | None = None) -> None:
        """Begin a step and forget the one before.

        Args:
            group: of all ranks; they meet in a barrier, whose end is where clocks of different hosts are set
                equal. None where all ranks are on one host, or where a step begins with one anyway.
        """
        if not self.is_on:
            return
        if group is not None:
            dist.barrier(group)
        self._notes = []
        self._origin = self._clock()

    def add(
        self,
        kind: str,
        microbatch: int | None,
        start_ns: int,
        end_ns: int,
        peer: int | None = None,
        stage: int | None = None,
    ) -> None:
        """Note an interval of the clock.

        Args:
            kind: one of `timeline.KINDS`, except "waiting", which follows from the others.
            microbatch: None where it belongs to no single one.
            start_ns: what `time.perf_counter_ns` said at its beginning.
            end_ns: likewise at its end.
            peer: the rank of the job a message goes to.
            stage: of a pass.
        """
        if self.is_on:
            self._notes.append((kind, microbatch, start_ns, end_ns, peer, stage))

    @contextmanager
    def measure(self, kind: str, microbatch: int | None = None) -> Iterator[None]:
        """Note what the block takes; arguments as for `add`. A block that raises is not noted."""
        start = self._clock()
        yield
        self.add(kind, microbatch, start, self._clock())

    def timeline(self, group: dist.ProcessGroup | None = None) -> Timeline:
        """What the ranks of a group did since `start`, the same on each of them.

        Clocks of processes on one host are one clock; those of different hosts are set equal at the
        earliest `start` of each host. Every gap in which a rank neither computed nor reduced is "waiting".

        Args:
            group: a gloo group, in which every rank makes this call; None for the notes of this rank alone.

        Returns:
            An empty one, without asking anyone, where nothing is recorded.
        """
        if not self.is_on:
            return Timeline(())
        rank = dist.get_rank() if dist.is_initialized() else 0
        mine = Notes(rank, boot_id() or socket.gethostname(), self._origin, tuple(self._notes))
        if group is None:
            return timeline_of([mine])
        gathered: list[Notes | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, mine, group)
        return timeline_of([notes for notes in gathered if notes is not None])


@dataclass(frozen=True, slots=True)
class Notes:
    """What one rank noted in a step.

    Attributes:
        rank: of the job.
        host: equal for ranks that share a clock, which the kernel counts from its start.
        origin_ns: of that clock, when the rank began the step.
        notes: of the intervals.
    """

    rank: int
    host: str
    origin_ns: int
    notes: tuple[Note, ...]


def timeline_of(ranks: Sequence[Notes]) -> Timeline:
    """The notes of several ranks on one axis, which begins where the first rank of each host began."""
    origins: dict[str, int] = {}
    for noted in ranks:
        origins[noted.host] = min(noted.origin_ns, origins.get(noted.host, noted.origin_ns))
    intervals = [
        Interval(
            noted.rank,
            kind,
            microbatch,
            (start - origins[noted.host]) / NS_PER_US,
            (end - origins[noted.host]) / NS_PER_US,
            peer,
            stage,
        )
        for noted in ranks
        for kind, microbatch, start, end, peer, stage in noted.notes
    ]
    return Timeline(with_waiting(intervals, [noted.rank for noted in ranks]))


def with_waiting(intervals: Iterable[Interval], ranks: Iterable[int]) -> tuple[Interval, ...]:
    """The intervals in order, and "waiting" where a rank neither computes nor reduces, until all end."""
    given = tuple(intervals)
    end_us = max((interval.end_us for interval in given), default=0.0)
    spans: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for interval in given:
        if interval.kind not in ("communication", "waiting"):
            spans[interval.rank].append((interval.start_us, interval.end_us))
    waits = [wait for rank in ranks for wait in waiting(rank, spans[rank], end_us)]
    return tuple(sorted((*given, *waits), key=_order))


def _order(interval: Interval) -> tuple[float, float, int, int]:
    return interval.start_us, interval.end_us, interval.rank, KINDS.index(interval.kind)

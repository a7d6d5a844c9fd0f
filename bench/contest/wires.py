"""When each link was busy in a run, worked out from the moments at which ranks handed bytes to the kernel.

A wire takes frames in the order in which they come, each for as long as its bytes need at the rate that the
link delivers; a switch hands a frame on when all of it is there. What TCP itself holds back, because the
receiver or the acknowledgements are late, is not seen: links were busy no earlier than this says.

    handed over   a a a      b b              of a link: lost at the start, in gaps, and at the end,
    wire              aaaaaa   bbbb           where it had nothing to carry
                  ^^^^      ^^^    ^^^^^^
                  start     gap    end of the run
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from arborcast.synth.topology import Hop, Vertex

FRAME_BYTES = 8900
"""Of payload, in a frame of `bench.emulation.network.MTU` bytes."""


@dataclass(frozen=True)
class Load:
    """Bytes that a rank handed over.

    Attributes:
        at_s: when.
        path: the vertices that they pass, ends included.
        size_bytes: how many.
        chunk: whose they are.
    """

    at_s: float
    path: tuple[Vertex, ...]
    size_bytes: int
    chunk: int


@dataclass(frozen=True)
class Busy:
    """A time in which a link carried one chunk without a gap."""

    start_s: float
    end_s: float
    chunk: int


@dataclass(frozen=True)
class Use:
    """A link in a run.

    Attributes:
        busy: in order of time.
        size_bytes: that it carried.
        busy_s: the time that it needed for them.
        start_s: until its first byte.
        gaps_s: without anything to carry between its first and its last byte.
        end_s: from its last byte to the end of the run.
    """

    busy: tuple[Busy, ...]
    size_bytes: int
    busy_s: float
    start_s: float
    gaps_s: float
    end_s: float


def uses(loads: Iterable[Load], rates: Mapping[Hop, float], run_s: float) -> dict[Hop, Use]:
    """What each link carried when.

    Args:
        loads: of all ranks, in any order.
        rates: bits of payload per second of each link.
        run_s: how long the run took.
    """
    passages = _passages(loads, rates)
    return {hop: _use(passages[hop], sizes, run_s) for hop, sizes in _sizes(passages, rates).items()}


def _passages(loads: Iterable[Load], rates: Mapping[Hop, float]) -> dict[Hop, list[Busy]]:
    """Each frame on each link, in order of time."""
    waiting: list[tuple[float, int, int, Load]] = []
    for number, load in enumerate(sorted(loads, key=lambda load: load.at_s)):
        for first in range(0, load.size_bytes, FRAME_BYTES):
            frame = replace(load, size_bytes=min(FRAME_BYTES, load.size_bytes - first))
            # In order of time, then in that of the program; then in that of its bytes.
            waiting.append((load.at_s, number, first, frame))
    heapq.heapify(waiting)
    free: dict[Hop, float] = {}
    found: dict[Hop, list[Busy]] = {}
    while waiting:
        at, number, first, frame = heapq.heappop(waiting)
        hop = frame.path[0], frame.path[1]
        start = max(at, free.get(hop, 0.0))
        free[hop] = start + 8 * frame.size_bytes / rates[hop]
        found.setdefault(hop, []).append(Busy(start, free[hop], frame.chunk))
        if len(frame.path) > 2:
            heapq.heappush(waiting, (free[hop], number, first, replace(frame, path=frame.path[1:])))
    return found


def _sizes(passages: Mapping[Hop, Iterable[Busy]], rates: Mapping[Hop, float]) -> dict[Hop, int]:
    return {
        hop: round(sum(each.end_s - each.start_s for each in seen) * rates[hop] / 8)
        for hop, seen in passages.items()
    }


def _use(passages: list[Busy], size_bytes: int, run_s: float) -> Use:
    busy_s = sum(each.end_s - each.start_s for each in passages)
    first, last = passages[0].start_s, passages[-1].end_s
    return Use(joined(passages), size_bytes, busy_s, first, last - first - busy_s, run_s - last)


def joined(passages: Iterable[Busy], *, within_s: float = 20e-6) -> tuple[Busy, ...]:
    """Neighbours of the same chunk as one, so that pictures and files stay small."""
    found: list[Busy] = []
    for each in passages:
        if found and found[-1].chunk == each.chunk and each.start_s - found[-1].end_s <= within_s:
            found[-1] = replace(found[-1], end_s=each.end_s)
        else:
            found.append(each)
    return tuple(found)

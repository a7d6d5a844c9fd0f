"""What a simulation answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """What the simulation says of one message size.

    Attributes:
        bytes: size of the whole buffer, as algbw counts it.
        pieces: into how many pieces each chunk was cut.
        time_us: from the start to the arrival of the last piece.
        algbw: GB/s, bytes over time.
        busbw: GB/s, as nccl-tests defines it.
        service: the order of service that took so long, of several orders the slowest one; None for what was
            not simulated.
    """

    bytes: int
    pieces: int
    time_us: float
    algbw: float
    busbw: float
    service: str | None = None


@dataclass(frozen=True, slots=True)
class Occupation:
    """A piece on a link, from the start to the end of sending; it arrives one latency later."""

    start_us: float
    end_us: float
    chunk: int
    piece: int


def join_touching(bars: Iterable[Occupation]) -> tuple[Occupation, ...]:
    """Bars of one chunk that follow each other on a link without a gap become one."""
    joined: list[Occupation] = []
    for bar in bars:
        last = joined[-1] if joined else None
        if last is not None and last.chunk == bar.chunk and bar.start_us <= last.end_us * (1 + 1e-9):
            joined[-1] = Occupation(last.start_us, bar.end_us, bar.chunk, last.piece)
        else:
            joined.append(bar)
    return tuple(joined)

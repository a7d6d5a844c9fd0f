"""The event loop of the simulator: which piece passes which link when, in whole ticks of a clock.

`synth.hops` lays a schedule out as the arrays of `Layout`; `play` runs them. The clock is an integer so
that what happens at the same time on paper happens at the same time here, on every machine.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from synth.compiled import Ints, kernel

Counts = NDArray[np.int32]


class Layout(NamedTuple):
    """A schedule as arrays; a version is a state of what a rank holds of a chunk, see `synth.hops`.

    Attributes:
        first_hop: first hop of each transfer, and the number of hops at the end.
        link: the link of each hop.
        transfer: the transfer of each hop.
        step: step of each transfer.
        reads: the version that each transfer reads.
        writes: the version that each transfer helps to make.
        inputs: the versions that are there at the start, but for one count.
        follower: the version after each version at the same rank, -1 where there is none.
        needed: how much has to happen before each version is there.
        first_reader: first reader of each version in `readers`, and the number of readers at the end.
        readers: transfers in the order of the versions that they read.
    """

    first_hop: Ints
    link: Ints
    transfer: Ints
    step: Ints
    reads: Ints
    writes: Ints
    inputs: Ints
    follower: Ints
    needed: Ints
    first_reader: Ints
    readers: Ints


@kernel
def play(layout: Layout, pieces: int, durations: Ints, latencies: Ints) -> Ints:
    """The tick at which each piece (row) starts on each hop (column).

    Args:
        layout: the schedule.
        pieces: into how many pieces each chunk is cut.
        durations: ticks, at least 1, that each hop keeps its link busy for one piece.
        latencies: ticks from the end of sending to the arrival, of each link.
    """
    # A row per piece: few pieces are on their way at a time, so that what is touched stays in the cache.
    hops = layout.link.size
    start = np.full((pieces, hops), -1, np.int64)
    needed = np.empty((pieces, layout.needed.size), np.int32)
    needed[:] = layout.needed
    idle = np.ones(latencies.size, np.bool_)
    # The empty comprehensions tell numba what the lists hold.
    waiting = [[0 for _ in range(0)] for _ in range(latencies.size)]  # per link, a heap of `_key`s
    touched = [0 for _ in range(0)]  # links that may have something to start now
    events = [(0, 0) for _ in range(0)]  # (tick, 2 * cell of `start`, + 1 for arrivals)
    for version in layout.inputs:
        for piece in range(pieces):
            _settle(layout, version, piece, needed, waiting, touched)
    now = 0
    while True:
        for link in touched:
            if idle[link] and len(waiting[link]) > 0:
                hop, piece = _unkey(layout, heappop(waiting[link]))
                start[piece, hop] = now
                idle[link] = False
                sent = now + durations[hop]
                heappush(events, (sent, 2 * (piece * hops + hop)))
                heappush(events, (sent + latencies[link], 2 * (piece * hops + hop) + 1))
        touched.clear()
        if len(events) == 0:
            return start
        # Everything of this tick happens before any link picks what it serves next.
        now = events[0][0]
        while len(events) > 0 and events[0][0] == now:
            code = heappop(events)[1]
            hop, piece = code // 2 % hops, code // 2 // hops
            if code % 2 == 1:
                _arrive(layout, hop, piece, needed, waiting, touched)
            else:
                idle[layout.link[hop]] = True
                touched.append(layout.link[hop])
                _leave(layout, hop, piece, needed, waiting, touched)


@kernel
def _key(layout: Layout, hop: int, piece: int) -> int:
    """The place in a link's queue: by step + piece, then in the order of the hops."""
    return int((layout.step[layout.transfer[hop]] + piece) * layout.link.size + hop)


@kernel
def _unkey(layout: Layout, key: int) -> tuple[int, int]:
    """The hop and the piece of a key."""
    hop = key % layout.link.size
    return hop, key // layout.link.size - layout.step[layout.transfer[hop]]


@kernel
def _arrive(
    layout: Layout, hop: int, piece: int, needed: Counts, waiting: list[list[int]], touched: list[int]
) -> None:
    """A piece is at the far end of a hop: at a switch it queues up for the next one."""
    transfer = layout.transfer[hop]
    if hop + 1 == layout.first_hop[transfer + 1]:
        _settle(layout, layout.writes[transfer], piece, needed, waiting, touched)
    else:
        heappush(waiting[layout.link[hop + 1]], _key(layout, hop + 1, piece))
        touched.append(layout.link[hop + 1])


@kernel
def _leave(
    layout: Layout, hop: int, piece: int, needed: Counts, waiting: list[list[int]], touched: list[int]
) -> None:
    """A piece is sent: what replaces it at its rank waits for it no more."""
    transfer = layout.transfer[hop]
    if hop == layout.first_hop[transfer]:
        _settle(layout, layout.follower[layout.reads[transfer]], piece, needed, waiting, touched)


@kernel
def _settle(
    layout: Layout, version: int, piece: int, needed: Counts, waiting: list[list[int]], touched: list[int]
) -> None:
    """One thing that a version needed has happened; where it was the last, its readers queue up."""
    while version >= 0:
        needed[piece, version] -= 1
        if needed[piece, version] > 0:
            return
        for position in range(layout.first_reader[version], layout.first_reader[version + 1]):
            hop = layout.first_hop[layout.readers[position]]
            heappush(waiting[layout.link[hop]], _key(layout, hop, piece))
            touched.append(layout.link[hop])
        version = layout.follower[version]

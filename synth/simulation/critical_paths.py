"""What a run takes at least, whichever piece a link carries next: without playing it.

The first frame of each hop begins no sooner than what it waits for allows, on links that are free, and the
last one is followed by what waits for it. Of any hops of one link the earliest begin, all frames of them and
the shortest way on follow each other (Carlier's bound of a machine with heads and tails, 1982).
"""

from __future__ import annotations

import numpy as np

from arborcast.synth.kernels.compiled import Ints, kernel
from arborcast.synth.simulation.events import EventArrays


@kernel
def least_ticks(layout: EventArrays, durations: Ints, latencies: Ints, rows: int) -> int:
    """A tick before which no order of service ends.

    Args:
        layout: the schedule.
        durations: ticks that each hop keeps its link busy for one frame.
        latencies: ticks from the end of sending to the arrival, of each link.
        rows: frames of a chunk.
    """
    begins, order = _begins(layout, durations, latencies)
    follows = _follows(layout, durations, latencies, order)
    work, shortest = np.zeros(latencies.size, np.int64), np.full(latencies.size, np.iinfo(np.int64).max)
    least = 0
    for hop in np.argsort(begins)[::-1]:
        link = layout.link[hop]
        work[link] += rows * durations[hop]
        shortest[link] = min(shortest[link], follows[hop])
        least = max(least, begins[hop] + work[link] + shortest[link])
        least = max(least, begins[hop] + rows * durations[hop] + follows[hop])
    return least


@kernel
def _begins(layout: EventArrays, durations: Ints, latencies: Ints) -> tuple[Ints, Ints]:
    """When the first frame of each hop begins at the soonest; the versions, each behind what it waits for."""
    needed, ready = layout.needed.copy(), np.zeros(layout.needed.size, np.int64)
    begins, order = np.zeros(layout.link.size, np.int64), np.empty(layout.needed.size, np.int64)
    count = 0
    for version in layout.inputs:
        count = _happened(needed, ready, version, 0, order, count)
    at = 0
    while at < count:
        version = order[at]
        at += 1
        behind = layout.follower[version]
        count = _happened(needed, ready, behind, ready[version], order, count)
        for place in range(layout.first_reader[version], layout.first_reader[version + 1]):
            transfer, now = layout.readers[place], ready[version]
            for hop in range(layout.first_hop[transfer], layout.first_hop[transfer + 1]):
                begins[hop] = now
                now += durations[hop]
                if hop == layout.first_hop[transfer]:
                    count = _happened(needed, ready, behind, now, order, count)
                now += latencies[layout.link[hop]]
            count = _happened(needed, ready, layout.writes[transfer], now, order, count)
    return begins, order[:count]


@kernel
def _happened(needed: Ints, ready: Ints, version: int, now: int, order: Ints, count: int) -> int:
    """One thing that a version needed; behind the last one it is there, one more of `count`."""
    if version < 0:
        return count
    ready[version] = max(ready[version], now)
    needed[version] -= 1
    if needed[version] > 0:
        return count
    order[count] = version
    return count + 1


@kernel
def _follows(layout: EventArrays, durations: Ints, latencies: Ints, order: Ints) -> Ints:
    """What at least is left to do once a frame has been sent over each hop."""
    left, follows = np.zeros(layout.needed.size, np.int64), np.zeros(layout.link.size, np.int64)
    for version in order[::-1]:
        behind = layout.follower[version]
        longest = left[behind] if behind >= 0 else 0
        for place in range(layout.first_reader[version], layout.first_reader[version + 1]):
            transfer = layout.readers[place]
            rest, first = left[layout.writes[transfer]], layout.first_hop[transfer]
            for hop in range(layout.first_hop[transfer + 1] - 1, first - 1, -1):
                rest += latencies[layout.link[hop]]
                if hop == first and behind >= 0:
                    rest = max(rest, left[behind])
                follows[hop] = rest
                rest += durations[hop]
            longest = max(longest, rest)
        left[version] = longest
    return follows

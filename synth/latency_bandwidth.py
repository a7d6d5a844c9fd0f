"""Latency against bandwidth on large symmetric fabrics: known patterns and low trees, beside proved limits.

Above `synth.api.LARGEST_EXPLICIT` ranks no search goes through the steps of all chunks. What is compared are
the schedules that `synth solve --size` knows, nearly all in implicit form: packings of trees of every height
that is worth it, exchanges by digits, rings, trees by levels. Each is a point: what it takes for no
bytes (`wire_latency_us`) and its rate. No point is proved to be the best of its latency; beside them stand
the proved limits of latency, of rate, and of time at each size (`synth.bounds.time_limits`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING

from arborcast.synth.bounds.time_limits import TimeLimit, time_limit
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective
from arborcast.synth.selection import SIZES, Selection

if TYPE_CHECKING:
    from arborcast.synth.api import Approach
    from arborcast.synth.implicit_schedule import AnySchedule
    from arborcast.synth.topology import Topology, Vertex

EVERY_FOURTH = SIZES[::2]
"""1 KiB to 1 GiB, each 4 times the one before."""


@dataclass(frozen=True)
class LatencyPoint:
    """A schedule with what it takes for no bytes, by the latencies of links alone."""

    schedule: AnySchedule
    latency_us: Fraction

    def is_as_good_as(self, other: LatencyPoint) -> bool:
        """Whether neither latency nor rate of the other is better."""
        return self.latency_us <= other.latency_us and self.schedule.rate >= other.schedule.rate


@dataclass(frozen=True)
class AtSize:
    """The fastest of the points at a size, by simulation.

    Attributes:
        size_bytes: of the whole buffer.
        point: its index.
        time_us: simulated.
        least_us: what every schedule takes, proved in the scope of the bound.
    """

    size_bytes: int
    point: int
    time_us: float
    least_us: Fraction


@dataclass(frozen=True)
class LatencyBandwidth:
    """A frontier in implicit form.

    Attributes:
        topology: the fabric.
        collective: on all of its ranks.
        points: in order of latency; those that no other one is as good as, and those that are the fastest at
            some size all the same.
        sizes: in ascending order.
        bound: of the rate.
        limit: of the time; for no bytes it is the limit of the latency.
        why_incomplete: why some schedules may be missing; None where the deadline did not pass.
        seconds: that it took.
    """

    topology: Topology
    collective: Collective
    points: tuple[LatencyPoint, ...]
    sizes: tuple[AtSize, ...]
    bound: Bound
    limit: TimeLimit
    why_incomplete: str | None
    seconds: float


def latency_bandwidth(asked: Approach, sizes: Sequence[int] = EVERY_FOURTH) -> LatencyBandwidth:
    """The frontier of a question that is answered in implicit form, or of any other one's candidates.

    Args:
        asked: what `synth.api.approach` says; the deadline of its options is for building the schedules.
        sizes: to simulate, in bytes, ascending.

    Raises:
        InfeasibleError: no method has a schedule.
        TimedOutError: the deadline passed before there was any.
    """
    begin = time.perf_counter()
    found = replace(asked.selection(), priced=False)  # beside limits, which are of links alone
    limit = found.schedules[0].bound
    least = time_limit(asked.topology, asked.collective, limit)
    fastest = {size: found.fastest(size) for size in sizes}
    points = _worth_showing(found, fastest.values())
    number = {id(schedule): at for at, schedule in enumerate(found.schedules)}
    place = {id(point.schedule): index for index, point in enumerate(points)}
    at_sizes = tuple(
        AtSize(
            size,
            place[id(schedule)],
            found.prices.time_us(number[id(schedule)], size),
            least.at(size),
        )
        for size, schedule in fastest.items()
    )
    late = None if found.out_of_time is None else str(found.out_of_time)
    seconds = round(time.perf_counter() - begin, 3)
    return LatencyBandwidth(asked.topology, asked.collective, points, at_sizes, limit, least, late, seconds)


def _worth_showing(found: Selection, fastest: Iterable[AnySchedule]) -> tuple[LatencyPoint, ...]:
    wanted = {id(schedule) for schedule in fastest}
    every = [LatencyPoint(schedule, wire_latency_us(schedule)) for schedule in found.schedules]
    # The first of equals stays.
    kept = [
        point
        for at, point in enumerate(every)
        if id(point.schedule) in wanted
        or not any(
            other.is_as_good_as(point) and (index < at or not point.is_as_good_as(other))
            for index, other in enumerate(every)
            if index != at
        )
    ]
    return tuple(sorted(kept, key=lambda point: (point.latency_us, -point.schedule.rate)))


def wire_latency_us(schedule: AnySchedule) -> Fraction:
    """What a schedule takes for no bytes: its longest chain of transfers, by the latencies of links.

    Of the implicit form the representatives tell: translations carry each of their chunks, with all of its
    transfers, to another chunk, over links of the same latencies.
    """
    latency = schedule.topology.latency_us
    arrived: dict[tuple[int, Vertex], Fraction] = defaultdict(Fraction)
    for _, together in groupby(schedule.transfers, key=lambda transfer: transfer.step):
        there: dict[tuple[int, Vertex], Fraction] = {}
        for transfer in together:
            way_us = sum((latency[hop] for hop in transfer.hops), Fraction(0))
            us = arrived[transfer.chunk, transfer.src] + way_us
            end = (transfer.chunk, transfer.dst)
            there[end] = max(us, there.get(end, us))
        for end, us in there.items():
            arrived[end] = max(us, arrived[end])
    return max(arrived.values(), default=Fraction(0))

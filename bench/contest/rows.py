"""From what the ranks saw to the rows, the table and the links of the results file."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from arborcast.backends.schedules.schedule_table import describe
from arborcast.bench.contest.contenders import GLOO, RING
from arborcast.bench.contest.ranks import Order, Round, pieces_of
from arborcast.bench.emulation.network import burst_bytes
from arborcast.bench.emulation.plan import EmulationPlan
from arborcast.bench.harness.document import timed_row
from arborcast.synth import bounds
from arborcast.synth.topology import Hop, Topology

LEAST_IDLE = 0.05
"""Share of the processors that nobody used below which they, and not the links, may have been the limit."""

LEAST_SEEN_S = 0.2
"""Of processor time in all runs together, to say anything of it: the kernel counts it in hundredths."""

MOST_OF_A_CORE = 0.95
"""Share of the time for which a rank may compute without being the limit itself: it has one thread."""

DIGITS = 4
"""Of a delivered rate that count: the bound is exact, and its fractions are to stay short."""


@dataclass(frozen=True)
class Limits:
    """The least time of a collective, per byte.

    Attributes:
        delivered_us: at the rates that the links delivered alone.
        nominal_us: at those that they were set to.
        burst_us: what a run may take less than that, whatever its size, because links that have paused carry
            their burst at once: no link's burst is worth more time.
    """

    delivered_us: float
    nominal_us: float
    burst_us: float

    @classmethod
    def of(cls, order: Order, plan: EmulationPlan, alone: Mapping[Hop, float]) -> Limits:
        """Both from proven bounds; `alone` in bits per second, the plan's topology at its rates."""
        delivered_us, nominal_us = (
            1 / (1000 * float(bounds.bound(fabric, order.collective).rate))
            for fabric in (delivered_fabric(plan.topology, alone), plan.topology)
        )
        bursts = (burst_bytes(rate) * 8e6 / rate for rate in _nominal(plan).values())
        return cls(delivered_us, nominal_us, max(bursts))


def _nominal(plan: EmulationPlan) -> dict[Hop, float]:
    return {hop: float(plan.rate(*hop)) for hop in plan.topology.bandwidth}


def delivered_fabric(topology: Topology, bits_per_s: Mapping[Hop, float]) -> Topology:
    """The topology with the rates that its links have shown."""
    links = [
        replace(link, bandwidth=Fraction(f"{bits_per_s[link.src, link.dst] / 8e9:.{DIGITS}g}"))
        for link in topology.links
    ]
    return Topology.build(topology.name, topology.ranks, links, topology.switches)


def rows_of(
    order: Order, plan: EmulationPlan, limits: Limits, ranks: Sequence[Sequence[Sequence[Round]]]
) -> list[dict[str, Any]]:
    """A row per contender.

    Args:
        order: what was done.
        plan: on what.
        limits: of it.
        ranks: what each rank saw, by contender and round.
    """
    rounds = [
        [_Together.of(one) for one in zip(*(rank[index] for rank in ranks), strict=True)]
        for index in range(len(order.contenders))
    ]
    seconds = {
        each.name: [seen.seconds for seen in found]
        for each, found in zip(order.contenders, rounds, strict=True)
    }
    rows = []
    for contender, found in zip(order.contenders, rounds, strict=True):
        schedule = contender.schedule
        idle = _idle(found)
        busiest = statistics.median(each.busiest for each in found)
        rows.append(
            timed_row(
                topology=plan.topology.name,
                ranks=plan.topology.ranks,
                collective=order.collective.kind,
                root=order.collective.root,
                method=contender.name,
                size_bytes=order.size_bytes,
                times_us=[1e6 * each for each in seconds[contender.name]],
                optimum_us=_beyond_bursts(limits.delivered_us, limits, order),
                nominal_us=_beyond_bursts(limits.nominal_us, limits, order),
                burst_share=limits.burst_us / (limits.delivered_us * order.size_bytes),
                speed_up_over_gloo=_speed_up(seconds, contender.name, GLOO),
                speed_up_over_ring=_speed_up(seconds, contender.name, RING),
                slowest_mbit=float(min(_nominal(plan).values()) / 1e6),
                rate_of_schedule=None if schedule is None else float(schedule.rate / schedule.bound.rate),
                served_by=None if schedule is None else describe(schedule),
                pieces=None if schedule is None else pieces_of(schedule, order),
                steps=None if schedule is None else schedule.steps,
                chunks=None if schedule is None else len(schedule.chunks),
                strays=None if schedule is None else len(plan.strays(schedule)),
                idle=idle,
                busiest_rank=busiest,
                cpu_limited=(idle is not None and idle < LEAST_IDLE) or busiest > MOST_OF_A_CORE,
            )
        )
    return rows


def _beyond_bursts(us_per_byte: float, limits: Limits, order: Order) -> float | None:
    """The least time less what bursts carry; None where that may be a tenth: a share says little."""
    least = us_per_byte * order.size_bytes
    return least - limits.burst_us if limits.burst_us < least / 10 else None


@dataclass(frozen=True)
class _Together:
    """A run as all ranks saw it."""

    seconds: float
    busiest: float
    idle: float
    capacity: float

    @classmethod
    def of(cls, ranks: Sequence[Round]) -> _Together:
        last = max(each.seconds for each in ranks)
        return cls(last, max(each.cpu_seconds for each in ranks) / last, ranks[0].idle, ranks[0].capacity)


def _idle(runs: Sequence[_Together]) -> float | None:
    """Share of the processors that nobody used; None where the runs were too short to see."""
    capacity = sum(each.capacity for each in runs)
    return None if capacity < LEAST_SEEN_S else sum(each.idle for each in runs) / capacity


def _speed_up(seconds: Mapping[str, Sequence[float]], name: str, over: str) -> float | None:
    """The median of the ratios of runs in the same round."""
    if over not in seconds:
        return None
    return statistics.median(base / own for base, own in zip(seconds[over], seconds[name], strict=True))


def links_of(plan: EmulationPlan, delivered: Mapping[str, Mapping[Hop, float]]) -> list[dict[str, Any]]:
    """Each link with its nominal rate and those it delivered, in Mbit/s of payload."""
    label = plan.topology.label
    return [
        {
            "from": label(link.src),
            "to": label(link.dst),
            "nominal_mbit": plan.rate(link.src, link.dst) / 1e6,
            "alone_mbit": round(delivered["alone"][link.src, link.dst] / 1e6, 3),
            "together_mbit": round(delivered["together"][link.src, link.dst] / 1e6, 3),
        }
        for link in plan.topology.links
    ]

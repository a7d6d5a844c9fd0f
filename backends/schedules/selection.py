"""Which schedule serves which size where a rank's one thread starts every message.

The simulator knows links only. Here a message takes its time at both ends as well, and a rank has to start
one after the other, so that many small chunks are slower than links alone would say.

Nor does the engine decide in which order a link that several ranks share, such as a port of a switch, carries
what they hand over. Where that order is random, streams to two ranks drift apart like random walks; the link
behind the one that fell back is idle meanwhile, and what it missed is lost: of N pieces some sqrt(N), which
no planned order changes. Chains lose nothing, in which each rank receives from one other and sends to one.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cached_property

from arborcast.backends.lowering.rank_view import most_messages
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.schedule import Schedule
from arborcast.synth.selection import Selection
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.topology import Topology

MESSAGE_US = Fraction(20)
"""What sending and receiving a message costs the threads at its ends together, whatever its length."""

NEAR = 0.02
"""Of the least time: what schedules may take more to be compared by their slowest random order."""

ORDERS = "engine-worst:4"
"""Those that are tried; what loses time to random orders loses it to most of them."""


class GroupSelection(Selection):
    """Schedules compared by what is slower: links to which messages are added, or the busiest rank."""

    def fastest(self, size_bytes: int) -> AnySchedule:
        """The one with the least time, the first of equals.

        Where switches are passed, and all is written out, `NEAR` as fast is as good: of those the one that
        random orders of service slow down the least.
        """
        timings = [simulate(slowed, size_bytes) for slowed in self._slowed]
        times = [max(timing.time_us, work_us) for timing, work_us in zip(timings, self._work_us, strict=True)]
        near = [at for at, time_us in enumerate(times) if time_us <= (1 + NEAR) * min(times)]
        if self.schedules[0].topology.switches and all(
            isinstance(self.schedules[at], Schedule) for at in near
        ):
            for at in near:
                pieces = timings[at].pieces
                slowest = simulate(self._slowed[at], size_bytes, pieces=pieces, service=ORDERS)
                times[at] = max(slowest.time_us, times[at])
        return self.schedules[min(near, key=times.__getitem__)]

    @cached_property
    def _slowed(self) -> tuple[AnySchedule, ...]:
        topology = with_messages(self.schedules[0].topology)
        return tuple(replace(schedule, topology=topology) for schedule in self.schedules)

    @cached_property
    def _work_us(self) -> tuple[float, ...]:
        return tuple(float(most_messages(schedule) * MESSAGE_US / 2) for schedule in self.schedules)


def with_messages(topology: Topology) -> Topology:
    """The topology with the cost of a message in the latency of each link into a rank."""
    return replace(
        topology,
        links=tuple(
            link if topology.is_switch(link.dst) else replace(link, latency_us=link.latency_us + MESSAGE_US)
            for link in topology.links
        ),
    )

"""Which schedule serves which size where a rank's one thread starts every message.

The simulator knows links only. Here a message takes its time at both ends as well, and a rank has to start
one after the other, so that many small chunks are slower than links alone would say.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cached_property

from arborcast.backends.lowering.rank_view import most_messages
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.selection import Selection
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.topology import Topology

MESSAGE_US = Fraction(20)
"""What sending and receiving a message costs the threads at its ends together, whatever its length."""


class Comparison(Selection):
    """Schedules compared by what is slower: links to which messages are added, or the busiest rank."""

    def fastest(self, size_bytes: int) -> AnySchedule:
        """The one with the least time; the first of equals."""
        times = [
            max(simulate(slowed, size_bytes).time_us, work_us)
            for slowed, work_us in zip(self._slowed, self._work_us, strict=True)
        ]
        return self.schedules[times.index(min(times))]

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

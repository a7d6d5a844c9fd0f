"""What the links of a topology cost a pipeline: messages between stages, allreduces among replicas.

Messages take the path with the fewest links (of those, the widest); what several of them put on one link
adds up. An allreduce costs what the best schedule for exactly those ranks costs, from its proven rate or
as simulated; or what gloo's ring of them costs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from arborcast.pipeline.answers import kept
from arborcast.pipeline.errors import PlanError
from arborcast.synth.api import bound, solve
from arborcast.synth.features import check_features
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.topology import Hop, Topology

BYTES_PER_US = 1000
"""Of a link of 1 GB/s."""


@dataclass(frozen=True)
class LinkCosts:
    """A topology, and what was asked of it so far (answers are kept).

    Attributes:
        topology: whose ranks the questions name.
        message_us: that every message costs beyond its links (the software's part), on its way.
        handling_us: of its own time that a rank spends on each message of a pass that it sends or receives,
            once the pass is done and its results are on their way.
        collective_us: that every allreduce costs beyond its bytes, per rank that takes part.
        by_schedule: whether an allreduce takes as long as the schedule that `synth.solve` finds for exactly
            its ranks does when simulated, with its latencies (finding one may take seconds); otherwise only
            its bytes count, at the proven rate, which is too cheap for few bytes on many ranks.
        sum_gbps: GB/s of an allreduce that ranks' own work allows whatever the links (adding, copying); None
            where links alone limit it.
        by_ring: whether gloo sums, in a ring of the ranks in ascending order: 2(n-1) times each sends an n-th
            of the bytes to the next, by way of other ranks, too.
        peer_bytes: of memory that a group that sums takes on each rank for each other one.

    Examples:
        >>> costs = pipeline.LinkCosts(topologies.load("star:4,bandwidth=6"), message_us=20)
        >>> costs.topology.ranks
        4
    """

    topology: Topology
    message_us: float = 0.0
    handling_us: float = 0.0
    collective_us: float = 0.0
    by_schedule: bool = False
    sum_gbps: float | None = None
    peer_bytes: int = 0
    by_ring: bool = False
    _rates: dict[tuple[object, ...], Fraction] = field(default_factory=dict, repr=False, compare=False)
    _schedules: dict[tuple[object, ...], AnySchedule] = field(default_factory=dict, repr=False, compare=False)
    _times_us: dict[tuple[object, int], float] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse what prices of links would overlook."""
        check_features(self.topology, "pipeline planning")

    def path(self, src: int, dst: int) -> tuple[Hop, ...]:
        """The links of a message, in order.

        Raises:
            PlanError: no path leads there.
        """
        if dst not in self._paths[src]:
            raise PlanError(f"topology {self.topology.name}: no path leads from rank {src} to rank {dst}")
        return self._paths[src][dst]

    def latency_us(self, src: int, dst: int) -> Fraction:
        """Of the links of a message together."""
        return sum((self.topology.latency_us[hop] for hop in self.path(src, dst)), Fraction(0))

    def width(self, src: int, dst: int) -> Fraction:
        """GB/s of the narrowest link of a message."""
        return min(self.topology.bandwidth[hop] for hop in self.path(src, dst))

    def transfer_us(self, messages: Mapping[tuple[int, int], float]) -> float:
        """Time of messages that start together, in bytes by (from, to), each at its share of its links."""
        return self.message_us + self._links_us(messages) if messages else 0.0

    def _links_us(self, messages: Mapping[tuple[int, int], float]) -> float:
        """The same without the software's part."""
        load: defaultdict[Hop, float] = defaultdict(float)
        for ends, size in messages.items():
            for hop in self.path(*ends):
                load[hop] += size
        latency = max(self.latency_us(*ends) for ends in messages)
        return float(latency) + max(
            size / (float(self.topology.bandwidth[hop]) * BYTES_PER_US) for hop, size in load.items()
        )

    def allreduce_us(self, ranks: Sequence[int], size_bytes: float) -> float:
        """Time of one allreduce among exactly these ranks; infinite where no schedule is."""
        if len(ranks) == 1 or not size_bytes:
            return 0.0
        if self.by_ring:
            links_us = 2 * (len(ranks) - 1) * self._links_us(ring_messages(sorted(ranks), size_bytes))
        elif not (rate := self.allreduce_rate(ranks)):
            return float("inf")
        elif self.by_schedule:
            links_us = self._scheduled_us(ranks, math.ceil(size_bytes))
        else:
            links_us = size_bytes / (float(rate) * BYTES_PER_US)
        own_us = 0.0 if self.sum_gbps is None else size_bytes / (self.sum_gbps * BYTES_PER_US)
        return len(ranks) * self.collective_us + max(links_us, own_us)

    def allreduce_rate(self, ranks: Sequence[int]) -> Fraction:
        """The proven best algbw (GB/s) of an allreduce among exactly these ranks.

        It is 0 where links do not connect them: the other ranks are busy and do not forward.
        """
        fragment, key = self._fragment(ranks)
        return kept(self._rates, key, lambda: bound(fragment, "allreduce").rate)

    def _scheduled_us(self, ranks: Sequence[int], size_bytes: int) -> float:
        fragment, key = self._fragment(ranks)

        def simulated_us() -> float:
            schedule = kept(self._schedules, key, lambda: solve(fragment, "allreduce"))
            return simulate(schedule, size_bytes).time_us

        return kept(self._times_us, (key, size_bytes), simulated_us)

    def _fragment(self, ranks: Sequence[int]) -> tuple[Topology, tuple[object, ...]]:
        """The links among these ranks, and what fragments at other places have in common with it if equal."""
        fragment = self.topology.subset(sorted(ranks))
        return fragment, (fragment.ranks, fragment.links)

    @cached_property
    def _paths(self) -> dict[int, dict[int, tuple[Hop, ...]]]:
        return {rank: self._paths_from(rank) for rank in range(self.topology.ranks)}

    def _paths_from(self, src: int) -> dict[int, tuple[Hop, ...]]:
        """Breadth first; among paths of equal length the one whose narrowest link is widest."""
        found: dict[int, tuple[Fraction, tuple[Hop, ...]]] = {src: (Fraction(0), ())}
        frontier = [src]
        while frontier:
            reached: dict[int, tuple[Fraction, tuple[Hop, ...]]] = {}
            for vertex in frontier:
                width, path = found[vertex]
                for dst in self._neighbours[vertex]:
                    narrowest = self.topology.bandwidth[vertex, dst]
                    narrowest = min(narrowest, width) if path else narrowest
                    if dst not in found and (dst not in reached or narrowest > reached[dst][0]):
                        reached[dst] = (narrowest, (*path, (vertex, dst)))
            found |= reached
            frontier = sorted(reached)
        return {dst: path for dst, (_, path) in found.items() if not self.topology.is_switch(dst)}

    @cached_property
    def _neighbours(self) -> dict[int, list[int]]:
        neighbours: dict[int, list[int]] = {vertex: [] for vertex in range(self.topology.size)}
        for link in self.topology.links:
            neighbours[link.src].append(link.dst)
        return neighbours


def ring_messages(ranks: Sequence[int], size_bytes: float) -> dict[tuple[int, int], float]:
    """Of one step of an allreduce in a ring of these ranks: an n-th of the bytes from each to the next."""
    ends = zip(ranks, (*ranks[1:], ranks[0]), strict=True)
    return dict.fromkeys(ends, size_bytes / len(ranks))

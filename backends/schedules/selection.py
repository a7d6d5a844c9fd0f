"""Which schedule serves which size where a rank's one thread starts every message.

The simulator knows links only. Here a message takes its time at both ends as well, and a rank has to start
one after the other, so that many small chunks are slower than links alone would say. Chunks are cut as the
engine cuts them between hosts, not as the simulator would like best.

Nor does the engine decide in which order a link that several ranks share, such as a port of a switch, carries
what they hand over. Where that order is random, streams to two ranks drift apart like random walks; the link
behind the one that fell back is idle meanwhile, and what it missed is lost: of N pieces some sqrt(N), which
no planned order changes. Chains lose nothing, in which each rank receives from one other and sends to one.

Within one host there are no links but its cores, which all ranks share. Work that takes W of one core, of
which the busiest rank has S, takes p cores at most W/p + (1 - 1/p) S (Graham, "Bounds on multiprocessing
timing anomalies", 1969), and about that long where every rank that is woken takes its turn:

    a broadcast of M to 7 others      messages      W       S       2 cores     8 cores
    a star                               7         14 M     7 M     10.5 M      7.9 M
    7 trees of height 2                 49         14 M     2 M      8   M      3.5 M
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import ClassVar

from arborcast.synth.crossings import Prices
from arborcast.synth.implicit_schedule import AnySchedule, ImplicitSchedule
from arborcast.synth.schedule import Schedule
from arborcast.synth.selection import Selection
from arborcast.synth.simulation.pieces import ONE_HOST, SEVERAL_HOSTS, most_messages, shares_of
from arborcast.synth.simulation.service import EARLIEST, Service
from arborcast.synth.simulation.simulator import MAX_PASSAGES, simulate
from arborcast.synth.topology import Topology

MESSAGE_US = Fraction(20)
"""What sending and receiving a message costs the threads at its ends together, whatever its length, where the
topology does not say it."""

SHAKEN = 0.02
"""Of the least time: what schedules may take more to be compared by their slowest random order."""

ORDERS = "engine-worst:4"
"""Those that are tried; what loses time to random orders loses it to most of them."""

END_US = 15
"""What a message costs each of its ends, in one host; measured (`bench/loopback.py`, 8 ranks on 2 cores)."""

WAKE_US = 200
"""How long a rank is woken before it runs where others are at work: 1 KiB from one rank to 7 takes 2 cores
400 us, of which its messages take 100."""

END_GBS = 5
"""The rate at which an end moves bytes there: 0.2 ns a byte of sockets, less of shared memory."""


SUM_COSTS = 2
"""Bytes that are added as they come take an end so many times as long as those that are only moved."""


@dataclass(frozen=True, slots=True)
class _Ends:
    """The ends of messages and what passes them, in parts of the buffer: in all, and at the busiest rank."""

    messages: int
    share: float
    most_messages: int
    most_share: float

    @classmethod
    def of(cls, schedule: AnySchedule) -> _Ends:
        images = schedule.translations.order if isinstance(schedule, ImplicitSchedule) else 1
        shares = shares_of(schedule, sums=SUM_COSTS)
        share = sum(
            schedule.chunks[transfer.chunk].share * (1 + (SUM_COSTS if transfer.reduce else 1))
            for transfer in schedule.transfers
        )
        return cls(
            2 * images * len(schedule.transfers),
            float(images * share),
            most_messages(schedule),
            float(max(shares.values(), default=0)),
        )


@dataclass(frozen=True)
class GroupSelection(Selection):
    """Schedules compared by what is slower: links to which messages are added, or the busiest rank.

    Attributes:
        cores: of the one host that all ranks share, where nothing is known of links; None elsewhere.
    """

    cores: int | None = None

    @cached_property
    def prices(self) -> Prices:
        """What each schedule takes by this module's model."""
        if self.cores is not None:
            return _OnCores(self.schedules, self.cores)
        return _OnHosts(self.schedules)


@dataclass(frozen=True)
class _OnCores(Prices):
    """How long schedules take the cores of one host."""

    schedules: tuple[AnySchedule, ...]
    cores: int
    work_adds: ClassVar[bool] = True

    @property
    def count(self) -> int:
        return len(self.schedules)

    def _time_us(self, at: int, size: int) -> float:
        ends, ranks = self._ends[at], self.schedules[at].topology.ranks
        cores, byte_us = min(self.cores, ranks), size / (1000 * END_GBS)
        # Pieces of a message go together where they are ready together, and cost their bytes alone.
        whole = ends.messages * END_US + ends.share * byte_us
        busiest = ends.most_messages * END_US + ends.most_share * byte_us
        turns = self._turns(at, size)
        return whole / cores + (1 - 1 / cores) * busiest * turns / self.pieces(at, size) + turns * WAKE_US

    def _pieces(self, at: int, size: int) -> int:
        return ONE_HOST.pieces(self.schedules[at], size)

    def _work_us(self, at: int, size: int) -> float:
        return self._turns(at, size) * WAKE_US

    def _turns(self, at: int, size: int) -> int:
        """Who works on the last piece has waited for those before it."""
        return self.pieces(at, size) + self.schedules[at].steps - 1

    @cached_property
    def _ends(self) -> tuple[_Ends, ...]:
        return tuple(_Ends.of(schedule) for schedule in self.schedules)


@dataclass(frozen=True)
class _OnHosts(Prices):
    """How long they take links to which messages are added, or the busiest rank.

    Where switches are passed, and all is written out, `SHAKEN` as fast is as good: of those the one that
    random orders of service slow down the least is the best.
    """

    schedules: tuple[AnySchedule, ...]

    @property
    def count(self) -> int:
        return len(self.schedules)

    @property
    def tolerated(self) -> float:  # type: ignore[override]
        topology = self.schedules[0].topology  # the engine's orders are not those of streams
        return SHAKEN if topology.switches and not topology.streams else 0.0

    def best(self, size: int, candidates: Iterable[int] | None = None, *, near: float = 0.0) -> int:
        best = super().best(size, candidates, near=near)
        if not self.tolerated:
            return best
        most_us = (1 + SHAKEN) * self.time_us(best, size)
        alike = [
            at
            for at in (range(self.count) if candidates is None else candidates)
            if self.least_us(at, size) <= most_us and self.time_us(at, size) <= most_us
        ]
        if not all(isinstance(self.schedules[at], Schedule) for at in alike):
            return best
        return min(alike, key=lambda at: max(self._simulated_us(at, size, ORDERS), self.time_us(at, size)))

    def _time_us(self, at: int, size: int) -> float:
        return max(self._simulated_us(at, size), self._work_us(at, size))

    def _simulated_us(self, at: int, size: int, service: Service | str = EARLIEST) -> float:
        return simulate(self._slowed[at], size, pieces=self.pieces(at, size), service=service).time_us

    def _pieces(self, at: int, size: int) -> int:
        """As the engine cuts, but for what would take the simulator minutes."""
        schedule = self.schedules[at]
        passages = MAX_PASSAGES // max(1, sum(len(transfer.via) + 1 for transfer in schedule.transfers))
        return max(1, min(SEVERAL_HOSTS.pieces(schedule, size), passages))

    def _work_us(self, at: int, size: int) -> float:
        return self.pieces(at, size) * self._message_us[at]

    @cached_property
    def _slowed(self) -> tuple[AnySchedule, ...]:
        topology = with_messages(self.schedules[0].topology)
        return tuple(replace(schedule, topology=topology) for schedule in self.schedules)

    @cached_property
    def _message_us(self) -> tuple[float, ...]:
        each_us = self.schedules[0].topology.message_us or MESSAGE_US / 2
        return tuple(float(most_messages(schedule) * each_us) for schedule in self.schedules)


def with_messages(topology: Topology) -> Topology:
    """The topology with the cost of a message in the latency of each link into a rank.

    Where `synth probe` measured what messages cost, its latencies have it already.
    """
    if topology.message_us:
        return topology
    return replace(
        topology,
        links=tuple(
            link if topology.is_switch(link.dst) else replace(link, latency_us=link.latency_us + MESSAGE_US)
            for link in topology.links
        ),
    )

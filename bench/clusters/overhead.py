"""What NCCL's model counts beside the links, charged to our schedules as well.

The simulator counts bandwidth and latency of links. NCCL's model counts the start of a kernel (6.6 to 14 us),
for each step what its protocol takes on both GPUs (0.6 to 14 us), and that protocols carry less than the
links do. Comparing the two would compare a wire with a library. Here a schedule is charged what NCCL charges
its own algorithm of the same kind, for the best of its three protocols:

    base + max(longest chain, busiest rank) + wire + (simulated time - wire) / share

*longest chain*: transfers that wait for each other, each at NCCL's figure for a hop, inside a host or across
the network. *busiest rank*: the messages that one rank sends (or receives), at the same figure, on as many
at a time as NCCL's plan has channels; without it a packing in which a rank talks to a thousand others would
look free. What moves between two ranks in one step is one message. *share*: of NCCL's tree where some rank
adds several contributions to a chunk in one step, as on NCCL's trees; of its ring for all else, since a rank
then takes from one other, adds and passes on. What is no ring pays the tree's figures for a hop, and where it
has the ring's share, the ring's if those are more. *wire*: the longest chain by the latencies of the links.
It is part of NCCL's figures for a hop and is paid twice here, because what is simulated cannot be told
apart from it: the doubt goes against us. Two things are as generous to us as NCCL's model is to NCCL: pieces
of a transfer cost nothing but their bytes, and of the longest chain and the busiest rank one hides the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from arborcast.synth.baselines.nccl_model import (
    BASE_US,
    HOP_US,
    NET_OVERHEAD_US,
    RING,
    TREE,
    Medium,
    NcclSetup,
    nccl_times,
)
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.implicit_schedule import AnySchedule, ImplicitSchedule
from arborcast.synth.nccl_protocol import Protocol

RINGS = ("ring", "multiring")


class Charge(NamedTuple):
    """A time with NCCL's overhead, and in which protocol it is the least."""

    time_us: float
    protocol: Protocol


@dataclass(frozen=True)
class Overhead:
    """What one schedule pays, from the plan whose resources it is given.

    Attributes:
        schedule: what pays.
        plan: NCCL's channels, hosts and generation.
        network: the switches between hosts.
    """

    schedule: AnySchedule
    plan: NcclSetup
    network: frozenset[int]

    def charge(self, time_us: float) -> Charge:
        """The time of a run whose simulated time is given, in the protocol that makes it least."""
        wire_us = min(self._moves.wire_us, time_us)
        charges = []
        for protocol in Protocol:
            carried_us = (time_us - wire_us) / float(self.shares[protocol])
            charges.append(Charge(self.latency_us(protocol) + wire_us + carried_us, protocol))
        return min(charges, key=lambda charge: charge.time_us)

    def latency_us(self, protocol: Protocol) -> float:
        """Base, and the longest chain or the busiest rank."""
        return self._latencies[protocol]

    @cached_property
    def shares(self) -> dict[Protocol, Fraction]:
        """The part of the links' rates that each protocol carries, as NCCL's model has it."""
        collective, plan = self.schedule.collective, self.plan
        count = len(collective.ranks)
        reduced = Collective(Kind.ALLREDUCE, collective.ranks)
        shares = {}
        for protocol in Protocol:
            ring, tree = nccl_times(self.schedule.topology, reduced, [1], plan=plan, protocol=protocol)
            whole = plan.bandwidth / 2 if self._as_tree else plan.bandwidth * count / (2 * (count - 1))
            shares[protocol] = min((tree if self._as_tree else ring).rate / whole, Fraction(1))
        return shares

    @cached_property
    def _as_tree(self) -> bool:
        return self._moves.most_added_at_once > 1

    @cached_property
    def _moves(self) -> _Moves:
        return _Moves.of(self.schedule, self.network)

    @cached_property
    def _latencies(self) -> dict[Protocol, float]:
        moves = self._moves
        algorithm = RING if self.schedule.method.name in RINGS else TREE
        found = {}
        for protocol in Protocol:
            inside = HOP_US[algorithm, self.plan.medium][protocol]
            across = HOP_US[algorithm, Medium.NETWORK][protocol]
            if algorithm == RING and self.plan.hosts > 1:
                posting = NET_OVERHEAD_US[self.plan.cpu] * (3 if protocol is Protocol.SIMPLE else 1)
                inside = max(inside, posting)
            if algorithm == TREE and not self._as_tree:
                inside = max(inside, HOP_US[RING, self.plan.medium][protocol])
                across = max(across, HOP_US[RING, Medium.NETWORK][protocol])
            hop_us = np.where(moves.crosses, across, inside)
            busy_us = moves.busiest_us(hop_us) / self.plan.channels
            found[protocol] = BASE_US[algorithm][protocol] + max(moves.chain_us(hop_us), busy_us)
        return found


def wire_time_us(schedule: AnySchedule) -> float:
    """What a schedule takes for no bytes at all: its longest chain by the latencies of the links."""
    return _Moves.of(schedule, frozenset()).wire_us


@dataclass(frozen=True)
class _Moves:
    """The transfers of a schedule as arrays, in order of step; `latency_us` is that of their links.

    Switches that add or copy are ends of transfers as ranks are, and pay the same.
    """

    vertices: int
    chunks: int
    chunk: NDArray[np.int64]
    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    step: NDArray[np.int64]
    crosses: NDArray[np.bool_]
    latency_us: NDArray[np.float64]
    adds: NDArray[np.bool_]

    @classmethod
    def of(cls, schedule: AnySchedule, network: frozenset[int]) -> _Moves:
        transfers = schedule.transfers
        columns = np.array([(t.chunk, t.src, t.dst, t.step) for t in transfers], np.int64).reshape(-1, 4).T
        crosses = np.array([not network.isdisjoint(t.via) for t in transfers], np.bool_)
        latency = {(link.src, link.dst): float(link.latency_us) for link in schedule.topology.links}
        adds = np.array([t.reduce for t in transfers], np.bool_)
        latency_us = np.array([sum(latency[hop] for hop in t.hops) for t in transfers], np.float64)
        chunk, src, dst, step = columns
        if isinstance(schedule, ImplicitSchedule):
            order = schedule.translations.order
            elements = np.arange(order, dtype=np.int64)
            ends = {end: schedule.translations.apply(elements, end) for end in {*src.tolist(), *dst.tolist()}}
            chunk = (chunk[:, None] * order + elements).ravel()
            src, dst = (np.concatenate([ends[end] for end in those.tolist()]) for those in (src, dst))
            step, crosses = np.repeat(step, order), np.repeat(crosses, order)
            latency_us, adds = np.repeat(latency_us, order), np.repeat(adds, order)
        vertices, chunks = schedule.topology.size, schedule.chunk_count
        return cls(vertices, chunks, chunk, src, dst, step, crosses, latency_us, adds)

    @property
    def most_added_at_once(self) -> int:
        """Of all vertices and chunks, the most contributions that come in one step."""
        place = (self.step * self.vertices + self.dst) * self.chunks + self.chunk
        return int(np.unique(place[self.adds], return_counts=True)[1].max(initial=0))

    @cached_property
    def wire_us(self) -> float:
        """What the schedule takes for no bytes at all."""
        return self.chain_us(self.latency_us)

    def chain_us(self, hop_us: NDArray[np.float64]) -> float:
        """The longest chain of transfers in which each needs what the one before it brought."""
        arrived = np.zeros(self.vertices * self.chunks)
        for first, end in self._bounds_of_steps():
            chunk = self.chunk[first:end]
            there = arrived[self.src[first:end] * self.chunks + chunk] + hop_us[first:end]
            np.maximum.at(arrived, self.dst[first:end] * self.chunks + chunk, there)
        return float(arrived.max(initial=0.0))

    def busiest_us(self, hop_us: NDArray[np.float64]) -> float:
        """All messages of the rank that sends, or receives, the most, one after the other."""
        pair = (self.step * self.vertices + self.src) * self.vertices + self.dst
        _, once = np.unique(pair, return_index=True)
        sums = (np.bincount(ends[once], hop_us[once], 1) for ends in (self.src, self.dst))
        return max(float(each.max()) for each in sums)

    def _bounds_of_steps(self) -> Sequence[tuple[int, int]]:
        starts = np.flatnonzero(np.diff(self.step, prepend=-1)).tolist()
        return list(zip(starts, [*starts[1:], len(self.step)], strict=True))

"""A schedule as arrays of hops, ready for the event loop, with the clock for a message size.

The simulator lays a schedule out once and plays it for many sizes and piece counts. What a rank holds of
a chunk goes through *versions*: version 0 is the input, and each step in which something is delivered
makes the next one. A transfer reads the last version made before its step. A version is there once
everything it is made from has arrived and every reader of the version before it has left its rank; until
then what arrives waits beside it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from synth.compiled import Ints
from synth.events import Layout, play
from synth.schedule import Schedule

FINEST_TICKS_PER_US = 10**9
"""The clock counts femtoseconds, or ten, a hundred... of them where 62 bits would not hold the time."""


@dataclass(frozen=True)
class Outcome:
    """When each piece passed each hop, in ticks.

    Attributes:
        start: one row per piece, one column per hop.
        duration: how long a hop keeps its link busy with one piece.
        latency: from the end of sending to the arrival, of each hop.
        ticks_per_us: the clock.
    """

    start: Ints
    duration: Ints
    latency: Ints
    ticks_per_us: float

    @property
    def time_us(self) -> float:
        """When the last piece arrived."""
        if not self.start.size:
            return 0.0
        arrival = self.start.max(axis=0) + self.duration + self.latency
        return float(arrival.max()) / self.ticks_per_us


@dataclass(frozen=True)
class Hops:
    """The hops of a schedule, counted through in the order of its transfers.

    Attributes:
        layout: the arrays that do not depend on the size.
        costs_us: the different costs of a hop, microseconds of its link per byte of the whole buffer.
        cost: which of them each hop has.
        latencies_us: latency of each link of the topology.
    """

    layout: Layout
    costs_us: tuple[Fraction, ...]
    cost: Ints
    latencies_us: tuple[Fraction, ...]

    @classmethod
    def of(cls, schedule: Schedule) -> Hops:
        """Lay a schedule out, in time linear in its hops."""
        links = schedule.topology.links
        link_of = {(link.src, link.dst): index for index, link in enumerate(links)}
        pairs = [
            (schedule.chunks[transfer.chunk].share, link_of[hop])
            for transfer in schedule.transfers
            for hop in transfer.hops
        ]
        costs: dict[tuple[Fraction, int], int] = {}
        return cls(
            layout=_layout(schedule, _array(link for _, link in pairs)),
            cost=_array(costs.setdefault(pair, len(costs)) for pair in pairs),
            costs_us=tuple(share / (links[link].bandwidth * 1000) for share, link in costs),
            latencies_us=tuple(link.latency_us for link in links),
        )

    def play(self, size_bytes: int, pieces: int) -> Outcome:
        """Run the schedule for a buffer of `size_bytes`, with every chunk cut into `pieces`."""
        costs_us = [cost * size_bytes / pieces for cost in self.costs_us]
        ticks_per_us = self._ticks_per_us(costs_us, pieces)
        # Rounded up, so that no time falls below what the links allow.
        durations = _array(-(-cost * ticks_per_us // 1) for cost in costs_us)[self.cost]
        latencies = _array(round(latency * ticks_per_us) for latency in self.latencies_us)
        start = play(self.layout, pieces, durations, latencies)
        return Outcome(start, durations, latencies[self.layout.link], float(ticks_per_us))

    def _ticks_per_us(self, costs_us: Sequence[Fraction], pieces: int) -> Fraction:
        """The finest clock whose 62 bits hold every hop of every piece one after the other."""
        hops_per_cost = np.bincount(self.cost, minlength=len(costs_us)).tolist()
        hops_per_link = np.bincount(self.layout.link, minlength=len(self.latencies_us)).tolist()
        sending = sum(hops * cost for hops, cost in zip(hops_per_cost, costs_us, strict=True))
        travelling = sum(hops * wait for hops, wait in zip(hops_per_link, self.latencies_us, strict=True))
        ticks = Fraction(FINEST_TICKS_PER_US)
        while pieces * (sending + travelling) * ticks >= 1 << 62:
            ticks /= 10
        return ticks


def _layout(schedule: Schedule, link: Ints) -> Layout:
    lengths = [len(transfer.via) + 1 for transfer in schedule.transfers]
    reads, writes, inputs, follower = _versions(schedule)
    needed = np.ones(len(follower), dtype=np.int64)  # the version before it, or the start
    np.add.at(needed, writes, 1)
    replaced = follower[reads]
    np.add.at(needed, replaced[replaced >= 0], 1)
    return Layout(
        first_hop=_offsets(lengths),
        link=link,
        transfer=np.repeat(np.arange(len(lengths), dtype=np.int64), lengths),
        step=_array(transfer.step for transfer in schedule.transfers),
        reads=reads,
        writes=writes,
        inputs=inputs,
        follower=follower,
        needed=needed,
        first_reader=_offsets(np.bincount(reads, minlength=len(follower)).tolist()),
        readers=np.argsort(reads, kind="stable").astype(np.int64),
    )


def _versions(schedule: Schedule) -> tuple[Ints, Ints, Ints, Ints]:
    """Number the versions: those that transfers read, those they make, the inputs, each one's follower."""
    deliveries: dict[tuple[int, int], set[int]] = {}  # steps that bring something, by rank and chunk
    for transfer in schedule.transfers:
        deliveries.setdefault((transfer.src, transfer.chunk), set())
        deliveries.setdefault((transfer.dst, transfer.chunk), set()).add(transfer.step)
    steps = {place: sorted(found) for place, found in deliveries.items()}
    inputs: dict[tuple[int, int], int] = {}
    follower: list[int] = []
    for place, found in steps.items():
        inputs[place] = len(follower)
        follower += [len(follower) + later for later in range(1, len(found) + 1)]
        follower.append(-1)

    def last_before(rank: int, chunk: int, step: int) -> int:
        return inputs[rank, chunk] + bisect_left(steps[rank, chunk], step)

    transfers = schedule.transfers
    return (
        _array(last_before(transfer.src, transfer.chunk, transfer.step) for transfer in transfers),
        _array(last_before(transfer.dst, transfer.chunk, transfer.step) + 1 for transfer in transfers),
        _array(inputs.values()),
        _array(follower),
    )


def _array(values: Iterable[int]) -> Ints:
    return np.array(list(values), dtype=np.int64)


def _offsets(lengths: Sequence[int]) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])

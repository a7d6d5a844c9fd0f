"""A schedule as arrays of hops, ready for the event loop, with the clock for a message size.

The simulator lays a schedule out once and plays it for many sizes and piece counts. What a rank holds of
a chunk goes through *versions*: version 0 is the input, and each step in which something is delivered
makes the next one. A transfer reads the last version made before its step. A version is there once
everything it is made from has arrived and every reader of the version before it has left its rank; until
then what arrives waits beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.simulation.events import Lanes, Layout, play
from arborcast.synth.simulation.service import EARLIEST, Service
from arborcast.synth.topology import Topology

if TYPE_CHECKING:
    from arborcast.synth.implicit_schedule import AnySchedule

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

    Links are those of the topology; or orbits of them (`synth.simulation.implicit`), where each hop is one of
    the representatives and stands for all of its images.

    Attributes:
        layout: the arrays that do not depend on the size.
        costs_us: the different costs of a hop, microseconds of its link per byte of the whole buffer.
        cost: which of them each hop has.
        latencies_us: latency of each link.
        together: of each link, how many pieces it serves as one; 1 unless links are orbits.
        senders: the rank that each transfer leaves, and `receivers` that it goes to; or their orbits.
        streams: a number for each transfer, one for those from one rank to one other.
        images: how many hops of the schedule each hop stands for; 1 unless links are orbits.
    """

    layout: Layout
    costs_us: tuple[Fraction, ...]
    cost: Ints
    latencies_us: tuple[Fraction, ...]
    together: Ints
    senders: Ints
    receivers: Ints
    streams: Ints
    images: int = 1

    @classmethod
    def of(cls, schedule: AnySchedule) -> Hops:
        """Lay a schedule out, of an implicit one the representatives, in time linear in its hops."""
        topology = schedule.topology
        links = topology.links
        starts, link = _links_of(schedule)
        lengths = np.diff(starts)
        # Hops of chunks of one share over links of one bandwidth cost the same.
        shares, share = _distinct([chunk.share for chunk in schedule.chunks])
        rates, rate = _distinct([one.bandwidth for one in links])
        chunk = _array([transfer.chunk for transfer in schedule.transfers])
        pairs, cost = np.unique(
            share[np.repeat(chunk, lengths)] * len(rates) + rate[link], return_inverse=True
        )
        return cls(
            layout=_layout(schedule, chunk, starts, link),
            cost=cost.astype(np.int64),
            costs_us=tuple(
                shares[pair // len(rates)] / (rates[pair % len(rates)] * 1000) for pair in pairs.tolist()
            ),
            latencies_us=tuple(one.latency_us for one in links),
            together=np.ones(len(links), dtype=np.int64),
            senders=(senders := _array([transfer.src for transfer in schedule.transfers])),
            receivers=(receivers := _array([transfer.dst for transfer in schedule.transfers])),
            streams=senders * topology.ranks + receivers,
        )

    def play(self, size_bytes: int, pieces: int, service: Service = EARLIEST) -> Outcome:
        """Run the schedule for a buffer of `size_bytes`, with every chunk cut into `pieces`.

        Args:
            size_bytes: of the whole buffer.
            pieces: of every chunk.
            service: which piece a link serves next, and what ranks hold back; of several orders the first.
        """
        costs_us = [cost * size_bytes / pieces for cost in self.costs_us]
        ticks_per_us = self._ticks_per_us(costs_us, pieces)
        # Rounded up, so that no time falls below what the links allow.
        durations = _array([-(-cost * ticks_per_us // 1) for cost in costs_us])[self.cost]
        durations *= self.together[self.layout.link]
        latencies = _array([round(latency * ticks_per_us) for latency in self.latencies_us])
        lanes = self._lanes(pieces, service.ahead)
        start = play(self.layout, lanes, pieces, durations, latencies, int(service.rule), service.seed)
        return Outcome(start, durations, latencies[self.layout.link], float(ticks_per_us))

    def _lanes(self, pieces: int, ahead: int | None) -> Lanes:
        """What is held back where ranks send in the planned order, `ahead` of what comes in."""
        layout = self.layout
        if ahead is None:
            none = np.zeros(0, dtype=np.int64)
            return Lanes(none, none, none, none, none, none, none, np.zeros((0, 0), dtype=np.int64), 0)
        hops, ranks = (
            len(layout.link),
            1 + int(max(self.senders.max(initial=-1), self.receivers.max(initial=-1))),
        )
        stream = np.unique(self.streams, return_inverse=True)[1][layout.transfer]
        begins = np.zeros(hops, dtype=np.bool_)
        begins[layout.first_hop[:-1]] = True
        links, sender = len(self.latencies_us), self.senders[layout.transfer]
        number = (stream * links + layout.link) * 2 + begins
        firsts, lane = np.unique(number, return_index=True, return_inverse=True)[1:]
        senders = np.where(begins[firsts], sender[firsts], -1)
        passing, piece = np.tile(np.arange(hops), pieces), np.repeat(np.arange(pieces), hops)
        times = layout.step[layout.transfer][passing] + piece
        due = np.zeros((ranks, int(layout.step.max(initial=0)) + pieces), dtype=np.int64)
        for one in range(pieces):
            np.add.at(due, (self.receivers, layout.step + one), 1)
        return Lanes(
            lane.astype(np.int64),
            _offsets(np.bincount(lane, minlength=len(firsts)) * pieces),
            np.lexsort((passing, times, lane[passing])).astype(np.int64),
            senders.astype(np.int64),
            _offsets(np.bincount(senders[senders >= 0], minlength=ranks)),
            np.argsort(senders, kind="stable")[np.count_nonzero(senders < 0) :].astype(np.int64),
            self.receivers,
            due,
            ahead,
        )

    def _ticks_per_us(self, costs_us: Sequence[Fraction], pieces: int) -> Fraction:
        """The finest clock whose 62 bits hold every hop of every piece one after the other."""
        hops_per_cost = np.bincount(self.cost, minlength=len(costs_us)).tolist()
        hops_per_link = np.bincount(self.layout.link, minlength=len(self.latencies_us)).tolist()
        sending = sum(hops * cost for hops, cost in zip(hops_per_cost, costs_us, strict=True))
        travelling = sum(hops * wait for hops, wait in zip(hops_per_link, self.latencies_us, strict=True))
        ticks = Fraction(FINEST_TICKS_PER_US)
        while pieces * self.images * (sending + travelling) * ticks >= 1 << 62:
            ticks /= 10
        return ticks


def _links_of(schedule: AnySchedule) -> tuple[Ints, Ints]:
    """The first hop of each transfer (and the number of hops), and the link of each hop."""
    topology, transfers = schedule.topology, schedule.transfers
    lengths = _array([len(transfer.via) + 1 for transfer in transfers])
    starts = _offsets(lengths)
    ways = [(transfer.src, *transfer.via, transfer.dst) for transfer in transfers]
    vertices = np.fromiter(chain.from_iterable(ways), dtype=np.int64, count=int((lengths + 1).sum()))
    # A hop leads from each vertex of a way to the next one: from all but the last.
    tails = np.delete(np.arange(len(vertices)), _offsets(lengths + 1)[1:] - 1)
    return starts, np.searchsorted(
        _keys(topology), vertices[tails] * topology.size + vertices[tails + 1]
    ).astype(np.int64)


def _keys(topology: Topology) -> Ints:
    """A number for each link that grows with its ends, as links are sorted."""
    return _array([link.src * topology.size + link.dst for link in topology.links])


def _layout(schedule: AnySchedule, chunk: Ints, starts: Ints, link: Ints) -> Layout:
    transfers = schedule.transfers
    step = _array([transfer.step for transfer in transfers])
    src = chunk * schedule.topology.ranks + _array([transfer.src for transfer in transfers])
    dst = chunk * schedule.topology.ranks + _array([transfer.dst for transfer in transfers])
    reads, writes, inputs, follower = _versions(src, dst, step)
    needed = np.ones(len(follower), dtype=np.int64)  # the version before it, or the start
    needed += np.bincount(writes, minlength=len(follower))
    replaced = follower[reads]
    needed += np.bincount(replaced[replaced >= 0], minlength=len(follower))
    return Layout(
        first_hop=starts,
        link=link,
        transfer=np.repeat(np.arange(len(transfers), dtype=np.int64), np.diff(starts)),
        step=step,
        reads=reads,
        writes=writes,
        inputs=inputs,
        follower=follower,
        needed=needed,
        first_reader=_offsets(np.bincount(reads, minlength=len(follower))),
        readers=np.argsort(reads, kind="stable").astype(np.int64),
    )


def _versions(src: Ints, dst: Ints, step: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Number the versions: those that transfers read, those they make, the inputs, each one's follower.

    Args:
        src: the place that each transfer reads; a place is a rank and a chunk, as one number.
        dst: the place that it changes.
        step: when.
    """
    place = np.unique(np.concatenate([src, dst]))
    src, dst = np.searchsorted(place, src), np.searchsorted(place, dst)
    times, time = np.unique(step, return_inverse=True)
    # A place and a time in one number: the deliveries of a place follow each other in order of time.
    deliveries = np.unique(dst * len(times) + time)
    first = np.searchsorted(deliveries, np.arange(len(place) + 1) * len(times))
    inputs = first[:-1] + np.arange(len(place))  # a version per delivery, and the input before them
    follower = np.arange(1, len(deliveries) + len(place) + 1)
    follower[inputs[1:] - 1] = -1
    follower[-1:] = -1

    def last_before(at: Ints) -> Ints:
        return inputs[at] + np.searchsorted(deliveries, at * len(times) + time) - first[at]

    reads, writes = last_before(src), last_before(dst) + 1
    return reads.astype(np.int64), writes.astype(np.int64), inputs.astype(np.int64), follower.astype(np.int64)


def _distinct(fractions: Sequence[Fraction]) -> tuple[list[Fraction], Ints]:
    """The different ones among some fractions, and the position of each there."""
    position: dict[tuple[int, int], int] = {}  # fractions themselves take long to hash
    at = _array([position.setdefault(one.as_integer_ratio(), len(position)) for one in fractions])
    return [Fraction(*ratio) for ratio in position], at


def _array(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _offsets(lengths: Ints) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])

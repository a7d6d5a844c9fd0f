"""A schedule as arrays of hops, ready for the event loop, with the clock for a message size.

The simulator lays a schedule out once and plays it for many sizes and piece counts. What a rank (or a switch
that adds or multicasts: a *holder*) holds of a chunk goes through *versions*: version 0 is the input, and
each step in which something is delivered makes the next one. A transfer reads the last version made before
its step. A version is there once everything it is made from has arrived and every reader of the version
before it has left its holder; until then what arrives waits beside it.

What a switch takes for a sum or a multicast is one more hop: its readers read what comes out of a virtual
link from the switch to itself, of the bandwidth of its adder.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction
from functools import cached_property
from operator import mul
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.simulation.critical_paths import least_ticks
from arborcast.synth.simulation.events import EventArrays, Lanes, Streams, play
from arborcast.synth.simulation.service import EARLIEST, Service
from arborcast.synth.simulation.timing import Occupation
from arborcast.synth.topology import Hop, Topology, Vertex

if TYPE_CHECKING:
    from arborcast.synth.implicit_schedule import AnySchedule

FINEST_TICKS_PER_US = 10**9
"""The clock counts femtoseconds, or ten, a hundred... of them where 62 bits would not hold the time."""


_ANY_NUMBER = 1 << 40

Told: TypeAlias = Callable[[int, int, Hop], tuple[Hop, Sequence[int]]]
"""Of a hop, by its index, chunk and link: the link that speaks for it, and the chunks it serves as one."""


class Grain(IntEnum):
    """What of a chunk a holder has to have before it passes on any of it."""

    FRAME = 0
    PIECE = 1
    CHUNK = 2


@dataclass(frozen=True)
class FrameTimes:
    """When each frame passed each hop, in ticks.

    Attributes:
        start: one row per frame, those of a piece after each other; one column per hop.
        duration: how long a hop keeps its link busy with one frame.
        latency: from the end of sending to the arrival, of each hop.
        ticks_per_us: the clock.
        frames: of a piece.
    """

    start: Ints
    duration: Ints
    latency: Ints
    ticks_per_us: float
    frames: int

    @property
    def time_us(self) -> float:
        """When the last frame arrived."""
        if not self.start.size:
            return 0.0
        arrival = self.start.max(axis=0) + self.duration + self.latency
        return float(arrival.max()) / self.ticks_per_us


@dataclass(frozen=True)
class Hops:
    """The hops of a schedule, counted through in the order of its transfers; those in switches come last.

    Links are those of the topology, then two of each able switch: its adder, and what copies pass without.
    Or they are orbits of them (`synth.simulation.implicit_simulator`), where each hop is one of the
    representatives and stands for all of its images.

    Attributes:
        layout: the arrays that do not depend on the size.
        grain: of each version, a `Grain`.
        inside: chunk and switch of each of the last hops, which lie inside switches.
        ranks: number of holders that are no switches, and `holders` of all.
        able: whether some switch adds or multicasts.
        through_switches: whether a hop ends at a switch.
        largest: share of the largest chunk.
        costs_us: the different costs of a hop, microseconds of its link per byte of the whole buffer.
        cost: which of them each hop has.
        latencies_us: latency of each link.
        together: of each link, how many pieces it serves as one; 1 unless links are orbits.
        senders: the holder that each transfer leaves, and `receivers` that it goes to.
        limits: how many messages each holder sends at once, then how many each receives; empty where no rank
            has a limit.
        images: how many hops of the schedule each hop stands for; 1 unless links are orbits.
    """

    layout: EventArrays
    grain: Ints
    inside: tuple[tuple[int, Vertex], ...]
    ranks: int
    holders: int
    able: bool
    through_switches: bool
    largest: Fraction
    costs_us: tuple[Fraction, ...]
    cost: Ints
    latencies_us: tuple[Fraction, ...]
    together: Ints
    senders: Ints
    receivers: Ints
    limits: Ints
    images: int = 1

    @classmethod
    def of(cls, schedule: AnySchedule) -> Hops:
        """Lay a schedule out, of an implicit one the representatives, in time linear in its hops."""
        topology, moves = schedule.topology, schedule.columns
        able = topology.switches[: topology.holders - topology.ranks]
        layout, grain, inside = _layout(schedule)
        within, switches = (_array([hop[place] for hop in inside]) for place in (0, 1))
        chunk = np.append(moves.chunk, within)
        senders, receivers = (np.append(ends, switches) for ends in (moves.src, moves.dst))
        # What a byte takes on each link; copies pass a switch at once. What came over one of parallel links
        # leaves the vertex that stands for it at once, as the way in and the way out are one link.
        paces = [
            Fraction(0) if one.src in topology.parallels else 1 / one.bandwidth for one in topology.links
        ]
        paces += [pace for one in able for pace in (1 / one.adder if one.adder else Fraction(0), Fraction(0))]
        # Hops of chunks of one share over links of one bandwidth cost the same.
        shares, share = _distinct([one.share for one in schedule.chunks])
        distinct, pace = _distinct(paces)
        pairs, cost = np.unique(
            share[chunk[layout.transfer]] * len(distinct) + pace[layout.link], return_inverse=True
        )
        return cls(
            layout=layout,
            grain=grain,
            inside=inside,
            ranks=topology.ranks,
            holders=topology.holders,
            able=bool(able),
            through_switches=bool((np.diff(moves.paths[0]) > 2).any() or (moves.dst >= topology.ranks).any()),
            largest=max(shares, default=Fraction(0)),
            cost=cost.astype(np.int64),
            costs_us=tuple(
                shares[pair // len(distinct)] * distinct[pair % len(distinct)] / 1000
                for pair in pairs.tolist()
            ),
            latencies_us=(
                *(one.latency_us for one in topology.links),
                *(one.latency_us for one in able for _ in range(2)),
            ),
            together=np.ones(len(paces), dtype=np.int64),
            senders=senders,
            receivers=receivers,
            limits=_limits(topology),
        )

    @property
    def run_like_their_images(self) -> bool:
        """Whether these hops take as long as all for which they stand, each on its own link.

        So it is where no two images of a hop share a link, no transfer passes two links of an orbit, and
        switches only pass on what is sent.
        """
        if max(self.senders.max(initial=0), self.receivers.max(initial=0)) >= self.ranks:
            return False
        links = self.layout.link
        passed = np.unique(np.column_stack((self.layout.transfer, links)), axis=0)
        return len(passed) == len(links) and bool((self.together[links] == 1).all())

    def passages(self, schedule: AnySchedule) -> Iterator[tuple[int, Hop]]:
        """The chunk of each hop, and where it passes: a link, or a switch as (switch, switch)."""
        for transfer in schedule.transfers:
            for hop in transfer.hops:
                yield transfer.chunk, hop
        for chunk, switch in self.inside:
            yield chunk, (switch, switch)

    def occupations(
        self, schedule: AnySchedule, outcome: FrameTimes, told: Told | None = None
    ) -> dict[Hop, tuple[Occupation, ...]]:
        """What passes each link and when, in order of time; links that nothing passes are left out.

        Args:
            schedule: whose hops these are.
            outcome: of their run.
            told: see `Told`; None where each hop has its own link for its own chunk.
        """
        found: dict[Hop, list[Occupation]] = defaultdict(list)
        clock, frames = outcome.ticks_per_us, outcome.frames
        durations, columns = outcome.duration.tolist(), outcome.start.T.tolist()
        for index, (chunk, hop) in enumerate(self.passages(schedule)):
            if not durations[index]:  # copies pass a switch at once
                continue
            link, chunks = (hop, [chunk]) if told is None else told(index, chunk, hop)
            each = durations[index] // len(chunks)
            found[link] += [
                Occupation(
                    (start + each * place) / clock, (start + each * (place + 1)) / clock, one, frame // frames
                )
                for frame, start in enumerate(columns[index])
                for place, one in enumerate(chunks)
            ]
        return {
            link: tuple(sorted(passing, key=lambda occupation: occupation.start_us))
            for link, passing in found.items()
        }

    def play(
        self, size_bytes: int, pieces: int, service: Service = EARLIEST, *, frames: int = 1
    ) -> FrameTimes:
        """Run the schedule for a buffer of `size_bytes`, with every chunk cut into `pieces`.

        Args:
            size_bytes: of the whole buffer.
            pieces: of every chunk.
            service: which piece a link serves next, and what ranks hold back; of several orders the first.
            frames: of every piece: switches pass on each of them, ranks wait for all.
        """
        durations, latencies, ticks_per_us = self._ticks(size_bytes, pieces * frames)
        grain = np.array([1, frames, pieces * frames])[self.grain]
        lanes = self._lanes(pieces, frames, service.ahead)
        start = play(
            self.layout,
            lanes,
            self._streams,
            pieces,
            frames,
            grain,
            durations,
            latencies,
            int(service.rule),
            service.seed,
        )
        return FrameTimes(start, durations, latencies[self.layout.link], ticks_per_us, frames)

    def least_us(self, size_bytes: int, frames: int) -> float:
        """What `play` takes at least with so many frames of each chunk or fewer, whatever is served next."""
        durations, latencies, ticks_per_us = self._ticks(size_bytes, frames, down=True)
        return least_ticks(self.layout, durations, latencies, frames) / ticks_per_us

    def _ticks(self, size_bytes: int, frames: int, *, down: bool = False) -> tuple[Ints, Ints, float]:
        """What each hop takes for one of the frames of a chunk, each link's latency, and the clock.

        Rounded up, so that no time falls below what the links allow; or `down`, for a limit of the time.
        """
        costs_us = [cost * size_bytes / frames for cost in self.costs_us]
        ticks_per_us = self._ticks_per_us(size_bytes, frames)
        sign = 1 if down else -1
        durations = _array([sign * (sign * cost * ticks_per_us // 1) for cost in costs_us])[self.cost]
        durations *= self.together[self.layout.link]
        different, latency = self._latencies
        whole = math.floor if down else round
        latencies = _array([whole(each * ticks_per_us) for each in different])[latency]
        return durations, latencies, float(ticks_per_us)

    def _lanes(self, pieces: int, frames: int, ahead: int | None) -> Lanes:
        """What is held back where ranks send in the planned order, `ahead` of what comes in."""
        layout, hops = self.layout, len(self.layout.link)
        if ahead is None or not hops:
            none = np.zeros(0, dtype=np.int64)
            return Lanes(none, none, none, none, none, none, none, np.zeros((0, 0), dtype=np.int64), 0)
        begins = np.zeros(hops, dtype=np.bool_)
        begins[layout.first_hop[:-1]] = True
        sender, receiver = self.senders[layout.transfer], self.receivers[layout.transfer]
        number = np.ravel_multi_index(
            (sender, receiver, layout.link), (self.holders, self.holders, len(self.latencies_us))
        )
        firsts, lane = np.unique(number, return_index=True, return_inverse=True)[1:]
        # Only ranks keep a pace; a switch passes on what comes.
        senders = np.where(begins[firsts] & (sender[firsts] < self.ranks), sender[firsts], -1)
        paced = np.flatnonzero(senders >= 0)  # sender by sender, as lanes are
        rows = np.arange(pieces * frames)
        passing, frame = np.tile(np.arange(hops), len(rows)), np.repeat(rows, hops)
        times = layout.step[layout.transfer][passing] + frame // frames
        due = np.zeros((self.holders, int(layout.step.max()) + pieces), dtype=np.int64)
        for one in range(pieces):
            np.add.at(due, (self.receivers, layout.step + one), frames)
        return Lanes(
            lane.astype(np.int64),
            _offsets(np.bincount(lane) * len(rows)),
            np.lexsort((frame, passing, times, lane[passing])).astype(np.int64),
            senders.astype(np.int64),
            _offsets(np.bincount(senders[paced], minlength=self.holders)),
            paced.astype(np.int64),
            self.receivers,
            due,
            ahead,
        )

    def _ticks_per_us(self, size_bytes: int, frames: int) -> Fraction:
        """The finest clock whose 62 bits hold every hop of every frame one after the other."""
        sending, travelling = self._in_turn_us
        ticks = Fraction(FINEST_TICKS_PER_US)
        while self.images * (sending * size_bytes + frames * travelling) * ticks >= 1 << 62:
            ticks /= 10
        return ticks

    @cached_property
    def _streams(self) -> Streams:
        """Whom they hold back; nobody, where no rank has a limit."""
        ends, pair = np.unique(
            np.column_stack((self.senders, self.receivers + self.holders)), axis=0, return_inverse=True
        )
        places = np.bincount(ends.ravel(), minlength=2 * self.holders)
        by_place = np.argsort(ends.ravel(), kind="stable") // 2
        return Streams(self.limits, ends, pair.ravel(), _offsets(places), by_place)

    @cached_property
    def _in_turn_us(self) -> tuple[Fraction, Fraction]:
        """What all hops take one after the other: of links per byte of the whole buffer, of latencies."""
        different, latency = self._latencies
        per_cost, per_latency = np.bincount(self.cost), np.bincount(latency[self.layout.link])
        return (
            sum(map(mul, per_cost.tolist(), self.costs_us), Fraction()),
            sum(map(mul, per_latency.tolist(), different), Fraction()),
        )

    @cached_property
    def _latencies(self) -> tuple[list[Fraction], Ints]:
        """The different ones, and which of them each link has."""
        return _distinct(self.latencies_us)


def _limits(topology: Topology) -> Ints:
    """Of `Hops`: of who has none, more than there are messages."""
    counts = [*topology.streams, *[None] * (topology.holders - topology.ranks)] if topology.streams else []
    return _array([_ANY_NUMBER if count is None else count for count in counts] * 2)


def occupied(topology: Topology) -> dict[Hop, Fraction]:
    """GB/s of all that what passes keeps busy: links, and as (switch, switch) the adders of switches."""
    able = enumerate(topology.switches, topology.ranks)
    return topology.bandwidth | {(vertex, vertex): one.adder for vertex, one in able if one.adder}


def _links_of(schedule: AnySchedule) -> tuple[Ints, Ints]:
    """The first hop of each transfer (and the number of hops), and the link of each hop."""
    firsts, hops = schedule.columns.hops_in(schedule.topology.size)
    return firsts, np.searchsorted(_keys(schedule.topology), hops).astype(np.int64)


def _keys(topology: Topology) -> Ints:
    """A number for each link that grows with its ends, as links are sorted."""
    return _array([link.src * topology.size + link.dst for link in topology.links])


def _layout(schedule: AnySchedule) -> tuple[EventArrays, Ints, tuple[tuple[int, Vertex], ...]]:
    """The arrays with the hops inside switches, the grain of each version, chunk and switch of those hops."""
    moves, topology = schedule.columns, schedule.topology
    starts, link = _links_of(schedule)
    step = moves.step
    src, dst = (moves.chunk * topology.holders + ends for ends in (moves.src, moves.dst))
    reads, writes, inputs, follower = _versions(src, dst, step)
    versions = len(follower)
    grain, inside = np.full(versions, Grain.PIECE, dtype=np.int64), []
    if topology.holders > topology.ranks:
        places = np.unique(np.concatenate([src, dst]))
        grain, read, through = _inside_switches(schedule, places, reads, writes, inputs)
        inside = [divmod(place, topology.holders) for place in places[_place(inputs, read)].tolist()]
        # A transfer of one hop for each: from what came in to what those get that read it until now.
        made = versions + np.arange(len(read))
        soonest = np.full(versions, np.iinfo(np.int64).max)
        np.minimum.at(soonest, reads, step)
        out = np.arange(versions)
        out[read] = made
        reads, writes, follower, step, link, grain = map(
            np.append,
            (out[reads], writes, follower, step, link, grain),
            (read, made, np.full(len(read), -1), soonest[read], through, np.full(len(read), Grain.FRAME)),
        )
        starts = np.append(starts, starts[-1] + 1 + np.arange(len(read)))
    needed = np.ones(len(follower), dtype=np.int64)  # the version before it, or the start
    needed[versions:] = 0
    needed += np.bincount(writes, minlength=len(follower))
    replaced = follower[reads]
    needed += np.bincount(replaced[replaced != -1], minlength=len(follower))
    return (
        EventArrays(
            first_hop=starts,
            link=link,
            transfer=np.repeat(np.arange(len(step), dtype=np.int64), np.diff(starts)),
            step=step,
            reads=reads,
            writes=writes,
            inputs=inputs,
            follower=follower,
            needed=needed,
            first_reader=_offsets(np.bincount(reads, minlength=len(follower))),
            readers=np.argsort(reads, kind="stable").astype(np.int64),
        ),
        grain,
        tuple(inside),
    )


def _inside_switches(
    schedule: AnySchedule, places: Ints, reads: Ints, writes: Ints, inputs: Ints
) -> tuple[Ints, Ints, Ints]:
    """The grain of each version, the versions that take time inside a switch, and the links for that."""
    topology, versions = schedule.topology, np.arange(len(inputs) + len(np.unique(writes)))
    place = _place(inputs, versions)
    switch = (places % topology.holders - topology.ranks)[place]  # negative at ranks
    arriving, reading = (np.bincount(ends, minlength=len(versions)) for ends in (writes, reads))
    # A sum has two inputs at least, counted from the last copy, which replaced what was there.
    fresh = np.isin(versions, inputs)
    fresh[writes[~schedule.columns.reduce]] = True
    total = np.cumsum(arriving)
    inputs_since = total - (total - arriving)[np.maximum.accumulate(np.where(fresh, versions, 0))]
    is_sum = (switch >= 0) & (inputs_since > 1) & (reading > 0)
    works = is_sum | (switch >= 0) & (reading > 1)
    stores, waits, adds = (
        np.array([bool(getattr(one, what)) for one in topology.switches])[np.maximum(switch, 0)] & working
        for what, working in (("stores", works), ("latency_us", works), ("adder", is_sum))
    )
    stored = np.isin(place, place[stores])
    grain = np.where(switch < 0, Grain.PIECE, np.where(stored, Grain.CHUNK, Grain.FRAME))
    read = np.flatnonzero(waits | adds)
    return grain, read, len(topology.links) + 2 * switch[read] + ~adds[read]


def _place(inputs: Ints, versions: Ints) -> Ints:
    """The number of the place of each version."""
    return np.searchsorted(inputs, versions, side="right") - 1


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

"""How long a schedule takes: an event-driven simulation of every piece on every link.

Every chunk is cut into the same number of pieces, and ranks store and forward: a piece moves on once the
whole of it has arrived. A link carries one piece at a time at its bandwidth; its latency is added to each
piece and does not keep the link busy. Which of the pieces that wait for a link comes next is the order of
service (`synth.simulation.service`), and times rest on it: unless another one is asked for, that of step +
piece, then of the transfers. A transfer sends a piece as soon as all transfers of its chunk into the sender
with an earlier step have delivered theirs; what a later step delivers does not replace what an earlier step
has yet to send. Reducing takes ranks no time, and messages none but where the topology says what they cost
(`Topology.message_us`): there no run is shorter than the work of the end that has the most of them. Steps do
not synchronise, not even where the schedule has rounds.

Where ranks have streams (`Topology.streams`), a message (a piece of a transfer) takes one of its sender and
one of its receiver before its first link carries any of it, both at once, and gives them back when its last
link has carried all of it. Of the messages that wait, the first in the order of service begins for which both
ends have one left; one that waits for its other end keeps nothing. So what is slow further on, at a link that
many share, holds up whoever sends over it.

Switches that only forward do as ranks do, unless some switch of the fabric is able, or ranks have streams, or
a size of frames is given. Then pieces travel as frames, of which a link carries one at a time, those of a
piece after each other, and switches cut through: each frame goes on when it is there; one of a sum when that
frame is there from all inputs, after the adder (one passage per frame, however many inputs) and the
latency of the switch. Its output is therefore as fast as the slowest of inputs, adder and output, and one
frame behind them. A switch that waits for several frames before it begins is one of larger frames. One that
stores (`Switch.stores`) has all of a chunk from all inputs before it begins to add or multicast it, as the
aggregation protocol of SHArP is described (Bloch et al., US 2017/0063613: the whole message is stored before
it is reduced); the message is the chunk, since each chunk has a tree of its own. What comes out leaves it
frame by frame.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

from arborcast.synth.collective import bandwidths
from arborcast.synth.deadline import running
from arborcast.synth.errors import InputError
from arborcast.synth.features import check_features
from arborcast.synth.formats.sizes import LARGEST_SIZE, format_size
from arborcast.synth.schedule import Schedule
from arborcast.synth.simulation.pieces import SEVERAL_HOSTS, PieceRule, most_messages
from arborcast.synth.simulation.prices import at_prices
from arborcast.synth.simulation.service import EARLIEST, Rule, Service
from arborcast.synth.simulation.timing import Occupation, Timing
from arborcast.synth.solve_options import MIN_PIECE_BYTES
from arborcast.synth.topology import Hop

if TYPE_CHECKING:
    from arborcast.synth.implicit_schedule import AnySchedule
    from arborcast.synth.simulation.hops import Hops

MAX_PIECES = 256

MAX_PASSAGES = 1 << 20
"""Passages of a piece over a link in one run, so that a large schedule takes a second, not a minute."""


FRAME_BYTES = 4096
"""What a switch waits for: the largest packet of InfiniBand; Ethernet's jumbo frames have 9,000 bytes."""

MAX_FRAMES = 1024
"""Of a chunk: more would make a time that is off by less than a thousandth per switch on the way."""

HELD_FRAMES = 16
"""Of a piece at least, where ranks have streams and pass switches: a message holds its streams until its
last frame has passed its last link. Few pieces of many frames are as real messages are; of 8 GPUs in two
islands an exchange of 64 MiB takes 3.7 ms in 16 pieces of 16 frames, and 5.3 in 256 of one."""


def simulate(
    schedule: AnySchedule,
    size_bytes: int,
    *,
    pieces: int | None = None,
    min_piece_bytes: int = MIN_PIECE_BYTES,
    max_pieces: int = MAX_PIECES,
    service: str | Service = EARLIEST,
    frame_bytes: int | None = None,
    priced: bool = False,
) -> Timing:
    """The time of one run with a buffer of `size_bytes`.

    Args:
        schedule: what to run, in either form; it is not verified here. One in implicit form is run by its
            representatives (`synth.simulation.implicit_simulator` says how exactly).
        size_bytes: size of the whole buffer, as algbw counts it; shares need not divide it.
        pieces: into how many pieces to cut every chunk; None for the largest power of two within the limits
            below and within `MAX_PASSAGES`; fewer, which were faster for no candidate of four machines,
            are not tried. On a topology that says what a message costs it cuts as the engine does
            (`synth.simulation.pieces`).
        min_piece_bytes: the choice cuts no chunk of average size into smaller pieces.
        max_pieces: the choice cuts no chunk into more.
        service: the order of service (`synth.simulation.service.FORMS`): `priority`; `fifo`; `random:SEED`;
            `worst:N`, the slowest of `random:0` to `random:N-1`; or `engine`, what the process group does,
            and `engine-worst:N`, where the orders in which it leaves a link are random.
        frame_bytes: what switches have of each input before they pass it on; larger where a chunk would have
            more than `MAX_FRAMES`, or all together more than `MAX_PASSAGES` passages. None for `FRAME_BYTES`
            where a switch is able or ranks have streams, and for whole pieces elsewhere.
        priced: on links as they are measured, with what a call costs (`synth.simulation.prices`), where
            anything is known of the topology's.

    Raises:
        InputError: a size, a limit or a number of pieces that is not positive; no order of service, or one
            that the implicit form, or a switch that stores, does not have.

    Examples:
        >>> ring = synth.solve(topologies.load("ring:4"), "allgather", method="ring")
        >>> synth.simulate(ring, 4000).time_us  # 3 steps of 1,000 bytes at 1 GB/s
        3.0
    """
    return sweep(
        schedule,
        [size_bytes],
        pieces=pieces,
        min_piece_bytes=min_piece_bytes,
        max_pieces=max_pieces,
        service=service,
        frame_bytes=frame_bytes,
        priced=priced,
    )[0]


def sweep(
    schedule: AnySchedule,
    sizes: Iterable[int],
    *,
    pieces: int | None = None,
    min_piece_bytes: int = MIN_PIECE_BYTES,
    max_pieces: int = MAX_PIECES,
    service: str | Service = EARLIEST,
    frame_bytes: int | None = None,
    priced: bool = False,
) -> tuple[Timing, ...]:
    """`simulate` for several sizes, in their order."""
    asked = _service_for(schedule, service)
    check_positive("min_piece_bytes", min_piece_bytes)
    check_positive("max_pieces", max_pieces)
    if frame_bytes is not None:
        check_positive("frame_bytes", frame_bytes)
    if pieces is not None:
        check_positive("pieces", pieces)
    schedule, call_us = at_prices(schedule) if priced else (schedule, 0.0)
    runs = Runs(schedule, min_piece_bytes, max_pieces, frame_bytes, call_us)
    timings = []
    for size in sizes:
        check_size(size)
        if pieces is None and asked == EARLIEST:
            timings.append(_timing(schedule, size, *runs.choice(size), asked))
        else:
            count = pieces or runs.most_pieces(size)
            timings.append(_timing(schedule, size, count, *runs.slowest(size, count, asked)))
    return tuple(timings)


@dataclass(frozen=True)
class Runs:
    """A schedule that is laid out once and run at several sizes.

    Attributes:
        schedule: what to run.
        min_piece_bytes, max_pieces, frame_bytes: as of `simulate`.
        call_us: what a call costs beside.
        rule: cuts in place of these limits; an engine's own where messages cost something.
        max_frames: of a chunk.
    """

    schedule: AnySchedule
    min_piece_bytes: int = MIN_PIECE_BYTES
    max_pieces: int = MAX_PIECES
    frame_bytes: int | None = None
    call_us: float = 0.0
    rule: PieceRule | None = None
    max_frames: int = MAX_FRAMES

    @classmethod
    def priced(cls, schedule: AnySchedule, **limits: Any) -> Runs:
        """On links as they are measured, where they are; `limits` are attributes."""
        on_these, call_us = at_prices(schedule)
        return cls(on_these, call_us=call_us, **limits)

    def most_pieces(self, size: int) -> int:
        """The most pieces that chunks are cut into of its own accord; no fewer for larger buffers."""
        rule = self.rule or (SEVERAL_HOSTS if self.schedule.topology.message_us else None)
        if rule is not None:
            return min(rule.pieces(self.schedule, size), self._affordable)
        return self.most_free_pieces(size)

    def most_free_pieces(self, size: int) -> int:
        """The largest power of two within the limits of size and work, whatever messages cost."""
        fitting = int(self._mean_share * size / self.min_piece_bytes)
        allowed = min(self.max_pieces, fitting, self._affordable)
        return 1 << max(0, allowed.bit_length() - 1)

    def choice(self, size: int) -> tuple[int, float]:
        """The number of pieces, as `simulate` says, and the time in microseconds."""
        pieces = self.most_pieces(size)
        return pieces, self._time_us(size, pieces)

    def least_us(self, size: int) -> float:
        """What the choice takes at least, without a run; a little less for what is rounded from ticks."""
        pieces = self.most_pieces(size)
        least_us = self.hops.least_us(size, pieces * self._frames(size, pieces))
        return (1 - 1e-9) * max(least_us, pieces * self.work_us) + self.call_us

    def slowest(self, size: int, pieces: int, service: Service) -> tuple[float, Service]:
        """The longest time of all orders of a service, microseconds, with the first order that takes it."""
        orders = [service.one(service.seed + number) for number in range(service.orders)]
        times = [self._time_us(size, pieces, order) for order in orders]
        slowest = max(range(len(orders)), key=times.__getitem__)
        return times[slowest], orders[slowest]

    def _time_us(self, size: int, pieces: int, service: Service = EARLIEST) -> float:
        running().check("a simulation")
        hops = self.hops if service == EARLIEST else self._every_hop
        played = hops.play(size, pieces, service, frames=self._frames(size, pieces))
        return max(played.time_us, pieces * self.work_us) + self.call_us

    def _frames(self, size: int, pieces: int) -> int:
        limits = self.frame_bytes, self._images, self.max_frames
        return frames_per_piece(self.hops, size, pieces, *limits)

    @cached_property
    def _every_hop(self) -> Hops:
        return lay_out(self.schedule)

    @cached_property
    def hops(self) -> Hops:
        """Of a schedule that was expanded its representatives' alone, where their run takes as long."""
        origin = self.schedule.expanded_from if isinstance(self.schedule, Schedule) else None
        if origin is not None and self.frame_bytes is None:
            hops = lay_out(origin)
            if hops.run_like_their_images:
                return hops
        return self._every_hop

    @property
    def effort(self) -> int:
        """Passages that are played for a piece."""
        return self.hops.layout.link.size

    @cached_property
    def _affordable(self) -> int:
        """Pieces of which a run of the schedule in its form takes a second, with frames that hold streams."""
        passages = _most_passages(self.hops) // max(1, self.effort * self._images)
        if self.hops.limits.size and self.hops.through_switches:
            passages = min(passages, self.max_frames) // HELD_FRAMES
        return max(1, passages)

    @property
    def _images(self) -> int:
        """Passages of the schedule in its form for each of `hops`."""
        return self.hops.images if isinstance(self.schedule, Schedule) else 1

    @cached_property
    def _mean_share(self) -> Fraction:
        """The share of a chunk of average size."""
        counts = Counter(chunk.share.as_integer_ratio() for chunk in self.schedule.chunks)
        total = sum((count * Fraction(*ratio) for ratio, count in counts.items()), Fraction(0))
        return total / max(1, len(self.schedule.chunks))

    @cached_property
    def work_us(self) -> float:
        """What messages of one piece of each chunk keep the end at work that has the most of them."""
        each_us = self.schedule.topology.message_us
        return float(most_messages(self.schedule) * each_us) if each_us else 0.0


def timeline(
    schedule: AnySchedule,
    size_bytes: int,
    *,
    pieces: int | None = None,
    service: str | Service = EARLIEST,
    frame_bytes: int | None = None,
    own_links: bool = False,
) -> dict[Hop, tuple[Occupation, ...]]:
    """What passes each link of the topology and when, in order of time; an unused link has an empty tuple.

    The adder of a switch is listed as (switch, switch). Where pieces travel as frames, each frame is listed.

    Args:
        schedule: what to run. Of one in implicit form the first link of each orbit speaks for the others.
        size_bytes: size of the whole buffer.
        own_links: in implicit form, each representative on its own links instead, and only those.
        pieces: as in `simulate`, chosen within its default limits where None.
        service: as in `simulate`, a single order.
        frame_bytes: as in `simulate`.

    Raises:
        InputError: as `simulate`, or several orders.
    """
    asked = _service_for(schedule, service)
    if asked.orders > 1:
        raise InputError(f"service {asked}: a timeline shows one order, such as random:0")
    if pieces is None:
        pieces = simulate(schedule, size_bytes, frame_bytes=frame_bytes).pieces
    check_size(size_bytes)
    check_positive("pieces", pieces)
    hops = lay_out(schedule)
    frames = frames_per_piece(hops, size_bytes, pieces, frame_bytes)
    outcome = hops.play(size_bytes, pieces, asked, frames=frames)
    if isinstance(schedule, Schedule):
        from arborcast.synth.simulation.hops import occupied

        links, told = list(occupied(schedule.topology)), None
    elif own_links:
        return hops.occupations(schedule, outcome)
    else:
        from arborcast.synth.simulation.implicit_simulator import told_by_orbits

        links, told = told_by_orbits(schedule, hops)
    found = hops.occupations(schedule, outcome, told)
    return {link: found.get(link, ()) for link in links}


def lay_out(schedule: AnySchedule) -> Hops:
    """The hops of a schedule in either form; those of an implicit one pass orbits of links.

    Imported here because it brings numba, which a command that only draws or verifies does without.
    """
    check_features(schedule.topology, "simulator")
    if isinstance(schedule, Schedule):
        from arborcast.synth.simulation.hops import Hops

        return Hops.of(schedule)
    from arborcast.synth.simulation.implicit_simulator import lay_out_orbits

    return lay_out_orbits(schedule)


def frames_per_piece(
    hops: Hops,
    size: int,
    pieces: int,
    frame_bytes: int | None = None,
    images: int = 1,
    max_frames: int = MAX_FRAMES,
) -> int:
    """Into how many frames each piece is cut; 1 where no switch passes on less than a piece.

    Where hops stand for a schedule that is written out, as many as its own `images` have.
    """
    if not hops.through_switches or (frame_bytes is None and not hops.able and not hops.limits.size):
        return 1
    wanted = -(-hops.largest * size // (pieces * (frame_bytes or FRAME_BYTES)))
    affordable = _most_passages(hops) // (pieces * hops.layout.link.size * images)
    allowed = max(max_frames // pieces, HELD_FRAMES if hops.limits.size else 0)
    return max(1, min(int(wanted), allowed, affordable))


def _most_passages(hops: Hops) -> int:
    """Those of a second or so: where messages wait for streams each takes four times as long."""
    return MAX_PASSAGES // (4 if hops.limits.size else 1)


def _service_for(schedule: AnySchedule, asked: str | Service) -> Service:
    service = Service.of(asked)
    if not isinstance(schedule, Schedule) and (service.rule is Rule.RANDOM or service.ahead is not None):
        raise InputError(
            f"service {service}: the implicit form is simulated with priority or fifo, in which the links of "
            "an orbit do the same; synth expand writes all of them out"
        )
    if schedule.topology.streams and service.ahead is not None:
        raise InputError(f"service {service}: the engine keeps to no streams; priority, fifo or random")
    for switch in schedule.topology.switches:
        if switch.stores and service.ahead is not None:
            raise InputError(
                f"service {service}: a rank that waits for what comes back never fills switch {switch.name}, "
                "which stores whole chunks; priority, fifo or random"
            )
    return service


def _timing(schedule: AnySchedule, size: int, pieces: int, time_us: float, service: Service) -> Timing:
    collective = schedule.collective
    rates = bandwidths(collective.kind, len(collective.ranks), size, time_us)
    return Timing(size, pieces, time_us, *rates, str(service))


def check_size(size: int) -> None:
    """Raise InputError unless a buffer may be so large."""
    if not 1 <= size <= LARGEST_SIZE:
        raise InputError(f"size {size}: must be from 1 byte to {format_size(LARGEST_SIZE)}")


def check_positive(name: str, value: int) -> None:
    """Raise InputError unless a number, named in the message, is at least 1."""
    if value < 1:
        raise InputError(f"{name} {value}: must be at least 1")

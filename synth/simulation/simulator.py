"""How long a schedule takes: an event-driven simulation of every piece on every link.

Store and forward: every chunk is cut into the same number of pieces, and a piece moves on once the whole
of it has arrived, at a rank as well as at a switch. A link carries one piece at a time at its bandwidth;
its latency is added to each piece and does not keep the link busy. Which of the pieces that wait for a link
comes next is the order of service (`synth.simulation.service`), and times rest on it: unless another one is
asked for, that of step + piece, then of the transfers. A transfer sends a piece as soon as all transfers of
its chunk into the sender with an earlier step have delivered theirs; what a later step delivers does not
replace what an earlier step has yet to send. Reducing takes no time. Steps do not synchronise, not even where
the schedule has rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from typing import TYPE_CHECKING

from arborcast.synth.collective import bandwidths
from arborcast.synth.errors import InputError
from arborcast.synth.formats.sizes import LARGEST_SIZE, format_size
from arborcast.synth.schedule import Schedule
from arborcast.synth.simulation.service import EARLIEST, Rule, Service
from arborcast.synth.simulation.timing import Occupation, Timing
from arborcast.synth.topology import Hop

if TYPE_CHECKING:
    from arborcast.synth.implicit_schedule import AnySchedule
    from arborcast.synth.simulation.hops import Hops

MIN_PIECE_BYTES = 32 << 10
"""Smaller pieces gain nothing on real links, where each one costs a message."""

MAX_PIECES = 256

MAX_PASSAGES = 1 << 20
"""Passages of a piece over a link in one run, so that a large schedule takes a second, not a minute."""


def simulate(
    schedule: AnySchedule,
    size_bytes: int,
    *,
    pieces: int | None = None,
    min_piece_bytes: int = MIN_PIECE_BYTES,
    max_pieces: int = MAX_PIECES,
    service: str | Service = EARLIEST,
) -> Timing:
    """The time of one run with a buffer of `size_bytes`.

    Args:
        schedule: what to run, in either form; it is not verified here. One in implicit form is run by its
            representatives (`synth.simulation.implicit` says how exactly).
        size_bytes: size of the whole buffer, as algbw counts it; shares need not divide it.
        pieces: into how many pieces to cut every chunk; None chooses: the largest power of two within the
            limits below and within `MAX_PASSAGES`, halved as long as that makes it faster with `priority`.
        min_piece_bytes: the choice cuts no chunk of average size into smaller pieces.
        max_pieces: the choice cuts no chunk into more.
        service: the order of service (`synth.simulation.service.FORMS`): `priority`; `fifo`; `random:SEED`;
            `worst:N`, the slowest of `random:0` to `random:N-1`; or `engine`, what the process group does,
            and `engine-worst:N`, where the orders in which it leaves a link are random.

    Raises:
        InputError: a size, a limit or a number of pieces that is not positive; no order of service, or one
            that the implicit form does not have.
    """
    return sweep(
        schedule,
        [size_bytes],
        pieces=pieces,
        min_piece_bytes=min_piece_bytes,
        max_pieces=max_pieces,
        service=service,
    )[0]


def sweep(
    schedule: AnySchedule,
    sizes: Iterable[int],
    *,
    pieces: int | None = None,
    min_piece_bytes: int = MIN_PIECE_BYTES,
    max_pieces: int = MAX_PIECES,
    service: str | Service = EARLIEST,
) -> tuple[Timing, ...]:
    """`simulate` for several sizes, in their order."""
    asked = _service_for(schedule, service)
    hops = lay_out(schedule)
    check_positive("min_piece_bytes", min_piece_bytes)
    check_positive("max_pieces", max_pieces)
    share = _mean_share(schedule)
    timings = []
    for size in sizes:
        check_size(size)
        if pieces is None:
            most = _most_pieces(hops, int(share * size / min_piece_bytes), max_pieces)
            count, time_us = _descend(hops, size, most)
            if asked == EARLIEST:
                timings.append(_timing(schedule, size, count, time_us, asked))
                continue
        else:
            check_positive("pieces", pieces)
            count = pieces
        timings.append(_timing(schedule, size, count, *_slowest(hops, size, count, asked)))
    return tuple(timings)


def timeline(
    schedule: AnySchedule,
    size_bytes: int,
    *,
    pieces: int | None = None,
    service: str | Service = EARLIEST,
) -> dict[Hop, tuple[Occupation, ...]]:
    """What passes each link of the topology and when, in order of time; an unused link has an empty tuple.

    Args:
        schedule: what to run. Of one in implicit form the first link of each orbit speaks for the others.
        size_bytes: size of the whole buffer.
        pieces: as in `simulate`, chosen within its default limits where None.
        service: as in `simulate`, a single order.

    Raises:
        InputError: as `simulate`, or several orders.
    """
    asked = _service_for(schedule, service)
    if asked.orders > 1:
        raise InputError(f"service {asked}: a timeline shows one order, such as random:0")
    if pieces is None:
        pieces = simulate(schedule, size_bytes).pieces
    check_size(size_bytes)
    check_positive("pieces", pieces)
    hops = lay_out(schedule)
    if not isinstance(schedule, Schedule):
        from arborcast.synth.simulation.implicit import orbit_timeline

        return orbit_timeline(schedule, hops.play(size_bytes, pieces, asked), hops)
    outcome = hops.play(size_bytes, pieces, asked)
    clock = outcome.ticks_per_us
    found: dict[Hop, list[Occupation]] = {(link.src, link.dst): [] for link in schedule.topology.links}
    passages = [(transfer.chunk, hop) for transfer in schedule.transfers for hop in transfer.hops]
    for (chunk, hop), starts, duration in zip(
        passages, outcome.start.T.tolist(), outcome.duration.tolist(), strict=True
    ):
        found[hop] += [
            Occupation(start / clock, (start + duration) / clock, chunk, piece)
            for piece, start in enumerate(starts)
        ]
    return {
        pair: tuple(sorted(passing, key=lambda occupation: occupation.start_us))
        for pair, passing in found.items()
    }


def lay_out(schedule: AnySchedule) -> Hops:
    """The hops of a schedule in either form; those of an implicit one pass orbits of links.

    Imported here because it brings numba, which a command that only draws or verifies does without.
    """
    if isinstance(schedule, Schedule):
        from arborcast.synth.simulation.hops import Hops

        return Hops.of(schedule)
    from arborcast.synth.simulation.implicit import lay_out_orbits

    return lay_out_orbits(schedule)


def _mean_share(schedule: AnySchedule) -> Fraction:
    """The share of a chunk of average size."""
    counts = Counter(chunk.share.as_integer_ratio() for chunk in schedule.chunks)
    total = sum((count * Fraction(*ratio) for ratio, count in counts.items()), Fraction(0))
    return total / max(1, len(schedule.chunks))


def _most_pieces(hops: Hops, pieces_of_least_size: int, max_pieces: int) -> int:
    """The largest power of two that all limits allow, at least 1."""
    allowed = min(max_pieces, pieces_of_least_size, MAX_PASSAGES // max(1, hops.layout.link.size))
    return 1 << max(0, allowed.bit_length() - 1)


def _descend(hops: Hops, size: int, most: int) -> tuple[int, float]:
    """The fastest piece count found by halving from `most`, with its time in microseconds."""
    best, best_us = most, hops.play(size, most).time_us
    while best > 1:
        fewer_us = hops.play(size, best // 2).time_us
        if fewer_us >= best_us:
            break
        best, best_us = best // 2, fewer_us
    return best, best_us


def _service_for(schedule: AnySchedule, asked: str | Service) -> Service:
    service = Service.of(asked)
    if not isinstance(schedule, Schedule) and (service.rule is Rule.RANDOM or service.ahead is not None):
        raise InputError(
            f"service {service}: the implicit form is simulated with priority or fifo, in which the links of "
            "an orbit do the same; synth expand writes all of them out"
        )
    return service


def _slowest(hops: Hops, size: int, pieces: int, service: Service) -> tuple[float, Service]:
    """The longest time of all orders of a service, microseconds, with the first order that takes it."""
    orders = [service.one(service.seed + number) for number in range(service.orders)]
    times = [hops.play(size, pieces, order).time_us for order in orders]
    slowest = max(range(len(orders)), key=times.__getitem__)
    return times[slowest], orders[slowest]


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

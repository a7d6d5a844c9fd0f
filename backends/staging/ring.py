"""Into how many pieces a tensor on a device is cut, and through how many host buffers they go.

A piece (a share of every chunk) is copied in, takes the steps of the schedule, and is copied out. With n
bytes in k pieces that is, per piece,

    in   = a n / k / copy rate + copies of the piece in * time of a copy
    way  = n / k * s + steps * time of a message      s: of each step the link that is longest at work, summed
    out  = b n / k / copy rate + copies of the piece out * time of a copy

where a and b are the shares of the buffer that a rank holds at the start and gets. Pieces follow each other
through the links, while the processors work, at best one every

    link = max(n / k / rate of the schedule, (messages + copies of the piece) * time of a message)

of the busiest rank: a copy costs the processor as much as a message, whatever the device takes for it.

A place in a buffer of the ring is in use from the copy in of one chunk's part to its copy out,

    use  = in / copies in + way + out / copies out

since each chunk has places of its own. With d buffers a piece passes every use / d, and the whole takes

    T(k, d) = in + way + out + (k - 1) * max(in, link, out, use / d)

Of all k that leave messages long enough the one with the least T is taken, with the least d that does not
stand in the way; what is given (bytes of a buffer, d) is kept. With k = 1 whole tensors are copied.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from fractions import Fraction

from arborcast.backends.staging.device import CopyCosts
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.implicit_schedule import AnySchedule, ImplicitSchedule
from arborcast.synth.simulation.pieces import MESSAGE_US, SHORTEST_BYTES, most_messages, pieces_that_fit

MOST_PIECES = 256
MOST_DEPTH = 64
"""What a choice does not exceed; with 64 pieces a step 1.5 % are left to gain."""

HIDDEN = Fraction(1, 100)
"""Of the least time: of the numbers of pieces that are within it, the smallest is taken."""


@dataclass(frozen=True, slots=True)
class Ring:
    """How a tensor passes through host memory.

    Attributes:
        pieces: into which each chunk is cut.
        depth: host buffers, each with room for one piece of every chunk.
    """

    pieces: int
    depth: int

    def __str__(self) -> str:
        """As messages show it."""
        return f"{self.pieces} pieces through {self.depth} host buffers"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What a piece takes on its way, by the formula above.

    Attributes:
        nbytes: of the whole buffer.
        share_in: of it, what a rank copies in.
        share_out: what a rank copies out.
        copies_in: of one piece, single copies.
        copies_out: likewise.
        steps: of the schedule.
        rate: of the schedule, GB/s.
        alone: what a buffer that goes as one piece takes on the links, s for each GB.
        messages: of one piece, on the busiest rank.
        message_us: what one costs the processor, and a copy too.
        copying: what copies take on the device.
        most_pieces: of which messages are still long enough.
    """

    nbytes: int
    share_in: Fraction
    share_out: Fraction
    copies_in: int
    copies_out: int
    steps: int
    rate: Fraction
    alone: Fraction
    messages: Fraction
    message_us: int
    copying: CopyCosts
    most_pieces: int = MOST_PIECES

    @classmethod
    def of(
        cls,
        schedule: AnySchedule,
        nbytes: int,
        copying: CopyCosts,
        *,
        message_us: int = MESSAGE_US,
        shortest_bytes: int = SHORTEST_BYTES,
    ) -> Pipeline:
        """That of a schedule.

        Args:
            schedule: in either form.
            nbytes: of the whole buffer.
            copying: what copies take on the device.
            message_us: what a message, or a copy, costs the processor.
            shortest_bytes: what a message of the largest chunk must not fall below for being cut.
        """
        share_in, share_out = _shares(schedule.collective)
        chunks = schedule.chunk_count
        return cls(
            nbytes,
            share_in,
            share_out,
            math.ceil(chunks * share_in),
            math.ceil(chunks * share_out),
            schedule.steps,
            schedule.rate,
            _alone(schedule),
            Fraction(most_messages(schedule)),
            message_us,
            copying,
            pieces_that_fit(schedule, nbytes, piece_bytes=shortest_bytes, most=MOST_PIECES),
        )

    def time_us(self, pieces: int, depth: int) -> Fraction:
        """T(k, d)."""
        first, slowest, use = self._stages_us(pieces)
        return first + (pieces - 1) * max(slowest, use / depth)

    def enough(self, pieces: int) -> int:
        """The least depth that does not stand in the way; never more buffers than pieces."""
        _, slowest, use = self._stages_us(pieces)
        return max(1, min(pieces, MOST_DEPTH, math.ceil(use / slowest))) if slowest else 1

    def _stages_us(self, pieces: int) -> tuple[Fraction, Fraction, Fraction]:
        """What one piece takes in all, what in its slowest stage, and how long it uses its place."""
        part = Fraction(self.nbytes, pieces)
        into = self.copying.time_us(part * self.share_in, self.copies_in)
        out = self.copying.time_us(part * self.share_out, self.copies_out)
        way = part * self.alone / 1000 + self.steps * self.message_us
        wire = part / (1000 * self.rate) if self.rate else Fraction(0)  # of what nobody needs to send: none
        work = (self.messages + self.copies_in + self.copies_out) * self.message_us
        link = max(wire, work)
        use = into / max(1, self.copies_in) + way + out / max(1, self.copies_out)
        return into + way + out, max(into, link, out), use

    def choose(self, *, buffer_bytes: int | None = None, depth: int | None = None) -> Ring:
        """The pieces and the depth with the least time.

        Args:
            buffer_bytes: of the tensor in one host buffer, where somebody decides it.
            depth: likewise.
        """
        if buffer_bytes is not None:
            pieces = max(1, -(-self.nbytes // buffer_bytes))
        else:
            counts = range(1, max(1, min(self.most_pieces, self.nbytes)) + 1)
            times = [self.time_us(count, depth or self.enough(count)) for count in counts]
            limit = min(times) * (1 + HIDDEN)
            pieces = next(count for count, time in zip(counts, times, strict=True) if time <= limit)
        return Ring(pieces, min(pieces, depth or self.enough(pieces)))


def _shares(collective: Collective) -> tuple[Fraction, Fraction]:
    """Of the whole buffer, the most that a rank holds at the start, and the most that a rank gets."""
    block = Fraction(1, len(collective.ranks))
    match collective.kind:
        case Kind.ALLGATHER | Kind.GATHER:
            return block, Fraction(1)
        case Kind.REDUCE_SCATTER | Kind.SCATTER:
            return Fraction(1), block
        case _:
            return Fraction(1), Fraction(1)


def _alone(schedule: AnySchedule) -> Fraction:
    """Of each step the link that is longest at work, for a buffer of 1 GB: seconds, summed over the steps."""
    links, order = schedule.topology.links, 1
    orbits: tuple[int, ...] = tuple(range(len(links)))
    if isinstance(schedule, ImplicitSchedule):
        orbits, order = schedule.link_orbits, schedule.translations.order
    sizes = Counter(orbits)
    of_hop = {
        (link.src, link.dst): (orbit, Fraction(order, sizes[orbit]) / link.bandwidth)
        for link, orbit in zip(links, orbits, strict=True)
    }
    busy: defaultdict[tuple[int, int], Fraction] = defaultdict(Fraction)
    for transfer in schedule.transfers:
        for hop in transfer.hops:
            orbit, seconds = of_hop[hop]
            busy[transfer.step, orbit] += schedule.chunks[transfer.chunk].share * seconds
    longest: defaultdict[int, Fraction] = defaultdict(Fraction)
    for (step, _), seconds in busy.items():
        longest[step] = max(longest[step], seconds)
    return sum(longest.values(), Fraction(0))

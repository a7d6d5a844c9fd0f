"""Several cables between two ranks: a channel along each, and how messages are split over them.

Each cable is a *lane*. Lane 0 is the fastest, and has the number of the rank at its other end; further lanes
have numbers of their own, as if each led to a further peer:

    lane l to rank p of n                            number p + l * n
    100 elements over lanes of 10, 5 and 5 GB/s      0:50, 50:75, 75:100

Both ends split by the rates of the direction, so that nothing needs to be said about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

WHOLE_BELOW = 1024
"""Elements of the shortest message that is split: shorter ones cost their ends more in parts than they gain.

Pieces are longer (`synth.simulation.pieces.SHORTEST_BYTES`).
"""


@dataclass(frozen=True, slots=True)
class CableLanes:
    """How the messages of one rank are split.

    Attributes:
        ranks: of the group.
        out: by rank to which there are several lanes, what each carries there.
        into: likewise what each carries from there.
    """

    ranks: int
    out: Mapping[int, Sequence[Fraction]]
    into: Mapping[int, Sequence[Fraction]]

    def parts(self, peer: int, length: int, *, is_sent: bool) -> list[tuple[int, int, int]]:
        """Number of the lane, begin and end of each part of a message.

        Args:
            peer: the other rank.
            length: elements of the message.
            is_sent: whether it goes there; it comes from there otherwise.
        """
        rates = (self.out if is_sent else self.into).get(peer, ())
        return [(peer + lane * self.ranks, start, stop) for lane, start, stop in split(length, rates)]


def split(length: int, rates: Sequence[Fraction]) -> list[tuple[int, int, int]]:
    """Lane, begin and end of each part of a message, in its order; in proportion to the rates of lanes.

    Parts of nothing are left out; a message below `WHOLE_BELOW` goes whole along lane 0.
    """
    if len(rates) < 2 or length < WHOLE_BELOW:
        return [(0, 0, length)]
    total, done, start = sum(rates), Fraction(0), 0
    found = []
    for lane, rate in enumerate(rates):
        done += rate
        stop = length * done // total
        if stop > start:
            found.append((lane, start, stop))
        start = stop
    return found

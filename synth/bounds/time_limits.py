"""How long a collective takes at least, at each size: latencies and bandwidths together.

A rate says what is best for the largest messages only. For a message of m bytes each of these holds too, with
`d(u, v)` the least sum of latencies from u to v and `in(v)` what the links into v carry together:

    whole result at v   what v gets depends on the farthest rank u, so that it comes after d(u, v), at in(v):
                        broadcast, reduce at the root, allreduce         d(u, v) + m / in(v)
    blocks at v         what comes from ranks at least d away comes after d:
                        allgather, gather, alltoall                     d + (bytes of those ranks) / in(v)

and the same backwards for what leaves a rank: its last byte still has to reach the farthest. The largest of
these lines, and what the certificate of the rate says once links wait for their first byte and end before the
last one arrives (`synth.certification.windows`), is the least time. Nothing is assumed about steps, pieces or
the order of service: what simulates faster is a defect of one of the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

import numpy as np

from arborcast.synth.bounds.shortest_paths import FAR, ShortestPaths
from arborcast.synth.certificate import Bound, Tolls
from arborcast.synth.certification.windows import Line, window_lines
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.kernels.compiled import Ints
from arborcast.synth.ports import ported
from arborcast.synth.topology import Topology

MOST_RANKS = 256
"""Of so many ranks the lines are worked out, evenly spaced where there are more: any of them is a limit."""

_WHOLE_RESULT = (Kind.BROADCAST, Kind.REDUCE, Kind.ALLREDUCE)
_BLOCKS_IN = (Kind.ALLGATHER, Kind.GATHER, Kind.ALLTOALL)
_BLOCKS_OUT = (Kind.REDUCE_SCATTER, Kind.SCATTER, Kind.ALLTOALL)


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """What every schedule takes, of `Bound`'s scope where it has one.

    Attributes:
        lines: every schedule is above all of them.
        window: and above the least of these, which the certificate of the rate proves.
        tolls: and above what these prove, where some were asked for.
    """

    lines: tuple[Line, ...]
    window: tuple[Line, ...]
    tolls: tuple[Tolls, ...] = ()

    def at(self, size_bytes: int) -> Fraction:
        """The least time in microseconds for a buffer of so many bytes."""
        by_window = min(line.at(size_bytes) for line in self.window)
        by_lines = (line.at(size_bytes) for line in self.lines)
        return max([by_window, *by_lines, *(tolls.at(size_bytes) for tolls in self.tolls)])


def time_limit(topology: Topology, collective: Collective, limit: Bound) -> TimeLimit:
    """The least time of a collective as a function of its size.

    Args:
        topology: the fabric; relays forward, and switches do what they can.
        collective: on it, and possible.
        limit: the bound of its rate, with the times that were proved beside it.
    """
    topology = ported(topology)
    lines: set[Line] = set()
    if collective.kind is not Kind.CUSTOM:
        for fabric, blocks in ((topology, _BLOCKS_IN), (topology.reversed(), _BLOCKS_OUT)):
            turned = fabric is not topology
            lines.update(_into_ranks(fabric, collective, collective.kind in blocks, turned=turned))
    window = window_lines(topology, collective, limit.certificate)
    return TimeLimit(tuple(_upper(lines)), window, limit.times)


def _into_ranks(fabric: Topology, collective: Collective, by_blocks: bool, *, turned: bool) -> Iterator[Line]:
    """The lines of what enters each rank; on the reversed fabric, of what leaves it."""
    kind, count = collective.kind, len(collective.ranks)
    whole_amount = collective.total if collective.sizes else count * count
    receives, sends = _roles(collective, turned=turned)
    stride = -(-len(receives) // MOST_RANKS)
    lengths, clock = _latencies(fabric)
    entering = dict.fromkeys(receives, Fraction(0))
    for link in fabric.links:
        if link.dst in entering:
            entering[link.dst] += link.bandwidth
    backwards = ShortestPaths(fabric, turned=True)  # from the receiver to all senders in one search
    for rank in receives[::stride]:
        others = np.array([each for each in sends if each != rank], dtype=np.int64)
        amounts = _amounts(collective, rank, others.tolist(), turned=turned)
        others, amounts = others[amounts > 0], amounts[amounts > 0]
        if not others.size:
            continue
        distances = backwards.tree(lengths, rank).distance[others]
        order = np.argsort(distances)
        distances = distances[order]
        assert distances[-1] < FAR, "a collective that is possible joins its ranks"
        per_byte = Fraction(1, 1000) / entering[rank]
        if not by_blocks:
            whole = Fraction(1) if kind in _WHOLE_RESULT else Fraction(1, count)
            yield Line(Fraction(int(distances[-1]), clock), whole * per_byte)
            continue
        # Of ascending distances the i-th and all behind it are at least as far.
        left = np.cumsum(amounts[order][::-1])[::-1]
        for first in np.unique(distances, return_index=True)[1].tolist():
            share = Fraction(int(left[first]) * count, whole_amount)
            yield Line(Fraction(int(distances[first]), clock), share * per_byte)


def _amounts(collective: Collective, rank: int, others: list[int], *, turned: bool) -> Ints:
    """What a rank gets from each, or gives it: bytes where blocks differ, else 1 of the square of ranks."""
    if not collective.sizes:
        return np.ones(len(others), dtype=np.int64)
    place = {each: at for at, each in enumerate(collective.ranks)}
    ways = [(place[rank], place[other]) if turned else (place[other], place[rank]) for other in others]
    return np.array([collective.sizes[src][dst] for src, dst in ways], dtype=np.int64)


def _roles(collective: Collective, *, turned: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Who gets what, and from whom it all comes; turned round, who gives it, and whom all of it goes to."""
    everyone, root = collective.ranks, collective.root
    if root is None:
        return everyone, everyone
    to_root = collective.kind in (Kind.REDUCE, Kind.GATHER)
    return ((root,), everyone) if to_root != turned else (everyone, (root,))


def _latencies(fabric: Topology) -> tuple[Ints, int]:
    """Whole ticks for each link, and how many ticks a microsecond has."""
    clock = lcm(*(link.latency_us.denominator for link in fabric.links))
    return np.array([int(link.latency_us * clock) for link in fabric.links], dtype=np.int64), clock


def _upper(lines: set[Line]) -> Iterator[Line]:
    """Those that no other one is above at all sizes."""
    steepest = Fraction(0)
    for line in sorted(lines, key=lambda line: (-line.latency_us, -line.us_per_byte)):
        if line.us_per_byte > steepest:
            steepest = line.us_per_byte
            yield line

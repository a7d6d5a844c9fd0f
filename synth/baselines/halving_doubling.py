"""Recursive halving and doubling on a hypercube (Rabenseifner 2004; Thakur, Rabenseifner and Gropp 2005).

In step s of the reduce-scatter, position r exchanges with r XOR 2**s the half of its blocks that belongs on
the other side; the allgather is the same backwards. Where n is no power of two, an allreduce first folds the
positions beyond the largest power onto the first ones, and hands them the result at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from arborcast.synth.baselines.pattern import Pattern, lay
from arborcast.synth.certificate import Bound
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.schedule import Chunk, Schedule, Transfer
from arborcast.synth.topology import Topology


def solve_halving_doubling(
    topology: Topology, collective: Collective, bound: Bound, deadline: Deadline
) -> Schedule:
    """The schedule by halving and doubling.

    Raises:
        InfeasibleError: the number of ranks is no power of two (but for allreduce), or the hypercube does
            not fit the graph.
        TimedOutError: the deadline passed.
    """
    count = len(collective.ranks)
    if collective.kind is not Kind.ALLREDUCE and count & (count - 1):
        raise InfeasibleError(
            f"halving-doubling: {collective.kind} needs a power of two of ranks, got {count}; "
            "methods trees and ring take any number"
        )
    return lay(topology, collective, bound, hypercube(collective.kind, count), deadline)


def hypercube(kind: Kind, count: int) -> Pattern:
    """The pattern for allgather, reduce-scatter and allreduce among `count` positions."""
    dimension = count.bit_length() - 1
    corners = 1 << dimension
    extra = range(corners, count)
    fold = 1 if extra else 0
    transfers: list[Transfer] = []
    for block in range(corners):
        transfers += (Transfer(block, rank, rank - corners, 0, reduce=True) for rank in extra)
        step = fold
        if kind.reduces:
            transfers += _halve(block, dimension, step)
            step += dimension
        if kind is not Kind.REDUCE_SCATTER:
            transfers += _double(block, dimension, step)
            step += dimension
        transfers += (Transfer(block, rank - corners, rank, step) for rank in extra)
    chunks = tuple(Chunk(Fraction(1, corners), block) for block in range(corners))
    return Pattern("halving-doubling", count, None, chunks, tuple(transfers))


def _halve(block: int, dimension: int, first_step: int) -> Iterator[Transfer]:
    """Nearest first: half of the data goes to the neighbour, and each step after it half as much."""
    for bit in range(dimension):
        for rank in range(1 << dimension):
            # Who agrees with the block in all lower bits still holds a sum of it; the wrong side sends.
            if (rank ^ block) & ((2 << bit) - 1) == 1 << bit:
                yield Transfer(block, rank, rank ^ 1 << bit, first_step + bit, reduce=True)


def _double(block: int, dimension: int, first_step: int) -> Iterator[Transfer]:
    for transfer in _halve(block, dimension, 0):
        yield Transfer(block, transfer.dst, transfer.src, first_step + dimension - 1 - transfer.step)

"""Butterflies: in each step every position exchanges with one partner, log2(n) steps for a power of two.

    method              partner of r in step s     what they exchange
    halving-doubling    r XOR 2**s                 the blocks that belong on the other side, then sums back
    multiport           the same, log2(n) times    a part for each bit, which begins with it: all links of a
                                                   hypercube, such as a torus of 4 x 4, are busy at once
    swing               r + d(s), r - d(s) if odd  the same; d = 1, -1, 3, -5, ...: (1 - (-2)**(s+1)) / 3
    recursive-doubling  r XOR 2**s                 all they have: half of the steps, log2(n) times the bytes
    rotated-doubling    the same, log2(n) times    a part for each bit, as of multiport

Recursive halving and doubling: Rabenseifner 2004; Thakur, Rabenseifner and Gropp 2005. Swing: De Sensi et
al., NSDI 2024, for rings and tori; the butterfly of Bine trees (De Sensi et al., SC 2025) has the same
partners. In recursive doubling both partners add the same two sums, so that all ranks end with the same bits.
Where n is no power of two, an allreduce first folds the positions beyond the largest power onto the first
ones, and hands them the result at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache

from arborcast.synth.baselines.pattern import Pattern
from arborcast.synth.collective import Kind
from arborcast.synth.schedule import Chunk, Transfer


def butterfly(kind: Kind, count: int, method: str) -> Pattern:
    """The pattern for allgather, reduce-scatter and allreduce among `count` positions, a block for each."""
    dimension = count.bit_length() - 1
    corners = 1 << dimension
    extra = range(corners, count)
    fold = 1 if extra else 0
    halved: list[list[tuple[int, int, int]]] = [[] for _ in range(corners)]
    for block, *move in _halve(method, dimension):
        halved[block].append((move[0], move[1], move[2]))
    transfers: list[Transfer] = []
    for block, moves in enumerate(halved):
        transfers += (Transfer(block, rank, rank - corners, 0, reduce=True) for rank in extra)
        step = fold
        if kind.reduces:
            transfers += (Transfer(block, src, dst, step + after, reduce=True) for src, dst, after in moves)
            step += dimension
        if kind is not Kind.REDUCE_SCATTER:
            last = step + dimension - 1
            transfers += (Transfer(block, dst, src, last - after) for src, dst, after in moves)
            step += dimension
        transfers += (Transfer(block, rank - corners, rank, step) for rank in extra)
    chunks = tuple(Chunk(Fraction(1, corners), block) for block in range(corners))
    return Pattern(method, count, None, chunks, tuple(transfers))


def multiport(kind: Kind, count: int, method: str = "multiport") -> Pattern:
    """The pattern of halving-doubling, or of recursive doubling, in parts: the bits of all positions rotate.

    Where the number of positions is no power of two, they do not rotate and there is one part.
    """
    rotating = doubling if method == "rotated-doubling" else butterfly
    once = rotating(kind, count, "halving-doubling")
    dimension = 1 if count & (count - 1) else max(1, count.bit_length() - 1)

    def rotated(position: int, bits: int) -> int:
        return position if not bits else (position << bits | position >> dimension - bits) % count

    chunks = tuple(
        Chunk(chunk.share / dimension, rotated(chunk.owner, part))
        for part in range(dimension)
        for chunk in once.chunks
    )
    transfers = tuple(
        replace(
            move,
            chunk=part * len(once.chunks) + move.chunk,
            src=rotated(move.src, part),
            dst=rotated(move.dst, part),
        )
        for part in range(dimension)
        for move in once.transfers
    )
    return Pattern(method, count, None, chunks, transfers)


def doubling(_kind: Kind, count: int, method: str = "recursive-doubling") -> Pattern:
    """The pattern of recursive doubling for allreduce: one chunk, which all exchange in every step."""
    dimension = count.bit_length() - 1
    corners = 1 << dimension
    fold = 1 if count > corners else 0
    transfers = [Transfer(0, rank, rank - corners, 0, reduce=True) for rank in range(corners, count)]
    for step in range(dimension):
        for rank in range(corners):
            other = partner(method, rank, step, corners)
            transfers.append(Transfer(0, rank, other, fold + step, reduce=True))
    transfers += (Transfer(0, rank - corners, rank, fold + dimension) for rank in range(corners, count))
    return Pattern(method, count, None, (Chunk(Fraction(1), 0),), tuple(transfers))


def partner(method: str, rank: int, step: int, corners: int) -> int:
    """The rank that one exchanges with in a step; whose partner is the rank."""
    if method != "swing":
        return rank ^ 1 << step
    distance = (1 - int((-2) ** (step + 1))) // 3
    return (rank + (-distance if rank % 2 else distance)) % corners


def _halve(method: str, dimension: int) -> Iterator[tuple[int, int, int, int]]:
    """Block, src, dst and step of the reduce-scatter: a rank sends what its partner reaches from there on."""
    corners = 1 << dimension

    @cache
    def reached(rank: int, step: int) -> frozenset[int]:
        if step == dimension:
            return frozenset([rank])
        return reached(rank, step + 1) | reached(partner(method, rank, step, corners), step + 1)

    for step in range(dimension):
        for rank in range(corners):
            other = partner(method, rank, step, corners)
            for block in sorted(reached(other, step + 1)):
                yield block, rank, other, step

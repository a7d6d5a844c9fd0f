"""Binomial trees on a circle: Bruck's, those of PAT, and Bine trees.

    method   where what is at 0 of n goes in step s               for
    bruck    from each place that has it, 2**s further            allgather, reduce-scatter, allreduce
    pat      the same, the farthest distance first                the same
    bine     to the partner of `swing`, the farthest first        broadcast, reduce, allreduce

Bruck et al., IEEE TPDS 1997: ceil(log2 n) steps for any n. PAT (parallel aggregated trees, NCCL 2.23;
Jeaugey, arXiv 2506.20252) has the other order: what goes far is one block, not half of them. Bine trees
(binomial, negabinary; De Sensi et al., SC 2025, arXiv 2508.17311): distances 1, -1, 3, -5, 11, ..., which are
two thirds of the powers of two. What is added goes the same ways back; an allreduce is both.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from arborcast.synth.baselines.butterflies import partner
from arborcast.synth.baselines.pattern import Pattern
from arborcast.synth.collective import Kind
from arborcast.synth.schedule import Chunk, Transfer

Edge = tuple[int, int, int]
"""Of a tree: from which place, to which, in which step."""


def around(kind: Kind, count: int, method: str) -> Pattern:
    """The pattern of bruck or pat: for each position the same tree, which begins there."""
    edges = digits(count, 2, far_first=method == "pat")
    transfers: list[Transfer] = []
    for block in range(count):
        moved = [((src + block) % count, (dst + block) % count, step) for src, dst, step in edges]
        transfers += along(kind, moved, block)
    chunks = tuple(Chunk(Fraction(1, count), block) for block in range(count))
    return Pattern(method, count, None, chunks, tuple(transfers))


def bine(kind: Kind, count: int, method: str = "bine") -> Pattern:
    """The pattern of one Bine tree from position 0; positions beyond a power of two hang below it."""
    dimension = count.bit_length() - 1
    corners = 1 << dimension
    edges: list[Edge] = []
    held = [0]
    for step in range(dimension):
        reached = [partner("swing", place, dimension - 1 - step, corners) for place in held]
        edges += ((src, dst, step) for src, dst in zip(held, reached, strict=True))
        held += reached
    edges += ((place - corners, place, dimension) for place in range(corners, count))
    pinned = None if kind is Kind.ALLREDUCE else 0
    return Pattern(method, count, pinned, (Chunk(Fraction(1), 0),), tuple(along(kind, edges, 0)))


def digits(count: int, radix: int, *, far_first: bool) -> list[Edge]:
    """A tree from 0 over 0..count-1: in each step who has it changes one digit of its own number.

    Args:
        count: of places.
        radix: of the numbers; 2 makes binomial trees, `count` a star.
        far_first: whether the most significant digit comes first.
    """
    units = [1]
    while units[-1] * radix < count:
        units.append(units[-1] * radix)
    edges: list[Edge] = []
    held = [0]
    for step, unit in enumerate(reversed(units) if far_first else units):
        new = [
            (place, place + unit * digit, step)
            for place in held
            for digit in range(1, radix)
            if place + unit * digit < count
        ]
        edges += new
        held += (dst for _, dst, _ in new)
    return edges


def along(kind: Kind, edges: Sequence[Edge], chunk: int) -> list[Transfer]:
    """What one chunk does on a tree: up it where it is added, then down it where it spreads."""
    steps = 1 + max((step for _, _, step in edges), default=-1)
    up = [Transfer(chunk, dst, src, steps - 1 - step, reduce=True) for src, dst, step in edges]
    after = steps if kind is Kind.ALLREDUCE else 0
    down = [Transfer(chunk, src, dst, after + step) for src, dst, step in edges]
    return [*(up if kind.reduces else ()), *(() if kind in (Kind.REDUCE, Kind.REDUCE_SCATTER) else down)]

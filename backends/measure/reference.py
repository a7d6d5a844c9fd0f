"""What each collective is defined to give, and data on which a mistake cannot hide.

The definition works on whole arrays of one process and shares no code with the lowering: the interpreter's
and the executor's results are compared with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from arborcast.backends.lowering.reduction import Array, Reduction, combine, finish
from arborcast.synth.collective import Collective, Kind

_PART = 1 << 18  # values are made in int64, so many at a time

EXACT_INTEGERS = {"bfloat16": 2**8, "float32": 2**24, "float64": 2**53, "int64": 2**62}
"""Up to which absolute value each supported type holds every integer."""


def define(
    collective: Collective, inputs: Sequence[Array | None], reduction: Reduction = Reduction.SUM
) -> tuple[Array | None, ...]:
    """The outputs of a collective, by rank; None where a rank gets nothing.

    Args:
        collective: which one.
        inputs: by rank of the topology; one array of the same length for every rank that gives data (only
            the root for broadcast and scatter), ignored for the others. For a custom collective the buffers
            of all ranks that take part, what they do not hold included: it stays where nothing comes.
        reduction: how contributions are combined; ignored by kinds that only move data.
    """
    ranks = collective.ranks
    given = {rank: array for rank, array in enumerate(inputs) if array is not None}
    outputs: dict[int, Array] = {}
    match collective.kind:
        case Kind.BROADCAST:
            assert collective.root is not None
            outputs = {rank: given[collective.root].copy() for rank in ranks}
        case Kind.ALLREDUCE | Kind.REDUCE | Kind.REDUCE_SCATTER:
            total = _reduced([given[rank] for rank in ranks], reduction)
            if collective.kind is Kind.REDUCE_SCATTER:
                outputs = dict(zip(ranks, _blocks(total, len(ranks)), strict=True))
            else:
                receivers = ranks if collective.root is None else (collective.root,)
                outputs = {rank: total.copy() for rank in receivers}
        case Kind.ALLGATHER | Kind.GATHER:
            gathered = np.concatenate([given[rank] for rank in ranks])
            receivers = ranks if collective.root is None else (collective.root,)
            outputs = {rank: gathered.copy() for rank in receivers}
        case Kind.SCATTER:
            assert collective.root is not None
            outputs = dict(zip(ranks, _blocks(given[collective.root], len(ranks)), strict=True))
        case Kind.ALLTOALL:
            cut = [_blocks(given[rank], len(ranks)) for rank in ranks]
            outputs = {
                rank: np.concatenate([blocks[position] for blocks in cut])
                for position, rank in enumerate(ranks)
            }
        case Kind.CUSTOM:
            outputs = {rank: given[rank].copy() for rank in ranks}
            for index, demand in enumerate(collective.demands):
                start, stop = _span(given[ranks[0]], index, len(collective.demands))
                for target in demand.targets:
                    outputs[target][start:stop] = given[min(demand.sources)][start:stop]
    return tuple(outputs.get(rank) for rank in range(len(inputs)))


def sample_data(
    collective: Collective, rank: int, elements: int, *, dtype: str, reduction: Reduction | None, seed: int
) -> Iterator[tuple[int, Array]]:
    """The data of a rank in parts that are easy to hold in memory, each with its first index.

    In a custom collective all sources of a block hold the same values; what a rank does not hold is filled
    with values of its own, which must not change unless the block comes.

    Args:
        collective: what the data is for.
        rank: one that takes part.
        elements: how many, of all parts together.
        dtype: see `sample_values`, like all that follow.
        reduction: what they are for.
        seed: another seed gives other data.
    """
    stretches = [(rank, 0, elements)]
    if collective.kind is Kind.CUSTOM:
        block = elements // len(collective.demands)
        stretches = [
            (min(demand.sources) if rank in demand.sources else rank, index * block, (index + 1) * block)
            for index, demand in enumerate(collective.demands)
        ]
    for holder, first, end in stretches:
        for start in range(first, end, _PART):
            count = min(_PART, end - start)
            yield (
                start,
                sample_values(
                    holder,
                    count,
                    dtype=dtype,
                    reduction=reduction,
                    ranks=len(collective.ranks),
                    seed=seed,
                    start=start,
                ),
            )


def sample_values(
    rank: int,
    count: int,
    *,
    dtype: str,
    reduction: Reduction | None,
    ranks: int,
    seed: int = 0,
    start: int = 0,
) -> Array:
    """Integers that depend on rank and index, small enough that every result is exact in `dtype`.

    They look random, so that a slice in the wrong place shows, and so does a contribution missing or
    counted twice. Sums of `ranks` of them are exact; factors are 1, -1 and 2.

    Args:
        rank: whose data.
        count: how many.
        dtype: the type they will be converted to, one of `EXACT_INTEGERS`.
        reduction: what they are for, None where they are only moved.
        ranks: how many contributions are combined.
        seed: another seed gives other data.
        start: index of the first.
    """
    index = np.arange(start, start + count, dtype=np.uint64)
    # SplitMix64's finalizer, whose output bits all depend on all input bits.
    mixed = index + np.uint64((rank + 1) * 0x9E3779B97F4A7C15 + seed * 0xD1B54A32D192ED03 & 2**64 - 1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    if reduction is Reduction.PRODUCT:
        return np.array([1, -1, 2], dtype=np.int64)[(mixed % np.uint64(3)).astype(np.int64)]
    adds = reduction in {Reduction.SUM, Reduction.AVG}
    limit = min(EXACT_INTEGERS[dtype] // (ranks if adds else 1), 2**20)
    span = max(2 * limit + 1, 3)
    return (mixed % np.uint64(span)).astype(np.int64) - span // 2


def _reduced(arrays: Sequence[Array], reduction: Reduction) -> Array:
    total = arrays[0].copy()
    for array in arrays[1:]:
        combine(reduction, total, array)
    finish(reduction, total, len(arrays))
    return total


def _blocks(array: Array, count: int) -> list[Array]:
    return [block.copy() for block in array.reshape(count, -1)] if array.size else [array.copy()] * count


def _span(array: Array, block: int, blocks: int) -> tuple[int, int]:
    length = len(array) // blocks
    return block * length, (block + 1) * length

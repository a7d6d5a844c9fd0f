"""Data on which a mistake cannot hide: they look random, and every right result is exact."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from arborcast.backends.measure.job import Array, Reduction
from arborcast.synth.collective import Collective, Kind

_PART = 1 << 18  # values are made in int64, so many at a time

EXACT_INTEGERS = {"bfloat16": 2**8, "float32": 2**24, "float64": 2**53, "int64": 2**62}
"""Up to which absolute value each supported type holds every integer."""


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
        dtype: see `sample_values`, like the next two.
        reduction: likewise.
        seed: likewise.
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

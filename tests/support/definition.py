"""What each collective is defined to give, on whole arrays; shares no code with the lowering."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arborcast.backends.lowering.layout import lay_out
from arborcast.backends.measure.job import Array, Reduction
from arborcast.backends.measure.samples import sample_data
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.implicit_schedule import AnySchedule

COMBINE: dict[Reduction, np.ufunc] = {
    Reduction.SUM: np.add,
    Reduction.AVG: np.add,  # divided by `finish`
    Reduction.MIN: np.minimum,
    Reduction.MAX: np.maximum,
    Reduction.PRODUCT: np.multiply,
}


def combine(reduction: Reduction, into: Array, source: Array) -> None:
    """Combine `source` into `into`; an average is a sum until `finish` divides it."""
    COMBINE[reduction](into, source, out=into)


def finish(reduction: Reduction, result: Array, contributors: int) -> None:
    """Divide an average by the number of contributors; integers round towards zero, as NCCL's do."""
    if reduction is not Reduction.AVG:
        return
    if np.issubdtype(result.dtype, np.integer):
        result[:] = np.sign(result) * (np.abs(result) // contributors)
    else:
        np.divide(result, contributors, out=result)


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


def whole_call(
    collective: Collective,
    ranks: int,
    count: int,
    seed: int,
    most: int = 99,
    reduction: Reduction = Reduction.SUM,
) -> tuple[list[Array], list[Array], list[Array]]:
    """Inputs of all ranks of a topology, room for outputs, and what must stand there: from its first element.

    All have room for the whole buffer, of which a collective of blocks takes what it needs.

    Args:
        collective: of blocks of one size.
        ranks: of the topology.
        count: elements of the whole buffer.
        seed: of the inputs.
        most: the largest element.
        reduction: as for `define`.
    """
    draw = np.random.default_rng(seed)
    inputs = [draw.integers(0, most + 1, count) for _ in range(ranks)]
    is_of_blocks = collective.kind in {Kind.ALLGATHER, Kind.GATHER}
    given = count // len(collective.ranks) if is_of_blocks else count
    outputs = define(collective, [array[:given] for array in inputs], reduction)
    wanted = [np.zeros(0, np.int64) if output is None else output for output in outputs]
    return inputs, [np.full(count, -1) for _ in range(ranks)], wanted


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


def inputs_of(
    schedule: AnySchedule, count: int, dtype: str, reduction: Reduction = Reduction.SUM
) -> list[Array | None]:
    """Data for every rank that gives some, as integers that are exact in the type; None for the others."""
    collective, layout = schedule.collective, lay_out(schedule, count)
    found: list[Array | None] = []
    for rank in range(schedule.topology.ranks):
        gives = rank in collective.ranks
        if collective.kind in {Kind.BROADCAST, Kind.SCATTER}:
            gives = rank == collective.root
        length = layout.output_elements(rank) if layout.in_place(rank) else layout.input_elements(rank)
        data = np.zeros(length, dtype=np.int64)
        for start, part in sample_data(
            collective, rank, length, dtype=dtype, reduction=reduction, seed=length
        ):
            data[start : start + len(part)] = part
        found.append(data if gives else None)
    return found

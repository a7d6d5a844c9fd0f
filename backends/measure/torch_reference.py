"""The right answer to compare with: torch's own collective, or the definition where torch has none.

gloo sums, multiplies and so on every supported type, but it cannot average integers, and there is no custom
collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from arborcast.backends.lowering.reduction import Array, Reduction
from arborcast.backends.measure.job import Job
from arborcast.backends.measure.reference import define, sample_data
from arborcast.synth.collective import Collective, Kind

OPS = {
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.AVG: dist.ReduceOp.AVG,
    Reduction.MIN: dist.ReduceOp.MIN,
    Reduction.MAX: dist.ReduceOp.MAX,
    Reduction.PRODUCT: dist.ReduceOp.PRODUCT,
}


def torch_defines(kind: Kind, reduction: Reduction, dtype: torch.dtype) -> bool:
    """Whether torch's collective on gloo does this."""
    if kind is Kind.CUSTOM:
        return False
    return not (kind.reduces and reduction is Reduction.AVG and not dtype.is_floating_point)


def by_torch(
    collective: Collective,
    group: dist.ProcessGroup,
    given: Tensor,
    output_elements: int,
    op: dist.ReduceOp.RedOpType,
) -> Tensor | None:
    """The output of this rank by torch's collective; None where it gets none. Never changes `given`.

    Args:
        collective: which one.
        group: of the collective's ranks; torch orders them by number.
        given: this rank's data: empty where it gives none.
        output_elements: how many it gets.
        op: ignored where nothing is reduced.
    """
    root = -1 if collective.root is None else collective.root
    order = sorted(collective.ranks)
    # Block i of ours is block theirs[i] of torch's.
    theirs = [order.index(rank) for rank in collective.ranks]
    at_root = dist.get_rank() == root
    output = torch.empty(output_elements, dtype=given.dtype)
    match collective.kind:
        case Kind.BROADCAST:
            output = given.clone() if at_root else output
            dist.broadcast(output, root, group=group)
        case Kind.ALLREDUCE:
            output = given.clone()
            dist.all_reduce(output, op, group=group)
        case Kind.REDUCE:
            total = given.clone()
            dist.reduce(total, root, op, group=group)
            output = total if at_root else output
        case Kind.REDUCE_SCATTER:
            dist.reduce_scatter_tensor(output, _to_torch(given, theirs), op, group=group)
        case Kind.ALLGATHER:
            dist.all_gather_into_tensor(output, given, group=group)
            output = _from_torch(output, theirs)
        case Kind.GATHER:
            blocks = list(output.chunk(len(order))) if output_elements else None
            if at_root and blocks is None:
                blocks = [output] * len(order)
            dist.gather(given, blocks, root, group=group)
            output = _from_torch(output, theirs)
        case Kind.SCATTER:
            parts = list(_to_torch(given, theirs).view(len(order), -1)) if at_root and len(given) else None
            if at_root and parts is None:
                parts = [output] * len(order)
            dist.scatter(output, parts, root, group=group)
        case Kind.ALLTOALL:
            dist.all_to_all_single(output, _to_torch(given, theirs), group=group)
            output = _from_torch(output, theirs)
    return output if output_elements else None


def by_definition(job: Job, rank: int, elements: int, dtype: torch.dtype) -> Tensor | None:
    """The output of this rank, worked out here from everybody's data."""
    collective = job.schedule.collective
    inputs: list[Array | None] = [None] * job.schedule.topology.ranks
    for other in collective.ranks:
        values = np.empty(elements, dtype=np.int64)
        for start, part in sample_data(
            collective,
            other,
            elements,
            dtype=job.dtype,
            reduction=job.reduction if collective.kind.reduces else None,
            seed=job.seed,
        ):
            values[start : start + len(part)] = part
        inputs[other] = values
    output = define(collective, inputs, job.reduction)[rank]
    return None if output is None else torch.from_numpy(output).to(dtype)


def _to_torch(ours: Tensor, theirs: Sequence[int]) -> Tensor:
    if not ours.numel():
        return ours
    moved = torch.empty_like(ours).view(len(theirs), -1)
    moved[theirs] = ours.view(len(theirs), -1)
    return moved.view(-1)


def _from_torch(output: Tensor, theirs: Sequence[int]) -> Tensor:
    if not output.numel():
        return output
    return output.view(len(theirs), -1)[theirs].reshape(-1)

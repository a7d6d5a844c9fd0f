"""Torch's own collectives by their kinds, for all who compare with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from arborcast.backends.tensors.torch_compat import all_gather_single, reduce_scatter_single
from arborcast.synth.collective import Kind


def torch_call(
    kind: Kind,
    root: int | None = 0,
    *,
    group: dist.ProcessGroup | None = None,
    blocks: tuple[list[int] | None, list[int] | None] = (None, None),
    **how: Any,
) -> Callable[[Tensor, Tensor], Any]:
    """What calls torch's collective on an output and, beside it, on what a rank gives.

    Allreduce, broadcast and reduce work in the output alone.

    Args:
        kind: of the collective.
        root: of kinds that have one.
        group: that calls; None for the default one.
        blocks: elements that an alltoall sends to each rank and gets from each; by default equal ones.
        how: whether it is asynchronous, as torch names it.
    """
    how["group"] = group
    sent, received = blocks

    def parts(whole: Tensor) -> list[Tensor] | None:
        return list(whole.chunk(dist.get_world_size(group))) if dist.get_rank(group) == root else None

    calls: dict[Kind, Callable[[Tensor, Tensor], Any]] = {
        Kind.ALLREDUCE: lambda output, _: dist.all_reduce(output, **how),
        Kind.BROADCAST: lambda output, _: dist.broadcast(output, root, **how),
        Kind.ALLGATHER: lambda output, given: all_gather_single(output, given, **how),
        Kind.REDUCE_SCATTER: lambda output, given: reduce_scatter_single(output, given, **how),
        Kind.REDUCE: lambda output, _: dist.reduce(output, root, **how),
        Kind.GATHER: lambda output, given: dist.gather(given, parts(output), root, **how),
        Kind.SCATTER: lambda output, given: dist.scatter(output, parts(given), root, **how),
        Kind.ALLTOALL: lambda output, given: dist.all_to_all_single(output, given, received, sent, **how),
    }
    return calls[kind]

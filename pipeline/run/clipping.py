"""Clipping by the norm of all gradients of the model, which are spread over stages and copied on replicas.

Each rank adds its share of every parameter that it holds, or of its part of one, so that one small allreduce
gives all ranks the norm that `torch.nn.utils.clip_grad_norm_` finds in serial training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arborcast.pipeline.run.prepared_layers import full, is_sharded, local


def clip_gradients(
    parameters: Mapping[str, nn.Parameter],
    max_norm: float,
    *,
    group: dist.ProcessGroup | None = None,
    replicas: int = 1,
    ties: Mapping[str, int] | None = None,
) -> float:
    """Scale all gradients, in place, so that together their norm is at most `max_norm`.

    Every rank of the group calls it once the gradients are summed over replicas and ties.

    Args:
        parameters: of this rank's stage by name, each once; empty on a rank without work.
        max_norm: the limit.
        group: of all ranks of the job; None for the default group, or this process alone without one.
        replicas: number of ranks that hold this stage, or share it.
        ties: number of ranks that hold a parameter, for those on several stages (`TieGroups.holders`).

    Returns:
        The norm before clipping.
    """
    holders = ties or {}
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    with torch.no_grad():
        squares = [_square(it) / holders.get(name, replicas) for name, it in gradients.items()]
        total = torch.stack(squares).sum(0, keepdim=True).cpu() if squares else torch.zeros(1).double()
        if group is not None or dist.is_initialized():
            dist.all_reduce(total, group=group)
        norm = math.sqrt(total.item())
        factor = max_norm / (norm + 1e-6)  # the 1e-6 is that of torch
        if not factor >= 1:  # also for what is no number, which torch spreads too
            for gradient in gradients.values():
                gradient.mul_(factor)
    return norm


def _square(gradient: Tensor) -> Tensor:
    """Of its norm; of a part such that the mean over the ranks of its mesh is that of the whole."""
    sharded: Any = gradient
    parts = 1
    if not is_sharded(gradient):
        norm: Tensor = torch.linalg.vector_norm(gradient)
    elif any(it.is_partial() for it in sharded.placements):
        norm = full(torch.linalg.vector_norm(gradient))
    else:
        pairs = zip(sharded.device_mesh.shape, sharded.placements, strict=True)
        parts = math.prod(size for size, placement in pairs if not placement.is_replicate())
        norm = torch.linalg.vector_norm(local(gradient))
    return parts * norm.double().square()

"""Clipping by the norm of all gradients of the model, which are spread over stages and copied on replicas.

Each rank adds its share of every parameter that it holds, so that one small allreduce gives all ranks the
norm that `torch.nn.utils.clip_grad_norm_` finds in serial training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arborcast.synth.errors import InputError


def clip_gradients(
    parameters: Mapping[str, nn.Parameter],
    max_norm: float,
    *,
    group: dist.ProcessGroup | None = None,
    replicas: int = 1,
    ties: Mapping[str, int] | None = None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> float:
    """Scale all gradients, in place, so that together their norm is at most `max_norm`.

    Every rank of the group calls it once the gradients are summed over replicas and ties.

    Args:
        parameters: of this rank's stage by name, each once; empty on a rank without work.
        max_norm: the limit.
        group: of all ranks of the job; None for the default group, or this process alone without one.
        replicas: number of ranks that hold this stage.
        ties: number of ranks that hold a parameter, for those on several stages (`TieGroups.holders`).
        norm_type: exponent of the norm, positive; `math.inf` for the largest magnitude.
        error_if_nonfinite: whether a norm that is infinite or no number raises; on all ranks then.

    Returns:
        The norm before clipping.

    Raises:
        InputError: a value is out of range, or the norm is not finite and must be.
    """
    if not norm_type > 0:
        raise InputError(f"clipping: norm_type must be positive, got {norm_type}")
    if not max_norm >= 0:
        raise InputError(f"clipping: max_norm must not be negative, got {max_norm}")
    if replicas < 1:
        raise InputError(f"clipping: replicas must be at least 1, got {replicas}")
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    with torch.no_grad():
        norms = {
            name: float(torch.linalg.vector_norm(gradient, norm_type)) for name, gradient in gradients.items()
        }
        if math.isinf(norm_type):
            total = _largest(norms, group)
        else:
            holders = dict.fromkeys(norms, replicas) | {
                name: count for name, count in (ties or {}).items() if name in norms
            }
            total = _sum_of_shares(norms, holders, norm_type, group)
        if error_if_nonfinite and not math.isfinite(total):
            raise InputError(f"clipping: the norm of all gradients must be finite, got {total}")
        _scale(list(gradients.values()), max_norm / (total + 1e-6))  # the 1e-6 is that of torch
    return total


def _sum_of_shares(
    norms: Mapping[str, float],
    holders: Mapping[str, int],
    norm_type: float,
    group: dist.ProcessGroup | None,
) -> float:
    try:
        mine = sum(norm**norm_type / holders[name] for name, norm in norms.items())
    except OverflowError:
        mine = math.inf
    total = torch.tensor([mine], dtype=torch.float64)
    _allreduce(total, dist.ReduceOp.SUM, group)
    return float(total.item() ** (1 / norm_type))


def _largest(norms: Mapping[str, float], group: dist.ProcessGroup | None) -> float:
    # A maximum may or may not keep what is no number, hence the second entry.
    numbers = [norm for norm in norms.values() if not math.isnan(norm)]
    largest = torch.tensor([max(numbers, default=0.0), float(len(numbers) < len(norms))], dtype=torch.float64)
    _allreduce(largest, dist.ReduceOp.MAX, group)
    norm, has_nan = largest.tolist()
    return math.nan if has_nan else norm


def _allreduce(tensor: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    if group is not None or dist.is_initialized():
        dist.all_reduce(tensor, op=operation, group=group)


def _scale(gradients: list[Tensor], factor: float) -> None:
    if factor >= 1:  # false for what is no number, which torch spreads too
        return
    for gradient in gradients:
        gradient.mul_(factor)

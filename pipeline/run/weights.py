"""Equal weights at the start of a training: on the replicas of a stage, and of ties on all their stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup | None, source: int) -> None:
    """Give all ranks of a group the values of one of them, in place: one broadcast for each data type.

    It is one of bytes, so that any type goes.

    Args:
        tensors: as many of the same shapes and types on every rank.
        group: of the ranks.
        source: the rank of the job whose values count.
    """
    kinds: defaultdict[torch.dtype, dict[int, Tensor]] = defaultdict(dict)
    for tensor in tensors:
        kinds[tensor.dtype][id(tensor)] = distinct(tensor.detach())
    for members in kinds.values():
        flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in members.values()])
        if not flat.numel():
            continue
        dist.broadcast(flat, source, group=group)
        parts = torch.split(flat, [tensor.numel() * tensor.element_size() for tensor in members.values()])
        for tensor, part in zip(members.values(), parts, strict=True):
            tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


def distinct(tensor: Tensor) -> Tensor:
    """A tensor's values without those that `expand` repeats, which torch does not let be written."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor

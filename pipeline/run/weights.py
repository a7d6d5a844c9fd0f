"""Equal weights on all replicas of a stage at the start of a training."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn


def broadcast_weights(module: nn.Module, group: dist.ProcessGroup, source: int) -> None:
    """Give all replicas the parameters and buffers of one of them: one broadcast for each data type.

    It is one of bytes, so that any type goes.

    Args:
        module: of the stage.
        group: of its replicas.
        source: the rank of the job whose values count.
    """
    kinds: defaultdict[torch.dtype, dict[int, Tensor]] = defaultdict(dict)
    for tensor in (*module.parameters(), *module.buffers()):
        kinds[tensor.dtype][id(tensor)] = distinct(tensor.detach())
    for members in kinds.values():
        tensors = list(members.values())
        flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
        if not flat.numel():
            continue
        dist.broadcast(flat, source, group=group)
        parts = torch.split(flat, [tensor.numel() * tensor.element_size() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


def distinct(tensor: Tensor) -> Tensor:
    """A tensor's values without those that `expand` repeats, which torch does not let be written."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor

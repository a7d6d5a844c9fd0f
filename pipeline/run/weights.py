"""The weights of a rank: of all its stages in one module, and equal to those of its replicas at the start."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Stages(nn.Module):
    """Several stages of a model, whose parameters and buffers keep their names in the whole."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of one module; a shared one under its first name."""
        found = (
            pair for it in self.stages for pair in it.named_parameters(prefix, recurse, remove_duplicate)
        )
        yield from _distinct(found) if remove_duplicate else found

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Likewise."""
        found = (pair for it in self.stages for pair in it.named_buffers(prefix, recurse, remove_duplicate))
        yield from _distinct(found) if remove_duplicate else found

    def state_dict(self, *arguments: Any, **named: Any) -> dict[str, Any]:  # type: ignore[override]
        """Of all stages."""
        return {
            name: it for stage in self.stages for name, it in stage.state_dict(*arguments, **named).items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *arguments: Any, **named: Any) -> Any:
        """Give every stage what it has; nothing may be missing."""
        for stage in self.stages:
            stage.load_state_dict(
                {name: state_dict[name] for name in stage.state_dict()}, *arguments, **named
            )


def joined(stages: Sequence[nn.Module]) -> nn.Module:
    """The stages of a rank as one module; the stage itself where there is one."""
    if len(stages) == 1:
        return stages[0]
    return Stages(stages) if stages else nn.Identity()


def _distinct(found: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for name, it in found:
        if id(it) not in seen:
            seen.add(id(it))
            yield name, it


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

"""The gradients of a stage in one contiguous tensor, so that its replicas need one allreduce a step.

Every parameter's `.grad` is a view of it. Which parameters any backward pass touched travels behind the
gradients in the same collective, because a parameter that one replica used is a used one, as in serial
training, where it would not be skipped by the optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class _Flat:
    """The gradients of all parameters of one type on one device, then one flag for each of them."""

    parameters: tuple[nn.Parameter, ...]
    whole: Tensor
    gradients: Tensor
    flags: Tensor
    views: tuple[Tensor, ...]


class GradientBuffer:
    """Gradients of the trainable ones of `parameters`, contiguous per data type (and device).

    In a step: `zero`, backward passes, `start_allreduce` and `wait` among replicas, `detach_unused`, the
    optimizer. Gradients are dense: an embedding with `sparse=True` adds to a dense gradient here.

    Args:
        parameters: of the stage; those that are frozen now have no place, those given twice have one.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Allocate, in the order of the parameters."""
        kinds: defaultdict[tuple[torch.dtype, torch.device], dict[int, nn.Parameter]] = defaultdict(dict)
        for parameter in parameters:
            if parameter.requires_grad:
                kinds[parameter.dtype, parameter.device][id(parameter)] = parameter
        self._flats = tuple(_flatten(tuple(members.values())) for members in kinds.values())
        self._used: set[int] = set()
        self._works: list[dist.Work] = []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self.mark_used)  # type: ignore[no-untyped-call]
            for parameter in self.parameters
        ]
        self.attach()

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Those with a place."""
        return tuple(parameter for flat in self._flats for parameter in flat.parameters)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All gradients, one flat tensor per data type: to be scaled, clipped, or checked at once."""
        return tuple(flat.gradients for flat in self._flats)

    def attach(self) -> None:
        """Let every `.grad` be its view again: `zero_grad` and `detach_unused` set it to None."""
        for flat in self._flats:
            for parameter, view in zip(flat.parameters, flat.views, strict=True):
                parameter.grad = view

    def zero(self) -> None:
        """Begin a step: all gradients 0 and in place, no parameter used."""
        for flat in self._flats:
            flat.whole.zero_()
        self._used.clear()
        self.attach()

    def mark_used(self, parameter: Tensor) -> None:
        """Say that the parameter has a gradient in this step; backward passes do so by themselves."""
        self._used.add(id(parameter))

    def start_allreduce(self, group: dist.ProcessGroup) -> None:
        """Begin to sum all gradients over the replicas: one collective per data type.

        No backward pass may run until `wait`.
        """
        if self._works:
            raise RuntimeError("gradients: start_allreduce must be followed by wait, got a second start")
        for flat in self._flats:
            flat.flags.copy_(torch.tensor([id(parameter) in self._used for parameter in flat.parameters]))
            work = dist.all_reduce(flat.whole, group=group, async_op=True)
            assert work is not None, "only those outside the group get no work"
            self._works.append(work)

    def wait(self) -> None:
        """Return once the sums are there; at once if no allreduce was started."""
        if not self._works:
            return
        works, self._works = self._works, []
        for work in works:
            work.wait()
        for flat in self._flats:
            for parameter, flag in zip(flat.parameters, flat.flags.tolist(), strict=True):
                if flag:
                    self.mark_used(parameter)

    def used(self) -> tuple[nn.Parameter, ...]:
        """Those that some backward pass since `zero` touched: here, after `wait` on any replica."""
        return tuple(parameter for parameter in self.parameters if id(parameter) in self._used)

    def detach_unused(self) -> None:
        """Set `.grad` of all others to None, so that the optimizer skips them as in serial training."""
        for parameter in self.parameters:
            if id(parameter) not in self._used:
                parameter.grad = None

    def close(self) -> None:
        """Remove the hooks and give every parameter up; its `.grad` becomes None."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self.parameters:
            parameter.grad = None
        self._hooks, self._flats = [], ()


def _flatten(parameters: tuple[nn.Parameter, ...]) -> _Flat:
    sizes = [parameter.numel() for parameter in parameters]
    first = parameters[0]
    whole = torch.zeros(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
    gradients, flags = whole[: sum(sizes)], whole[sum(sizes) :]
    views = tuple(
        part.as_strided(parameter.shape, parameter.stride())
        if _is_dense(parameter)
        else part.view_as(parameter)
        for parameter, part in zip(parameters, torch.split(gradients, sizes), strict=True)
    )
    return _Flat(parameters, whole, gradients, flags, views)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a contiguous range, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True

"""The gradients of a rank; where it has replicas in buckets, each of which one allreduce sums.

There every parameter's `.grad` is a view of its bucket, a contiguous tensor. Which parameters any backward
pass touched travels behind the gradients in the same collective, because a parameter that one replica used is
a used one, as in serial training, where it would not be skipped by the optimizer.

Buckets hold parameters from the last to the first, as backward passes come to them, and begin in this order
on all replicas: within the last backward pass, once all gradients of a bucket are there.

    last backward pass   layer 3   layer 2   layer 1   layer 0
    bucket 0 (2 and 3)                     |--- allreduce ---|
    bucket 1 (0 and 1)                                         |--- allreduce ---|
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arborcast.pipeline.run.prepared_layers import local, over
from arborcast.pipeline.stages import BUCKET_BYTES


@dataclass(frozen=True)
class _Flat:
    """The gradients of parameters of one type on one device, then one flag for each of them."""

    parameters: tuple[nn.Parameter, ...]
    whole: Tensor
    gradients: Tensor
    flags: Tensor
    views: tuple[Tensor, ...]


class Gradients:
    """Gradients of the trainable ones of `parameters` as autograd makes them: of a rank without replicas.

    In a step: `zero`, backward passes, `detach_unused`, the optimizer.

    Args:
        parameters: of the rank; those that are frozen now do not count, those given twice count once.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = tuple({id(it): it for it in parameters if it.requires_grad}.values())
        self._used: set[int] = set()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._add)  # type: ignore[no-untyped-call]
            for parameter in self.parameters
        ]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All gradients that there are: to be scaled, clipped, or checked at once."""
        return tuple(local(it.grad) for it in self.parameters if it.grad is not None)

    def zero(self) -> None:
        """Begin a step: no gradients, no parameter used."""
        for parameter in self.parameters:
            parameter.grad = None
        self._used.clear()

    def mark_used(self, parameter: Tensor) -> None:
        """Say that the parameter has a gradient in this step; backward passes do so by themselves."""
        self._used.add(id(parameter))

    def _add(self, parameter: Tensor) -> None:
        """After a backward pass has added to a gradient."""
        self._used.add(id(parameter))

    def used(self) -> tuple[nn.Parameter, ...]:
        """Those that some backward pass since `zero` touched: here, or on any replica that was asked."""
        return tuple(parameter for parameter in self.parameters if id(parameter) in self._used)

    def detach_unused(self) -> None:
        """Set `.grad` of all others to None, so that the optimizer skips them as in serial training."""
        for parameter in self.parameters:
            if id(parameter) not in self._used:
                parameter.grad = None

    def complete(self) -> None:
        """After the last backward pass of an update."""

    def updated(self) -> None:
        """After the optimizer."""

    def close(self) -> None:
        """Remove the hooks and give every parameter up; its `.grad` becomes None."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self.parameters:
            parameter.grad = None
        self._hooks, self.parameters = [], ()


class SummedGradients(Gradients):
    """Gradients that come summed over all who share a parameter: it is used where it has one."""

    def used(self) -> tuple[nn.Parameter, ...]:
        """Those with a gradient."""
        return tuple(it for it in self.parameters if it.grad is not None)

    def detach_unused(self) -> None:
        """They have none already."""


class ShardedGradients(SummedGradients):
    """Gradients that FSDP2 makes, sums over the replicas and shards, in the last pass of an update.

    Args:
        parameters: as of `Gradients`.
        modules: that FSDP2 sharded, by stage.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], modules: Mapping[int, nn.Module]) -> None:
        super().__init__(parameters)
        self._modules: dict[int, list[Any]] = {
            stage: [it for it in module.modules() if hasattr(it, "set_requires_gradient_sync")]
            for stage, module in modules.items()
        }

    def hold(self) -> None:
        """From now on add gradients up, without sums over the replicas."""
        for stage in self._modules:
            self._let(stage, sum_up=False)

    @contextmanager
    def last_pass(self, stage: int) -> Iterator[None]:
        """Around the last pass of an update: with sums."""
        self._let(stage, sum_up=True)
        yield

    def _let(self, stage: int, *, sum_up: bool) -> None:
        for module in self._modules[stage]:
            module.set_requires_gradient_sync(sum_up)
            module.set_is_last_backward(sum_up)


class GradientBuffer(Gradients):
    """Gradients of the trainable ones of `parameters`, in buckets per data type (and device).

    In a step: `zero`, backward passes (the last ones inside `last_pass`), `start_allreduce` and `wait` among
    replicas, `detach_unused`, the optimizer. Gradients are dense: an embedding with `sparse=True` adds to a
    dense gradient here.

    Args:
        parameters: as of `Gradients`.
        bucket_bytes: a parameter that would make a bucket larger begins the next one; None for
            `BUCKET_BYTES`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], bucket_bytes: int | None = None) -> None:
        """Allocate, the bucket of the last parameters first."""
        super().__init__(parameters)
        kinds: defaultdict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
        for parameter in self.parameters:
            kinds[parameter.dtype, parameter.device].append(parameter)
        most = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        self._flats = tuple(
            _flatten(bucket) for members in kinds.values() for bucket in _buckets(members, most)
        )
        self._bucket = {id(it): index for index, flat in enumerate(self._flats) for it in flat.parameters}
        self._works: list[dist.Work] = []
        self._group: dist.ProcessGroup | None = None
        self._expected: Counter[int] = Counter()  # by parameter, stages that give it a gradient
        self._left: list[int] = []  # by bucket, gradients that are still to be given
        self._own: set[int] = set()  # parameters of the stage whose last pass runs
        self._given: set[int] = set()  # those of them that have their gradient
        self._is_known = False  # whether last passes have run, all of which gave each gradient once
        self._is_once = True
        self._is_complete = False
        self.began_ns: int | None = None
        self.attach()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All gradients, one flat tensor per bucket: to be scaled, clipped, or checked at once."""
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

    def expect(self, group: dist.ProcessGroup, stages: Iterable[Iterable[nn.Parameter]]) -> None:
        """Let buckets begin to be summed within the last passes of these stages, one by one."""
        self._group = group
        known = [id(it) for own in stages for it in {id(it): it for it in own}.values()]
        self._expected = Counter(it for it in known if it in self._bucket)
        self._left = [sum(self._expected[id(it)] for it in flat.parameters) for flat in self._flats]

    @contextmanager
    def last_pass(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Around the last pass of one of the stages, which holds these parameters; `expect` comes before.

        Buckets begin inside it only if none of the last passes before gave a gradient in parts (as reentrant
        checkpoints do).

        Raises:
            RuntimeError: a gradient is given in parts, for the first time, and its bucket has begun.
        """
        self._own = {id(it) for it in parameters} & self._expected.keys()
        self._given = set()
        yield
        self._own, rest = set(), self._own - self._given
        for it in (*rest, *(() if self._is_early else self._given)):
            self._left[self._bucket[it]] -= 1
        self._begin()

    @property
    def _is_early(self) -> bool:
        return self._is_known and self._is_once

    def _add(self, parameter: Tensor) -> None:
        """After a backward pass has added to a gradient."""
        number = id(parameter)
        self._used.add(number)
        if number not in self._own:
            return
        if number in self._given:
            if self._bucket[number] < len(self._works):
                raise RuntimeError(
                    f"gradients: that of a parameter of shape {tuple(parameter.shape)} must come at once, "
                    "got a second part after its sum over the replicas had begun"
                )
            self._is_once = False
        self._given.add(number)
        if self._is_early:
            self._left[self._bucket[number]] -= 1
            self._begin()

    def _begin(self, *, all_of_them: bool = False) -> None:
        """Start the next buckets that are complete: in their order, which is the same on all replicas."""
        while len(self._works) < len(self._flats):
            flat = self._flats[len(self._works)]
            if not all_of_them and self._left[len(self._works)]:
                break
            if self.began_ns is None:
                self.began_ns = time.perf_counter_ns()
            used = torch.tensor([id(parameter) in self._used for parameter in flat.parameters])
            flat.flags.copy_(used, non_blocking=True)
            work = dist.all_reduce(flat.whole, group=self._group, async_op=True)
            assert work is not None, "only those outside the group get no work"
            self._works.append(work)

    def start_allreduce(self, group: dist.ProcessGroup) -> None:
        """Begin to sum the gradients of all buckets that have not begun, over the replicas.

        No backward pass may run until `wait`.
        """
        if self._is_complete:
            raise RuntimeError("gradients: start_allreduce must be followed by wait, got a second start")
        self._group, self._is_complete = group, True
        self._is_known = bool(self._expected)
        self._begin(all_of_them=True)

    def wait(self) -> None:
        """Return once the sums are there; at once if no allreduce was started."""
        works, self._works = self._works, []
        self._is_complete, self.began_ns = False, None
        if not works:
            return
        for work in works:
            work.wait()
        flags = torch.cat([flat.flags.double() for flat in self._flats]).cpu().tolist()
        parameters = [parameter for flat in self._flats for parameter in flat.parameters]
        for parameter, flag in zip(parameters, flags, strict=True):
            if flag:
                self.mark_used(parameter)

    def close(self) -> None:
        """As without buckets, which are let go of too."""
        super().close()
        self._flats, self._bucket = (), {}


def _buckets(parameters: Sequence[nn.Parameter], most_bytes: int) -> Iterator[tuple[nn.Parameter, ...]]:
    """From the last parameters to the first ones, each in their order; a bucket holds at least one."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in reversed(parameters):
        nbytes = local(parameter).nbytes
        if bucket and size + nbytes > most_bytes:
            yield tuple(reversed(bucket))
            bucket, size = [], 0
        bucket.append(parameter)
        size += nbytes
    yield tuple(reversed(bucket))


def _flatten(parameters: tuple[nn.Parameter, ...]) -> _Flat:
    parts = [local(parameter.detach()) for parameter in parameters]
    is_dense = torch.ops.aten.is_non_overlapping_and_dense.default  # in whatever order of dimensions
    sizes, first = [part.numel() for part in parts], parts[0]
    whole = torch.zeros(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
    gradients, flags = whole[: sum(sizes)], whole[sum(sizes) :]
    places = (
        place.as_strided(part.shape, part.stride()) if is_dense(part) else place.view_as(part)
        for part, place in zip(parts, torch.split(gradients, sizes), strict=True)
    )
    views = tuple(over(place, parameter) for place, parameter in zip(places, parameters, strict=True))
    return _Flat(parameters, whole, gradients, flags, views)

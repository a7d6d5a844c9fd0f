"""Batch norm that normalises over the whole microbatch where the replicas of a stage divide it by samples.

Every replica gathers the mean, the sum of squared deviations and the count of each one's share and merges
them (Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample variances, 1979);
its backward pass sums two numbers per channel over the replicas. (torch's `SyncBatchNorm` is for GPUs.)
Modules and traced graphs alike: `BatchNorms` is a mode of torch in which calls of batch norm are answered so.

Deferred, running statistics change once a batch, by the mean and variance over all of its microbatches (as in
torchgpipe; Kim et al., arXiv 2004.09910): those of a first norm are then what serial training gives.
Normalisation stays within each microbatch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from arborcast.backends.tensors.torch_compat import all_gather_single
from arborcast.pipeline.errors import BatchError, PartitionError
from arborcast.pipeline.run.initial_weights import distinct

_ATEN = torch.ops.aten

_CALLS: Mapping[Callable[..., Any], tuple[str, ...]] = {
    nn.functional.batch_norm: (
        *("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    ),
    _ATEN.batch_norm.default: tuple(it.name for it in _ATEN.batch_norm.default._schema.arguments),
}
"""What modules and graphs call, with the names of its arguments: those of both mean the same."""

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

_REFUSED = tuple(
    getattr(_ATEN, name)
    for name in (
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_functional",
        "_batch_norm_with_update",
        "_batch_norm_with_update_functional",
        "cudnn_batch_norm",
    )
)
"""What only a decomposed graph calls."""


@dataclass(frozen=True, slots=True)
class _Update:
    """What one call of a norm saw: of all replicas, the mean, the sum of squared deviations, the count."""

    running: tuple[Tensor | None, Tensor | None]
    momentum: float
    row: Tensor


class BatchNorms(TorchFunctionMode):
    """The mode in which a stage runs: its batch norms normalise over the samples of all replicas.

    Every replica must run the stage as often as the others; in eval mode nothing is exchanged.

    Args:
        module: of the stage.
        group: of exactly the replicas; None for a stage without any.
        is_deferred: whether running statistics change at the end of a batch, and not in each forward pass.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None, *, is_deferred: bool) -> None:
        super().__init__()
        self._module, self._group, self._is_deferred = module, group, is_deferred
        self._seen: dict[int, list[_Update]] = {}
        self._counts: dict[str, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Answer a call of batch norm; let others pass."""
        names = _CALLS.get(func)
        if names is None:
            return func(*args, **(kwargs or {}))
        return self._norm(**(dict(zip(names, args, strict=False)) | (kwargs or {})))

    def _norm(
        self,
        input: Tensor,  # noqa: A002 (torch's name for it)
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
        cudnn_enabled: bool = True,
    ) -> Tensor:
        """As `torch.nn.functional.batch_norm`; every replica calls it with its share."""
        if not training and running_mean is not None and running_var is not None:
            return nn.functional.batch_norm(input, running_mean, running_var, weight, bias, False, 0.0, eps)
        made = _Normalise.apply(input, weight, bias, eps, self._group)  # type: ignore[no-untyped-call]
        result, mean, squares, total = made
        if self._is_deferred and running_mean is not None:
            row = torch.cat([mean, squares, total.view(1)])
            update = _Update((running_mean, running_var), momentum, row)
            self._seen.setdefault(id(running_mean), []).append(update)
        elif not self._is_deferred:
            _move((running_mean, running_var), (mean, squares, total), momentum)
        assert isinstance(result, Tensor)
        return result

    def begin(self) -> None:
        """Before the passes of a batch in training."""
        self._seen.clear()
        self._counts = {name: it.clone() for name, it in self._counters()}

    @property
    def calls(self) -> dict[int, int]:
        """How many were deferred, of each norm."""
        return {key: len(updates) for key, updates in self._seen.items()}

    def forget(self, calls: dict[int, int]) -> None:
        """All but the first ones of each norm: others are of a pass that is repeated for its gradients."""
        for key, updates in self._seen.items():
            del updates[calls.get(key, 0) :]

    def end(self, microbatches: int) -> None:
        """After the passes of a batch: deferred, a norm counts once for each call in one forward pass.

        The momentum is that of the first microbatch: for an average over all batches, the right one.
        """
        for name, counter in self._counters():
            counter.copy_(self._counts[name] + (counter - self._counts[name]) // microbatches)
        for updates in self._seen.values():
            each = len(updates) // microbatches
            for call in range(each):
                rows = torch.stack([it.row for it in updates[call::each]])
                seen = _merge(rows, rows.shape[1] // 2)
                _move(updates[call].running, seen, updates[call].momentum)
        self._seen.clear()

    def _counters(self) -> list[tuple[str, Tensor]]:
        return [
            (name, buffer)
            for name, buffer in self._module.named_buffers()
            if self._is_deferred and name.rpartition(".")[2] == "num_batches_tracked"
        ]


def _move(
    running: tuple[Tensor | None, Tensor | None], seen: tuple[Tensor, Tensor, Tensor], momentum: float
) -> None:
    mean, squares, total = seen
    with torch.no_grad():
        for old, value in zip(running, (mean, squares / (total - 1)), strict=True):
            if old is not None:
                old.copy_((1 - momentum) * old.double() + momentum * value)


class _Normalise(torch.autograd.Function):
    """Normalise by the statistics of all replicas' samples: the output, mean, variance sum and count."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = _all_but_channels(x)
        exact = x if x.dtype == torch.float64 else x.float()
        variance, mean = torch.var_mean(exact, dims, correction=0)
        count = x.numel() // x.shape[1]
        row = torch.cat(
            [mean.double(), variance.double() * count, mean.new_full((1,), count, dtype=torch.float64)]
        )
        merged_mean, squares, total = _merge(_gathered(row, group), x.shape[1])
        if count <= 1 and total.item() <= 1:  # where it is sure, nothing is waited for
            raise BatchError(
                f"batch norm: a microbatch must have more than 1 value per channel, got {tuple(x.shape)}"
            )
        mean = merged_mean.to(exact.dtype)
        inverse = (squares / total + eps).rsqrt().to(exact.dtype)
        ctx.save_for_backward(x, weight, mean, inverse, total)
        ctx.group = group
        scale = inverse if weight is None else inverse * weight.to(exact.dtype)
        result = (exact - _wide(mean, x)) * _wide(scale, x)
        if bias is not None:
            result = result + _wide(bias.to(exact.dtype), x)
        ctx.mark_non_differentiable(merged_mean, squares, total)
        return result.to(x.dtype), merged_mean, squares, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, total = ctx.saved_tensors
        dims = _all_but_channels(x)
        gradient = gradient.to(mean.dtype)
        normal = (x.to(mean.dtype) - _wide(mean, x)) * _wide(inverse, x)
        sums = torch.stack([gradient.sum(dims), (gradient * normal).sum(dims)]).double()
        # Those of weight and bias stay this replica's own: they are summed with all other gradients.
        to_weight = sums[1].to(weight) if weight is not None and ctx.needs_input_grad[1] else None
        to_bias = sums[0].to(mean) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, to_weight, to_bias, None, None
        whole = sums.clone()
        if ctx.group is not None:
            dist.all_reduce(whole, group=ctx.group)
        along, across = (whole / total).to(mean.dtype)
        scale = inverse if weight is None else inverse * weight.to(mean.dtype)
        to_x = (gradient - _wide(along, x) - normal * _wide(across, x)) * _wide(scale, x)
        return to_x.to(x.dtype), to_weight, to_bias, None, None


def _gathered(row: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The rows of all replicas, in the order of their ranks."""
    if group is None:
        return row.view(1, -1)
    rows = row.new_empty(dist.get_world_size(group) * row.numel())
    all_gather_single(rows, row, group=group)
    return rows.view(-1, row.numel())


def _merge(rows: Tensor, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """The mean, the sum of squared deviations and the count of all shares, each a row of these."""
    counts = rows[:, -1:]
    total = counts.sum()
    mean = (rows[:, :channels] * counts).sum(0) / total
    squares = (rows[:, channels:-1] + counts * (rows[:, :channels] - mean).square()).sum(0)
    return mean, squares, total


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _wide(values: Tensor, x: Tensor) -> Tensor:
    """One value per channel, in a shape that combines with x."""
    return values.view(1, -1, *([1] * (x.dim() - 2)))


def find_batch_norm(module: nn.Module) -> tuple[str, ...]:
    """Names of the batch norms in a module, and of the calls of batch norm in traced graphs.

    Calls of functional batch norm inside a module's own `forward` cannot be seen.

    Raises:
        PartitionError: a batch norm that `BatchNorms` does not answer, which would normalise over this rank's
            samples only.
    """
    where = "on a replicated stage, or deferred, must be"
    found = []
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            if type(part) not in _KINDS:
                raise PartitionError(
                    f"batch norm {name}: {where} nn.BatchNorm1d, 2d or 3d, got {type(part).__name__}"
                )
            found.append(name)
        for at in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if getattr(at.target, "overloadpacket", at.target) in _REFUSED:
                raise PartitionError(
                    f"batch norm {name}.{at.name}: {where} a call of aten.batch_norm, got {at.target}"
                )
            if at.op == "call_function" and at.target in _CALLS:
                found.append(f"{name}.{at.name}".lstrip("."))
    return tuple(found)


@contextlib.contextmanager
def statistics_once(module: nn.Module, norms: BatchNorms | None = None) -> Iterator[None]:
    """What a forward pass does to buffers inside the block is undone at its end.

    For the forward pass that recomputation repeats, so that running statistics count each microbatch once:

        contexts = lambda: (nullcontext(), statistics_once(module))
        checkpoint(module, x, use_reentrant=False, context_fn=contexts)
    """
    before = [
        (owner, name, buffer, distinct(buffer.detach()).clone())
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    calls = {} if norms is None else norms.calls
    try:
        with norms or contextlib.nullcontext():
            yield
    finally:
        if norms is not None:
            norms.forget(calls)
        for owner, name, buffer, value in before:
            setattr(owner, name, buffer)  # in case another tensor was put in its place
            # Not buffer.copy_: other microbatches' backward passes hold the buffer, and autograd would
            # refuse them if its version changed; batch norm itself does not change it either.
            distinct(buffer.data).copy_(value)

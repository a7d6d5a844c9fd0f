"""Batch norm that normalises over the whole microbatch where the replicas of a stage divide it by samples.

Every replica gathers the mean, the sum of squared deviations and the count of each one's share and merges
them (Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for computing sample variances, 1979);
its backward pass sums two numbers per channel over the replicas. Modules and traced graphs alike.

Deferred, running statistics change once a batch, by the mean and variance over all of its microbatches (as in
torchgpipe; Kim et al., arXiv 2004.09910): those of a first norm are then what serial training gives.
Normalisation stays within each microbatch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable

from arborcast.backends.tensors.torch_compat import all_gather_single
from arborcast.pipeline.errors import BatchError, PartitionError
from arborcast.pipeline.run.initial_weights import distinct

_TRACED = (torch.ops.aten.batch_norm.default, nn.functional.batch_norm)
"""What a graph may call: from torch.export, from fx."""

_REFUSED = tuple(
    getattr(torch.ops.aten, name)
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
    momentum: float | None
    row: Tensor


class DeferredStatistics:
    """Running statistics of a stage, which change at the end of a batch and not in each forward pass."""

    def __init__(self, module: nn.Module) -> None:
        """Of a module whose norms have been changed to defer."""
        self._module = module
        self._seen: dict[int, list[_Update]] = {}
        self._counts: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Before the passes of a batch."""
        self._seen.clear()
        self._counts = {name: it.clone() for name, it in self._counters()}

    def add(self, update: _Update) -> None:
        """After a call of a norm; a pass that is repeated for its gradients calls `forget` behind it."""
        self._seen.setdefault(id(update.running[0]), []).append(update)

    @property
    def calls(self) -> dict[int, int]:
        """How many there were, of each norm."""
        return {key: len(updates) for key, updates in self._seen.items()}

    def forget(self, calls: dict[int, int]) -> None:
        """All but the first ones of each norm."""
        for key, updates in self._seen.items():
            del updates[calls.get(key, 0) :]

    def end(self, microbatches: int) -> None:
        """After the passes of a batch: every norm counts once for each call in one forward pass."""
        with torch.no_grad():
            for name, counter in self._counters():
                counter.copy_(self._counts[name] + (counter - self._counts[name]) // microbatches)
            norms = [norm for _, norm in _modules(self._module) if isinstance(norm, _ReplicaNorm)]
            counted = {id(norm.running_mean): norm.num_batches_tracked for norm in norms}
            for key, updates in self._seen.items():
                each = len(updates) // microbatches
                for call in range(each):
                    rows = torch.stack([it.row for it in updates[call::each]])
                    mean, squares, total = _merge(rows, rows.shape[1] // 2)
                    momentum = updates[call].momentum
                    if momentum is None:  # the average over all batches
                        count = counted[key]
                        assert count is not None, "it counts, as it keeps running statistics"
                        momentum = 1.0 / (count.item() - (each - 1 - call))
                    for running, value in zip(
                        updates[call].running, (mean, squares / (total - 1)), strict=True
                    ):
                        _move(running, value, momentum)
        self._seen.clear()

    def _counters(self) -> list[tuple[str, Tensor]]:
        return [
            (name, buffer)
            for name, buffer in self._module.named_buffers()
            if name.rpartition(".")[2] == "num_batches_tracked"
        ]


def _move(running: Tensor | None, value: Tensor, momentum: float) -> None:
    if running is not None:
        running.copy_((1 - momentum) * running.double() + momentum * value)


class ReplicaGroup:
    """The replicas of a stage; a copy of a module keeps talking to the same ones.

    Args:
        group: of exactly the replicas; None for a stage without any.
        deferred: where running statistics wait for the end of the batch; None where they do not.
    """

    def __init__(self, group: dist.ProcessGroup | None, deferred: DeferredStatistics | None = None) -> None:
        self.group = group
        self.deferred = deferred

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicaGroup:
        """The same: a process group cannot be copied."""
        return self

    def gather(self, row: Tensor) -> Tensor:
        """The rows of all replicas, in the order of their ranks."""
        if self.group is None:
            return row.view(1, -1)
        rows = row.new_empty(dist.get_world_size(self.group) * row.numel())
        all_gather_single(rows, row, group=self.group)
        return rows.view(-1, row.numel())

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over replicas, in place."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor


class _Normalise(torch.autograd.Function):
    """Normalise by the statistics of all replicas' samples: the output, mean, variance sum and count."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, replicas: ReplicaGroup
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = _all_but_channels(x)
        exact = x if x.dtype == torch.float64 else x.float()
        variance, mean = torch.var_mean(exact, dims, correction=0)
        count = x.numel() // x.shape[1]
        row = torch.cat(
            [mean.double(), variance.double() * count, mean.new_tensor([count], dtype=torch.float64)]
        )
        merged_mean, squares, total = _merge(replicas.gather(row), x.shape[1])
        if total.item() <= 1:
            raise BatchError(
                f"batch norm: a microbatch must have more than 1 value per channel, got {tuple(x.shape)}"
            )
        mean = merged_mean.to(exact.dtype)
        inverse = (squares / total + eps).rsqrt().to(exact.dtype)
        ctx.save_for_backward(x, weight, mean, inverse, total)
        ctx.replicas = replicas
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
        along, across = (ctx.replicas.sum(sums.clone()) / total).to(mean.dtype)
        scale = inverse if weight is None else inverse * weight.to(mean.dtype)
        to_x = (gradient - _wide(along, x) - normal * _wide(across, x)) * _wide(scale, x)
        return to_x.to(x.dtype), to_weight, to_bias, None, None


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


def replica_batch_norm(
    replicas: ReplicaGroup,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
) -> Tensor:
    """`torch.nn.functional.batch_norm` of all replicas' samples; every replica calls it with its share."""
    if not training and running_mean is not None and running_var is not None:
        return nn.functional.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps)
    result, mean, squares, total = _Normalise.apply(x, weight, bias, eps, replicas)  # type: ignore[no-untyped-call]
    if replicas.deferred is None:
        with torch.no_grad():
            assert momentum is not None, "the caller knows how many batches there were"
            _move(running_mean, mean, momentum)
            _move(running_var, squares / (total - 1), momentum)
    elif running_mean is not None:
        row = torch.cat([mean, squares, total.view(1)])
        replicas.deferred.add(_Update((running_mean, running_var), momentum, row))
    assert isinstance(result, Tensor)
    return result


class _ReplicaNorm(nn.modules.batchnorm._BatchNorm):
    """What a batch norm of a replicated stage becomes, in place."""

    replicas: ReplicaGroup

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name for it)
        """As `torch.nn.BatchNorm*d`, over all replicas' samples."""
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        momentum = self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None and self.replicas.deferred is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        tracks = not self.training or self.track_running_stats
        return replica_batch_norm(
            self.replicas,
            input,
            self.running_mean if tracks else None,
            self.running_var if tracks else None,
            self.weight,
            self.bias,
            self.training or (self.running_mean is None and self.running_var is None),
            momentum,
            self.eps,
        )


class _ReplicaNorm1d(_ReplicaNorm, nn.BatchNorm1d):
    pass


class _ReplicaNorm2d(_ReplicaNorm, nn.BatchNorm2d):
    pass


class _ReplicaNorm3d(_ReplicaNorm, nn.BatchNorm3d):
    pass


_SYNCHRONISED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: _ReplicaNorm1d,
    nn.BatchNorm2d: _ReplicaNorm2d,
    nn.BatchNorm3d: _ReplicaNorm3d,
}
_PLAIN = {theirs: plain for plain, theirs in _SYNCHRONISED.items()}


class _TracedNorm:
    """What a call of batch norm in a graph becomes; `__name__` and `__module__` are for generated code."""

    __name__ = "traced_batch_norm"

    def __init__(self, replicas: ReplicaGroup, original: Callable[..., Any]) -> None:
        self.replicas = replicas
        self.original = original

    def __deepcopy__(self, memo: dict[int, Any]) -> _TracedNorm:
        return self

    def aten(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool = True,
    ) -> Tensor:
        """With the arguments of `aten.batch_norm`."""
        return replica_batch_norm(
            self.replicas, x, running_mean, running_var, weight, bias, training, momentum, eps
        )

    def functional(
        self,
        input: Tensor,  # noqa: A002 (torch's name for it)
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """With the arguments of `torch.nn.functional.batch_norm`."""
        return replica_batch_norm(
            self.replicas, input, running_mean, running_var, weight, bias, training, momentum, eps
        )

    def __call__(self, *arguments: Any, **named: Any) -> Tensor:
        """As the call that it replaces."""
        same = self.aten if self.original is torch.ops.aten.batch_norm.default else self.functional
        return same(*arguments, **named)


def find_batch_norm(module: nn.Module) -> tuple[str, ...]:
    """Names of the batch norms in a module, and of the calls of batch norm in traced graphs."""
    return tuple(name for name, _ in _modules(module)) + tuple(
        f"{where}.{at.name}".lstrip(".") for where, _, at in _calls(module)
    )


def synchronise_batch_norm(
    module: nn.Module, group: dist.ProcessGroup | None, deferred: DeferredStatistics | None = None
) -> int:
    """Let every batch norm in a module normalise over the samples of all replicas, in place.

    Names, parameters, buffers and `state_dict` stay. From then on every replica must run the module as often
    as the others; in eval mode nothing is exchanged. Calls of functional batch norm inside a module's own
    `forward` cannot be seen.

    Args:
        module: with `nn.BatchNorm1d`, `2d` or `3d`, or graphs of torch.export or fx that call them.
        group: of exactly the replicas of the stage; None for one rank, for `deferred` alone.
        deferred: where running statistics wait for the end of the batch; None where they do not.

    Returns:
        How many it changed.

    Raises:
        PartitionError: a batch norm of another kind, which would normalise over this rank's samples only.
    """
    modules, calls = _modules(module), _calls(module)
    for name, norm in modules:
        if type(norm) not in _SYNCHRONISED and type(norm) not in _PLAIN:
            raise PartitionError(
                f"batch norm {name}: on a replicated stage, or deferred, must be nn.BatchNorm1d, 2d or 3d, "
                f"got {type(norm).__name__}"
            )
    for where, _, at in calls:
        if at.target not in _TRACED and not isinstance(at.target, _TracedNorm):
            raise PartitionError(
                f"batch norm {where}.{at.name}: on a replicated stage, or deferred, must be a call of "
                f"aten.batch_norm, got {at.target}"
            )
    replicas = ReplicaGroup(group, deferred)
    for _, norm in modules:
        norm.__class__ = _SYNCHRONISED.get(type(norm), type(norm))
        norm.replicas = replicas  # type: ignore[assignment]
    for _, _, at in calls:
        original = at.target.original if isinstance(at.target, _TracedNorm) else at.target
        at.target = _TracedNorm(replicas, original)  # type: ignore[arg-type]
    for graph in {id(graph): graph for _, graph, _ in calls}.values():
        graph.recompile()
    return len(modules) + len(calls)


def restore_batch_norm(module: nn.Module) -> None:
    """Undo `synchronise_batch_norm`: every batch norm sees this rank's samples only."""
    for _, norm in _modules(module):
        if type(norm) in _PLAIN:
            norm.__class__ = _PLAIN[type(norm)]
            del norm.replicas
    for _, graph, at in _calls(module):
        if isinstance(at.target, _TracedNorm):
            at.target = at.target.original
            graph.recompile()


@contextlib.contextmanager
def statistics_once(module: nn.Module, deferred: DeferredStatistics | None = None) -> Iterator[None]:
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
    calls = {} if deferred is None else deferred.calls
    try:
        yield
    finally:
        if deferred is not None:
            deferred.forget(calls)
        for owner, name, buffer, value in before:
            setattr(owner, name, buffer)  # in case another tensor was put in its place
            # Not buffer.copy_: other microbatches' backward passes hold the buffer, and autograd would
            # refuse them if its version changed; batch norm itself does not change it either.
            distinct(buffer.data).copy_(value)


def _modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    kinds = (nn.modules.batchnorm._BatchNorm,)
    return [(name, found) for name, found in module.named_modules() if isinstance(found, kinds)]


def _calls(module: nn.Module) -> list[tuple[str, fx.GraphModule, fx.Node]]:
    """Calls of batch norm in the graphs of a module: where, in which graph, the call."""
    found = []
    for name, graph in module.named_modules():
        if isinstance(graph, fx.GraphModule):
            found += [(name, graph, at) for at in graph.graph.nodes if _is_batch_norm(at)]
    return found


def _is_batch_norm(at: fx.Node) -> bool:
    if at.op != "call_function":
        return False
    if at.target in _TRACED or isinstance(at.target, _TracedNorm):
        return True
    return getattr(at.target, "overloadpacket", at.target) in _REFUSED

"""Losses of the last stage: what the loss function returned, weighed, and seen to be what was promised.

A mean over samples can be put together from the means of parts; a mean over tokens, or one weighted by
class, cannot, because parts of as many samples weigh differently. Such a loss returns its sum and its weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from arborcast.pipeline.errors import first_line
from arborcast.pipeline.model.module_structure import Structure, flatten
from arborcast.pipeline.run.batches import Tensors, as_tuple, spread_dims
from arborcast.synth.errors import InputError

REDUCTIONS = ("mean", "sum")
"""What a loss function that returns one number does over the samples that it is given."""

LossFunction: TypeAlias = Callable[[Any, Any], Any]
"""Of output and targets: one number, or a pair of the sum of the losses and the weight that divides it."""

SHARE = "share"
"""The reduction of a model's own loss: a share's part of the loss of the whole batch."""

_TOLERANCE = 1e-5
"""Of gradients in float32, which differ by the rounding of one division."""

FIRST = 4
"""Batches of a shape of which every share is checked."""

EVERY = 17
"""Behind them, of so many shares one is. A prime, so that each microbatch of a batch has its turn."""


@dataclass
class Losses:
    """How losses of the last stage are computed, and those of the step.

    Attributes:
        function: of a microbatch's output and targets.
        reduction: one of `REDUCTIONS`, of a function that returns one number; or `SHARE`.
        counts: samples of this rank's share, by microbatch.
        samples: of all that the mean counts: of a batch, times the batches of an update.
        scale: makes of a weighted loss what backward passes begin with.
        autocast: makes the context of the function.
        check: whether to see that the function is what `reduction` says: for all shares of the `FIRST`
            batches, for those with a target below or above all that were checked (as padding often is), and
            for one in `EVERY` others.
        dims: which dimension of the tensors of an output counts samples; one for all, or one for each.
        batches: how many an update is for.
        reference: the targets of one sample of the batch, the same on all replicas.
        unit: that sums are divided by until the weight of the whole update is known.
        metrics: what else is told of output and targets, by name; likewise one number, a mean, or a pair.
        found: a sum and what divides it, samples where a function returned one number: of the losses of the
            share by microbatch, and by name of each metric over all shares.
        pairs: how many times the function returned a pair.
        keeps: whether outputs are kept.
        outputs: of the shares, by microbatch, where they are.
    """

    function: LossFunction
    reduction: str
    counts: Sequence[int]
    samples: int
    scale: Callable[[Tensor], Tensor]
    autocast: Callable[[], AbstractContextManager[Any]]
    check: bool = False
    dims: Sequence[int] = (0,)
    batches: int = 1
    reference: Tensors | None = None
    unit: float = 1.0
    metrics: Mapping[str, LossFunction] = field(default_factory=dict)
    found: dict[int | str, tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)
    pairs: int = 0
    keeps: bool = False
    outputs: dict[int, Any] = field(default_factory=dict)
    _made: tuple[Any, Tensor | float | None] = (
        None,
        None,
    )  # the output and the weight of what is to be added
    _given: Sequence[Any] = ()
    _batches: int = 0
    _shares: int = 0
    _checked: list[tuple[float, float]] = field(default_factory=list)  # least and greatest, by tensor

    def begin(self, reference: Tensors | None, unit: float, given: Sequence[Any] = ()) -> None:
        """A new step; `given` are the targets of each microbatch where the caller has them."""
        self.reference, self.unit, self._given = reference, unit, given
        self.found = dict.fromkeys(self.metrics, (0.0, 0.0))
        self.outputs.clear()
        self.pairs = 0
        self._batches += 1

    def totals(self) -> Tensor:
        """The sums of losses and metrics, then what divides each of them, in host memory.

        Until now the host has waited for none of them.
        """
        keys: tuple[int | str, ...] = (*range(len(self.counts)), *self.metrics)
        numbers = [self.found[key][at] for at in (0, 1) for key in keys]
        there = torch.stack([it.double() for it in numbers if isinstance(it, Tensor)]).cpu()
        values = iter(there.tolist())
        made = [next(values) if isinstance(it, Tensor) else it for it in numbers]
        return torch.tensor(made, dtype=torch.float64)

    def of(self, targets: Any, microbatch: int, output: Any) -> Tensor:
        """What the function gives for one microbatch, to be added; in a checkpoint it is called again later.

        Raises:
            InputError: it is neither one number nor a pair.
        """
        with self.autocast():
            loss, weight = _sum_and_weight(self.function(output, targets))
        if microbatch not in self.found:
            looks = self.check or self.metrics or self.keeps
            self._made = _detached(output) if looks else None, weight
        return loss

    def add(self, loss: Tensor, targets: Any, microbatch: int) -> Tensor:
        """The loss of one microbatch: what its backward pass begins with.

        Raises:
            InputError: it is not what was promised.
        """
        (output, weight), self._made = self._made, (None, None)
        if weight is not None and self.reduction == "sum":
            raise InputError("loss_fn: must return one number for loss_reduction sum, got a pair")
        count = self.counts[microbatch]
        if self.check and self.reference is not None:
            reduction = "pair" if weight is not None else self.reduction
            self._check(reduction, output, targets, self.reference, count, microbatch)
        if self.metrics or self.keeps:
            self._measure(output, targets, microbatch)
        value = loss.detach().double()
        if loss.dtype in (torch.float16, torch.bfloat16):
            loss = loss.float()  # the weight may be too small for float16, or the scale too large
        if weight is not None:
            self.pairs += 1
            self.found[microbatch] = value, weight
            loss = loss / self.unit
        elif self.reduction == "mean":
            self.found[microbatch] = value * count, count
            loss = loss * (count / self.samples)
        else:
            self.found[microbatch] = value, count
            if self.reduction == SHARE:
                loss = loss / self.batches
        return self.scale(loss)

    def _measure(self, output: Any, targets: Any, microbatch: int) -> None:
        """What else is asked of the outputs of a share; none of it is differentiated.

        Raises:
            InputError: a metric is neither one number nor a pair.
        """
        if self.keeps:
            self.outputs[microbatch] = output
        for name, metric in self.metrics.items():
            with torch.no_grad(), self.autocast():
                found = metric(output, targets)
            value, weight = _sum_and_weight(found, f"metrics[{name!r}]")
            count = self.counts[microbatch]
            value = value.double()
            both = (value * count, count) if weight is None else (value, weight)
            before = self.found[name]
            self.found[name] = before[0] + both[0], before[1] + both[1]

    def _check(
        self, reduction: str, output: Any, targets: Any, reference: Tensors, count: int, microbatch: int
    ) -> None:
        """Check the function for a share whose turn it is, or which has targets as none before."""
        looked_at = self._given[microbatch] if self._given else targets  # on the host, if it has them
        ranges = [_range(it) for it in as_tuple("targets", looked_at)]
        known = self._checked or [(math.inf, -math.inf)] * len(ranges)
        is_new = not all(a[0] <= b[0] and b[1] <= a[1] for a, b in zip(known, ranges, strict=True))
        self._shares += 1
        if not (is_new or self._batches <= FIRST or self._shares % EVERY == 0):
            return
        if check_reduction(self.function, reduction, output, targets, reference, count, self.dims):
            self._checked = [(min(a[0], b[0]), max(a[1], b[1])) for a, b in zip(known, ranges, strict=True)]


def check_reduction(
    function: LossFunction,
    reduction: str,
    output: Any,
    targets: Any,
    reference: Tensors,
    samples: int,
    dims: Sequence[int],
) -> bool:
    """See that the losses of parts make the loss of the whole, for these samples.

    Beside as many others, the gradients of a mean over samples must be halved, those of a sum must stay, and
    weights must add up. The others have outputs near to these, of which none is equal to one of these; for a
    mean all of them have the targets of `reference`, so that whatever part of the batch passes weighs as much
    per sample as that one. Gradients tell more than values, which are equal where all outputs are.

    Args:
        function: the loss.
        reduction: "mean", "sum", or "pair" for a sum with its weight.
        output: of these samples.
        targets: of these samples.
        reference: of one sample.
        samples: how many.
        dims: which dimension of the tensors of an output counts samples.

    Returns:
        Whether that could be seen: not of infinite outputs.

    Raises:
        InputError: they do not.
    """
    others = _repeated(reference, samples) if reduction == "mean" else targets
    try:
        with torch.enable_grad():
            mine = _Parts.of(output, samples, dims)
            alone = mine.run(function, targets)
            beside = mine.run(function, _joined(targets, others), beside=True)
            rest = mine.others.run(function, others) if reduction == "pair" else None
    except Exception as error:
        raise InputError(
            f"loss_fn: must work with any number of samples, got {first_line(error)} for {2 * samples} "
            "(check_loss=False skips this check)"
        ) from error
    if not beside.is_finite:
        return False  # precision may skip this step
    share = 0.5 if reduction == "mean" else 1.0
    pairs = zip(alone.gradients, beside.gradients, strict=True)
    off, norm = _norm([torch.sub(b, a, alpha=share) for a, b in pairs]), share * _norm(alone.gradients)
    if not (alone.is_finite and off <= _TOLERANCE * norm):
        change = off / norm if norm else math.inf
        got = f"got gradients that change by {change:.2g} of themselves when {samples} others stand beside"
        if reduction == SHARE:
            raise InputError(f"model: its loss must be a sum or a mean over samples, {got}")
        raise InputError(f"loss_fn: must be the {_WORDS[reduction]} of its samples, {got}; {_REMEDY}")
    if rest is not None:
        apart = alone.weight + rest.weight
        if not abs(beside.weight - apart) <= _TOLERANCE * abs(apart):
            raise InputError(
                f"loss_fn: the weights of pairs must add up over samples, got {alone.weight:g} and "
                f"{rest.weight:g} for {samples} samples each and {beside.weight:g} for both"
            )
    return True


_WORDS = {"mean": "mean over all", "sum": "sum over all", "pair": "sum over all, and a weight,"}
_REMEDY = (
    "if it ignores some targets, weighs them, or adds up, let it return a pair: the sum of the losses and "
    "the weight that divides it, such as the number of tokens that count, or trace it with the model: "
    "pipeline.trace(model, (inputs, targets), loss_fn) (check_loss=False skips this check, for a loss that "
    "draws random numbers)"
)


def _sum_and_weight(returned: Any, name: str = "loss_fn") -> tuple[Tensor, Tensor | float | None]:
    loss, weight = returned, None
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        loss, weight = returned
        if isinstance(weight, Tensor) and weight.numel() == 1 and not weight.requires_grad:
            weight = weight.detach().double().reshape(())
        elif isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise InputError(
                f"{name}: the weight of a pair must be one number that no parameter changes, got "
                f"{_described(weight)}"
            )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        words = "the losses" if name == "loss_fn" else "its values"
        raise InputError(
            f"{name}: must return a tensor of one number, or a pair of the sum of {words} and its weight, "
            f"got {_described(loss)}"
        )
    return loss.reshape(()), weight


def _detached(output: Any) -> Any:
    tensors, structure = flatten(output)
    return structure.rebuild(it.detach() for it in tensors)


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"shape {tuple(value.shape)}" + (" with a gradient" if value.requires_grad else "")


@dataclass(frozen=True, slots=True)
class _Result:
    """What a loss function gave for some samples: gradients of their outputs, and the weight of a pair."""

    gradients: list[Tensor]
    weight: float
    is_finite: bool


@dataclass(frozen=True, slots=True)
class _Parts:
    """An output: its tensors, where they count samples (None where not), and how they were put together."""

    values: list[Tensor]
    dims: list[int | None]
    structure: Structure

    @classmethod
    def of(cls, output: Any, samples: int, dims: Sequence[int]) -> _Parts:
        """Floats of 16 bits become float32: they are too coarse to compare."""
        values, structure = flatten(output)
        spread = spread_dims(dims, len(values)) if len(dims) in (1, len(values)) else (0,) * len(values)
        found: list[int | None] = []
        for index, (value, dim) in enumerate(zip(values, spread, strict=True)):
            counts = value.dim() > dim and value.shape[dim] and not value.shape[dim] % samples
            found.append(dim if counts else None)
            half = value.dtype in (torch.float16, torch.bfloat16)
            values[index] = value.detach().float() if half else value.detach()
        return cls(values, found, structure)

    @property
    def others(self) -> _Parts:
        """As many samples, each between two of these and nearer to zero than both."""
        near = [
            value if dim is None or not value.is_floating_point() else (value + value.roll(1, dim)) / 4
            for value, dim in zip(self.values, self.dims, strict=True)
        ]
        return _Parts(near, self.dims, self.structure)

    def run(self, function: LossFunction, targets: Any, *, beside: bool = False) -> _Result:
        """What a function says of these samples, alone or with the others behind them."""
        leaves, given = [], []
        others = self.others.values if beside else self.values
        for value, other, dim in zip(self.values, others, self.dims, strict=True):
            if dim is None:
                given.append(value)
                continue
            leaf = value.detach()
            if leaf.is_floating_point():
                leaves.append(leaf.requires_grad_())
            given.append(torch.cat([leaf, other] if beside else [leaf], dim))  # which the function may change
        loss, weight = _sum_and_weight(function(self.structure.rebuild(given), targets))
        found: Sequence[Tensor | None] = ()
        if leaves and loss.requires_grad:
            found = torch.autograd.grad(loss, leaves, allow_unused=True)
        gradients = [it for it in found if it is not None]
        return _Result(gradients, float(weight or 0.0), math.isfinite(_norm([loss.detach(), *gradients])))


def _range(tensor: Tensor) -> tuple[float, float]:
    """The least and the greatest value; not a number if one is not."""
    if not tensor.numel():
        return math.inf, -math.inf
    low, high = torch.aminmax(torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor)
    return low.item(), high.item()


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.hypot(*(torch.linalg.vector_norm(it).item() for it in tensors))


def _joined(one: Any, other: Any) -> Any:
    mine, structure = flatten(one)
    theirs, _ = flatten(other)
    return structure.rebuild(torch.cat(pair) for pair in zip(mine, theirs, strict=True))


def _repeated(targets: Any, times: int) -> Any:
    tensors, structure = flatten(targets)
    return structure.rebuild(it.expand(times, *it.shape[1:]) for it in tensors)

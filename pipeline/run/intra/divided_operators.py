"""One operator of torch on a rank's parts: as on whole tensors, but where parts must know of each other.

view, expand             the part's own sizes instead of the whole ones
linear .. over k         the bias counts once
embedding over v         each rank looks up the rows that it has, zeros elsewhere
mean, losses             a part's mean counts as much as its share of the whole
cross entropy over v     maximum, sum and target's score of each row are agreed on
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.meshes import Axes
from arborcast.pipeline.operators import Primitive
from arborcast.pipeline.run.intra.mesh_collectives import MeshCollectives
from arborcast.pipeline.sharding.specs import Assignment

_NONE, MEAN = 0, 1
"""torch's numbers of reductions of losses."""


@dataclass(frozen=True)
class Division:
    """How an operator is divided on this rank.

    Attributes:
        primitive: the operator, whose labels have words.
        numbers: of the labels, where axes may divide them.
        assignment: the label divided along each axis.
        shape: of this rank's part of what it makes.
        collectives: of the mesh.
        totals: by the name of a mean over targets that count, what those of a microbatch weigh in the mean of
            the batch; else those of this microbatch count.
    """

    primitive: Primitive
    numbers: Mapping[str, int]
    assignment: Assignment
    shape: tuple[int, ...]
    collectives: MeshCollectives
    totals: Mapping[str, Tensor] = field(default_factory=dict)

    def axes(self, *labels: str | None) -> Axes:
        """Along which some labels are divided."""
        wanted = {self.numbers[it] for it in labels if it is not None and it in self.numbers}
        return tuple(axis for axis, label in enumerate(self.assignment) if label in wanted)

    def parts(self, *labels: str | None) -> int:
        """Into how many parts in all."""
        return self.collectives.mesh.size(self.axes(*labels))

    def check(self, options: Mapping[str, Any], microbatches: int) -> None:
        """See that the operator can be run so.

        Args:
            options: its arguments but for tensors.
            microbatches: of a step.

        Raises:
            PlanError: parts of it would have to know of each other in a way that has no code.
        """
        it = self.primitive
        if it.kind == "embedding" and options.get("scale_grad_by_freq"):
            parts = self.parts(*{*self.numbers} - {it.output.dims[-1]})  # columns have the same indices
            if parts * microbatches > 1:
                raise PlanError(
                    f"operator {it.name} ({it.kind}): must be whole and of 1 microbatch, as its gradients "
                    f"are scaled by how often indices come, got {parts} parts and {microbatches} microbatches"
                )
        inside = {label for statistic in it.statistics for label in statistic.labels}
        for label in sorted(self.numbers):
            if not self.axes(label):
                continue
            if it.kind == "batch_norm" and label == "c":
                inside.add(label)  # running statistics are whole on every rank
            summed = label in it.summed and it.kind not in _SUMS
            if summed or (label in inside and it.kind not in AGREEING):
                raise PlanError(
                    f"operator {it.name} ({it.kind}): cannot be run on parts along {label}, into which the "
                    f"sharding divides it {self.parts(label)} times"
                )


Arguments = dict[str, Any]
"""By the names of an operator's schema."""

Run = Callable[[Any, Arguments, Division], Any]
"""Runs an operator of torch on parts."""


def run(target: Any, given: Arguments, division: Division) -> Any:
    """What an operator makes of this rank's parts, before anything is added up.

    Args:
        target: of torch.
        given: its arguments; sizes are still those of whole tensors.
        division: how it is divided.
    """
    special = _SPECIAL.get(division.primitive.kind)
    return called(target, given) if special is None else special(target, given, division)


def called(target: Any, given: Arguments) -> Any:
    """The operator as it is; Python's own take no names."""
    return target(**given) if hasattr(target, "_schema") else target(*given.values())


def _viewed(target: Any, given: Arguments, division: Division) -> Any:
    if "dtype" in given:
        return called(target, given)
    return next(iter(given.values())).reshape(division.shape)


def _expanded(_: Any, given: Arguments, division: Division) -> Any:
    return given["self"].expand(division.shape)


class _Once(torch.autograd.Function):
    """Added on one of the ranks that divide a sum; its gradient is the same on all."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, is_mine: bool) -> Tensor:
        return bias.clone() if is_mine else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def _with_bias(name: str) -> Run:
    def run(target: Any, given: Arguments, division: Division) -> Any:
        axes, bias = division.axes("k"), given.get(name)
        if axes and bias is not None:
            is_mine = division.collectives.index(axes) == 0
            given = given | {name: _Once.apply(bias, is_mine)}  # type: ignore[no-untyped-call]
        if given.get("groups", 1) > 1:
            given = given | {"groups": given["groups"] // division.parts("n")}
        return called(target, given)

    return run


def _looked_up(target: Any, given: Arguments, division: Division) -> Any:
    axes = division.axes("v")
    if not axes:
        return called(target, given)
    if given.get("sparse"):
        raise PlanError(f"operator {division.primitive.name}: sparse gradients must be of whole tables")
    rows = given["weight"].size(0)
    _check_range("index", given["indices"], rows, division)
    first = division.collectives.index(axes) * rows
    here = given["indices"] - first
    outside = (here < 0) | (here >= rows)
    padding = given.get("padding_idx", -1)
    if padding >= 0:  # as one of these rows, or as none
        padding = padding - first if first <= padding < first + rows else -1
    found = called(target, given | {"indices": here.masked_fill(outside, 0), "padding_idx": padding})
    return found.masked_fill(outside.unsqueeze(-1), 0)


def _check_range(what: str, indices: Tensor, each: int, division: Division) -> None:
    """See that some rank has what is asked for: all along the line have the same indices and say the same."""
    count = each * division.parts("v")
    wrong = indices[(indices < 0) | (indices >= count)]
    if wrong.numel():
        raise IndexError(
            f"operator {division.primitive.name}: {what} must be at least 0 and below {count}, got {wrong[0]}"
        )


def _averaged(target: Any, given: Arguments, division: Division) -> Any:
    """The part's share of a mean over all; parts are equal."""
    found = called(target, given)
    if given.get("reduction", MEAN) != MEAN:
        return found
    parts = division.parts(*division.primitive.summed)
    return found / parts if parts > 1 else found


class _RowsOverClasses(torch.autograd.Function):
    """Cross entropy of each row, whose classes lie on several ranks: (.., classes), (..) -> (..)."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, target: Tensor, ignored: int, axes: Axes, collectives: MeshCollectives
    ) -> Tensor:
        total = scores.logsumexp(-1)  # of this rank's classes
        greatest = collectives.allreduce(total, axes, "max")
        here = target - collectives.index(axes) * scores.size(-1)
        outside = (here < 0) | (here >= scores.size(-1))
        here = here.masked_fill(outside, 0).unsqueeze(-1)
        score = (scores.gather(-1, here).squeeze(-1) - greatest).masked_fill(outside, 0)
        total, score = collectives.allreduce(torch.stack([(total - greatest).exp(), score]), axes)
        left_out = target == ignored
        ctx.save_for_backward(scores, greatest + total.log(), here, outside, left_out)
        rows: Tensor = (total.log() - score).masked_fill(left_out, 0)
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        scores, total, here, outside, left_out = ctx.saved_tensors
        of_rows = gradient.masked_fill(left_out, 0)
        found = (scores - total.unsqueeze(-1)).exp_().mul_(of_rows.unsqueeze(-1))
        found.scatter_add_(-1, here, of_rows.masked_fill(outside, 0).neg_().unsqueeze(-1))
        return found, None, None, None, None


def _cross_entropy(target: Any, given: Arguments, division: Division) -> Any:
    scores, wanted = given["self"], given["target"]
    ignored = given.get("ignore_index", -100)
    reduction = given.get("reduction", MEAN)
    axes = division.axes("v")
    if axes:
        last = scores.movedim(1 if scores.dim() > 1 else 0, -1)
        if torch.is_autocast_enabled("cpu"):  # which has the operator in float32
            last = last.float()
        _check_range("target", wanted[wanted != ignored], last.size(-1), division)
        rows = _RowsOverClasses.apply(  # type: ignore[no-untyped-call]
            last, wanted, ignored, axes, division.collectives
        )
    else:
        rows = called(target, given | {"reduction": _NONE})
    if reduction == _NONE:
        return rows
    if reduction != MEAN:
        return rows.sum()
    front = list(division.primitive.summed)
    if wanted.is_floating_point():  # shares of all classes
        return rows.sum() / (math.prod(rows.shape) * division.parts(*front))
    total = weight_of(wanted, given.get("weight"), ignored)
    shared = division.axes(*front)
    if shared:
        total = division.collectives.allreduce(total, shared)
    return rows.sum() / division.totals.get(division.primitive.name, total)


def weight_of(target: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    """What targets weigh in a mean over those that count.

    Args:
        target: classes.
        weight: of each class; None for one.
        ignored: the class that does not count.
    """
    counted = target != ignored
    weights = counted if weight is None else weight[target.masked_fill(~counted, 0)].masked_fill(~counted, 0)
    return weights.sum(dtype=torch.float32)


_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution")

_SPECIAL: Mapping[str, Run] = {
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze"), _viewed
    ),
    **dict.fromkeys(("expand", "expand_as"), _expanded),
    **dict.fromkeys(("linear", *_CONVOLUTIONS), _with_bias("bias")),
    **dict.fromkeys(("addmm", "baddbmm"), _with_bias("self")),
    "embedding": _looked_up,
    **dict.fromkeys(("mean", "mse_loss", "l1_loss", "smooth_l1_loss"), _averaged),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss", "nll_loss_nd"), _cross_entropy),
}

_SUMS = frozenset((*_SPECIAL, "matmul", "mm", "bmm", "einsum", "sum"))
"""Operators whose parts may be added up."""

AGREEING = frozenset(("cross_entropy_loss", "nll_loss", "nll_loss_nd"))
"""Operators whose parts agree on statistics: losses whose mean is over targets that count."""

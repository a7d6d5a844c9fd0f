"""What torch's reduce operations mean for schedules: how two contributions combine, and what comes before
and after.

Every operation is a commutative and associative combination, with a factor before it (PREMUL_SUM) or a
division after it (AVG). What is not served here (complex numbers, truth values, averages of integers) is
gloo's to do or to refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

Combine = Callable[[Tensor, Tensor, Tensor], object]

_OPS = dist.ReduceOp.RedOpType


def _into(function: Callable[..., Tensor]) -> Combine:
    return lambda a, b, out: function(a, b, out=out)


_ADD = _into(torch.add)
_COMBINE: dict[dist.ReduceOp.RedOpType, Combine] = {
    _OPS.SUM: _ADD,
    _OPS.AVG: _ADD,
    _OPS.PREMUL_SUM: _ADD,
    _OPS.PRODUCT: _into(torch.mul),
    _OPS.MIN: _into(torch.minimum),
    _OPS.MAX: _into(torch.maximum),
    _OPS.BAND: _into(torch.bitwise_and),
    _OPS.BOR: _into(torch.bitwise_or),
    _OPS.BXOR: _into(torch.bitwise_xor),
}
_BITWISE = frozenset({_OPS.BAND, _OPS.BOR, _OPS.BXOR})
_FLOATING = frozenset({_OPS.AVG, _OPS.PREMUL_SUM})


@dataclass(frozen=True)
class Operator:
    """A reduction as the engine applies it.

    Attributes:
        name: as reports call it: sum, avg, premul_sum, product, min, max, band, bor, bxor.
        combine: `combine(a, b, out)` writes the combination of two flat tensors; `out` may be either.
        factor: what every contribution is multiplied with first: a number or a tensor of one element.
        divides: whether the result is divided by the number of contributors.
    """

    name: str
    combine: Combine
    factor: float | Tensor | None = None
    divides: bool = False

    def before(self, contribution: Tensor) -> Tensor:
        """A rank's contribution, multiplied where the operation says so: then a new tensor."""
        return contribution if self.factor is None else contribution * self._factor_for(contribution)

    def before_in_place(self, contribution: Tensor) -> None:
        """The same where the contribution may be overwritten."""
        if self.factor is not None:
            contribution.mul_(self._factor_for(contribution))

    def after(self, result: Tensor, contributors: int) -> None:
        """Divide the combined result, in place, where the operation says so."""
        if self.divides:
            result.div_(contributors)

    def _factor_for(self, contribution: Tensor) -> float | Tensor:
        factor = self.factor
        assert factor is not None
        return factor.to(contribution.dtype) if isinstance(factor, Tensor) else factor


def operator_of(op: dist.ReduceOp | dist.ReduceOp.RedOpType, dtype: torch.dtype) -> Operator | None:
    """The operator that torch's operation is on elements of a type; None where schedules do not serve it.

    Args:
        op: SUM, AVG, PREMUL_SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR.
        dtype: of the tensors. Schedules serve real numbers, AVG and PREMUL_SUM floating-point ones, the
            bitwise operations integers.
    """
    if dtype.is_complex or dtype == torch.bool:
        return None
    kind = op if isinstance(op, _OPS) else op.op
    if kind not in _COMBINE or (kind in _FLOATING and not dtype.is_floating_point):
        return None
    if kind in _BITWISE and dtype.is_floating_point:
        return None
    factor = None
    if kind == _OPS.PREMUL_SUM:
        # The bare name carries no factor: `torch.distributed._make_nccl_premul_sum` makes one that does.
        if isinstance(op, _OPS):
            return None
        factor = op.__getstate__()[1]
    return Operator(kind.name.lower(), _COMBINE[kind], factor, kind == _OPS.AVG)

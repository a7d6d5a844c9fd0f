"""What torch's reduce operations mean for schedules: how two contributions combine, what comes before, after.

Every operation is a commutative and associative combination, with a factor before it (PREMUL_SUM) or a
division after it (AVG). What is not served here (complex numbers) is gloo's to do or to refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from arborcast.synth.errors import InputError

Combine = Callable[[Tensor, Tensor, Tensor], object]


_TWO: dict[str, Callable[..., Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
"""For each operation the call of torch.

The library (`backends.native`) gives the same bits, but for which NaN comes of one, and which zero is the
extreme of two with different signs.
"""

_BITWISE = frozenset({"BAND", "BOR", "BXOR"})
_TYPES = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    | {torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool}
)
"""What gloo reduces as well, so that a call does not fail for being small."""


def _into(function: Callable[..., Tensor]) -> Combine:
    return lambda a, b, out: function(a, b, out=out)


@dataclass(frozen=True)
class ReductionOperator:
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
        """Divide the combined result, in place, where the operation says so; integers as NCCL, towards 0."""
        if not self.divides:
            return
        if result.is_floating_point():
            result.div_(contributors)
        elif contributors <= torch.iinfo(result.dtype).max:
            result.div_(contributors, rounding_mode="trunc")
        else:  # torch takes the divisor for a number of the type of the elements
            result.copy_(result.to(torch.int64).div_(contributors, rounding_mode="trunc"))

    def _factor_for(self, contribution: Tensor) -> float | Tensor:
        factor = self.factor
        assert factor is not None
        return factor.to(contribution.dtype) if isinstance(factor, Tensor) else factor


def operator_of(op: dist.ReduceOp | dist.ReduceOp.RedOpType, dtype: torch.dtype) -> ReductionOperator | None:
    """The operator that torch's operation is on elements of a type; None where schedules do not serve it.

    Args:
        op: SUM, AVG, PREMUL_SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR.
        dtype: of the tensors. Schedules serve real numbers, PREMUL_SUM floating-point ones, the bitwise
            operations integers; truth values, as gloo does, as bytes, of which there is no average.
    """
    if dtype not in _TYPES:
        return None
    name = name_of(op)
    if name not in _TWO or (name == "PREMUL_SUM" and not dtype.is_floating_point):
        return None
    if (name in _BITWISE and dtype.is_floating_point) or (name == "AVG" and dtype is torch.bool):
        return None
    factor = None
    if name == "PREMUL_SUM":
        # The bare name carries no factor: `torch.distributed._make_nccl_premul_sum` makes one that does.
        state: Any = op.__getstate__() if hasattr(op, "op") else None
        if state is None:
            return None
        factor = state[1]
    return ReductionOperator(name.lower(), _into(_TWO[name]), factor, name == "AVG")


def served_operator(op: dist.ReduceOp | dist.ReduceOp.RedOpType, dtype: torch.dtype) -> ReductionOperator:
    """The same where there must be one.

    Raises:
        InputError: schedules do not serve it.
    """
    operator = operator_of(op, dtype)
    if operator is None:
        raise InputError(f"reduction {name_of(op)}: schedules do not serve it on elements of {dtype}")
    return operator


def combined(tensors: Sequence[Tensor], op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> Tensor:
    """Tensors of all ranks combined by torch's operation, of any type and layout that torch combines.

    Raises:
        InputError: that operation has no such meaning (PREMUL_SUM has its factor on each rank).
    """
    name = name_of(op)
    if name not in _TWO or name == "PREMUL_SUM":
        served = ", ".join(it for it in _TWO if it != "PREMUL_SUM")
        raise InputError(f"reduction {name}: must be one of {served} where it goes by allgathers")
    total = reduce(_TWO[name], tensors)
    return total / len(tensors) if name == "AVG" else total


def name_of(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> str:
    """The name of an operation, as in "SUM"; torch has two classes of them, and one lacks it in its stubs."""
    kind: Any = getattr(op, "op", op)
    name: str = kind.name
    return name

"""One call on the group that is tested and on gloo beside it, and what both must have in common.

A case is a function of a group that makes its own data, so that it can be run on both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Case = Callable[[Any], Sequence[Tensor]]

OPS: dict[str, Any] = {
    name: getattr(dist.ReduceOp, name)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
FACTOR = 0.5
OPS["PREMUL_SUM"] = dist._make_nccl_premul_sum(FACTOR)  # type: ignore[attr-defined]

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.bool,
        torch.complex64,
    )
}


def values(rank: int, count: int, dtype: Any = torch.float32, op: str = "SUM", salt: int = 0) -> Tensor:
    """Numbers that depend on rank and index; results of up to 8 ranks are exact in every type.

    Sums stay within 127, products within 256, and half the bits of a bool are set.
    """
    random = torch.Generator().manual_seed(rank + 1000 * salt)
    if dtype is torch.bool:
        return torch.rand(count, generator=random) < 0.5
    if dtype.is_complex:
        parts = values(rank, 2 * count, torch.float32, op, salt)
        return torch.complex(parts[:count], parts[count:]).to(dtype)
    if op == "PRODUCT":
        choices = torch.tensor([1, 2, 1] if dtype is torch.uint8 else [1, -1, 2])
        return choices[torch.randint(3, (count,), generator=random)].to(dtype)
    high = 16 if op in {"SUM", "AVG", "PREMUL_SUM"} else 128
    low = 0 if dtype is torch.uint8 else -high
    return torch.randint(low, high, (count,), generator=random).to(dtype)


@dataclass(frozen=True)
class Outcome:
    """What a call gave, or the classes of the error it raised and its message."""

    tensors: tuple[Tensor, ...] = ()
    error: type[BaseException] | None = None
    message: str = ""


def outcome(case: Case, group: Any) -> Outcome:
    try:
        return Outcome(tuple(case(group)))
    except Exception as error:
        return Outcome(error=type(error), message=str(error))


def assert_equal(got: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    assert len(got) == len(expected), what
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype, f"{what}: {mine.dtype}, gloo {theirs.dtype}"
        assert mine.shape == theirs.shape, f"{what}: {mine.shape}, gloo {theirs.shape}"
        assert torch.equal(mine, theirs), f"{what}: {mine.tolist()[:9]}, expected {theirs.tolist()[:9]}"


def check_same(what: str, case: Case, tested: Any, reference: Any) -> Outcome:
    """Both give the same tensors, or both raise errors of one class; returns what gloo gave."""
    expected, got = outcome(case, reference), outcome(case, tested)
    if expected.error is None:
        assert got.error is None, f"{what}: {got.error}: {got.message}"
        assert_equal(got.tensors, expected.tensors, what)
    else:
        assert got.error is not None, f"{what}: no error; gloo: {expected.message}"
        # Of an empty list torch says that it is not implemented; gloo itself has a better reason.
        like = RuntimeError if expected.error is NotImplementedError else expected.error
        assert issubclass(got.error, like), f"{what}: {got.error}: {got.message}; gloo {expected.error}"
    return expected


def counted(group: Any, path: str = "schedule", kind: str | None = None) -> int:
    """How many calls of the group that path has served: "schedule", "gloo" or "handed over"."""
    counters = group.counters()
    return sum(paths.get(path, 0) for name, paths in counters.items() if kind in {None, name})

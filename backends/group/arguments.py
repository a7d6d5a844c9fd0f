"""What torch hands to a process group, and what schedules can work with.

Each call comes in several forms, with options or without; tensors may lie in memory in any way. Ranks must
judge alike whether a schedule serves a call, so only what is the same on all of them decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from arborcast.backends.tensors.torch_compat import split
from arborcast.backends.tensors.torch_reduction import operator_of

SUM = dist.ReduceOp(dist.ReduceOp.SUM)


def listed(tensors: Any) -> list[Tensor]:
    """The tensors of a call that takes one or several."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def op_of(opts: Any) -> dist.ReduceOp:
    """The operation out of torch's options, or the bare one that some forms take instead."""
    op = getattr(opts, "reduceOp", opts)
    if op is None:
        return SUM
    return op if isinstance(op, dist.ReduceOp) else dist.ReduceOp(op)


def reduce_options(op: dist.ReduceOp, given: Any = None) -> AllreduceOptions:
    """Torch's options of an allreduce, with the timeout of those that were given."""
    return _options(AllreduceOptions(), op, given)


def scatter_options(op: dist.ReduceOp, given: Any = None) -> ReduceScatterOptions:
    """The same of a reduce-scatter."""
    return _options(ReduceScatterOptions(), op, given)


_Options = TypeVar("_Options", AllreduceOptions, ReduceScatterOptions)
_Rooted = TypeVar("_Rooted", BroadcastOptions, ReduceOptions, GatherOptions, ScatterOptions)


def _options(options: _Options, op: dist.ReduceOp, given: Any) -> _Options:
    options.reduceOp = op
    if hasattr(given, "timeout"):
        options.timeout = given.timeout
    return options


def rooted(kind: Callable[[], _Rooted], root: int) -> _Rooted:
    """Torch's options of a call with a root."""
    options = kind()
    options.rootRank = root
    return options


HOST = frozenset({"cpu"})


def is_plain(tensor: Tensor, devices: Set[str] = HOST) -> bool:
    """Whether schedules can work with it, as far as all ranks judge alike: strides differ between ranks.

    Args:
        tensor: of a call.
        devices: the types of those whose tensors schedules work with; in all functions here.
    """
    return tensor.device.type in devices and tensor.layout == torch.strided


def is_one_plain(tensors: Sequence[Tensor], devices: Set[str] = HOST) -> bool:
    """Whether there is one tensor, and schedules can work with it."""
    return len(tensors) == 1 and is_plain(tensors[0], devices)


def are_plain_alike(tensors: Sequence[Tensor], devices: Set[str] = HOST) -> bool:
    """Whether schedules can work with all of them as one message."""
    return bool(tensors) and all(is_plain(one, devices) and _is_alike(one, tensors[0]) for one in tensors)


def _is_alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device


def serves(op: dist.ReduceOp, tensor: Tensor) -> bool:
    """Whether schedules serve the operation on elements of this type."""
    return operator_of(op, tensor.dtype) is not None


def fits(many: Sequence[Tensor], one: Tensor, size: int, devices: Set[str] = HOST) -> bool:
    """Whether there is a tensor like this one for each rank."""
    return len(many) == size and all(
        is_plain(each, devices) and _is_alike(each, one) and each.shape == one.shape for each in many
    )


def fits_single(whole: Tensor, block: Tensor, size: int, devices: Set[str] = HOST) -> bool:
    """Whether one tensor has room for a block of each rank."""
    return (
        is_plain(whole, devices)
        and is_plain(block, devices)
        and _is_alike(whole, block)
        and whole.numel() == size * block.numel()
    )


def bytes_of_parts(tensor: Tensor, lengths: Sequence[int], size: int) -> list[int] | None:
    """The bytes of the part for each of so many ranks; None where they do not fit the tensor.

    Args:
        tensor: whose rows the parts are made of.
        lengths: rows of each part; none where all are alike.
        size: ranks.
    """
    if tensor.dim() == 0:
        return None
    rows = tensor.shape[0]
    if not lengths:
        return None if rows % size else [tensor.numel() // size * tensor.itemsize] * size
    if len(lengths) != size or min(lengths) < 0 or sum(lengths) != rows:
        return None
    row = tensor.numel() // rows * tensor.itemsize if rows else 0
    return [row * length for length in lengths]


def lies_flat(tensor: Tensor) -> bool:
    """Whether its elements lie in their order, as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def flattened(tensor: Tensor) -> Tensor:
    """Its elements in their order: a view where they lie so, else a copy.

    What is written there does not count as a change for autograd, as what gloo writes does not: a call must
    not break a backward pass for being large.
    """
    data = tensor.data
    if not lies_flat(tensor):
        data = data.resolve_conj().resolve_neg().contiguous()
    # One element counts as contiguous whatever its stride; `view` keeps it, and then refuses to show bytes.
    return data.as_strided((data.numel(),), (1,))


class written:  # noqa: N801 (it is used as a function)
    """The same for a tensor that is written to: what a copy holds in the end goes back."""

    __slots__ = ("_flat", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._flat = flattened(tensor)

    def __enter__(self) -> Tensor:
        """Its elements in their order."""
        return self._flat

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """What a copy holds goes back, unless something was raised."""
        if kind is None and not lies_flat(self._tensor):
            self._tensor.data.copy_(self._flat.view(self._tensor.shape))


def as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """The elements of tensors that lie in memory one behind the other; None where they do not."""
    first = tensors[0]
    memory, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for tensor in tensors:
        is_next = tensor.data_ptr() == end and tensor.untyped_storage().data_ptr() == memory
        if not (is_next and lies_flat(tensor)):
            return None
        end += tensor.nbytes
    return first.data.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of several tensors, in their order: as they lie, or a copy."""
    whole = as_one(tensors)
    return torch.cat([flattened(tensor) for tensor in tensors]) if whole is None else whole


@contextmanager
def filled(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Room for the elements of several tensors, which have what is written to it in the end."""
    whole = as_one(tensors)
    if whole is not None:
        yield whole
        return
    count = sum(tensor.numel() for tensor in tensors)
    together = torch.empty(count, dtype=tensors[0].dtype, device=tensors[0].device)
    yield together
    spread(together, tensors)


def spread(together: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy consecutive parts of a flat tensor into others."""
    parts = split(together, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.data.copy_(part.view(tensor.shape))

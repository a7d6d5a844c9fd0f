"""Whether the tensors of a call fit the collective; backends do not check that and read past the end."""

from __future__ import annotations

import torch
from torch import Tensor

from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError


def check_tensor(
    what: str, tensor: Tensor | None, elements: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """The tensor as a flat view without gradient; None where there is none and none is needed.

    Args:
        what: how messages call it.
        tensor: what the caller gave.
        elements: how many it must have.
        dtype: their type.
        device: where they must be.

    Raises:
        InputError: it does not fit; the message says what it is and what it must be.
    """
    if tensor is None:
        if elements:
            raise InputError(f"{what} must have {elements} elements on this rank, got None")
        return None
    if tensor.numel() != elements:
        raise InputError(f"{what} must have {elements} elements on this rank, got {tensor.numel()}")
    if tensor.dtype != dtype:
        raise InputError(f"{what} must be of type {dtype}, got {tensor.dtype}")
    if tensor.device != device:
        raise InputError(f"{what} must be on {device}, got {tensor.device}")
    if not tensor.is_contiguous():
        shape = tuple(tensor.shape)
        raise InputError(f"{what} must be contiguous, got shape {shape} with strides {tensor.stride()}")
    return tensor.detach().view(-1)


def check_overlap(collective: Collective, rank: int, given: Tensor | None, output: Tensor | None) -> None:
    """An input may be the rank's own block of a gathered output, and must lie outside the output otherwise.

    Raises:
        InputError: they overlap in another way.
    """
    if given is None or output is None or not given.numel() or not output.numel():
        return
    start, out = given.data_ptr(), output.data_ptr()
    length = given.numel() * given.itemsize
    if start + length <= out or out + output.numel() * output.itemsize <= start:
        return
    own = out + collective.ranks.index(rank) * length
    if collective.kind not in {Kind.ALLGATHER, Kind.GATHER} or start != own:
        raise InputError(f"{collective.kind}: the output must not overlap the input, except as its own block")

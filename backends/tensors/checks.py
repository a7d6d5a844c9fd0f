"""Whether the tensors of a call fit the collective; backends do not check that and read past the end."""

from __future__ import annotations

import torch
from torch import Tensor

from arborcast.backends.lowering.program import Program
from arborcast.synth.collective import Collective
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


def check_buffers(
    collective: Collective,
    program: Program,
    given: Tensor | None,
    output: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor | None, Tensor | None]:
    """The flat input and output of a rank, each None where its program has none.

    An input may be the rank's own block of a gathered output, and must lie outside the output otherwise.

    Raises:
        InputError: they do not fit, or overlap in another way.
    """
    given = check_tensor(f"{collective.kind}: input", given, program.input_elements, dtype, device)
    output = check_tensor(f"{collective.kind}: output", output, program.output_elements, dtype, device)
    if given is None or output is None or not given.numel() or not output.numel():
        return given, output
    start, out = given.data_ptr(), output.data_ptr()
    length = given.numel() * given.itemsize
    own = out + collective.ranks.index(program.rank) * length
    is_apart = start + length <= out or out + output.numel() * output.itemsize <= start
    if not is_apart and (not collective.kind.gathers or start != own):
        raise InputError(f"{collective.kind}: the output must not overlap the input, except as its own block")
    return given, output

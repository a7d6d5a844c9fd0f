"""What crosses the boundaries of a stage, found without messages and without running the model for real.

Every rank is given whole batches, so that each can work out the shapes on its own: the layers up to its stage
are run on fake tensors, which have shapes but no values. So batch norm's statistics stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.errors import PartitionError
from pipeline.layered import Layered
from pipeline.run.batches import described, spread_dims
from pipeline.run.failures import first_line
from pipeline.run.modes import evaluating


@dataclass(frozen=True, slots=True)
class Wire:
    """One tensor that crosses a boundary.

    Attributes:
        shape: for one sample.
        dtype: as it crosses.
        dim: the dimension that counts samples.
        needs_gradient: whether its gradient crosses in the other direction.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int
    needs_gradient: bool

    def shape_of(self, samples: int) -> tuple[int, ...]:
        """The shape for so many samples."""
        return tuple(size * samples if dim == self.dim else size for dim, size in enumerate(self.shape))

    def bytes_of(self, samples: int) -> int:
        """Bytes of so many samples."""
        return prod(self.shape_of(samples)) * self.dtype.itemsize

    def narrowed(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """The samples [start, stop) of a tensor that crosses here."""
        rows = self.shape[self.dim]
        return tensor.narrow(self.dim, start * rows, (stop - start) * rows)


@dataclass(frozen=True, slots=True)
class Boundaries:
    """What a stage takes and gives.

    Attributes:
        taken: crosses the boundary before it; empty for the first stage.
        given: crosses the one behind it; empty for the last stage, whose output goes to the loss.
        overwrites: whether it changes the tensors that it takes in place.
    """

    taken: tuple[Wire, ...]
    given: tuple[Wire, ...]
    overwrites: bool


class FakeModel:
    """A copy of a model without values.

    Args:
        model: to be copied; it may change afterwards.
    """

    def __init__(self, model: Layered) -> None:
        """Copy it; no memory is taken for parameters."""
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with FakeCopyMode(self._mode):
            self._model = copy.deepcopy(model)
        for layer in self._model.divide(0, self._model.depth).modules():
            if isinstance(layer, _BatchNorm):
                layer.eval()  # one sample, which it refuses to train with, may be one replica's share of more

    def boundaries(
        self,
        start: int,
        end: int,
        inputs: Sequence[Tensor],
        samples: Sequence[int],
        *,
        training: bool,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> Boundaries:
        """What crosses before and behind the layers [start, end).

        Args:
            start: the first layer.
            end: the layer behind the last one.
            inputs: of the model, with any number of samples; only their shapes count.
            samples: how many samples shares of microbatches have.
            training: whether in the mode for training.
            autocast: makes the context of forward passes.

        Raises:
            PartitionError: a layer needs values to give a shape, or gives something else than tensors, or
                what crosses is not in proportion to the samples.
        """
        found: dict[int, Boundaries] = {}
        for count in sorted(set(samples)):
            with self._mode, autocast(), torch.set_grad_enabled(training):
                found[count] = self._run(start, end, inputs, count, training)
        (first, boundaries), *others = found.items()
        for count, other in others:
            if other != boundaries:
                raise PartitionError(
                    f"layers [{start}, {end}): what crosses a boundary must be in proportion to the samples, "
                    f"got {_words(boundaries)} per sample for {first} and {_words(other)} for {count}"
                )
        return boundaries

    def _run(
        self, start: int, end: int, inputs: Sequence[Tensor], samples: int, training: bool
    ) -> Boundaries:
        dims = spread_dims(self._model.sample_dims(0), len(inputs))
        values = tuple(
            torch.empty([*tensor.shape[:dim], samples, *tensor.shape[dim + 1 :]], dtype=tensor.dtype)
            for tensor, dim in zip(inputs, dims, strict=True)
        )
        taken: tuple[Wire, ...] = ()
        if start > 0:
            values = self._forward(0, start, values, training)
            taken = self._wires(start, values, samples)
        versions = [value._version for value in values]
        is_last = end == self._model.depth
        outputs = (
            () if is_last and start > 0 and not training else self._forward(start, end, values, training)
        )
        overwrites = any(value._version != version for value, version in zip(values, versions, strict=True))
        return Boundaries(taken, () if is_last else self._wires(end, outputs, samples), overwrites)

    def _forward(
        self, start: int, end: int, values: tuple[Tensor, ...], training: bool
    ) -> tuple[Tensor, ...]:
        module = self._model.divide(start, end)
        try:
            with nullcontext() if training else evaluating(module):
                outputs = module(*values)
        except Exception as error:
            raise PartitionError(
                f"layers [{start}, {end}): shapes must follow from shapes alone, got {first_line(error)}"
            ) from error
        return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)

    def _wires(self, cut: int, values: tuple[Any, ...], samples: int) -> tuple[Wire, ...]:
        dims = spread_dims(self._model.sample_dims(cut), len(values))
        where = f"boundary before layer {cut}"
        if len(dims) != len(values):
            raise PartitionError(f"{where}: {len(dims)} tensors must cross, got {len(values)}")
        wires = []
        for value, dim in zip(values, dims, strict=True):
            if not isinstance(value, Tensor):
                raise PartitionError(f"{where}: only tensors may cross, got {type(value).__name__}")
            if value.dim() <= dim or value.shape[dim] % samples:
                raise PartitionError(
                    f"{where}: dimension {dim} must be a multiple of the {samples} samples, "
                    f"got {described(value)}"
                )
            shape = tuple(size // samples if at == dim else size for at, size in enumerate(value.shape))
            wires.append(Wire(shape, value.dtype, dim, value.requires_grad))
        return tuple(wires)


def _words(boundaries: Boundaries) -> str:
    return " ".join(str(list(wire.shape)) for wire in (*boundaries.taken, *boundaries.given))

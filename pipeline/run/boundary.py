"""What crosses the boundaries of a stage, found without messages and without running the model for real.

Every rank is given whole batches, so that each can work out the shapes on its own: the layers up to its stage
are run on fake tensors, which have shapes but no values. So batch norm's statistics stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from arborcast.pipeline.errors import PartitionError, first_line
from arborcast.pipeline.model.deferred_init import stand_ins
from arborcast.pipeline.model.layered import Layered, in_mode
from arborcast.pipeline.model.module_structure import several, storage_key
from arborcast.pipeline.run.batches import described, spread_dims
from arborcast.pipeline.run.devices import HOST, placed

KEPT_SHAPES = 32
"""Of batches; what is known of others before is found again."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor that crosses a boundary.

    Attributes:
        shape: for one sample.
        dtype: as it crosses.
        dim: the dimension that counts samples, or that ranks divide; None where each rank has all of it.
        needs_gradient: whether its gradient crosses in the other direction.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None
    needs_gradient: bool

    def shape_of(self, samples: int) -> tuple[int, ...]:
        """The shape for so many samples."""
        return tuple(size * samples if dim == self.dim else size for dim, size in enumerate(self.shape))

    def bytes_of(self, samples: int) -> int:
        """Bytes of so many samples."""
        return prod(self.shape_of(samples)) * self.dtype.itemsize

    def narrowed(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """The samples [start, stop) of a tensor that crosses here."""
        if self.dim is None:
            return tensor
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

    taken: tuple[TensorSpec, ...]
    given: tuple[TensorSpec, ...]
    overwrites: bool


class FakeStage:
    """The layers of a stage and all before them, without values.

    Args:
        model: whose layers they are; it may change afterwards.
        start: the first layer of the stage.
        end: the layer behind its last one.
        device: that they run on, which tells what autocast makes of types.
    """

    def __init__(self, model: Layered, start: int, end: int, device: torch.device = HOST) -> None:
        """Copy them; no memory is taken for parameters."""
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._start, self._end, self._device = start, end, device
        self._dims = {cut: model.sample_dims(cut) for cut in {0, start, end} - {model.depth}}
        parts = (model.divide(0, start) if start > 0 else None, model.divide(start, end))
        with stand_ins(parts, self._mode), FakeCopyMode(self._mode):
            self._before, self._stage = copy.deepcopy(parts[0]), copy.deepcopy(parts[1])
        for module in (self._before, self._stage):
            _forget_counts(module)
            if module is not None:
                with self._mode:
                    placed(module, device, is_fake=True)
        self._known: dict[tuple[object, bool], Boundaries] = {}

    def follow(self, trained: Mapping[str, bool]) -> None:
        """Take on which parameters of the model are trained, by their names."""
        self._known.clear()
        for module in (self._before, self._stage):
            for name, parameter in () if module is None else module.named_parameters():
                parameter.requires_grad_(trained[name])

    def boundaries(
        self,
        inputs: Sequence[Tensor],
        samples: Sequence[int],
        *,
        training: bool,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> Boundaries:
        """What crosses before and behind the stage.

        The first time it is found for several numbers of samples, which must agree; then for one of each
        shape that a sample has, and for other numbers of these it is known. So a new length costs a pass
        without values, a new number of samples nothing.

        Args:
            inputs: of the model, with any number of samples; only their shapes count.
            samples: how many samples shares of microbatches have.
            training: whether in the mode for training.
            autocast: makes the context of forward passes.

        Raises:
            PartitionError: a layer needs values to give a shape, or gives something else than tensors, or
                what crosses is not in proportion to the samples.
        """
        spread = spread_dims(self._dims[0], len(inputs))
        shapes = tuple(
            (it.shape[:dim] + it.shape[dim + 1 :], it.dtype) for it, dim in zip(inputs, spread, strict=True)
        )
        if (shapes, training) in self._known:
            return self._known[shapes, training]
        found: dict[int, Boundaries] = {}
        # Batch norm refuses to train with one sample, which may be one replica's share of more. Twice as
        # many tell a dimension that counts samples from one that happens to be as long.
        counts = {max(count, 2) for count in samples}
        first_time = all(mode != training for _, mode in self._known)
        for count in sorted(counts | {2 * max(counts)}) if first_time else [max(counts)]:
            with self._mode, autocast(), torch.set_grad_enabled(training):
                found[count] = self._run(inputs, count, training)
        (first, boundaries), *others = found.items()
        for count, other in others:
            if other != boundaries:
                raise PartitionError(
                    f"{self._layers}: what crosses a boundary must be in proportion to the samples, "
                    f"got {_words(boundaries)} per sample for {first} and {_words(other)} for {count}"
                )
        if len(self._known) >= KEPT_SHAPES:
            del self._known[next(iter(self._known))]
        self._known[shapes, training] = boundaries
        return boundaries

    @property
    def _layers(self) -> str:
        return f"layers [{self._start}, {self._end})"

    def _run(self, inputs: Sequence[Tensor], samples: int, training: bool) -> Boundaries:
        values = tuple(
            torch.empty(
                [*tensor.shape[:dim], samples, *tensor.shape[dim + 1 :]],
                dtype=tensor.dtype,
                device=self._device,
            )
            for tensor, dim in zip(inputs, spread_dims(self._dims[0], len(inputs)), strict=True)
        )
        taken: tuple[TensorSpec, ...] = ()
        if self._before is not None:
            values = self._forward(self._before, f"layers [0, {self._start})", values, training)
            taken = self._wires(self._start, values, samples)
        versions = [value._version for value in values]
        outputs = self._forward(self._stage, self._layers, values, training)
        overwritten = [value._version != before for value, before in zip(values, versions, strict=True)]
        check_overwritten(self._layers, values, overwritten)
        given = self._wires(self._end, outputs, samples) if self._end in self._dims else ()
        return Boundaries(taken, given, any(overwritten))

    @staticmethod
    def _forward(
        module: nn.Module, where: str, values: tuple[Tensor, ...], training: bool
    ) -> tuple[Tensor, ...]:
        try:
            with nullcontext() if training else in_mode(module, False):
                outputs = module(*values)
        except PartitionError:
            raise
        except Exception as error:
            raise PartitionError(
                f"{where}: shapes must follow from shapes alone, got {first_line(error)}"
            ) from error
        return several(outputs)

    def _wires(self, cut: int, values: tuple[Any, ...], samples: int) -> tuple[TensorSpec, ...]:
        dims = spread_dims(self._dims[cut], len(values))
        where = f"boundary before layer {cut}"
        if len(dims) != len(values):
            raise PartitionError(f"{where}: {len(dims)} tensors must cross, got {len(values)}")
        return tuple(_wire(where, value, dim, samples) for value, dim in zip(values, dims, strict=True))


def _wire(where: str, value: Any, dim: int, samples: int) -> TensorSpec:
    if not isinstance(value, Tensor):
        raise PartitionError(f"{where}: only tensors may cross, got {type(value).__name__}")
    if value.dim() <= dim or value.shape[dim] % samples:
        raise PartitionError(
            f"{where}: dimension {dim} must be a multiple of the {samples} samples, got {described(value)}"
        )
    shape = tuple(size // samples if at == dim else size for at, size in enumerate(value.shape))
    return TensorSpec(shape, value.dtype, dim, value.requires_grad)


def check_overwritten(where: str, taken: Sequence[Tensor], overwritten: Sequence[bool]) -> None:
    """Refuse a change in place of what another tensor has too, where messages or copies part the two.

    Args:
        where: layers, in words.
        taken: what they take, as it came to be.
        overwritten: which of it they change.

    Raises:
        PartitionError: there is such a pair.
    """
    for (i, one), (j, other) in combinations(enumerate(taken), 2):
        if (overwritten[i] or overwritten[j]) and _overlap(one, other):
            raise PartitionError(
                f"{where}: must not change in place what tensors {i} and {j} of those that they take have in "
                "common; clone one of them in the layer before"
            )


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have elements in common; those of different sizes may."""
    if storage_key(one) != storage_key(other) or one.element_size() != other.element_size():
        return storage_key(one) == storage_key(other)
    marks = np.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=np.bool_)
    as_strided(marks[one.storage_offset() :], one.shape, one.stride())[...] = True
    return bool(as_strided(marks[other.storage_offset() :], other.shape, other.stride()).any())


def _forget_counts(module: nn.Module | None) -> None:
    """Let batch norm that averages over all batches (momentum None) not read how many there were."""
    for layer in () if module is None else module.modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.momentum is None:
            layer.momentum = 0.0


def _words(boundaries: Boundaries) -> str:
    return " ".join(str(list(wire.shape)) for wire in (*boundaries.taken, *boundaries.given))

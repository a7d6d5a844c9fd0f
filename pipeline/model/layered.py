"""What every model looks like to the trainer and the profiler, however it was made.

`Divisible` cuts a sequential model by index, `traced` cuts any module by its graph; both give layers
0..depth-1 and modules for ranges of them, whose parameters keep the names they have in the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from torch import nn


@runtime_checkable
class Layered(Protocol):
    """A model that can be cut between its layers."""

    @property
    def depth(self) -> int:
        """Number of layers."""
        ...

    @property
    def layer_names(self) -> tuple[str, ...]:
        """A unique name for each layer."""
        ...

    def divide(self, start: int, end: int) -> nn.Module:
        """The layers [start, end) as a module that shares its parameters with the whole.

        It takes what crosses the boundary before `start` as positional tensors (the model's inputs for 0)
        and returns what crosses the one before `end`: a tensor, or a tuple of tensors. The names of its
        parameters and buffers are those of the whole model. Dimension 0 of every tensor that crosses is
        the sample, unless `sample_dims` says otherwise.
        """
        ...

    def sample_dims(self, cut: int) -> tuple[int, ...]:
        """For each tensor that crosses the boundary before layer `cut`, which dimension counts samples."""
        ...

    @property
    def ties(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Shared parameters: the name in the whole model, and the layers that use it."""
        ...


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """A model in a mode; afterwards each module is in the mode that it was in, which need not be the same."""
    flags = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag

"""What symbolic sizes come to for a given number of samples.

Layers are chosen for `REFERENCE` samples whatever the example had, so that the same model gives the same
layers to whoever traces it: the profiler, a planner on another machine, every rank of a job.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

REFERENCE = 64
"""Samples for which times and bytes are compared."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of elements and bytes with some samples.

    Attributes:
        symbol: torch's symbol for the number of samples.
        samples: how many.
    """

    symbol: Any
    samples: int = REFERENCE

    def of(self, size: int | torch.SymInt) -> int:
        """A size; 1 where it depends on the values of tensors."""
        if isinstance(size, int):
            return size
        return _value(size.node.expr, self.symbol, self.samples)

    def shape(self, value: Tensor) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self.of(size) for size in value.shape)

    def bytes_of(self, value: object) -> int:
        """Of all tensors of a value."""
        total = 0
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                elements = 1
                for size in self.shape(leaf):
                    elements *= size
                total += elements * leaf.element_size()
        return total

    def stand_in(self, value: Any) -> Any:
        """A tensor of these sizes on the device that holds no data; anything else is given back.

        Always a new one: an operator such as unsqueeze_ changes the shape of what it is given.
        """
        if isinstance(value, Tensor):
            strides = [self.of(step) for step in value.stride()]
            return torch.empty_strided(self.shape(value), strides, dtype=value.dtype, device="meta")
        return self.of(value) if isinstance(value, torch.SymInt) else value


@lru_cache(maxsize=4096)
def _value(expression: Any, symbol: Any, samples: int) -> int:
    value = expression.subs(symbol, samples)
    return int(value) if value.is_Integer else 1

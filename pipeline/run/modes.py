"""Training and evaluation mode of a module, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """In evaluation mode; afterwards each layer is in the mode that it was in, which need not be the same."""
    modes = {layer: layer.training for layer in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for layer, mode in modes.items():
            layer.training = mode

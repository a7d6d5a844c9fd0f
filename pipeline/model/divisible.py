"""A sequential model that divides by the indices of its layers.

    model = Divisible([nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)])
    part = model.divide(1, 3)      # its parameters are "2.weight" and "2.bias", as in the whole

The model is trained serially as it is, and by `pipeline.Trainer` in parts; checkpoints fit both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from arborcast.pipeline.errors import PartitionError


class Divisible(nn.Module):
    """Layers, each of which takes what the one before it returns; a tuple becomes several arguments.

    Args:
        layers: modules, or one list of them.
        first: the index of the first one in the whole model, after which its parameters are named.

    Examples:
        >>> model = pipeline.Divisible(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> model(torch.randn(3, 8)).shape
        torch.Size([3, 2])
    """

    def __init__(self, *layers: nn.Module | Iterable[nn.Module], first: int = 0) -> None:
        super().__init__()
        self._first = first
        if len(layers) == 1 and not isinstance(layers[0], nn.Module):
            layers = tuple(layers[0])
        for layer in layers:
            if not isinstance(layer, nn.Module):
                raise PartitionError(
                    f"layer {len(self)} of a Divisible: must be a module, got {type(layer).__name__}"
                )
            self.append(layer)

    def append(self, layer: nn.Module) -> Divisible:
        """Add a layer behind the last one."""
        self.add_module(str(self._first + len(self)), layer)
        return self

    def forward(self, *inputs: Any) -> Any:
        """What the last layer returns."""
        values: Any = inputs
        for layer in self:
            values = layer(*values) if isinstance(values, tuple) else layer(values)
        return values[0] if isinstance(values, tuple) and len(values) == 1 else values

    def divide(self, start: int, end: int) -> Divisible:
        """The layers [start, end), which keep their names and share their parameters with this model.

        Raises:
            PartitionError: there is no such range.
        """
        if not 0 <= start < end <= len(self):
            raise PartitionError(
                f"divide({start}, {end}): must be 0 <= start < end <= {len(self)}, the number of layers"
            )
        part = Divisible(list(self)[start:end], first=self._first + start)
        part.training = self.training  # that flag only: layers may have been set to eval on their own
        return part

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Index and class of each layer, such as `2 Linear`."""
        return tuple(f"{name} {type(layer).__name__}" for name, layer in self._modules.items())

    def sample_dims(self, cut: int) -> tuple[int, ...]:
        """Dimension 0, for one tensor and for however many cross."""
        return (0,)

    @property
    def ties(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Parameters that several layers share: the first name, and the layers."""
        uses: dict[int, tuple[str, list[int]]] = {}
        for index, (name, layer) in enumerate(self._modules.items()):
            assert layer is not None, "append takes modules only"
            for inner, parameter in layer.named_parameters():
                uses.setdefault(id(parameter), (f"{name}.{inner}", []))[1].append(index)
        return tuple((name, tuple(layers)) for name, layers in uses.values() if len(layers) > 1)

    def __len__(self) -> int:
        """Number of layers."""
        return len(self._modules)

    def __getitem__(self, index: int) -> nn.Module:
        """One layer, counted from this model's first."""
        return list(self)[index]

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers in order."""
        for layer in self._modules.values():
            assert layer is not None, "append takes modules only"
            yield layer

"""The parameters and buffers of a model by identity: all names of each, and which layers use it.

Tied weights have several names for one tensor. A segment registers all of them, so that the checkpoints of
all stages together have exactly the keys of the whole model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from arborcast.pipeline.model.module_structure import named_tensors


@dataclass(frozen=True)
class ParameterRegistry:
    """What a model holds.

    Attributes:
        model: the model.
        names: the first name of each tensor, by every name that it has.
    """

    model: nn.Module
    names: Mapping[str, str]

    def taken(self, firsts: Iterable[str]) -> Iterator[tuple[str, Tensor, bool]]:
        """All names of some tensors in the model's order, each with the tensor and whether it is saved."""
        wanted = set(firsts)
        unsaved = _unsaved(self.model)
        for name, tensor in named_tensors(self.model):
            if self.names[name] in wanted:
                yield name, tensor, name not in unsaved

    def homes(self, uses: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """A layer for each tensor that none uses: that of the tensor with the most alike name.

        So nothing is missing from the checkpoints of all stages together.
        """
        used = [name for name in dict.fromkeys(self.names.values()) if uses.get(name)]
        unused = [name for name in dict.fromkeys(self.names.values()) if not uses.get(name)]
        nearest = {name: max(used, key=lambda other: _alike(name, other), default=None) for name in unused}
        return {name: uses[other][0] if other is not None else 0 for name, other in nearest.items()}


def holdings(model: nn.Module) -> ParameterRegistry:
    """Find the parameters and buffers of a model and which names mean the same tensor."""
    first: dict[int, str] = {}
    return ParameterRegistry(
        model, {name: first.setdefault(id(tensor), name) for name, tensor in named_tensors(model)}
    )


def _unsaved(model: nn.Module) -> set[str]:
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }


def _alike(name: str, other: str) -> int:
    """How many leading parts two names share."""
    count = 0
    for part, same in zip(name.split("."), other.split("."), strict=False):
        if part != same:
            break
        count += 1
    return count

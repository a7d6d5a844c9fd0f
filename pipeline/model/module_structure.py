"""Values as users' models take and return them: tensors in tuples, dicts and classes of named values.

    tensors, structure = flatten(model(**batch))       # a ModelOutput of loss and logits
    structure.rebuild(tensors).logits

Words, numbers and None are part of the structure. What is none of these (a cache) is left out, and named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Structure:
    """How tensors were put together.

    Attributes:
        kind: `Tensor` for one tensor; the class of a container; `type(None)` for a constant; any other class
            for what was left out.
        names: of its parts.
        parts: of a container.
        constant: as it was given; None for anything else.
    """

    kind: type
    names: tuple[Any, ...] = ()
    parts: tuple[Structure, ...] = ()
    constant: Any = None

    def rebuild(self, tensors: Iterable[Any]) -> Any:
        """The value with other tensors; None for what was left out."""
        return _rebuilt(self, iter(tensors))

    @property
    def paths(self) -> tuple[str, ...]:
        """The name of each tensor, such as `logits` or `hidden_states.0`; "" for a single one."""
        return tuple(path for path, part in _walked(self, "") if part.kind is Tensor)

    @property
    def left_out(self) -> dict[str, str]:
        """The classes of what is neither tensor, container nor constant, by name."""
        return {path: part.kind.__name__ for path, part in _walked(self, "") if _is_left_out(part)}

    def __str__(self) -> str:
        """In words: `{input_ids, labels, use_cache=False}`, `(tensor, tensor)`, `Output(loss, logits)`."""
        if not self.parts:
            if self.kind is type(None):
                return repr(self.constant)
            return self.kind.__name__.lower() if self.kind is Tensor else self.kind.__name__
        if isinstance(self.names[0], int):
            return f"({', '.join(map(str, self.parts))})"
        words = ", ".join(_named(name, part) for name, part in zip(self.names, self.parts, strict=True))
        return f"{{{words}}}" if self.kind is dict else f"{self.kind.__name__}({words})"


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers, each under all of its names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def several(made: Any) -> tuple[Any, ...]:
    """What a module gives, or takes, as a tuple: one tensor or a tuple of them."""
    return made if isinstance(made, tuple) else (made,)


def storage_key(tensor: Tensor) -> int:
    """Identity of the memory behind a tensor while it lives; fake tensors have one, but no address."""
    return int(tensor.untyped_storage()._cdata)


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """The tensors of a value in order, and how they are put together."""
    tensors: list[Any] = []
    return tensors, _structure(value, tensors)


def _structure(value: Any, tensors: list[Any]) -> Structure:
    if isinstance(value, Tensor):
        tensors.append(value)
        return Structure(Tensor)
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return Structure(type(None), constant=value)
    parts = _parts(value)
    if parts is None:
        return Structure(type(value))
    kept = tuple(_structure(part, tensors) for part in parts.values())
    return Structure(type(value), tuple(parts), kept)


def _parts(value: Any) -> dict[Any, Any] | None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    return dict(enumerate(value)) if isinstance(value, tuple | list) else None


def _rebuilt(structure: Structure, tensors: Iterator[Any]) -> Any:
    kind = structure.kind
    if kind is Tensor:
        return next(tensors)
    if _is_left_out(structure) or kind is type(None):
        return structure.constant
    parts = [_rebuilt(part, tensors) for part in structure.parts]
    if dataclasses.is_dataclass(kind):
        named = dict(zip(structure.names, parts, strict=True))
        if issubclass(kind, Mapping):  # transformers' outputs, which fill themselves
            return kind(**named)
        made = object.__new__(kind)
        for name, part in named.items():
            object.__setattr__(made, name, part)
        return made
    if issubclass(kind, Mapping):
        pairs = dict(zip(structure.names, parts, strict=True))
        return pairs if kind is dict else kind(pairs)  # type: ignore[call-arg]
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)  # type: ignore[call-arg]


def _is_left_out(structure: Structure) -> bool:
    kind = structure.kind
    is_container = dataclasses.is_dataclass(kind) or issubclass(kind, Mapping | tuple | list)
    return not (kind is Tensor or kind is type(None) or is_container)


def _walked(structure: Structure, path: str) -> Iterator[tuple[str, Structure]]:
    if not structure.parts:
        yield path, structure
    for name, part in zip(structure.names, structure.parts, strict=True):
        yield from _walked(part, f"{path}.{name}" if path else str(name))


def _named(name: Any, part: Structure) -> str:
    if part.kind is Tensor:
        return str(name)
    return f"{name}={part}"

"""How much memory torch's tensors take while something runs, and at most."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the memory that operators take while this is entered, until it is let go of.

    Memory that several tensors share counts once; of a `DTensor` its part here counts. That of tensors made
    before is not seen, nor what an operator takes for itself and returns.

    Args:
        device: type of the memory: "cpu", or "meta", which fake tensors have.

    Attributes:
        now: bytes that live.
        peak: the most that lived at once.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._sizes: dict[int, int] = {}
        self._lock = threading.RLock()
        self.now = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run one operator, and note what it returns."""
        given = {id(storage) for storage in self._storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        self.add(result, given)
        return result

    def add(self, values: Any, known: Container[int] = ()) -> None:
        """Count what threads made for which this is not entered, such as copies, as long as it lives."""
        with self._lock:
            for storage in self._storages(values):
                key = id(storage)
                if key not in self._sizes and key not in known:
                    weakref.finalize(storage, self._forget, key)
                    self._sizes[key] = 0
                if key in self._sizes:
                    self.now += storage.nbytes() - self._sizes[key]
                    self._sizes[key] = storage.nbytes()
            self.peak = max(self.peak, self.now)

    def _storages(self, values: Any) -> list[torch.UntypedStorage]:
        tensors = (it for it in tree_leaves(values) if isinstance(it, Tensor))
        found = [part.untyped_storage() for it in tensors for part in _parts(it)]
        return [it for it in found if it.device.type == self._device]

    def _forget(self, key: int) -> None:
        with self._lock:
            self.now -= self._sizes.pop(key)


def _parts(tensor: Any) -> Iterator[Tensor]:
    """The tensors whose memory it is: of a wrapper, such as a `DTensor`, which has none, those within."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, Tensor):  # a mesh is named, too
            yield from _parts(part)

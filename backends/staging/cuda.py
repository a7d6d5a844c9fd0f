"""CUDA tensors through pinned host memory, by streams and events of torch.

This has never run on a GPU. It was written by torch's documentation: a copy between pinned memory and a GPU
with `non_blocking` returns at once and happens in the order of the current stream; an event recorded behind
it there has happened when the copy has; `Event.synchronize` waits without the interpreter's lock. What needs
no GPU, which piece is copied when and what waits for it, is the engine's and is tested with `emulated`; of
what is here the order of calls is tested, with drawn streams and events.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from fractions import Fraction
from typing import Any, cast

import torch
from torch import Tensor

from arborcast.backends.staging.device import CopyCosts, CopyDirection, CopyThread, Done

ASSUMED = CopyCosts(Fraction(12), Fraction(10))
"""A slot of PCIe 3.0 with 16 lanes, and a copy's launch: estimates by which depth and pieces are chosen."""


_CUDA = cast(Any, torch.cuda)
"""Streams and events have no types."""


class CudaDevice:
    """All GPUs of this process; see `device.Device`. For each way of each GPU there is a stream."""

    def __init__(self) -> None:
        self.costs = ASSUMED
        self._streams: dict[tuple[torch.device, CopyDirection | None], torch.cuda.Stream] = {}
        self._threads = {way: CopyThread(f"cuda-{way.name.lower()}") for way in CopyDirection}

    def holds(self, tensor: Tensor) -> bool:
        """See `Device`."""
        return tensor.device.type == "cuda"

    def host_memory(self, nbytes: int) -> Tensor:
        """See `Device`."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, way: CopyDirection, into: Tensor, source: Tensor, done: Done) -> None:
        """See `Device`."""
        device = source.device if way is CopyDirection.IN else into.device
        stream = self._stream(device, way)
        # What made the tensor is in the stream that the call has entered; a piece that goes out has been
        # copied in, if it was, since the engine begins a copy when those that it waits for are done.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)
            # One that waits without keeping a processor busy; it belongs to the GPU that records it.
            copied = stream.record_event(_CUDA.Event(blocking=True))
        self._threads[way].put(copied.synchronize, done)

    def entering(self, tensor: Tensor) -> AbstractContextManager[None]:
        """See `Device`: a stream of its own follows the caller's, and the host waits for it in the end.

        So what the call has written is there when its work is done, for every stream, and no tensor is freed
        while something still uses it.
        """
        before = torch.cuda.current_stream(tensor.device).record_event()

        @contextmanager
        def entered() -> Iterator[None]:
            stream = self._stream(tensor.device, None)
            stream.wait_event(before)
            with torch.cuda.stream(stream):
                try:
                    yield
                finally:
                    stream.synchronize()

        return entered()

    def close(self) -> None:
        """See `Device`."""
        for thread in self._threads.values():
            thread.close()

    def _stream(self, device: torch.device, way: CopyDirection | None) -> torch.cuda.Stream:
        stream = self._streams.get((device, way))
        if stream is None:
            stream = self._streams[device, way] = _CUDA.Stream(device)
        return stream

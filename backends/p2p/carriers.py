"""What carries groups of messages in a process group: backends of torch with connections of their own.

NCCL or RCCL carries tensors on GPUs, gloo those in host memory. A call on GPUs runs on a stream of its own,
which follows the caller's; on the host the thread that serves the call waits at its end, and nobody else.

The part for GPUs ran on one that four ranks shared (`tests/gpu`), never on several. Its order of calls is
tested with drawn streams and events, and the same calls over gloo in real processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from arborcast.backends.errors import ExecutionError
from arborcast.backends.tensors.torch_compat import Store, new_nccl

_CUDA = cast(Any, torch.cuda)
"""Streams and events have no types."""

_INTERPRETER = threading.Lock()
"""Triton's interpreter runs one kernel of a process at a time."""


class MessageCarrier(Protocol):
    """Carries messages between the ranks of a group, for one thread at a time."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether it carries what lies where the tensor does; the same on all ranks."""

    def backend(self, timeout_s: float) -> Any:
        """That of torch, whose calls fail after so many seconds; connected at its first message.

        Raises:
            ExecutionError: it has been ended.
        """

    def entering(self, tensor: Tensor) -> AbstractContextManager[None]:
        """For a call on a tensor, to be asked for by the thread that makes the call.

        Entered by the thread that serves it, what the caller did before to the tensor has happened; when it
        is left, what was done inside has.
        """

    def mark(self, tensor: Tensor) -> Callable[[], bool]:
        """A question: whether all that was begun until now on the tensor's device is done."""

    def launch(self, kernel: Callable[[], None], tensor: Tensor) -> Callable[[], bool]:
        """Begin a kernel on the tensor's device; a question: whether it is done. Raises what it raised."""

    def end(self) -> None:
        """End all messages, now and later, here and on ranks that wait for this one; from any thread."""

    def close(self) -> None:
        """Free what it holds, when all calls are done on all ranks."""


class HostCarrier:
    """Gloo, for tensors in host memory; to try what GPUs do where there are none.

    Args:
        backend: see `MessageCarrier`; gives the gloo of the group, which somebody else ends.
    """

    def __init__(self, backend: Callable[[float], Any]) -> None:
        self.backend = backend

    def holds(self, tensor: Tensor) -> bool:
        """See `MessageCarrier`."""
        return tensor.device.type == "cpu"

    def entering(self, tensor: Tensor) -> AbstractContextManager[None]:
        """See `MessageCarrier`: there are no streams."""
        return nullcontext()

    def mark(self, tensor: Tensor) -> Callable[[], bool]:
        """See `MessageCarrier`: who has waited for a message has it."""
        return lambda: True

    def launch(self, kernel: Callable[[], None], tensor: Tensor) -> Callable[[], bool]:
        """See `MessageCarrier`: in a thread, while this one looks after the peers."""
        done: Future[None] = Future()

        @torch.inference_mode()
        def run() -> None:
            try:
                with _INTERPRETER:
                    kernel()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        threading.Thread(target=run, name="synth-kernel", daemon=True).start()
        return lambda: done.done() and done.result() is None

    def end(self) -> None:
        """See `MessageCarrier`."""

    def close(self) -> None:
        """See `MessageCarrier`."""


class CudaCarrier:
    """NCCL or RCCL, for tensors on the GPUs of this process.

    Args:
        store: of the group, for this carrier alone.
        rank: this one.
        size: ranks of the group.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._where = store, rank, size
        self._nccl: Any = None
        self._has_ended = False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def holds(self, tensor: Tensor) -> bool:
        """See `MessageCarrier`."""
        return tensor.device.type == "cuda"

    def backend(self, timeout_s: float) -> Any:
        """See `MessageCarrier`."""
        if self._has_ended:
            raise ExecutionError("the group has failed, and starts nothing more")
        timeout = timedelta(seconds=timeout_s)
        if self._nccl is None:
            self._nccl = new_nccl(*self._where, timeout)
        self._nccl._set_default_timeout(timeout)
        return self._nccl

    def entering(self, tensor: Tensor) -> AbstractContextManager[None]:
        """See `MessageCarrier`."""
        before = torch.cuda.current_stream(tensor.device).record_event()

        @contextmanager
        def entered() -> Iterator[None]:
            stream = self._streams.get(tensor.device)
            if stream is None:
                stream = self._streams[tensor.device] = _CUDA.Stream(tensor.device)
            stream.wait_event(before)
            with torch.cuda.stream(stream):
                try:
                    yield
                finally:
                    stream.synchronize()

        return entered()

    def mark(self, tensor: Tensor) -> Callable[[], bool]:
        """See `MessageCarrier`."""
        event = _CUDA.current_stream(tensor.device).record_event()
        return lambda: bool(event.query())

    def launch(self, kernel: Callable[[], None], tensor: Tensor) -> Callable[[], bool]:
        """See `MessageCarrier`."""
        kernel()
        return self.mark(tensor)

    def end(self) -> None:
        """See `MessageCarrier`."""
        self._has_ended = True
        if self._nccl is not None:
            self._nccl.abort()

    def close(self) -> None:
        """See `MessageCarrier`."""
        if self._nccl is not None and not self._has_ended:
            self._nccl.shutdown()

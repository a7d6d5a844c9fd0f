"""What the engine needs of a device: copies of single pieces that run while it does something else."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

Done: TypeAlias = Callable[[BaseException | None], None]
"""Called once when a copy has ended, from any thread, with what went wrong where something did."""


class CopyDirection(IntEnum):
    """From the device to host memory, back, or from one place on the device to another."""

    IN = 0
    OUT = 1
    WITHIN = 2


@dataclass(frozen=True, slots=True)
class CopyCosts:
    """What copies take that run one after another in one direction; both directions run at once.

    Attributes:
        rate: GB/s.
        each_us: what a copy takes besides its bytes.
    """

    rate: Fraction
    each_us: Fraction

    def time_us(self, nbytes: Fraction, copies: int) -> Fraction:
        """Of so many bytes in so many copies."""
        return nbytes / (1000 * self.rate) + copies * self.each_us


class StagingDevice(Protocol):
    """Where tensors lie.

    Attributes:
        costs: by which pieces and depth are chosen; the same on all ranks.
    """

    costs: CopyCosts

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor lies there; the same on all ranks for tensors of one type of device."""

    def host_memory(self, nbytes: int) -> Tensor:
        """Bytes in host memory that copies are fastest with."""

    def copy(self, way: CopyDirection, into: Tensor, source: Tensor, done: Done) -> None:
        """Begin a copy, after all that the current thread's stream holds, and return.

        Copies of one way end in the order in which they began. Both tensors must stay until it is done.
        """

    def entering(self, tensor: Tensor) -> AbstractContextManager[None]:
        """For a call on a tensor, to be asked for by the thread that makes the call.

        Entered by the thread that serves it, what the caller did before to the tensor has happened; when it
        is left, what was done inside has.
        """

    def close(self) -> None:
        """End its threads; copies that have begun are done before."""


class CopyThread:
    """Waits for copies in their order, on a thread that starts with the first one.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun: queue.SimpleQueue[tuple[Callable[[], None], Done] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, finish: Callable[[], None], done: Done) -> None:
        """Have `finish` called, which returns when the copy has ended or raises, and then `done`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._begun.put((finish, done))

    def close(self) -> None:
        """Return when all is done that was put."""
        if self._thread is not None:
            self._begun.put(None)
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        # As the threads of a group's calls: tensors that were made in inference mode are written only in it.
        with torch.inference_mode():
            while (begun := self._begun.get()) is not None:
                finish, done = begun
                error: BaseException | None = None
                try:
                    finish()
                except BaseException as raised:
                    error = raised
                done(error)
                del begun, finish, done  # nobody's tensors live on while this thread sleeps

"""Slots and flags that ranks reach of each other: in shared memory of processes, for tests on CPUs."""

from __future__ import annotations

from typing import Protocol

import torch

from arborcast.backends.device.tables import ABORT, Shape


class Memory(Protocol):
    """What an executor needs of it."""

    def addresses(self) -> list[int]:
        """Of the staging of each rank, multiples of 16, then of the flags of each rank."""

    def abort(self, rank: int) -> None:
        """Raise the abort word of a rank: its kernel leaves, and has not done what it was called for."""


class SharedMemory:
    """Of processes that are forked after it is made.

    Args:
        shape: of the plan.
        itemsize: bytes of an element.
    """

    def __init__(self, shape: Shape, itemsize: int) -> None:
        self._lanes = shape.lanes
        self._staging = [torch.zeros(size * itemsize + 16, dtype=torch.uint8) for size in shape.staging]
        self._flags = [torch.zeros(size * shape.lanes, dtype=torch.int32) for size in shape.flags]
        for tensor in (*self._staging, *self._flags):
            tensor.share_memory_()  # type: ignore[no-untyped-call]

    def addresses(self) -> list[int]:
        """See `Memory`."""
        staging = [-(-tensor.data_ptr() // 16) * 16 for tensor in self._staging]
        return staging + [tensor.data_ptr() for tensor in self._flags]

    def abort(self, rank: int) -> None:
        """See `Memory`."""
        self._flags[rank][ABORT * self._lanes : (ABORT + 1) * self._lanes] = 1

    def start_at(self, number: int) -> None:
        """Let all flags stand where so many pieces have been done; executors must begin there, too."""
        for flags in self._flags:
            flags[(ABORT + 1) * self._lanes :] = number

"""One rank's calls of the kernel, of any length, one behind the other without a barrier."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

import torch
import triton.language as tl

from arborcast.backends.device import kernel
from arborcast.backends.device.memory import Memory
from arborcast.backends.device.plan import Plan
from arborcast.backends.device.tables import INPUT, OUTPUT
from arborcast.backends.errors import ExecutionError
from arborcast.synth.errors import InputError

TYPES = {
    torch.float32: (tl.float32, tl.float32),
    torch.float64: (tl.float64, tl.float64),
    torch.bfloat16: (tl.bfloat16, tl.float32),
    torch.float16: (tl.float16, tl.float32),
    torch.int8: (tl.int8, tl.int8),
    torch.uint8: (tl.uint8, tl.uint8),
    torch.int16: (tl.int16, tl.int16),
    torch.int32: (tl.int32, tl.int32),
    torch.int64: (tl.int64, tl.int64),
}
"""Types of elements, and what several sources are added up in before the sum is rounded once."""

OPERATIONS = ("sum", "max", "min")

_KEPT = 64
"""Lengths whose tables an executor keeps."""


class _Prepared(NamedTuple):
    """Tables of one length: `Tables` as tensors, and the elements that input and output must have."""

    tensors: list[torch.Tensor]
    pieces: int
    aligned: bool
    reads: int
    writes: int


class DeviceExecutor:
    """One rank of a plan.

    Args:
        plan: the same on all ranks.
        rank: this one.
        memory: that all ranks reach.
        dtype: of elements; the plan's `itemsize` is that of it.
        block: elements that a program moves at once, a power of two.
        begun: pieces that have been done before; flags must stand there.
        timeout_s: of a call, after which the kernel is made to leave.

    Raises:
        InputError: a type that the kernel does not have.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        memory: Memory,
        dtype: torch.dtype,
        block: int = 1024,
        begun: int = 0,
        timeout_s: float = 600.0,
    ) -> None:
        if dtype not in TYPES or plan.shape.vector * dtype.itemsize != 16:
            raise InputError(f"device: type must be one of {len(TYPES)} of the plan's item size, got {dtype}")
        self._plan, self._rank, self._memory, self._dtype = plan, rank, memory, dtype
        self._block, self._timeout_s, self._failed = block, timeout_s, False
        self._counters = torch.full((plan.programs,), begun, dtype=torch.int32)
        self._tables: OrderedDict[int, _Prepared] = OrderedDict()

    def __call__(self, given: torch.Tensor, result: torch.Tensor, count: int, op: str = "sum") -> None:
        """Run the collective.

        Args:
            given: this rank's input; any tensor where it has none.
            result: its output, which may be the input where kinds work in place.
            count: elements of the whole buffer, as algbw counts it.
            op: how contributions are combined, one of `OPERATIONS`.

        Raises:
            InputError: an unknown operation, or a tensor of another type, not contiguous, or too short.
            ExecutionError: time was up, now or before; the executors of all ranks are unusable afterwards.
        """
        if op not in OPERATIONS:
            raise InputError(f"device: operation must be one of {', '.join(OPERATIONS)}, got {op}")
        if self._failed:
            raise ExecutionError(f"device: rank {self._rank} is unusable since a call has timed out")
        made = self._prepared(count)
        for name, tensor, least in (("input", given, made.reads), ("output", result, made.writes)):
            fits = tensor.dtype == self._dtype and tensor.is_contiguous() and tensor.numel() >= least
            if least and not fits:
                form = "" if tensor.is_contiguous() else ", not contiguous"
                raise InputError(
                    f"device: {name} must be contiguous, of {least} elements of {self._dtype}, got "
                    f"{tensor.numel()} of {tensor.dtype}{form}"
                )
        own = [given.data_ptr(), result.data_ptr()]
        addresses = torch.tensor(own + self._memory.addresses(), dtype=torch.int64)
        shape = self._plan.shape
        element, total = TYPES[self._dtype]
        aligned = made.aligned and all(pointer % 16 == 0 for pointer in own)

        def abort() -> None:
            self._failed = True
            self._memory.abort(self._rank)

        watchdog = threading.Timer(self._timeout_s, abort)
        watchdog.daemon = True
        watchdog.start()
        try:
            kernel.run_schedule[(self._plan.programs,)](
                *made.tensors, addresses, self._counters, self._rank, self._plan.ranks, made.pieces,
                shape.depth, shape.lanes, shape.ring, DTYPE=element, SUM=total, OP=op, BLOCK=self._block,
                VECTOR=shape.vector, ALIGN=shape.vector if aligned else 1,
            )  # fmt: skip
        finally:
            watchdog.cancel()
        if self._failed:
            raise ExecutionError(
                f"device: rank {self._rank} waited {self._timeout_s} s for a peer in "
                f"{self._plan.schedule.collective.kind} of {count} elements"
            )

    def _prepared(self, count: int) -> _Prepared:
        if count not in self._tables:
            made = self._plan.tables(self._rank, count)
            tensors = [torch.from_numpy(numbers) for numbers in (made.rows, made.items, made.groups)]
            self._tables[count] = _Prepared(
                tensors, made.pieces, made.aligned, made.reach(INPUT), made.reach(OUTPUT)
            )
            if len(self._tables) > _KEPT:
                self._tables.popitem(last=False)
        return self._tables[count]

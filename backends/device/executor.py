"""One rank's calls of the kernel, of any length, one behind the other without a barrier.

On a GPU a call is launched on the current stream, and the host waits for nothing.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from arborcast.backends.device import kernel
from arborcast.backends.device.memory import PeerMemory
from arborcast.backends.device.plan import DevicePlan
from arborcast.backends.device.tables import INPUT, OUTPUT
from arborcast.backends.errors import ExecutionError
from arborcast.synth.errors import InputError

TYPES = {
    torch.float32: (tl.float32, tl.float32, 0),
    torch.float64: (tl.float64, tl.float64, 0),
    torch.bfloat16: (tl.bfloat16, tl.float32, 0),
    torch.float16: (tl.float16, tl.float32, 0),
    torch.float8_e4m3fn: (tl.uint8, tl.float32, 3),
    torch.float8_e5m2: (tl.uint8, tl.float32, 2),
    torch.int8: (tl.int8, tl.int8, 0),
    torch.uint8: (tl.uint8, tl.uint8, 0),
    torch.int16: (tl.int16, tl.int16, 0),
    torch.int32: (tl.int32, tl.int32, 0),
    torch.int64: (tl.int64, tl.int64, 0),
}
"""Types of elements: what the kernel loads, what an instruction adds its sources up in, and bits of the
fraction where the kernel converts by itself.

An instruction adds in the order of its sources and rounds once, to the nearest, to the even one of two. Of 8
bits, what is too large becomes what torch at hand makes of it: infinite in e5m2, the largest number in e4m3fn
(NaN by older torch). Kinds that do not add move bits, whatever they mean.
"""

_BITS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}

OPERATIONS = ("sum", "max", "min")

AMD = ("gfx90a", "gfx942", "gfx950")
"""GPUs of AMD in whose compiled kernel the writes of all waves are over before a flag is raised, and go on to
peers: `tests/device/test_compiled.py` reads it there. Others are refused."""

_KEPT = 64
"""Lengths whose tables an executor keeps."""

_LOOK_S = 0.05
"""How often calls under way are looked at."""


def _wave(device: torch.device) -> int:
    """Threads of a warp.

    Raises:
        InputError: an AMD GPU that is none of `AMD`.
    """
    if device.type != "cuda" or torch.version.hip is None:
        return 32
    name = str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    if name not in AMD:
        raise InputError(f"device: AMD's GPU must be one of {', '.join(AMD)}, got {name}")
    return 64


def refuse_compiled(who: str) -> None:
    """Refuse a CPU without the interpreter.

    Raises:
        InputError: in the name of `who`.
    """
    if not isinstance(kernel.run_schedule, InterpretedFunction):
        raise InputError(
            f"{who} needs Triton's interpreter: set TRITON_INTERPRET=1 before triton is imported"
        )


def element_constants(dtype: torch.dtype, adds: bool) -> dict[str, Any]:
    """What the kernel is compiled for, by the type of elements and whether the collective adds them up."""
    bits = _BITS[dtype.itemsize]
    element, total, fraction = TYPES[dtype] if adds else (bits, bits, 0)
    infinite = torch.tensor(torch.inf).to(dtype).view(torch.uint8) if fraction else 0
    return {"DTYPE": element, "SUM": total, "FRACTION": fraction, "LARGEST": int(infinite)}


def least_block(threads: int, vector: int) -> int:
    """Elements that so many threads move at once, 16 bytes each; 1,024 where that is less."""
    return max(1024, threads * vector)


class _Prepared(NamedTuple):
    """Tables of one length: `Tables` as tensors, and the elements that input and output must have."""

    tensors: list[torch.Tensor]
    pieces: int
    aligned: bool
    reads: int
    writes: int


class DeviceExecutor:
    """One rank of a plan.

    Before a graph is captured all calls must have been waited for (`finish`): until they are over, a thread
    asks for them, which a capture forbids. Nobody watches its replays.

    Args:
        plan: the same on all ranks.
        rank: this one.
        memory: that all ranks reach.
        dtype: of elements; the plan's `itemsize` is that of it.
        block: elements that a program moves at once, a power of two; None for 1,024, or for more where its
            threads move 16 bytes each.
        warps: of a program.
        begun: pieces that have been done before; flags must stand there.
        timeout_s: of a call, after which the kernel is made to leave.

    Attributes:
        timeout_s: as given; what is set holds from the next call on.

    Raises:
        InputError: a type that the kernel does not have, or an AMD GPU that is none of `AMD`.
    """

    def __init__(
        self,
        plan: DevicePlan,
        rank: int,
        memory: PeerMemory,
        dtype: torch.dtype,
        block: int | None = None,
        warps: int = 4,
        begun: int = 0,
        timeout_s: float = 600.0,
    ) -> None:
        if dtype not in TYPES or plan.shape.vector * dtype.itemsize != 16:
            raise InputError(f"device: type must be one of {len(TYPES)} of the plan's item size, got {dtype}")
        wave = _wave(memory.device)
        self._plan, self._rank, self._memory, self._dtype = plan, rank, memory, dtype
        self._block = block or least_block(warps * wave, plan.shape.vector)
        self._constants = element_constants(dtype, plan.schedule.collective.kind.reduces)
        self._warps, self.timeout_s, self._failed = warps, timeout_s, False
        self._is_on_host = memory.device.type == "cpu"
        self._counters = torch.full((plan.programs,), begun, dtype=torch.int32, device=memory.device)
        self._addresses = torch.tensor(memory.addresses(), dtype=torch.int64, device=memory.device)
        self._tables: OrderedDict[int, _Prepared] = OrderedDict()
        self._captured: list[_Prepared] = []
        # When each must be over, whether it is, and what it reads until then, on whatever stream.
        self._calls: deque[tuple[float, Callable[[], bool], _Prepared]] = deque()
        self._lock = threading.Lock()
        self._is_watched = False

    def prepare(self, count: int, op: str = "sum") -> None:
        """Make tables and compile, so that no peer waits for it in the first call, and a graph may have it.

        Args:
            count: as in a call, like `op`.
            op: what is compiled.
        """
        made = self._prepared(count)
        some = self._counters.data_ptr()  # as wide as real addresses, which makes the same kernel
        for aligned in {made.aligned, False}:
            self._launch(made._replace(pieces=0), some, some, op, aligned=aligned)

    def __call__(self, given: torch.Tensor, result: torch.Tensor, count: int, op: str = "sum") -> None:
        """Run the collective.

        Args:
            given: this rank's input; any tensor where it has none.
            result: its output, which may be the input where kinds work in place.
            count: elements of the whole buffer, as algbw counts it.
            op: how contributions are combined, one of `OPERATIONS`.

        Raises:
            InputError: an unknown operation, or a tensor of another type, elsewhere, not contiguous, or too
                short.
            ExecutionError: time was up, before or, on the host, now; the executors of all ranks are unusable
                afterwards. On a GPU `finish` tells of the calls that are under way.
        """
        if op not in OPERATIONS:
            raise InputError(f"device: operation must be one of {', '.join(OPERATIONS)}, got {op}")
        if self._failed:
            raise ExecutionError(f"device: rank {self._rank} is unusable since a call has timed out")
        made = self._prepared(count)
        for name, tensor, least in (("input", given, made.reads), ("output", result, made.writes)):
            is_here = tensor.dtype == self._dtype and tensor.device == self._memory.device
            if least and not (is_here and tensor.is_contiguous() and tensor.numel() >= least):
                form = "" if tensor.is_contiguous() else ", not contiguous"
                raise InputError(
                    f"device: {name} must be contiguous, of {least} elements of {self._dtype} on "
                    f"{self._memory.device}, got {tensor.numel()} of {tensor.dtype} on {tensor.device}{form}"
                )
        own = given.data_ptr(), result.data_ptr()
        aligned = made.aligned and all(pointer % 16 == 0 for pointer in own)
        launch = partial(self._launch, made, *own, op, aligned=aligned)
        if self._is_on_host:
            over = threading.Event()
            self._watch(over.is_set, made)
            try:
                launch()
            finally:
                over.set()
            self._refuse_if_failed(f"{self._plan.schedule.collective.kind} of {count} elements")
        elif torch.cuda.is_current_stream_capturing():
            self._captured.append(made)  # for replays, which nobody watches
            launch()
        else:
            launch()
            event = cast(Any, torch.cuda).current_stream(self._memory.device).record_event()
            self._watch(event.query, made)

    def finish(self) -> None:
        """Wait for the calls on the current stream.

        Raises:
            ExecutionError: time was up in one of them.
        """
        if not self._is_on_host:
            cast(Any, torch.cuda).current_stream(self._memory.device).synchronize()
        self._refuse_if_failed(str(self._plan.schedule.collective.kind))

    def abort(self) -> None:
        """Make the kernel leave, and all further calls fail; from any thread."""
        self._failed = True
        self._memory.abort(self._rank)

    def _refuse_if_failed(self, call: str) -> None:
        if self._failed:
            raise ExecutionError(f"device: rank {self._rank} waited {self.timeout_s} s for a peer in {call}")

    def _launch(self, made: _Prepared, given: int, result: int, op: str, *, aligned: bool) -> None:
        shape = self._plan.shape
        kernel.run_schedule[(self._plan.programs,)](
            *made.tensors, given, result, self._addresses, self._counters, self._rank, self._plan.ranks,
            made.pieces, shape.depth, shape.lanes, shape.ring, **self._constants, OP=op, BLOCK=self._block,
            VECTOR=shape.vector, ALIGN=shape.vector if aligned else 1, num_warps=self._warps,
        )  # fmt: skip

    def _watch(self, is_over: Callable[[], bool], made: _Prepared) -> None:
        """Have a call that is not over in time ended, by a thread that lives while calls are under way."""
        with self._lock:
            self._calls.append((time.monotonic() + self.timeout_s, is_over, made))
            if not self._is_watched:
                self._is_watched = True
                threading.Thread(target=self._look_after_calls, daemon=True).start()

    def _look_after_calls(self) -> None:
        while True:
            with self._lock:
                while self._calls and self._calls[0][1]():
                    self._calls.popleft()
                if not self._calls:
                    self._is_watched = False
                    return
                if time.monotonic() > self._calls[0][0]:
                    self._is_watched = False
                    self.abort()
                    return
            time.sleep(min(_LOOK_S, self.timeout_s / 4))

    def _prepared(self, count: int) -> _Prepared:
        if count not in self._tables:
            made = self._plan.tables(self._rank, count)
            numbers = made.rows, made.items, made.groups
            tensors = [torch.from_numpy(array).to(self._memory.device) for array in numbers]
            self._tables[count] = _Prepared(
                tensors, made.pieces, made.aligned, made.reach(INPUT), made.reach(OUTPUT)
            )
            if len(self._tables) > _KEPT:
                self._tables.popitem(last=False)
        return self._tables[count]

"""Slots and flags that ranks reach of each other: of processes of one host, or of GPUs by torch.

`paths` decides which of these a plan's ranks make.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from arborcast.backends.device.tables import ABORT, Shape
from arborcast.backends.errors import ExecutionError

_VECTOR = 16
"""Bytes at whose multiples staging begins."""

_SHARED = "/dev/shm"
"""Where files are in memory."""


class PeerMemory(Protocol):
    """What an executor needs of it.

    Attributes:
        device: where it lies, and where the rank's kernel runs.
    """

    device: torch.device

    def addresses(self) -> list[int]:
        """Of the staging of each rank, multiples of 16, then of the flags of each rank."""

    def abort(self, rank: int) -> None:
        """Raise the abort word of a rank: its kernel leaves, and has not done what it was called for."""


@dataclass(frozen=True, slots=True)
class PeerRanks:
    """The ranks that make memory together.

    Attributes:
        rank: this one.
        exchange: gives what all ranks have said, in their order, when they have.
        rendezvous: torch's, of symmetric memory; gives a handle.
    """

    rank: int
    exchange: Callable[[str], Sequence[str]]
    rendezvous: Callable[[torch.Tensor], Any]

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> PeerRanks:
        """Those of a group of torch."""

        def exchange(said: str) -> list[str]:
            of_ranks = [""] * group.size()
            dist.all_gather_object(of_ranks, said, group=group)
            return of_ranks

        def rendezvous(own: torch.Tensor) -> Any:
            from torch.distributed import _symmetric_memory as symmetric_memory

            return cast(Any, symmetric_memory).rendezvous(own, group)

        return cls(group.rank(), exchange, rendezvous)

    @classmethod
    def by_store(
        cls, store: Any, name: str, rank: int, size: int, exchange: Callable[[str], Sequence[str]]
    ) -> PeerRanks:
        """The same by a store for them alone, and a name that no others have.

        Torch finds the ranks of symmetric memory by the name of a group: it gets one without a backend.
        """
        c10d = cast(Any, torch._C._distributed_c10d)

        @cache
        def group() -> Any:
            made = c10d.ProcessGroup(store, rank, size)
            c10d._register_process_group(name, made)  # which does not keep it; this cache does
            return made

        def rendezvous(own: torch.Tensor) -> Any:
            group()
            return c10d._SymmetricMemory.rendezvous(own, name)

        return cls(rank, exchange, rendezvous)

    def together(self, what: str, step: Callable[[], Any]) -> list[Any]:
        """What a step gives on all ranks, as values of JSON.

        Raises:
            ExecutionError: it failed on one, which all say.
        """
        try:
            said = [step(), None]
        except (RuntimeError, AssertionError) as error:  # of torch without GPUs, too
            said = [None, str(error).partition("\n")[0]]
        of_ranks = [json.loads(one) for one in self.exchange(json.dumps(said))]
        for rank, (_, reason) in enumerate(of_ranks):
            if reason is not None:
                raise ExecutionError(f"device: rank {rank} cannot {what}: {reason}")
        return [given for given, _ in of_ranks]


class SharedMemory:
    """Of ranks in one process, as launches on streams of one GPU, or in processes that are forked later.

    Args:
        shape: of the plan.
        itemsize: bytes of an element.
        device: a GPU, or the host, whose memory forked processes share.
    """

    def __init__(self, shape: Shape, itemsize: int, device: str = "cpu") -> None:
        self._lanes = shape.lanes
        self._staging = [
            torch.zeros(size * itemsize + _VECTOR, dtype=torch.uint8, device=device) for size in shape.staging
        ]
        self._flags = [
            torch.zeros(size * shape.lanes, dtype=torch.int32, device=device) for size in shape.flags
        ]
        self.device = self._flags[0].device
        self._aside = _stream_aside(self.device)
        for tensor in (*self._staging, *self._flags) if self.device.type == "cpu" else ():
            tensor.share_memory_()  # type: ignore[no-untyped-call]

    def addresses(self) -> list[int]:
        """See `PeerMemory`."""
        staging = [-(-tensor.data_ptr() // _VECTOR) * _VECTOR for tensor in self._staging]
        return staging + [tensor.data_ptr() for tensor in self._flags]

    def abort(self, rank: int) -> None:
        """See `PeerMemory`."""
        _raise_word(self._flags[rank], self._lanes, self._aside)

    def start_at(self, number: int) -> None:
        """Let all flags stand where so many pieces have been done; executors must begin there, too."""
        for flags in self._flags:
            flags[(ABORT + 1) * self._lanes :] = number


class GroupMemory(SharedMemory):
    """Of the processes of a group on one host, in files that are gone when it is made; to try what GPUs do.

    Args:
        shape: of the plan.
        itemsize: bytes of an element.
        ranks: in the order of the plan's; all must make the memory together.
    """

    def __init__(self, shape: Shape, itemsize: int, ranks: PeerRanks) -> None:
        self._lanes, self._aside = shape.lanes, None
        self.device = torch.device("cpu")
        kept = _SHARED if Path(_SHARED).is_dir() else None
        folder = tempfile.mkdtemp(prefix="arborcast-", dir=kept) if ranks.rank == 0 else ""
        folder = ranks.exchange(folder)[0]

        def mapped(name: str, elements: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.from_file(f"{folder}/{name}", shared=True, size=elements, dtype=dtype)

        self._staging = [
            mapped(f"staging{it}", size * itemsize + _VECTOR, torch.uint8)
            for it, size in enumerate(shape.staging)
        ]
        self._flags = [
            mapped(f"flags{it}", size * shape.lanes, torch.int32) for it, size in enumerate(shape.flags)
        ]
        ranks.exchange("")  # all have mapped them
        if ranks.rank == 0:
            shutil.rmtree(folder)


class _GpuMemory:
    """A tensor of each rank on its GPU, of one size: its slots, then its flags.

    Args:
        shape: of the plan.
        itemsize: bytes of an element.
        device: where the tensor of this rank lies; None for the current GPU.
    """

    _own: torch.Tensor
    _starts: list[int]

    def __init__(self, shape: Shape, itemsize: int, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        self._lanes, self._aside = shape.lanes, _stream_aside(self.device)
        self._staging_bytes = -(-max(shape.staging) * itemsize // _VECTOR) * _VECTOR
        self._bytes = self._staging_bytes + 4 * max(shape.flags) * shape.lanes

    def _clear(self) -> None:
        """Let all flags be 0 before any peer raises one."""
        self._own.zero_()
        torch.cuda.synchronize(self.device)

    def addresses(self) -> list[int]:
        """See `PeerMemory`; 0 of ranks whose memory this one does not reach."""
        return self._starts + [start and start + self._staging_bytes for start in self._starts]

    def abort(self, rank: int) -> None:
        """See `PeerMemory`: of this rank only, whose watch it is."""
        _raise_word(self._own[self._staging_bytes :].view(torch.int32), self._lanes, self._aside)


class SymmetricMemory(_GpuMemory):
    """Of the GPUs of a process group, which torch maps into each other's processes.

    Torch maps all pairs, and fails where two GPUs cannot reach each other. Ranks that share a GPU, to try it
    with one, need TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1.

    Args:
        shape: of the plan.
        itemsize: bytes of an element.
        ranks: in the order of the plan's; all must make the memory together.
    """

    def __init__(self, shape: Shape, itemsize: int, ranks: PeerRanks) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        super().__init__(shape, itemsize)
        self._own = symmetric_memory.empty(self._bytes, dtype=torch.uint8, device=self.device)
        self._clear()
        self._handle = ranks.rendezvous(self._own)
        ranks.exchange("")
        self._starts = list(self._handle.buffer_ptrs)


class IpcMemory(_GpuMemory):
    """Of the GPUs of a schedule's neighbours alone, by IPC of CUDA as `torch.multiprocessing` has it.

    Each handle is for one rank, which opens it once: torch keeps a rank's memory until all have let go of it,
    or the rank has ended. Opened on the reader's GPU, access from there to where it lies comes with it (torch
    asks for cudaIpcMemLazyEnablePeerAccess); opened where it lies, as `torch.multiprocessing` does, it would
    be out of reach for kernels of the reader.

    Args:
        shape: of the plan.
        itemsize: bytes of an element.
        ranks: in the order of the plan's; all must make the memory together.
        neighbours: ranks whose memory this one opens, and which open its own.
        device: where the tensor of this rank lies; None for the current GPU.

    Raises:
        ExecutionError: memory cannot be shared, on any rank.
    """

    def __init__(
        self,
        shape: Shape,
        itemsize: int,
        ranks: PeerRanks,
        neighbours: Sequence[int],
        device: torch.device | None = None,
    ) -> None:
        super().__init__(shape, itemsize, device)
        index = self.device.index if self.device.type == "cuda" else torch.cuda.current_device()
        self._opened: dict[int, Any] = {}

        def export() -> dict[str, Any]:
            self._own = torch.empty(self._bytes, dtype=torch.uint8, device=self.device)
            self._clear()
            handles = {}
            for peer in neighbours:
                shared = cast(Any, self._own.untyped_storage())._share_cuda_()
                _, handle, size, offset, counter, number, _, _ = shared
                handles[str(peer)] = handle.hex(), size, offset, counter.hex(), number
            return handles

        def open_all() -> None:
            for peer in neighbours:
                handle, size, offset, counter, number = handles[peer][str(ranks.rank)]
                place = bytes.fromhex(handle), size, offset, bytes.fromhex(counter), number
                # No event to wait for: what is exported has been cleared.
                self._opened[peer] = cast(Any, torch.UntypedStorage)._new_shared_cuda(
                    index, *place, b"", False
                )

        handles = ranks.together("share memory by IPC", export)
        ranks.together("open the memory of its neighbours by IPC", open_all)
        self._starts = [0] * len(shape.staging)
        for rank, held in {**self._opened, ranks.rank: self._own}.items():
            self._starts[rank] = held.data_ptr()


def _stream_aside(device: torch.device) -> Any:
    """A stream of a GPU on which no kernel waits, with what writes a word loaded; None on the host.

    Of high priority, as torch gives the streams of each priority out again and again.
    """
    if device.type == "cpu":
        return None
    stream = cast(Any, torch.cuda).Stream(device, priority=-1)
    with torch.cuda.stream(stream):
        torch.empty(1, dtype=torch.int32, device=device).fill_(1)
    stream.synchronize()
    return stream


def _raise_word(flags: torch.Tensor, lanes: int, aside: Any) -> None:
    """Raise the abort word among a rank's flags, for every lane."""
    words = flags[ABORT * lanes : (ABORT + 1) * lanes]
    if aside is None:
        words.fill_(1)
        return
    with torch.cuda.stream(aside):
        words.fill_(1)
    aside.synchronize()

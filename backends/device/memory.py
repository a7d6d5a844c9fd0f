"""Slots and flags that ranks reach of each other: of one process and its forks, or of GPUs by torch."""

from __future__ import annotations

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
        """The same without a group of torch: by a store for them alone, and a name that no others have."""

        @cache
        def symmetric() -> Any:
            memory = cast(Any, torch._C._distributed_c10d)._SymmetricMemory
            memory.set_group_info(name, rank, size, store)
            return memory

        return cls(rank, exchange, lambda own: symmetric().rendezvous(own, name))


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
        for tensor in (*self._staging, *self._flags) if self.device.type == "cpu" else ():
            tensor.share_memory_()  # type: ignore[no-untyped-call]

    def addresses(self) -> list[int]:
        """See `PeerMemory`."""
        staging = [-(-tensor.data_ptr() // _VECTOR) * _VECTOR for tensor in self._staging]
        return staging + [tensor.data_ptr() for tensor in self._flags]

    def abort(self, rank: int) -> None:
        """See `PeerMemory`."""
        raise_word(self._flags[rank], self._lanes)

    def start_at(self, number: int) -> None:
        """Let all flags stand where so many pieces have been done; executors must begin there, too."""
        for flags in self._flags:
            flags[(ABORT + 1) * self._lanes :] = number


class GroupMemory(SharedMemory):
    """Of the processes of a group on one host, in files that are gone when it is made; to try what GPUs do.

    Args:
        shape: of the plan.
        itemsize: bytes of an element.
        group: its ranks, in the order of the plan's; all must make the memory together.
    """

    def __init__(self, shape: Shape, itemsize: int, group: dist.ProcessGroup | PeerRanks) -> None:
        ranks = group if isinstance(group, PeerRanks) else PeerRanks.of(group)
        self._lanes = shape.lanes
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


class SymmetricMemory:
    """Of the GPUs of a process group, which torch maps into each other's processes.

    Torch maps all pairs, and fails where two GPUs cannot reach each other. Ranks that share a GPU, to try it
    with one, need TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1.

    Args:
        shape: of the plan.
        itemsize: bytes of an element.
        group: its ranks, in the order of the plan's; all must make the memory together.
    """

    def __init__(self, shape: Shape, itemsize: int, group: dist.ProcessGroup | PeerRanks) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        ranks = group if isinstance(group, PeerRanks) else PeerRanks.of(group)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._lanes = shape.lanes
        self._staging_bytes = -(-max(shape.staging) * itemsize // _VECTOR) * _VECTOR
        flags = max(shape.flags) * shape.lanes
        self._own = symmetric_memory.empty(
            self._staging_bytes + 4 * flags, dtype=torch.uint8, device=self.device
        )
        self._own.zero_()
        torch.cuda.synchronize(self.device)
        self._handle = ranks.rendezvous(self._own)
        ranks.exchange("")

    def addresses(self) -> list[int]:
        """See `PeerMemory`."""
        staging: list[int] = list(self._handle.buffer_ptrs)
        return staging + [start + self._staging_bytes for start in staging]

    def abort(self, rank: int) -> None:
        """See `PeerMemory`: of this rank only, whose watch it is."""
        raise_word(self._own[self._staging_bytes :].view(torch.int32), self._lanes)


def raise_word(flags: torch.Tensor, lanes: int) -> None:
    """Raise the abort word among a rank's flags, for every lane; no kernel that waits holds this up."""
    words = flags[ABORT * lanes : (ABORT + 1) * lanes]
    if flags.device.type == "cpu":
        words.fill_(1)
        return
    stream = cast(Any, torch.cuda).Stream(flags.device)
    with torch.cuda.stream(stream):
        words.fill_(1)
    stream.synchronize()

"""A stand-in for torch's IPC of GPUs, over memory of the host: it refuses what CUDA and torch refuse.

A handle is for one rank, which opens it once, on its own GPU, over a path; nobody opens his own. Each rank's
GPU has the rank's number. Ranks are threads, or processes of one user.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from arborcast.backends.device.memory import PeerRanks

COUNTER = b"/torch_1_2"


class DrawnIpc:
    """What torch's calls do on all ranks of a process.

    Args:
        reaches: whether kernels of one rank reach the memory of another.
    """

    def __init__(self, reaches: Callable[[int, int], bool]) -> None:
        self._reaches, self._here = reaches, threading.local()
        self._seen: set[bytes] = set()
        self.counts: Counter[int] = Counter()  # by rank: storages of others' that keep its memory
        self.opened: list[tuple[int, int]] = []  # who has opened whose

    def act_as(self, rank: int) -> None:
        """Be this rank in this thread, and on processes that are forked of it."""
        self._here.rank = rank

    def install(self, replace: Callable[[Any, str, Any], None]) -> None:
        """Put the calls into torch's place."""
        replace(torch.cuda, "current_device", lambda: self._here.rank)
        replace(torch.cuda, "synchronize", lambda device=None: None)
        replace(torch.UntypedStorage, "_share_cuda_", lambda storage: self._share(storage))  # noqa: PLW0108
        replace(torch.UntypedStorage, "_new_shared_cuda", staticmethod(self._open))

    def _share(self, storage: Any) -> tuple[Any, ...]:
        fd, size = storage._share_fd_cpu_()
        rank = self._here.rank
        number = len(self._seen)  # so that each handle is another
        handle = f"{rank} {os.getpid()} {fd} {number}".encode().ljust(64, b"\0")
        self._seen.add(b"of " + handle)
        return rank, handle, size, 0, COUNTER, number, b"\0" * 64, True

    def _open(self, index: int, handle: bytes, size: int, offset: int, counter: bytes, number: int,
              event: bytes, waits: bool) -> Any:  # fmt: skip
        own = self._here.rank
        owner, process, fd, told = (int(part) for part in handle.rstrip(b"\0").split())
        if index != own:
            raise RuntimeError(f"opened on GPU {index}, out of reach for kernels on GPU {own}")
        if own == owner:
            raise RuntimeError("CUDA error: invalid device context")
        if handle in self._seen:
            raise RuntimeError("a handle is counted for one that opens it, once")
        if not self._reaches(own, owner):
            raise RuntimeError("CUDA error: peer access is not supported between these two devices")
        if (offset, counter, number) != (0, COUNTER, told) or (waits and len(event) != 64):
            raise RuntimeError("CUDA error: invalid argument")
        self._seen.add(handle)
        try:
            file = os.open(f"/proc/{process}/fd/{fd}", os.O_RDWR)
        except OSError:
            raise RuntimeError("CUDA error: invalid resource handle") from None
        storage = cast(Any, torch.UntypedStorage)._new_shared_fd_cpu(file, size)
        os.close(file)
        self.opened.append((own, owner))
        self.counts[owner] += 1
        weakref.finalize(storage, self.counts.subtract, [owner])
        return storage


def ranks_by_files(rank: int, size: int, folder: Path) -> PeerRanks:
    """Ranks of threads or processes that say things to each other by files of a folder."""
    store = torch.distributed.FileStore(str(folder / "store"), size)
    rounds = [0]

    def exchange(said: str) -> list[str]:
        rounds[0] += 1
        store.set(f"{rounds[0]} {rank}", said)
        return [store.get(f"{rounds[0]} {it}").decode() for it in range(size)]

    return PeerRanks(rank, exchange, lambda own: None)

"""Processes that leave without `destroy_process_group`: `python -m tests.support.leaving HOW ROUNDS FOLDER`.

Each is forked, ends as scripts do, by the end of its interpreter, and its status is printed. HOW is
"in flight" (both ranks have calls under way), "alone" (the other has left) or "aborted".
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import arborcast.torch_backend  # noqa: F401


def main() -> None:
    how, rounds, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    for number in range(rounds):
        children = []
        for rank in range(2):
            child = os.fork()
            if not child:
                leave(how, rank, folder / str(number))
                return
            children.append(child)
        for child in children:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os.write(1, f"{status}\n".encode())


def leave(how: str, rank: int, path: Path) -> None:
    store = dist.FileStore(str(path), 2)
    dist.init_process_group("synth", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    tensors = [torch.ones(1 << 20) for _ in range(6)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors if how != "alone" or not rank]
    if how == "in flight":
        works[rank].wait()
    elif how == "aborted" and not rank:
        works[1].wait()
        dist.group.WORLD.abort()  # type: ignore[union-attr]
    sys.modules["__main__"].kept = tensors, works  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()

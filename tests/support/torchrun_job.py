"""A job for torchrun, as small as can be: `torchrun_job.py BACKEND FOLDER WHAT`; see test_torchrun.py.

WHAT is "train" (steps with checkpoints; rank 2 dies within one, once, and takes a link with it), "leave"
(ends without destroying its group) or "hang" (rank 0 never comes to the second call). It imports nothing of
ours unless IMPORT_BACKENDS is set, so that torch must know the group by itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STEPS = 6
DIES_AT = 3  # the step within which rank 2 of the first incarnation dies
COUNT = 200_000
LARGE = 16 << 20  # elements; long enough to die within
TORN_LINK = (0, 2)  # of rank numbers that are not neighbours in the circle of all ranks


def gradient(step: int, rank: int, count: int = COUNT) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float64).remainder_(97).add_(10 * step + rank)


def serial_result(ranks: int) -> float:
    """What all steps of all ranks add up to, without any group."""
    return sum(gradient(step, rank).sum().item() for step in range(STEPS) for rank in range(ranks))


def mesh(ranks: int, without: tuple[int, int] | None = None) -> dict[str, Any]:
    """A topology file of all links but one."""
    pairs = [(a, b) for a in range(ranks) for b in range(a + 1, ranks) if (a, b) != without]
    return {
        "name": "job",
        "ranks": ranks,
        "links": [{"between": pair, "bandwidth": 1, "latency_us": 5} for pair in pairs],
    }


def train(folder: Path, rank: int, ranks: int) -> None:
    died = folder / "died.json"  # agents of several hosts count restarts each for itself
    checkpoint = folder / "checkpoint.json"
    state = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"step": 0, "total": 0.0}
    begun_at = state["step"]
    for step in range(begun_at, STEPS):
        if step == DIES_AT and rank == 2 and not died.exists():
            died.write_text("true")
            (folder / "topology.json").write_text(json.dumps(mesh(ranks, TORN_LINK)))
            threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGKILL)).start()
            while True:
                dist.all_reduce(torch.ones(LARGE))
        tensor = gradient(step, rank)
        dist.all_reduce(tensor)
        state = {"step": step + 1, "total": state["total"] + tensor.sum().item()}
        if rank == 0:
            written = checkpoint.with_suffix(".new")
            written.write_text(json.dumps(state))
            written.replace(checkpoint)
        if rank == 0 and step == begun_at:
            _report(folder, f"begun-at-{begun_at}")
    if rank == 0:
        _report(folder, "end", total=state["total"])
    dist.destroy_process_group()


def _report(folder: Path, name: str, **more: Any) -> None:
    group: Any = dist.group.WORLD
    peers = sorted(group._communicator.member.network.channels)
    report = {"counters": group.counters(), "peers": peers, "explain": group.explain(COUNT * 8), **more}
    (folder / f"{name}.json").write_text(json.dumps(report))


def leave(folder: Path, rank: int, ranks: int) -> None:
    tensor = gradient(0, rank)
    work = dist.all_reduce(tensor, async_op=True)
    dist.barrier()
    work.wait()
    dist.broadcast(tensor, 1)
    (folder / f"left-{rank}.json").write_text(json.dumps(tensor.sum().item()))


def hang(folder: Path, rank: int, ranks: int) -> None:
    from tests.support.waiting import mark_inside

    dist.all_reduce(torch.ones(COUNT))
    file = folder / f"pid-{rank}.json"
    if rank == 0:
        file.write_text(str(os.getpid()))
        threading.Event().wait()  # which nobody sets
    mark_inside("all_reduce", file, str(os.getpid()))  # the second one
    dist.all_reduce(torch.ones(COUNT))


def main() -> None:
    backend, folder, what = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if os.environ.get("IMPORT_BACKENDS"):
        import arborcast.torch_backend  # noqa: F401
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    {"train": train, "leave": leave, "hang": hang}[what](folder, dist.get_rank(), dist.get_world_size())


if __name__ == "__main__":
    main()

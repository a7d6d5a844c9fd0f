"""Schedules on CUDA tensors beside NCCL's own allreduce, on the same transport.

HAS NOT RUN YET ON A GPU; with `--device cpu` (gloo in NCCL's place, as a trial of the script) it has. All
contenders take turns in the same processes, round by round; a time is from a barrier until the slowest rank's
GPU is done, with several calls per sample, and the medians of the rounds are compared. Prints JSON.

    python bench/nccl.py                      four ranks on one GPU, over sockets on loopback
    python bench/nccl.py --own-gpus --spec dgx1 --ranks 8      a GPU per rank, over whatever NCCL finds
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from arborcast.bench.harness.document import TIME, Measure, document, timed_row
from arborcast.bench.harness.provenance import RUNTIME
from arborcast.synth.collective import Kind
from arborcast.synth.formats.sizes import parse_size

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

    import torch

ONE_GPU = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""With these, and a NCCL_HOSTID of its own for each rank, ranks may share a GPU: all goes over sockets."""

WARM_UPS = 3
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Settings:
    """What is measured; see `_arguments`."""

    spec: str
    ranks: int
    device: str
    own_gpus: bool
    sizes: tuple[int, ...]
    rounds: int
    calls: int
    piece_bytes: int
    max_pieces: int


def main() -> None:
    """Measure and print one JSON object."""
    settings = _arguments()
    context = multiprocessing.get_context("spawn")
    answers: SimpleQueue[Any] = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(settings, rank, f"{folder}/store", answers), daemon=True)
            for rank in range(settings.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"ranks ended with status {[process.exitcode for process in ranks]}: see above")
    answer = answers.get()
    found = document(
        "How fast are schedules on CUDA tensors beside NCCL's own allreduce?",
        answer.pop("rows"),
        keys=("topology", "ranks", "collective", "method", "bytes"),
        measures={**TIME, "speed_up": Measure("more", follows="time_us")},
        units={
            "time_us": "of one call, the slowest rank's; median over the rounds",
            "spread": "largest minus smallest, us",
            "speed_up": "time of the first method at that size over this one's",
        },
        packages=("arborcast", "torch"),
        code=RUNTIME,
        has_gpu=settings.device == "cuda",
        transport="what NCCL finds" if settings.own_gpus else "sockets on loopback",
        **answer,
    )
    print(json.dumps(found, indent=1))


def _arguments() -> Settings:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--spec", default="full:4", help="the fabric that schedules are made for")
    parser.add_argument("--ranks", type=int, default=4, help="of the fabric")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--own-gpus", action="store_true", help="rank r on GPU r, instead of all on GPU 0")
    sizes = [1 << 20, 16 << 20, 64 << 20]
    parser.add_argument("--sizes", type=parse_size, nargs="+", default=sizes, help="of the buffer")
    parser.add_argument("--rounds", type=int, default=11, help=f"that count, after {WARM_UPS} that do not")
    parser.add_argument("--calls", type=int, default=5, help="per contender and round")
    parser.add_argument("--piece-bytes", type=parse_size, default=1 << 20, help="of the largest chunk")
    parser.add_argument("--max-pieces", type=int, default=16)
    given = vars(parser.parse_args())
    if given["rounds"] < 5:
        parser.error(f"--rounds {given['rounds']}: a median needs at least 5")
    return Settings(**{**given, "sizes": tuple(given["sizes"])})


def _rank(settings: Settings, rank: int, store: str, answers: SimpleQueue[Any]) -> None:
    if not settings.own_gpus:
        # Before NCCL looks at them.
        os.environ.update(ONE_GPU, NCCL_HOSTID=f"rank-{rank}")
    import torch
    import torch.distributed as dist

    from arborcast.backends.tensors.torch_compat import FileStore

    device = torch.device("cpu")
    torch.set_num_threads(1)
    if settings.device == "cuda":
        device = torch.device("cuda", rank if settings.own_gpus else 0)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if settings.device == "cuda" else "gloo",
        store=FileStore(store, settings.ranks),
        rank=rank,
        world_size=settings.ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    schedule, contenders = _contenders(settings, device)
    rows = [row for size in settings.sizes for row in _measure(settings, size, contenders, device)]
    if rank == 0:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
        answers.put({"gpu": name, "schedule": schedule, "rows": rows})
    dist.barrier()
    dist.destroy_process_group()


def _contenders(
    settings: Settings, device: torch.device
) -> tuple[dict[str, Any], dict[str, Callable[[torch.Tensor], None]]]:
    """What is measured: the schedule in words, and by name what combines a tensor in place."""
    import torch.distributed as dist

    from arborcast import synth, topologies
    from arborcast.backends import Executor

    schedule = synth.solve(topologies.load(settings.spec), "allreduce")
    executor = Executor(
        schedule, device=device, piece_bytes=settings.piece_bytes, max_pieces=settings.max_pieces
    )
    words = {"method": schedule.method.name, "chunks": len(schedule.chunks), "steps": schedule.steps}

    def own(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)

    def ours(tensor: torch.Tensor) -> None:
        executor.allreduce(tensor)

    return words, {"nccl" if device.type == "cuda" else "gloo": own, "schedule": ours}


def _measure(
    settings: Settings,
    size: int,
    contenders: dict[str, Callable[[torch.Tensor], None]],
    device: torch.device,
) -> list[dict[str, Any]]:
    """A row of each contender, from the slowest rank's times; the same on all ranks."""
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    initial = torch.arange(size // 4, dtype=torch.float32, device=device).remainder_(1021) + rank
    expected = (initial - rank) * ranks + ranks * (ranks - 1) // 2
    tensors = [torch.empty_like(initial) for _ in range(settings.calls)]
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(WARM_UPS + settings.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            for tensor in tensors:
                tensor.copy_(initial)
            seconds = _timed(contenders[name], tensors, device)
            if not all(torch.equal(tensor, expected) for tensor in tensors):
                raise RuntimeError(f"rank {rank}: {name} of {size} bytes gave a wrong sum")
            slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if number >= WARM_UPS:
                samples[name].append(slowest.item() * 1e6)
    medians = {name: statistics.median(times) for name, times in samples.items()}
    baseline = medians[names[0]]
    return [
        timed_row(
            topology=settings.spec,
            ranks=ranks,
            collective=Kind.ALLREDUCE,
            root=None,
            method=name,
            size_bytes=size,
            times_us=times,
            speed_up=baseline / medians[name],
        )
        for name, times in samples.items()
    ]


def _timed(call: Callable[[torch.Tensor], None], tensors: list[torch.Tensor], device: torch.device) -> float:
    """Seconds per call, until the GPU is done."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for tensor in tensors:
        call(tensor)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / len(tensors)


if __name__ == "__main__":
    main()

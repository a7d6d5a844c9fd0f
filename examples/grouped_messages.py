"""A synthesized allreduce over stock NCCL or RCCL, beside the library's own: equal sums, both times.

    torchrun --nproc-per-node 8 examples/grouped_messages.py dgx-h100 [ELEMENTS]

Messages go by torch's batches of isend and irecv, one coalesced group a step, sums on the stream. Without
GPUs the same calls run over gloo. The topology has as many ranks as there are processes, GPU i is rank i.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from arborcast import backends, synth, topologies


def main(spec: str, elements: int = 1 << 20, repeats: int = 10) -> tuple[bool, float, float]:
    """Whether both give the same, and the milliseconds of ours and of the library."""
    rank = dist.get_rank()
    on_gpu = torch.cuda.is_available() and dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    schedule = synth.solve(topologies.load(spec), "allreduce")
    ours = backends.Executor(schedule, device=device, grouped=True)
    values = torch.arange(elements, dtype=torch.float64, device=device).remainder(1000) * (rank + 1)
    mine, theirs = values.clone(), values.clone()
    ours.allreduce(mine)
    dist.all_reduce(theirs)
    equal = torch.tensor([float(torch.equal(mine, theirs))], device=device)
    dist.all_reduce(equal, dist.ReduceOp.MIN)
    times = []
    for call in (lambda: ours.allreduce(mine), lambda: dist.all_reduce(theirs)):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        if on_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / repeats * 1e3)
    return bool(equal.item()), times[0], times[1]


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    same, own_ms, library_ms = main(sys.argv[1], *map(int, sys.argv[2:]))
    if dist.get_rank() == 0:
        print(
            f"{'equal' if same else 'DIFFERENT'} sums; ours {own_ms:.3g} ms, the library {library_ms:.3g} ms"
        )
    dist.destroy_process_group()
    sys.exit(not same)

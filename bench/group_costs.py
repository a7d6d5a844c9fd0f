"""What process groups cost beside gloo's, in one run: making them, first steps, new lengths, memory.

python bench/group_costs.py
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arborcast.bench.harness.processes import run_ranks

BACKENDS = ("gloo", "synth")
LENGTHS = 160
TURNS = 7


def job(rank: int, ranks: int, port: int, backend: str, folder: str) -> None:
    """Begin a job of this backend in place of the group that the ranks were started with."""
    import torch.distributed as dist

    import arborcast.torch_backend  # noqa: F401 - makes "synth" known

    dist.barrier()
    dist.destroy_process_group()
    os.environ |= {"ARBORCAST_CACHE": folder}
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)


def held_bytes() -> int:
    """The memory of this process, what it shares counted by its part (PSS)."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(text.split("Pss:")[1].split()[0]) << 10


def first_step(rank: int, ranks: int, port: int, backend: str, folder: str) -> float:
    """Seconds from init_process_group to the end of an allreduce of 1 MiB."""
    import torch
    import torch.distributed as dist

    import arborcast.backends.group.process_group  # noqa: F401 - what a program has imported
    import arborcast.torch_backend  # noqa: F401

    begin = time.perf_counter()
    job(rank, ranks, port, backend, folder)
    dist.all_reduce(torch.ones(1 << 18))
    taken = time.perf_counter() - begin
    dist.barrier()
    return taken


def groups(rank: int, ranks: int, port: int, backend: str, folder: str) -> dict[str, float]:
    """Seconds to make a group of either kind, in turns, and 20 of them."""
    import torch
    import torch.distributed as dist

    job(rank, ranks, port, "synth", folder)
    taken: dict[str, list[float]] = {it: [] for it in BACKENDS}
    many = {}
    for _ in range(TURNS):
        for name in BACKENDS:
            dist.barrier()
            begin = time.perf_counter()
            dist.new_group(backend=name)
            taken[name].append(time.perf_counter() - begin)
    for name in BACKENDS:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(20):
            dist.new_group(backend=name)
        many[name] = time.perf_counter() - begin
    dist.all_reduce(torch.ones(4))
    return {f"one {it}": statistics.median(taken[it][1:]) for it in BACKENDS} | {
        f"20 {it}": many[it] for it in BACKENDS
    }


def lengths(rank: int, ranks: int, port: int, backend: str, folder: str) -> dict[str, float]:
    """Seconds of a loop over lengths, and what the first call of a length takes beyond the second."""
    import torch
    import torch.distributed as dist

    job(rank, ranks, port, "synth", folder)
    of = {it: dist.new_group(backend=it) for it in BACKENDS}
    tensors = [torch.ones(1_000 + 397 * number) for number in range(LENGTHS)]
    fresh = [torch.ones(1_111 + 397 * number) for number in range(LENGTHS)]
    found: dict[str, list[float]] = {it: [] for it in BACKENDS}
    for _ in range(TURNS):
        for name, group in of.items():
            dist.barrier()
            begin = time.perf_counter()
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)
            found[name].append(time.perf_counter() - begin)
    more = {}
    for name, group in of.items():
        differences = []
        for tensor in fresh:
            times = []
            for _ in range(3):
                dist.barrier()
                begin = time.perf_counter()
                dist.all_reduce(tensor, group=group)
                times.append(time.perf_counter() - begin)
            differences.append(times[0] - min(times[1:]))
        more[name] = statistics.median(differences)
    return {f"loop {it}": statistics.median(found[it][1:]) for it in BACKENDS} | {
        "loop ratio": statistics.median(
            b / a for a, b in zip(found["gloo"][1:], found["synth"][1:], strict=True)
        ),
        **{f"new length {it}": more[it] for it in BACKENDS},
    }


def silent(rank: int, ranks: int, port: int, backend: str, folder: str) -> int:
    """Memory of a rank of a group that has sent nothing."""
    import torch.distributed as dist

    job(rank, ranks, port, backend, folder)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"made/{rank}", "")
    store.wait([f"made/{it}" for it in range(ranks)])
    gc.collect()
    found = held_bytes()
    store.set(f"seen/{rank}", "")
    store.wait([f"seen/{it}" for it in range(ranks)])
    return found


def returned(rank: int, ranks: int, port: int, backend: str, folder: str) -> dict[str, float]:
    """Memory of this process before four groups, with them used, and after they were destroyed."""
    import torch
    import torch.distributed as dist

    job(rank, ranks, port, "gloo", folder)
    import arborcast.backends.group.process_group  # noqa: F401

    tensor = torch.ones(4 << 20)
    seen = {}

    def use(count: int) -> list[Any]:
        made = [dist.new_group(backend=backend) for _ in range(count)]
        for group in made:
            dist.all_reduce(tensor, group=group)
        return made

    for group in use(1):  # what the process keeps for all
        dist.destroy_process_group(group)
    del group
    gc.collect()
    dist.barrier()
    seen["before"] = held_bytes()
    dist.barrier()
    made = use(4)
    dist.barrier()
    seen["used"] = held_bytes()
    dist.barrier()
    for group in made:
        dist.destroy_process_group(group)
    del made, group
    gc.collect()
    dist.barrier()
    seen["destroyed"] = held_bytes()
    dist.barrier()
    return {key: it / 2**20 for key, it in seen.items()}


def ask(function: Callable[..., Any], ranks: int, backend: str, folder: str) -> list[Any]:
    """What each rank found."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run_ranks(ranks, function, ranks, store.port, backend, folder, timeout_s=600.0)


def main() -> None:
    with tempfile.TemporaryDirectory() as kept:
        ask(first_step, 4, "synth", kept)
        time.sleep(8)
        steps: dict[str, list[float]] = {it: [] for it in BACKENDS}
        for _ in range(TURNS):
            for name in BACKENDS:
                steps[name].append(max(ask(first_step, 4, name, kept)))
        for name, each in steps.items():
            print(
                f"first step, tables kept, 4 ranks, {name}: {statistics.median(each) * 1e3:.1f} ms {[round(x * 1e3) for x in each]}"
            )
        for ranks in (2, 4, 8):
            found = ask(groups, ranks, "", kept)
            worst = {key: max(it[key] for it in found) * 1e3 for key in found[0]}
            print(f"{ranks} ranks:", {key: round(it, 2) for key, it in worst.items()})
        for ranks in (2, 4):
            found = ask(lengths, ranks, "", kept)
            print(
                f"lengths, {ranks} ranks:",
                {
                    key: round(max(it[key] for it in found) * (1 if "ratio" in key else 1e3), 4)
                    for key in found[0]
                },
            )
        for name in BACKENDS:
            found = ask(returned, 4, name, kept)
            print(
                f"memory MiB, 4 ranks together, {name}:",
                {key: round(sum(it[key] for it in found), 1) for key in found[0]},
            )
        sums = {name: sum(ask(silent, 64, name, kept)) / 2**20 for name in BACKENDS}
        print(
            "64 silent ranks, MiB:",
            {key: round(it) for key, it in sums.items()},
            "beyond gloo",
            round(sums["synth"] - sums["gloo"]),
        )


if __name__ == "__main__":
    main()

"""The kernel on a GPU: ranks as launches on streams of one process, and as processes that share memory."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from arborcast.backends.device.executor import DeviceExecutor
from arborcast.backends.device.memory import IpcMemory, PeerMemory, PeerRanks, SharedMemory, SymmetricMemory
from arborcast.backends.device.plan import DevicePlan
from arborcast.backends.errors import ExecutionError
from tests.device.rank_processes import Case, differing, drawn, planned, tensor_of
from tests.device.test_kernel import TYPES, all_cases
from tests.gpu.sharing import take_gpu
from tests.support.definition import whole_call
from tests.support.drawn_schedules import ring_allreduce
from tests.support.ranks import run_ranks


def on_streams(case: Case) -> str:
    """What became of all calls of a case, where ranks are launches on streams of one process."""
    plan, dtype = planned(case), getattr(torch, case.dtype)
    memory = SharedMemory(plan.shape, dtype.itemsize, "cuda")
    memory.start_at(case.begun)
    ranks = range(plan.ranks)
    executors = [
        DeviceExecutor(plan, it, memory, dtype, block=128, begun=case.begun, timeout_s=10.0) for it in ranks
    ]
    calls: list[tuple[int, list[torch.Tensor], list[torch.Tensor], list[Any]]] = []
    for count, inputs, wanted in drawn(case, plan):
        given = [tensor_of(case, it).cuda() for it in inputs]
        room = given if case.in_place else [torch.full((count,), 99).to(dtype).cuda() for _ in ranks]
        calls.append((count, given, room, wanted))
        for it in executors:
            it.prepare(count, case.op)
    streams = [torch.cuda.Stream() for _ in ranks]
    torch.cuda.synchronize()
    for count, given, room, _ in calls:
        for rank in sorted(ranks, key=lambda it: it == case.late):
            if rank == case.late:
                time.sleep(0.1)
            with torch.cuda.stream(streams[rank]):
                executors[rank](given[rank], room[rank], count, case.op)
    for rank in ranks:
        with torch.cuda.stream(streams[rank]):
            executors[rank].finish()
    wrong = sum(
        differing(case, got, want)
        for _, _, room, wanted in calls
        for got, want in zip(room, wanted, strict=True)
    )
    return f"{wrong} wrong" if wrong else "right"


def test_the_kernel_is_exact_on_a_gpu() -> None:
    cases = [*all_cases(), Case("full:4", "allreduce", (151, 150), dtype="bfloat16", bits=True)]
    assert [(case, said) for case in cases if (said := on_streams(case)) != "right"] == []


def test_long_buffers() -> None:
    """Thousands of pieces by many programs, whose slots are used again and again."""
    many = Case("dgx1", "allreduce", (1 << 18, 99_991), groups=6, lanes=4, piece=4096)
    for case in (many, replace(many, push=False), replace(many, dtype="bfloat16"), replace(many, begun=-5)):
        assert on_streams(case) == "right", case


def test_a_missing_peer_ends_the_call_in_time() -> None:
    plan = DevicePlan(ring_allreduce(3))
    memory = SharedMemory(plan.shape, 4, "cuda")
    executor = DeviceExecutor(plan, 0, memory, torch.float32, timeout_s=1.0)
    whole = torch.zeros(9, device="cuda")
    executor(whole, whole, 9)
    with pytest.raises(ExecutionError, match=r"rank 0 waited 1.0 s for a peer in allreduce"):
        executor.finish()
    with pytest.raises(ExecutionError, match="rank 0 is unusable since a call has timed out"):
        executor(whole, whole, 9)


def by_processes(rank: int, size: int, dtype_name: str, by: str) -> list[str]:
    """What became of calls of all ranks over one kind of memory."""
    device = take_gpu(rank, size)
    dtype = getattr(torch, dtype_name)
    found = []
    for kind, options in (("allreduce", {}), ("allgather", {}), ("broadcast", {"root": 1}), ("alltoall", {})):
        plan = planned(Case("full:4", kind, solve=options, dtype=dtype_name))
        assert dist.group.WORLD is not None
        ranks = PeerRanks.of(dist.group.WORLD)
        memory: PeerMemory
        if by == "IPC":
            memory = IpcMemory(plan.shape, dtype.itemsize, ranks, plan.neighbours(rank))
        else:
            memory = SymmetricMemory(plan.shape, dtype.itemsize, ranks)
        executor = DeviceExecutor(plan, rank, memory, dtype, timeout_s=30.0)
        wrong = 0
        for seed, count in enumerate((1000, 1000, 40, 4096)):
            inputs, _, wanted = whole_call(plan.schedule.collective, size, count, seed, most=8)
            given, expected = torch.from_numpy(inputs[rank]).to(dtype).to(device), wanted[rank]
            result = torch.zeros(count, dtype=dtype, device=device)
            executor(given, result, count)
            executor.finish()
            want = torch.from_numpy(np.asarray(expected)).to(dtype)
            wrong += int((result.cpu()[: len(want)] != want).sum())
        found.append(f"{kind}: {wrong} wrong")
    return found


def by_operation(rank: int, size: int) -> tuple[bool, bool]:
    from arborcast import synth, topologies
    from arborcast.backends import device

    take_gpu(rank, size)
    call = device.compile(synth.solve(topologies.load("full:4"), "allgather"), timeout_s=30.0)
    traced = torch.compile(lambda given: call(2 * given), fullgraph=True)
    given = torch.arange(600.0, device="cuda").reshape(30, 20) + 1000 * rank
    found = call(given), traced(given)
    call.finish()
    want = torch.cat([torch.arange(600.0).reshape(30, 20) + 1000 * it for it in range(size)])
    return torch.equal(found[0].cpu(), want), torch.equal(found[1].cpu(), 2 * want)


def captured(rank: int, size: int) -> list[float]:
    """A call in a graph, replayed with other data each time."""
    device = take_gpu(rank, size)
    plan = planned(Case("full:4", "allreduce"))
    assert dist.group.WORLD is not None
    memory = SymmetricMemory(plan.shape, 4, PeerRanks.of(dist.group.WORLD))
    executor = DeviceExecutor(plan, rank, memory, torch.float32)
    tensor = torch.zeros(1000, device=device)
    executor.prepare(1000)
    executor(tensor, tensor, 1000)
    executor.finish()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        executor(tensor, tensor, 1000)
    sums = []
    for step in range(4):
        tensor.fill_(rank + step)
        graph.replay()
        torch.cuda.synchronize()
        assert bool((tensor == tensor[0]).all())
        sums.append(tensor[0].item())
        dist.barrier()
    return sums


SHARED = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


@pytest.mark.parametrize("dtype", [it for it in TYPES if it in ("float32", "bfloat16", "int64")])
@pytest.mark.parametrize("by", ["symmetric memory", "IPC"])
def test_processes_over_shared_memory(dtype: str, by: str) -> None:
    right = [f"{kind}: 0 wrong" for kind in ("allreduce", "allgather", "broadcast", "alltoall")]
    assert run_ranks(4, by_processes, dtype, by, environ=SHARED) == [right] * 4


def test_replays_of_a_graph() -> None:
    assert run_ranks(4, captured, environ=SHARED) == [[6.0, 10.0, 14.0, 18.0]] * 4


@pytest.mark.parametrize("environ", [SHARED, {}], ids=["as torch lets them share", "as they are"])
def test_an_operation_over_the_memory_that_ranks_choose(environ: dict[str, str]) -> None:
    """By IPC where ranks share a GPU, and torch's symmetric memory is not told to let them."""
    assert run_ranks(4, by_operation, environ=environ) == [(True, True)] * 4

"""Schedules by grouped messages over NCCL: single calls, the process group, DDP, FSDP, and a killed rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from arborcast import synth, topologies
from arborcast.backends import Executor
from arborcast.backends.tensors.torch_reduction import operator_of
from arborcast.synth.collective import NAMED_KINDS
from tests.gpu.sharing import join_nccl, take_gpu
from tests.support.definition import whole_call
from tests.support.group_cases import DTYPES, FACTOR, OPS, values
from tests.support.ranks import Failure, run_ranks

RANKS_IMPORT = ("torch._dynamo",)

GROUPED = {"ARBORCAST_P2P": "cuda", "ARBORCAST_TOPOLOGY": "full:4", "ARBORCAST_METHOD": "trees"}
GROUPED |= {"ARBORCAST_DEADLINE": "100", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


KERNEL = GROUPED | {"ARBORCAST_P2P": "kernel", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
WAYS = {"messages": GROUPED, "kernel": KERNEL}


def single_calls(rank: int, size: int) -> list[str]:
    """Of every kind, in three types and lengths that do not divide."""
    device = join_nccl(rank, size)
    wrong = []
    for fabric in ("full:4", "ring:4"):
        for kind in NAMED_KINDS:
            schedule = synth.solve(topologies.load(fabric), kind.value)
            collective = schedule.collective
            execute = Executor(schedule, device="cuda")
            for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64)):
                count = 4 * (37 + seed)
                inputs, _, wanted = whole_call(collective, size, count, seed, most=8)
                expected = torch.from_numpy(np.asarray(wanted[rank])).to(dtype)
                block = count // 4
                mine = torch.from_numpy(inputs[rank]).to(dtype).to(device)
                gives = kind.value not in ("broadcast", "scatter") or rank == collective.root
                if kind.value in ("allgather", "gather"):
                    mine = mine[:block].contiguous()
                is_in_place = kind.value in ("allreduce", "broadcast") or (
                    kind.value == "reduce" and rank == collective.root
                )
                gets = kind.value not in ("reduce", "gather") or rank == collective.root
                output = None
                if is_in_place:
                    output = mine
                elif gets:
                    output = torch.zeros(len(expected), dtype=dtype, device=device)
                given = mine if gives and not is_in_place else None
                execute.run(count, dtype, given=given, output=output)
                if output is not None and not torch.equal(output.cpu(), expected):
                    wrong.append(f"{fabric} {kind} {dtype}")
    dist.destroy_process_group()
    return wrong


def test_every_kind() -> None:
    assert run_ranks(4, single_calls, backend=None) == [[]] * 4


def captured(rank: int, size: int) -> list[float]:
    device = join_nccl(rank, size)
    execute = Executor(synth.solve(topologies.load("full:4"), "allreduce"), device="cuda")
    tensor = torch.zeros(1000, device=device)
    execute.allreduce(tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        execute.allreduce(tensor)
    sums = []
    for step in range(4):
        tensor.fill_(rank + step)
        graph.replay()
        torch.cuda.synchronize()
        assert bool((tensor == tensor[0]).all())
        sums.append(tensor[0].item())
    del graph
    dist.destroy_process_group()
    return sums


def test_replays_of_a_graph() -> None:
    assert run_ranks(4, captured, backend=None) == [[6.0, 10.0, 14.0, 18.0]] * 4


def reductions(rank: int, size: int) -> tuple[list[str], dict[str, int]]:
    """Every reduction and type that schedules serve, beside gloo on the host."""
    device = take_gpu(rank, size)
    tested: Any = dist.group.WORLD
    gloo = dist.new_group(backend="gloo")
    wrong, tried = [], 0
    for salt, op in enumerate(OPS):
        for name, dtype in DTYPES.items():
            if operator_of(OPS[op], dtype) is None:
                continue
            ours = values(rank, 257, dtype, op, salt).to(device)
            theirs = values(rank, 257, dtype, "SUM" if op == "PREMUL_SUM" else op, salt)
            try:
                dist.all_reduce(theirs, OPS["SUM" if op == "PREMUL_SUM" else op], group=gloo)
            except (RuntimeError, ValueError):
                continue
            try:
                dist.all_reduce(ours, OPS[op], group=tested)
            except (RuntimeError, ValueError) as error:
                wrong.append(f"{op} {name}: {error}"[:200])
                continue
            expected = theirs * FACTOR if op == "PREMUL_SUM" else theirs
            tried += 1
            if not torch.equal(ours.cpu(), expected.to(dtype)):
                wrong.append(f"{op} {name}")
    return wrong, tested.counters()["allreduce"]


@pytest.mark.parametrize("way", WAYS)
def test_every_reduction_of_the_group(way: str) -> None:
    for wrong, paths in run_ranks(4, reductions, backend="synth", environ=WAYS[way], timeout_s=110):
        assert wrong == []
        assert paths.get("schedule", 0) > 20, paths
        assert (paths.get("kernel", 0) > 0) == (way == "kernel"), paths


def calls(rank: int, size: int) -> list[str]:
    """What torch offers, on GPUs, against its definition."""
    device = take_gpu(rank, size)
    every = [values(it, 60).to(device) for it in range(size)]
    own, wrong = every[rank], []

    def check(what: str, got: Tensor, want: Tensor) -> None:
        if not torch.equal(got, want):
            wrong.append(what)

    total = torch.stack(every).sum(0)
    for root in range(size):
        tensor = own.clone()
        dist.broadcast(tensor, root)
        check(f"broadcast {root}", tensor, every[root])
    room = torch.empty(60 * size, device=device)
    dist.all_gather_into_tensor(room, own)
    check("all_gather_into_tensor", room, torch.cat(every))
    parts = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(parts, own)
    check("all_gather", torch.cat(parts), torch.cat(every))
    block = torch.empty(15, device=device)
    dist.reduce_scatter_tensor(block, own)
    check("reduce_scatter_tensor", block, total[15 * rank : 15 * rank + 15])
    exchanged = torch.empty_like(own)
    dist.all_to_all_single(exchanged, own)
    check("all_to_all_single", exchanged, torch.cat([it[15 * rank : 15 * rank + 15] for it in every]))
    tensor = own.clone()
    dist.reduce(tensor, 2)
    if rank == 2:
        check("reduce", tensor, total)
    works = []
    tensors = [own.clone() * (it + 1) for it in range(6)]
    for each in tensors:
        each.mul_(2)  # on the caller's stream, which the call must follow
        works.append(dist.all_reduce(each, async_op=True))
    for number, (work, each) in enumerate(zip(works, tensors, strict=True)):
        work.wait()
        check(f"async {number}", each, total * 2 * (number + 1))
    host = values(rank, 60)
    dist.all_reduce(host)
    check("host", host, total.cpu())
    pair: Any = dist.new_group([0, 3], backend="synth")
    if rank in (0, 3):
        tensor = own.clone()
        dist.all_reduce(tensor, group=pair)
        check("subgroup", tensor, every[0] + every[3])
    dist.barrier()
    large = torch.full((1 << 22,), float(rank + 1), device=device)
    dist.all_reduce(large)
    check("16 MiB", large, torch.full_like(large, 10.0))
    return wrong


@pytest.mark.parametrize("way", WAYS)
def test_calls_of_the_group(way: str) -> None:
    assert run_ranks(4, calls, backend="synth", environ=WAYS[way]) == [[]] * 4


def model(device: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3)).to(
        device
    )


def losses_of(
    wrap: Callable[[nn.Sequential], nn.Module], rank: int, size: int, device: torch.device
) -> list[float]:
    """Losses of a few steps, each rank on its share of the batch."""
    net = wrap(model(device))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    draw = torch.Generator().manual_seed(1)
    found = []
    for _ in range(5):
        x = torch.randn(4 * size, 12, generator=draw)
        y = torch.randint(3, (4 * size,), generator=draw)
        mine = slice(4 * rank, 4 * rank + 4)
        loss = nn.functional.cross_entropy(net(x[mine].to(device)), y[mine].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told = loss.detach().cpu().double()
        dist.all_reduce(told)
        found.append(told.item() / size)
    return found


def wrapped(rank: int, size: int) -> dict[str, list[float]]:
    device = take_gpu(rank, size)

    def sharded(net: nn.Sequential) -> nn.Module:
        for layer in net:
            fully_shard(layer)
        return fully_shard(net)

    return {
        "ddp": losses_of(
            lambda net: DistributedDataParallel(net, device_ids=[device.index]), rank, size, device
        ),
        "fsdp": losses_of(sharded, rank, size, device),
    }


def serial() -> list[float]:
    net = model("cpu")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    draw = torch.Generator().manual_seed(1)
    found = []
    for _ in range(5):
        x, y = torch.randn(16, 12, generator=draw), torch.randint(3, (16,), generator=draw)
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_ddp_and_fsdp_train_as_one_process_does() -> None:
    for found in run_ranks(4, wrapped, backend="synth", environ=GROUPED):
        for name, losses in found.items():
            assert losses == pytest.approx(serial(), abs=1e-4), name


def killed(rank: int, size: int) -> tuple[float, str]:
    device = take_gpu(rank, size)
    tensor = torch.ones(1000, device=device)
    dist.all_reduce(tensor)
    assert tensor.eq(size).all()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
    except Exception as error:
        return time.monotonic() - begun, str(error)
    return time.monotonic() - begun, "no error"


def test_a_killed_rank_ends_the_calls_of_the_others() -> None:
    results = run_ranks(4, killed, backend="synth", environ=GROUPED, group_timeout_s=100, may_fail=True)
    assert results[2] == Failure("killed", "ended without an answer")
    for rank in (0, 1, 3):
        seconds, said = results[rank]
        assert "rank 2" in said and seconds < 50, (rank, results[rank])

"""Torch's messages beyond `test_conformance`: operations, calls and mistakes; NCCL where there is a GPU."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
import time
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tests.support.drawn_schedules import (
    allgather_over_relay,
    make,
    ring_allreduce,
)

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from arborcast import synth, topologies  # noqa: E402
from arborcast.backends import ExecutionError, Executor  # noqa: E402
from arborcast.backends.executors import torch_p2p  # noqa: E402
from arborcast.backends.tensors.torch_reduction import Operator, operator_of  # noqa: E402
from arborcast.synth.errors import InputError  # noqa: E402
from arborcast.synth.schedule import Chunk, Schedule, Transfer  # noqa: E402
from tests.executors.test_conformance import random_jobs, run_all, synthesized_jobs  # noqa: E402, F401
from tests.support.group_cases import OPS, values  # noqa: E402
from tests.support.ranks import Failure, run_ranks, store_path  # noqa: E402

CPU = torch.device("cpu")

# Every operation and type --------------------------------------------------------------------------

DTYPES = ("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int32", "int64")

BITWISE = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}


def every_operation(rank: int, size: int, device: Any = CPU) -> int:
    """What schedules serve, beside gloo's own; how many pairs of operation and type that were."""
    executor = Executor(ring_allreduce(size), device=device, pieces=2)
    served = 0
    for name in DTYPES:
        dtype = getattr(torch, name)
        for op_name, op in OPS.items():
            if operator_of(op, dtype) is None:
                with pytest.raises(InputError, match=f"reduction {op_name}: schedules do not serve it"):
                    executor.allreduce(torch.zeros(9, dtype=dtype, device=device), op)
                continue
            mine = values(rank, 1001, dtype, op_name).to(device)
            theirs = mine.clone()
            executor.allreduce(mine, op)
            if device.type == "cuda" and op_name in BITWISE:  # NCCL has none of them
                everybody = [values(other, 1001, dtype, op_name) for other in range(size)]
                theirs = functools.reduce(BITWISE[op_name], everybody).to(device)
            elif device.type == "cpu" and op_name in {"AVG", "PREMUL_SUM"}:
                everybody = [values(other, 1001, dtype, op_name) for other in range(size)]
                if dtype.is_floating_point:
                    total = torch.stack([each.double() for each in everybody]).sum(0)
                    theirs = (total * (1 / size if op_name == "AVG" else 0.5)).to(dtype)
                else:
                    total = torch.stack(everybody).sum(0, dtype=dtype)
                    theirs = total.div(size, rounding_mode="trunc")
            else:
                dist.all_reduce(theirs, op)
            assert torch.equal(mine, theirs), f"{op_name} {name}"
            served += 1
    return served


def test_every_operation_and_type() -> None:
    # SUM, AVG, PRODUCT, MIN, MAX on 8 types, PREMUL_SUM on 4, the three bitwise ones on the other 4
    assert run_ranks(4, every_operation) == [5 * 8 + 4 + 3 * 4] * 4


# The order of messages -----------------------------------------------------------------------------


def equal_tags(rank: int, size: int) -> int:
    """Both ways between all ranks, one tag, lengths that depend on the number, posted in fits and starts."""
    group, chance = dist.group.WORLD, random.Random(rank)
    assert group is not None
    peers = [peer for peer in range(size) if peer != rank]
    lengths = [1 + number * 7919 % 3001 for number in range(60)]
    works, received = [], []
    waiting = {("send", peer): 0 for peer in peers} | {("receive", peer): 0 for peer in peers}
    while waiting:
        way, peer = chance.choice(list(waiting))
        for _ in range(chance.randint(1, 9)):
            number = waiting[way, peer]
            if number == len(lengths):
                del waiting[way, peer]
                break
            waiting[way, peer] += 1
            if way == "send":
                data = torch.full((lengths[number],), 1000 * rank + number)
                works.append((group.send([data], peer, 0), data))
            else:
                data = torch.full((lengths[number],), -1)
                works.append((group.recv([data], peer, 0), data))
                received.append((data, 1000 * peer + number))
        time.sleep(chance.choice([0, 0, 0, 0.002]))
    for work, _ in works:
        work.wait()
    assert all(bool((data == expected).all()) for data, expected in received)
    return len(received)


def test_gloo_matches_equal_tags_of_a_pair_in_the_order_of_posting() -> None:
    assert run_ranks(3, equal_tags) == [120] * 3


# Calls ---------------------------------------------------------------------------------------------


def call_by_call(rank: int, size: int) -> None:
    executor = Executor(ring_allreduce(size), device=CPU, pieces=2, cache=2)
    works = []
    tensors = [torch.full((3, 5), float(rank + number), requires_grad=True) for number in range(4)]
    for tensor in tensors:
        works.append(executor.allreduce(tensor, async_op=True))
    for number, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        assert work is not None
        assert work.wait()
        assert tensor.eq(sum(other + number for other in range(size))).all()
        doubled = work.get_future().then(lambda future: 2 * future.value()[0]).wait()
        assert torch.equal(doubled, 2 * tensor.detach().view(-1))
    for length in (1, 2, 1, 3, 1):  # 3 drives out 2, which was used before 1
        executor.allreduce(torch.zeros(length))
    assert executor._plan.cache_info().misses == 1 + 3  # those of the matrices and of three lengths
    with pytest.raises(InputError, match="its schedule is for allreduce, not for broadcast"):
        executor.broadcast(torch.zeros(3))


def test_calls_return_works_with_futures_and_keep_their_plans() -> None:
    run_ranks(3, call_by_call)


def refusals(rank: int, size: int) -> None:
    executor = Executor(ring_allreduce(size), device=CPU)
    for tensor, message in (
        (torch.zeros(4, 4).t(), r"allreduce: output must be contiguous, got shape \(4, 4\)"),
        (torch.zeros(4, device="meta"), "allreduce: output must be on cpu, got meta"),
        (
            torch.zeros(4, dtype=torch.complex64),
            "reduction SUM: schedules do not serve it on elements of torch.complex64",
        ),
    ):
        with pytest.raises(InputError, match=message):
            executor.allreduce(tensor)
    with pytest.raises(InputError, match="output must have 4 elements on this rank, got None"):
        executor.run(4, torch.float32)
    with pytest.raises(InputError, match="output must have 4 elements on this rank, got 3"):
        executor.run(4, torch.float32, output=torch.zeros(3))
    with pytest.raises(InputError, match=r"output must be of type torch.int8, got torch.float32"):
        executor.run(4, torch.int8, output=torch.zeros(4))
    with pytest.raises(InputError, match=f"full-5 has 5 ranks, the process group has {size}"):
        Executor(ring_allreduce(5), device=CPU)
    for device in ("cuda", "meta"):
        with pytest.raises(InputError, match=f"must be cpu or cuda with its index, got {device}"):
            Executor(ring_allreduce(size), device=torch.device(device))
    gathers = Executor(synth.solve(topologies.load(f"full:{size}"), "allgather"), device=CPU)
    both = torch.zeros(2 * size)
    with pytest.raises(InputError, match="must not overlap the input, except as its own block"):
        gathers.run(2 * size, torch.float32, given=both[1:3] if rank == 0 else both[:2], output=both)
    both[2 * rank :][:2] = rank
    gathers.run(2 * size, torch.float32, given=both[2 * rank :][:2], output=both)
    assert both.tolist() == [float(index // 2) for index in range(2 * size)]
    after = torch.ones(4)
    executor.allreduce(after)  # nothing above has sent a message
    assert after.tolist() == [size] * 4


def test_what_does_not_fit_is_refused() -> None:
    run_ranks(3, refusals)


def disagree(rank: int, size: int, knob: bool) -> None:
    ring, pieces = ring_allreduce(size), None
    if rank == 1 and knob:
        pieces = 3
    elif rank == 1:
        ring = synth.solve(topologies.load(f"full:{size}"), "allreduce")
    Executor(ring, device=CPU, pieces=pieces)


@pytest.mark.parametrize("knob", [False, True])
def test_ranks_with_different_schedules_are_refused_at_once(knob: bool) -> None:
    results = run_ranks(3, disagree, knob, may_fail=True)
    for rank, result in enumerate(results):
        assert isinstance(result, Failure) and result.error == "DisagreementError"
        other = 0 if rank == 1 else 1
        assert f"rank {rank}: its schedule and knobs (digest " in result.message
        assert f"are not those of rank {other} (" in result.message


def one_dies(rank: int, size: int) -> str:
    executor = Executor(ring_allreduce(size), device=CPU, pieces=4)
    executor.allreduce(torch.ones(1000))
    if rank == 1:
        os._exit(1)
    with pytest.raises(ExecutionError) as failure:
        while True:
            executor.allreduce(torch.ones(1000))
    with pytest.raises(
        ExecutionError, match=f"rank {rank}: an earlier call failed: allreduce, messages of time"
    ):
        executor.allreduce(torch.ones(1000))
    return str(failure.value)


def test_a_rank_that_dies_is_an_error_on_all_others() -> None:
    results = run_ranks(3, one_dies, may_fail=True)
    assert isinstance(results[1], Failure)
    for rank in (0, 2):
        assert f"rank {rank}: allreduce, messages of time " in results[rank]
        assert " with ranks " in results[rank]


def pieces(rank: int, size: int) -> list[int]:
    executor = Executor(ring_allreduce(size), piece_bytes=1024, max_pieces=6)
    return [executor.pieces_for(count, torch.float32) for count in (0, 1, 511, 1024, 2500, 10**6)]


def test_pieces_grow_with_the_largest_chunk() -> None:
    """A ring of two has chunks of half the buffer."""
    assert run_ranks(2, pieces)[0] == [1, 1, 1, 2, 4, 6]


def named_calls(rank: int, size: int) -> None:
    """Those of allgather and reduce-scatter; a relay takes part without tensors."""
    own = torch.full((3,), 10 * (rank + 1))
    both = torch.zeros(3 * size, dtype=torch.int64)
    fabric = topologies.load(f"full:{size}")
    Executor(synth.solve(fabric, "allgather")).allgather(both, own)
    assert both.tolist() == [10 * (other + 1) for other in range(size) for _ in range(3)]
    Executor(synth.solve(fabric, "reduce-scatter")).reduce_scatter(own, both * (rank + 1))
    assert own.tolist() == [10 * (rank + 1) * sum(range(size + 1))] * 3
    relayed = Executor(allgather_over_relay())
    output = torch.zeros(6, dtype=torch.int64)
    if rank == 1:
        with pytest.raises(InputError, match=r"rank 1: takes no part in the allgather; call run"):
            relayed.allgather(output, output[:3])
        relayed.run(6, torch.int64)
    else:
        relayed.allgather(output, torch.full((3,), 10 * rank))
        assert output.tolist() == [20, 20, 20, 0, 0, 0]


def test_named_calls_and_relays() -> None:
    run_ranks(3, named_calls)


# Calls in the order in which NCCL wants them, on a transport that only writes them down --------------


class _Notes:
    """A group of two that coalesces; nothing is sent, and what is called, waited for or added is noted."""

    supports_coalescing = True

    def __init__(self) -> None:
        self.lines: list[str] = []

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def name(self) -> str:
        return "gloo"

    def _get_backend(self, device: Any) -> _Notes:
        return self

    def _start_coalescing(self, device: Any) -> None:
        self.lines.append("start")

    def _end_coalescing(self, device: Any) -> _Notes:
        self.lines.append("end")
        return self

    def send(self, tensors: list[Any], peer: int, tag: int) -> None:
        self.lines.append(f"send {tensors[0].numel()} to {peer} tag {tag}")

    def recv(self, tensors: list[Any], peer: int, tag: int) -> None:
        self.lines.append(f"receive {tensors[0].numel()} from {peer} tag {tag}")

    def wait(self) -> None:
        self.lines.append("wait")


def test_a_coalesced_call_is_waited_for_once_and_before_what_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes: Any = _Notes()

    def combine(a: Any, b: Any, out: Any) -> None:
        notes.lines.append("add")

    monkeypatch.setattr(Executor, "_agree", lambda self: None)
    monkeypatch.setattr(torch_p2p, "served_operator", lambda op, dtype: Operator("sum", combine))
    Executor(ring_allreduce(2), notes, device=CPU).allreduce(torch.zeros(10))
    call = ["start", "receive 5 from 1 tag 0", "send 5 to 1 tag 0", "end", "wait"]
    assert notes.lines == [*call, "add", *call]
    notes.lines.clear()
    Executor(exchange(), notes, device=CPU, pieces=2).allreduce(torch.zeros(10))
    call = ["start", "receive 5 from 1 tag 0", "send 5 to 1 tag 0", "end"]
    assert notes.lines == [
        *call,
        "wait",
        *call,
        "add",
        "wait",
        "add",
    ]  # the first sum while the second passes


def exchange() -> Schedule:
    """Two ranks that send each other all they have."""
    transfers = [Transfer(0, rank, 1 - rank, 0, True) for rank in range(2)]
    return make("allreduce", [Chunk(Fraction(1), 0)], transfers, total=2)


# NCCL: one GPU is enough, which all ranks share ------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ONE_GPU = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
}
"""Ranks that share a GPU must look like ranks on different hosts, which talk over sockets."""


def on_gpu(rank: int, size: int, name: str, *arguments: Any) -> Any:
    """A function of this module with a group of NCCL; each rank claims a host of its own before that."""
    os.environ["NCCL_HOSTID"] = f"rank-{rank}"
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = dist.FileStore(str(store_path()), size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    try:
        return globals()[name](rank, size, *arguments, device)
    finally:
        dist.destroy_process_group()


def run_on_gpu(size: int, name: str, *arguments: Any) -> list[Any]:
    return run_ranks(size, on_gpu, name, *arguments, backend=None, environ=ONE_GPU, timeout_s=240)


@needs_gpu
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_schedules_on_nccl(ranks: int) -> None:
    assert any(run_on_gpu(ranks, "run_all", "messages", random_jobs()[ranks]))


@needs_gpu
def test_synthesized_schedules_on_nccl() -> None:
    assert all(run_on_gpu(4, "run_all", "messages", synthesized_jobs("full:4", 100_003, 1, 16)))


@needs_gpu
def test_every_operation_and_type_on_nccl() -> None:
    assert run_on_gpu(4, "every_operation") == [5 * 8 + 4 + 3 * 4] * 4


def never_waits(rank: int, size: int, device: Any) -> None:
    """Torch raises where anything in a call would wait for the GPU; a call returns while the GPU is busy."""
    executor = Executor(ring_allreduce(size), device=device, pieces=4)
    tensor = torch.full((1 << 20,), float(rank), device=device)
    executor.allreduce(tensor)  # NCCL connects, scratch is made
    torch.cuda.synchronize()
    tensor.fill_(rank)
    torch.cuda._sleep(1 << 33)  # seconds
    busy = torch.cuda.Event()
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    executor.allreduce(tensor)
    for _ in range(3):
        work = executor.allreduce(tensor, async_op=True)
        assert work is not None
        work.wait()
    still_busy = not busy.query()
    torch.cuda.set_sync_debug_mode("default")
    total = size * (size - 1) / 2 * size**3
    assert torch.equal(tensor, torch.full_like(tensor, total))
    assert still_busy, "the host has waited for the GPU"


@needs_gpu
def test_the_host_never_waits_on_nccl() -> None:
    run_on_gpu(2, "never_waits")


def streams_and_memory(rank: int, size: int, device: Any) -> None:
    """Calls from two streams share scratch; an input may be freed as soon as the call has returned."""
    sums = Executor(ring_allreduce(size), device=device, pieces=3)
    gathers = Executor(synth.solve(topologies.load(f"full:{size}"), "allgather"), device=device)
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    tensors = []
    for number in range(20):
        with torch.cuda.stream(streams[number % 2]):
            tensors.append(torch.full((50_000 + number,), float(rank + number), device=device))
            sums.allreduce(tensors[-1])
            tensors[-1].add_(1)
    torch.cuda.synchronize()
    for number, tensor in enumerate(tensors):
        wanted = sum(other + number for other in range(size)) + 1
        assert torch.equal(tensor, torch.full_like(tensor, wanted))
    block = 1 << 20
    for number in range(10):
        output = torch.empty(size * block, device=device)
        work = gathers.run(
            size * block,
            torch.float32,
            given=torch.full((block,), float(rank + number), device=device),
            output=output,
            async_op=True,
        )
        spoiler = torch.full((block,), -1.0, device=device)  # where the input was, unless it is kept
        assert work is not None
        work.wait()
        wanted = torch.arange(size, device=device).repeat_interleave(block) + number
        assert torch.equal(output, wanted.float())
        assert bool((spoiler == -1).all())


@needs_gpu
def test_streams_and_memory_on_nccl() -> None:
    run_on_gpu(3, "streams_and_memory")


# The benchmark of NCCL -------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_the_benchmark_prints_what_it_measured(device: str) -> None:
    script = Path(__file__).resolve().parents[2] / "bench" / "nccl.py"
    asked = ["--device", device, "--sizes", "64KiB", "1MiB", "--rounds", "5"]
    command = [sys.executable, str(script), *asked]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["has_gpu"] == (device == "cuda")
    assert [row["bytes"] for row in document["rows"]] == [1 << 16, 1 << 20]
    for row in document["rows"]:
        own = row["time_us"]["nccl" if device == "cuda" else "gloo"]
        assert row["speed_up"] == pytest.approx(own / row["time_us"]["schedule"])

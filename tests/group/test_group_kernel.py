"""Calls of a process group by the kernel, in Triton's interpreter in real processes, and which it serves."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from arborcast import synth, topologies
from arborcast.backends import Options
from arborcast.backends.schedules.schedule_table import ScheduleTable, TableEntry
from arborcast.synth.simulation.pieces import ONE_HOST
from tests.device.needs_triton import NEEDS_TRITON
from tests.device.rank_processes import sleep_while_waiting
from tests.support.faults import (
    PATIENCE_S,
    Ended,
    allreduce,
    check_failed,
    check_right,
    signal_self,
)
from tests.support.faults import launch as launch_faults
from tests.support.group_cases import OPS, values
from tests.support.ranks import Failure, run_ranks

pytestmark = NEEDS_TRITON

BELOW = 4096
KERNEL = {
    "ARBORCAST_P2P": "kernel-cpu",
    "ARBORCAST_KERNEL_BELOW": str(BELOW),
    "ARBORCAST_METHOD": "trees",
    "ARBORCAST_DEADLINE": "100",
    "TRITON_INTERPRET": "1",
}


def launch(*given: Any, ranks: int, topology: str, timeout_s: float = 200.0, **environ: str) -> list[Any]:
    """What a function returned on each rank of a group whose short calls the kernel serves."""
    told = KERNEL | environ
    return launch_faults(*given, ranks=ranks, topology=topology, environ=told, group_timeout_s=timeout_s)


def served(kind: str) -> tuple[int, int]:
    """Calls of a kind by the kernel, and all by schedules."""
    found = dist.group.WORLD.counters().get(kind, {})  # type: ignore[union-attr]
    return found.get("kernel", 0), found.get("schedule", 0)


def pattern(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Depends on rank and index; sums over few ranks are exact in every type."""
    return ((torch.arange(count) * 7 + 3 * rank) % 11).to(dtype)


def every_kind(rank: int, size: int, count: int, dtype_name: str, kinds: Sequence[str]) -> list[str]:
    """What is wrong with the results of all kinds, and which of `kinds` another way served."""
    sleep_while_waiting()
    dtype = getattr(torch, dtype_name)
    parts = [pattern(it, count * size, dtype) for it in range(size)]
    total = torch.stack(parts).sum(0).to(dtype)
    own, wrong = slice(rank * count, (rank + 1) * count), []

    def note(kind: str, got: torch.Tensor, want: torch.Tensor) -> None:
        if not torch.equal(got, want):
            wrong.append(kind)

    whole = parts[rank].clone()
    dist.all_reduce(whole)
    note("allreduce", whole, total)
    whole = parts[rank].clone()
    dist.broadcast(whole, 1)
    note("broadcast", whole, parts[1])
    gathered = torch.zeros(count * size, dtype=dtype)
    dist.all_gather_into_tensor(gathered, parts[rank][own].contiguous())
    note("allgather", gathered, torch.cat([parts[it][it * count : (it + 1) * count] for it in range(size)]))
    block = torch.zeros(count, dtype=dtype)
    dist.reduce_scatter_tensor(block, parts[rank])
    note("reduce-scatter", block, total[own])
    whole = parts[rank].clone()
    dist.reduce(whole, 1)
    note("reduce", whole, total if rank == 1 else parts[rank])
    blocks = [torch.zeros(count, dtype=dtype) for _ in range(size)] if rank == 1 else None
    dist.gather(parts[rank][own].contiguous(), blocks, 1)
    if blocks is not None:
        note("gather", torch.cat(blocks), gathered)
    block = torch.zeros(count, dtype=dtype)
    dist.scatter(block, list(parts[1].view(size, count)) if rank == 1 else None, 1)
    note("scatter", block, parts[1][own])
    for kind in kinds:
        if served(kind) != (1, 1):
            wrong.append(f"{kind} served {served(kind)}")
    return wrong


OF_TREES = ("allreduce", "broadcast", "allgather", "reduce-scatter", "reduce")


def test_every_kind() -> None:
    given = 37, "float32", OF_TREES
    assert launch(every_kind, *given, ranks=2, topology="full:2") == [[], []]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int32", "uint8"])
@pytest.mark.parametrize(("ranks", "fabric"), [(3, "ring:3"), (4, "full:4"), (4, "hypercube:2")])
def test_every_kind_and_type(ranks: int, fabric: str, dtype: str) -> None:
    given = 61, dtype, (*OF_TREES, "gather", "scatter")
    environ = {"ARBORCAST_METHOD": "auto", "ARBORCAST_START": "wait"}
    assert launch(every_kind, *given, ranks=ranks, topology=fabric, **environ) == [[]] * ranks


def around_the_limit(rank: int, size: int) -> list[str]:
    sleep_while_waiting()
    group: Any = dist.group.WORLD
    wrong = []
    for count in (0, 1, BELOW // 4 - 1, BELOW // 4, BELOW // 4 + 1):
        before = served("allreduce")
        tensor = pattern(rank, count)
        dist.all_reduce(tensor)
        after = served("allreduce")
        by_kernel = int(0 < 4 * count < BELOW)
        if (after[0] - before[0], after[1] - before[1]) != (by_kernel, 1):
            wrong.append(f"{count}: {before} {after}")
        if not torch.equal(tensor, sum(pattern(it, count) for it in range(size))):
            wrong.append(f"{count} elements")
    # Ops and types: what the kernel lacks goes by messages, and is as right.
    for op, dtype, by_kernel in (
        ("SUM", torch.int64, 1),
        ("AVG", torch.float32, 1),
        ("MAX", torch.int32, 1),
        ("MAX", torch.float32, 0),
        ("PRODUCT", torch.float32, 0),
        ("BXOR", torch.int32, 0),
        ("MAX", torch.bool, 0),
    ):
        before = served("allreduce")
        of_ranks = [values(it, 50, dtype, op, 1) for it in range(size)]
        tensor = of_ranks[rank].clone()
        dist.all_reduce(tensor, OPS[op])
        want = of_ranks[0]
        for other in of_ranks[1:]:
            want = {"MAX": torch.maximum, "PRODUCT": torch.mul, "BXOR": torch.bitwise_xor}.get(op, torch.add)(
                want, other
            )
        want = want / size if op == "AVG" else want
        if not torch.equal(tensor, want) or served("allreduce")[0] - before[0] != by_kernel:
            wrong.append(f"{op} {dtype}")
    if f"by the kernel below {BELOW // 1024} KiB, else by messages" not in group.explain(1000):
        wrong.append(group.explain(1000))
    return wrong


def test_sizes_around_the_limit_types_and_reductions() -> None:
    assert launch(around_the_limit, ranks=2, topology="full:2") == [[], []]


def in_flight(rank: int, size: int) -> list[bool]:
    """Several calls at once of two lengths; the future of one; then a length by messages between two."""
    sleep_while_waiting()
    tensors = [pattern(rank + salt, count) for salt, count in enumerate((300, 7, 300, 2000, 12))]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    works[1].get_future().wait()
    for work in works:
        work.wait()
    wanted = [
        sum(pattern(it + salt, len(tensor)) for it in range(size)) for salt, tensor in enumerate(tensors)
    ]
    found = [torch.equal(tensor, want) for tensor, want in zip(tensors, wanted, strict=True)]
    return [*found, served("allreduce") == (4, 5)]


def test_several_calls_in_flight() -> None:
    assert launch(in_flight, ranks=3, topology="ring:3") == [[True] * 6] * 3


SAID = ("", "ü" * 400, "handle " * 700)


def exchanged(rank: int, size: int) -> tuple[str, ...]:
    group: Any = dist.group.WORLD
    return tuple(group._communicator._exchanged(SAID[rank]))


def test_ranks_that_make_memory_may_say_much_or_nothing() -> None:
    assert launch(exchanged, ranks=3, topology="ring:3") == [SAID] * 3


def poll_fails(strike: Callable[[], None]) -> None:
    """Have something happen to this process when its kernel polls for the third time from now on."""
    from triton.runtime.interpreter import InterpreterBuilder

    polls: Callable[..., Any] = InterpreterBuilder.create_atomic_rmw
    polled = []

    def counted(*arguments: Any) -> Any:
        polled.append(0)
        if len(polled) == 3:
            strike()
        return polls(*arguments)

    InterpreterBuilder.create_atomic_rmw = counted


def struck(rank: int, size: int, how: str) -> tuple[Ended, Ended]:
    sleep_while_waiting()
    check_right(allreduce(rank, size, count=100))
    if rank == 1:
        stop = signal_self(signal.SIGKILL) if how == "killed" else lambda: time.sleep(4 * SHORT_S)
        poll_fails(stop)
    return allreduce(rank, size, count=100), allreduce(rank, size, count=100)


SHORT_S = 3.0


def test_a_rank_killed_in_the_kernel_ends_the_call_of_all_others() -> None:
    results = launch(struck, "killed", ranks=3, topology="full:3", timeout_s=PATIENCE_S)
    assert results[1] == Failure("killed", "ended without an answer")
    for rank in (0, 2):
        call, later = results[rank]
        check_failed(call, f"rank {rank}: allreduce", "rank 1")
        check_failed(later, "an earlier call failed")


@pytest.mark.long
def test_a_rank_that_stands_still_is_waited_for_until_the_timeout() -> None:
    for rank, (call, later) in enumerate(
        launch(struck, "still", ranks=3, topology="full:3", timeout_s=SHORT_S)
    ):
        check_failed(call, f"rank {rank}: allreduce", "waited 3.0 s for a peer|rank ")
        check_failed(later, "an earlier call failed")


def without_interpreter(rank: int, size: int) -> None:
    dist.new_group(backend="synth", pg_options=Options(p2p="kernel-cpu"))  # type: ignore[arg-type]


def test_a_cpu_needs_the_interpreter() -> None:
    said = "needs Triton's interpreter: set TRITON_INTERPRET=1 before triton is imported"
    for result in run_ranks(2, without_interpreter, environ={"TRITON_INTERPRET": "0"}, may_fail=True):
        assert result == Failure("InputError", f"p2p: kernel-cpu {said}")


def kernel_calls(below: int | None = None) -> tuple[Any, ScheduleTable]:
    from arborcast.backends.device.memory import PeerRanks
    from arborcast.backends.group.kernel_calls import KernelCalls

    schedule = synth.solve(topologies.load("dgx1"), "allreduce", method="ring")
    ranks = PeerRanks(0, lambda said: [said], lambda own: own)
    table = ScheduleTable(schedule.collective, (TableEntry(0, schedule),))
    return KernelCalls(ranks, "cuda", below, ONE_HOST), table


def test_the_limit_is_where_the_two_models_meet() -> None:
    calls, table = kernel_calls()
    limit = calls.limit(table)
    assert calls._is_faster(table, limit // 2)
    assert not calls._is_faster(table, limit)
    tensor = torch.zeros(1)
    assert calls.entry(table, limit, tensor, None) is None
    assert str(calls.entry(table, limit - 1, tensor, None)).endswith(" by the kernel")


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from arborcast.backends.group import kernel_calls as module

    calls, table = kernel_calls(below=1 << 20)
    assert calls.entry(table, 1000, torch.zeros(1), None) is not None
    monkeypatch.setattr(module, "MOST_PLANS", 0)
    assert calls.entry(table, 1000, torch.zeros(1), None) is None

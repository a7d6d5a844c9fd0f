"""The process group "synth" with tensors that pass through a ring; results: `group/test_group_operations`."""

from __future__ import annotations

import signal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from arborcast.backends import Options
from arborcast.backends.staging.device import CopyDirection, Done
from arborcast.backends.staging.emulated import EmulatedDevice
from tests.support.faults import (
    MIB,
    PATIENCE_S,
    PIECE,
    RANKS,
    Ended,
    allreduce,
    check_failed,
    check_right,
    launch,
    signal_self,
    strike_after,
)
from tests.support.ranks import Failure, run_ranks

STAGED = {"ARBORCAST_STAGING": "emulated:2:5", "ARBORCAST_METHOD": "trees", "ARBORCAST_DEADLINE": "100"}
COUNT = 1 << 20  # elements of 4 bytes


def fail_after(copies: int) -> None:
    """Have this process's device fail from then on."""
    copy, made = EmulatedDevice.copy, []

    def failing(self: EmulatedDevice, way: CopyDirection, into: Tensor, source: Tensor, done: Done) -> None:
        made.append(way)
        if len(made) > copies:
            raise RuntimeError("the device has fallen off the bus")
        copy(self, way, into, source, done)

    EmulatedDevice.copy = failing  # type: ignore[method-assign]


def _failing_device(rank: int, size: int) -> list[Ended]:
    first = allreduce(rank, size, count=5000)
    if rank == 1:
        fail_after(5)
    return [first, allreduce(rank, size), allreduce(rank, size, count=5000)]


def test_a_device_that_fails_is_told_to_all_and_ends_the_group() -> None:
    for rank, result in enumerate(launch(_failing_device, environ=STAGED, group_timeout_s=PATIENCE_S)):
        first, second, third = result
        check_right(first)
        check_failed(second, f"rank {rank}: allreduce", "rank 1: .*copy .* RuntimeError: the device has")
        check_failed(third, "an earlier call failed", "the device has fallen off the bus")


def _killed(rank: int, size: int) -> Ended:
    check_right(allreduce(rank, size, count=5000))
    if rank == 2:
        strike_after(10 * MIB, signal_self(signal.SIGKILL))
    return allreduce(rank, size)


def test_a_rank_killed_in_a_staged_allreduce_is_named_by_all_others() -> None:
    results = launch(_killed, environ=STAGED, group_timeout_s=PATIENCE_S)
    assert results[2] == Failure("killed", "ended without an answer")
    for rank in set(range(RANKS)) - {2}:
        check_failed(results[rank], "rank 2", "allreduce", PIECE)


def _host_memory(rank: int, size: int) -> list[int]:
    asked: list[int] = []
    host_memory = EmulatedDevice.host_memory

    def noting(self: EmulatedDevice, nbytes: int) -> Tensor:
        asked.append(nbytes)
        return host_memory(self, nbytes)

    EmulatedDevice.host_memory = noting  # type: ignore[method-assign]
    check_right(allreduce(rank, size, COUNT))
    dist.broadcast(torch.zeros(COUNT), 1)
    dist.all_gather_into_tensor(torch.zeros(COUNT), torch.zeros(COUNT // size))
    dist.reduce_scatter_tensor(torch.zeros(COUNT // size), torch.zeros(COUNT))
    return asked


def test_host_memory_is_that_of_the_ring() -> None:
    """Of 4 MiB in every collective, three buffers of 64 KiB and what chunks are rounded up by."""
    told = STAGED | {"ARBORCAST_STAGING_DEPTH": "3", "ARBORCAST_STAGING_BYTES": "64KiB"}
    for asked in launch(_host_memory, environ=told):
        assert asked and max(asked) <= 3 * (64 << 10) + 1024


def _differ(rank: int, size: int) -> None:
    options = Options(topology="full:2", staging="emulated:1", staging_depth=1 + rank)
    dist.new_group(backend="synth", pg_options=options)  # type: ignore[arg-type]


def test_ranks_that_differ_are_refused() -> None:
    import arborcast.torch_backend  # noqa: F401

    results = run_ranks(2, _differ, may_fail=True)
    assert all(isinstance(result, Failure) and "staging_depth" in result.message for result in results)


def _cuda(rank: int, size: int) -> None:
    dist.new_group(backend="synth", pg_options=Options(staging="cuda"))  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_where_there_is_none_is_refused() -> None:
    for result in run_ranks(2, _cuda, may_fail=True):
        assert result == Failure("InputError", "staging: cuda needs a GPU, and torch finds none")

# Annotations are evaluated here, as in the module: DDP looks at those of hooks.

import os
import signal
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from arborcast.backends.errors import ExecutionError
from arborcast.backends.group.ddp_hook import ScheduledAllreduce, _next_number, allreduce_hook
from arborcast.backends.options import Options
from arborcast.synth.errors import InputError
from tests.support.framework_checks import small_model, train
from tests.support.ranks import Failure, run_ranks

RANKS_IMPORT = ("torch._dynamo",)

RANKS = 4
BUCKET_MB = 0.002  # five buckets for the small model
FULL = Options(topology=f"full:{RANKS}", gloo_below=0)


def _wrapped() -> DistributedDataParallel:
    return DistributedDataParallel(small_model(), bucket_cap_mb=BUCKET_MB)


def _train_both_ways(rank: int, size: int) -> tuple[float, dict[str, int]]:
    """The largest difference to DDP without a hook in losses and parameters, and who served the calls."""
    plain, hooked = _wrapped(), _wrapped()
    allreduces = ScheduledAllreduce(options=FULL)
    hooked.register_comm_hook(allreduces, allreduce_hook)
    pairs = zip(train(rank, plain), train(rank, hooked), strict=True)
    difference = max((ours - theirs).abs().max().item() for theirs, ours in pairs)
    allreduces.close()
    return difference, allreduces.counters()


def test_it_trains_as_ddp_does() -> None:
    for difference, counters in run_ranks(RANKS, _train_both_ways):
        assert difference <= 1e-6
        assert counters["schedule"] > 3 * 2  # three steps with several buckets each
        assert counters["gloo"] == 0


def _call_it(rank: int, size: int) -> dict[str, list[float]]:
    allreduces = ScheduledAllreduce(options=FULL)
    buckets = [torch.full((1000,), float((rank + 1) * 10**bucket)) for bucket in range(6)]
    futures = [allreduces.average(bucket) for bucket in buckets]
    largest = torch.tensor([rank, -rank])
    allreduces.allreduce(largest, dist.ReduceOp.MAX)  # while the buckets are in flight
    averages = [future.wait() for future in reversed(futures)][::-1]
    assert all(average is bucket for average, bucket in zip(averages, buckets, strict=True))
    grid = torch.full((3, 5), rank + 1)
    allreduces.allreduce(grid)
    half = torch.full((10,), 60_000.0, dtype=torch.float16)
    allreduces.average(half).wait()
    return {
        "averages": [average.unique().item() for average in averages],
        "largest": largest.tolist(),
        "sum": grid.unique().tolist(),
        "shape": list(grid.shape),
        "float16": half.unique().tolist(),
    }


def test_calls_in_flight_and_calls_that_wait() -> None:
    for got in run_ranks(RANKS, _call_it):
        assert got["averages"] == [2.5 * 10**bucket for bucket in range(6)]  # of 1, 2, 3 and 4
        assert got["largest"] == [3, 0]
        assert got["sum"] == [10]
        assert got["shape"] == [3, 5]
        assert got["float16"] == [60_000.0 // 32 * 32]  # the nearest float16; a sum first would be infinite


def _several_of_them(rank: int, size: int) -> list[list[int]]:
    """Two over the default group, and one over a subgroup, whose fabric is the fragment of its ranks."""
    both = [ScheduledAllreduce(options=FULL) for _ in range(2)]
    group = dist.new_group([1, 2, 3])
    if rank:
        both.append(ScheduledAllreduce(group, FULL))
    tensors = [torch.tensor([(rank + 1) * 100**index]) for index in range(len(both))]
    for allreduces, tensor in zip(reversed(both), reversed(tensors), strict=True):
        allreduces.allreduce(tensor)
    explained = both[-1].explain(1 << 20)
    assert explained.startswith("allreduce of 1 MiB: ")
    assert "gloo" not in explained
    return [tensor.tolist() for tensor in tensors]


def test_several_of_them_and_subgroups() -> None:
    assert run_ranks(RANKS, _several_of_them) == [
        [[10], [1000]],
        *[[[10], [1000], [90_000]]] * 3,
    ]


def _refuse(rank: int, size: int) -> list[str]:
    allreduces = ScheduledAllreduce(options=Options(topology=f"full:{size}"))
    refused: list[tuple[Tensor, Any]] = [
        (torch.zeros(4, 4).t(), dist.ReduceOp.SUM),
        (torch.zeros(4, dtype=torch.complex64), dist.ReduceOp.SUM),
        (torch.zeros(4), dist.ReduceOp.BAND),
    ]
    messages = []
    for tensor, op in refused:
        with pytest.raises(InputError) as error:
            allreduces.allreduce(tensor, op)
        messages.append(str(error.value))
    allreduces.close()
    with pytest.raises(ExecutionError, match="the scheduled allreduces were closed"):
        allreduces.allreduce(torch.zeros(4))
    return messages


def test_what_it_refuses() -> None:
    for transposed, complex_, bits in run_ranks(2, _refuse):
        assert transposed == "the tensor must be contiguous, got shape (4, 4) with strides (1, 4)"
        assert complex_ == "reduction SUM: schedules do not serve it on elements of torch.complex64"
        assert bits == "reduction BAND: schedules do not serve it on elements of torch.float32"


def test_it_needs_a_group() -> None:
    with pytest.raises(InputError, match="no process group given and no default group"):
        ScheduledAllreduce()


def _lose_a_rank(rank: int, size: int) -> str:
    model = _wrapped()
    model.register_comm_hook(ScheduledAllreduce(options=FULL, timeout_s=20), allreduce_hook)
    train(rank, model, steps=2)  # in the second DDP makes new buckets, over gloo
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as error:
        train(rank, model, steps=1)
    return str(error.value)


def test_a_dead_rank_ends_the_backward_pass() -> None:
    results = run_ranks(RANKS, _lose_a_rank, may_fail=True)
    assert isinstance(results.pop(2), Failure)
    for message in results:
        assert "rank 2" in message


class _OnTheGpuOnly:
    """A group that has no way for tensors on the CPU, as one of NCCL alone; nothing but its store."""

    def __init__(self, rank: int, store: dist.Store) -> None:
        self.rank = lambda: rank
        self.get_group_store = lambda: store


def test_ranks_number_their_allreduces_without_the_group() -> None:
    store = dist.HashStore()
    groups: list[Any] = [_OnTheGpuOnly(rank, store) for rank in range(2)]
    assert [[_next_number(group) for group in groups] for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]

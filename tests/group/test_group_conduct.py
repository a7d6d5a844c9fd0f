"""What torch and its users expect of a group beside collectives: deadlines, numbers, who is missing."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from arborcast.backends import Options
from tests.support.ranks import QUICK, StandingRanks

RANKS_IMPORT = ("torch._dynamo",)
ranks = StandingRanks(3, environ=QUICK)


def message_of(call: Any) -> str:
    """What it raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# --------------------------------------------------------------------------------- the monitored barrier


def meet(rank: int, size: int) -> tuple[str, str]:
    group: Any = dist.group.WORLD
    group.monitored_barrier(timedelta(seconds=60))
    first = message_of(lambda: rank == 1 or group.monitored_barrier(timedelta(seconds=0.1)))
    all_of_them = message_of(lambda: rank or group.monitored_barrier(timedelta(seconds=0.1), True))
    dist.barrier()
    return first, all_of_them


def test_a_monitored_barrier_names_who_does_not_come() -> None:
    (first, both), (absent, _), (present, _) = ranks(meet)
    who = "Rank 0 timed out in monitoredBarrier after 100 ms"
    assert first == f"ExecutionError: {who}: Rank 1 failed to pass monitoredBarrier"
    assert both == f"ExecutionError: {who}: Ranks 1, 2 failed to pass monitoredBarrier"
    assert absent == "nothing"
    assert "Rank 2 successfully reached monitoredBarrier, but received errors" in present
    assert "Rank 1 failed to pass" in present


# --------------------------------------------------------------------------------------- sequence numbers


@ranks.check
def test_calls_of_a_group_are_numbered(rank: int, size: int) -> None:
    group: Any = dist.group.WORLD
    part: Any = dist.new_group([0, 1])
    before = group._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
    dist.reduce(torch.ones(2), 0)
    dist.barrier()
    assert group._get_sequence_number_for_group() == before + 5
    if rank < 2:
        dist.broadcast(torch.ones(2), 0, group=part)
        assert part._get_sequence_number_for_group() == 1


# --------------------------------------------------------------------------------------------- deadlines


def wait_in_vain(rank: int, size: int, how: str) -> str:
    """Rank 0 alone makes a call, or alone comes to gloo with it; the others leave when it has failed."""
    told: Any = Options(gloo_below=1 << 20 if how == "within gloo" else None)
    group: Any = dist.new_group(pg_options=told)
    keys = dist.PrefixStore(how, group.get_group_store())
    dist.all_reduce(torch.ones(2), group=group)
    if how == "of a receive":  # and of an exchange before it, so long that it ends well
        group.set_timeout(timedelta(seconds=1.5))
        if rank < 2:
            (dist.recv if rank else dist.send)(torch.ones(1), 1 - rank, group=group)
    if how == "of the group":
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5), group)
    options = dist.AllreduceOptions()
    if how == "within gloo" and rank > 0:
        inner = group._communicator._gloo
        get = inner.get
        inner.get = lambda: [keys.wait(["done 0"], timedelta(seconds=60)), get()][1]
    if how in {"of the call", "within gloo"}:
        options.timeout = timedelta(seconds=0.5 if how == "of the call" else 2)

    def call() -> None:
        if how == "of a receive":
            dist.recv(torch.ones(1), 1, group=group)
        work = group.allreduce([torch.ones(2)], options)
        work.wait(timedelta(seconds=0.5)) if how == "of waiting" else work.wait()

    said = message_of(call) if rank == 0 or how == "within gloo" else ""
    keys.set(f"done {rank}", "")
    keys.wait(["done 0"], timedelta(seconds=60))
    return said


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("of the group", "0.5 s, the timeout of the call"),
        ("of the call", "0.5 s, the timeout of the call"),
        ("of waiting", "waited 0:00:00.500000"),
        ("of a receive", "Timed out waiting 1500ms"),
        ("within gloo", "Timed out waiting 2000ms"),
    ],
)
def test_a_deadline_that_was_set_holds(how: str, said: str) -> None:
    assert said in ranks(wait_in_vain, how)[0]


@ranks.check
def test_deadlines_may_be_long(rank: int, size: int) -> None:
    """40 days are more milliseconds than 32 bits hold."""
    group = dist.new_group(timeout=timedelta(days=40))
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    work.wait(timedelta(days=400))
    dist.reduce(tensor, 0, group=group)
    dist.barrier(group)
    assert rank or tensor[0] == 9


# -------------------------------------------------------------------------------------- works and AVG


@ranks.check
def test_ddp_joins_uneven_inputs(rank: int, size: int) -> None:
    """DDP gives C++ a work to wait for, and keeps nothing of it itself.

    Of 2, 3 and 4 steps, where who has ended does not count: 3 * 1 / 3 + 3 * 2 / 3 + 2 * 3 / 2 + 4.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 1))
    with model.join(divide_by_initial_world_size=False):
        for turn in range(2 + rank):
            model(torch.full((1, 2), turn + 1.0)).sum().backward()
    assert model.module.weight.grad is not None
    assert rank < 2 or model.module.weight.grad.flatten().tolist() == [10, 10]


@ranks.check
def test_averages_of_integers_are_cut(rank: int, size: int) -> None:
    """As NCCL's are: 4 / 3 and -4 / 3 towards 0."""
    tensor = torch.tensor([rank % 2 + 1, -(rank % 2) - 1, 5])
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert tensor.tolist() == [1, -1, 5]

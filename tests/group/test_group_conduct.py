"""What torch and its users expect of a group beside collectives: deadlines, numbers, who is missing."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import run_ranks

RANKS_IMPORT = ("torch._dynamo",)
ENVIRON = {"ARBORCAST_TOPOLOGY": "full:3"}


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
    (first, both), (absent, _), (present, _) = run_ranks(3, meet, backend="synth", environ=ENVIRON)
    who = "Rank 0 timed out in monitoredBarrier after 100 ms"
    assert first == f"ExecutionError: {who}: Rank 1 failed to pass monitoredBarrier"
    assert both == f"ExecutionError: {who}: Ranks 1, 2 failed to pass monitoredBarrier"
    assert absent == "nothing"
    assert "Rank 2 successfully reached monitoredBarrier, but received errors" in present
    assert "Rank 1 failed to pass" in present


# --------------------------------------------------------------------------------------- sequence numbers


def count(rank: int, size: int) -> list[int]:
    group: Any = dist.group.WORLD
    part: Any = dist.new_group([0, 1])
    before = group._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
    dist.reduce(torch.ones(2), 0)
    dist.barrier()
    numbers = [group._get_sequence_number_for_group() - before]
    if rank < 2:
        dist.broadcast(torch.ones(2), 0, group=part)
        numbers.append(part._get_sequence_number_for_group())
    return numbers


def test_calls_of_a_group_are_numbered() -> None:
    assert run_ranks(3, count, backend="synth", environ=ENVIRON) == [[5, 1], [5, 1], [5]]


# --------------------------------------------------------------------------------------------- deadlines


def wait_in_vain(rank: int, size: int, how: str) -> str:
    """Rank 0 alone makes a call, or alone comes to gloo with it; the others leave when it has failed."""
    group: Any = dist.group.WORLD
    dist.all_reduce(torch.ones(2))
    if how == "of a receive":  # and of an exchange before it, so long that it ends well
        group.set_timeout(timedelta(seconds=1.5))
        dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1), 0)
    if how == "of the group":
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5))
    options = dist.AllreduceOptions()
    if how == "within gloo" and rank > 0:
        inner, keys = group._communicator._gloo, group.get_group_store()
        get = inner.get
        inner.get = lambda: [keys.wait(["done 0"], timedelta(seconds=60)), get()][1]
    if how in {"of the call", "within gloo"}:
        options.timeout = timedelta(seconds=0.5 if how == "of the call" else 2)

    def call() -> None:
        if how == "of a receive":
            dist.recv(torch.ones(1), 1)
        work = group.allreduce([torch.ones(2)], options)
        work.wait(timedelta(seconds=0.5)) if how == "of waiting" else work.wait()

    said = message_of(call) if rank == 0 or how == "within gloo" else ""
    group.get_group_store().set(f"done {rank}", "")
    group.get_group_store().wait(["done 0"], timedelta(seconds=60))
    return said


@pytest.mark.parametrize("how", ["of the group", "of the call", "of waiting", "of a receive", "within gloo"])
def test_a_deadline_that_was_set_holds(how: str) -> None:
    environ = {"ARBORCAST_TOPOLOGY": "full:2"}
    if how == "within gloo":
        environ["ARBORCAST_GLOO_BELOW"] = "1M"
    said = run_ranks(2, wait_in_vain, how, backend="synth", environ=environ)[0]
    of_others = {
        "of waiting": "waited 0:00:00.500000",
        "of a receive": "Timed out waiting 1500ms",
        "within gloo": "Timed out waiting 2000ms",
    }
    expected = of_others.get(how, "0.5 s, the timeout of the call")
    assert expected in said


def call_patiently(rank: int, size: int) -> float:
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait(timedelta(days=400))
    dist.reduce(tensor, 0)
    dist.barrier()
    return tensor[0].item()


def test_deadlines_may_be_long() -> None:
    """40 days are more milliseconds than 32 bits hold."""
    found = run_ranks(
        3, call_patiently, backend="synth", environ=ENVIRON, group_timeout_s=40 * 24 * 3600, timeout_s=120
    )
    assert found[0] == 9


# -------------------------------------------------------------------------------------- works and AVG


def train_unevenly(rank: int, size: int) -> list[float]:
    """DDP gives C++ a work to wait for, and keeps nothing of it itself."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(2, 1))
    with model.join(divide_by_initial_world_size=False):
        for turn in range(2 + rank):
            model(torch.full((1, 2), turn + 1.0)).sum().backward()
    assert model.module.weight.grad is not None
    gradient: list[float] = model.module.weight.grad.flatten().tolist()
    return gradient


def test_ddp_joins_uneven_inputs() -> None:
    """Of 2 and 3 steps: (1 + 1) / 2 + (2 + 2) / 2 + 3, where rank 0 no longer counts."""
    environ = {"ARBORCAST_TOPOLOGY": "full:2"}
    _, longest = run_ranks(2, train_unevenly, backend="synth", environ=environ)
    assert longest == [6, 6]


def average(rank: int, size: int) -> list[int]:
    tensor = torch.tensor([rank + 1, -rank - 1, 5])
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    found: list[int] = tensor.tolist()
    return found


def test_averages_of_integers_are_cut() -> None:
    """As NCCL's are: 3 / 2 and -3 / 2 towards 0."""
    assert (
        run_ranks(2, average, backend="synth", environ={"ARBORCAST_TOPOLOGY": "full:2"}) == [[1, -1, 5]] * 2
    )

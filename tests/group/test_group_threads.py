"""The group beside the rest of its process: other threads, barriers, autograd, and forked children."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from arborcast.backends import Options
from arborcast.backends.schedules import held as schedules
from arborcast.backends.tensors.torch_compat import all_gather_single
from tests.support.ranks import QUICK, Failure, StandingRanks, run_ranks
from tests.support.waiting import any_inside, until

COUNT = 1 << 16
PATIENCE_S = 100
ranks = StandingRanks(3, environ=QUICK)


def _begin(rank: int, size: int, port: int) -> None:
    import arborcast.torch_backend  # noqa: F401

    timeout = timedelta(seconds=PATIENCE_S)
    store = c10d.TCPStore("127.0.0.1", port, size, timeout=timeout)
    dist.init_process_group("synth", store=store, rank=rank, world_size=size, timeout=timeout)


def _group_during_synthesis(rank: int, size: int, port: int) -> float:
    """Sum of what was gathered; the default group waits for a table while gloo makes another group."""
    module: Any = schedules
    make = module.synthesize_table
    is_waiting = Path(f"{os.environ['TEST_STORE']}-waiting")
    begun = threading.Event()

    def slowly(*arguments: Any) -> Any:
        until(lambda: is_waiting.exists() and begun.is_set())
        return make(*arguments)

    _begin(rank, size, port)
    module.synthesize_table = slowly
    output = torch.zeros(size * COUNT)
    work = all_gather_single(output, torch.full((COUNT,), float(rank)), async_op=True)
    if rank:
        until(lambda: any_inside("_wait_for"))  # the queue of this rank waits for the table
        is_waiting.touch()
    begun.set()
    group = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(1), group=group)
    work.wait()
    dist.destroy_process_group()
    return output.sum().item()


def test_a_group_can_be_made_while_another_waits_for_schedules() -> None:
    # The two would share a connection to the TCP store, and each of them wait for the other's.
    store = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = run_ranks(2, _group_during_synthesis, store.port, backend=None)
    assert results == [COUNT, COUNT]


def _group_during_a_first_call_of_gloo(rank: int, size: int, port: int) -> list[float]:
    """What came of the call; the last rank is in `new_group` while gloo looks for the others in the store."""
    _begin(rank, size, port)
    default: Any = dist.group.WORLD
    output = torch.full((1,), float(rank + 1)).to_sparse()
    work = dist.all_reduce(output, async_op=True)
    if rank == 0:
        time.sleep(0.3)  # too short a time would only make the test easier
    group = dist.new_group()
    work.wait()
    dist.barrier(group)
    assert default._inner.is_made or default._communicator._gloo.is_made, "gloo was to serve it"
    return output.to_dense().tolist()


def test_a_group_can_be_made_while_gloo_connects_for_another() -> None:
    store = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = run_ranks(2, _group_during_a_first_call_of_gloo, store.port, backend=None)
    assert results == [[3.0], [3.0]]


@ranks.check
def test_large_and_small_calls_are_the_same_to_autograd(rank: int, size: int) -> None:
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        for count in (8, COUNT):
            given = torch.zeros(count, requires_grad=True)
            result = given.exp()  # which keeps its result for the backward pass
            dist.all_reduce(result, group=group)
            torch.autograd.backward(result.sum())
            assert given.grad is not None and given.grad[0] == size


def _with_child(rank: int, size: int) -> str:
    dist.all_reduce(torch.ones(COUNT))
    was_told = Path(f"{os.environ['TEST_STORE']}-told")
    if rank == 1:
        if os.fork() == 0:  # which keeps open all that its parent had
            try:
                until(was_told.exists)
            finally:
                os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(torch.ones(COUNT))
    except Exception as error:
        return str(error)
    finally:
        was_told.touch()
    return "no error"


@pytest.mark.parametrize("transport", ["sockets", "shared memory"])
def test_a_killed_rank_is_noticed_though_its_child_lives_on(transport: str) -> None:
    told, killed = run_ranks(
        2,
        _with_child,
        backend="synth",
        environ={"ARBORCAST_TRANSPORT": transport},
        group_timeout_s=1000,  # more than this test may take: the death must be noticed before
        may_fail=True,
    )
    assert "rank 1 closed its connection" in told
    assert isinstance(killed, Failure)


@pytest.mark.parametrize(
    "fabric", ["ring:3", *(pytest.param(it, marks=pytest.mark.long) for it in ("full:3", "star:3"))]
)
def test_outputs_that_overlap_their_inputs(fabric: str) -> None:
    ranks(_in_place, fabric)


def _in_place(rank: int, size: int, fabric: str) -> None:
    """Buffers that share memory, in every block: what the collective writes must not change what it reads."""
    options: Any = Options(topology=fabric)
    group = dist.new_group(pg_options=options)
    count = 1 << 14
    for block in range(size):
        whole = torch.zeros(size * count)
        mine = whole[block * count :][:count]
        mine.copy_(torch.arange(count) + rank)
        dist.all_gather_into_tensor(whole, mine, group=group)
        assert torch.equal(whole, torch.cat([torch.arange(count) + float(r) for r in range(size)]))
        whole = torch.arange(size * count, dtype=torch.float32) * (rank + 1)
        mine = whole[block * count :][:count]
        dist.reduce_scatter_tensor(mine, whole, group=group)
        total = size * (size + 1) // 2
        expected = torch.arange(rank * count, (rank + 1) * count, dtype=torch.float32) * total
        assert torch.equal(mine, expected)


@ranks.check
def test_a_forked_child_is_refused(rank: int, size: int) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            dist.all_reduce(torch.ones(4))
            os.write(writing, b"served")
        except RuntimeError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    dist.all_reduce(torch.ones(4))  # the parents go on
    assert b"forked after it was made" in os.read(reading, 1000)
    os.close(reading)
    os.close(writing)


def _posted_before_a_barrier(rank: int, size: int) -> list[float]:
    """Rank 0 posts sends to both others and the last a receive from rank 1; then all come to a barrier."""
    group = dist.new_group()  # in which no two have exchanged anything
    first, second, third = (torch.full((3,), float(number)) for number in (1, 2, 3))
    got = [torch.zeros(3) for _ in range(2)]
    works: list[Any] = []
    if rank == 0:
        works = [
            dist.isend(it, to, tag=to - 1, group=group) for it, to in ((first, 1), (second, 1), (third, 2))
        ]
    elif rank == 2:
        works = [dist.irecv(got[0], 1, tag=2, group=group)]
    assert not any(work.is_completed() for work in works)
    dist.barrier(group)
    if rank == 1:
        dist.recv(got[0], 0, group=group)
        dist.recv(got[1], 0, group=group)
        dist.send(third, 2, tag=2, group=group)
    elif rank == 2:
        dist.recv(got[1], 0, tag=1, group=group)
    for work in works:
        assert work.wait() and work.is_completed() and work.is_success()
    dist.barrier(group)
    return [got[0][0].item(), got[1][0].item()]


def test_a_collective_may_come_between_a_send_and_its_receive() -> None:
    results = ranks(_posted_before_a_barrier)
    assert results == [[0, 0], [1, 2], [3, 3]]


def _from_anybody_before_a_barrier(rank: int, size: int) -> list[float]:
    """Rank 0 posts receives before a barrier, rank 1 sends after it, the last only comes to barriers."""
    group = dist.new_group()  # in which no two have exchanged anything
    got = [torch.zeros(3) for _ in range(4)]
    works: list[Any] = []
    if rank == 0:
        asked = [(got[0], None, 0), (got[1], 1, 0), (got[2], 1, 1), (got[3], None, 1)]
        works = [dist.irecv(into, source, tag=tag, group=group) for into, source, tag in asked]
    dist.barrier(group)
    if rank == 1:
        for number in range(4):
            dist.send(torch.full((3,), float(number)), 0, tag=number // 2, group=group)
    for work in works:
        work.wait()
    assert {works[at]._source_rank() for at in (0, 3) if works} <= {1}
    dist.barrier(group)
    return [tensor[0].item() for tensor in got]


def test_a_receive_from_anybody_keeps_nobody_waiting() -> None:
    first, *_ = ranks(_from_anybody_before_a_barrier)
    # Of a receive from anybody and a later one from that rank, gloo itself may fill either first.
    assert sorted(first[:2]) == [0, 1]
    assert first[2:] == [2, 3]


@ranks.check
def test_first_calls_with_all_peers_may_begin_at_once(rank: int, size: int) -> None:
    group = dist.new_group()
    got = [torch.zeros(3) for _ in range(size)]
    others = [other for other in range(size) if other != rank]
    works = [dist.irecv(got[other], other, group=group) for other in others]
    works += [dist.isend(torch.full((3,), float(rank)), other, group=group) for other in others]
    for work in works:
        assert work is not None
        work.wait()
    dist.barrier(group)
    assert [it.tolist() for it in got] == [[other * (other != rank)] * 3 for other in range(size)]


@ranks.check
def test_a_send_that_nobody_receives_ends_with_its_group(rank: int, size: int) -> None:
    """So does a receive; before, both end by a deadline."""
    group: Any = dist.new_group()
    works: list[Any] = []
    if rank == 0:
        works = [dist.isend(torch.ones(1), 1, group=group), dist.irecv(torch.ones(1), 1, group=group)]
    dist.barrier(group)
    for work in works:
        with pytest.raises(RuntimeError, match="peer that has not made its call"):
            work.wait(timedelta(milliseconds=10))
    dist.barrier()  # of the other group: an abort would reach a rank that is still in the group's own barrier
    group.abort()
    for work in works:
        with pytest.raises(RuntimeError, match="aborted the group"):
            work.wait()

"""Calls in which a channel breaks are finished on what is left of the fabric, with every element right."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from arborcast.backends.group.resumption import neighbours
from arborcast.synth.errors import InfeasibleError
from tests.support.ranks import Failure, run_ranks

KINDS = ("allreduce", "broadcast", "allgather", "reduce-scatter")
TYPES = (("float32", "SUM"), ("int8", "SUM"), ("float64", "PRODUCT"))
Break = tuple[str, int, str, str, tuple[int, int], int]
"""Collective, elements of a rank, type, reduction, whose channel, and after how many bytes."""

ENVIRON = {"ARBORCAST_RESUME": "on", "ARBORCAST_START": "at once", "ARBORCAST_DEADLINE": "1"}


def draw(seed: int, rounds: int, pairs: list[tuple[int, int]]) -> list[Break]:
    dice = random.Random(seed)
    return [
        (
            KINDS[number % len(KINDS)],
            dice.choice((1 << 16, 77_777, 300_001)),
            *dice.choice(TYPES),
            dice.choice(pairs),
            int(10 ** dice.uniform(3, 5.5)),
        )
        for number in range(rounds)
    ]


def struck(rank: int, size: int, rounds: list[Break]) -> list[tuple[list[bool], list[Any]]]:
    """Of each group whether its calls were right, and those in which a link failed."""
    found = []
    for number, (kind, count, dtype, op, pair, after_bytes) in enumerate(rounds):
        join(rank, size, str(number))
        ways = kind, count, getattr(torch, dtype), getattr(dist.ReduceOp, op)
        right = [is_right(rank, size, *ways, 0)]
        end = break_later(rank, *pair, after_bytes)
        right += [is_right(rank, size, *ways, seed) for seed in (1, 2)]
        end.set()
        right.append(is_right(rank, size, "allreduce", *ways[1:], 3))
        dist.barrier()
        found.append((right, list(communicator().resumed)))
        dist.destroy_process_group()
    return found


def join(rank: int, size: int, name: str) -> None:
    import arborcast.torch_backend  # noqa: F401

    store = dist.FileStore(f"{os.environ['TEST_STORE']}-{name}", size)
    dist.init_process_group("synth", store=store, rank=rank, world_size=size)


def communicator() -> Any:
    group: Any = dist.group.WORLD
    return group._communicator


def break_later(rank: int, first: int, second: int, after_bytes: int) -> threading.Event:
    """Have the channel between two ranks break once so many bytes have passed it, or at the event."""
    end = threading.Event()
    if rank == first:
        channel = communicator()._network.channels[second]
        last = channel.state.moved + after_bytes

        def wait() -> None:
            while channel.state.moved < last and not end.is_set():
                time.sleep(2e-5)
            channel._socket.shutdown(socket.SHUT_RDWR)

        threading.Thread(target=wait, daemon=True).start()
    return end


def is_right(rank: int, size: int, kind: str, count: int, dtype: torch.dtype, op: Any, seed: int) -> bool:
    """Whether every element of a call is right."""
    blocks = size if kind == "reduce-scatter" else 1
    data = []
    for other in range(size):
        dice = torch.Generator().manual_seed(1000 * seed + other)
        data.append(torch.randint(1, 5, (count * blocks,), generator=dice).to(dtype))
    total = torch.stack(data).prod(0) if op == dist.ReduceOp.PRODUCT else torch.stack(data).sum(0)
    match kind:
        case "allreduce":
            found, due = data[rank].clone(), total
            dist.all_reduce(found, op)
        case "broadcast":
            found, due = data[rank].clone(), data[1]
            dist.broadcast(found, 1)
        case "allgather":
            found, due = torch.empty(count * size, dtype=dtype), torch.cat(data)
            dist.all_gather_into_tensor(found, data[rank])
        case _:
            found, due = torch.empty(count, dtype=dtype), total[rank * count :][:count]
            dist.reduce_scatter_tensor(found, data[rank], op)
    return torch.equal(found, due.to(dtype))


def check(results: list[Any], rounds: list[Break]) -> None:
    for number, asked in enumerate(rounds):
        of_ranks = [result[number] for result in results]
        assert all(all(right) for right, _ in of_ranks), asked
        (resumed,) = {tuple(it.lost for it in resumed) for _, resumed in of_ranks}
        assert resumed == ((tuple(sorted(asked[4])),),), asked


@pytest.mark.parametrize("transport", ["sockets", pytest.param("shared memory", marks=pytest.mark.long)])
def test_every_element_is_right(transport: str) -> None:
    rounds = draw(1, 4, [(0, 1), (2, 1), (1, 3)])
    environ = ENVIRON | {"ARBORCAST_TOPOLOGY": "full:4", "ARBORCAST_TRANSPORT": transport}
    check(run_ranks(4, struck, rounds, backend=None, environ=environ), rounds)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fabric", "size", "pairs"),
    [
        ("ring:4", 4, [(0, 1), (2, 1), (3, 0)]),
        ("full:3", 3, [(0, 1), (1, 2), (2, 0)]),
        ("dgx1", 8, [(0, 1), (2, 3), (5, 1)]),
        ("star:4", 4, [(0, 1), (2, 1)]),
    ],
)
def test_every_element_is_right_on_other_fabrics(
    fabric: str, size: int, pairs: list[tuple[int, int]]
) -> None:
    rounds = draw(2, 12, pairs)
    environ = ENVIRON | {"ARBORCAST_TOPOLOGY": fabric, "ARBORCAST_TRANSPORT": "sockets"}
    check(run_ranks(size, struck, rounds, backend=None, environ=environ, timeout_s=400), rounds)


def two_fail(rank: int, size: int) -> bool:
    """Two links fail, each in a call of its own."""
    join(rank, size, "two")
    right = []
    for seed, pair in enumerate([(0, 1), (2, 3)]):
        is_right(rank, size, "allreduce", 1000, torch.float32, dist.ReduceOp.SUM, seed)
        end = break_later(rank, *pair, 10_000)
        right.append(is_right(rank, size, "allreduce", 100_000, torch.float32, dist.ReduceOp.SUM, seed))
        end.set()
        right.append(is_right(rank, size, "allreduce", 10, torch.float32, dist.ReduceOp.SUM, seed))
    assert [it.lost for it in communicator().resumed] == [((0, 1),), ((2, 3),)]
    dist.barrier()
    dist.destroy_process_group()
    return all(right)


@pytest.mark.long
def test_links_may_fail_one_after_the_other() -> None:
    environ = ENVIRON | {"ARBORCAST_TOPOLOGY": "full:4", "ARBORCAST_TRANSPORT": "sockets"}
    assert run_ranks(4, two_fail, backend=None, environ=environ) == [True] * 4


def one_dies(rank: int, size: int) -> None:
    join(rank, size, "dies")
    is_right(rank, size, "allreduce", 1000, torch.float32, dist.ReduceOp.SUM, 0)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    is_right(rank, size, "allreduce", 100_000, torch.float32, dist.ReduceOp.SUM, 1)


def test_the_death_of_a_rank_is_a_failure() -> None:
    environ = ENVIRON | {"ARBORCAST_TOPOLOGY": "full:4", "ARBORCAST_TRANSPORT": "sockets"}
    results = run_ranks(4, one_dies, backend=None, environ=environ, may_fail=True)
    assert results[2] == Failure("killed", "ended without an answer")
    for rank in (0, 1, 3):
        assert results[rank].error == "ExecutionError"
        assert "rank 2 does not answer: it died, or its host" in results[rank].message


def after_long(rank: int, size: int) -> bool:
    """A link fails after the wait for the bell has begun anew."""
    import arborcast.backends.group.resumption as module

    module.WATCH_S = 0.02  # else a day
    join(rank, size, "long")
    is_right(rank, size, "allreduce", 1000, torch.float32, dist.ReduceOp.SUM, 0)
    time.sleep(1.1)  # a store of files counts whole seconds
    end = break_later(rank, 0, 1, 10_000)
    right = is_right(rank, size, "allreduce", 1_000_000, torch.float32, dist.ReduceOp.SUM, 1)
    end.set()
    assert [it.lost for it in communicator().resumed] == [((0, 1),)]
    dist.barrier()
    dist.destroy_process_group()
    return right


def test_a_link_may_fail_after_days() -> None:
    environ = ENVIRON | {"ARBORCAST_TOPOLOGY": "full:3", "ARBORCAST_TRANSPORT": "sockets"}
    assert run_ranks(3, after_long, backend=None, environ=environ) == [True] * 3


def one_is_busy(rank: int, size: int) -> bool:
    """A link fails while a rank answers nothing, as one does that holds the interpreter."""
    import arborcast.backends.group.resumption as module

    module.ANSWER_S = 0.1
    join(rank, size, "busy")
    is_right(rank, size, "allreduce", 1000, torch.float32, dist.ReduceOp.SUM, 0)
    end = break_later(rank, 0, 1, 10_000)
    if rank == 3:
        say = module.Resumption._say_here

        def say_late(resumption: Any) -> None:
            time.sleep(0.6)
            say(resumption)

        module.Resumption._say_here = say_late  # type: ignore[method-assign]
        time.sleep(0.6)
    right = is_right(rank, size, "allreduce", 100_000, torch.float32, dist.ReduceOp.SUM, 1)
    end.set()
    assert [it.lost for it in communicator().resumed] == [((0, 1),)]
    dist.barrier()
    dist.destroy_process_group()
    return right


def test_a_rank_that_is_busy_is_waited_for() -> None:
    environ = ENVIRON | {"ARBORCAST_TOPOLOGY": "full:4", "ARBORCAST_TRANSPORT": "sockets"}
    assert run_ranks(4, one_is_busy, backend=None, environ=environ) == [True] * 4


def one_aborts(rank: int, size: int) -> None:
    """Rank 0 is told to end while it plans, and stays."""
    import arborcast.backends.group.resumption as module

    join(rank, size, "aborts")
    is_right(rank, size, "allreduce", 1000, torch.float32, dist.ReduceOp.SUM, 0)
    plan = module.plan_finish  # type: ignore[attr-defined]

    def plan_and_abort(*given: Any, **named: Any) -> Any:
        found = plan(*given, **named)
        aborting = threading.Thread(target=communicator().abort, args=("somebody said so",))
        aborting.start()
        while communicator().failure is None:
            time.sleep(0.001)
        return found

    module.plan_finish = plan_and_abort  # type: ignore[attr-defined]
    break_later(rank, 0, 1, 10_000)
    try:
        is_right(rank, size, "allreduce", 100_000, torch.float32, dist.ReduceOp.SUM, 1)
    finally:
        if rank == 0:
            others = [f"over/{other}" for other in range(1, size)]
            communicator().store.wait(others, timedelta(seconds=20))
        else:
            communicator().store.set(f"over/{rank}", "")


def test_who_ends_while_a_call_is_finished_tells_all() -> None:
    environ = ENVIRON | {"ARBORCAST_TOPOLOGY": "full:4", "ARBORCAST_TRANSPORT": "sockets"}
    for result in run_ranks(4, one_aborts, backend=None, environ=environ, may_fail=True):
        assert result.error == "ExecutionError" and "somebody said so" in result.message


def second_fails(rank: int, size: int) -> None:
    """A link fails, and another one while the call is finished without the first."""
    join(rank, size, "second")
    is_right(rank, size, "allreduce", 1000, torch.float32, dist.ReduceOp.SUM, 0)
    engine = communicator()._engine
    renew = engine.renew

    def renew_and_break(network: Any, *given: Any) -> Any:
        scratch = renew(network, *given)
        if rank == 2:
            min(network.channels.items())[1]._socket.shutdown(socket.SHUT_RDWR)
        return scratch

    engine.renew = renew_and_break
    break_later(rank, 0, 1, 10_000)
    is_right(rank, size, "allreduce", 1_000_000, torch.float32, dist.ReduceOp.SUM, 1)


def test_a_second_link_that_fails_before_the_end_is_a_failure() -> None:
    environ = ENVIRON | {"ARBORCAST_TOPOLOGY": "full:4", "ARBORCAST_TRANSPORT": "sockets"}
    for result in run_ranks(4, second_fails, backend=None, environ=environ, may_fail=True):
        assert result.error == "ExecutionError", result


def without_a_way(rank: int, size: int) -> None:
    join(rank, size, "no way")
    is_right(rank, size, "allreduce", 1000, torch.float32, dist.ReduceOp.SUM, 0)
    break_later(rank, 0, 1, 10_000)
    is_right(rank, size, "allreduce", 100_000, torch.float32, dist.ReduceOp.SUM, 1)


def test_without_another_way_it_is_a_failure() -> None:
    environ = ENVIRON | {"ARBORCAST_TOPOLOGY": "full:2", "ARBORCAST_TRANSPORT": "sockets"}
    for result in run_ranks(2, without_a_way, backend=None, environ=environ, may_fail=True):
        assert result.error == "ExecutionError"
        assert "cannot be finished without the link that failed" in result.message


@pytest.mark.parametrize(
    ("size", "closed", "drawn"),
    [
        (4, [], [(3, 1), (0, 2), (1, 3), (2, 0)]),  # 0 1 2 3
        (4, [(0, 1)], [(3, 2), (2, 3), (0, 1), (1, 0)]),  # 0 2 1 3
        (3, [(0, 1)], [(0, 2), (2, 1), (0, 1)]),  # 0 2 1, no circle
    ],
)
def test_neighbours_need_no_closed_pair(
    size: int, closed: list[tuple[int, int]], drawn: list[tuple[int, int]]
) -> None:
    assert [neighbours(rank, size, closed) for rank in range(size)] == drawn


def test_ranks_without_neighbours_are_refused() -> None:
    with pytest.raises(InfeasibleError, match="must be joined by a line"):
        neighbours(0, 4, [(1, 2), (1, 3), (2, 3)])

"""What the process group "synth" does when ranks die, stop or are slow: real processes.

A survivor must raise within the group's timeout and name who is gone, and what has returned must be right.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.nn.parallel import DistributedDataParallel

from tests.support.faults import (
    LARGE,
    MIB,
    PATIENCE_S,
    PIECE,
    RANKS,
    WAYS,
    Ended,
    allreduce,
    begin,
    broadcast,
    check_failed,
    check_right,
    contribution,
    ended,
    launch,
    pids,
    signal_self,
    strike_after,
)
from tests.support.ranks import Failure

RANKS_IMPORT = ("torch._dynamo",)
ONE_WAY = [WAYS[0], *(pytest.param(way, marks=pytest.mark.long) for way in WAYS[1:])]
"""What ends calls in another way of transport, other tests do."""


def _killed_within(rank: int, size: int, victim: int, nbytes: int) -> Ended:
    check_right(allreduce(rank, size, count=5000))
    if rank == victim:
        strike_after(nbytes, signal_self(signal.SIGKILL))
    return allreduce(rank, size)


@pytest.mark.parametrize(
    ("topology", "transport", "victim"),
    [
        ("full:4", "sockets", 2),
        ("ring:4", "shared memory", 3),
        pytest.param("full:4", "shared memory", 0, marks=pytest.mark.long),
        pytest.param("mesh:1x4", "sockets", 0, marks=pytest.mark.long),
    ],
)
def test_a_rank_killed_in_an_allreduce_is_named_by_all_others(
    topology: str, transport: str, victim: int
) -> None:
    results = launch(
        _killed_within, victim, 10 * MIB, topology=topology, transport=transport, group_timeout_s=PATIENCE_S
    )
    assert results[victim] == Failure("killed", "ended without an answer")
    for rank in set(range(RANKS)) - {victim}:
        # Its channels end with it, so that nobody has to wait for the deadline, whoever is its neighbour.
        # On a slow machine a rank may not have seen yet that it had begun.
        check_failed(
            results[rank], f"rank {victim}", "allreduce", f"{PIECE}|begin together with rank {victim}"
        )


def _until_one_fails(rank: int, size: int, count: int = LARGE) -> list[Ended]:
    """Allreduces, one after the other: what is lost late in one that has all it needs ends the next one."""
    results = [allreduce(rank, size, count)]
    while results[-1].error is None:
        results.append(allreduce(rank, size, count, salt=len(results)))
    return results


def _check_all_but_the_last(results: Any, *words: str) -> None:
    """Whatever returned is right; the last names what happened."""
    assert isinstance(results, list), results
    for result in results[:-1]:
        check_right(result)
    check_failed(results[-1], *words)


def _link_lost_within(rank: int, size: int) -> list[Ended]:
    check_right(allreduce(rank, size, count=5000))
    if rank == 0:
        group: Any = dist.group.WORLD
        link = group._communicator.member.network.channels[1]._socket
        strike_after(10 * MIB, lambda: link.shutdown(socket.SHUT_RDWR))
    return _until_one_fails(rank, size)


@pytest.mark.parametrize("transport", WAYS)
def test_a_connection_that_breaks_between_living_ranks_ends_the_call_on_all(transport: str) -> None:
    for results in launch(_link_lost_within, transport=transport, group_timeout_s=PATIENCE_S):
        _check_all_but_the_last(results, "allreduce", "rank [01] closed its connection: it died or was ended")


def _killed_at_random(rank: int, size: int, victim: int, count: int, fraction: float) -> list[Ended]:
    start = time.perf_counter()
    first = allreduce(rank, size, count)
    if rank == victim:
        seconds = (time.perf_counter() - start) * fraction  # at any moment all that is asserted holds
        timer = threading.Timer(seconds, signal_self(signal.SIGKILL))
        timer.daemon = True
        timer.start()
    return [first, *_until_one_fails(rank, size, count)]


def _check_random_kill(seed: int) -> None:
    chance = random.Random(seed)
    victim = chance.randrange(RANKS)
    results = launch(
        _killed_at_random,
        victim,
        int(2 ** chance.uniform(8, 24)),
        chance.uniform(0, 3),
        topology=chance.choice(["full:4", "ring:4", "mesh:1x4", "star:4"]),
        transport=chance.choice(WAYS),
        gloo_below=chance.choice(["0", "0", "64KiB"]),
        group_timeout_s=PATIENCE_S,
    )
    for rank in set(range(RANKS)) - {victim}:
        _check_all_but_the_last(results[rank], f"rank {victim}", "allreduce")


@pytest.mark.parametrize("seed", range(2))
def test_a_rank_killed_at_a_random_moment_leaves_errors_and_right_sums(seed: int) -> None:
    _check_random_kill(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 64))
def test_a_rank_killed_at_many_random_moments(seed: int) -> None:
    _check_random_kill(seed)


def _killed_with_work_in_flight(rank: int, size: int, victim: int) -> list[Ended]:
    tensors = [contribution(rank, LARGE // 4, salt) for salt in range(4)]
    if rank == victim:
        strike_after(2 * MIB, signal_self(signal.SIGKILL))
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    results = [ended(work.wait) for work in works]
    results += [ended(works[-1].get_future().wait)]
    # All later calls end with the same reason, by whichever path they would have gone.
    small = torch.ones(4)
    results += [ended(lambda: dist.all_reduce(small)), ended(lambda: dist.broadcast(small, 1))]
    results += [ended(lambda: dist.all_gather([torch.empty(4) for _ in range(size)], small))]
    results += [ended(dist.barrier)]
    # Who is left goes on in a new group.
    dist.destroy_process_group()
    os.environ["ARBORCAST_TOPOLOGY"] = f"full:{size - 1}"
    begin(rank - (rank > victim), size - 1, "survivors", PATIENCE_S)
    results += [allreduce(dist.get_rank(), size - 1), broadcast(dist.get_rank(), 2)]
    return results


@pytest.mark.parametrize("transport", ONE_WAY)
def test_after_a_death_all_calls_fail_with_the_first_reason_and_a_new_group_works(transport: str) -> None:
    victim = 1
    results = launch(_killed_with_work_in_flight, victim, transport=transport, group_timeout_s=PATIENCE_S)
    for rank in set(range(RANKS)) - {victim}:
        assert isinstance(results[rank], list), results[rank]
        *failed, summed, spread = results[rank]
        for result in failed:
            check_failed(result, f"rank {victim}")
        check_right(summed)
        check_right(spread)


def _killed_in_training(rank: int, size: int, victim: int) -> list[Ended]:
    """Calls that C++ makes and whose work it waits for: those of DDP, and functional collectives."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1000, 1000), bucket_cap_mb=1)
    example = torch.ones(4, 1000)
    model(example).sum().backward()
    if rank == victim:
        strike_after(3 * MIB, signal_self(signal.SIGKILL))

    def train() -> None:
        for _ in range(20):
            model(example).sum().backward()

    def functional() -> None:
        tensor = funcol.all_reduce(torch.ones(MIB), "sum", dist.group.WORLD)
        assert tensor.sum() < 0, "not reached: the sum is an error"

    return [ended(train), ended(functional)]


def test_a_death_while_c_plus_plus_waits_is_an_error_there() -> None:
    victim = 3
    results = launch(_killed_in_training, victim, transport="auto", group_timeout_s=PATIENCE_S)
    assert results[victim] == Failure("killed", "ended without an answer")
    for rank in set(range(RANKS)) - {victim}:
        assert isinstance(results[rank], list), results[rank]
        for failed in results[rank]:
            check_failed(failed, f"rank {victim}")


# ----------------------------------------------------------------------------- a rank stops or is slow


def _stopped(rank: int, size: int, victim: int) -> list[Ended]:
    everyone = pids(rank, size)
    check_right(allreduce(rank, size, count=5000))
    if rank == victim:
        strike_after(10 * MIB, signal_self(signal.SIGSTOP))
    result = allreduce(rank, size)
    if rank == (victim + 1) % size:
        os.kill(everyone[victim], signal.SIGCONT)
    dist.destroy_process_group()
    begin(rank, size, "again", PATIENCE_S)
    return [result, allreduce(rank, size, LARGE // 16)]


@pytest.mark.parametrize("transport", WAYS)
def test_a_stopped_rank_is_named_when_the_deadline_passes(transport: str) -> None:
    victim = 2
    results = launch(_stopped, victim, transport=transport)
    for rank, (during, after) in enumerate(results):
        # The others have given up when it goes on: it must fail, too, or hold the right sum.
        if rank == victim:
            assert during.error or during.is_right
        else:
            check_failed(during, f"rank {victim}", "allreduce", PIECE)
        check_right(after)


def _slow(rank: int, size: int, victim: int, delay_s: float) -> list[Ended]:
    if rank == victim:
        time.sleep(delay_s)
    results = [allreduce(rank, size)]
    if rank == victim:
        strike_after(10 * MIB, lambda: time.sleep(delay_s))
    return [*results, allreduce(rank, size, salt=1), broadcast(rank, victim)]


@pytest.mark.parametrize("gloo_below", ["0", pytest.param("1GiB", marks=pytest.mark.long)])
def test_a_slow_rank_is_waited_for(gloo_below: str) -> None:
    # Longer than any moment for which the engine looks or searches, far less than the group's patience.
    for results in launch(_slow, 3, 1.0, gloo_below=gloo_below, transport="auto", group_timeout_s=PATIENCE_S):
        assert isinstance(results, list), results
        for result in results:
            check_right(result)


def _raises_between(rank: int, size: int, victim: int) -> list[Ended]:
    results = []
    for step in range(4):
        if rank == victim and step == 2:
            raise ValueError("no more data")
        results.append(allreduce(rank, size, 100_000, salt=step))
    return results


@pytest.mark.parametrize("gloo_below", ["0", "1GiB"])
def test_a_rank_that_raises_between_collectives_ends_the_others(gloo_below: str) -> None:
    victim = 1
    results = launch(_raises_between, victim, gloo_below=gloo_below, group_timeout_s=PATIENCE_S)
    assert results[victim] == Failure("ValueError", "no more data")
    for rank in set(range(RANKS)) - {victim}:
        assert isinstance(results[rank], list), results[rank]
        for right in results[rank][:2]:
            check_right(right)
        for failed in results[rank][2:]:
            check_failed(failed, f"rank {victim}")


def _killed_while_finding_schedules(rank: int, size: int, victim: int) -> Ended:
    from arborcast.backends.schedules import held as schedules

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        schedules.synthesize_table = die  # type: ignore[attr-defined]
    return ended(lambda: dist.broadcast(torch.ones(5000), 1))


def test_a_rank_that_dies_while_it_finds_schedules_is_noticed() -> None:
    """Rank 0 finds those of a broadcast from rank 1 at the first call; the others wait for them meanwhile."""
    results = launch(_killed_while_finding_schedules, 0, group_timeout_s=PATIENCE_S)
    assert results[0] == Failure("killed", "ended without an answer")
    for rank in range(1, RANKS):
        check_failed(results[rank], "rank 0", "broadcast")

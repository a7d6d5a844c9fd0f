"""Groups that come and go, ranks that leave while others work, and interruption: real processes.

What a group held is free when it is gone, and the processes live on.
"""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.faults import (
    LARGE,
    MIB,
    PATIENCE_S,
    SMALL,
    WAYS,
    Ended,
    allreduce,
    begin,
    broadcast,
    check_right,
    contribution,
    ended,
    launch,
    pids,
    strike_after,
    total,
)
from tests.support.ranks import run_ranks
from tests.support.waiting import mark_inside, until


def _destroy_with_work_in_flight(rank: int, size: int) -> list[Ended]:
    tensors = [contribution(rank, LARGE // 4, salt) for salt in range(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    dist.destroy_process_group()
    results = []
    for salt, work in enumerate(works):
        expected = total(size, LARGE // 4, salt)
        results.append(ended(work.wait, lambda t=tensors[salt], e=expected: torch.equal(t, e)))
    begin(rank, size, "again", PATIENCE_S)
    return [*results, allreduce(rank, size, SMALL)]


def test_destroying_a_group_with_work_in_flight_ends_the_work() -> None:
    for results in launch(_destroy_with_work_in_flight, group_timeout_s=PATIENCE_S, transport="auto"):
        assert isinstance(results, list), results
        *in_flight, again = results
        for result in in_flight:
            assert result.error or result.is_right
        check_right(again)


def _leave_early(rank: int, size: int) -> Ended:
    check_right(broadcast(rank, count=SMALL))
    has_left = Path(f"{os.environ['TEST_STORE']}-left")
    if rank == 2:
        strike_after(4 * MIB, lambda: until(has_left.exists))
    result = broadcast(rank)
    if rank == 0:  # it has sent everything before rank 3 has it
        dist.destroy_process_group()
        has_left.touch()
    return result


@pytest.mark.parametrize("transport", WAYS)
def test_a_rank_that_has_finished_may_leave_while_others_work(transport: str) -> None:
    for result in launch(_leave_early, topology="mesh:1x4", transport=transport, group_timeout_s=PATIENCE_S):
        check_right(result)


def _interrupted(rank: int, size: int) -> str:
    everyone = pids(rank, size)
    waits, has_ended = (Path(f"{os.environ['TEST_STORE']}-{what}") for what in ("waits", "ended"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    check_right(allreduce(rank, size, SMALL))
    if rank == 0:
        until(waits.exists)
        os.kill(everyone[1], signal.SIGINT)
        until(has_ended.exists)
        return "waited"
    mark_inside("all_reduce", waits)
    try:
        dist.all_reduce(torch.ones(SMALL))
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        has_ended.touch()
    return "not interrupted"


def test_ctrl_c_interrupts_a_waiting_rank() -> None:
    results = launch(_interrupted, ranks=2, topology="full:2", group_timeout_s=PATIENCE_S)
    assert results == ["waited", "interrupted"]


def _resources() -> tuple[int, int, int, float]:
    """Open descriptors, threads, mappings of shared memory, and resident megabytes of this process."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    descriptors, threads = (sum(1 for _ in Path(f"/proc/self/{what}").iterdir()) for what in ("fd", "task"))
    return descriptors, threads, Path("/proc/self/maps").read_text().count("/memfd:"), resident


def _come_and_go(rank: int, size: int, cycles: int) -> list[tuple[int, int, int, float]]:
    found = []
    for cycle in range(cycles):
        begin(rank, size, f"cycle {cycle}", PATIENCE_S)
        check_right(allreduce(rank, size, MIB // 4))
        check_right(broadcast(rank, 1, MIB // 4))
        dist.destroy_process_group()
        found.append(_resources())
    return found


@pytest.mark.parametrize("transport", WAYS)
def test_groups_that_come_and_go_leave_nothing_behind(transport: str) -> None:
    results = launch(_come_and_go, 20, ranks=2, topology="full:2", transport=transport, has_group=False)
    for result in results:
        assert isinstance(result, list), result
        descriptors, threads, mappings, megabytes = zip(*result, strict=True)
        assert max(descriptors[10:]) <= max(descriptors[:5])
        assert max(threads[10:]) <= max(threads[:5])
        assert max(mappings[10:]) <= max(mappings[:5])
        assert megabytes[-1] - megabytes[4] < 40  # the allocator's heaps grow by up to 25 and then no more


def _collecting(rank: int, size: int) -> tuple[bool, bool]:
    was_on = gc.isenabled()
    gc.disable()
    dist.new_group()
    is_on = gc.isenabled()
    gc.enable()
    return was_on, is_on


def test_making_a_group_leaves_the_collector_of_garbage_as_it_was() -> None:
    assert run_ranks(1, _collecting, backend="synth") == [(True, False)]

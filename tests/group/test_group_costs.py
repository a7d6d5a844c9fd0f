"""What a group holds of its process: descriptors and threads, counted; and what is made only when needed."""

from __future__ import annotations

import resource
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import StandingRanks, run_ranks

RANKS = 4
AT_ONCE = {"ARBORCAST_START": "at once"}
ranks = StandingRanks(RANKS, environ=AT_ONCE)


def held() -> Counter[str]:
    """Open descriptors and threads of this process."""
    process = Path("/proc/self")
    return Counter(
        descriptors=sum(1 for _ in (process / "fd").iterdir()),
        threads=sum(1 for _ in (process / "task").iterdir()),
    )


def beyond(before: Counter[str]) -> dict[str, int]:
    now = held()
    return {what: now[what] - before[what] for what in now}


@ranks.check
def test_a_group_of_four_holds_a_channel_for_each_peer_and_one_thread(rank: int, size: int) -> None:
    dist.all_reduce(torch.ones(10))  # what all groups share is there
    before, found = held(), []
    group = dist.new_group()
    found.append(beyond(before))
    for call in (
        lambda: dist.all_reduce(torch.ones(10), group=group),
        lambda: dist.broadcast(torch.ones(10), 0, group=group),
        lambda: dist.barrier(group=group),
    ):
        call()
        found.append(beyond(before))
    assert max(it["threads"] for it in found) <= 1  # a caller that waits executes its call itself
    # Channels, and what wakes its engine.
    assert max(it["descriptors"] for it in found) <= (RANKS - 1) + 1


@ranks.check
def test_two_ranks_make_the_inner_gloo_while_the_others_do_something_else(rank: int, size: int) -> None:
    """Ranks 1 and 2 exchange a tensor before the others come to anything; then all of them reduce."""
    group, store = dist.new_group(), dist.distributed_c10d._get_default_store()
    got = torch.zeros(2)
    if rank == 1:
        dist.send(torch.arange(2.0), 2, group=group)
        store.set("exchanged", "")
    elif rank == 2:
        dist.recv(got, 1, group=group)
        assert got.tolist() == [0, 1]
    else:
        store.wait(["exchanged"])
    total = torch.ones(1)
    dist.reduce(total, 3, group=group)
    dist.barrier(group)
    assert rank != 3 or total == RANKS


def many_groups(rank: int, size: int, count: int) -> tuple[int, int]:
    """Under a limit of descriptors: groups that are used, and what the process holds then."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    groups = [dist.new_group() for _ in range(count)]
    for group in groups:
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total.item() == size
    dist.barrier()
    now = held()
    return now["descriptors"], now["threads"]


@pytest.mark.long
def test_two_hundred_groups_that_are_used_fit_into_1024_descriptors() -> None:
    for descriptors, threads in run_ranks(RANKS, many_groups, 200, backend="synth", environ=AT_ONCE):
        assert descriptors < 1024
        assert threads < 20

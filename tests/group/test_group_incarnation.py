"""Ranks of a group find each other in a store that holds what dead processes wrote: threads as ranks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from arborcast.backends import ExecutionError
from arborcast.backends.schedules.rendezvous import meet


def join(store: Any, ranks: Sequence[int], size: int, timeout_s: float = 30) -> list[Any]:
    """The fresh store of each of the ranks, or the error it got."""
    barrier = threading.Barrier(len(ranks))

    def one(rank: int) -> Any:
        barrier.wait()
        try:
            name, everybody = meet(store, rank, size, rank, timeout_s=timeout_s)
            assert everybody == list(range(size))
            return dist.PrefixStore(name, store)
        except ExecutionError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def check_common(stores: list[Any]) -> None:
    for rank, store in enumerate(stores):
        store.set(f"from {rank}", str(rank))
    for store in stores:
        assert [store.get(f"from {rank}") for rank in range(len(stores))] == [
            str(rank).encode() for rank in range(len(stores))
        ]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_incarnation_has_a_part_of_its_own(size: int) -> None:
    store = dist.HashStore()
    for _ in range(3):
        stores = join(store, range(size), size)
        assert not any(each.check(["left behind"]) for each in stores)
        check_common(stores)
        stores[0].set("left behind", "by this incarnation")


def test_ranks_that_died_while_they_joined_are_not_taken_for_the_living() -> None:
    store = dist.HashStore()
    # Rank 0 comes never, so that ranks 1 and 2 leave their numbers; then rank 2 does not come to rank 0.
    for error in join(store, (1, 2), 3, timeout_s=0.2):
        assert "waited 0.2 s for rank 0 to make the group" in str(error)
    first, second = join(store, (0, 1), 3, timeout_s=1.0)
    assert "rank 0 waited 1 s for rank 2 to make the group" in str(first)
    assert str(second) == str(first)
    check_common(join(store, (0, 1, 2), 3))

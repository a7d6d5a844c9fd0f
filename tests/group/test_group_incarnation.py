"""Ranks of a group find each other in a store that holds what dead processes wrote: threads as ranks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
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


class LateStore:
    """Holds the number of a dead rank 1; the living one comes when rank 0 has waited twenty times in vain."""

    def __init__(self) -> None:
        self.held = {"hello/1": b"of the dead"}
        self.waits: list[float] = []

    def set(self, key: str, value: str) -> None:
        self.held[key] = value.encode()
        if key == "welcome/of the living":
            self.held[f"{value}/said/1"] = b"1"

    def get(self, key: str) -> bytes:
        return self.held[key]

    def check(self, keys: Sequence[str]) -> bool:
        return self.held.keys() >= set(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        if not self.check(keys):
            self.waits.append(timeout.total_seconds())
            if len(self.waits) == 20:
                self.set("hello/1", "of the living")
            raise RuntimeError("not in time")


def test_rank_0_soon_sees_who_comes_late_after_a_rank_that_died() -> None:
    store: Any = LateStore()
    _, everybody = meet(store, 0, 2, 0, timeout_s=1800)
    assert everybody == [0, 1]
    assert len(store.waits) == 20
    assert max(store.waits) <= 1

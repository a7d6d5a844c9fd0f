"""Ranks of a group find each other in a store: threads as ranks.

Among what dead processes wrote there; and thousands by few bytes each, over a store that counts: all but rank
0 wait in that without a deadline, as thousands of threads that wake up each second do nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from arborcast.backends import ExecutionError
from arborcast.backends.schedules.rendezvous import PART_BYTES, meet
from arborcast.synth.errors import InputError

FEW = 16


class Values:
    """What a store holds, with an event for each key that somebody waits for."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.events: dict[str, threading.Event] = {}
        self.lock = threading.Lock()

    def event(self, key: str) -> threading.Event:
        with self.lock:
            return self.events.setdefault(key, threading.Event())


class CountingStore:
    """A rank's view of a store: how many bytes it wrote and read, and how long the longest value was."""

    def __init__(self, values: Values, *, is_patient: bool = False) -> None:
        self.values = values
        self.is_patient = is_patient
        self.nbytes = self.longest = 0

    def set(self, key: str, value: str) -> None:
        self.values.held[key] = value.encode()
        self.count(key)
        self.values.event(key).set()

    def get(self, key: str) -> bytes:
        self.count(key)
        return self.values.held[key]

    def count(self, key: str) -> None:
        value = self.values.held[key]
        self.nbytes += len(key) + len(value)
        self.longest = max(self.longest, len(value))

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.values.held for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        end = time.monotonic() + timeout.total_seconds()
        for key in keys:
            left = None if self.is_patient else max(0.0, end - time.monotonic())
            if not self.values.event(key).wait(left):
                raise RuntimeError("not in time")


def met(size: int, odd: int | None = None) -> tuple[list[Any], list[CountingStore]]:
    """What each of so many ranks has of a meeting, and its store; `odd` has another setting."""
    values = Values()
    stores = [CountingStore(values, is_patient=rank > 0) for rank in range(size)]

    def one(rank: int) -> Any:
        alike = {"ranks": list(range(size)), "method": "another" if rank == odd else "auto"}
        said = [f"kernel {rank % 2}", list(range(64))]
        store: Any = stores[rank]
        try:
            return meet(store, rank, size, said, hosts_of, alike=alike, timeout_s=600)
        except InputError as error:
            return str(error)

    before = threading.stack_size(1 << 18)
    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(one, range(size))), stores
    finally:
        threading.stack_size(before)


def hosts_of(words: list[Any]) -> dict[str, int]:
    return {"hosts": len({where for where, _ in words}), "ranks": len(words)}


@pytest.mark.parametrize("many", [256, pytest.param(4096, marks=pytest.mark.long)])
def test_each_of_thousands_moves_no_more_bytes_than_each_of_few(
    many: int, record_property: Callable[[str, object], None]
) -> None:
    """But rank 0, which reads the words of all; and nobody a value that a store may refuse."""
    most = {}
    for size in (FEW, many):
        results, stores = met(size)
        (name,) = {name for name, _ in results}
        assert len(name) == 16
        assert all(each == {"hosts": 2, "ranks": size} for _, each in results)
        assert max(store.longest for store in stores) <= PART_BYTES <= 64 << 10
        most[size] = max(store.nbytes for store in stores[1:])
        record_property(f"bytes of {size} ranks", f"{stores[0].nbytes} on rank 0, {most[size]} on another")
    assert most[many] <= most[FEW] + 8 * len(str(many))  # for longer numbers of ranks


def test_a_setting_that_differs_on_one_of_many_is_named_on_all() -> None:
    results, stores = met(256, odd=200)
    assert set(results) == {
        "method: must be the same on all ranks, got auto on rank 0 and another on rank 200"
    }
    assert max(store.longest for store in stores) <= PART_BYTES


def test_what_is_long_and_differs_is_cut() -> None:
    values = Values()
    with ThreadPoolExecutor(2) as pool:

        def one(rank: int) -> str:
            store: Any = CountingStore(values)
            alike = {"ranks": [0] * 40_000 + [rank]}
            with pytest.raises(InputError) as caught:
                meet(store, rank, 2, None, len, alike=alike, timeout_s=600)
            return str(caught.value)

        first, second = pool.map(one, range(2))
    assert first == second
    assert first.count("120003 characters, SHA-256") == 2
    assert max(map(len, values.held.values())) <= PART_BYTES


# Among what dead processes wrote -------------------------------------------------------------------


def join(store: Any, ranks: Sequence[int], size: int, timeout_s: float = 30) -> list[Any]:
    """The fresh store of each of the ranks, or the error it got."""
    barrier = threading.Barrier(len(ranks))

    def one(rank: int) -> Any:
        barrier.wait()
        try:
            name, everybody = meet(store, rank, size, rank, list, timeout_s=timeout_s)
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
            self.held[f"{value.split(maxsplit=1)[0]}/said/1"] = b'{"said": 1}'

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
    _, everybody = meet(store, 0, 2, 0, list, timeout_s=1800)
    assert everybody == [0, 1]
    assert len(store.waits) == 20
    assert max(store.waits) <= 1

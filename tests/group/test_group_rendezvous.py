"""Thousands of ranks find each other by few bytes each: threads as ranks, over one store that counts.

All but rank 0 wait in it without a deadline: thousands of threads that wake up each second do nothing else.
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

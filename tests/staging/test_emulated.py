"""The emulated device: how long copies take, by a clock of the test, and that they copy."""

from __future__ import annotations

import queue
from fractions import Fraction

import pytest
import torch

from arborcast.backends.staging import emulated
from arborcast.backends.staging.device import CopyCosts, CopyDirection
from arborcast.backends.staging.emulated import EmulatedDevice


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_copies_of_one_way_follow_each_other_at_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """1000 bytes at 1/2 GB/s and 3 us besides are 5 us; the other way has a time of its own."""
    clock = Clock()
    monkeypatch.setattr(emulated, "time", clock)
    device = EmulatedDevice(Fraction(1, 2), Fraction(3))
    assert device.costs == CopyCosts(Fraction(1, 2), Fraction(3))
    ended: queue.SimpleQueue[tuple[str, float, BaseException | None]] = queue.SimpleQueue()
    source, into = torch.arange(250, dtype=torch.float32), torch.zeros(2, 250)

    def copy(way: CopyDirection, at: int) -> tuple[str, int, BaseException | None]:
        device.copy(way, into[at], source, lambda error: ended.put((way.name, clock.now, error)))
        name, now, error = ended.get()
        return name, round(now * 1e6), error

    assert copy(CopyDirection.IN, 0) == ("IN", 5, None)
    assert copy(CopyDirection.IN, 1) == ("IN", 10, None)
    assert torch.equal(into, source.expand(2, 250))
    assert copy(CopyDirection.OUT, 0) == ("OUT", 15, None)
    assert copy(CopyDirection.WITHIN, 0) == ("WITHIN", 15, None)
    clock.now = 1.0
    assert copy(CopyDirection.IN, 0) == ("IN", 1_000_005, None)
    device.close()


def test_what_a_copy_raises_goes_to_who_waits() -> None:
    device = EmulatedDevice(Fraction(1000))
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    device.copy(CopyDirection.IN, torch.zeros(3), torch.zeros(4), ended.put)
    assert isinstance(ended.get(), RuntimeError)
    device.copy(CopyDirection.IN, torch.zeros(3), torch.ones(3), ended.put)  # the thread goes on
    assert ended.get() is None
    device.close()

from __future__ import annotations

import pytest

from arborcast.bench.training import runtimes
from arborcast.bench.training.runtimes import Alarm


def test_a_sleep_that_was_too_long_shortens_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(round(seconds * 1e6))
        now[0] += seconds + 100e-6  # the system is 100 us late

    monkeypatch.setattr(runtimes.time, "sleep", sleep)  # type: ignore[attr-defined]
    monkeypatch.setattr(runtimes.time, "perf_counter", lambda: now[0])  # type: ignore[attr-defined]
    alarm = Alarm()
    for wanted in (1000, 1000, 50, 1000):
        alarm.sleep(wanted)
    assert slept == [1000, 900, 950]  # 50 us are less than what is owed: no sleep, and 50 us are still owed
    assert now[0] == pytest.approx(3050e-6 + 100e-6)

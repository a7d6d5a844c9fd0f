from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from arborcast.bench.training import sleeping
from arborcast.bench.training.sleeping import Alarm, Measured, Sleep, sleeping_rows
from arborcast.pipeline.costs.link_costs import LinkCosts
from arborcast.pipeline.profiles import Layer, Profile
from arborcast.pipeline.simulation.pass_simulator import simulate
from arborcast.pipeline.simulation.timeline import Timeline
from arborcast.pipeline.stages import Plan
from arborcast.synth.topology import Link, Topology


def test_a_sleep_that_was_too_long_shortens_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(round(seconds * 1e6))
        now[0] += seconds + 100e-6  # the system is 100 us late

    monkeypatch.setattr(sleeping.time, "sleep", sleep)  # type: ignore[attr-defined]
    monkeypatch.setattr(sleeping.time, "perf_counter", lambda: now[0])  # type: ignore[attr-defined]
    alarm = Alarm()
    for wanted in (1000, 1000, 50, 1000):
        alarm.sleep(wanted)
    assert slept == [1000, 900, 950]  # 50 us are less than what is owed: no sleep, and 50 us are still owed
    assert now[0] == pytest.approx(3050e-6 + 100e-6)


def test_layers_sleep_by_their_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(sleeping.ALARM, "sleep", naps.append)
    sleep = Sleep(layers=3, batch=10, forward_us=2, backward_us=5, width=4)
    inputs, targets = sleep.data()
    output = sleep.model()(inputs[:6])
    assert naps == [12.0] * 3
    sleeping.loss_of(output, targets[:6]).backward()
    assert naps == [12.0] * 3 + [30.0] * 3
    assert torch.equal(output, inputs[:6])


def profile_of(sleep: Sleep) -> Profile:
    layers = (Layer(str(index), 200.0, 400.0, 2560, 0, 4, 4) for index in range(sleep.layers))
    return Profile("sleeping", 10, tuple(layers))


def network(ranks: int) -> LinkCosts:
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    return LinkCosts(Topology.build("loopback", ranks, [Link(a, b, 1, 0) for a, b in pairs]), message_us=50.0)


@pytest.mark.parametrize("order", sleeping.ORDERS)
def test_what_the_trainer_adds_is_found_and_predicted(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that behave as simulated, with 70 us for each message: rows must have no error."""
    sleep = Sleep(layers=4, batch=40, forward_us=20, backward_us=40)
    profile = profile_of(sleep)

    def steps(sleep: Sleep, plans: list[Plan], runs: int, timeout_s: float) -> list[Measured]:
        times = [
            simulate(plan, profile, replace(network(4), handling_us=70.0), batch=sleep.batch).time_us
            for plan in plans
        ]
        return [Measured((time_us - 1, time_us, time_us + 2), Timeline(())) for time_us in times]

    monkeypatch.setattr(sleeping, "measure", steps)
    monkeypatch.setattr(sleeping, "costs", lambda sleep, timeout_s: (profile, 4 * 40 * 60.0))
    monkeypatch.setattr(sleeping, "links", lambda sleep, ranks, timeout_s: network(ranks))
    rows = sleeping_rows(microbatches=(1, 4, 10, 20), stages=(2, 4), orders=(order,), sleep=sleep)
    assert [(row["order"], row["stages"], row["microbatches"]) for row in rows] == [
        (order, stages, number) for stages in (2, 4) for number in (1, 4, 10, 20)
    ]
    assert all(row["error"] < 1e-6 and row["spread"] == pytest.approx(3) for row in rows)
    assert all(row["error_spread"] == pytest.approx(3 / row["time_us"], rel=1e-5) for row in rows)
    assert [row["microbatches"] for row in rows if row["fitted"]] == [1, 10, 20] * 2
    assert all(0 <= row["equation_error"] < 0.2 for row in rows)


@pytest.mark.long
def test_real_ranks() -> None:
    (row,) = sleeping_rows(
        microbatches=(2, 4), stages=(2,), orders=("1f1b",), sleep=Sleep(layers=2, batch=8), runs=1
    )[:1]
    assert row["time_us"] > 8 * 1200  # no rank can be faster than its sleep

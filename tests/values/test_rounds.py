"""Step-synchronous schedules of every kind verify, simulate, lower and run like any other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.bounds import bound
from arborcast.synth.schedule import Schedule
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.verification.verifier import verify
from tests.executors.test_conformance import check, interpreted
from tests.support.drawn_schedules import in_rounds, schedules


@given(schedules(even=True), st.integers(0, 20), st.integers(1, 3), st.integers(0, 99))
@settings(max_examples=200)
@pytest.mark.few(30)
def test_schedules_in_rounds_verify_simulate_and_run_like_any_other(
    schedule: Schedule, size: int, pieces: int, seed: int
) -> None:
    stepped = in_rounds(schedule, bound(schedule.topology, schedule.collective))
    verdict = verify(stepped)
    assert verdict.errors == ()
    assert verdict.rate <= stepped.bound.rate
    # Links of 1 GB/s without latency: links that are never idle within a step can only end earlier.
    timing = simulate(stepped, 1 << 20, pieces=1)
    chunk_us = float(stepped.chunks[0].share * (1 << 20) / 1000)
    rounds = sum(stepped.rounds or ())
    assert timing.time_us <= rounds * chunk_us * (1 + 1e-9)
    check(interpreted, stepped, size, pieces, seed=seed)

"""Equations (1) to (3) of the Divisible paper, and the fit of their constants."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.bench.training.step_formula import Fit, PipelineModel, Run, fit, residuals
from arborcast.synth.errors import InputError

MICROBATCHES = (1, 2, 3, 5, 8, 12, 20, 40)
TRUE = PipelineModel(compute_us=100_000, start_us=900, transfer_us=6_000)


def measured(model: PipelineModel, stages: int, noise: float = 0.0, seed: int = 0) -> list[Run]:
    draw = random.Random(seed)
    return [
        Run(m, stages, model.step_us(m, stages) * (1 + draw.uniform(-noise, noise))) for m in MICROBATCHES
    ]


def test_the_equations_by_hand() -> None:
    model = PipelineModel(compute_us=120, start_us=3, transfer_us=8)
    assert model.communication_us(4) == 3 + 8 / 4
    assert model.compute_time_us(4, 3) == (4 + 3 - 1) / 4 * 120 / 3
    assert model.step_us(4, 3) == 60 + (4 + 3 - 2) * 5
    assert model.step_us(1, 1) == 120  # one rank sends nothing


def test_best_microbatches_is_the_least_step() -> None:
    # pipe: 100 (m + 3) / m / 4, messages: (m + 2) * 1: with m real the least is at m = sqrt(75) = 8.66.
    model = PipelineModel(100, 1, 0)
    assert model.best_microbatches(4, 40) == 9
    assert model.best_microbatches(4, 5) == 5
    assert PipelineModel(100, 0, 0).best_microbatches(4, 40) == 40
    assert PipelineModel(0, 0, 0).best_microbatches(4, 40) == 1


def test_fit_finds_what_made_the_runs() -> None:
    found = fit(measured(TRUE, 4), compute_us=TRUE.compute_us)
    assert found.model.start_us == pytest.approx(900, rel=1e-9)
    assert found.model.transfer_us == pytest.approx(6_000, rel=1e-9)
    assert found.worst < 1e-12


@pytest.mark.parametrize("stages", [2, 4, 16])
def test_fit_bears_noise(stages: int) -> None:
    runs = measured(TRUE, stages, noise=0.02)
    found = fit(runs, compute_us=TRUE.compute_us)
    assert found.worst < 0.03
    for m in range(1, 80):
        assert found.model.step_us(m, stages) == pytest.approx(TRUE.step_us(m, stages), rel=0.03)


def test_fitting_all_three_from_three_runs_is_a_trap() -> None:
    """The paper's way: it predicts, but the constants it returns mean nothing."""
    stages, chosen = 16, (3, 12, 40)
    columns = np.array([[(m + 15) / m / 16, m + 14, (m + 14) / m] for m in chosen])
    normal = columns / np.linalg.norm(columns, axis=0)
    assert np.linalg.cond(normal) > 100
    computes = []
    for seed in range(20):
        draw = random.Random(seed)
        times = [TRUE.step_us(m, stages) * (1 + draw.uniform(-0.02, 0.02)) for m in chosen]
        computes.append(float(np.linalg.solve(columns, times)[0]))
        runs = [Run(m, stages, time) for m, time in zip(chosen, times, strict=True)]
        ours = fit(runs, compute_us=TRUE.compute_us).model
        assert ours.start_us == pytest.approx(TRUE.start_us, rel=0.15)
    assert min(computes) < 0 < 2 * TRUE.compute_us < max(computes)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(2, 8), st.floats(1, 1e3)), min_size=2, max_size=6),
    st.floats(0, 500),
)
def test_fit_is_the_best_of_all_non_negative_pairs(
    rows: list[tuple[int, int, float]], compute_us: float
) -> None:
    runs = [Run(*row) for row in rows]
    if len({run.microbatches for run in runs}) < 2:
        return
    found = fit(runs, compute_us=compute_us)
    model = found.model
    assert model.start_us >= 0
    assert model.transfer_us >= 0
    least = sum(residual**2 for residual in found.residuals)
    steps = [0.0, 1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0]
    scale = max(run.time_us for run in runs)
    for start in [*(step * scale / 10 for step in steps), model.start_us, model.start_us * 1.01]:
        for transfer in [*(step * scale for step in steps), model.transfer_us, model.transfer_us * 1.01]:
            other = PipelineModel(compute_us, start, transfer)
            assert least <= sum(residual**2 for residual in residuals(other, runs)) * (1 + 1e-6) + 1e-9


def test_a_machine_faster_than_its_serial_time_gets_no_negative_constants() -> None:
    found = fit([Run(2, 2, 50.0), Run(4, 2, 40.0)], compute_us=1000)
    assert (found.model.start_us, found.model.transfer_us) == (0, 0)
    assert isinstance(found, Fit)
    assert found.worst > 1


def test_bad_input() -> None:
    with pytest.raises(InputError, match=r"at least two different numbers of microbatches, got \[4\]"):
        fit([Run(4, 2, 10.0), Run(4, 3, 12.0), Run(1, 1, 12.0)], compute_us=5)
    with pytest.raises(InputError, match="run: microbatches must be at least 1, got 0"):
        Run(0, 2, 1.0)
    with pytest.raises(InputError, match="run: time_us must be positive and finite, got nan"):
        Run(1, 2, float("nan"))
    with pytest.raises(InputError, match="pipeline model: start_us must be finite and not negative, got -1"):
        PipelineModel(1, -1, 0)

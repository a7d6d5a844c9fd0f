"""Clipping against torch's own, in one process; over stages, replicas and ties see `test_trainer`."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from arborcast.pipeline.run.clipping import clip_gradients

NUMBERS = st.floats(-(2.0**90), 2.0**90, width=32) | st.sampled_from([math.inf, -math.inf, math.nan])


@given(
    st.lists(st.lists(NUMBERS, min_size=1, max_size=4), min_size=1, max_size=4),
    st.floats(0.0, 2.0**20, width=32),
)
def test_one_process_clips_as_torch_does(values: list[list[float]], max_norm: float) -> None:
    def made() -> dict[str, nn.Parameter]:
        whole = {str(index): nn.Parameter(torch.zeros(len(it))) for index, it in enumerate(values)}
        for parameter, gradient in zip(whole.values(), values, strict=True):
            parameter.grad = torch.tensor(gradient)
        return whole

    ours, theirs = made(), made()
    want = nn.utils.clip_grad_norm_(theirs.values(), max_norm).item()
    norm = clip_gradients(ours, max_norm)
    is_finite = all(math.isfinite(it) for own in values for it in own)
    if is_finite and (math.isinf(want) or want < 1e-10):  # torch adds powers up in float32
        return
    assert norm == pytest.approx(want, rel=1e-5, nan_ok=True)
    for name, parameter in ours.items():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-5, atol=1e-30, equal_nan=True)

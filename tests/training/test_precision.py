"""16-bit training: scales and skipped steps against torch's own scaler, wherever the infinite gradient is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from arborcast.pipeline.run.precision import Precision
from arborcast.synth.errors import InputError
from tests.support.packed import pack, unpack
from tests.support.ranks import run_ranks
from tests.support.refusals import refuses

RANKS_IMPORT = ("torch._dynamo",)

OPTIONS: dict[str, Any] = {
    "init_scale": 1024.0,
    "growth_factor": 3.0,
    "backoff_factor": 0.3,
    "growth_interval": 2,
}

STEPS: tuple[tuple[float, float], ...] = (
    # gradient on the first stage, on the second one
    (1.0, 2.0),
    (1.0, math.inf),
    (0.5, 0.25),
    (1.0, 1.0),
    (math.nan, 1.0),
    (-math.inf, math.nan),
    (3.0, 1.0),
    (1.0, 1e-3),
    (1.0, 2.0),
)


Serial = tuple[list[float], list[bool], list[float], dict[str, Any]]


def serially(steps: tuple[tuple[float, ...], ...]) -> Serial:
    """Scales, steps that were made, final weights and state of torch's scaler; a weight for each column."""
    weights = [nn.Parameter(torch.tensor([1.0])) for _ in steps[0]]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.5)
    scaler = torch.amp.GradScaler("cpu", **OPTIONS)
    scales, made = [], []
    for gradients in steps:
        scaler.scale(torch.tensor(0.0))  # it makes its tensors on first use
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = torch.tensor([gradient]) * scaler.get_scale()
        scales.append(scaler.get_scale())
        before = [weight.item() for weight in weights]
        scaler.step(optimizer)
        made.append(before != [weight.item() for weight in weights])
        scaler.update()
    return scales, made, [weight.item() for weight in weights], scaler.state_dict()


def stage(rank: int, size: int) -> bytes:
    """Ranks 0 and 1 have a weight each, rank 2 has no work."""
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.5) if rank < 2 else None
    precision = Precision("float16", **OPTIONS)
    scales, made = [], []
    for gradients in STEPS:
        if rank < 2:
            weight.grad = torch.tensor([gradients[rank]]) * precision.current_scale
        scales.append(precision.current_scale)
        precision.unscale([] if weight.grad is None else [weight.grad])
        made.append(precision.step(optimizer))
        precision.update()
    # An error on one rank is one on all: nobody waits.
    with pytest.raises(InputError, match="parameters must be float32 to be scaled, got float16"):
        precision.unscale([torch.ones(2, dtype=torch.float16 if rank == 1 else torch.float32)])
    calls = 0

    def counted(*arguments: Any, **named: Any) -> None:
        nonlocal calls
        calls += 1

    dist.all_reduce = counted
    other = Precision("bfloat16")
    other.unscale([torch.ones(1)])
    made_without_scaling = other.step(None)
    other.update()
    return pack((scales, made, weight.item(), precision.state_dict(), calls, made_without_scaling))


def test_all_ranks_skip_what_one_rank_cannot_do() -> None:
    scales, made, weights, scaler = serially(STEPS)
    assert made == [True, False, True, True, False, False, True, True, True]
    for rank, answer in enumerate(map(unpack, run_ranks(3, stage))):
        theirs, done, weight, state, calls, without = answer
        assert theirs == scales
        assert done == made
        if rank < 2:
            assert weight == weights[rank]
        assert state == scaler
        assert state["_growth_tracker"] == 1
        assert (calls, without) == (0, True)


@given(st.lists(st.sampled_from([1.0, -2.5, math.inf, math.nan, 1e30]), min_size=1, max_size=12))
def test_scales_are_those_of_torch(gradients: list[float]) -> None:
    steps = tuple((gradient,) for gradient in gradients)
    want = serially(steps)
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.5)
    precision = Precision("float16", **OPTIONS)
    scales, made = [], []
    for gradient in gradients:
        if len(scales) == 2:  # saved and loaded on the way
            precision, old = Precision("float16"), precision
            precision.load_state_dict(old.state_dict())
        weight.grad = torch.tensor([gradient]) * precision.current_scale
        scales.append(precision.current_scale)
        before = weight.item()
        precision.unscale([weight.grad])
        precision.step(optimizer)
        made.append(before != weight.item())
        precision.update()
    assert (scales, made, [weight.item()], precision.state_dict()) == want


def test_float16_losses_do_not_overflow_by_the_scale() -> None:
    assert Precision("float16").scale(torch.tensor(2.0, dtype=torch.float16)).item() == 2.0**17


@refuses("options", "message")
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Precision(**options)


def test_calls_in_the_wrong_order() -> None:
    precision = Precision("float16")
    with pytest.raises(RuntimeError, match="step must follow unscale"):
        precision.step(None)
    with pytest.raises(RuntimeError, match="update must follow unscale"):
        precision.update()
    precision.unscale([])
    with pytest.raises(RuntimeError, match="unscale must be called once in a step"):
        precision.unscale([])
    with pytest.raises(
        InputError, match="a state of float16 must have _growth_tracker, backoff_factor, growth"
    ):
        precision.load_state_dict(Precision("bfloat16").state_dict())

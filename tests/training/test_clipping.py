"""Clipping by the norm over all stages against torch's own on the whole model."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from arborcast.pipeline.run.clipping import clip_gradients
from arborcast.synth.errors import InputError
from tests.support.packed import pack, unpack
from tests.support.ranks import run_ranks

RANKS_IMPORT = ("torch._dynamo",)

# The first stage on rank 0, the second on ranks 1 to 3, rank 4 without work; `shared` is on both stages.
HOLDERS = {"first": (0,), "shared": (0, 1, 2, 3), "second": (1, 2, 3), "unused": (1, 2, 3)}
REPLICAS = (1, 3, 3, 3, 1)
SIZES = {"first": (5, 3), "shared": (7,), "second": (2, 2, 3)}

CASES = (
    # max_norm, what the first entry of `second` becomes
    (1.0, None),
    (1000.0, None),
    (0.0, None),
    (1.0, math.inf),
    (1.0, math.nan),
)


def gradients(value: float | None) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(4)
    drawn = {name: torch.randn(size, generator=draw) for name, size in SIZES.items()}
    if value is not None:
        drawn["second"].view(-1)[0] = value
    return drawn


def parameters(names: list[str], value: float | None) -> dict[str, nn.Parameter]:
    known = gradients(value)
    made = {}
    for name in names:
        made[name] = nn.Parameter(torch.zeros(SIZES.get(name, (2,))))
        made[name].grad = known.get(name)
    return made


def clipped(rank: int, size: int) -> bytes:
    answers = []
    names = [name for name, ranks in HOLDERS.items() if rank in ranks]
    for max_norm, value in CASES:
        mine = parameters(names, value)
        ties = {"shared": 4, "elsewhere": 2}
        norm = clip_gradients(mine, max_norm, replicas=REPLICAS[rank], ties=ties)
        answers.append((norm, {name: parameter.grad for name, parameter in mine.items()}))
    return pack(answers)


def test_norm_and_gradients_are_those_of_serial_training() -> None:
    answers = [unpack(answer) for answer in run_ranks(5, clipped)]
    for index, (max_norm, value) in enumerate(CASES):
        whole = parameters(list(HOLDERS), value)
        want = nn.utils.clip_grad_norm_(whole.values(), max_norm)
        for rank, answer in enumerate(answers):
            norm, theirs = answer[index]
            assert norm == pytest.approx(want.item(), rel=1e-6, nan_ok=True)
            assert list(theirs) == [name for name, ranks in HOLDERS.items() if rank in ranks]
            for name, gradient in theirs.items():
                if whole[name].grad is None:
                    assert gradient is None
                else:
                    torch.testing.assert_close(gradient, whole[name].grad, rtol=1e-6, atol=0, equal_nan=True)


@given(
    st.lists(
        st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=1, max_size=4), min_size=1, max_size=4
    ),
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
    if math.isinf(want) or want < 1e-10:  # torch adds powers up in float32, which over- and underflows
        return
    assert norm == pytest.approx(want, rel=1e-5)
    for name, parameter in ours.items():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize(
    ("max_norm", "replicas", "message"),
    [
        (-1.0, 1, "max_norm must not be negative, got -1.0"),
        (math.nan, 1, "max_norm must not be negative, got nan"),
        (1.0, 0, "replicas must be at least 1, got 0"),
    ],
)
def test_values_out_of_range(max_norm: float, replicas: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        clip_gradients({}, max_norm, replicas=replicas)

"""Layers that sleep as long as they would compute: more ranks than cores then do not wait for each other's.

A layer sleeps in the forward pass and in each half of the backward pass, so long for each sample.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

MOST_OVER_S = 0.001
"""Of a sleep that was too long, which the next one makes good; more is a standstill of the machine."""


class Alarm:
    """Sleeps that last as long as they should, on average: one that was too long shortens the next one."""

    def __init__(self) -> None:
        self._over_s = 0.0

    def sleep(self, time_us: float) -> None:
        """Sleep; the system wakes a process a little late, by more after longer sleeps."""
        wanted_s = time_us / 1e6 - self._over_s
        begin = time.perf_counter()
        if wanted_s > 0:
            time.sleep(wanted_s)
        self._over_s = min(time.perf_counter() - begin - wanted_s, MOST_OVER_S)


ALARM = Alarm()
"""Of this process."""


class _Inputs(torch.autograd.Function):
    """Sleeps in the forward pass, and for the gradient of the input."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, sample_us: float) -> Tensor:
        ctx.sleep_us = sample_us * len(inputs)
        ALARM.sleep(ctx.sleep_us)
        return inputs * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ALARM.sleep(ctx.sleep_us)
        return gradients[0] * 1.0, None


class _Weights(torch.autograd.Function):
    """Sleeps for the gradient of the weight, of which the result has the first row."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, sleep_us: float) -> Tensor:
        ctx.rows, ctx.sleep_us = len(weight), sleep_us
        return weight[0] * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ALARM.sleep(ctx.sleep_us)
        return torch.nn.functional.pad(gradients[0][None], (0, 0, 0, ctx.rows - 1)), None


class Nap(nn.Module):
    """A layer of `rows * width` parameters that sleeps `sample_us` for each sample of its inputs."""

    def __init__(self, width: int, sample_us: float, rows: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, width))
        self.sample_us = sample_us

    def forward(self, inputs: Tensor) -> Tensor:
        """The inputs and the first row of the parameters."""
        kept: Tensor = _Inputs.apply(inputs, self.sample_us)  # type: ignore[no-untyped-call]
        added: Tensor = _Weights.apply(  # type: ignore[no-untyped-call]
            self.weight, self.sample_us * len(inputs)
        )
        return kept + added

"""How long a pipelined step takes, in one formula of three constants, and how to find them from runs.

The model of Takisawa, Yazaki and Ishihata for m microbatches in d stages, equations (1) to (3):

    communication(m) = start + transfer / m                        one message, each way counted once
    pipe(m, d)       = (m + d - 1) / m * compute / d               fill and drain
    step(m, d)       = pipe(m, d) + (m + d - 2) * communication(m)

The simulator knows links and orders; this knows only what a stopwatch tells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from arborcast.synth.errors import InputError


@dataclass(frozen=True, slots=True)
class Run:
    """A measured step.

    Attributes:
        microbatches: m.
        stages: d.
        time_us: of the whole step.

    Raises:
        InputError: a number is out of range.
    """

    microbatches: int
    stages: int
    time_us: float

    def __post_init__(self) -> None:
        """Check every rule."""
        for name in ("microbatches", "stages"):
            if getattr(self, name) < 1:
                raise InputError(f"run: {name} must be at least 1, got {getattr(self, name)}")
        if not (math.isfinite(self.time_us) and self.time_us > 0):
            raise InputError(f"run: time_us must be positive and finite, got {self.time_us}")


@dataclass(frozen=True, slots=True)
class PipelineModel:
    """The three constants of equations (1) to (3).

    Attributes:
        compute_us: of a whole batch through all layers, forward and backward, on one rank.
        start_us: that a message costs whatever its size.
        transfer_us: of what a whole batch sends over one boundary, without the starts.

    Raises:
        InputError: a constant is negative or not finite.
    """

    compute_us: float
    start_us: float
    transfer_us: float

    def __post_init__(self) -> None:
        """Check every rule."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"pipeline model: {field.name} must be finite and not negative, got {value}")

    def communication_us(self, microbatches: int) -> float:
        """Equation (1): one message."""
        return self.start_us + self.transfer_us / microbatches

    def compute_time_us(self, microbatches: int, stages: int) -> float:
        """Equation (2): a step without messages."""
        return (microbatches + stages - 1) / microbatches * self.compute_us / stages

    def step_us(self, microbatches: int, stages: int) -> float:
        """Equation (3): a step."""
        messages = microbatches + stages - 2
        return self.compute_time_us(microbatches, stages) + messages * self.communication_us(microbatches)

    def best_microbatches(self, stages: int, most: int) -> int:
        """The number of microbatches, at most `most`, with the fastest step; the smallest of equals."""
        return min(range(1, most + 1), key=lambda microbatches: self.step_us(microbatches, stages))


@dataclass(frozen=True, slots=True)
class Fit:
    """A model and how well it explains what it was fitted to.

    Attributes:
        model: fitted.
        runs: that it was fitted to.
        residuals: (predicted - measured) / measured, run by run.
    """

    model: PipelineModel
    runs: tuple[Run, ...]
    residuals: tuple[float, ...]

    @property
    def worst(self) -> float:
        """The largest residual, without its sign."""
        return max(abs(residual) for residual in self.residuals)


def residuals(model: PipelineModel, runs: Sequence[Run]) -> tuple[float, ...]:
    """(predicted - measured) / measured of each run."""
    return tuple(model.step_us(run.microbatches, run.stages) / run.time_us - 1 for run in runs)


def fit(runs: Sequence[Run], *, compute_us: float) -> Fit:
    """The constants of messages that explain measured steps best, given the computation.

    Least squares of the relative errors over `start_us >= 0` and `transfer_us >= 0`, exactly (two unknowns
    have four cases). `compute_us` must be measured on its own: its column is nearly a combination of the
    others, so that fitting all three from a few runs predicts well and yet may return a negative time.

    Args:
        runs: with at least two different numbers of microbatches, where messages are sent at all.
        compute_us: of a whole batch on one rank, measured serially.

    Raises:
        InputError: the runs cannot tell the two constants apart, or `compute_us` is out of range.
    """
    serial = PipelineModel(compute_us, 0.0, 0.0)
    telling = {run.microbatches for run in runs if run.microbatches + run.stages > 2}
    if len(telling) < 2:
        raise InputError(
            "fit: runs with messages must have at least two different numbers of microbatches, "
            f"got {sorted(telling)}"
        )
    starts, transfers, rest = [], [], []
    for run in runs:
        messages = run.microbatches + run.stages - 2
        starts.append(messages / run.time_us)
        transfers.append(messages / run.microbatches / run.time_us)
        rest.append(1 - serial.compute_time_us(run.microbatches, run.stages) / run.time_us)
    start_us, transfer_us = _non_negative_pair(starts, transfers, rest)
    model = PipelineModel(compute_us, start_us, transfer_us)
    return Fit(model, tuple(runs), residuals(model, runs))


def _non_negative_pair(
    first: Sequence[float], second: Sequence[float], target: Sequence[float]
) -> tuple[float, float]:
    """x, y >= 0 with the least sum of squares of `x first + y second - target`."""
    # The columns differ in size by orders of magnitude; equal lengths keep the determinant meaningful.
    lengths = math.hypot(*first), math.hypot(*second)
    a = [value / lengths[0] for value in first]
    b = [value / lengths[1] for value in second]
    ab, at, bt = _dot(a, b), _dot(a, target), _dot(b, target)
    determinant = 1 - ab * ab
    x, y = (at - ab * bt) / determinant, (bt - ab * at) / determinant
    if x < 0 or y < 0:  # then the best lies on an axis (the sum of squares is convex)
        x, y = max(((max(at, 0.0), 0.0), (0.0, max(bt, 0.0))), key=lambda pair: pair[0] + pair[1])
    return x / lengths[0], y / lengths[1]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))

"""What a frontier consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from arborcast.synth.chunks.bounds.step_certificate import StepBound
from arborcast.synth.chunks.step_result import StepOptimum
from arborcast.synth.errors import Prover
from arborcast.synth.schedule import Method, Schedule

EVERY_SCHEDULE = "every schedule"
"""Whatever copies, and adds partial sums."""

MEETINGS = "allreduces that meet in cores"
"""Hierarchies and others: see `synth.chunks.allreduce.hierarchical`."""

MEETINGS_ON_LINKS = "allreduces that meet on links"
"""All at one time: see `synth.chunks.allreduce.meeting_on_links`."""

ON_GRID = "at rates rounded down"
"""Follows that where the frontier has a grid (`synth.chunks.quantized_rates`)."""


@dataclass(frozen=True)
class Point:
    """A schedule that no other one known beats in both steps and R/C.

    Attributes:
        chunks: C.
        steps: S.
        rounds: R.
        least: the proven limit of R/C in so many steps, over every schedule and number of chunks.
        is_proved: whether R/C is the least in so many steps and C the smallest that attains it, over every
            schedule.
        proof: how that was proved, or what is missing.
        proved_by: who says so; empty where something is missing.
        bounds: the exact certificate behind `least`; none where nothing above 0 is known.
        schedule: what attains it.
        scope: the schedules of which R/C is proved or may be the least: `EVERY_SCHEDULE`, `ON_GRID` where
            rates were rounded.
        restriction: the schedules among which alone this one was looked for, `MEETINGS` or
            `MEETINGS_ON_LINKS`; None for all. The limit beside it is that of every schedule.
    """

    chunks: int
    steps: int
    rounds: int
    least: Fraction
    is_proved: bool
    proof: str
    proved_by: tuple[Prover, ...]
    bounds: tuple[StepBound, ...]
    schedule: Schedule
    scope: str = EVERY_SCHEDULE
    restriction: str | None = None

    @property
    def ratio(self) -> Fraction:
        """R/C."""
        return Fraction(self.rounds, self.chunks)

    @property
    def gap(self) -> Fraction | None:
        """By what part of `least` R/C is more; None where nothing above 0 is known."""
        return self.ratio / self.least - 1 if self.least else None


@dataclass(frozen=True, slots=True)
class RestrictedSchedule:
    """An allreduce that was looked for among some schedules alone.

    Attributes:
        schedule: with C, S and R among its method's settings.
        ratio: its R/C.
        restriction: see `Point`.
    """

    schedule: Schedule
    ratio: Fraction
    restriction: str


def point_of(optimum: StepOptimum[Any], schedule: Schedule) -> Point:
    """The point of a number of steps that has a plan, with the schedule made of that."""
    assert optimum.plan is not None, "it has one"
    return Point(
        optimum.chunks,
        optimum.steps,
        sum(optimum.plan.rounds),
        optimum.least,
        optimum.is_settled,
        optimum.proof,
        optimum.proved_by,
        optimum.bounds,
        schedule,
    )


def point_method(chunks: int, rounds: Sequence[int], seed: int) -> Method:
    """How the schedules of a frontier name what made them."""
    return Method("pareto", seed, (("chunks", chunks), ("steps", len(rounds)), ("rounds", sum(rounds))))

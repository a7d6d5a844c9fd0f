"""What a stage does and in which order: the values between orders, the simulator and the trainer.

All replicas of a stage do the same, so that there is one list per stage:

    stage 0: F0 F1 B0 F2 B1 B2        F0 is the forward pass of microbatch 0, B0 its backward pass
    stage 1: F0 B0 F1 B1 F2 B2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


class Phase(StrEnum):
    """Which pass."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one microbatch through a stage."""

    phase: Phase
    microbatch: int

    def __str__(self) -> str:
        """As drawn above."""
        return f"{self.phase}{self.microbatch}"


Passes: TypeAlias = tuple[tuple[Action, ...], ...]
"""What each stage does, one action after another."""


@dataclass(frozen=True, slots=True)
class Order:
    """An order of passes, for any number of stages and microbatches.

    Attributes:
        make: `make(stages, microbatches)`, what each stage does.
        in_flight: `in_flight(behind, microbatches)`, the most microbatches at once whose results a stage
            keeps with so many stages behind it: what planners ask before there is a plan.
        is_bounded: whether `bound.bound_us` is proven for it.
        drains: whether every backward pass of a stage comes behind all of its forward passes, so that the
            least time of a step is that of both, one after the other.
    """

    make: Callable[[int, int], Passes]
    in_flight: Callable[[int, int], int]
    is_bounded: bool = False
    drains: bool = False


def parse(text: str) -> tuple[Action, ...]:
    """The actions of a drawn list such as `F0 F1 B0 B1`."""
    return tuple(Action(Phase(word[0]), int(word[1:])) for word in text.split())


def peak_in_flight(actions: Sequence[Action]) -> int:
    """Most microbatches at once whose forward pass is done and whose backward pass is not."""
    now = peak = 0
    for action in actions:
        now += 1 if action.phase is Phase.FORWARD else -1
        peak = max(peak, now)
    return peak

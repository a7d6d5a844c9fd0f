"""What a worker does and in which order: the values between orders, the simulator and the trainer.

A worker is the ranks that hold the same stages, most often one stage; all of them do the same, so that there
is one list per worker:

    worker 0: F0 F1 B0 F2 B1 B2       F0 is the forward pass of microbatch 0, B0 its backward pass
    worker 1: F0 B0 F1 B1 F2 B2

Where a worker holds several stages, each pass says of which: `F0@4`. Where an order splits backward passes,
B0 computes the gradients of activations only, which the stage before waits for, and W0 those of parameters.
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
    WEIGHTS = "W"


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one microbatch through a stage."""

    phase: Phase
    microbatch: int
    stage: int

    def __str__(self) -> str:
        """As drawn above, without the stage."""
        return f"{self.phase}{self.microbatch}"

    def taker(self, stages: int) -> Action | None:
        """The pass that takes what this one gives to another stage; None where nobody does."""
        return self._beside(1 if self.phase is Phase.FORWARD else -1, stages)

    def giver(self, stages: int) -> Action | None:
        """The pass that gives what this one takes from another stage; None where nobody does."""
        return self._beside(-1 if self.phase is Phase.FORWARD else 1, stages)

    def _beside(self, steps: int, stages: int) -> Action | None:
        stage = self.stage + steps
        if self.phase is Phase.WEIGHTS or not 0 <= stage < stages:
            return None
        return Action(self.phase, self.microbatch, stage)


Passes: TypeAlias = tuple[tuple[Action, ...], ...]
"""What each worker does, one action after another."""

Layout: TypeAlias = tuple[tuple[int, ...], ...]
"""Which stages each worker holds, ascending."""


def one_each(stages: int, workers: int) -> Layout | None:
    """Every worker holds one stage."""
    return tuple((stage,) for stage in range(stages)) if stages == workers else None


ONE_EACH = "must have every stage on ranks of its own"
"""The rule of `one_each`."""


@dataclass(frozen=True, slots=True)
class PassOrder:
    """An order of passes, for any number of stages and microbatches.

    Attributes:
        make: `make(stages, microbatches, workers)`, what each worker does.
        in_flight: `in_flight(behind, microbatches)`, the most microbatches at once whose results a stage
            keeps with so many stages behind it: what planners ask before there is a plan. None where that
            depends on more; planners then take such plans from plans in 1F1B.
        layout: `layout(stages, workers)`, which stages each worker must hold; None where that many stages
            cannot be laid on so many workers.
        rule: of the layout, in words.
        splits: whether gradients of parameters have passes of their own.
        is_bounded: whether `lower_bound.bound_us` is proven for it.
        drains: whether every backward pass of a stage comes behind all of its forward passes, so that the
            least time of a step is that of both, one after the other.
    """

    make: Callable[[int, int, int], Passes]
    in_flight: Callable[[int, int], int] | None
    layout: Callable[[int, int], Layout | None] = one_each
    rule: str = ONE_EACH
    splits: bool = False
    is_bounded: bool = False
    drains: bool = False


def parse(text: str, stage: int = 0) -> tuple[Action, ...]:
    """The actions of a drawn list such as `F0 F1 B0 B1@2`; those that name no stage are of `stage`."""
    words = (word.partition("@") for word in text.split())
    return tuple(Action(Phase(pass_[0]), int(pass_[1:]), int(named or stage)) for pass_, _, named in words)


def forwards(order: Passes) -> Passes:
    """The order of an evaluation: without backward passes."""
    return tuple(tuple(action for action in actions if action.phase is Phase.FORWARD) for actions in order)


def last_phase(actions: Sequence[Action]) -> Phase:
    """Which pass of a microbatch lets go of what its forward pass has kept."""
    return Phase.WEIGHTS if any(it.phase is Phase.WEIGHTS for it in actions) else Phase.BACKWARD


def peak_in_flight(actions: Sequence[Action], weigh: Callable[[int], int] = lambda stage: 1) -> int:
    """Most that forward passes have made and no last pass has let go yet, at once.

    Args:
        actions: of a worker.
        weigh: by stage what each microbatch of it counts; by default one.
    """
    last = last_phase(actions)
    now = peak = 0
    for action in actions:
        if action.phase is Phase.FORWARD:
            now += weigh(action.stage)
        elif action.phase is last:
            now -= weigh(action.stage)
        peak = max(peak, now)
    return peak


def most_on_their_way(actions: Sequence[Action]) -> int:
    """Gradients of inputs that a worker may have sent and not waited for; in evaluation outputs.

    Safe even where sends end only when they are received: orders are checked with such.
    """
    return peak_in_flight(actions) + 1

"""Fewer microbatches in flight: forward passes wait until backward passes have made room.

It applies to every order alike. Fill and drain then drains early, so that any cap of at least 1 can be kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.order.actions import Action, Passes, Phase


def capped(order: Passes, max_in_flight: int) -> Passes:
    """The same passes with at most so many microbatches in flight on any stage.

    A forward pass that would be one too many comes right after the next backward pass instead. Where every
    stage begins with at least as many forward passes as the stage behind it, as in gpipe, 1f1b and pe, that
    still holds afterwards; then no stage's backward pass can wait for a forward pass that waits for it.

        gpipe(1, 3)             F0 F1 F2 B0 B1 B2
        capped at 2             F0 F1 B0 F2 B1 B2

    Args:
        order: whose backward passes come in the order of the forward passes.
        max_in_flight: at least 1.

    Raises:
        PlanError: `max_in_flight` is less than 1, or a backward pass is left before its forward pass.
    """
    if max_in_flight < 1:
        raise PlanError(f"max_in_flight: must be at least 1, got {max_in_flight}")
    return tuple(_capped_stage(stage, actions, max_in_flight) for stage, actions in enumerate(order))


def _capped_stage(stage: int, actions: Sequence[Action], max_in_flight: int) -> tuple[Action, ...]:
    held: deque[Action] = deque()
    done: list[Action] = []
    in_flight: set[int] = set()
    for action in actions:
        if action.phase is Phase.FORWARD:
            held.append(action)
        elif action.microbatch in in_flight:
            in_flight.remove(action.microbatch)
            done.append(action)
        else:
            raise PlanError(
                f"order: stage {stage}: {action} must be one of the {max_in_flight} oldest microbatches in "
                f"flight, which are {sorted(in_flight)}"
            )
        while held and len(in_flight) < max_in_flight:
            in_flight.add(held[0].microbatch)
            done.append(held.popleft())
    return tuple(done)

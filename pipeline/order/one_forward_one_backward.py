"""PipeDream's order with a flush: one forward, one backward (1F1B).

Stage s begins with S-s forward passes, just enough to be busy until the first gradient comes back where
messages cost nothing, and keeps as many microbatches in flight.
"""

from __future__ import annotations

from arborcast.pipeline.order.actions import Action, Passes, PassOrder, Phase


def one_forward_one_backward(stages: int, microbatches: int) -> Passes:
    """Each stage warms up, then alternates, then drains.

    stage 0: F0 F1 F2 B0 F3 B1 B2 B3
    stage 1: F0 F1 B0 F2 B1 F3 B2 B3
    stage 2: F0 B0 F1 B1 F2 B2 F3 B3
    """
    return tuple(_stage(stage, min(microbatches, stages - stage), microbatches) for stage in range(stages))


def _stage(stage: int, warm_ups: int, microbatches: int) -> tuple[Action, ...]:
    actions = [Action(Phase.FORWARD, m, stage) for m in range(warm_ups)]
    for m in range(microbatches):
        actions.append(Action(Phase.BACKWARD, m, stage))
        if m + warm_ups < microbatches:
            actions.append(Action(Phase.FORWARD, m + warm_ups, stage))
    return tuple(actions)


ONE_FORWARD_ONE_BACKWARD = PassOrder(
    lambda stages, microbatches, _: one_forward_one_backward(stages, microbatches),
    in_flight=lambda behind, _: behind + 1,
)

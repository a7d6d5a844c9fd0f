"""GPipe's order: all forward passes, then all backward passes (fill and drain).

Backward passes come in the order of the microbatches, as in torch and unlike in torchgpipe: the bubble and
the memory are the same either way, but gradients then add up in the same order as in the other orders and
in serial training, so that they round alike.
"""

from __future__ import annotations

from arborcast.pipeline.order.actions import Action, Passes, PassOrder, Phase


def gpipe(stages: int, microbatches: int) -> Passes:
    """Fill and drain: every stage keeps all microbatches in flight.

    stage 0: F0 F1 F2 B0 B1 B2
    stage 1: F0 F1 F2 B0 B1 B2
    """
    both = Phase.FORWARD, Phase.BACKWARD
    return tuple(
        tuple(Action(phase, m, stage) for phase in both for m in range(microbatches))
        for stage in range(stages)
    )


GPIPE = PassOrder(
    lambda stages, microbatches, _: gpipe(stages, microbatches),
    in_flight=lambda _, microbatches: microbatches,
    drains=True,
)

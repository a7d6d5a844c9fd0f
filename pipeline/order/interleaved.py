"""Megatron's interleaved 1F1B: several stages on each worker, so that less of the model fills and drains.

Stage c·W + w lies on worker w of W. Where a message costs nothing the bubble is that of 1F1B, (W-1) passes
forth and back, of stages that are as many times shorter as a worker holds. The source is Narayanan et al.,
Efficient Large-Scale Language Model Training on GPU Clusters (SC 2021), section 2.2.
"""

from __future__ import annotations

from collections.abc import Iterator

from arborcast.pipeline.order.actions import Action, Layout, Passes, PassOrder, Phase


def interleaved(stages: int, microbatches: int, workers: int) -> Passes:
    """Each worker takes W microbatches through its first stage, then through its next, and so on.

    Gradients come in the same groups from the last of its stages on. Worker w begins with
    2(W-1-w) + (v-1)·W forward passes of its v stages, then alternates, and keeps one more at once. Of
    microbatches that are no multiple of W, those that the last group lacks are left out.

        worker 0: F0@0 F1@0 F0@2 F1@2 F2@0 B0@2 F3@0 B1@2 F2@2 B0@0 F3@2 B1@0 B2@2 B3@2 B2@0 B3@0
        worker 1: F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 F2@1 B0@1 F3@1 B1@1 F2@3 B2@3 F3@3 B3@3 B2@1 B3@1
    """
    full = -(-microbatches // workers) * workers  # groups that are not whole could wait in a circle
    return tuple(
        tuple(it for it in _worker(worker, stages, full, workers) if it.microbatch < microbatches)
        for worker in range(workers)
    )


def warm_ups(worker: int, stages: int, microbatches: int, workers: int) -> int:
    """Forward passes before the first backward pass, less the one right before it."""
    each = stages // workers
    return min(microbatches * each, 2 * (workers - 1 - worker) + (each - 1) * workers)


def _worker(worker: int, stages: int, microbatches: int, workers: int) -> tuple[Action, ...]:
    held = range(worker, stages, workers)
    forward = list(_grouped(Phase.FORWARD, held, microbatches, workers))
    backward = _grouped(Phase.BACKWARD, held[::-1], microbatches, workers)
    first = warm_ups(worker, stages, microbatches, workers)
    actions = forward[:first]
    for action in forward[first:]:
        actions += [action, next(backward)]
    return (*actions, *backward)


def _grouped(phase: Phase, held: range, microbatches: int, size: int) -> Iterator[Action]:
    for start in range(0, microbatches, size):
        for stage in held:
            for microbatch in range(start, start + size):
                yield Action(phase, microbatch, stage)


def _layout(stages: int, workers: int) -> Layout | None:
    if stages < 2 * workers or stages % workers:
        return None
    return tuple(tuple(range(worker, stages, workers)) for worker in range(workers))


INTERLEAVED = PassOrder(
    interleaved,
    in_flight=None,
    layout=_layout,
    rule="must have at least two stages on each group of ranks, in turn: 0+2 1+3 for two groups",
)

"""Zero-bubble orders: gradients of parameters are computed where a stage would otherwise wait.

A backward pass is split: B gives the gradients of activations, which the stage before waits for, W those of
parameters, for which only the update waits. The source is Qi et al., Zero Bubble Pipeline Parallelism
(ICLR 2024, arXiv 2401.10241): ZB-H1 is section 2.1, ZB-V section 6.
"""

from __future__ import annotations

from collections.abc import Iterator

from arborcast.pipeline.order.actions import Action, Layout, Passes, PassOrder, Phase

FORWARD, BACKWARD, WEIGHTS = Phase


def zb_h1(stages: int, microbatches: int) -> Passes:
    """1F1B in which stage s does W as many microbatches later as there are stages before it.

    Every stage keeps at most S microbatches, as the first does in 1F1B. Where a message costs nothing, stages
    are equal and W is not longer than F or B, the bubble of 1F1B, (S-1)(F+B+W), becomes (S-1)(F+B-W).

        stage 0: F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3
        stage 1: F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        stage 2: F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
    """
    return tuple(tuple(_h1_stage(stage, stages, microbatches)) for stage in range(stages))


def _h1_stage(stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    warm_ups = min(microbatches, stages - stage)
    for m in range(warm_ups):
        yield Action(FORWARD, m, stage)
    for m in range(microbatches):
        yield Action(BACKWARD, m, stage)
        if m >= stage:
            yield Action(WEIGHTS, m - stage, stage)
        if m + warm_ups < microbatches:
            yield Action(FORWARD, m + warm_ups, stage)
    for m in range(max(0, microbatches - stage), microbatches):
        yield Action(WEIGHTS, m, stage)


def zb_v(stages: int, microbatches: int) -> Passes:
    """Each worker holds two stages, one on the way there and one back, so that losses are on worker 0.

    Where F, B and W of equal stages take as long as each other, messages cost nothing and there are at least
    2W microbatches for W workers, no worker waits between its first pass and its last. It keeps at most 2W
    halves, as many activations as the first stage of 1F1B.

        worker 0: F0@0 F1@0 F2@0 F0@3 B0@3 W0@3 F1@3 B1@3 W1@3 B0@0 W0@0 F2@3 B2@3 W2@3 B1@0 W1@0 B2@0 W2@0
        worker 1: F0@1 F0@2 F1@1 F1@2 B0@2 W0@2 F2@1 B0@1 W0@1 F2@2 B1@2 W1@2 B1@1 B2@2 B2@1 W1@1 W2@2 W2@1
    """
    workers = stages // 2
    return tuple(
        tuple(it for it in _v_worker(worker, workers, microbatches) if it.microbatch < microbatches)
        for worker in range(workers)
    )


def _v_worker(worker: int, workers: int, microbatches: int) -> Iterator[Action]:
    there, back = worker, 2 * workers - 1 - worker
    count = dict.fromkeys(((phase, stage) for phase in Phase for stage in (there, back)), 0)

    def do(*passes: tuple[Phase, int]) -> Iterator[Action]:
        for phase, stage in passes:
            yield Action(phase, count[phase, stage], stage)
            count[phase, stage] += 1

    full = max(microbatches, 2 * workers - 1)  # what there is not is left out
    last, first = (FORWARD, back), (FORWARD, there)
    turned = (BACKWARD, back), (WEIGHTS, back)
    home = (BACKWARD, there), (WEIGHTS, there)
    for _ in range(2 * (workers - worker) - 1):
        yield from do(first)
    for _ in range(worker):
        yield from do(last, first)
    for _ in range(workers - worker):
        yield from do(last, *turned)
    while count[last] < full:
        if count[first] < full:
            yield from do(first)
        yield from do(*home, last, *turned)
    for _ in range(worker):
        yield from do((BACKWARD, there), (BACKWARD, back))
    for _ in range(workers - worker):
        yield from do(*home)
    for stage in (back, there):
        while count[WEIGHTS, stage] < full:
            yield from do((WEIGHTS, stage))


def _v_layout(stages: int, workers: int) -> Layout | None:
    return tuple((it, stages - 1 - it) for it in range(workers)) if stages == 2 * workers else None


ZB_H1 = PassOrder(lambda stages, microbatches, _: zb_h1(stages, microbatches), in_flight=None, splits=True)
ZB_V = PassOrder(
    lambda stages, microbatches, _: zb_v(stages, microbatches),
    in_flight=None,
    layout=_v_layout,
    rule="must have two stages on each group of ranks, there and back: 0+3 1+2 for two groups",
    splits=True,
)

"""SPP's list order (PE): also the messages take turns, so that their time hides behind other microbatches.

A microbatch goes through 4S-3 blocks, one behind the other: the computations of the stages, with the
messages between them, forth and back; on the last stage forward and backward are one block. With four
stages (C computes, m is a message):

    forth  C m C m C m
                       C
    back   C m C m C m

The source is SPP (INFOCOM 2022, arXiv 2204.10562), algorithm PE.
"""

from __future__ import annotations

from collections import deque

from arborcast.pipeline.order.actions import Action, Passes, PassOrder, Phase


def list_order(stages: int, microbatches: int) -> Passes:
    """What each stage does when passes over the blocks move one microbatch out of every queue.

    A pass moves from a queue only if something was in it when the pass began. Stage s comes to
    min(M, 4(S-1-s) + 1) forward passes before its first backward pass, where 1F1B has S-s: more
    activations are kept.

        stage 0: F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5
        stage 1: F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

    Takes time in proportion to (M + 4S) · S.
    """
    blocks = _blocks(stages)
    queues: list[deque[int]] = [deque() for _ in blocks]
    queues[0].extend(range(microbatches))
    order: list[list[Action]] = [[] for _ in range(stages)]
    while any(queues):
        ready = [block for block, queue in enumerate(queues) if queue]
        for block in ready:
            microbatch = queues[block].popleft()
            if block + 1 < len(blocks):
                queues[block + 1].append(microbatch)
            for stage, phase in blocks[block]:
                order[stage].append(Action(phase, microbatch, stage))
    return tuple(tuple(actions) for actions in order)


def _blocks(stages: int) -> list[list[tuple[int, Phase]]]:
    """What is computed in each block; nothing in a block that is a message."""
    last = stages - 1
    blocks: list[list[tuple[int, Phase]]] = []
    for stage in range(last):
        blocks += [[(stage, Phase.FORWARD)], []]
    blocks.append([(last, Phase.FORWARD), (last, Phase.BACKWARD)])
    for stage in reversed(range(last)):
        blocks += [[], [(stage, Phase.BACKWARD)]]
    return blocks


LIST_ORDER = PassOrder(
    lambda stages, microbatches, _: list_order(stages, microbatches),
    in_flight=lambda behind, _: 4 * behind + 1,
    is_bounded=True,
)

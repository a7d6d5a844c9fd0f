"""Carries out the steps of a stage on torch's runtime for pipelines.

An order becomes a list of torch's actions, messages included. What differs from torch: losses are kept by
microbatch (torch keeps them in the order in which they came, which is silently wrong for some orders), and
nothing is exchanged before the first step. Private in torch 2.13.0: `_PipelineScheduleRuntime`, `_Action`,
`_ComputationType`, and the names of the methods below.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from arborcast.pipeline.order.actions import Order, Phase
from arborcast.pipeline.order.messages import Step
from arborcast.pipeline.run.losses import Losses
from arborcast.pipeline.run.stage import ReplicaStage

_KINDS = {
    ("receive", Phase.FORWARD): _ComputationType.RECV_F,
    ("compute", Phase.FORWARD): _ComputationType.FORWARD,
    ("send", Phase.FORWARD): _ComputationType.SEND_F,
    ("receive", Phase.BACKWARD): _ComputationType.RECV_B,
    ("compute", Phase.BACKWARD): _ComputationType.FULL_BACKWARD,
    ("send", Phase.BACKWARD): _ComputationType.SEND_B,
}


class StageRuntime(_PipelineScheduleRuntime):
    """The runtime of one rank for batches of one shape.

    Args:
        stage: of this rank.
        steps: what it does.
        losses: where those of the last stage go.
    """

    def __init__(self, stage: ReplicaStage, steps: Sequence[Step], losses: Losses) -> None:
        assert stage.chunks is not None, "set by the stage"
        super().__init__([stage], stage.chunks, loss_fn=losses.function, scale_grads=False)  # type: ignore[no-untyped-call]
        self._stage = stage
        self._losses = losses
        self._has_backward = stage.has_backward
        self._forwards_left = 0
        actions = [actions_of(stage.stage_index, step) for step in steps]
        if self._has_backward:
            actions.append(_Action(stage.stage_index, _ComputationType.REDUCE_GRAD))
        self.pipeline_order_with_comms = {stage.stage_index: actions}

    def run(self, inputs: Sequence[tuple[Tensor, ...]], targets: Sequence[Any]) -> None:
        """One step: all passes and messages of this rank.

        Args:
            inputs: this rank's share of each microbatch; empty tuples behind the first stage.
            targets: likewise; anything before the last stage.
        """
        self._forwards_left = self._n_microbatches
        self._stage.clear_runtime_states()
        with _quiet():
            self._step_microbatches(
                list(inputs), [{}] * self._n_microbatches, list(targets), return_outputs=False
            )

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: torch would exchange shapes and run the model on what memory holds."""

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, loss_kwargs: Any = None
    ) -> None:
        if stage.is_last:
            self._losses.add(output, target_mbs[mb_index], mb_index)
            stage.note_forward()
            if self._has_backward:  # the loss holds what it needs of the output
                stage.fwd_cache[mb_index] = (), stage.fwd_cache[mb_index][1]
            else:
                del stage.fwd_cache[mb_index], self._losses.starts[mb_index]
        self._forwards_left -= 1
        if not self._forwards_left:
            self._losses.on_last()

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Tensor | None:
        return self._losses.starts.pop(mb_index) if stage.is_last else None

    def _update_losses(self, stages: Any, losses: Any) -> None:
        """Nothing: they are kept by microbatch."""


def actions_of(stage: int, step: Step) -> _Action:
    """What torch calls a step."""
    return _Action(stage, _KINDS[step.kind, step.action.phase], step.action.microbatch)


def forward_only(order: Order) -> Order:
    """The order of an evaluation."""
    return tuple(tuple(action for action in actions if action.phase is Phase.FORWARD) for actions in order)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's log of the whole schedule at every error: ours says in one line what happened."""
    logger: logging.Logger = schedules.logger
    logger.addFilter(_is_no_error)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_error)


def _is_no_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR

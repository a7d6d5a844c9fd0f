"""The step loop of a rank: receive, compute, send, in the order of its plan, for batches of one shape."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from arborcast.pipeline.order.actions import Action, Phase
from arborcast.pipeline.order.pass_messages import WorkerStep
from arborcast.pipeline.run.passes import StagePasses
from arborcast.pipeline.run.stage_messages import BoundaryMessages, Pending, wait


@dataclass(eq=False)
class StepLoop:
    """The passes and messages of the stages of a rank, one step after another.

    Args:
        stages: that it holds, by number.
        sizes: samples of each microbatch.
        steps: what it does, one after another.
        in_flight: microbatches whose gradients (in evaluation outputs) may be on their way at once.
        last_pass: makes the context of the last pass of a stage that gives gradients of parameters.
    """

    stages: Mapping[int, StagePasses]
    sizes: Sequence[int]
    steps: Sequence[WorkerStep]
    in_flight: int
    last_pass: Callable[[int], AbstractContextManager[None]]

    def __post_init__(self) -> None:
        """Find the last pass of each stage that gives gradients of parameters."""
        self._now = next(iter(self.stages.values()))
        computed = [it.action for it in self.steps if it.kind == "compute"]
        halves = any(it.phase is Phase.WEIGHTS for it in computed)
        last = Phase.WEIGHTS if halves else Phase.BACKWARD
        self._last = set({it.stage: it for it in computed if it.phase is last}.values())
        self._given: tuple[Sequence[Any], Sequence[Any], Mapping[int, Sequence[int]]] = (), (), {}

    @property
    def doing(self) -> str:
        """What this rank did last, in words."""
        return self._now.doing

    def run(
        self,
        inputs: Sequence[tuple[Tensor, ...]],
        targets: Sequence[Any],
        seeds: Mapping[int, Sequence[int]],
    ) -> None:
        """All passes and messages of a batch; `finish` is to follow.

        Args:
            inputs: this rank's share of each microbatch, for stages that take some.
            targets: likewise, on the last stage.
            seeds: by stage, of the random numbers of each microbatch's passes.
        """
        for stage in self.stages.values():
            stage.begin()
        self._given = inputs, targets, seeds
        self._outputs_sent: dict[Action, list[Pending]] = {}
        self._gradients_sent: deque[list[Pending]] = deque()
        for step in self.steps:
            action = step.action
            self._now = self.stages[action.stage]
            back = action.phase is Phase.BACKWARD
            match step.kind, action.phase:
                case "receive", _:
                    self._end(is_behind=back).receive(action.microbatch, back=back)
                case "compute", _:
                    self._compute(action)
                case "send", Phase.FORWARD:
                    self._outputs_sent[action] = self._send(action.microbatch, back=False)
                    if not self._now.training:
                        self._wait_for_outputs(most=self.in_flight)
                case "send", _:
                    self._gradients_sent.append(self._send(action.microbatch, back=True))
                    self._wait_for_gradients(most=self.in_flight)
        self._given = (), (), {}

    def finish(self) -> None:
        """Wait for all that is still being sent."""
        self._wait_for_outputs(most=0)
        self._wait_for_gradients(most=0)

    def _wait_for_outputs(self, *, most: int) -> None:
        while len(self._outputs_sent) > most:
            wait(self._outputs_sent.pop(next(iter(self._outputs_sent))))

    def _wait_for_gradients(self, *, most: int) -> None:
        while len(self._gradients_sent) > most:
            wait(self._gradients_sent.popleft())

    def _compute(self, action: Action) -> None:
        """A pass, once what it takes is there."""
        stage, m = self._now, action.microbatch
        inputs, targets, seeds = self._given
        match action.phase:
            case Phase.FORWARD:
                values = (*self._received(action), *(inputs[m] if stage.takes_inputs else ()))
                stage.forward(m, values, seeds[action.stage][m], targets[m] if targets else None)
            case Phase.BACKWARD:
                gradients = self._gradients(action) if stage.takes_gradients(m) else ()
                # Who sent a gradient back has received the output, whose memory this pass may have.
                wait(self._outputs_sent.pop(replace(action, phase=Phase.FORWARD), []))
                with self._last_of(action):
                    stage.backward(m, gradients)
            case Phase.WEIGHTS:
                with self._last_of(action):
                    stage.weights(m)

    def _last_of(self, action: Action) -> AbstractContextManager[None]:
        return self.last_pass(action.stage) if action in self._last else nullcontext()

    def _received(self, action: Action) -> list[Tensor]:
        """What a forward pass takes of the stage before, to be differentiated by."""
        stage, m = self._now, action.microbatch
        if stage.assignment.is_first:
            return []
        if stage.assignment.before_is_here:
            tensors = [it.detach() for it in self.stages[action.stage - 1].outputs(m)]
        else:
            tensors = [it for it in self._end(is_behind=False).arrived(m, back=False) if it is not None]
        for tensor, wire in zip(tensors, stage.boundaries.taken, strict=True):
            tensor.requires_grad_(wire.needs_gradient and stage.training)
        return tensors

    def _gradients(self, action: Action) -> Sequence[Tensor | None]:
        """What a backward pass takes in: of the outputs, None where nobody used one."""
        if self._now.assignment.behind_is_here:
            return self.stages[action.stage + 1].input_gradients(action.microbatch)
        return self._end(is_behind=True).arrived(action.microbatch, back=True)

    def _send(self, microbatch: int, *, back: bool) -> list[Pending]:
        """Begin to send what a pass made."""
        made = self._now.input_gradients(microbatch) if back else self._now.outputs(microbatch)
        return self._end(is_behind=not back).send(microbatch, made, back=back)

    def _end(self, *, is_behind: bool) -> BoundaryMessages:
        end = self._now.behind if is_behind else self._now.before
        assert end is not None, "the order has no messages beyond the ends"
        return end

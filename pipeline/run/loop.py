"""The step loop of a rank: receive, compute, send, in the order of its plan, for batches of one shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from arborcast.pipeline.errors import PartitionError
from arborcast.pipeline.order.actions import Action, Phase
from arborcast.pipeline.order.pass_messages import WorkerStep
from arborcast.pipeline.run.assignment import Assignment
from arborcast.pipeline.run.batches import described
from arborcast.pipeline.run.boundary import TensorSpec
from arborcast.pipeline.run.passes import StagePasses
from arborcast.pipeline.run.stage_messages import Messenger, Pending, ReceiveTarget, SampleSlice, packed


class Loop(ABC):
    """Steps one after another; what each does, a kind of stage says.

    Attributes:
        steps: what this rank does.
        in_flight: microbatches whose gradients (in evaluation outputs) may be on their way at once.
    """

    steps: Sequence[WorkerStep]
    in_flight: int

    @abstractmethod
    def receive(self, action: Action) -> None:
        """Post the receives of a microbatch's input, or of the gradient of its output."""

    @abstractmethod
    def compute(self, action: Action) -> None:
        """A pass, once what it takes is there."""

    @abstractmethod
    def send(self, action: Action) -> list[Pending]:
        """Begin to send what a pass made."""

    def walk(self, *, training: bool) -> None:
        """All steps of a batch; `finish` is to follow."""
        self._outputs_sent: dict[Action, list[Pending]] = {}
        self._gradients_sent: deque[list[Pending]] = deque()
        for step in self.steps:
            action = step.action
            match step.kind, action.phase:
                case "receive", _:
                    self.receive(action)
                case "compute", _:
                    self.compute(action)
                    if action.phase is Phase.BACKWARD:  # who sent a gradient back has received the output
                        wait(self._outputs_sent.pop(replace(action, phase=Phase.FORWARD), []))
                case "send", Phase.FORWARD:
                    self._outputs_sent[action] = self.send(action)
                    if not training:
                        self._wait_for_outputs(most=self.in_flight)
                case "send", _:
                    self._gradients_sent.append(self.send(action))
                    # Safe even where sends end only when they are received: orders are checked with such.
                    self._wait_for_gradients(most=self.in_flight)

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


@dataclass(eq=False)
class StepLoop(Loop):
    """The passes and messages of stages that replicas hold, each with its share of the samples.

    Args:
        stages: that it holds, by number.
        sizes: samples of each microbatch.
        steps: what it does, one after another.
        links: to other ranks.
        in_flight: microbatches whose gradients (in evaluation outputs) may be on their way at once.
        first_tag: of its messages; the next `tags_of` belong to batches of this shape alone, so that those
            of another one, which some rank was given, are not taken for them.
        last_pass: makes the context of the last pass of a stage that gives gradients of parameters.
    """

    stages: Mapping[int, StagePasses]
    sizes: Sequence[int]
    steps: Sequence[WorkerStep]
    links: Messenger
    in_flight: int
    first_tag: int
    last_pass: Callable[[int], AbstractContextManager[None]]

    def __post_init__(self) -> None:
        """Work out with whom each microbatch is exchanged."""
        self._now = next(iter(self.stages.values()))
        self._before = {
            it: _slices(self.sizes, own.assignment, before=True) for it, own in self.stages.items()
        }
        self._behind = {
            it: _slices(self.sizes, own.assignment, before=False) for it, own in self.stages.items()
        }
        computed = [it.action for it in self.steps if it.kind == "compute"]
        halves = any(it.phase is Phase.WEIGHTS for it in computed)
        last = Phase.WEIGHTS if halves else Phase.BACKWARD
        self._last = set({it.stage: it for it in computed if it.phase is last}.values())
        self._forget()
        self._given: tuple[Sequence[Any], Sequence[Any], Mapping[int, Sequence[int]]] = (), (), {}

    def _forget(self) -> None:
        for stage in self.stages.values():
            stage.begin()
        self._arrivals: dict[Action, tuple[ReceiveTarget, list[Pending]]] = {}

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
            inputs: this rank's share of each microbatch, on the first stage.
            targets: likewise, on the last stage.
            seeds: by stage, of the random numbers of each microbatch's passes.
        """
        self._forget()
        self._given = inputs, targets, seeds
        self.walk(training=self._now.training)
        self._given = (), (), {}

    def compute(self, action: Action) -> None:
        """As `Loop.compute`."""
        self._now = stage = self.stages[action.stage]
        inputs, targets, seeds = self._given
        m = action.microbatch
        match action.phase:
            case Phase.FORWARD:
                values = inputs[m] if stage.assignment.is_first else self._input(action)
                stage.forward(m, values, seeds[action.stage][m], targets[m] if targets else None)
            case Phase.BACKWARD:
                gradients = self._gradients(action) if stage.takes_gradients(m) else ()
                with self._last_of(action):
                    stage.backward(m, gradients)
            case Phase.WEIGHTS:
                with self._last_of(action):
                    stage.weights(m)

    def _last_of(self, action: Action) -> AbstractContextManager[None]:
        return self.last_pass(action.stage) if action in self._last else nullcontext()

    # ------------------------------------------------------------------ what passes take

    def _input(self, action: Action) -> tuple[Tensor, ...]:
        """What a forward pass takes in, to be differentiated by."""
        stage = self.stages[action.stage]
        if stage.assignment.before_is_here:
            made = self.stages[action.stage - 1].outputs(action.microbatch)
            tensors = tuple(tensor.detach() for tensor in made)
        else:
            tensors = self._arrived(action).tensors()
        for tensor, wire in zip(tensors, stage.boundaries.taken, strict=True):
            tensor.requires_grad_(wire.needs_gradient and stage.training)
        return tensors

    def _gradients(self, action: Action) -> list[Tensor | None]:
        """What a backward pass takes in: of the outputs, None where nobody used one."""
        stage = self.stages[action.stage]
        if stage.assignment.behind_is_here:
            return self.stages[action.stage + 1].input_gradients(action.microbatch)
        arrived = iter(self._arrived(action).gradients())
        return [next(arrived) if wire.needs_gradient else None for wire in stage.boundaries.given]

    # ------------------------------------------------------------------ receive and send

    def receive(self, action: Action) -> None:
        """As `Loop.receive`."""
        self._now = self.stages[action.stage]
        boundaries, m = self.stages[action.stage].boundaries, action.microbatch
        if action.phase is Phase.FORWARD:
            what, wires, slices = "input", boundaries.taken, self._before[action.stage][m]
        else:
            what, wires = "gradient", _with_gradients(boundaries.given)
            slices = self._behind[action.stage][m]
        if not wires:
            return
        arrival = ReceiveTarget(wires, slices[-1].stop, slices)
        giver = action.stage - 1 if action.phase is Phase.FORWARD else action.stage
        tag = self._tag(action.phase, giver, m)
        pending = [
            self.links.receive(buffer, part.peer, tag, what=what, microbatch=m)
            for buffer, part in zip(arrival.buffers, slices, strict=True)
        ]
        self._arrivals[action] = arrival, pending

    def _arrived(self, action: Action) -> ReceiveTarget:
        arrival, pending = self._arrivals.pop(action)
        wait(pending)
        return arrival

    def send(self, action: Action) -> list[Pending]:
        """As `Loop.send`."""
        self._now = self.stages[action.stage]
        return self._send_outputs(action) if action.phase is Phase.FORWARD else self._send_gradients(action)

    def _send_outputs(self, action: Action) -> list[Pending]:
        stage, m = self.stages[action.stage], action.microbatch
        wires, slices = stage.boundaries.given, self._behind[action.stage][m]
        outputs = stage.outputs(m)
        for wire, tensor in zip(wires, outputs, strict=True):
            shape = wire.shape_of(slices[-1].stop)
            if tuple(tensor.shape) != shape:
                raise PartitionError(
                    f"stage {action.stage}: {slices[-1].stop} samples must give shape {list(shape)}, in "
                    f"proportion to others, got {described(tensor)}"
                )
        tag = self._tag(action.phase, action.stage, m)
        return self._send("output", m, wires, outputs, slices, tag)

    def _send_gradients(self, action: Action) -> list[Pending]:
        stage, m = self.stages[action.stage], action.microbatch
        taken, slices = stage.boundaries.taken, self._before[action.stage][m]
        found = zip(stage.input_gradients(m), taken, strict=True)
        tensors = [gradient for gradient, wire in found if wire.needs_gradient]
        tag = self._tag(action.phase, action.stage - 1, m)
        return self._send("gradient", m, _with_gradients(taken), tensors, slices, tag)

    def _send(
        self,
        what: str,
        microbatch: int,
        wires: Sequence[TensorSpec],
        tensors: Sequence[Tensor | None],
        slices: Sequence[SampleSlice],
        tag: int,
    ) -> list[Pending]:
        words = f"sending the {what}"
        return [
            self.links.send(packed(wires, tensors, part), part.peer, tag, what=words, microbatch=microbatch)
            for part in slices
            if wires
        ]

    def _tag(self, phase: Phase, before: int, microbatch: int) -> int:
        """Of a message over the boundary behind stage `before`."""
        return self.first_tag + 2 * (before * len(self.sizes) + microbatch) + (phase is Phase.BACKWARD)


def tags_of(stages: int, microbatches: int) -> int:
    """How many tags batches of one shape take."""
    return 2 * stages * microbatches


def _slices(sizes: Sequence[int], assignment: Assignment, *, before: bool) -> list[tuple[SampleSlice, ...]]:
    """What each microbatch exchanges with the stage before or behind, where that is on other ranks."""
    if assignment.is_first if before else assignment.is_last:
        return [() for _ in sizes]
    return [assignment.before(size) if before else assignment.behind(size) for size in sizes]


def _with_gradients(wires: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(wire for wire in wires if wire.needs_gradient)


def wait(pending: Sequence[Pending]) -> None:
    """Until all of these have ended."""
    for message in pending:
        message.wait()

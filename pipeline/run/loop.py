"""The step loop of a rank: receive, compute, send, in the order of its plan, for batches of one shape."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from arborcast.pipeline.order.actions import Phase
from arborcast.pipeline.order.messages import Step
from arborcast.pipeline.run.assignment import Assignment
from arborcast.pipeline.run.batch_norm import DeferredStatistics, statistics_once
from arborcast.pipeline.run.batches import Tensors
from arborcast.pipeline.run.boundary import Boundaries, TensorSpec
from arborcast.pipeline.run.losses import Losses
from arborcast.pipeline.run.messages import Arrival, Messenger, Pending, Slice, packed, sharing
from arborcast.pipeline.run.recorder import Recorder


@dataclass(eq=False)
class StageLoop:
    """The passes and messages of a stage on this rank; gradients add up in `.grad` of its parameters.

    Args:
        module: the layers.
        assignment: of this rank.
        boundaries: what crosses.
        sizes: samples of each microbatch.
        steps: what the stage does, one after another.
        links: to the other stages.
        losses: where those of the last stage go.
        recorder: notes what is done when.
        in_flight: microbatches whose gradients (in evaluation outputs) may be on their way at once.
        first_tag: of its messages; the next `2 * len(sizes)` belong to batches of this shape alone, so that
            those of another one, which some rank was given, are not taken for them.
        differentiating: makes the context of backward passes.
        training: whether there are backward passes.
        deferred: the running statistics that wait for the end of the batch; None without.
        doing: what this rank did last, in words.
    """

    module: nn.Module
    assignment: Assignment
    boundaries: Boundaries
    sizes: Sequence[int]
    steps: Sequence[Step]
    links: Messenger
    losses: Losses
    recorder: Recorder
    in_flight: int
    first_tag: int
    differentiating: Callable[[], AbstractContextManager[Any]]
    training: bool
    deferred: DeferredStatistics | None
    doing: str = "nothing yet"

    def __post_init__(self) -> None:
        """Work out with whom each microbatch is exchanged."""
        assignment = self.assignment
        self._taken, self._given = self.boundaries.taken, self.boundaries.given
        self._before = [() if assignment.is_first else assignment.before(size) for size in self.sizes]
        self._behind = [() if assignment.is_last else assignment.behind(size) for size in self.sizes]
        self._recomputes = self.training and assignment.plan.recompute
        self._forget()

    def _forget(self) -> None:
        self._arrivals: dict[tuple[Phase, int], tuple[Arrival, list[Pending]]] = {}
        self._passes: dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}  # inputs and outputs
        self._gradients: dict[int, list[Tensor | None]] = {}  # of inputs
        self._outputs_sent: dict[int, list[Pending]] = {}
        self._gradients_sent: deque[list[Pending]] = deque()

    def run(self, inputs: Sequence[tuple[Tensor, ...]], targets: Sequence[Any], seeds: Sequence[int]) -> None:
        """All passes and messages of a batch; `finish` is to follow.

        Args:
            inputs: this rank's share of each microbatch, on the first stage.
            targets: likewise, on the last stage.
            seeds: of the random numbers of each microbatch's passes.
        """
        self._forget()
        for step in self.steps:
            phase, m = step.action.phase, step.action.microbatch
            match step.kind, phase:
                case "receive", Phase.FORWARD:
                    self._receive(phase, m, self._taken, self._before[m])
                case "receive", Phase.BACKWARD:
                    self._receive(phase, m, _with_gradients(self._given), self._behind[m])
                case "compute", Phase.FORWARD:
                    self._forward(m, inputs[m] if self.assignment.is_first else self._received(m), seeds[m])
                    if self.assignment.is_last:
                        self._add_loss(m, targets[m])
                case "compute", Phase.BACKWARD:
                    self._backward(m)
                case "send", Phase.FORWARD:
                    self._send_outputs(m)
                case "send", Phase.BACKWARD:
                    self._send_gradients(m)

    def finish(self) -> None:
        """Wait for all that is still being sent."""
        self._wait_for_outputs(most=0)
        self._wait_for_gradients(most=0)

    # ------------------------------------------------------------------ compute

    def _forward(self, microbatch: int, inputs: tuple[Tensor, ...], seed: int) -> None:
        self.doing = f"forward pass of microbatch {microbatch}"
        torch.default_generator.manual_seed(seed)  # recomputation begins there again
        self._began_ns = time.perf_counter_ns()
        if self._recomputes:
            outputs = checkpoint(self._run, *inputs, use_reentrant=False, context_fn=self._contexts)
        else:
            outputs = self._run(*inputs)
        self._passes[microbatch] = inputs, outputs
        if not self.assignment.is_last:
            self.recorder.add("forward", microbatch, self._began_ns, time.perf_counter_ns())

    def _run(self, *inputs: Tensor) -> Any:
        """Of the last stage what the model returns, of others a tuple of tensors."""
        if self.boundaries.overwrites and (
            self._recomputes or self.assignment.is_first
        ):  # the batch is the caller's
            outputs = self.module(*(tensor.clone() for tensor in inputs))
        elif self.assignment.is_first:
            outputs = self.module(*inputs)
        else:
            outputs = self.module(*(_entered(tensor) for tensor in inputs))
        return outputs if self.assignment.is_last or isinstance(outputs, tuple) else (outputs,)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), statistics_once(self.module, self.deferred)

    def _add_loss(self, microbatch: int, targets: Tensors) -> None:
        """The loss holds what it needs of the outputs, which need not be kept."""
        inputs, outputs = self._passes.pop(microbatch)
        loss = self.losses.add(outputs, targets, microbatch)
        self.recorder.add("forward", microbatch, self._began_ns, time.perf_counter_ns())
        if self.training:
            self._passes[microbatch] = inputs, (loss,)

    def _backward(self, microbatch: int) -> None:
        self.doing = f"backward pass of microbatch {microbatch}"
        inputs, ends = self._passes.pop(microbatch)
        gradients: Sequence[Tensor | None] = [None] * len(ends)
        # Frozen layers from the first on have nothing to differentiate, and receive nothing.
        if not self.assignment.is_last and any(end.requires_grad for end in ends):
            arrived = iter(self._arrived(Phase.BACKWARD, microbatch).gradients())
            gradients = [next(arrived) if wire.needs_gradient else None for wire in self._given]
        pairs = [
            (end, gradient)
            for end, gradient in zip(ends, gradients, strict=True)
            if end.requires_grad and (self.assignment.is_last or gradient is not None)  # None: nobody used it
        ]
        if pairs:
            with self.recorder.measure("backward", microbatch), self.differentiating():
                torch.autograd.backward([end for end, _ in pairs], [it for _, it in pairs])
        if not self.assignment.is_first:
            self._gradients[microbatch] = [tensor.grad for tensor in inputs]
        _wait(self._outputs_sent.pop(microbatch, []))  # who sent a gradient back has received the output

    # ------------------------------------------------------------------ receive and send

    def _receive(
        self, phase: Phase, microbatch: int, wires: Sequence[TensorSpec], parcels: Sequence[Slice]
    ) -> None:
        """Post the receives of a microbatch's input, or of the gradient of its output."""
        if not wires:
            return
        what = "input" if phase is Phase.FORWARD else "gradient"
        arrival = Arrival(wires, parcels[-1].stop, parcels)
        pending = [
            self.links.receive(
                buffer, parcel.peer, self._tag(phase, microbatch), what=what, microbatch=microbatch
            )
            for buffer, parcel in zip(arrival.buffers, parcels, strict=True)
        ]
        self._arrivals[phase, microbatch] = arrival, pending

    def _arrived(self, phase: Phase, microbatch: int) -> Arrival:
        arrival, pending = self._arrivals.pop((phase, microbatch))
        _wait(pending)
        return arrival

    def _received(self, microbatch: int) -> tuple[Tensor, ...]:
        """A microbatch's input, to be differentiated by."""
        tensors = self._arrived(Phase.FORWARD, microbatch).tensors()
        for tensor, wire in zip(tensors, self._taken, strict=True):
            tensor.requires_grad_(wire.needs_gradient and self.training)
        return tensors

    def _send_outputs(self, microbatch: int) -> None:
        _, outputs = self._passes[microbatch]
        parcels = self._behind[microbatch]
        self._outputs_sent[microbatch] = self._send(Phase.FORWARD, microbatch, self._given, outputs, parcels)
        if not self.training:
            del self._passes[microbatch]
            self._wait_for_outputs(most=self.in_flight)

    def _send_gradients(self, microbatch: int) -> None:
        gradients = zip(self._gradients.pop(microbatch), self._taken, strict=True)
        tensors = [gradient for gradient, wire in gradients if wire.needs_gradient]
        wires, parcels = _with_gradients(self._taken), self._before[microbatch]
        self._gradients_sent.append(self._send(Phase.BACKWARD, microbatch, wires, tensors, parcels))
        # Safe even where a send ends only when it is received: orders are checked with such sends.
        self._wait_for_gradients(most=self.in_flight)

    def _send(
        self,
        phase: Phase,
        microbatch: int,
        wires: Sequence[TensorSpec],
        tensors: Sequence[Tensor | None],
        parcels: Sequence[Slice],
    ) -> list[Pending]:
        what = "sending the output" if phase is Phase.FORWARD else "sending the gradient"
        tag = self._tag(phase, microbatch)
        return [
            self.links.send(
                packed(wires, tensors, parcel), parcel.peer, tag, what=what, microbatch=microbatch
            )
            for parcel in parcels
            if wires
        ]

    def _tag(self, phase: Phase, microbatch: int) -> int:
        return self.first_tag + 2 * microbatch + (phase is Phase.BACKWARD)

    def _wait_for_outputs(self, *, most: int) -> None:
        while len(self._outputs_sent) > most:
            _wait(self._outputs_sent.pop(next(iter(self._outputs_sent))))

    def _wait_for_gradients(self, *, most: int) -> None:
        while len(self._gradients_sent) > most:
            _wait(self._gradients_sent.popleft())


class _Enter(torch.autograd.Function):
    """Identity on the same memory, so that a layer may change what the stage received in assignment."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return sharing(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _entered(tensor: Tensor) -> Tensor:
    if not tensor.requires_grad:
        return tensor
    entered: Tensor = _Enter.apply(tensor)  # type: ignore[no-untyped-call]
    return entered


def _with_gradients(wires: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    return tuple(wire for wire in wires if wire.needs_gradient)


def _wait(pending: Sequence[Pending]) -> None:
    for message in pending:
        message.wait()

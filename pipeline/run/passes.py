"""The passes of one stage on a rank, for batches of one shape: forward, backward, gradients of parameters."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from arborcast.pipeline.model.module_structure import several
from arborcast.pipeline.model.split import Second, SplitBackward
from arborcast.pipeline.order.actions import Phase
from arborcast.pipeline.run.activation_treatment import TreatedPasses
from arborcast.pipeline.run.assignment import Assignment
from arborcast.pipeline.run.batch_norm import BatchNorms, statistics_once
from arborcast.pipeline.run.batches import Tensors
from arborcast.pipeline.run.boundary import Boundaries
from arborcast.pipeline.run.devices import finish, seed
from arborcast.pipeline.run.losses import Losses
from arborcast.pipeline.run.rank_context import RankContext
from arborcast.pipeline.run.stage_messages import BoundaryMessages, sharing
from arborcast.pipeline.simulation.pass_simulator import KIND_OF


@dataclass(eq=False)
class StagePasses:
    """What a stage computes; gradients add up in `.grad` of its parameters.

    Args:
        module: the layers.
        assignment: of this rank to the stage.
        boundaries: what crosses.
        before: what is exchanged with the stage before; None where there is none on other ranks.
        behind: likewise with the one behind.
        takes_inputs: whether it takes inputs of the model, behind what the stage before gives.
        losses: where those of the last stage go.
        context: of this rank.
        training: whether there are backward passes.
        split: halves backward passes; None where they are whole.
        norms: the mode of passes with batch norm over replicas, or deferred; None without.
        doing: what it did last, in words.
    """

    module: nn.Module
    assignment: Assignment
    boundaries: Boundaries
    before: BoundaryMessages | None
    behind: BoundaryMessages | None
    takes_inputs: bool
    losses: Losses
    context: RankContext
    training: bool
    split: SplitBackward | None
    norms: BatchNorms | None
    doing: str = "nothing yet"

    def __post_init__(self) -> None:
        """No pass yet."""
        self._treated: TreatedPasses | None = None
        if self.training:
            segments = self.assignment.plan.segments(self.assignment.stage)
            self._treated = TreatedPasses(self.module, segments, self._contexts)
        self.begin()

    def begin(self) -> None:
        """A new batch."""
        self._kept: dict[int, tuple[tuple[Tensor, ...], tuple[GradientEdge | None, ...]]] = {}
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        self._gradients: dict[int, list[Tensor | None]] = {}  # of inputs
        self._later: dict[int, Second] = {}

    def forward(
        self, microbatch: int, inputs: tuple[Tensor, ...], number: int, targets: Tensors | None
    ) -> None:
        """Of the last stage with its loss; `number` seeds what it draws."""
        self.doing = f"forward pass of microbatch {microbatch}"
        began_ns = time.perf_counter_ns()
        seed(self.context.device, number)  # recomputation begins there again
        end: Callable[[Any], Any] = several
        if self.assignment.is_last:
            end = partial(self.losses.of, targets, microbatch)
        with self.norms or nullcontext():
            if self._treated is None:
                made = end(self.module(*self._entered(False, *inputs)))
            else:
                made = self._treated.forward(inputs, self._entered, end)
        outputs = (self.losses.add(made, targets, microbatch),) if self.assignment.is_last else made
        if self.training:  # only where a backward pass begins: outputs go once they have been sent
            ends = tuple(get_gradient_edge(it) if it.requires_grad else None for it in outputs)
            self._kept[microbatch] = inputs, ends
        if not self.assignment.is_last:
            self._outputs[microbatch] = outputs
        self._note(Phase.FORWARD, microbatch, began_ns)

    def outputs(self, microbatch: int) -> tuple[Tensor, ...]:
        """Of a forward pass, for the stage behind; once."""
        return self._outputs.pop(microbatch)

    def takes_gradients(self, microbatch: int) -> bool:
        """Whether gradients of its outputs come from the stage behind.

        Frozen layers from the first on have nothing to differentiate, and receive nothing.
        """
        return not self.assignment.is_last and any(it is not None for it in self._kept[microbatch][1])

    def backward(self, microbatch: int, gradients: Sequence[Tensor | None]) -> None:
        """Whole, or the first half.

        Args:
            microbatch: of the pass.
            gradients: of the outputs, None where nobody used one; empty on the last stage.
        """
        self.doing = f"backward pass of microbatch {microbatch}"
        began_ns = time.perf_counter_ns()
        inputs, ends = self._kept.pop(microbatch)
        pairs = [
            (end, gradient)
            for end, gradient in zip(ends, gradients or [None] * len(ends), strict=True)
            if end is not None and (self.assignment.is_last or gradient is not None)
        ]
        own = inputs[: len(self.boundaries.taken)]
        found: list[Tensor | None] = [None] * len(own)
        if pairs:
            roots, given = [end for end, _ in pairs], [it for _, it in pairs]
            with self.context.precision.no_autocast():
                if self.split is None:
                    torch.autograd.backward(roots, given)
                    found = [it.grad for it in own]
                else:
                    found, self._later[microbatch] = self.split.first(roots, given, own)
            self._note(Phase.BACKWARD, microbatch, began_ns)
        if not self.assignment.is_first:
            self._gradients[microbatch] = found

    def weights(self, microbatch: int) -> None:
        """The second half of a backward pass."""
        self.doing = f"gradients of parameters of microbatch {microbatch}"
        began_ns = time.perf_counter_ns()
        later = self._later.pop(microbatch, None)
        if later is not None:
            with self.context.precision.no_autocast():
                SplitBackward.second(later)
            self._note(Phase.WEIGHTS, microbatch, began_ns)

    def input_gradients(self, microbatch: int) -> list[Tensor | None]:
        """Of a backward pass, for the stage before; once."""
        return self._gradients.pop(microbatch)

    def _entered(self, again: bool, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What the layers take of the stage's inputs; `again` where they do so twice, as in a checkpoint."""
        assignment = self.assignment
        # The batch is the caller's, and what the stage before made on this rank is its own.
        is_foreign = again or assignment.is_first or assignment.before_is_here
        if self.boundaries.overwrites and is_foreign:
            return tuple(tensor.clone() for tensor in inputs)
        return inputs if assignment.is_first else tuple(_entered(tensor) for tensor in inputs)

    def _contexts(self, module: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), statistics_once(module, self.norms)

    def _note(self, phase: Phase, microbatch: int, began_ns: int) -> None:
        stage, recorder = self.assignment.stage, self.context.recorder
        if recorder.is_on:
            finish(self.context.device)
        recorder.add(KIND_OF[phase], microbatch, began_ns, time.perf_counter_ns(), stage=stage)


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

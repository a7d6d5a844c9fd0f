"""All passes of a step on this rank, for batches of any shape, and the losses that all ranks hear of.

For each new shape the boundaries are worked out and a runtime is made, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.actions import peak_in_flight
from pipeline.order import order_of
from pipeline.order.messages import with_messages
from pipeline.run.batches import Batch, Signature
from pipeline.run.boundary import FakeStage
from pipeline.run.groups import Groups
from pipeline.run.links import Links
from pipeline.run.modes import evaluating
from pipeline.run.place import Place
from pipeline.run.precision import Precision
from pipeline.run.recorder import Records
from pipeline.run.runtime import Losses, StageRuntime, forward_only
from pipeline.run.stage import ReplicaStage
from pipeline.stages import Plan

REDUCTIONS = ("mean", "sum")
"""What a loss function does over the samples that it is given."""


class Passes:
    """The passes of one rank.

    Args:
        fake: the layers of this rank and those before, for their shapes; None for a rank without work.
        module: the layers of this rank.
        plan: which rank does what.
        place: of this rank; None for one without work.
        groups: of the job.
        links: to other stages.
        precision: of passes and losses.
        recorder: notes what is done when.
        loss_fn: of output and targets, over the samples that it is given.
        loss_reduction: one of `REDUCTIONS`.
        accumulate: how many batches one update is for.
        on_gradients: called when this rank's gradients of a batch are complete.
    """

    def __init__(
        self,
        fake: FakeStage | None,
        module: nn.Module,
        plan: Plan,
        place: Place | None,
        groups: Groups,
        links: Links,
        precision: Precision,
        recorder: Records,
        *,
        loss_fn: Callable[[Any, Any], Tensor],
        loss_reduction: str,
        accumulate: int,
        on_gradients: Callable[[], None],
    ) -> None:
        self._fake = fake
        self._module = module
        self._plan = plan
        self._place = place
        self._groups = groups
        self._links = links
        self._precision = precision
        self._recorder = recorder
        self._loss_fn = loss_fn
        self._is_mean = loss_reduction == "mean"
        self._accumulate = accumulate
        self._on_gradients = on_gradients
        self._order = order_of(plan)
        self._runtimes: dict[Signature, tuple[ReplicaStage, Losses, StageRuntime] | None] = {}
        self._stage: ReplicaStage | None = None
        self._doing: str | None = None
        self._sums = torch.zeros(0)
        self._sum_work: dist.Work | None = None

    @property
    def doing(self) -> str:
        """What this rank did last, in words."""
        if self._doing is not None or self._stage is None:
            return self._doing or "waiting for the others"
        return self._stage.doing

    def knows(self, signature: Signature) -> bool:
        """Whether there was a batch like it."""
        return signature in self._runtimes

    def prepare(self, batch: Batch, signature: Signature) -> None:
        """Make ready for batches of one shape.

        Raises:
            PartitionError: what crosses the boundaries of this stage cannot be known.
        """
        place = self._place
        if place is None or self._fake is None:
            self._runtimes[signature] = None
            return
        self._doing = "finding the shapes of what crosses boundaries"
        training = signature.training
        boundaries = self._fake.boundaries(
            batch.inputs,
            [place.count(size) for size in batch.sizes],
            training=training,
            autocast=self._precision.autocast,
        )
        order = self._order if training else forward_only(self._order)
        stage = ReplicaStage(
            self._module,
            place,
            boundaries,
            batch.sizes,
            self._links,
            alone=self._groups.alone,
            recorder=self._recorder,
            in_flight=peak_in_flight(self._order[place.stage]) + 1 if training else 2,
            first_tag=2 * len(batch.sizes) * len(self._runtimes),
            differentiating=self._precision.no_autocast,
            training=training,
            reduce=lambda: self._after_backward(batch.sizes, losses),
        )
        divisor = batch.samples * self._accumulate
        weights = [place.count(size) / divisor if self._is_mean else 1.0 for size in batch.sizes]
        losses = Losses(
            self._loss_fn,
            weights,
            self._precision.scale,
            self._precision.autocast,
            on_last=lambda: None if training else self._start_sum(batch.sizes, losses),
        )
        runtime = StageRuntime(stage, with_messages(order)[place.stage], losses)
        self._runtimes[signature] = stage, losses, runtime

    def run(self, batch: Batch, signature: Signature) -> None:
        """All passes of a batch; `finish` is to follow."""
        found = self._runtimes[signature]
        if found is None:
            self._start_sum(batch.sizes, None)
            return
        stage, _, runtime = found
        self._stage, self._doing, place = stage, None, stage.place
        inputs: Sequence[tuple[Tensor, ...]] = [()] * len(batch.sizes)
        targets: Sequence[Any] = [None] * len(batch.sizes)
        parts = [place.share(size) for size in batch.sizes]
        if place.is_first:
            inputs = [batch.inputs_of(m, share) for m, share in enumerate(parts)]
        if place.is_last:
            targets = [batch.targets_of(m, share) for m, share in enumerate(parts)]
        mode = nullcontext() if signature.training else evaluating(self._module)
        with mode, torch.set_grad_enabled(signature.training), self._precision.autocast():
            runtime.run(inputs, targets)

    def finish(self, batch: Batch) -> tuple[float, tuple[float, ...]]:
        """Wait for what is still on its way: the loss of the batch, and those of its microbatches."""
        if self._stage is not None:
            self._stage.finish()
        self._doing = "hearing of the losses"
        assert self._sum_work is not None, "run comes before"
        self._sum_work.wait()
        self._sum_work = None
        self._doing = "updating weights"
        losses: list[float] = self._sums.tolist()
        if not self._is_mean:
            return sum(losses), tuple(losses)
        whole = sum(loss * size for loss, size in zip(losses, batch.sizes, strict=True))
        return whole / batch.samples, tuple(losses)

    def _after_backward(self, sizes: Sequence[int], losses: Losses) -> None:
        self._on_gradients()
        self._start_sum(sizes, losses)

    def _start_sum(self, sizes: Sequence[int], losses: Losses | None) -> None:
        """Begin to add the losses of all replicas of the last stage, by microbatch.

        Each rank begins when its passes are done, so that who hears of the losses knows that all gradients
        are complete: either all ranks change their weights, or none.
        """
        self._sums = torch.zeros(len(sizes), dtype=torch.float64)
        if self._place is not None and self._place.is_last and losses is not None:
            for microbatch, value in losses.values.items():
                share = self._place.count(sizes[microbatch]) / sizes[microbatch] if self._is_mean else 1.0
                self._sums[microbatch] = value.reshape(()).double() * share
            losses.values.clear()
        self._sum_work = dist.all_reduce(self._sums, group=self._groups.job, async_op=True)

"""All passes of a step on this rank, for batches of any shape, and the losses that all ranks hear of.

For each new shape the boundaries are worked out and a runtime is made, once.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arborcast.pipeline.errors import BatchError
from arborcast.pipeline.model.layered import in_mode
from arborcast.pipeline.model.module_structure import flatten
from arborcast.pipeline.model.split import SplitBackward
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.order.actions import forwards, most_on_their_way
from arborcast.pipeline.order.pass_messages import WorkerStep, with_messages
from arborcast.pipeline.run.assignment import Assignment
from arborcast.pipeline.run.batch_norm import BatchNorms
from arborcast.pipeline.run.batches import Batch, Signature, spread_dims
from arborcast.pipeline.run.boundary import KEPT_SHAPES, Boundaries, FakeStage
from arborcast.pipeline.run.devices import HOST, drawing_apart, moved
from arborcast.pipeline.run.loop import StepLoop
from arborcast.pipeline.run.losses import Losses
from arborcast.pipeline.run.passes import StagePasses
from arborcast.pipeline.run.rank_context import RankContext
from arborcast.pipeline.run.stage_messages import BoundaryMessages, Messenger, TagOf
from arborcast.pipeline.run.update import Update
from arborcast.synth.errors import InputError


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """What all ranks hear of a batch.

    Attributes:
        loss: of the batch.
        losses: of its microbatches; not a number where nothing in one counts.
        weight: of all samples, where the loss function returns pairs; None where it returns one number.
        metrics: of the batch, by name.
    """

    loss: float
    losses: tuple[float, ...]
    weight: float | None
    metrics: dict[str, float]


class LocalStage(ABC):
    """A stage of this rank: what runs it, a module or divided operators.

    Attributes:
        assignment: of this rank to it.
        module: takes what the stage before gives, then its inputs of the model; gives what crosses to the
            stage behind, or on the last stage what `loss_of` or the loss function takes.
        takes_inputs: whether it takes inputs of the model.
        checks_loss: whether what `loss_of` promises can be checked by calling it for other samples.
    """

    assignment: Assignment
    module: nn.Module
    takes_inputs: bool
    checks_loss: bool = True

    @abstractmethod
    def follow(self, trained: Mapping[str, bool]) -> None:
        """Take on which parameters of the model are trained, by name."""

    @abstractmethod
    def boundaries(self, batch: Batch, *, training: bool) -> Boundaries:
        """What crosses its boundaries.

        Raises:
            PartitionError: that cannot be known.
        """

    @abstractmethod
    def messages(
        self, boundaries: Boundaries, sizes: Sequence[int], links: Messenger, tag_of: TagOf, *, behind: bool
    ) -> BoundaryMessages:
        """What it exchanges with the stage before, or behind, which is on other ranks."""

    @abstractmethod
    def begin(self, batch: Batch) -> None:
        """Before the passes of a batch."""

    def split(self) -> SplitBackward:
        """What halves its backward passes."""
        return SplitBackward(self.module.parameters())

    @abstractmethod
    def loss_of(self, output: Any, labels: Any) -> Tensor:
        """The share's part of the loss that the model itself computes, on the last stage."""


@dataclass(eq=False)
class ModuleStage(LocalStage):
    """The layers of a stage as a module, of a replica with its share of the samples.

    Args:
        assignment: of this rank.
        module: the layers.
        fake: these and those before, for their shapes.
        context: of this rank.
    """

    assignment: Assignment
    module: nn.Module
    fake: FakeStage
    context: RankContext

    def __post_init__(self) -> None:
        """Where the model's inputs come in."""
        self.takes_inputs = self.assignment.is_first

    def follow(self, trained: Mapping[str, bool]) -> None:
        """As `LocalStage.follow`."""
        self.fake.follow(trained)

    def boundaries(self, batch: Batch, *, training: bool) -> Boundaries:
        """As `LocalStage.boundaries`."""
        counts = [self.assignment.count(size) for size in batch.sizes]
        autocast = self.context.precision.autocast
        return self.fake.boundaries(batch.inputs, counts, training=training, autocast=autocast)

    def messages(
        self, boundaries: Boundaries, sizes: Sequence[int], links: Messenger, tag_of: TagOf, *, behind: bool
    ) -> BoundaryMessages:
        """As `LocalStage.messages`."""
        own = self.assignment
        slices = [own.slices(size, behind=behind) for size in sizes]
        wires = boundaries.given if behind else boundaries.taken
        counts = [own.count(size) for size in sizes]
        return BoundaryMessages(
            f"stage {own.stage}", wires, lambda _, m, back: slices[m], links, tag_of, counts
        )

    def begin(self, batch: Batch) -> None:
        """As `LocalStage.begin`."""
        loss: Any = self.module
        if self.assignment.is_last and self.context.options.loss_fn is None:
            loss.begin_loss(moved(batch.targets, self.context.device), batch.samples)

    def loss_of(self, output: Any, labels: Any) -> Tensor:
        """As `LocalStage.loss_of`."""
        loss: Any = self.module
        made: Tensor = loss.loss(output, labels)
        return made


@dataclass(eq=False)
class StepExecutor:
    """The passes of one rank.

    Args:
        parts: the stages of this rank; none of one without work.
        module: the layers of all of them.
        update: of its parameters.
        context: of this rank.
        output_dims: which dimension of each tensor of the model's output counts samples; one for all.
        norms: the mode of passes with batch norm over replicas, or deferred; None without.
    """

    parts: Sequence[LocalStage]
    module: nn.Module
    update: Update
    context: RankContext
    output_dims: Sequence[int] = (0,)
    norms: BatchNorms | None = None

    def __post_init__(self) -> None:
        """No batch yet."""
        context = self.context
        self.place, self.options, self.precision = context.place, context.options, context.precision
        self._device = context.device
        self._job = context.groups.job
        self.plan = self.place.column
        self._loops: dict[Signature, StepLoop | None] = {}  # the one that was used last is last
        self._made = 0
        self._steps: dict[bool, Sequence[WorkerStep]] = {}  # of this rank, by whether in training
        self._splits: dict[int, SplitBackward] = {}
        self._loop: StepLoop | None = None
        self._doing: str | None = None
        self._fingerprints: tuple[int | None, int | None] = None, None
        self._sums = torch.zeros(0)
        self._sum_work: dist.Work | None = None

    @property
    def doing(self) -> str:
        """What this rank did last, in words."""
        if self._doing is not None or self._loop is None:
            return self._doing or "waiting for the others"
        return self._loop.doing

    def knows(self, signature: Signature) -> bool:
        """Whether there was a batch like it."""
        return signature in self._loops

    def follow(self, trained: Mapping[str, bool]) -> None:
        """Take on which parameters of the model are trained: only gradients of those, and before, cross."""
        self._splits.clear()
        for part in self.parts:
            part.follow(trained)

    def prepare(self, batch: Batch, signature: Signature) -> None:
        """Make ready for batches of a new shape; of more than `KEPT_SHAPES` the oldest is forgotten.

        Raises:
            PartitionError: what crosses the boundaries of a stage here cannot be known.
        """
        if self.knows(signature):
            return
        self._made += 1
        if len(self._loops) >= KEPT_SHAPES:
            del self._loops[next(iter(self._loops))]
        if not self.parts:
            self._loops[signature] = None
            return
        self._doing = "finding the shapes of what crosses boundaries"
        training = signature.training
        if training not in self._steps:
            passes = self.plan.passes if training else forwards(self.plan.passes)
            worker = self.plan.worker_of(self.parts[0].assignment.ranks[0])
            assert worker is not None, "it has work"
            self._steps[training] = with_messages(passes)[worker]
        steps = self._steps[training]
        in_flight = most_on_their_way([it.action for it in steps if it.kind == "compute"])
        # Those of forgotten shapes may be used again: all their messages have ended.
        first_tag = self._tags_of_a_shape(len(batch.sizes)) * (self._made % (2 * KEPT_SHAPES))
        stages = {it.assignment.stage: self._passes_of(it, batch, training, first_tag) for it in self.parts}
        ends = [end for it in stages.values() for end in (it.before, it.behind) if end is not None]
        self.context.links.connect(peer for end in ends for peer in end.peers(len(batch.sizes)))
        self._loops[signature] = StepLoop(
            stages,
            batch.sizes,
            steps,
            in_flight=in_flight if training else 2,
            last_pass=self.update.last_pass,
        )

    def _tags_of_a_shape(self, microbatches: int) -> int:
        """How many tags batches of one shape take, so that no message of another one is taken for theirs."""
        return 4 * len(self.plan.stages) * microbatches

    def _passes_of(self, part: LocalStage, batch: Batch, training: bool, first_tag: int) -> StagePasses:
        assignment, count = part.assignment, len(batch.sizes)
        boundaries = part.boundaries(batch, training=training)

        def messages(before: int, *, behind: bool, is_here: bool) -> BoundaryMessages | None:
            """Over the boundary behind stage `before`."""
            if is_here or not 0 <= before < len(self.plan.stages) - 1:
                return None

            def tag_of(number: int, m: int, back: bool) -> int:
                return first_tag + 2 * ((2 * before + number) * count + m) + back

            return part.messages(boundaries, batch.sizes, self.context.links, tag_of, behind=behind)

        losses = Losses(
            part.loss_of if self.options.loss_fn is None else self.options.loss_fn,
            self.options.reduction,
            [assignment.count(size) for size in batch.sizes],
            batch.samples * self.options.accumulate,
            self.precision.scale,
            self.precision.autocast,
            check=self.options.check_loss and part.checks_loss,
            dims=self.output_dims,
            batches=self.options.accumulate,
            metrics=self.options.metrics,
            keeps=self.options.keep_outputs,
        )
        split: SplitBackward | None = None
        if training and ORDERS[self.plan.order].splits:
            split = self._splits.setdefault(assignment.stage, part.split())
        return StagePasses(
            part.module,
            assignment,
            boundaries,
            messages(assignment.stage - 1, behind=False, is_here=assignment.before_is_here),
            messages(assignment.stage, behind=True, is_here=assignment.behind_is_here),
            part.takes_inputs,
            losses,
            self.context,
            training=training,
            split=split,
            norms=self.norms,
        )

    def run(self, batch: Batch, signature: Signature, step: int, unit: float) -> None:
        """All passes of a batch; `finish` is to follow.

        Args:
            batch: what this rank was given; of others what it needs of them.
            signature: the same on all ranks.
            step: how many batches were trained with before.
            unit: that sums of losses are divided by in this update.
        """
        loop = self._loops[signature] = self._loops.pop(signature)
        self._fingerprints = None, None
        if loop is None:
            self._start_sum(batch.sizes, None)
            return
        self._loop, self._doing = loop, None
        inputs: Sequence[tuple[Tensor, ...]] = ()
        targets: Sequence[Any] = ()
        losses: Losses | None = None
        own = self.parts[0].assignment
        shares = [own.share(size) for size in batch.sizes]
        last = loop.stages.get(len(self.plan.stages) - 1)
        takes_inputs = any(it.takes_inputs for it in self.parts)
        if takes_inputs or last is not None:
            self._fingerprints = batch.fingerprints
        if takes_inputs:
            inputs = [moved(batch.inputs_of(m, share), self._device) for m, share in enumerate(shares)]
        if last is not None:
            given = [batch.targets_of(m, share) for m, share in enumerate(shares)]
            targets = [moved(it, self._device) for it in given]
            losses = last.losses
            losses.begin(moved(batch.targets_of(0, (0, 1)), self._device), unit, given)
        with self._mode(signature.training):
            for part in self.parts:
                part.begin(batch)
        what = "train" if signature.training else "evaluate"
        starts = [at + share[0] for at, share in zip(accumulate((0, *batch.sizes)), shares, strict=False)]
        seeds = {
            stage: [
                # Divided stages draw alike what several of them make for themselves.
                _seed_of(
                    self.options.seed,
                    what,
                    step,
                    0 if self.place.is_divided else self.plan.stages[stage].start,
                    at,
                )
                for at in starts
            ]
            for stage in loop.stages
        }
        # Random numbers that the caller draws, such as batches, must stay alike on all ranks.
        norms = self.norms if signature.training else None
        if norms is not None:
            norms.begin()
        with (
            drawing_apart(self._device),
            self._mode(signature.training),
            torch.set_grad_enabled(signature.training),
            self.precision.autocast(),
        ):
            loop.run(inputs, targets, seeds)
        if norms is not None:
            norms.end(len(batch.sizes))
        if signature.training:
            self._doing = f"summing gradients over replicas {', '.join(map(str, sorted(own.ranks)))}"
            self.update.gradients_complete()
        self._start_sum(batch.sizes, losses)

    def _mode(self, training: bool) -> AbstractContextManager[None]:
        return nullcontext() if training else in_mode(self.module, False)

    def finish(self, batch: Batch) -> BatchOutcome:
        """Wait for what is still on its way.

        Raises:
            BatchError: the first and the last stage were given different data; on all ranks.
            InputError: some losses came with a weight and some without, or the weights do not add up to a
                positive number; on all ranks.
        """
        if self._loop is not None:
            self._loop.finish()
        self._doing = "hearing of the losses"
        assert self._sum_work is not None, "run comes before"
        self._sum_work.wait()
        self._sum_work = None
        self._doing = "updating weights"
        count, others = len(batch.sizes), len(self.options.metrics)
        *found, checks = torch.split(self._sums, [count, others, count, others, 1, 6])
        sums, values, weights, counted, pairs = found
        if any(n * squares != total**2 for n, total, squares in checks.view(2, 3).tolist()):
            # Each is equal only where all are equal.
            ranks = ", ".join(map(str, self.place.ends))
            where = "" if self.place.is_divided else " of the first and the last stage"
            raise BatchError(
                "batch: all ranks must be given the same data (random ones by the same seed), got other "
                f"values on some of ranks {ranks}{where}"
            )
        calls = count * self.plan.stages[-1].replicas
        if pairs.item() not in (0, calls):
            raise InputError(
                "loss_fn: must return one number always or a pair always, got "
                f"{int(pairs)} pairs for {calls} calls in a batch"
            )
        metrics = dict(zip(self.options.metrics, (values / counted).tolist(), strict=True))
        if self.options.reduction != "mean":
            return BatchOutcome(sums.sum().item(), tuple(sums.tolist()), None, metrics)
        weight = weights.sum().item()
        if not (weight > 0 and math.isfinite(weight)):
            raise InputError(
                f"loss_fn: weights must add up to a positive number over a batch, got {weight:g}"
            )
        whole = sums.sum().item() / weight
        return BatchOutcome(
            whole, tuple((sums / weights).tolist()), weight if pairs.item() else None, metrics
        )

    def gather_outputs(self) -> Any:
        """The outputs of the last batch, on every rank; every rank calls it.

        Raises:
            InputError: there was no batch yet; on all ranks.
        """
        kept: list[tuple[int, Any]] = []
        last = None if self._loop is None else self._loop.stages.get(len(self.plan.stages) - 1)
        if self._loop is not None and last is not None and self.place.is_counted:
            sizes = self._loop.sizes
            starts = accumulate(sizes, initial=0)
            kept = [
                (start + last.assignment.share(size)[0], moved(last.losses.outputs[m], HOST))
                for m, (start, size) in enumerate(zip(starts, sizes, strict=False))
            ]
        found: list[Any] = [None] * dist.get_world_size(self._job)
        dist.all_gather_object(found, kept, group=self._job)
        parts = [flatten(it) for _, it in sorted((it for each in found for it in each), key=_start_of)]
        if not parts:
            raise InputError("outputs: must follow a step or an evaluation, got none yet")
        dims = spread_dims(self.output_dims, len(parts[0][0]))
        together = zip(*(tensors for tensors, _ in parts), strict=True)
        whole = (torch.cat(pieces, dim) for pieces, dim in zip(together, dims, strict=True))
        return parts[0][1].rebuild(whole)

    def _start_sum(self, sizes: Sequence[int], losses: Losses | None) -> None:
        """Begin to add the losses of all replicas of the last stage, by microbatch.

        Behind them come metrics, what divides losses and metrics, how many of the losses are pairs, and what
        tells whether all were given the same data: for inputs and targets how many ranks have them, and the
        sum of their fingerprints and of the squares. Each rank begins when its passes are done, so that who
        hears of the losses knows that all gradients are complete: either all ranks change their weights, or
        none.
        """
        count, others = len(sizes), len(self.options.metrics)
        self._sums = torch.zeros(2 * (count + others) + 7, dtype=torch.float64)
        if losses is not None and self.place.is_counted:
            self._sums[: 2 * (count + others)] = losses.totals()
            self._sums[-7] = losses.pairs
        for index, mark in enumerate(self._fingerprints):
            if mark is not None:
                self._sums[-6:].view(2, 3)[index] = torch.tensor([1, mark, mark**2])
        self._sum_work = dist.all_reduce(self._sums, group=self._job, async_op=True)


def _start_of(part: tuple[int, Any]) -> int:
    return part[0]


def _seed_of(*key: object) -> int:
    """Of the random numbers of a forward pass: another one for every key."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")

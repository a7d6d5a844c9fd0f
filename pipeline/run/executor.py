"""All passes of a step on this rank, for batches of any shape, and the losses that all ranks hear of.

For each new shape the boundaries are worked out and a runtime is made, once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
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
from arborcast.pipeline.order.actions import forwards, peak_in_flight
from arborcast.pipeline.order.pass_messages import WorkerStep, with_messages
from arborcast.pipeline.run.assignment import Assignment, RankAssignment
from arborcast.pipeline.run.batch_norm import DeferredStatistics
from arborcast.pipeline.run.batches import Batch, Signature, spread_dims
from arborcast.pipeline.run.boundary import KEPT_SHAPES, FakeStage
from arborcast.pipeline.run.loop import StepLoop, tags_of
from arborcast.pipeline.run.losses import Losses
from arborcast.pipeline.run.passes import StagePasses
from arborcast.pipeline.run.precision import Precision
from arborcast.pipeline.run.recorder import PassRecorder
from arborcast.pipeline.run.stage_groups import Groups
from arborcast.pipeline.run.stage_messages import Messenger
from arborcast.pipeline.run.training_options import TrainingOptions
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


@dataclass(frozen=True, slots=True)
class LocalStage:
    """A stage of this rank.

    Attributes:
        assignment: of this rank to it.
        module: its layers.
        fake: these and those before, for their shapes.
    """

    assignment: Assignment
    module: nn.Module
    fake: FakeStage


@dataclass(eq=False)
class StepExecutor:
    """The passes of one rank.

    Args:
        parts: the stages of this rank; none of one without work.
        module: the layers of all of them.
        place: of this rank.
        options: of the training.
        groups: of the job.
        links: to other stages.
        precision: of passes and losses.
        recorder: notes what is done when.
        output_dims: which dimension of each tensor of the model's output counts samples; one for all.
        deferred: the running statistics that wait for the end of the batch; None without.
        last_pass: makes the context of the last pass of a stage that gives gradients of parameters.
        on_gradients: called when this rank's gradients of a batch are complete.

    Attributes:
        last: the module of the last stage; None on a rank without it.
    """

    parts: Sequence[LocalStage]
    module: nn.Module
    place: RankAssignment
    options: TrainingOptions
    groups: Groups
    links: Messenger
    precision: Precision
    recorder: PassRecorder
    output_dims: Sequence[int]
    deferred: DeferredStatistics | None
    last_pass: Callable[[int], AbstractContextManager[None]]
    on_gradients: Callable[[], None]

    def __post_init__(self) -> None:
        """No batch yet."""
        self.plan = self.place.column
        self.last: Any = next((it.module for it in self.parts if it.assignment.is_last), None)
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
            part.fake.follow(trained)

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
        in_flight = peak_in_flight([it.action for it in steps if it.kind == "compute"]) + 1
        self._loops[signature] = StepLoop(
            {part.assignment.stage: self._passes_of(part, batch, training) for part in self.parts},
            batch.sizes,
            steps,
            self.links,
            in_flight=in_flight if training else 2,
            # Those of forgotten shapes may be used again: all their messages have ended.
            first_tag=tags_of(len(self.plan.stages), len(batch.sizes)) * (self._made % (2 * KEPT_SHAPES)),
            last_pass=self.last_pass,
        )

    def _passes_of(self, part: LocalStage, batch: Batch, training: bool) -> StagePasses:
        assignment = part.assignment
        boundaries = part.fake.boundaries(
            batch.inputs,
            [assignment.count(size) for size in batch.sizes],
            training=training,
            autocast=self.precision.autocast,
        )
        losses = Losses(
            getattr(self.last, "loss", _no_loss) if self.options.loss_fn is None else self.options.loss_fn,
            self.options.reduction,
            [assignment.count(size) for size in batch.sizes],
            batch.samples * self.options.accumulate,
            self.precision.scale,
            self.precision.autocast,
            check=self.options.check_loss,
            dims=self.output_dims,
            batches=self.options.accumulate,
            metrics=self.options.metrics,
            keeps=self.options.keep_outputs,
        )
        split: SplitBackward | None = None
        if training and ORDERS[self.plan.order].splits:
            split = self._splits.setdefault(assignment.stage, SplitBackward(part.module.parameters()))
        return StagePasses(
            part.module,
            assignment,
            boundaries,
            losses,
            self.recorder,
            differentiating=self.precision.no_autocast,
            training=training,
            split=split,
            deferred=self.deferred,
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
        first, last = loop.stages.get(0), loop.stages.get(len(self.plan.stages) - 1)
        if first is not None or last is not None:
            self._fingerprints = batch.fingerprints
        if first is not None:
            inputs = [batch.inputs_of(m, share) for m, share in enumerate(shares)]
        if last is not None:
            targets = [batch.targets_of(m, share) for m, share in enumerate(shares)]
            losses = last.losses
            losses.begin(batch.targets_of(0, (0, 1)), unit)
            if self.options.loss_fn is None:
                with nullcontext() if signature.training else in_mode(self.last, False):
                    self.last.begin_loss(batch.targets, batch.samples)
        what = "train" if signature.training else "evaluate"
        starts = [at + share[0] for at, share in zip(accumulate((0, *batch.sizes)), shares, strict=False)]
        seeds = {
            stage: [
                _seed_of(self.options.seed, what, step, self.plan.stages[stage].start, at) for at in starts
            ]
            for stage in loop.stages
        }
        mode = nullcontext() if signature.training else in_mode(self.module, False)
        # Random numbers that the caller draws, such as batches, must stay alike on all ranks.
        apart = torch.random.fork_rng(devices=[])
        deferred = self.deferred if signature.training else None
        if deferred is not None:
            deferred.begin()
        with apart, mode, torch.set_grad_enabled(signature.training), self.precision.autocast():
            loop.run(inputs, targets, seeds)
        if deferred is not None:
            deferred.end(len(batch.sizes))
        if signature.training:
            self._doing = f"summing gradients over replicas {', '.join(map(str, sorted(own.ranks)))}"
            self.on_gradients()
        self._start_sum(batch.sizes, losses)

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
        count = len(batch.sizes)
        *others, checks = torch.split(
            self._sums, [count, count, len(self.options.metrics), len(self.options.metrics), 1, 6]
        )
        sums, weights, values, counted, pairs = others
        if any(n * squares != total**2 for n, total, squares in checks.view(2, 3).tolist()):
            # Each is equal only where all are equal.
            ranks = ", ".join(map(str, self.place.ends))
            raise BatchError(
                "batch: all ranks must be given the same data (random ones by the same seed), got other "
                f"values on some of ranks {ranks} of the first and the last stage"
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
        if self._loop is not None and self.last is not None and self.place.is_counted:
            last = self._loop.stages[len(self.plan.stages) - 1]
            sizes = self._loop.sizes
            starts = accumulate(sizes, initial=0)
            kept = [
                (start + last.assignment.share(size)[0], last.losses.outputs[m])
                for m, (start, size) in enumerate(zip(starts, sizes, strict=False))
            ]
        found: list[Any] = [None] * dist.get_world_size(self.groups.job)
        dist.all_gather_object(found, kept, group=self.groups.job)
        parts = [flatten(it) for _, it in sorted((it for each in found for it in each), key=_start_of)]
        if not parts:
            raise InputError("outputs: must follow a step or an evaluation, got none yet")
        dims = spread_dims(self.output_dims, len(parts[0][0]))
        together = zip(*(tensors for tensors, _ in parts), strict=True)
        whole = (torch.cat(pieces, dim) for pieces, dim in zip(together, dims, strict=True))
        return parts[0][1].rebuild(whole)

    def _start_sum(self, sizes: Sequence[int], losses: Losses | None) -> None:
        """Begin to add the losses of all replicas of the last stage, by microbatch.

        Behind them come their weights, metrics and theirs, how many of the losses are pairs, and what tells
        whether all were given the same data: for inputs and targets how many ranks have them, and the sum of
        their fingerprints and of the squares. Each rank begins when its passes are done, so that who hears of
        the losses knows that all gradients are complete: either all ranks change their weights, or none.
        """
        count, others = len(sizes), len(self.options.metrics)
        self._sums = torch.zeros(2 * (count + others) + 7, dtype=torch.float64)
        if losses is not None and self.place.is_counted:
            for microbatch, value in losses.sums.items():
                self._sums[microbatch] = value
                self._sums[count + microbatch] = losses.weights[microbatch]
            for index, (value, weight) in enumerate(losses.measured.values(), 2 * count):
                self._sums[index] = value
                self._sums[index + others] = weight
            self._sums[-7] = losses.pairs
        for index, mark in enumerate(self._fingerprints):
            if mark is not None:
                self._sums[-6:].view(2, 3)[index] = torch.tensor([1, mark, mark**2])
        self._sum_work = dist.all_reduce(self._sums, group=self.groups.job, async_op=True)


def _start_of(part: tuple[int, Any]) -> int:
    return part[0]


def _no_loss(outputs: Any, labels: Any) -> Tensor:
    raise AssertionError("only the last stage has a loss")


def _seed_of(*key: object) -> int:
    """Of the random numbers of a forward pass: another one for every key."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")

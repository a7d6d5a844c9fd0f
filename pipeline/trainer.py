"""Trains a model by a plan, one process per rank, as if it were trained serially.

    trainer = pipeline.Trainer(model, plan, loss_fn, lambda parameters: torch.optim.Adam(parameters))
    for inputs, targets in batches:                # whole batches, the same on every rank that needs them
        loss = trainer.step(inputs, targets)       # of the whole batch, the same on every rank

Every rank runs this; `torch.distributed` must be initialised before.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arborcast.pipeline.errors import BatchError
from arborcast.pipeline.model.layered import Layered
from arborcast.pipeline.model.traced.model import Traced
from arborcast.pipeline.run import checkpoints
from arborcast.pipeline.run.assignment import RankAssignment
from arborcast.pipeline.run.batch_negotiation import BatchNegotiation
from arborcast.pipeline.run.batches import Tensors
from arborcast.pipeline.run.devices import device_of
from arborcast.pipeline.run.distributed_batches import DistributedBatches
from arborcast.pipeline.run.failures import ConfigBarrier, FailureBroadcast
from arborcast.pipeline.run.initial_weights import Weights
from arborcast.pipeline.run.local_model import LocalModel
from arborcast.pipeline.run.losses import LossFunction
from arborcast.pipeline.run.precision import Precision
from arborcast.pipeline.run.prepared_layers import Prepare
from arborcast.pipeline.run.rank_context import RankContext
from arborcast.pipeline.run.recorder import PassRecorder
from arborcast.pipeline.run.stage_groups import Groups, fabric_of
from arborcast.pipeline.run.stage_messages import MessageCounts, Messenger
from arborcast.pipeline.run.training_options import OptimizerOf, TrainingOptions, check_job, words_of_plan
from arborcast.pipeline.sharding.evaluation import CollectiveCall
from arborcast.pipeline.simulation.timeline import Timeline
from arborcast.pipeline.stages import Plan
from arborcast.synth.errors import InputError
from arborcast.synth.topology import Topology

_numbers = itertools.count()
"""Of the trainers of this process: all ranks make them in the same order."""


class Trainer:
    """One rank's part in a training.

    Args:
        model: that can be cut between its layers, such as a `Divisible`; any other module is traced with
            the inputs of the first batch. Every rank holds it all when it makes its trainer; afterwards only
            the layers of its own stage are used. The weights are those of each stage's first rank. Parameters
            may be frozen and unfrozen between updates, in the whole model and on every rank alike.
        plan: which layers on which ranks; a rank of the job that it does not name only hears of losses. One
            that divides operators does so over the mesh of each stage, and moves every tensor by the
            collectives that it priced (`calls`): for a model that was traced with its loss, of which a
            batch's must be the mean of its microbatches'; every rank with work is given whole batches,
            parameters in `module` are `DTensor`s, divided as their updates are.
        loss_fn: of the output and the targets of some samples; returns one number, their mean, or a pair:
            the sum of their losses, and the weight that is to divide the sum over all samples of an update
            (of all its batches, where it accumulates), such as the number of tokens that count. None for a
            model that returns its loss (labels among its inputs): training is by the loss that it has of
            whole batches. None, too, for one that was traced with a loss. Where a plan recomputes the last
            layers, it is called once more in the backward pass.
        optimizer: called with the list of a stage's parameters; or an optimizer of the whole model's, which
            keeps those of this rank's stage only (so that schedulers of learning rates work as they are).
        collectives: what sums gradients over the replicas of a stage: "synth" for synthesized schedules,
            "gloo" for gloo's.
        topology: of the job, a spec or a value; None for the plan's, or what ARBORCAST_TOPOLOGY says.
        loss_reduction: "mean", or "sum" for a `loss_fn` that adds the losses of its samples up.
        check_loss: whether to see that `loss_fn` is what it is said to be: for every microbatch of the first
            four batches of a shape and wherever targets are below or above all that were checked (as padding
            often is), then for one microbatch in 17. A check calls it two or three times more, at some five
            times its cost. Not for a function that draws random numbers.
        seed: of the random numbers of passes (dropout): every step, microbatch, replica and stage draws its
            own, the same ones whenever a training with this plan and seed is repeated. Also of the first
            values of a model on "meta", which do not depend on the plan (`pipeline.initialise`).
        batch_norm: normalises each microbatch (over all replicas). Running statistics change with each
            ("microbatch"), or once a batch by the mean and variance over all of it ("deferred").
        accumulate: how many batches an update is for. The mean of their losses counts ("sum": the sum;
            pairs: the sum over the sum of weights).
        clip_norm: the largest norm of all gradients of the model; None for no limit.
        precision: "float32", "bfloat16" or "float16", or a `Precision`; None is "float32".
        prepare: makes of the layers of a stage, and the `DeviceMesh` of its ranks, layers that these share:
            by torch's `parallelize_module` along the axis "tensor", by FSDP2's `fully_shard` along "data". It
            returns a module with the same names. Layers are as `model` cuts them: a `Divisible`'s are the
            caller's modules; of a traced model there are parameters by name, and no modules.
        tensor_ranks: how many ranks share each replica of a stage, each next to the other in its `ranks`; of
            all stages alike. They are given the same data.
        metrics: what else to tell of output and targets, by name: functions as `loss_fn`, of one number, a
            mean over samples, or of a pair, a sum and its weight. Called once for each share of a microbatch,
            in training and in evaluation; not for a model that returns its loss.
        keep_outputs: whether `outputs` has those of the last batch.
        timeout_s: after which waiting for another rank fails; longer than any step takes.
        start_timeout_s: the same at the start, where some ranks may have to find their schedules first, and
            while weights and checkpoints are read or written.
        device: where passes run: "cpu", or an accelerator such as "cuda", whose number is LOCAL_RANK unless
            it is given. Models and batches are given in host memory; this rank's layers are moved. Tensors
            between stages go by torch's backend for the device, sums over replicas by schedules over it
            ("synth"), by gloo, or by it ("nccl"). A step waits for the device where it tells its loss, where
            it hears which gradients there are, and where `check_loss` looks at a loss. Not where the plan
            divides layers.
        record: whether `timeline` has something to tell.
        weights: where values come from: a safetensors file, a folder of them, or one of
            torch.distributed.checkpoint, of which every rank reads what it holds; or what gives a module of a
            model on "meta" its first values in place, called as by `nn.Module.apply`. None for the values
            that there are, and for first ones by `reset_parameters` (and transformers' `_init_weights`).
        by_schedule: whether operators were divided by what schedules take, as `shard_model` does, or by exact
            rates: paths of tensors follow.

    Attributes:
        plan: as given.
        losses: of the microbatches of the last batch, in their order; of the model's own loss their parts.
        metrics: of the last batch, by name, the same on every rank.
        calls: every collective of operators and updates of a step on this rank's stage, where it is divided,
            as planned for float32.
        crossing_bytes: for each boundary of divided stages what crosses it in a step, likewise.

    Raises:
        PlanError: the plan does not fit the model, the job or the topology.
        CheckpointError: `weights` are not of this model, or cannot be read; on all ranks.
        InputError: another argument breaks a rule.
    """

    def __init__(
        self,
        model: nn.Module | Layered,
        plan: Plan,
        loss_fn: LossFunction | None,
        optimizer: OptimizerOf,
        *,
        collectives: str = "synth",
        topology: Topology | str | None = None,
        loss_reduction: str = "mean",
        check_loss: bool = True,
        seed: int = 0,
        batch_norm: str = "microbatch",
        accumulate: int = 1,
        clip_norm: float | None = None,
        precision: str | Precision | None = None,
        prepare: Prepare | None = None,
        tensor_ranks: int = 1,
        metrics: Mapping[str, LossFunction] | None = None,
        keep_outputs: bool = False,
        timeout_s: float = 60.0,
        start_timeout_s: float = 600.0,
        device: str = "cpu",
        record: bool = False,
        weights: Weights | None = None,
        by_schedule: bool = True,
    ) -> None:
        given = locals() | {"metrics": dict(metrics or {})}
        self._options = options = TrainingOptions(*(given[it.name] for it in fields(TrainingOptions)))
        check_job()
        rank, size = dist.get_rank(), dist.get_world_size()
        self._agreement = ConfigBarrier(f"arborcast trainer {next(_numbers)}", rank, size, timeout_s)
        self.plan, self._by_schedule = plan, by_schedule
        try:
            found = device_of(device)
            options.check_alone(min(timeout_s, start_timeout_s), found, precision)
            fabric, words = self._placed(model, optimizer, topology, found)
        except InputError as error:
            self._agreement.say("start", f"what is refused: {error}")  # the others come with their plans
            raise
        words += f", {options.words(collectives, precision)}, device {found.type}"
        self._agreement.agree("start", words, what="trainer", timeout_s=start_timeout_s)
        replicated = None if plan.is_divided else self._place.plan
        shared = None if prepare is None else tensor_ranks
        self._groups = groups = Groups(
            replicated, collectives, fabric, timeout_s, start_timeout_s, shared, found
        )
        # A rank that left before the others' groups are connected would break theirs.
        self._agreement.agree("groups", "connected", what="trainer", timeout_s=start_timeout_s)
        place = self._place
        self._faults = faults = FailureBroadcast(place.name, self._agreement, groups.break_all)
        if not isinstance(precision, Precision):
            precision = Precision(precision or "float32", found.type, groups.job)
        recorder = PassRecorder(is_on=record)
        links = Messenger(groups.job, place.name, recorder, groups.ways, found)
        self._context = RankContext(place, options, groups, faults, links, precision, recorder, found)
        self._messages = links.messages
        self._meeting = BatchNegotiation(self._context, self._agreement, timeout_s)
        self._calls = self._steps = 0
        self._is_closed = False
        self.calls: tuple[CollectiveCall, ...] = ()
        self.crossing_bytes: tuple[int, ...] = ()
        self._lines: Mapping[tuple[int, ...], dist.ProcessGroup] = {}
        self._kept: tuple[nn.Module, Any, float | None] | None = None
        self._waiting: tuple[nn.Module, OptimizerOf] | None = None
        self._local: LocalModel | None = None
        self.losses: tuple[float, ...] = ()
        self.metrics: dict[str, float] = {}
        if isinstance(model, Layered):
            try:
                self._take(model, optimizer)
            except BaseException:
                self.close()
                raise
        else:
            self._waiting = model, optimizer

    def _placed(
        self,
        model: nn.Module | Layered,
        optimizer: OptimizerOf,
        topology: Topology | str | None,
        device: torch.device,
    ) -> tuple[Topology | None, str]:
        """Find the place of this rank in a plan that fits; the fabric, and the plan in words.

        Raises:
            PlanError: the plan does not fit the model, the job or the topology.
            InputError: an option does not fit the plan or the model.
        """
        options, rank, words = self._options, dist.get_rank(), ""
        if self.plan.is_divided:
            key = repr((self.plan, self._by_schedule))
            words = f"plan {hashlib.sha256(key.encode()).hexdigest()[:12]} of {self.plan.model}, "
            options.check_divided(model, optimizer, device)
            plan = self.plan.undivided(getattr(model, "depth", 1))
            self._place = RankAssignment.in_mesh(plan, rank)
        else:
            plan = self.plan
            self._place = RankAssignment.of(plan, rank, options.tensor_ranks)
        options.check(plan, optimizer)
        fabric = fabric_of(plan, topology, dist.get_world_size())
        if isinstance(model, Layered):
            options.check_model(model, self._place.column, optimizer)
        return fabric, words + words_of_plan(plan)

    # ------------------------------------------------------------------ training

    def step(self, inputs: Tensors | None = None, targets: Tensors | None = None) -> float:
        """Train with one batch.

        Args:
            inputs: all samples, one tensor, a tuple or a dict of the model's arguments; the same on every
                rank that is given them. None on ranks that need none (`needs_inputs`), which then hear of
                every batch's shape from the others; the first batch says whether any rank does.
            targets: likewise, as `loss_fn` takes them; None, too, for the inputs, of which it takes what it
                needs.

        Returns:
            The loss of the whole batch before the update, the same on every rank; `losses` then has those of
            the microbatches.

        Raises:
            BatchError: the batch does not split as the plan says, or ranks were given different shapes, or
                (found out before weights change) the first and last stage different data, or a rank has none
                that needs some.
            InputError: `loss_fn` is not what it is said to be; the other ranks raise a `TrainingError`.
            TrainingError: a rank died or did not come in time, or a pass raised; the trainer is of no more
                use.
        """
        return self._run(inputs, targets, training=True)

    def evaluate(self, inputs: Tensors | None = None, targets: Tensors | None = None) -> float:
        """The loss of a batch in evaluation mode; nothing changes. As `step` otherwise.

        Raises:
            InputError: the model was traced without its graph in evaluation, or cannot be evaluated so.
        """
        why = getattr(None if self._local is None else self._local.whole, "evaluation", None)
        if isinstance(why, str):
            raise InputError(f"evaluate: {why}")
        return self._run(inputs, targets, training=False)

    @property
    def needs_inputs(self) -> bool:
        """Whether this rank must be given the inputs of batches: it has the first stage.

        So must the last one of a model that returns its loss.
        """
        return self._place.needs(self._options.loss_fn is None)[0]

    @property
    def needs_targets(self) -> bool:
        """Whether this rank must be given the targets: it has the last stage.

        So must the first one of a model that was traced with its loss.
        """
        return self._place.needs(self._options.loss_fn is None)[1]

    def feed(self, loader: Iterable[Any] | None) -> DistributedBatches:
        """Batches for `step` on every rank, from a loader on those that need data."""
        return DistributedBatches(
            loader, self._groups.job, self._faults, self.needs_inputs or self.needs_targets
        )

    def _run(self, inputs: Tensors | None, targets: Tensors | None, *, training: bool) -> float:
        self._faults.refuse()
        call, self._calls = self._calls, self._calls + 1
        if self._waiting is not None:
            self._trace(call, inputs)
        local = self._ready()
        batch, signature = self._meeting.batch(call, local, inputs, targets, training=training)
        executor, update = local.executor, local.update
        with self._faults.all_or_nothing(lambda: executor.doing, call):
            self._context.recorder.start(self._groups.job)
            if training:
                update.begin(batch.samples)
            executor.run(batch, signature, self._steps, update.unit or 1.0)
            if training:
                update.wait()
            outcome = executor.finish(batch)
            if training:
                update.end(outcome.weight)
                self._steps += 1
        self.losses, self.metrics = outcome.losses, outcome.metrics
        return outcome.loss

    # ------------------------------------------------------------------ what there is

    @property
    def module(self) -> nn.Module:
        """The layers of this rank, with the names of the whole model; empty on a rank without work."""
        return self._ready().module if self._kept is None else self._kept[0]

    @property
    def optimizer(self) -> Any:
        """That of this rank's parameters; None without any."""
        return self._ready().update.optimizer if self._kept is None else self._kept[1]

    @property
    def gradient_norm(self) -> float | None:
        """That of all gradients before they were clipped in the last update; None without `clip_norm`."""
        return self._ready().update.norm if self._kept is None else self._kept[2]

    @property
    def messages(self) -> MessageCounts:
        """How much this rank exchanged with other stages so far."""
        return self._messages

    def line(self, axes: tuple[int, ...]) -> dist.ProcessGroup:
        """The process group of this rank along some axes of the mesh of its stage, where that is divided."""
        if axes not in self._lines:
            raise InputError(f"axes: must be of the mesh of this rank's stage, got {axes}")
        return self._lines[axes]

    def timeline(self) -> Timeline:
        """What all ranks did in the last step, for a trainer that records; every rank calls it."""
        self._faults.refuse()
        return self._context.recorder.timeline(self._groups.job)

    def outputs(self) -> Any:
        """Those of the model for the last batch, of all samples in order, on every rank; every rank calls it.

        Raises:
            InputError: they are not kept (`keep_outputs`), or there was no batch yet.
        """
        executor = self._ready().executor
        self._faults.refuse()
        if not self._options.keep_outputs:
            raise InputError("outputs: must be kept (keep_outputs=True), got a trainer without them")
        with self._faults.all_or_nothing(lambda: "gathering outputs", forgives=True):
            return executor.gather_outputs()

    def state_dict(self, average: nn.Module | None = None) -> dict[str, Tensor]:
        """Of the whole model, in the memory of every rank; every rank calls it. `save` takes no more.

        Args:
            average: another module with the entries of `module`, such as the `module` of torch's
                `AveragedModel`, whose values to take.
        """
        module = self._ready().module if average is None else average
        self._faults.refuse()
        with self._faults.all_or_nothing(lambda: "gathering the weights"), self._groups.patient():
            state = self._ready().state(module) if self._place.assignments else None
            return checkpoints.gather_state(
                state, self._groups.job, [it.ranks[0] for it in self._place.plan.workers]
            )

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the weights of the whole model, from however many stages; every rank calls it.

        Raises:
            CheckpointError: on any rank an entry is missing or has another shape; on all, nothing is changed.
        """
        local = self._ready()
        self._faults.refuse()
        local.update.check_complete("weights must be loaded")
        shapes = checkpoints.shapes_of(local.whole.divide(0, local.whole.depth).state_dict())
        self._context.together("comparing weights", lambda: checkpoints.check_state(shapes, state))
        with self._faults.all_or_nothing(lambda: "loading weights"), self._groups.patient():
            if self._place.assignments:
                checkpoints.load_state(local.module, state)
            local.loaded()

    def save(self, folder: Path | str) -> None:
        """Write a checkpoint of all that a training goes on from; every rank calls it and writes its part.

        It is one of torch.distributed.checkpoint: `model` by the model's own names, `optimizer` as
        `get_optimizer_state_dict` flattens it, `trainer` with the number of steps and float16's scale. It
        loads into a trainer with any plan, and by torch's own functions into serial training. It is whole
        before it has its name.

        Args:
            folder: new, or a checkpoint, which is replaced; on a file system that all ranks share.

        Raises:
            CheckpointError: it cannot be written; on all ranks, which may go on.
            InputError: some batches of an update are still to come.
        """
        self._faults.refuse()
        local = self._ready()
        local.update.check_complete("a checkpoint must be written")

        def entries() -> dict[str, Any]:
            going = {"steps": self._steps, "scaler": self._context.precision.state_dict()}
            return {**local.entries(), "trainer": going}

        with self._faults.all_or_nothing(lambda: f"saving {folder}", forgives=True), self._groups.patient():
            checkpoints.write(folder, entries, self._groups.job)

    def load(self, folder: Path | str) -> None:
        """Go on from a checkpoint of a trainer with any plan, or of serial training; every rank calls it.

        Without `trainer` in it (of serial training), the number of steps and the scale stay.

        Raises:
            CheckpointError: it cannot be read, is of another model, or options of the optimizer do not fit;
                on all ranks. Nothing is changed, unless a file breaks while it is read: then the trainer is
                of no more use.
        """
        self._faults.refuse()
        local, job = self._ready(), self._groups.job
        local.update.check_complete("a checkpoint must be loaded")
        loading = self._context.together(f"reading {folder}", lambda: local.loading(folder))
        with self._faults.all_or_nothing(lambda: f"loading {folder}"), self._groups.patient():
            going = checkpoints.together(job, loading.load)
            local.loaded()
            self._steps = going.get("steps", self._steps)
            if going.get("scale") is not None:
                self._context.precision.load_state_dict(going)

    # ------------------------------------------------------------------ beginning and end

    def close(self) -> None:
        """End the connections to the other ranks; a second call does nothing.

        `module`, `optimizer`, `losses` and `messages` stay.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._faults.leave(f"closed its trainer after {self._steps} steps")
        self._faults.end("the trainer was closed")
        self._context.links.close()
        self._groups.close()
        if self._local is not None:
            self._local.close()
            self._kept = self._local.module, self._local.update.optimizer, self._local.update.norm
        # gloo's threads end with the last reference to their group. Any left when the interpreter ends would
        # abort the process ("terminate called without an active exception").
        self._local = None
        del self._context, self._groups, self._meeting, self._lines
        gc.collect()

    def __enter__(self) -> Self:
        """For `with`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _trace(self, call: int, inputs: Tensors | None) -> None:
        from arborcast.pipeline.model.traced import trace

        assert self._waiting is not None, "the caller asked"
        model, optimizer = self._waiting
        rule = "an unmodified model is traced with the first batch, which every rank must be given"
        refusal = f"batch: {rule} (or pass what pipeline.trace made of an example), got no inputs"
        with self._faults.all_or_nothing(lambda: "tracing the model", call, forgives=True):
            words = "one to trace the model with" if inputs is not None else f"what is refused: {refusal}"
            self._agreement.agree(f"trace {call}", words)
            if inputs is None:
                raise BatchError(refusal)
        layered = trace(model, inputs)
        self._options.check_model(layered, self._place.column, optimizer)
        self._take(layered, optimizer)
        self._waiting = None

    def _take(self, model: Layered, optimizer: OptimizerOf) -> None:
        if not self.plan.is_divided:
            self._local = LocalModel.of(model, optimizer, self._context)
        else:
            from arborcast.pipeline.run.intra.divided_model import DividedModel

            assert isinstance(model, Traced), "it was checked"
            self._local = divided = DividedModel.divided(
                model, self.plan, self._by_schedule, optimizer, self._context
            )
            self.calls, self.crossing_bytes = divided.calls, divided.crossing_bytes
            self._lines = divided.lines

    def _ready(self) -> LocalModel:
        if self._local is None:
            self._faults.refuse()
            raise InputError("trainer: a model that is not Layered is traced in the first step, got none yet")
        return self._local

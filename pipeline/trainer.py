"""Trains a model by a plan, one process per rank, as if it were trained serially.

    trainer = pipeline.Trainer(model, plan, loss_fn, lambda parameters: torch.optim.Adam(parameters))
    for inputs, targets in batches:                # whole batches, the same on every rank that needs them
        loss = trainer.step(inputs, targets)       # of the whole batch, the same on every rank

Every rank runs this; `torch.distributed` must be initialised before.
"""

from __future__ import annotations

import gc
import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arborcast.pipeline.costs.activations import described
from arborcast.pipeline.errors import BatchError, PlanError
from arborcast.pipeline.model.layered import Layered, in_mode
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.run import checkpoints
from arborcast.pipeline.run.activations import divided
from arborcast.pipeline.run.assignment import Assignment
from arborcast.pipeline.run.batch_norm import (
    DeferredStatistics,
    find_batch_norm,
    restore_batch_norm,
    synchronise_batch_norm,
)
from arborcast.pipeline.run.batches import Batch, Signature, Tensors, as_tuple, said_of, told, words_of
from arborcast.pipeline.run.boundary import FakeStage
from arborcast.pipeline.run.divisibility import check_divisible
from arborcast.pipeline.run.executor import Part, StepExecutor
from arborcast.pipeline.run.failures import Agreement, FailureBroadcast
from arborcast.pipeline.run.feed import Feed
from arborcast.pipeline.run.groups import Groups, fabric_of
from arborcast.pipeline.run.hearing import MEET, Hearing
from arborcast.pipeline.run.losses import REDUCTIONS, SHARE, LossFunction
from arborcast.pipeline.run.messages import Messages, Messenger
from arborcast.pipeline.run.precision import Precision
from arborcast.pipeline.run.recorder import NullRecorder, Recorder
from arborcast.pipeline.run.sharded import AXES, Prepare, column, prepared
from arborcast.pipeline.run.ties import TieGroups
from arborcast.pipeline.run.update import OptimizerOf, Update, check_optimizer
from arborcast.pipeline.run.weights import Weights, broadcast, give_values, joined
from arborcast.pipeline.simulation.timeline import Timeline
from arborcast.pipeline.stages import Plan
from arborcast.synth.errors import InputError
from arborcast.synth.topology import Topology

BATCH_NORMS = ("microbatch", "deferred")
"""When running statistics of batch norm change."""

NAMED = 3
"""Frozen parameters that are named in words."""

_numbers = itertools.count()
"""Of the trainers of this process: all ranks make them in the same order."""


class Trainer:
    """One rank's part in a training.

    Args:
        model: that can be cut between its layers, such as a `Divisible`; any other module is traced with
            the inputs of the first batch. Every rank holds it all when it makes its trainer; afterwards only
            the layers of its own stage are used. The weights are those of each stage's first rank. Parameters
            may be frozen and unfrozen between updates, in the whole model and on every rank alike.
        plan: which layers on which ranks; a rank of the job that it does not name only hears of losses.
        loss_fn: of the output and the targets of some samples; returns one number, their mean, or a pair:
            the sum of their losses, and the weight that is to divide the sum over all samples of an update
            (of all its batches, where it accumulates), such as the number of tokens that count. None for a
            model that returns its loss (labels among its inputs): training is by the loss that it has of
            whole batches. None, too, for one that was traced with a loss.
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
        device: "cpu".
        record: whether `timeline` has something to tell.
        weights: where values come from: a safetensors file, a folder of them, or one of
            torch.distributed.checkpoint, of which every rank reads what it holds; or what gives a module of a
            model on "meta" its first values in place, called as by `nn.Module.apply`. None for the values
            that there are, and for first ones by `reset_parameters` (and transformers' `_init_weights`).

    Attributes:
        plan: as given.
        losses: of the microbatches of the last batch, in their order; of the model's own loss their parts.
        metrics: of the last batch, by name, the same on every rank.

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
    ) -> None:
        _check(
            plan, loss_reduction, accumulate, clip_norm, min(timeout_s, start_timeout_s), device, precision
        )
        if batch_norm not in BATCH_NORMS:
            raise InputError(f"batch_norm: must be one of {', '.join(BATCH_NORMS)}, got {batch_norm}")
        self._rank, size = dist.get_rank(), dist.get_world_size()
        fabric = fabric_of(plan, topology, size)
        self._measures, self._keeps_outputs = dict(metrics or {}), keep_outputs
        _check_shared(plan, optimizer, prepare, tensor_ranks)
        self._prepare, self._tensor_ranks = prepare, tensor_ranks
        self._column = column(plan, tensor_ranks, self._rank)
        if isinstance(model, Layered):
            _check_fit(model, self._column, loss_fn, optimizer, self._tells)
        self._agreement = Agreement(f"arborcast trainer {next(_numbers)}", self._rank, size, timeout_s)
        arithmetic = precision.dtype if isinstance(precision, Precision) else precision or "float32"
        self._agreement.agree(
            "start",
            f"{_words_of(plan)}, loss_reduction {loss_reduction}, accumulate {accumulate}, clip_norm "
            f"{clip_norm}, precision {arithmetic}, seed {seed}, batch_norm {batch_norm}, "
            f"collectives {collectives}"
            + (f", metrics {' '.join(self._measures)}" if self._measures else "")
            + (f", tensor_ranks {tensor_ranks}" if prepare is not None else ""),
            what="trainer",
            timeout_s=start_timeout_s,
        )
        self.plan = plan
        self._assignments = Assignment.all_of(self._column, self._rank)
        held = " and ".join(str(it.stage) for it in self._assignments)
        self._name = f"rank {self._rank}" + (f" (stage {held})" if held else "")
        self._weights = weights
        self._loss_fn, self._loss_reduction, self._check_loss = loss_fn, loss_reduction, check_loss
        self._seed, self._batch_norm = seed, batch_norm
        self._accumulate, self._clip_norm = accumulate, clip_norm
        self._groups = Groups(
            plan, collectives, fabric, timeout_s, start_timeout_s, None if prepare is None else tensor_ranks
        )
        # A rank that left before the others' groups are connected would break theirs.
        self._agreement.agree("groups", "connected", what="trainer", timeout_s=start_timeout_s)
        self._faults = FailureBroadcast(self._name, self._agreement, self._groups.break_all)
        self._precision = _precision_of(precision, device, self._groups)
        self._recorder = Recorder() if record else NullRecorder()
        self._links = Messenger(self._groups.job, self._name, self._recorder)
        self._messages = self._links.messages
        self._hearing = Hearing(self._groups.job)
        self._calls = self._steps = 0
        self._is_closed = False
        self._kept: tuple[nn.Module, Any, float | None] | None = None
        self._waiting: tuple[nn.Module, OptimizerOf] | None = None
        self._parts: tuple[StepExecutor, Update, Any, Layered] | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        self._frozen = ""
        self._trained: dict[str, bool] = {}  # by name, where `prepare` made parameters
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
        """The loss of a batch in evaluation mode; nothing changes. As `step` otherwise."""
        return self._run(inputs, targets, training=False)

    @property
    def needs_inputs(self) -> bool:
        """Whether this rank must be given the inputs of batches: it has the first stage.

        So must the last one of a model that returns its loss.
        """
        return any(it.is_first or (it.is_last and self._loss_fn is None) for it in self._assignments)

    @property
    def needs_targets(self) -> bool:
        """Whether this rank must be given the targets: it has the last stage.

        So must the first one of a model that was traced with its loss.
        """
        return any(it.is_last or (it.is_first and self._loss_fn is None) for it in self._assignments)

    def feed(self, loader: Iterable[Any] | None) -> Feed:
        """Batches for `step` on every rank, from a loader on those that need data; see `Feed`."""
        return Feed(loader, self._groups.job, self._faults, self.needs_inputs or self.needs_targets)

    def _run(self, inputs: Tensors | None, targets: Tensors | None, *, training: bool) -> float:
        self._faults.refuse()
        call, self._calls = self._calls, self._calls + 1
        if self._waiting is not None:
            self._trace(call, inputs)
        executor, update, _, model = self._ready()
        batch, signature = self._met(call, executor, update, model, inputs, targets, training=training)
        with self._faults.all_or_nothing(lambda: executor.doing, call):
            self._recorder.start(self._groups.job)
            if self._loss_fn is None and executor.last is not None:
                with nullcontext() if training else in_mode(executor.last, False):
                    executor.last.begin_loss(batch.targets, batch.samples)
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

    def _met(
        self,
        call: int,
        executor: StepExecutor,
        update: Update,
        model: Layered,
        inputs: Tensors | None,
        targets: Tensors | None,
        *,
        training: bool,
    ) -> tuple[Batch, Signature]:
        """The batch as this rank needs it, and its shape, for which all ranks are ready."""
        frozen = _frozen(self._parameters) if training else ""
        changed = training and frozen != self._frozen
        said, batch, samples = Signature(None, None, training, frozen), None, None
        refusal: BatchError | None = None
        try:
            batch, targets = self._given(model, inputs, targets)
            if batch is not None:
                said, samples = batch.signature(training, frozen), batch.samples
            elif targets is not None:
                tensors = as_tuple("targets", targets)
                samples = tensors[0].shape[0] if tensors[0].dim() else MEET  # which all refuse then
                counts = {it.shape[0] for it in tensors if it.dim()}
                if len(counts) > 1:
                    raise BatchError(f"targets: must have as many samples each, got {sorted(counts)}")
                said = replace(said, targets=words_of(tensors))
        except BatchError as error:
            refusal = error
        signature = said if refusal is None else None
        if self._hearing.is_needed:
            mine = None if said.inputs is None else replace(said, targets=None)
            if refusal is not None or changed:
                samples = MEET
            with self._faults.all_or_nothing(lambda: "hearing of the batch", call):
                signature = self._hearing.hear(mine, samples, training=training)
        if signature is None or changed or not executor.knows(signature):
            with self._faults.all_or_nothing(lambda: executor.doing, call, forgives=True):
                # Unless all ranks refuse it, those that do not would go on with the next batch of this one.
                words = str(said) if refusal is None else f"what is refused: {refusal}"
                heard = self._agreement.agree(f"call {call}", words)
                if refusal is not None:
                    raise refusal
                signature = self._agreed(model, heard, said)
                if changed:
                    update.check_complete("parameters must be frozen or unfrozen")
        if batch is None:
            assert signature.inputs is not None, "somebody was given some"
            batch = Batch.of(told(signature.inputs), targets, model.sample_dims(0), self._column)
        self._make_ready(call, executor, update, batch, signature)
        return batch, signature

    def _given(
        self, model: Layered, inputs: Tensors | None, targets: Tensors | None
    ) -> tuple[Batch | None, Tensors | None]:
        """What a rank was given, checked: None without inputs, and its targets.

        Raises:
            BatchError: it is not what the model takes, or something is missing.
        """
        for name, value, needed in (
            ("inputs", inputs, self.needs_inputs or self._hearing.is_needed is False),
            ("targets", inputs if targets is None else targets, self.needs_targets),
        ):
            if value is None and needed:
                why = "" if name == "targets" or self.needs_inputs else " as in the first batch"
                raise BatchError(f"batch: {self._name} must be given the {name}{why}, got none")
        for name, parameter in self.module.named_parameters() if self._trained else ():
            if parameter.requires_grad != self._trained[name]:
                raise BatchError(
                    "batch: parameters must stay frozen or trained as they were when prepare made them, got "
                    f"a change of {name}"
                )
        if inputs is None:
            return None, targets
        dims = model.sample_dims(0)
        if self._loss_fn is None:
            given = model.tensors_of(inputs, targets)  # type: ignore[attr-defined]
            targets = tuple(given[index] for index in model.labels)  # type: ignore[attr-defined]
        else:
            given = model.tensors_of(inputs) if hasattr(model, "tensors_of") else inputs
            if targets is None and self.needs_targets:
                targets = inputs
        batch = Batch.of(given, targets, dims, self._column)
        return batch, batch.targets

    def _agreed(self, model: Layered, heard: Sequence[str], said: Signature) -> Signature:
        """The shape that all ranks were given, or heard of, in words.

        Raises:
            BatchError: nobody was given inputs, or inputs and targets count other samples; on all ranks.
        """
        inputs, targets = said_of("inputs", heard), said_of("targets", heard)
        if inputs is None:
            raise BatchError("batch: some rank must be given the inputs, got none on any")
        Batch.of(told(inputs), None if targets is None else told(targets), model.sample_dims(0), self._column)
        is_needed = any(said_of("inputs", [words]) is None for words in heard)
        self._hearing.is_needed = is_needed or self._hearing.is_needed or False
        if not self._hearing.is_needed:
            return said
        signature = Signature(inputs, None, said.training, said.frozen)
        self._hearing.know(signature)
        return signature

    def _make_ready(
        self, call: int, executor: StepExecutor, update: Update, batch: Batch, signature: Signature
    ) -> None:
        """Before the first batch of a shape, and after parameters were frozen or unfrozen."""
        changed = signature.training and signature.frozen != self._frozen
        if executor.knows(signature) and not changed:
            return
        with self._faults.all_or_nothing(lambda: executor.doing, call):
            if changed:
                executor.follow({name: it.requires_grad for name, it in self._parameters.items()})
                update.retrain()
                self._groups.meet()
                self._frozen = signature.frozen
            if not executor.knows(signature):
                executor.prepare(batch, signature)

    # ------------------------------------------------------------------ what there is

    @property
    def module(self) -> nn.Module:
        """The layers of this rank, with the names of the whole model; empty on a rank without work."""
        return self._ready()[2] if self._kept is None else self._kept[0]

    @property
    def optimizer(self) -> Any:
        """That of this rank's parameters; None without any."""
        return self._ready()[1].optimizer if self._kept is None else self._kept[1]

    @property
    def gradient_norm(self) -> float | None:
        """That of all gradients before they were clipped in the last update; None without `clip_norm`."""
        return self._ready()[1].norm if self._kept is None else self._kept[2]

    @property
    def messages(self) -> Messages:
        """How much this rank exchanged with other stages so far."""
        return self._messages

    def timeline(self) -> Timeline:
        """What all ranks did in the last step, for a trainer that records; every rank calls it."""
        self._faults.refuse()
        return self._recorder.timeline(self._groups.job)

    def outputs(self) -> Any:
        """Those of the model for the last batch, of all samples in order, on every rank; every rank calls it.

        Raises:
            InputError: they are not kept (`keep_outputs`), or there was no batch yet.
        """
        executor = self._ready()[0]
        self._faults.refuse()
        if not self._keeps_outputs:
            raise InputError("outputs: must be kept (keep_outputs=True), got a trainer without them")
        with self._faults.all_or_nothing(lambda: "gathering outputs", forgives=True):
            return executor.gather_outputs()

    def state_dict(self, average: nn.Module | None = None) -> dict[str, Tensor]:
        """Of the whole model, in the memory of every rank; every rank calls it. `save` takes no more.

        Args:
            average: another module with the entries of `module`, such as the `module` of torch's
                `AveragedModel`, whose values to take.
        """
        module = self._ready()[2] if average is None else average
        self._faults.refuse()
        with self._faults.all_or_nothing(lambda: "gathering the weights"):
            state = module.state_dict() if self._assignments else None
            return checkpoints.gather_state(state, self._groups.job, self.plan)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the weights of the whole model, from however many stages; every rank calls it.

        Raises:
            CheckpointError: an entry is missing or has another shape; on all ranks, and nothing is changed.
        """
        _, update, module, model = self._ready()
        update.check_complete("weights must be loaded")
        whole = model.divide(0, model.depth).state_dict()
        checkpoints.check_state(
            {name: tuple(it.shape) for name, it in whole.items() if isinstance(it, Tensor)}, state
        )
        if self._assignments:
            checkpoints.load_state(module, state)

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
        _, update, module, _ = self._ready()
        self._faults.refuse()
        update.check_complete("a checkpoint must be written")

        def entries() -> dict[str, Any]:
            return {
                "model": checkpoints.model_entries(module) if self._assignments else {},
                "optimizer": checkpoints.optimizer_entries(update.optimizer, update.parameters),
                "trainer": {"steps": self._steps, "scaler": self._precision.state_dict()},
            }

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
        _, update, module, model = self._ready()
        self._faults.refuse()
        job, whole = self._groups.job, model.divide(0, model.depth)
        update.check_complete("a checkpoint must be loaded")
        with self._faults.all_or_nothing(lambda: f"reading {folder}", forgives=True), self._groups.patient():
            loading = checkpoints.together(
                job,
                lambda: checkpoints.Loading(folder, whole, module, update.optimizer, update.parameters),
            )
        with self._faults.all_or_nothing(lambda: f"loading {folder}"), self._groups.patient():
            going = checkpoints.together(job, loading.load)
            self._steps = going.get("steps", self._steps)
            if going.get("scale") is not None:
                self._precision.load_state_dict(going)

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
        self._links.close()
        self._groups.close()
        if self._parts is not None:
            _, update, module, _ = self._parts
            update.close()
            restore_batch_norm(module)
            self._kept = module, update.optimizer, update.norm
        # gloo's threads end with the last reference to their group. Any left when the interpreter ends would
        # abort the process ("terminate called without an active exception").
        self._parts = None
        del self._links, self._groups, self._precision, self._hearing
        gc.collect()

    def __enter__(self) -> Trainer:
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
        _check_fit(layered, self._column, self._loss_fn, optimizer, self._tells)
        self._take(layered, optimizer)
        self._waiting = None

    def _take(self, model: Layered, optimizer: OptimizerOf) -> None:
        """This rank's part of the model, with the same weights as its replicas."""
        whole = model.divide(0, model.depth)
        self._parameters = dict(whole.named_parameters(remove_duplicate=False))
        self._frozen = _frozen(self._parameters)
        ties = TieGroups(self.plan, model.ties, self._groups.make)
        if self._prepare is not None and ties.holders:
            raise PlanError(
                "prepare: must not share layers whose parameters several stages use, got "
                f"{' '.join(sorted(ties.holders))}"
            )
        self._fill(model)
        parts = []
        for assignment in self._assignments:
            mine = self._column.stages[assignment.stage]
            fake = FakeStage(model, mine.start, mine.end)  # before batch norm is changed
            own = divided(model, self.plan.segments(assignment.stage))
            parts.append(Part(assignment, own, fake))
        module = joined([part.module for part in parts])
        parameters = _named(module, model)
        with self._faults.all_or_nothing(lambda: "starting"):
            deferred = DeferredStatistics(module) if self._batch_norm == "deferred" else None
            held = (*module.parameters(), *module.buffers())
            if self._groups.stage is not None:
                broadcast(held, self._groups.stage, self._assignments[0].ranks[0])
            if find_batch_norm(module) and (self._groups.stage is not None or deferred is not None):
                synchronise_batch_norm(module, self._groups.stage, deferred)
            ties.equalise(parameters)
            if self._groups.mesh is not None and self._prepare is not None:
                mesh = self._groups.mesh
                broadcast(held, mesh.get_group(AXES[1]), int(mesh[AXES[1]].mesh[0]))
                parts = [replace(it, module=prepared(it.module, mesh, self._prepare)) for it in parts]
                module = joined([part.module for part in parts])
                parameters = _named(module, model)
                self._trained = {name: it.requires_grad for name, it in module.named_parameters()}
            update = Update(
                parameters,
                {part.assignment.stage: part.module for part in parts},
                optimizer,
                len(self._sharers),
                self._groups,
                ties,
                self._precision,
                self._recorder,
                accumulate=self._accumulate,
                clip_norm=self._clip_norm,
            )
            update.warm_up_collectives()
            self._groups.meet()
        executor = StepExecutor(
            parts,
            module,
            self._column,
            self._groups,
            self._links,
            self._precision,
            self._recorder,
            loss_fn=self._loss_fn,
            loss_reduction=SHARE if self._loss_fn is None else self._loss_reduction,
            check_loss=self._check_loss,
            output_dims=model.sample_dims(model.depth),
            seed=self._seed,
            deferred=deferred,
            batches=self._accumulate,
            last_pass=update.last_pass,
            on_gradients=update.gradients_complete,
            metrics=self._measures,
            keep_outputs=self._keeps_outputs,
            is_counted=self._sharers.index(self._rank) % self._tensor_ranks == 0,
            ends=tuple(sorted({*self.plan.stages[0].ranks, *self.plan.stages[-1].ranks})),
        )
        self._parts = executor, update, module, model

    @property
    def _tells(self) -> list[str]:
        """Arguments that ask for more than losses."""
        asked = {"metrics": self._measures, "keep_outputs": self._keeps_outputs}
        return [name for name, value in asked.items() if value]

    @property
    def _sharers(self) -> tuple[int, ...]:
        """The ranks that hold what this one holds, or share it; itself without work."""
        mine = self.plan.worker_of(self._rank)
        return (self._rank,) if mine is None else self.plan.workers[mine].ranks

    def _fill(self, model: Layered) -> None:
        """Give the stages of this rank the values that they do not have yet."""
        stages = [self.plan.stages[it.stage] for it in self._assignments]
        ranges = [(it.start, it.end) for it in stages]
        doing = "giving the stage its weights"
        with self._faults.all_or_nothing(lambda: doing, forgives=True), self._groups.patient():
            checkpoints.together(
                self._groups.job, lambda: give_values(model, ranges, self._weights, self._seed)
            )

    def _ready(self) -> tuple[StepExecutor, Update, Any, Layered]:
        if self._parts is None:
            self._faults.refuse()
            raise InputError("trainer: a model that is not Layered is traced in the first step, got none yet")
        return self._parts


def _check_loss(model: Layered, loss_fn: LossFunction | None, tells: Sequence[str]) -> None:
    """See that either the model or a function tells the loss.

    Raises:
        InputError: both or neither do.
    """
    returns_loss = bool(getattr(model, "losses", ()))
    if returns_loss and loss_fn is not None:
        raise InputError(
            "loss_fn: must be None, as the model returns its loss (or leave the labels out of its inputs), "
            f"got {getattr(loss_fn, '__name__', type(loss_fn).__name__)}"
        )
    if returns_loss and tells:
        raise InputError(
            f"{' and '.join(tells)}: must be left out for a model that returns its loss, as its stages give "
            "no other output; leave the labels out of its inputs and pass a loss_fn"
        )
    if not returns_loss and loss_fn is None:
        raise InputError("loss_fn: must be a function of outputs and targets, as the model returns no loss")


def _named(module: nn.Module, model: Layered) -> dict[str, nn.Parameter]:
    """The parameters of a stage, each once; a shared one under the name of its tie."""
    whole = dict(model.divide(0, model.depth).named_parameters(remove_duplicate=False))
    shared = {id(whole[name]): name for name, _ in model.ties}
    return {shared.get(id(parameter), name): parameter for name, parameter in module.named_parameters()}


def _frozen(parameters: Mapping[str, nn.Parameter]) -> str:
    """Names of those that are not trained, of many the first ones and a checksum of all."""
    names = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if len(names) <= NAMED:
        return " ".join(names)
    rest = f"and {len(names) - NAMED} more (checksum {zlib.crc32(' '.join(names).encode()):08x})"
    return " ".join([*names[:NAMED], rest])


def _words_of(plan: Plan) -> str:
    stages = " ".join(f"[{it.start}, {it.end}) on {','.join(map(str, it.ranks))}" for it in plan.stages)
    recompute = ", recompute" if plan.recompute else ""
    for index, stage in enumerate(plan.stages):
        recompute += f", stage {index} {described(stage.segments)}" if stage.segments else ""
    cap = "" if plan.max_in_flight is None else f", at most {plan.max_in_flight} in flight"
    return f"layers {stages}, {plan.microbatches} microbatches, order {plan.order}{recompute}{cap}"


def _check_shared(plan: Plan, optimizer: OptimizerOf, prepare: Prepare | None, tensor_ranks: int) -> None:
    if tensor_ranks < 1:
        raise InputError(f"tensor_ranks: must be at least 1, got {tensor_ranks}")
    if prepare is None:
        if tensor_ranks > 1:
            raise InputError(f"prepare: must share layers among tensor_ranks {tensor_ranks}, got none")
        return
    if isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            "optimizer: must be a function of parameters where prepare makes new ones, got "
            f"{type(optimizer).__name__}"
        )
    if ORDERS[plan.order].splits:
        raise PlanError(f"plan: order must have whole backward passes for prepare, got {plan.order}")
    for index, stage in enumerate(plan.stages):
        if list(stage.ranks) != sorted(stage.ranks):  # a group's order tells whose part is whose
            ranks = ", ".join(map(str, stage.ranks))
            raise PlanError(f"plan: ranks of stage {index} must ascend for prepare, got {ranks}")
        if stage.segments:
            raise PlanError(
                f"plan: stage {index} must keep or recompute all results for prepare, got "
                f"{described(stage.segments)}"
            )


def _precision_of(given: str | Precision | None, device: str, groups: Groups) -> Precision:
    if isinstance(given, Precision):
        return given
    return Precision(given or "float32", device, groups.job)


def _check_fit(
    model: Layered, plan: Plan, loss_fn: LossFunction | None, optimizer: OptimizerOf, tells: Sequence[str]
) -> None:
    if plan.depth != model.depth:
        raise PlanError(f"plan: must have as many layers as the model, {model.depth}, got {plan.depth}")
    name = getattr(model, "name", None)
    if isinstance(name, str) and plan.model and name != plan.model:
        raise PlanError(f"plan: must be for model {name}, got one for {plan.model}")
    _check_loss(model, loss_fn, tells)
    check_divisible(model, plan)
    check_optimizer(optimizer, model.divide(0, model.depth).parameters())


def _check(
    plan: Plan,
    loss_reduction: str,
    accumulate: int,
    clip_norm: float | None,
    timeout_s: float,
    device: str,
    precision: str | Precision | None,
) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError("trainer: torch.distributed must be initialised (init_process_group), got no group")
    size = dist.get_world_size()
    if max(plan.ranks) >= size:
        raise PlanError(f"plan: ranks must be in 0..{size - 1} of the job, got {max(plan.ranks)}")
    if loss_reduction not in REDUCTIONS:
        raise InputError(f"loss_reduction: must be one of {', '.join(REDUCTIONS)}, got {loss_reduction}")
    if accumulate < 1:
        raise InputError(f"accumulate: must be at least 1, got {accumulate}")
    if clip_norm is not None and not clip_norm >= 0:
        raise InputError(f"clip_norm: must not be negative, got {clip_norm}")
    if not timeout_s > 0:
        raise InputError(f"timeout_s: must be positive, got {timeout_s}")
    if device != "cpu":
        raise InputError(f"device: must be cpu, which gloo sends from, got {device}")
    if isinstance(precision, str):
        Precision(precision, device)  # raises before any group is made

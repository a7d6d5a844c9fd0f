"""Trains a model whose operators are divided over all ranks of a mesh: one stage, no pipeline.

trainer = pipeline.ShardedTrainer(traced, plan, optimizer)
loss = trainer.step(inputs, targets)  # the whole batch, on every rank
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arborcast.backends.tensors.torch_compat import forget_meshes
from arborcast.pipeline.costs.devices import device_named
from arborcast.pipeline.errors import BatchError, PlanError
from arborcast.pipeline.model.traced.model import Traced
from arborcast.pipeline.model.traced.operators import operator_trace
from arborcast.pipeline.run.batches import Tensors, words_of
from arborcast.pipeline.run.failures import Agreement, FailureBroadcast, TrainingError
from arborcast.pipeline.run.groups import COLLECTIVES, Groups
from arborcast.pipeline.run.intra.collectives import MeshCollectives
from arborcast.pipeline.run.intra.stage import ShardedStage
from arborcast.pipeline.run.update import OptimizerOf
from arborcast.pipeline.sharding.evaluation import Call, calls
from arborcast.pipeline.sharding.graph import merged
from arborcast.pipeline.sharding.mesh import FabricPrices
from arborcast.pipeline.sharding.plan import ShardedPlan, strategies_of
from arborcast.pipeline.sharding.setting import Setting
from arborcast.synth.errors import InputError
from arborcast.synth.groups.result import GroupSchedules

_ANY = device_named("h100")
"""What operators take does not count here: collectives alone do."""

_GRACE_S = 5.0
"""How long one that refuses its batch waits for others to refuse theirs, before it ends the training."""

_numbers = itertools.count()
"""Of the trainers of this process: all ranks make them in the same order."""


class ShardedTrainer:
    """One rank's part in training a model that all ranks of the job share.

    Every operator is divided as the sharding says, and every tensor moved by the collectives that the plan
    priced, no others (`calls`). Parameters are `DTensor`s in `module`, divided as their updates are (ZeRO).
    Losses and gradients are those of serial training up to rounding, where the loss of a batch is the mean of
    those of its microbatches. Dropout draws other masks than serial training, the same ones for ranks that
    do the same work.

    Args:
        model: traced with its loss. Its values on the mesh's first rank are taken, buffers too; it is not
            changed.
        plan: of one stage on all ranks of the job, such as `shard_model(..).plan`.
        optimizer: called with the list of parameters.
        collectives: "synth" for synthesized schedules, "gloo" for gloo's.
        groups: schedules that the groups of an axis run at once, as `FabricPrices.schedules` gives them; each
            group finds its own where there are none.
        by_schedule: whether the sharding was chosen by what schedules take, as `shard_model` does, or by
            exact rates: paths of tensors follow.
        seed: of random numbers.
        timeout_s: after which waiting for another rank fails.
        start_timeout_s: the same at the start, where some ranks may have to trace the model first.

    Attributes:
        module: this rank's parameters by the model's names.
        optimizer: that of the parameters.
        calls: every collective of a step, as planned.

    Raises:
        PlanError: the sharding is of another model or of another mesh, or cannot be run.
        InputError: another argument breaks a rule, or other ranks were given others, or refuse theirs.
        TrainingError: some rank did not come, or is gone.
    """

    def __init__(
        self,
        model: Traced,
        plan: ShardedPlan,
        optimizer: OptimizerOf,
        *,
        collectives: str = "synth",
        groups: tuple[GroupSchedules, ...] = (),
        by_schedule: bool = True,
        seed: int = 0,
        timeout_s: float = 60.0,
        start_timeout_s: float = 600.0,
    ) -> None:
        rank = dist.get_rank()
        name = f"arborcast sharded trainer {next(_numbers)}"
        self._agreement = Agreement(name, rank, dist.get_world_size(), timeout_s)
        self._faults = FailureBroadcast(f"rank {rank}", self._agreement, self._break)
        self._groups: Groups | None = None
        self._is_closed = is_met = False
        self._grace_s = min(timeout_s, _GRACE_S)
        self._calls = self._steps = 0
        self._known: set[str] = set()

        def connect() -> Any:
            nonlocal is_met
            is_met = True
            made = hashlib.sha256(repr((plan, self.calls)).encode()).hexdigest()[:12]
            words = f"plan {made} of {plan.model}, collectives {collectives}, seed {seed}"
            self._agreement.agree("start", words, what="trainer", timeout_s=start_timeout_s)
            self._groups = Groups(
                None, collectives, plan.topology, timeout_s, start_timeout_s, schedules=groups
            )
            lines.connect(self._groups.make)
            # A rank that left before the others' groups are connected would break theirs.
            self._agreement.agree("groups", "connected", what="trainer", timeout_s=start_timeout_s)
            return _device_mesh(lines)

        try:
            with self._faults.all_or_nothing(lambda: "starting", forgives=True):
                _check(model, plan, collectives)
                if isinstance(optimizer, torch.optim.Optimizer):
                    raise InputError("optimizer: must be a function of parameters, as these are new ones")
                (stage,), mesh = plan.stages, plan.stages[0].sharding.mesh
                self._model, self._batch, self._microbatches = model, plan.batch, plan.microbatches
                trace = operator_trace(model, plan.batch // plan.microbatches, by_layer=plan.depth > 1)
                graph = merged(trace)
                prices = FabricPrices(plan.topology, mesh)
                chosen = strategies_of(stage, graph, Setting(prices, _ANY))
                setting = Setting(replace(prices, by_schedule=by_schedule), _ANY, plan.microbatches)
                self.calls: tuple[Call, ...] = calls(graph, chosen, setting)
                lines = MeshCollectives(mesh)
                self._stage = ShardedStage(model, trace, graph, chosen, setting, lines, connect, seed=seed)
                self._share_rest(lines.mesh.ranks[0])
                self.module: nn.Module = self._stage.module
                self.optimizer = optimizer(list(self.module.parameters()))
        except BaseException as error:
            if not is_met:  # the others come with their plans
                self._agreement.say("start", f"what is refused: {error}")
            self.close()
            raise

    def step(self, inputs: Tensors, targets: Tensors | None = None) -> float:
        """Train with one batch; its loss before the update, the same on every rank up to rounding.

        Args:
            inputs: all samples, as the model was traced with them, the same on every rank.
            targets: likewise, of a loss that was traced with the model.

        Raises:
            BatchError: the batch is none of as many samples, or not as the model was traced with. Where all
                ranks refuse theirs, or the first one is not alike, they may go on.
            TrainingError: another rank refused its batch, died or did not come in time, or a pass raised; the
                trainer is of no more use.
        """
        self._faults.refuse()
        call, self._calls = self._calls, self._calls + 1
        given = self._given(call, inputs, targets)
        with self._faults.all_or_nothing(lambda: f"step {self._steps}", call):
            self.optimizer.zero_grad(set_to_none=True)
            total = torch.zeros(())
            for number, part in enumerate(zip(*(it.chunk(self._microbatches) for it in given), strict=True)):
                loss = self._stage.loss(*part, step=self._steps, microbatch=number) / self._microbatches
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
            self._stage.finish_gradients()
            self.optimizer.step()
            self._stage.spread_updates()
        self._steps += 1
        return total.item()

    def state_dict(self) -> dict[str, Tensor]:
        """All that the model saves, whole, by its names, on every rank; every rank calls it.

        Of batch norm, `num_batches_tracked` stays as it was.
        """
        self._faults.refuse()
        with self._faults.all_or_nothing(lambda: "gathering the weights"):
            return self._stage.whole()

    def line(self, axes: tuple[int, ...]) -> dist.ProcessGroup:
        """The process group of this rank along some axes of the mesh."""
        return self._stage.collectives.lines[axes].group

    def close(self) -> None:
        """End the connections to the other ranks; every rank calls it. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._faults.leave(f"closed its trainer after {self._steps} steps")
        self._faults.end("the trainer was closed")
        if self._groups is not None:
            self._groups.close()

    def _given(self, call: int, inputs: Tensors, targets: Tensors | None) -> tuple[Tensor, ...]:
        """The tensors of a batch, of a shape that all ranks were given.

        Raises:
            BatchError: it is refused, here or, the first time, elsewhere.
            TrainingError: some rank did not come.
        """
        refusal: BatchError | None = None
        given: tuple[Tensor, ...] = ()
        try:
            given = self._model.tensors_of(inputs, targets)
            counts = {it.size(0) for it in given}
            if counts != {self._batch}:
                raise BatchError(
                    f"batch: must have {self._batch} samples, as the plan says, got {sorted(counts)}"
                )
            words = " ".join(words_of(given))
        except BatchError as error:
            refusal, words = error, f"what is refused: {error}"
        if words in self._known:
            return given
        try:
            # All may refuse theirs and go on; who was given one of a known shape does not come here.
            wait_s = self._grace_s if refusal is not None and self._known else None
            with self._faults.all_or_nothing(lambda: "comparing batches", call, forgives=True):
                self._agreement.agree(f"call {call}", words, timeout_s=wait_s)
        except TrainingError:
            if refusal is None:
                raise
        if refusal is not None:
            raise refusal
        self._known.add(words)
        return given

    def _share_rest(self, first: int) -> None:
        """Take what the model holds beside its parameters from one rank."""
        if self._groups is not None and self._stage.rest:
            found = [self._stage.rest]
            dist.broadcast_object_list(found, first, group=self._groups.job)
            self._stage.fill_rest(found[0])

    def _break(self) -> None:
        if self._groups is not None:
            self._groups.break_all()


def _check(model: Traced, plan: ShardedPlan, collectives: str) -> None:
    """What needs no look at the model's operators."""
    size, topology, mesh = dist.get_world_size(), plan.topology, plan.stages[0].sharding.mesh
    if collectives not in COLLECTIVES:
        raise InputError(f"collectives: must be one of {', '.join(COLLECTIVES)}, got {collectives}")
    if len(plan.stages) > 1:
        raise PlanError(f"plan: must have one stage to be run so, got {len(plan.stages)}")
    if sorted(mesh.ranks) != list(range(size)):
        raise PlanError(f"plan: mesh {mesh} must hold the {size} ranks of the job, got {list(mesh.ranks)}")
    if topology.ranks != size:
        raise PlanError(
            f"topology {topology.name}: must have the {size} ranks of the job, got {topology.ranks}"
        )
    if not model.training.captured.is_loss:
        raise PlanError(f"model {model.name}: must be traced with its loss to be trained")


def _device_mesh(collectives: MeshCollectives) -> Any:
    """The mesh as torch has it; None for one rank."""
    mesh = collectives.mesh
    if not mesh.shape:
        return None
    from torch.distributed.device_mesh import DeviceMesh

    forget_meshes()  # those of an earlier trainer
    groups = [collectives.lines[axis,].group for axis in range(len(mesh.shape))]
    names = tuple(f"axis {axis}" for axis in range(len(mesh.shape)))
    return DeviceMesh.from_group(
        groups, "cpu", torch.tensor(mesh.ranks).reshape(mesh.shape), mesh_dim_names=names
    )

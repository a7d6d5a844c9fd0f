"""Trains a model by a plan of both levels: stages of a pipeline, the operators of each divided over its mesh.

trainer = pipeline.ShardedTrainer(traced, plan, optimizer)
loss = trainer.step(inputs, targets)  # the whole batch, on every rank
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arborcast.backends.tensors.torch_compat import forget_meshes
from arborcast.pipeline.costs.devices import device_named
from arborcast.pipeline.errors import BatchError, PlanError
from arborcast.pipeline.model.layered import in_mode
from arborcast.pipeline.model.traced.model import Traced
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.order.actions import forwards, peak_in_flight
from arborcast.pipeline.order.pass_messages import with_messages
from arborcast.pipeline.run import checkpoints
from arborcast.pipeline.run.batches import Tensors, fingerprint, words_of
from arborcast.pipeline.run.clipping import clip_gradients
from arborcast.pipeline.run.failures import ConfigBarrier, FailureBroadcast, TrainingError
from arborcast.pipeline.run.intra.divided_loop import Boundary, DividedLoop
from arborcast.pipeline.run.intra.divided_stage import DividedStage
from arborcast.pipeline.run.intra.mesh_collectives import MeshCollectives
from arborcast.pipeline.run.intra.stage_contents import StageContents
from arborcast.pipeline.run.precision import Precision
from arborcast.pipeline.run.prepared_layers import local, over
from arborcast.pipeline.run.recorder import NullRecorder
from arborcast.pipeline.run.saving import Saving
from arborcast.pipeline.run.stage_groups import COLLECTIVES, Groups
from arborcast.pipeline.run.stage_messages import Messages, Messenger
from arborcast.pipeline.run.update import OptimizerOf
from arborcast.pipeline.sharding.evaluation import CollectiveCall, calls
from arborcast.pipeline.sharding.fabric_prices import FabricPrices
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.sharding.sharded_plan import ShardedPlan, strategies_of
from arborcast.synth.errors import InputError
from arborcast.synth.groups.result import GroupSchedules

_ANY = device_named("h100")
"""What operators take does not count here: collectives alone do."""

ORDER = "1f1b"
"""Of passes, which plans are for."""

_GRACE_S = 5.0
"""How long one that refuses its batch waits for others to refuse theirs, before it ends the training."""

_numbers = itertools.count()
"""Of the trainers of this process: all ranks make them in the same order."""


class ShardedTrainer(Saving):
    """One rank's part in training a model that all ranks of the job share.

    Every operator is divided as the plan says, and every tensor moved by the collectives that the plan
    priced, for float32 of as many bytes (`calls`; besides, ties, losses, norm and scale are added up);
    between stages every rank gets its part once, in 1F1B. Parameters are `DTensor`s in `module`, divided as
    their updates are (ZeRO). Losses and gradients are those of serial training up to rounding; a loss that
    is linear neither in means over samples nor in cross entropies over the targets that count, such as a
    sum, is refused with several microbatches. Dropout draws other masks than serial training, the same ones
    for ranks that do the same work.

    Args:
        model: traced with its loss. Its values on the first rank of each mesh are taken, buffers too; it is
            not changed.
        plan: of this model, such as `shard_model(..).plan` or `read_sharded_plan(..)`. A rank of the job
            that it does not name only hears of losses.
        optimizer: called with the list of a stage's parameters.
        collectives: "synth" for synthesized schedules, "gloo" for gloo's.
        groups: schedules that the groups of an axis run at once, as `FabricPrices.schedules` gives them; each
            group finds its own where there are none.
        by_schedule: whether the sharding was chosen by what schedules take, as `shard_model` does, or by
            exact rates: paths of tensors follow.
        clip_norm: the largest norm of all gradients of the model; None for no limit.
        precision: "float32", "bfloat16" or "float16", or a `Precision`; None is "float32".
        seed: of random numbers.
        timeout_s: after which waiting for another rank fails.
        start_timeout_s: the same at the start, where some ranks may have to trace the model first, and while
            checkpoints are read or written.

    Attributes:
        module: this rank's parameters by the model's names, and what else the model holds.
        optimizer: that of the parameters; None without any.
        calls: every collective of operators and updates of a step on this rank's stage, as planned.
        losses: of the microbatches of the last batch, in their order; their mean is that of the batch.
        gradient_norm: before the last update was clipped; None without `clip_norm`.

    Raises:
        PlanError: the plan is of another model or job, or cannot be run.
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
        clip_norm: float | None = None,
        precision: str | Precision | None = None,
        seed: int = 0,
        timeout_s: float = 60.0,
        start_timeout_s: float = 600.0,
    ) -> None:
        rank = dist.get_rank()
        name = f"arborcast sharded trainer {next(_numbers)}"
        self._agreement = ConfigBarrier(name, rank, dist.get_world_size(), timeout_s)
        self._faults = FailureBroadcast(f"rank {rank}", self._agreement, self._break)
        self._is_closed = self._is_met = self._has_groups = False
        self._grace_s = min(timeout_s, _GRACE_S)
        self._calls = self._steps = 0
        self._known: set[str] = set()
        self._clip_norm = clip_norm
        self._ties: list[_Tie] = []
        self.losses: tuple[float, ...] = ()
        self.gradient_norm: float | None = None
        self.plan = plan

        made = hashlib.sha256(repr((plan, by_schedule, groups)).encode()).hexdigest()[:12]
        arithmetic = precision.dtype if isinstance(precision, Precision) else precision or "float32"
        words = f"plan {made} of {plan.model}, collectives {collectives}, seed {seed}"
        if (arithmetic, clip_norm) != ("float32", None):
            words += f", precision {arithmetic}, clip_norm {clip_norm}"
        wait_s = timeout_s, start_timeout_s
        try:
            with self._faults.all_or_nothing(lambda: "starting", forgives=True):
                _check(model, plan, optimizer, collectives, clip_norm, precision)
                self._model = model
                meshes = [MeshCollectives(it.sharding.mesh) for it in plan.stages]
                self._shares = StageContents.of(model, plan, rank)
                connect = partial(self._connect, words, collectives, groups, meshes, wait_s)
                self._stage, self.calls = self._staged(by_schedule, seed, meshes, connect)
                if not isinstance(precision, Precision):
                    precision = Precision(precision or "float32", "cpu", self._groups.job)
                self._precision = precision
                self._links = Messenger(self._groups.job, f"rank {rank}", NullRecorder())
                self._loops = {it: self._loop(meshes, training=it) for it in (True, False)}
                self.module: nn.Module = nn.Module() if self._stage is None else self._stage.module
                held = {} if self._stage is None else self._stage.parameters
                self._parameters = {it: own.parameter for it, own in held.items()}
                some = list(self._parameters.values())
                assert callable(optimizer), "it was checked"
                self.optimizer = optimizer(some) if some else None
                self._equalise()
        except BaseException as error:
            if not self._is_met:  # the others come with their plans
                self._agreement.say("start", f"what is refused: {error}")
            self.close()
            raise

    # ------------------------------------------------------------------ training

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
        return self._run(inputs, targets, training=True)

    def evaluate(self, inputs: Tensors, targets: Tensors | None = None) -> float:
        """The loss of a batch in evaluation mode; nothing changes. As `step` otherwise.

        Raises:
            InputError: the model was traced without its graph in evaluation, or cannot be evaluated so.
        """
        if isinstance(self._model.evaluation, str):
            raise InputError(f"evaluate: {self._model.evaluation}")
        return self._run(inputs, targets, training=False)

    def _run(self, inputs: Tensors, targets: Tensors | None, *, training: bool) -> float:
        self._faults.refuse()
        call, self._calls = self._calls, self._calls + 1
        given = self._given(call, inputs, targets)
        loop = self._loops[training]
        doing = f"step {self._steps}" if training else "evaluating"
        with self._faults.all_or_nothing(lambda: doing if loop is None else f"{doing}: {loop.doing}", call):
            if self.optimizer is not None and training:
                self.optimizer.zero_grad(set_to_none=True)
            if loop is not None:
                parts = list(zip(*(it.chunk(self.plan.microbatches) for it in given), strict=True))
                with (
                    in_mode(self.module, training),
                    torch.set_grad_enabled(training),
                    self._precision.autocast(),
                ):
                    loop.run(parts, self._steps)
                loop.finish()
            loss = self._hear(loop, given)
            if training:
                self._update()
                self._steps += 1
            elif self._stage is not None:
                self._stage.forget()
        return loss

    def _update(self) -> None:
        """Gradients home, ties, scale, clipping, optimizer, weights to where they are stored."""
        if self._stage is not None:
            self._stage.finish_gradients()
        for tie in self._ties:
            self._sum(tie)
        self._precision.unscale([local(it.grad) for it in self._parameters.values() if it.grad is not None])
        if self._clip_norm is not None:
            self.gradient_norm = clip_gradients(
                self._parameters,
                self._clip_norm,
                group=self._groups.job,
                replicas=1 if self._stage is None else len(self._stage.collectives.mesh.ranks),
                ties={it.name: len(it.ranks) for it in self._ties},
            )
        self._precision.step(self.optimizer)
        self._precision.update()
        if self._stage is not None:
            self._stage.spread_updates()

    def _hear(self, loop: DividedLoop | None, given: tuple[Tensor, ...]) -> float:
        """The mean of the losses, on every rank; ranks outside of the last mesh hear of them.

        Raises:
            BatchError: ranks were given different data; on all of them that hear.
        """
        count = self.plan.microbatches
        last = self.plan.stages[-1].ranks
        sums = torch.zeros(count + 2, dtype=torch.float64)
        for m, loss in ({} if loop is None else loop.losses).items():
            sums[m] = loss.double()
        if len(last) < dist.get_world_size():
            if dist.get_rank() != last[0]:
                sums.zero_()
            mark = fingerprint(given)
            sums[count:] = torch.tensor([mark, mark**2])
            dist.all_reduce(sums, group=self._groups.job)
            total, squares = (int(it) for it in sums[count:].tolist())
            if dist.get_world_size() * squares != total**2:  # equal only where all are equal
                raise BatchError(
                    "batch: all ranks must be given the same data (random ones by the same seed), got other "
                    "values on some"
                )
        self.losses = tuple(sums[:count].tolist())
        return sum(self.losses) / count

    # ------------------------------------------------------------------ what there is

    def state_dict(self) -> dict[str, Tensor]:
        """All that the model saves, whole, by its names, on every rank; every rank calls it."""
        self._faults.refuse()
        firsts = [it.ranks[0] for it in self.plan.stages]
        with self._faults.all_or_nothing(lambda: "gathering the weights"), self._groups.patient():
            mine = {} if self._stage is None else self._stage.whole()
            own = {name: it for name, it in mine.items() if self._shares.is_written(name)}
            if len(firsts) > 1 or self._shares.has_idle:
                own = checkpoints.gather_state(own, self._groups.job, firsts)
        names = self._model.holdings.names
        saved = self._model.holdings.taken(own)
        return {name: own[names[name]] for name, _, is_saved in saved if is_saved}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the weights of the whole model; every rank calls it.

        Raises:
            CheckpointError: an entry is missing or has another shape; on all ranks, and nothing is changed.
        """
        self._faults.refuse()
        self._load_state(self._model.divide(0, self._model.depth), self.module, state)

    @property
    def messages(self) -> Messages:
        """How much this rank exchanged with other stages so far."""
        return self._links.messages

    @property
    def crossing_bytes(self) -> tuple[int, ...]:
        """For each boundary what crosses it in a step, values and gradients, as planned for float32."""
        found = []
        for (one, other), crossing in zip(pairwise(self.plan.stages), self._shares.crossing, strict=True):
            ends = one.sharding.mesh, other.sharding.mesh
            found.append(self.plan.microbatches * sum(it.bytes_of(*ends) for it in crossing))
        return tuple(found)

    def line(self, axes: tuple[int, ...]) -> dist.ProcessGroup:
        """The process group of this rank along some axes of its mesh."""
        assert self._stage is not None, "this rank is in a mesh"
        return self._stage.collectives.lines[axes].group

    def close(self) -> None:
        """End the connections to the other ranks; every rank calls it. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._faults.leave(f"closed its trainer after {self._steps} steps")
        self._faults.end("the trainer was closed")
        if self._has_groups:
            self._groups.close()

    # ------------------------------------------------------------------ checkpoints

    def _check_complete(self, what: str) -> None:
        """Every batch is an update."""

    def _entries(self) -> dict[str, Any]:
        names, is_written = self._model.holdings.names, self._shares.is_written
        model = checkpoints.model_entries(self.module)
        optimizer = checkpoints.optimizer_entries(self.optimizer, self._parameters)
        others = tuple(f"{it}." for it in self._parameters if not is_written(it))
        return {
            "model": {name: it for name, it in model.items() if is_written(names[name])},
            "optimizer": {
                key: it for key, it in optimizer.items() if not key.partition(".")[2].startswith(others)
            },
        }

    def _loading(self, folder: Path | str) -> checkpoints.Loading:
        whole = self._model.divide(0, self._model.depth)
        return checkpoints.Loading(folder, whole, self.module, self.optimizer, self._parameters)

    def _loaded(self) -> None:
        if self._stage is not None:
            self._stage.spread_updates()

    # ------------------------------------------------------------------ beginning

    def _connect(
        self,
        words: str,
        collectives: str,
        groups: tuple[GroupSchedules, ...],
        meshes: list[MeshCollectives],
        wait_s: tuple[float, float],
    ) -> Any:
        """Make all groups, once all ranks have come with the same words; this rank's mesh as torch has it."""
        self._is_met = True
        self._agreement.agree("start", words, what="trainer", timeout_s=wait_s[1])
        self._groups = Groups(None, collectives, self.plan.topology, *wait_s, schedules=groups)
        self._has_groups = True
        for lines in meshes:
            lines.connect(self._groups.make)
        ties = self._shares.ties(self.plan)
        self._ties = [_Tie(name, ranks, first, self._groups.make(ranks)) for name, ranks, first in ties]
        # A rank that left before the others' groups are connected would break theirs.
        self._agreement.agree("groups", "connected", what="trainer", timeout_s=wait_s[1])
        return None if self._shares.mine is None else _device_mesh(meshes[self._shares.mine])

    def _staged(
        self, by_schedule: bool, seed: int, meshes: list[MeshCollectives], connect: Callable[[], Any]
    ) -> tuple[DividedStage | None, tuple[CollectiveCall, ...]]:
        """This rank's stage, with buffers of the first stage's first rank; and its collectives."""
        shares, plan = self._shares, self.plan
        stage: DividedStage | None = None
        made: tuple[CollectiveCall, ...] = ()
        if shares.mine is None:
            connect()
        else:
            own, graph = plan.stages[shares.mine], shares.graphs[shares.mine]
            prices = FabricPrices(plan.topology, own.sharding.mesh)
            chosen = strategies_of(own, graph, Setting(prices, _ANY))
            setting = Setting(replace(prices, by_schedule=by_schedule), _ANY, plan.microbatches)
            made = calls(graph, chosen, setting)
            lines = meshes[shares.mine]
            stage = DividedStage(self._model, shares.trace, graph, chosen, setting, lines, connect, seed=seed)
        if shares.homes:
            found = [None if stage is None else stage.rest]
            dist.broadcast_object_list(found, meshes[0].mesh.ranks[0], group=self._groups.job)
            if stage is not None and found[0] is not None:
                stage.fill_rest(found[0])
        return stage, made

    def _loop(self, meshes: list[MeshCollectives], *, training: bool) -> DividedLoop | None:
        """In training, or in evaluation."""
        mine, microbatches = self._shares.mine, self.plan.microbatches
        if mine is None or self._stage is None:
            return None
        count = len(self.plan.stages)
        order = ORDERS[ORDER].make(count, microbatches, count)
        steps = with_messages(order if training else forwards(order))[mine]
        in_flight = peak_in_flight([it.action for it in steps if it.kind == "compute"]) + 1
        width = 1 + max((len(it) for it in self._shares.crossing), default=0)

        def boundary(cut: int) -> Boundary | None:
            """Behind stage `cut`."""
            if not 0 <= cut < count - 1:
                return None
            return Boundary(
                self._shares.crossing[cut],
                meshes[cut].mesh,
                meshes[cut + 1].mesh,
                dist.get_rank(),
                self._links,
                self._precision.dtype != "float32",
                lambda number, m, back: ((cut * width + number) * microbatches + m) * 2 + back,
            )

        return DividedLoop(
            self._stage,
            steps,
            in_flight if training else 2,
            boundary(mine - 1),
            boundary(mine),
            lambda loss: self._precision.scale(loss / microbatches),
        )

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
            if counts != {self.plan.batch}:
                raise BatchError(
                    f"batch: must have {self.plan.batch} samples, as the plan says, got {sorted(counts)}"
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

    def _break(self) -> None:
        if self._has_groups:
            self._groups.break_all()

    # ------------------------------------------------------------------ parameters of several stages

    def _equalise(self) -> None:
        """Give parameters of several stages the values of the first one's first rank."""
        for tie in self._ties:
            if self._stage is None or dist.get_rank() not in tie.ranks:
                continue
            whole = attrgetter(tie.name)(self._model.model).detach().clone()
            dist.broadcast(whole, tie.first, group=tie.group)
            self._stage.take(tie.name, whole)
        self._loaded()

    def _sum(self, tie: _Tie) -> None:
        """Add up the gradient over stages, as one allreduce among all ranks that use the parameter."""
        if self._stage is None or dist.get_rank() not in tie.ranks:
            return
        held, lines = self._stage.parameters[tie.name], self._stage.collectives
        parameter: Any = held.parameter
        if not parameter.requires_grad:
            return
        whole = torch.zeros(parameter.shape, dtype=parameter.dtype)
        assert lines.coordinates is not None, "it is in the mesh"
        is_first = all(
            at is not None or not place for at, place in zip(held.update, lines.coordinates, strict=True)
        )
        if is_first and parameter.grad is not None:  # of ranks with the same part one counts
            lines.part(whole, held.update).copy_(local(parameter.grad))
        dist.all_reduce(whole, group=tie.group)
        parameter.grad = over(lines.part(whole, held.update).clone(), parameter)


@dataclass(frozen=True)
class _Tie:
    """A parameter that several stages use.

    Attributes:
        name: the first in the model.
        ranks: of those stages, ascending.
        first: of the first of them.
        group: of these ranks; None outside.
    """

    name: str
    ranks: tuple[int, ...]
    first: int
    group: dist.ProcessGroup | None


def _check(
    model: Traced,
    plan: ShardedPlan,
    optimizer: OptimizerOf,
    collectives: str,
    clip_norm: float | None,
    precision: str | Precision | None,
) -> None:
    """What needs no look at the model's operators."""
    size, topology = dist.get_world_size(), plan.topology
    if collectives not in COLLECTIVES:
        raise InputError(f"collectives: must be one of {', '.join(COLLECTIVES)}, got {collectives}")
    if isinstance(optimizer, torch.optim.Optimizer):
        raise InputError("optimizer: must be a function of parameters, as these are new ones")
    if clip_norm is not None and not clip_norm >= 0:
        raise InputError(f"clip_norm: must not be negative, got {clip_norm}")
    if isinstance(precision, str):
        Precision(precision)  # raises before any group is made
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

"""Trains a model whose operators are divided over all ranks of a mesh: one stage, no pipeline.

trainer = pipeline.ShardedTrainer(traced, plan, optimizer)
loss = trainer.step(inputs, targets)  # the whole batch, on every rank
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arborcast.backends.group.process_group import SynthGroup
from arborcast.backends.options import Options
from arborcast.backends.tensors.torch_compat import forget_meshes
from arborcast.pipeline.costs.devices import device_named
from arborcast.pipeline.errors import BatchError, PlanError
from arborcast.pipeline.model.traced.model import Traced
from arborcast.pipeline.model.traced.operators import operator_trace
from arborcast.pipeline.run.batches import Tensors
from arborcast.pipeline.run.groups import COLLECTIVES
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
from arborcast.synth.topology import Topology

_ANY = device_named("h100")
"""What operators take does not count here: collectives alone do."""


class ShardedTrainer:
    """One rank's part in training a model that all ranks of the job share.

    Every operator is divided as the sharding says, and every tensor moved by the collectives that the plan
    priced, no others (`calls`). Parameters are `DTensor`s in `module`, divided as their updates are (ZeRO).
    Losses and gradients are those of serial training up to rounding, where the loss of a batch is the mean of
    those of its microbatches. Dropout draws other masks than serial training, the same ones for ranks that
    do the same work.

    Args:
        model: traced with its loss. Its values on the mesh's first rank are taken; it is not changed.
        plan: of one stage on all ranks of the job, such as `shard_model(..).plan`.
        optimizer: called with the list of parameters.
        collectives: "synth" for synthesized schedules, "gloo" for gloo's.
        groups: schedules that the groups of an axis run at once, as `FabricPrices.schedules` gives them; each
            group finds its own where there are none.
        by_schedule: whether the sharding was chosen by what schedules take, as `shard_model` does, or by
            exact rates: paths of tensors follow.
        seed: of random numbers.
        timeout_s: after which waiting for another rank fails.

    Attributes:
        module: this rank's parameters by the model's names.
        optimizer: that of the parameters.
        calls: every collective of a step, as planned.

    Raises:
        PlanError: the sharding is of another model or of another mesh, or cannot be run.
        InputError: another argument breaks a rule.
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
    ) -> None:
        (stage, *others), size = plan.stages, dist.get_world_size()
        topology, mesh = plan.topology, stage.sharding.mesh
        if collectives not in COLLECTIVES:
            raise InputError(f"collectives: must be one of {', '.join(COLLECTIVES)}, got {collectives}")
        if others:
            raise PlanError(f"plan: must have one stage to be run so, got {len(plan.stages)}")
        if sorted(mesh.ranks) != list(range(size)):
            raise PlanError(
                f"plan: mesh {mesh} must hold the {size} ranks of the job, got {list(mesh.ranks)}"
            )
        if topology.ranks != size:
            raise PlanError(
                f"topology {topology.name}: must have the {size} ranks of the job, got {topology.ranks}"
            )
        if not model.training.captured.is_loss:
            raise PlanError(f"model {model.name}: must be traced with its loss to be trained")
        self._model, self._batch, self._microbatches = model, plan.batch, plan.microbatches
        self._steps = 0
        trace = operator_trace(model, plan.batch // plan.microbatches, by_layer=plan.depth > 1)
        graph = merged(trace)
        prices = FabricPrices(topology, mesh)
        chosen = strategies_of(stage, graph, Setting(prices, _ANY))
        setting = Setting(replace(prices, by_schedule=by_schedule), _ANY, plan.microbatches)
        options = _options(topology, groups) if collectives == "synth" else None
        self._made: list[dist.ProcessGroup] = []

        def make(ranks: Sequence[int]) -> dist.ProcessGroup | None:
            if collectives == "synth":
                import arborcast.torch_backend  # noqa: F401 (makes the backend known)
            made = dist.new_group(
                ranks, timeout=timedelta(seconds=timeout_s), backend=collectives, pg_options=options
            )
            if not isinstance(made, dist.ProcessGroup):  # torch's mark for ranks outside
                return None
            self._made.append(made)
            return made

        lines = MeshCollectives(mesh, make)
        self._stage = ShardedStage(
            model, trace, graph, chosen, setting, lines, _device_mesh(lines), seed=seed
        )
        self.module: nn.Module = self._stage.module
        self.calls: tuple[Call, ...] = calls(graph, chosen, setting)
        parameters = list(self.module.parameters())
        if isinstance(optimizer, torch.optim.Optimizer):
            raise InputError("optimizer: must be a function of parameters, as these are new ones")
        self.optimizer = optimizer(parameters)

    def step(self, inputs: Tensors, targets: Tensors | None = None) -> float:
        """Train with one batch; its loss before the update, the same on every rank up to rounding.

        Args:
            inputs: all samples, as the model was traced with them, the same on every rank.
            targets: likewise, of a loss that was traced with the model.

        Raises:
            BatchError: the batch is none of as many samples, or not as the model was traced with.
        """
        given = self._model.tensors_of(inputs, targets)
        counts = {it.size(0) for it in given}
        if counts != {self._batch}:
            raise BatchError(
                f"batch: must have {self._batch} samples, as the plan says, got {sorted(counts)}"
            )
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
        """The parameters whole, by the model's names, on every rank; every rank calls it."""
        return self._stage.whole()

    def line(self, axes: tuple[int, ...]) -> dist.ProcessGroup:
        """The process group of this rank along some axes of the mesh."""
        return self._stage.collectives.lines[axes].group

    def close(self) -> None:
        """End the connections to the other ranks; every rank calls it."""
        for group in reversed(self._made):
            dist.destroy_process_group(group)
        self._made.clear()


def _options(topology: Topology, groups: tuple[GroupSchedules, ...]) -> Options:
    world = dist.group.WORLD
    known = world.options if isinstance(world, SynthGroup) else Options.from_environment(os.environ)
    ranks = tuple(range(dist.get_world_size()))
    return replace(known, topology=topology, ranks=ranks, groups=groups or known.groups)


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

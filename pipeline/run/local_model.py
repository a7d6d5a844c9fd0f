"""What a rank holds of a model: its stages with their values, their passes, and their update."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.model.layered import Layered
from arborcast.pipeline.run import checkpoints
from arborcast.pipeline.run.activation_treatment import divided
from arborcast.pipeline.run.batch_norm import BatchNorms, find_batch_norm
from arborcast.pipeline.run.boundary import FakeStage
from arborcast.pipeline.run.devices import placed
from arborcast.pipeline.run.executor import ModuleStage, StepExecutor
from arborcast.pipeline.run.initial_weights import broadcast, give_values, joined
from arborcast.pipeline.run.prepared_layers import AXES, prepared
from arborcast.pipeline.run.rank_context import RankContext
from arborcast.pipeline.run.ties import TieGroups
from arborcast.pipeline.run.training_options import OptimizerOf
from arborcast.pipeline.run.update import Update

NAMED = 3
"""Frozen parameters that are named in words."""


@dataclass(eq=False)
class LocalModel:
    """What a rank trains.

    Attributes:
        whole: the model, of which other ranks hold the rest.
        module: the layers of this rank, with the names of the whole model.
        executor: of its passes.
        update: of its parameters.
        parameters: of the whole model, by name.
        frozen: which of these are not trained, in words, as passes were last told.
        trained: whether each parameter of `module` is, where it must stay so: where a function of the user's
            made them, or they are divided.
        lent: names in `module` that other ranks write to checkpoints.
    """

    whole: Layered
    module: nn.Module
    executor: StepExecutor
    update: Update
    parameters: dict[str, nn.Parameter]
    frozen: str
    trained: dict[str, bool] = field(default_factory=dict)
    lent: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        model: Layered,
        optimizer: OptimizerOf,
        context: RankContext,
    ) -> LocalModel:
        """This rank's part of a model, with the same values as its replicas; every rank calls it.

        Raises:
            CheckpointError: stored values are not of this model; on all ranks.
            PlanError: stages that share layers share parameters with others.
        """
        place, options, groups, faults = context.place, context.options, context.groups, context.faults
        whole = dict(model.divide(0, model.depth).named_parameters(remove_duplicate=False))
        frozen = frozen_of(whole)
        ties = TieGroups(place.plan, model.ties, groups.make)
        if options.prepare is not None and ties.holders:
            raise PlanError(
                "prepare: must not share layers whose parameters several stages use, got "
                f"{' '.join(sorted(ties.holders))}"
            )
        stages = [place.plan.stages[it.stage] for it in place.assignments]
        ranges = [(it.start, it.end) for it in stages]
        context.together(
            "giving the stage its weights", lambda: give_values(model, ranges, options.weights, options.seed)
        )
        parts = []
        fakes = [FakeStage(model, *bounds, context.device) for bounds in ranges]
        for assignment, fake in zip(place.assignments, fakes, strict=True):
            layers = placed(divided(model, place.plan.segments(assignment.stage)), context.device)
            parts.append(ModuleStage(assignment, layers, fake, context))
        module = joined([part.module for part in parts])
        parameters, trained = _named(module, model), {}
        with faults.all_or_nothing(lambda: "starting"):
            is_deferred, norms = options.batch_norm == "deferred", None
            held = (*module.parameters(), *module.buffers())
            if groups.stage is not None:
                broadcast(held, groups.stage, place.assignments[0].ranks[0])
            if (groups.stage is not None or is_deferred) and find_batch_norm(module):
                norms = BatchNorms(module, groups.stage, is_deferred=is_deferred)
            ties.equalise(parameters)
            if groups.mesh is not None and options.prepare is not None:
                mesh = groups.mesh
                broadcast(held, mesh.get_group(AXES[1]), int(mesh[AXES[1]].mesh[0]))
                for part in parts:
                    part.module = prepared(part.module, mesh, options.prepare)
                module = joined([part.module for part in parts])
                parameters = _named(module, model)
                trained = {name: it.requires_grad for name, it in module.named_parameters()}
            modules = {part.assignment.stage: part.module for part in parts}
            update = Update(parameters, modules, optimizer, ties, context)
            update.warm_up_collectives()
            groups.meet()
        output_dims = model.sample_dims(model.depth)
        executor = StepExecutor(parts, module, update, context, output_dims, norms)
        return cls(model, module, executor, update, whole, frozen, trained)

    def state(self, module: nn.Module) -> dict[str, Any]:
        """What this rank gives to the state of the whole model, of a module with the entries of its own."""
        return {name: it for name, it in module.state_dict().items() if name not in self.lent}

    def entries(self) -> dict[str, Any]:
        """What this rank writes to a checkpoint.

        Raises:
            CheckpointError: an entry of the model is no tensor.
        """
        model = self.state(self.module) if self.executor.parts else {}
        optimizer = checkpoints.optimizer_entries(self.update.optimizer, self.update.parameters)
        lent = tuple(f"{it}." for it in self.update.parameters if it in self.lent)
        return {
            "model": checkpoints.tensors_of(model),
            "optimizer": {
                key: it for key, it in optimizer.items() if not key.partition(".")[2].startswith(lent)
            },
        }

    def loading(self, folder: Path | str) -> checkpoints.Loading:
        """What this rank is to read of a checkpoint.

        Raises:
            CheckpointError: it cannot be read, or does not fit.
        """
        whole = self.whole.divide(0, self.whole.depth)
        return checkpoints.Loading(folder, whole, self.module, self.update.optimizer, self.update.parameters)

    def loaded(self) -> None:
        """After values were read into `module`."""

    def close(self) -> None:
        """Let go of the parameters."""
        self.update.close()


def frozen_of(parameters: dict[str, nn.Parameter]) -> str:
    """Names of those that are not trained, of many the first ones and a checksum of all."""
    names = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if len(names) <= NAMED:
        return " ".join(names)
    rest = f"and {len(names) - NAMED} more (checksum {zlib.crc32(' '.join(names).encode()):08x})"
    return " ".join([*names[:NAMED], rest])


def _named(module: nn.Module, model: Layered) -> dict[str, Any]:
    """The parameters of a stage, each once; a shared one under the name of its tie."""
    whole = dict(model.divide(0, model.depth).named_parameters(remove_duplicate=False))
    shared = {id(whole[name]): name for name, _ in model.ties}
    return {shared.get(id(parameter), name): parameter for name, parameter in module.named_parameters()}

"""What a rank holds of a model: its stages with their values, their passes, and their update."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.model.layered import Layered
from arborcast.pipeline.run import checkpoints
from arborcast.pipeline.run.activation_treatment import divided
from arborcast.pipeline.run.assignment import RankAssignment
from arborcast.pipeline.run.batch_norm import (
    DeferredStatistics,
    find_batch_norm,
    restore_batch_norm,
    synchronise_batch_norm,
)
from arborcast.pipeline.run.boundary import FakeStage
from arborcast.pipeline.run.executor import LocalStage, StepExecutor
from arborcast.pipeline.run.failures import FailureBroadcast
from arborcast.pipeline.run.initial_weights import broadcast, give_values, joined
from arborcast.pipeline.run.precision import Precision
from arborcast.pipeline.run.prepared_layers import AXES, prepared
from arborcast.pipeline.run.recorder import PassRecorder
from arborcast.pipeline.run.stage_groups import Groups
from arborcast.pipeline.run.stage_messages import Messenger
from arborcast.pipeline.run.ties import TieGroups
from arborcast.pipeline.run.training_options import TrainingOptions
from arborcast.pipeline.run.update import OptimizerOf, Update

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
        trained: whether each parameter of `module` is, where a function of the user's made them.
    """

    whole: Layered
    module: nn.Module
    executor: StepExecutor
    update: Update
    parameters: dict[str, nn.Parameter]
    frozen: str
    trained: dict[str, bool] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: Layered,
        optimizer: OptimizerOf,
        options: TrainingOptions,
        place: RankAssignment,
        groups: Groups,
        faults: FailureBroadcast,
        links: Messenger,
        precision: Precision,
        recorder: PassRecorder,
    ) -> LocalModel:
        """This rank's part of a model, with the same values as its replicas; every rank calls it.

        Raises:
            CheckpointError: stored values are not of this model; on all ranks.
            PlanError: stages that share layers share parameters with others.
        """
        whole = dict(model.divide(0, model.depth).named_parameters(remove_duplicate=False))
        frozen = frozen_of(whole)
        ties = TieGroups(place.plan, model.ties, groups.make)
        if options.prepare is not None and ties.holders:
            raise PlanError(
                "prepare: must not share layers whose parameters several stages use, got "
                f"{' '.join(sorted(ties.holders))}"
            )
        stages = [place.plan.stages[it.stage] for it in place.assignments]
        doing, ranges = "giving the stage its weights", [(it.start, it.end) for it in stages]
        with faults.all_or_nothing(lambda: doing, forgives=True), groups.patient():
            checkpoints.together(
                groups.job, lambda: give_values(model, ranges, options.weights, options.seed)
            )
        parts = []
        for assignment, bounds in zip(place.assignments, ranges, strict=True):
            fake = FakeStage(model, *bounds)  # before batch norm is changed
            parts.append(LocalStage(assignment, divided(model, place.plan.segments(assignment.stage)), fake))
        module = joined([part.module for part in parts])
        parameters, trained = _named(module, model), {}
        with faults.all_or_nothing(lambda: "starting"):
            deferred = DeferredStatistics(module) if options.batch_norm == "deferred" else None
            held = (*module.parameters(), *module.buffers())
            if groups.stage is not None:
                broadcast(held, groups.stage, place.assignments[0].ranks[0])
            if find_batch_norm(module) and (groups.stage is not None or deferred is not None):
                synchronise_batch_norm(module, groups.stage, deferred)
            ties.equalise(parameters)
            if groups.mesh is not None and options.prepare is not None:
                mesh = groups.mesh
                broadcast(held, mesh.get_group(AXES[1]), int(mesh[AXES[1]].mesh[0]))
                parts = [replace(it, module=prepared(it.module, mesh, options.prepare)) for it in parts]
                module = joined([part.module for part in parts])
                parameters = _named(module, model)
                trained = {name: it.requires_grad for name, it in module.named_parameters()}
            update = Update(
                parameters,
                {part.assignment.stage: part.module for part in parts},
                optimizer,
                len(place.sharers),
                groups,
                ties,
                precision,
                recorder,
                accumulate=options.accumulate,
                clip_norm=options.clip_norm,
            )
            update.warm_up_collectives()
            groups.meet()
        executor = StepExecutor(
            parts,
            module,
            place,
            options,
            groups,
            links,
            precision,
            recorder,
            output_dims=model.sample_dims(model.depth),
            deferred=deferred,
            last_pass=update.last_pass,
            on_gradients=update.gradients_complete,
        )
        return cls(model, module, executor, update, whole, frozen, trained)

    def close(self) -> None:
        """Let go of the parameters, and of batch norm's groups."""
        self.update.close()
        restore_batch_norm(self.module)


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

"""What a rank holds of a model whose stages are divided over meshes: to a trainer a stage like others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arborcast.pipeline.costs.devices import device_named
from arborcast.pipeline.meshes import Axes, Mesh
from arborcast.pipeline.model.split import SplitBackward
from arborcast.pipeline.model.traced.model import Traced
from arborcast.pipeline.run import checkpoints
from arborcast.pipeline.run.assignment import Assignment
from arborcast.pipeline.run.batches import Batch
from arborcast.pipeline.run.boundary import Boundaries, FakeStage
from arborcast.pipeline.run.executor import LocalStage, StepExecutor
from arborcast.pipeline.run.gradients import Gradients, SummedGradients
from arborcast.pipeline.run.initial_weights import broadcast, give_values
from arborcast.pipeline.run.intra.divided_stage import DividedStage, undivided
from arborcast.pipeline.run.intra.mesh_collectives import MeshCollectives
from arborcast.pipeline.run.intra.slice_messages import CrossingTensor, slices_of
from arborcast.pipeline.run.intra.stage_contents import StageContents
from arborcast.pipeline.run.local_model import LocalModel
from arborcast.pipeline.run.rank_context import RankContext
from arborcast.pipeline.run.stage_groups import device_mesh
from arborcast.pipeline.run.stage_messages import BoundaryMessages, Messenger, TagOf
from arborcast.pipeline.run.ties import TieGroups
from arborcast.pipeline.run.training_options import OptimizerOf
from arborcast.pipeline.run.update import Update
from arborcast.pipeline.sharding.evaluation import CollectiveCall, calls
from arborcast.pipeline.sharding.fabric_prices import FabricPrices
from arborcast.pipeline.sharding.plan_strategies import strategies_of
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.stages import Plan

_ANY = device_named("h100")
"""What operators take does not count here: collectives alone do."""


class DividedGradients(SummedGradients):
    """Gradients that add up where values are read, and come home before an update.

    Args:
        stage: whose parameters they are of.
    """

    def __init__(self, stage: DividedStage) -> None:
        super().__init__(it.parameter for it in stage.parameters.values())
        self._stage = stage

    def complete(self) -> None:
        """Bring them home."""
        self._stage.finish_gradients()

    def updated(self) -> None:
        """Bring new values to where they are stored."""
        self._stage.spread_updates()


class _StageModule(nn.Module):
    """A divided stage as what is called with tensors."""

    def __init__(self, stage: DividedStage, received: Sequence[str], sent: Sequence[str]) -> None:
        super().__init__()
        self.held = stage.module
        self._run, self._received, self._sent, self._is_last = stage.forward, received, sent, stage.is_last

    def __call__(self, *tensors: Tensor) -> Any:
        """Run it; hooks for all modules are for those of the model."""
        count = len(self._received)
        turn = torch.default_generator.initial_seed()  # of this pass, and of its recomputation
        received = dict(zip(self._received, tensors, strict=False))
        made, loss = self._run(tensors[count:], received, turn=turn)
        return loss if self._is_last else tuple(made[it] for it in self._sent)


class DividedOperators(LocalStage):
    """The operators of a stage, each divided over the mesh.

    Args:
        assignment: of this rank to the stage.
        stage: divided.
        crossing: what crosses behind each stage of the plan but the last.
        meshes: of all stages.
        model: that they are of.
        autocast: makes the context of forward passes where it makes other types than were traced.
    """

    takes_inputs, checks_loss = True, False

    def __init__(
        self,
        assignment: Assignment,
        stage: DividedStage,
        crossing: Sequence[Sequence[CrossingTensor]],
        meshes: Sequence[Mesh],
        model: Traced,
        autocast: Callable[[], AbstractContextManager[Any]] | None,
    ) -> None:
        self.assignment = assignment
        self._stage, self._meshes, self._model, self._autocast = stage, meshes, model, autocast
        own = assignment.plan.stages[assignment.stage]
        self._layers = own.start, own.end
        self._fake = None if autocast is None or not any(crossing) else FakeStage(model, *self._layers)
        number = assignment.stage
        self._ends = ((), *crossing, ())[number : number + 2]
        before, behind = ([it.tensor.value for it in tensors] for tensors in self._ends)
        self.module = _StageModule(stage, before, behind)
        self._microbatches = assignment.plan.microbatches

    def follow(self, trained: Mapping[str, bool]) -> None:
        """What is trained does not change (`LocalModel.trained`)."""

    def boundaries(self, batch: Batch, *, training: bool) -> Boundaries:
        """As `LocalStage.boundaries`: as traced, of types that layers make of them."""
        types = self._types(batch, training)
        before, behind = (
            tuple(replace(it.spec, dtype=types.get(it.tensor.value, it.dtype)) for it in tensors)
            for tensors in self._ends
        )
        return Boundaries(before, behind, overwrites=False)

    def _types(self, batch: Batch, training: bool) -> dict[str, torch.dtype]:
        """Of what crosses, by name, where autocast makes others than were traced."""
        if self._fake is None or self._autocast is None:
            return {}
        found = self._fake.boundaries(batch.inputs, batch.sizes, training=training, autocast=self._autocast)
        ends = zip(self._layers, (found.taken, found.given), strict=True)
        return {
            it.name: spec.dtype
            for cut, specs in ends
            for it, spec in zip(self._model.crossing(cut) if specs else (), specs, strict=True)
        }

    def messages(
        self, boundaries: Boundaries, sizes: Sequence[int], links: Messenger, tag_of: TagOf, *, behind: bool
    ) -> BoundaryMessages:
        """As `LocalStage.messages`."""
        number = self.assignment.stage - (not behind)
        senders, receivers = self._meshes[number : number + 2]
        slices = slices_of([it.tensor for it in self._ends[behind]], senders, receivers, dist.get_rank())
        wires = boundaries.given if behind else boundaries.taken
        return BoundaryMessages(f"stage {self.assignment.stage}", wires, slices, links, tag_of)

    def begin(self, batch: Batch) -> None:
        """As `LocalStage.begin`."""
        self._stage.begin(batch.inputs)

    def split(self) -> SplitBackward:
        """As `LocalStage.split`: passes read parts of parameters, of which some are gathered."""
        return SplitBackward((), self._stage.leaves)

    def loss_of(self, output: Any, labels: Any) -> Tensor:
        """As `LocalStage.loss_of`: the mean of those of equal microbatches is that of the batch."""
        loss: Tensor = output / self._microbatches
        return loss


@dataclass(eq=False)
class DividedModel(LocalModel):
    """As `LocalModel`, of a plan whose stages are divided.

    Attributes:
        stage: of this rank; None without work.
        calls: every collective of operators and updates of a step on this rank's stage, as planned.
        lines: the groups of this rank along some axes of its mesh.
        crossing_bytes: for each boundary what crosses it in a step, values and gradients, in float32.
    """

    stage: DividedStage | None = None
    calls: tuple[CollectiveCall, ...] = ()
    lines: Mapping[Axes, dist.ProcessGroup] = field(default_factory=dict)
    crossing_bytes: tuple[int, ...] = ()

    @classmethod
    def divided(
        cls,
        model: Traced,
        plan: Plan,
        by_schedule: bool,
        optimizer: OptimizerOf,
        context: RankContext,
    ) -> DividedModel:
        """This rank's part of a model; every rank calls it.

        Values are those of the model on the first rank of each mesh, of what several stages use on the first
        rank of the first of them, and of all that is no parameter on the first rank of the plan.

        Raises:
            CheckpointError: stored values are not of this model; on all ranks.
            PlanError: the plan is of another model, or cannot be run.
        """
        place, options, groups, faults = context.place, context.options, context.groups, context.faults
        context.together(
            "giving the model its weights",
            lambda: give_values(model, [(0, model.depth)], options.weights, options.seed),
        )
        stage: DividedStage | None = None
        made: tuple[CollectiveCall, ...] = ()
        gradients: Callable[[], Gradients] | None = None
        with faults.all_or_nothing(lambda: "dividing the model", forgives=True), groups.patient():
            contents = checkpoints.together(groups.job, lambda: StageContents.of(model, plan, place.rank))
            meshes = [MeshCollectives(it.mesh) for it in plan.stages]
            for mesh in meshes:
                mesh.connect(groups.make)
            ties = TieGroups(place.plan, contents.ties(place.plan), groups.make)
            rest = undivided(model, contents.trace)
            broadcast(rest.values(), groups.job, meshes[0].mesh.ranks[0])
            tied = {name: attrgetter(name)(model.model).detach().clone() for name in ties.mine}
            ties.equalise(tied)

            assert plan.topology is not None, "the plan divides operators"
            fabric = plan.topology

            def divide() -> tuple[DividedStage, tuple[CollectiveCall, ...]] | None:
                if contents.mine is None:
                    return None
                own, graph = plan.stages[contents.mine], contents.graphs[contents.mine]
                prices = FabricPrices(fabric, own.mesh)
                chosen = strategies_of(own, graph, Setting(prices, _ANY))
                setting = Setting(replace(prices, by_schedule=by_schedule), _ANY, plan.microbatches)
                lines = meshes[contents.mine]
                found = DividedStage(
                    model, contents.trace, graph, chosen, setting, lines, values=tied, rest=rest
                )
                return found, calls(graph, chosen, setting)

            checked = checkpoints.together(groups.job, divide)
            if checked is not None:
                stage, made = checked
                stage.distribute(_device_mesh(meshes[contents.mine or 0]))
        module = nn.Module() if stage is None else stage.module
        held = {} if stage is None else stage.parameters
        if stage is not None:
            gradients = lambda: DividedGradients(stage)  # noqa: E731
        with faults.all_or_nothing(lambda: "starting"):
            parameters = {name: it.parameter for name, it in held.items()}
            update = Update(parameters, {}, optimizer, ties, context, gradients)
            update.warm_up_collectives()
            groups.meet()
        parts = []
        if stage is not None:
            shapes, autocast = [it.mesh for it in meshes], context.precision.autocast
            casts = autocast if context.precision.dtype != "float32" else None
            own = place.assignments[0]
            parts.append(DividedOperators(own, stage, contents.crossing, shapes, model, casts))
        executor = StepExecutor(parts, module, update, context)
        first = model.holdings.names
        ends = [(one.mesh, other.mesh) for one, other in pairwise(plan.stages)]
        return cls(
            model,
            module,
            executor,
            update,
            {},
            "",
            {name: it.requires_grad for name, it in module.named_parameters()},
            frozenset(name for name in module.state_dict() if not contents.is_written(first[name])),
            stage,
            made,
            {axes: it.group for mesh in meshes for axes, it in mesh.lines.items()},
            tuple(
                plan.microbatches * sum(it.bytes_of(*both) for it in crossing)
                for both, crossing in zip(ends, contents.crossing, strict=True)
            ),
        )

    def loaded(self) -> None:
        """As `LocalModel.loaded`."""
        if self.stage is not None:
            self.stage.spread_updates()


def _device_mesh(collectives: MeshCollectives) -> Any:
    """The mesh as torch has it; None for one rank."""
    mesh = collectives.mesh
    if not mesh.shape:
        return None
    groups = [collectives.lines[axis,].group for axis in range(len(mesh.shape))]
    names = tuple(f"axis {axis}" for axis in range(len(mesh.shape)))
    return device_mesh(groups, torch.tensor(mesh.ranks).reshape(mesh.shape), names)

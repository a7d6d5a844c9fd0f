"""From the gradients of this rank to its new weights: replicas, ties, scale, clipping, optimizer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from arborcast.pipeline.run.clipping import clip_gradients
from arborcast.pipeline.run.gradients import GradientBuffer, Gradients, ShardedGradients
from arborcast.pipeline.run.local_steps import on_parts
from arborcast.pipeline.run.prepared_layers import is_over_data
from arborcast.pipeline.run.rank_context import RankContext
from arborcast.pipeline.run.ties import TieGroups
from arborcast.pipeline.run.training_options import OptimizerOf
from arborcast.synth.errors import InputError


class Update:
    """The end of a step on one rank.

    Args:
        parameters: of this rank's stages, each once; a shared one under its name in the whole model.
        modules: by stage, its layers.
        optimizer: see `Trainer`.
        ties: parameters that several stages hold.
        context: of this rank.
        gradients: makes what looks after the gradients; None for what parameters and replicas ask for.

    Attributes:
        unit: that losses which are sums are divided by until the weight of an update is known: near the last
            one's, so that float16 neither overflows nor loses small gradients, and a power of two, which
            rounds nothing.
        norm: of all gradients before they were clipped, in the last update; None before or without.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        modules: Mapping[int, nn.Module],
        optimizer: OptimizerOf,
        ties: TieGroups,
        context: RankContext,
        gradients: Callable[[], Gradients] | None = None,
    ) -> None:
        self.parameters = parameters
        self.optimizer = _optimizer_of(optimizer, list(parameters.values()))
        self.unit: float | None = None
        self.norm: float | None = None
        self._modules = modules
        # In the order in which stages use them, as far as that is known.
        self._held = {stage: tuple(module.parameters()) for stage, module in modules.items()}
        self._groups, self._precision, self._recorder = context.groups, context.precision, context.recorder
        self._replicas = len(context.place.sharers)
        self._make = gradients
        self._buffer, self._sums = self._gradients()
        self._ties = ties
        self._accumulate, self._clip_norm = context.options.accumulate, context.options.clip_norm
        self._batches = 0
        self._weight: float | None = None

    def warm_up_collectives(self) -> None:
        """Run each allreduce once, so that schedules are found before the first step and not in it."""
        self._buffer.zero()
        if self._sums is not None:
            self._sums.start_allreduce(self._replica_group)
            self._sums.wait()
        self._ties.synchronise(self.parameters, self._buffer)

    def check_complete(self, what: str) -> None:
        """Refuse what cannot be done while gradients of several batches are adding up.

        Args:
            what: that is, as "parameters must be frozen or unfrozen".

        Raises:
            InputError: some batches of an update are still to come.
        """
        if self._batches:
            raise InputError(
                f"trainer: {what} between updates, got it after {self._batches} of the {self._accumulate} "
                "batches of one"
            )

    def retrain(self) -> None:
        """After parameters were frozen or unfrozen: make room for the gradients of those that are trained."""
        self._buffer.close()
        self._buffer, self._sums = self._gradients()
        self.warm_up_collectives()

    def begin(self, samples: int) -> None:
        """Before the passes of a batch of so many samples."""
        if self._batches == 0:
            self._buffer.zero()
            if self.unit is None:
                self.unit = _power_of_two(samples)
        if self._sums is not None and self._is_last:
            self._sums.expect(self._replica_group, self._held.values())
        if isinstance(self._buffer, ShardedGradients):
            self._buffer.hold()

    def _gradients(self) -> tuple[Gradients, GradientBuffer | None]:
        """Of this rank; and those that are to be summed over replicas, where it has any."""
        if self._make is not None:
            return self._make(), None
        if any(is_over_data(it) for it in self.parameters.values()):
            return ShardedGradients(self.parameters.values(), self._modules), None
        if self._groups.stage is None:
            return Gradients(self.parameters.values()), None
        made = GradientBuffer(self.parameters.values())
        return made, made

    @property
    def _replica_group(self) -> dist.ProcessGroup:
        assert self._groups.stage is not None, "there is somebody to sum with"
        return self._groups.stage

    @property
    def _is_last(self) -> bool:
        """Whether this is the last batch that an update is for."""
        return self._batches == self._accumulate - 1

    def last_pass(self, stage: int) -> AbstractContextManager[None]:
        """Around the last pass of a batch that gives gradients of a stage's parameters.

        In the last batch of an update, sums over the replicas begin as soon as gradients are there.
        """
        if isinstance(self._buffer, ShardedGradients) and self._is_last:
            return self._buffer.last_pass(stage)
        if self._sums is None or not self._is_last:
            return nullcontext()
        return self._sums.last_pass(self._held[stage])

    def gradients_complete(self) -> None:
        """Begin all other sums over the replicas, after the last backward pass of a batch."""
        if self._is_last:
            self._buffer.complete()
            if self._sums is not None:
                self._sums.start_allreduce(self._replica_group)

    def wait(self) -> None:
        """Until the sums over the replicas are there."""
        if self._sums is None:
            return
        began_ns = self._sums.began_ns
        self._sums.wait()
        if began_ns is not None:
            self._recorder.add("allreduce", None, began_ns, time.perf_counter_ns())

    def end(self, weight: float | None) -> None:
        """After the passes of a batch, and `wait`: the update, when it is time for one.

        Args:
            weight: of the batch, where its losses are sums that were divided by `unit`.

        Raises:
            InputError: it has one and another batch of the update has none.
        """
        if self._batches and (weight is None) != (self._weight is None):
            raise InputError(
                "loss_fn: must return one number always or a pair always, got both in the "
                f"{self._accumulate} batches of an update"
            )
        self._batches += 1
        if weight is not None:
            self._weight = weight + (self._weight or 0.0)
        if self._batches < self._accumulate:
            return
        self._batches = 0
        with self._recorder.measure("update"):
            self._ties.synchronise(self.parameters, self._buffer)
            if self._weight is not None:
                assert self.unit is not None, "set at the beginning"
                for gradient in self._buffer.tensors:
                    gradient.mul_(self.unit / self._weight)
                self.unit, self._weight = _power_of_two(self._weight), None
            self._precision.unscale(self._buffer.tensors)
            if self._clip_norm is not None:
                self.norm = clip_gradients(
                    self.parameters,
                    self._clip_norm,
                    group=self._groups.job,
                    replicas=self._replicas,
                    ties=self._ties.holders,
                )
            self._buffer.detach_unused()
            with on_parts(self.optimizer):
                self._precision.step(self.optimizer)
            self._precision.update()
            self._buffer.updated()

    def close(self) -> None:
        """Let go of the parameters."""
        self._buffer.close()


def _power_of_two(near: float) -> float:
    return math.ldexp(1.0, round(math.log2(near)))


def _optimizer_of(optimizer: OptimizerOf, parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
    """The optimizer of a stage's parameters; None where there are none."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer(parameters) if parameters else None
    mine = {id(parameter) for parameter in parameters}
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in mine]
    for parameter in [it for it in optimizer.state if id(it) not in mine]:
        del optimizer.state[parameter]  # some have it from the start, and none could be saved or loaded
    return optimizer if any(group["params"] for group in optimizer.param_groups) else None

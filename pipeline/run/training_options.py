"""What a trainer is told, and whether it fits together, the model and the job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from arborcast.pipeline.costs.saved_bytes import described
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.model.layered import Layered
from arborcast.pipeline.order import ORDERS
from arborcast.pipeline.run.divisibility import check_divisible
from arborcast.pipeline.run.initial_weights import Weights
from arborcast.pipeline.run.losses import REDUCTIONS, SHARE, LossFunction
from arborcast.pipeline.run.precision import Precision
from arborcast.pipeline.run.prepared_layers import Prepare
from arborcast.pipeline.stages import Plan
from arborcast.synth.errors import InputError

OptimizerOf = Callable[[list[nn.Parameter]], torch.optim.Optimizer] | torch.optim.Optimizer
"""Makes an optimizer of parameters; or one of the whole model's."""

BATCH_NORMS = ("microbatch", "deferred")
"""When running statistics of batch norm change."""


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How to train; each as `Trainer` takes it."""

    loss_fn: LossFunction | None
    loss_reduction: str = "mean"
    check_loss: bool = True
    seed: int = 0
    batch_norm: str = "microbatch"
    accumulate: int = 1
    clip_norm: float | None = None
    prepare: Prepare | None = None
    tensor_ranks: int = 1
    metrics: Mapping[str, LossFunction] = field(default_factory=dict)
    keep_outputs: bool = False
    weights: Weights | None = None

    @property
    def reduction(self) -> str:
        """Of the losses of shares."""
        return SHARE if self.loss_fn is None else self.loss_reduction

    def words(self, collectives: str, precision: str | Precision | None) -> str:
        """What must be alike on all ranks."""
        arithmetic = precision.dtype if isinstance(precision, Precision) else precision or "float32"
        return (
            f"loss_reduction {self.loss_reduction}, accumulate {self.accumulate}, clip_norm "
            f"{self.clip_norm}, precision {arithmetic}, seed {self.seed}, batch_norm {self.batch_norm}, "
            f"collectives {collectives}"
            + (f", metrics {' '.join(self.metrics)}" if self.metrics else "")
            + (f", tensor_ranks {self.tensor_ranks}" if self.prepare is not None else "")
        )

    def check_alone(self, timeout_s: float, device: torch.device, precision: str | Precision | None) -> None:
        """See that each may be so whatever the plan.

        Raises:
            InputError: an argument breaks a rule.
        """
        for name, value, rule, holds in (
            *(
                (name, getattr(self, name), f"be one of {', '.join(words)}", getattr(self, name) in words)
                for name, words in (("loss_reduction", REDUCTIONS), ("batch_norm", BATCH_NORMS))
            ),
            ("accumulate", self.accumulate, "be at least 1", self.accumulate >= 1),
            ("clip_norm", self.clip_norm, "not be negative", self.clip_norm is None or self.clip_norm >= 0),
            ("timeout_s", timeout_s, "be positive", timeout_s > 0),
            ("tensor_ranks", self.tensor_ranks, "be at least 1", self.tensor_ranks >= 1),
        ):
            if not holds:
                raise InputError(f"{name}: must {rule}, got {value}")
        if isinstance(precision, str):
            Precision(precision, device.type)  # raises before any group is made
        elif precision is not None and precision.device != device.type:
            raise InputError(f"precision: must be for device {device.type}, got one for {precision.device}")

    def check(self, plan: Plan, optimizer: OptimizerOf) -> None:
        """See that each may be so with a plan, in this job.

        Raises:
            PlanError: the plan is for more ranks, or has what stages that several ranks share cannot.
            InputError: another argument breaks a rule.
        """
        size = dist.get_world_size()
        if max(plan.ranks) >= size:
            raise PlanError(f"plan: ranks must be in 0..{size - 1} of the job, got {max(plan.ranks)}")
        if self.prepare is None:
            if self.tensor_ranks > 1:
                raise InputError(
                    f"prepare: must share layers among tensor_ranks {self.tensor_ranks}, got none"
                )
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

    def check_divided(self, model: object, optimizer: OptimizerOf, device: torch.device) -> None:
        """See that each may be so where operators of stages are divided.

        Raises:
            InputError: one may not.
        """
        losses = getattr(model, "losses", None)
        if losses is None:
            raise InputError(
                "model: must be traced (pipeline.trace) for a plan whose stages are divided, got "
                f"{type(model).__name__}"
            )
        if not losses:
            name = getattr(model, "name", "")
            raise PlanError(f"model {name}: must be traced with its loss to be trained")
        if isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(
                "optimizer: must be a function of parameters where layers are divided, got "
                f"{type(optimizer).__name__}"
            )
        if device.type != "cpu":
            raise InputError(f"device: must be cpu where the plan divides layers, got {device}")
        if self.prepare is not None or self.batch_norm != "microbatch":
            name = "batch_norm" if self.prepare is None else "prepare"
            raise InputError(f"{name}: must be left out where the plan divides layers, got one")

    def check_model(self, model: Layered, plan: Plan, optimizer: OptimizerOf) -> None:
        """See that all is for this model.

        Raises:
            PlanError: the plan is for another one.
            InputError: the loss or the optimizer is.
        """
        if plan.depth != model.depth:
            raise PlanError(f"plan: must have as many layers as the model, {model.depth}, got {plan.depth}")
        name = getattr(model, "name", None)
        if isinstance(name, str) and plan.model and name != plan.model:
            raise PlanError(f"plan: must be for model {name}, got one for {plan.model}")
        self._check_loss(bool(getattr(model, "losses", ())))
        check_divisible(model, plan)
        _check_optimizer(optimizer, model.divide(0, model.depth).parameters())

    def _check_loss(self, returns_loss: bool) -> None:
        """See that either the model or a function tells the loss."""
        if returns_loss and self.loss_fn is not None:
            raise InputError(
                "loss_fn: must be None, as the model returns its loss (or leave the labels out of its "
                f"inputs), got {getattr(self.loss_fn, '__name__', type(self.loss_fn).__name__)}"
            )
        asked = {"metrics": self.metrics, "keep_outputs": self.keep_outputs}
        tells = [name for name, value in asked.items() if value]
        if returns_loss and tells:
            raise InputError(
                f"{' and '.join(tells)}: must be left out for a model that returns its loss, as its stages "
                "give no other output; leave the labels out of its inputs and pass a loss_fn"
            )
        if not returns_loss and self.loss_fn is None:
            raise InputError(
                "loss_fn: must be a function of outputs and targets, as the model returns no loss"
            )


def check_job() -> None:
    """See that there is a job.

    Raises:
        InputError: there is none.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError("trainer: torch.distributed must be initialised (init_process_group), got no group")


def _check_optimizer(optimizer: OptimizerOf, parameters: Iterable[nn.Parameter]) -> None:
    """Refuse an optimizer of something else than the whole model's parameters, on all ranks alike.

    Raises:
        InputError: it holds none of those that are to be trained.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if trained and not any(id(parameter) in held for parameter in trained):
        raise InputError(
            f"optimizer: must hold parameters of the model, got none of its {len(trained)} that are trained"
        )


def words_of_plan(plan: Plan) -> str:
    """What must be alike on all ranks."""
    stages = " ".join(f"[{it.start}, {it.end}) on {','.join(map(str, it.ranks))}" for it in plan.stages)
    recompute = ", recompute" if plan.recompute else ""
    for index, stage in enumerate(plan.stages):
        recompute += f", stage {index} {described(stage.segments)}" if stage.segments else ""
    cap = "" if plan.max_in_flight is None else f", at most {plan.max_in_flight} in flight"
    return f"layers {stages}, {plan.microbatches} microbatches, order {plan.order}{recompute}{cap}"

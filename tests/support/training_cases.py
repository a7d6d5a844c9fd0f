"""Models, batches and serial training that tests of the pipeline trainer compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from arborcast.pipeline.costs.saved_bytes import Segment, Treatment
from arborcast.pipeline.model.divisible import Divisible
from arborcast.pipeline.stages import Plan, divided
from arborcast.pipeline.trainer import Trainer

FEATURES, CLASSES = 6, 4
LAYERS = 8
MICROBATCHES = 3

cross_entropy = nn.functional.cross_entropy


def network(seed: int = 0) -> Divisible:
    """Eight layers; some stages begin with one that changes its input in place."""
    torch.manual_seed(seed)
    return Divisible(
        nn.Linear(FEATURES, 8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.ReLU(inplace=True),
        nn.Linear(8, 8),
        nn.ReLU(inplace=True),
        nn.Sigmoid(),
        nn.Linear(8, CLASSES),
    )


class Fork(nn.Module):
    """Gives several tensors, of several types, of which one is not to be differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(x)
        return y * 3, x > 0, y[:, :FEATURES].double()


class Middle(nn.Module):
    """Uses some of what it is given, in place, and passes the rest on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor, skipped: Tensor) -> tuple[Tensor, ...]:
        return torch.tanh(self.linear(x.mul_(0.5))) * 2, mask, skipped


class Join(nn.Module):
    """Takes them all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8 + FEATURES, CLASSES)

    def forward(self, x: Tensor, mask: Tensor, skipped: Tensor) -> Tensor:
        result: Tensor = self.linear(torch.cat([x, skipped.float() * mask], dim=1))
        return result


def branching() -> Divisible:
    """Several tensors cross each boundary."""
    torch.manual_seed(0)
    return Divisible(Fork(), Middle(), Middle(), Join())


def frozen() -> Divisible:
    """The first two layers are not trained, so that no gradients cross behind them."""
    model = network()
    for layer in list(model)[:3]:
        layer.requires_grad_(False)
    return model


def normalised() -> Divisible:
    """Batch norm, whose statistics depend on the microbatches."""
    torch.manual_seed(0)
    return Divisible(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)
    )


class Embedded(nn.Module):
    """A linear layer by the weights of another one."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def tied() -> Divisible:
    """The first and the last layer share a weight."""
    torch.manual_seed(0)
    first = nn.Linear(FEATURES, 8)
    return Divisible(first, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), Embedded(first.weight))


class Aside(nn.Module):
    """Gives a second tensor, which nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(FEATURES, 8), nn.Linear(FEATURES, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x), self.unused(x)


class Ignoring(nn.Module):
    """Takes both, and may stop gradients."""

    def __init__(self, stops: bool) -> None:
        super().__init__()
        self.stops = stops
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, aside: Tensor) -> Tensor:
        return torch.tanh(self.linear(x.detach() if self.stops else x))


def aside() -> Divisible:
    """Some parameters have no gradient, and an optimizer with weight decay must not touch them."""
    torch.manual_seed(0)
    return Divisible(Aside(), Ignoring(False), nn.Linear(8, CLASSES))


def stopped() -> Divisible:
    """Likewise those of the whole first stage."""
    torch.manual_seed(0)
    return Divisible(nn.Linear(FEATURES, FEATURES), nn.Tanh(), Aside(), Ignoring(True), nn.Linear(8, CLASSES))


def decaying(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer that changes weights even where their gradient is 0."""
    return torch.optim.AdamW(parameters, 0.01, eps=1e-3, weight_decay=0.5)


class Unmodified(nn.Module):
    """Not sequential: a skip connection, batch norm, a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(FEATURES, 8)
        self.norm = nn.BatchNorm1d(8)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.first(x)
        h = torch.relu(self.norm(self.middle(skipped))) + skipped
        result: Tensor = self.last(h @ self.first.weight)
        return result


def batches(count: int, sizes: Sequence[int] = (13, 13, 7)) -> list[tuple[Tensor, Tensor]]:
    """Not all of one size, as the last one of an epoch."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, FEATURES, generator=generator),
            torch.randint(0, CLASSES, (size,), generator=generator),
        )
        for size in (sizes[index % len(sizes)] for index in range(count))
    ]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """A simple optimizer that skips parameters without a gradient."""
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def said(call: Callable[[], Any]) -> str:
    """The error that a call ends with."""
    with pytest.raises(Exception) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


@dataclass
class Curve:
    """What a training gave.

    Attributes:
        losses: of its batches.
        gradients: of the last one, by name.
        state: of the model at the end.
    """

    losses: list[float]
    gradients: dict[str, Any]
    state: dict[str, Any]


def serial(
    make: Callable[[], nn.Module],
    given: Sequence[tuple[Tensor, Tensor]],
    *,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    microbatches: int = 1,
    accumulate: int = 1,
    clip_norm: float | None = None,
    autocast: torch.dtype | None = None,
    halve_every: int | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = momentum,
    before: Callable[[Any, int], None] = lambda model, step: None,
) -> Curve:
    """Plain training, in microbatches where that makes a difference, with a scaler for float16.

    Of a loss that is a pair its sum is divided by its weight: of the whole batch at once. `before` is called
    before each step.
    """
    model = make()
    made = optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(made, halve_every or len(given), gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", enabled=autocast is torch.float16)
    losses = []
    for index, (inputs, targets) in enumerate(given):
        before(model, index)
        sizes = divided(len(inputs), microbatches)
        parts = zip(inputs.split(sizes), targets.split(sizes), strict=True)
        total = 0.0
        if index % accumulate == 0:
            made.zero_grad()
        for x, y in parts:
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                made_of = loss_fn(model(x), y)
                loss = made_of[0] / made_of[1] if isinstance(made_of, tuple) else made_of
                loss = loss * (len(x) / len(inputs))
            scaler.scale(loss / accumulate).backward()
            total += loss.item()
        losses.append(total)
        if (index + 1) % accumulate == 0:
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            scaler.step(made)
            scaler.update()
            schedule.step()
    named = model.named_parameters(remove_duplicate=False)
    gradients = {name: it.grad.numpy().copy() for name, it in named if it.grad is not None}
    return Curve(losses, gradients, values_of(model.state_dict()))


def plan_of(
    replicas: Sequence[int], order: str = "1f1b", *, depth: int = LAYERS, first: int = 0, **more: Any
) -> Plan:
    """Stages of about as many layers each, on consecutive ranks."""
    stages, start, rank = [], 0, first
    for size, count in zip(divided(depth, len(replicas)), replicas, strict=True):
        stages.append((start, start + size, range(rank, rank + count)))
        start, rank = start + size, rank + count
    return Plan(stages, more.pop("microbatches", MICROBATCHES), order, **more)


def by_layer(plan: Plan, letters: str) -> Plan:
    """The plan with what becomes of each layer's results, over and over: `k`, `r` (+ goes on), `o`."""
    treatments = {it.value[0]: it for it in Treatment}
    stages = []
    for stage in plan.stages:
        segments: list[Segment] = []
        for layer in range(stage.start, stage.end):
            letter = letters[layer % len(letters)]
            if letter == "+" and segments and segments[-1].treatment is Treatment.RECOMPUTE:
                segments[-1] = replace(segments[-1], end=layer + 1)
            else:
                segments.append(Segment(layer, layer + 1, treatments["r" if letter == "+" else letter]))
        stages.append(replace(stage, segments=tuple(segments)))
    return replace(plan, stages=tuple(stages), offload_gbps=1.0)


def around(replicas: Sequence[int], order: str, *, depth: int, each: int = 2, **more: Any) -> Plan:
    """Several stages on each group of consecutive ranks: in turn, for zb-v there and back again."""
    groups, first = [], 0
    for count in replicas:
        groups.append(range(first, first + count))
        first += count
    laid = groups + groups[::-1] if order == "zb-v" else groups * each
    ends = list(accumulate(divided(depth, len(laid)), initial=0))
    stages = [(start, end, ranks) for (start, end), ranks in zip(pairwise(ends), laid, strict=True)]
    return Plan(stages, more.pop("microbatches", MICROBATCHES), order, **more)


def trained(
    plan: Plan,
    make: Callable[[], nn.Module],
    given: Sequence[tuple[Tensor, Tensor]],
    after: Callable[[], None] = lambda: None,
    **options: Any,
) -> Curve:
    """Train by a plan; the state is that of the whole model; `after` is called after each step."""
    options = {"collectives": "gloo", "timeout_s": 60.0} | options
    loss_fn = options.pop("loss_fn", cross_entropy)
    optimizer = options.pop("optimizer", momentum)
    with Trainer(make(), plan, loss_fn, optimizer, **options) as trainer:
        losses = []
        for batch in given:
            losses.append(trainer.step(*batch))
            after()
        return curve_of(trainer, losses)


def curve_of(trainer: Trainer, losses: Sequence[float] = ()) -> Curve:
    """What it gave; every rank calls it."""
    named = trainer.module.named_parameters()
    gradients = {name: it.grad.cpu().numpy().copy() for name, it in named if it.grad is not None}
    return Curve(list(losses), gradients, values_of(trainer.state_dict()))


def values_of(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """A state that does not change any more, as other processes are sent it."""
    return {name: value.numpy().copy() for name, value in state.items()}


@dataclass(frozen=True)
class Case:
    """A training by a plan, and what serial training makes of the same.

    Attributes:
        plan: that it is by.
        make: makes the model.
        options: of the trainer.
        waits: how often a step may wait for the device that it is on.
    """

    plan: Plan
    make: Callable[[], nn.Module] = network
    options: Mapping[str, Any] = field(default_factory=dict)
    waits: int = 1

    def expected(
        self, given: Sequence[tuple[Tensor, Tensor]], make: Callable[[], nn.Module] | None = None
    ) -> Curve:
        """By serial training: in microbatches where batch norm or rounding makes that a difference."""
        known = ("loss_fn", "accumulate", "clip_norm", "optimizer")
        alike = {it: self.options[it] for it in known if it in self.options}
        autocast = getattr(torch, self.options.get("precision", ""), None)
        in_parts = self.make in (Unmodified, normalised) or autocast is not None
        microbatches = self.plan.microbatches if in_parts else 1
        return serial(make or self.make, given, microbatches=microbatches, autocast=autocast, **alike)


def merged(curves: Sequence[Curve]) -> Curve:
    """What all ranks saw; losses and states must be alike on all of them."""
    for curve in curves:
        assert curve.losses == curves[0].losses
        for name, value in curve.state.items():
            np.testing.assert_array_equal(value, curves[0].state[name])
    return Curve(
        curves[0].losses,
        {name: value for curve in curves for name, value in curve.gradients.items()},
        curves[0].state,
    )


def check_close(found: Curve, expected: Curve, tolerance: float = 1e-6) -> None:
    """Losses, gradients that are there, and the state."""
    np.testing.assert_allclose(found.losses, expected.losses, atol=tolerance, rtol=0)
    for name, value in found.gradients.items():
        np.testing.assert_allclose(value, expected.gradients[name], atol=tolerance, rtol=0, err_msg=name)
    assert found.state.keys() == expected.state.keys()
    for name, value in found.state.items():
        np.testing.assert_allclose(value, expected.state[name], atol=2 * tolerance, rtol=0, err_msg=name)

"""Loss curves and gradients on scikit-learn's digits: pipelined against serial, for every order and shape.

All trainings start from the same weights and see the same batches; what may differ is the order of float32
sums alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arborcast.bench.harness.processes import run_ranks

if TYPE_CHECKING:
    from torch import Tensor, nn

    from arborcast.pipeline.stages import Plan

BATCH = 60
LEARNING_RATE = 0.05
"""With momentum 0.9, larger ones multiply the last bits of float32 past the limit in serial training too."""
LIMIT = 1e-6
SHAPES: tuple[tuple[int, ...], ...] = (
    (1,),
    (1, 1),
    (1, 1, 1),
    (1, 1, 1, 1),
    (2,),
    (4,),
    (1, 2, 1),
    (2, 1, 1),
    (1, 1, 2),
    (2, 2),
    (1, 3),
)
"""Replicas of each stage."""


@dataclass(frozen=True)
class Curve:
    """A training: the loss of each step, and the gradients of the first."""

    losses: tuple[float, ...]
    gradients: dict[str, Tensor]


def network(seed: int) -> list[nn.Module]:
    """Eight layers; smooth, since at the kink of ReLU a last bit can flip a unit."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return [
        nn.Linear(64, 96),
        nn.Tanh(),
        nn.Linear(96, 96),
        nn.Tanh(),
        nn.Linear(96, 64),
        nn.Tanh(),
        nn.Linear(64, 32),
        nn.Linear(32, 10),
    ]


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    """The first images and labels, again and again."""
    import torch
    from sklearn.datasets import load_digits

    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    rows = [torch.arange(step * BATCH, (step + 1) * BATCH) % len(images) for step in range(steps)]
    return [(images[row], labels[row]) for row in rows]


def serial(steps: int, seed: int) -> Curve:
    """One process with one thread (more add in another order), whole batches."""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(1)
    model = nn.Sequential(*network(seed))
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for images, labels in batches(steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        torch.autograd.backward(loss)
        if not gradients:
            gradients = {
                name: it.grad.clone() for name, it in model.named_parameters() if it.grad is not None
            }
        optimizer.step()
        losses.append(loss.item())
    return Curve(tuple(losses), gradients)


def pipelined(plan: Plan, steps: int, seed: int, collectives: str) -> Curve:
    """The same on one process per rank of a plan."""
    found = run_ranks(len(plan.ranks), train, plan, steps, seed, collectives)
    gradients = {name: value for _, each in found for name, value in each.items()}
    return Curve(tuple(found[0][0]), gradients)


def train(
    rank: int, plan: Plan, steps: int, seed: int, collectives: str
) -> tuple[list[float], dict[str, Any]]:
    """What one rank sees: the losses, and the gradients of its stage in the first step."""
    import torch
    from torch.nn.functional import cross_entropy

    from arborcast import pipeline

    model = pipeline.Divisible(network(seed))
    trainer = pipeline.Trainer(
        model,
        plan,
        cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, LEARNING_RATE, momentum=0.9),
        collectives=collectives,
    )
    losses: list[float] = []
    gradients: dict[str, Any] = {}
    for images, labels in batches(steps):
        losses.append(trainer.step(images, labels))
        if not gradients:
            gradients = {
                name: it.grad.clone() for name, it in trainer.module.named_parameters() if it.grad is not None
            }
    trainer.close()
    return losses, gradients


def plan_of(shape: Sequence[int], microbatches: int, order: str, layers: int = 8) -> Plan:
    """Layers divided evenly among stages with so many replicas."""
    from arborcast.pipeline.stages import Plan, divided

    stages, start, rank = [], 0, 0
    for size, replicas in zip(divided(layers, len(shape)), shape, strict=True):
        stages.append((start, start + size, range(rank, rank + replicas)))
        start, rank = start + size, rank + replicas
    return Plan(stages, microbatches=microbatches, order=order)


def curve_rows(
    *,
    steps: int = 100,
    microbatches: int = 6,
    orders: Sequence[str] = ("gpipe", "1f1b", "pe"),
    shapes: Sequence[Sequence[int]] = SHAPES,
    collectives: str = "synth",
    seed: int = 0,
) -> list[dict[str, Any]]:
    """The largest differences from serial training, for each order and shape.

    Losses are compared step by step; gradients element by element, relative to the largest of the tensor.
    """
    reference = serial(steps, seed)
    rows = []
    for order in orders:
        for shape in shapes:
            found = pipelined(plan_of(shape, microbatches, order), steps, seed, collectives)
            assert found.gradients.keys() == reference.gradients.keys(), "every parameter has its gradient"
            rows.append(
                {
                    "order": order,
                    "replicas": "+".join(map(str, shape)),
                    "microbatches": microbatches,
                    "steps": steps,
                    "collectives": collectives,
                    "loss_difference": max(
                        abs(ours - theirs)
                        for ours, theirs in zip(found.losses, reference.losses, strict=True)
                    ),
                    "gradient_difference": max(
                        float((found.gradients[name] - value).abs().max() / value.abs().max())
                        for name, value in reference.gradients.items()
                    ),
                    "first_loss": found.losses[0],
                    "last_loss": found.losses[-1],
                }
            )
    return rows

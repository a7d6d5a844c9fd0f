"""Accuracy on digits over time: pipelines that wait for each update, and PipeDream's that does not.

A synchronous pipeline computes what one process computes; it pays with the bubble. PipeDream starts a batch
in each slot and has no bubble; it pays with weights that are older in earlier stages (weight stashing: a
batch meets the same version in both passes; Narayanan et al., SOSP 2019, section 3.3: with n stages, stage k
of 1..n takes weights n - k updates old). Both train for real: the first on a process per stage, the second in
one process that keeps the versions. Their times are computed, for stages of equal times and free links, in
passes of a whole batch through the whole model: a synchronous update takes (m + n - 1) / (m n) of one, an
asynchronous one 1 / n.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from arborcast.bench.harness.processes import run_ranks
from arborcast.bench.training.digits import network, plan_of

if TYPE_CHECKING:
    from torch import Tensor, nn

BATCH = 60
STAGES = 4
MICROBATCHES = 6
TARGET = 0.95
"""Of the test images, to be classified correctly."""
LEARNING_RATES = (0.005, 0.01, 0.02, 0.05, 0.1)
MOMENTUM = 0.9
TEST_SHARE = 5
"""One image of so many is not trained on."""

Data = tuple["Tensor", "Tensor"]


def digits() -> tuple[Data, Data]:
    """Images and labels, to train with and to test with."""
    import torch
    from sklearn.datasets import load_digits

    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    tests = torch.arange(len(labels)) % TEST_SHARE == 0
    images = images.float() / 16
    return (images[~tests], labels[~tests]), (images[tests], labels[tests])


def batches(data: Data, epoch: int, seed: int) -> list[Data]:
    """Of one epoch, shuffled; what does not fill a batch is left out."""
    import torch

    order = torch.randperm(len(data[1]), generator=torch.Generator().manual_seed(1000 * seed + epoch))
    chosen = order[: len(order) // BATCH * BATCH].reshape(-1, BATCH)
    return [(data[0][rows], data[1][rows]) for rows in chosen]


def accuracy(outputs: Tensor, labels: Tensor) -> float:
    """Share of the images whose label has the largest output."""
    return int((outputs.argmax(1) == labels).sum()) / len(labels)


def synchronous(rank: int, rate: float, epochs: int, seed: int) -> list[float]:
    """The test accuracy after each epoch of a pipeline with a stage on each rank; the same on all ranks."""
    import torch
    from torch.nn.functional import cross_entropy

    from arborcast import pipeline

    torch.set_num_threads(1)
    training, test = digits()
    plan = plan_of((1,) * STAGES, MICROBATCHES, "1f1b")
    seen = []
    with pipeline.Trainer(
        pipeline.Divisible(network(seed)),
        plan,
        cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, rate, momentum=MOMENTUM),
    ) as trainer:
        for epoch in range(epochs):
            for images, labels in batches(training, epoch, seed):
                trainer.step(images, labels)
            weights = trainer.state_dict()
            seen.append(_tested(network(seed), weights, test))
    return seen


def _tested(layers: Sequence[nn.Module], weights: dict[str, Tensor], test: Data) -> float:
    import torch
    from torch import nn

    model = nn.Sequential(*layers)
    model.load_state_dict(dict(zip(model.state_dict(), weights.values(), strict=True)))
    with torch.no_grad():
        return accuracy(model(test[0]), test[1])


def asynchronous(rate: float, epochs: int, seed: int, stages: int = STAGES) -> list[float]:
    """The same of PipeDream with weight stashing; with one stage, of one process.

    The gradient of batch t is of the weights that stage k of 0..n-1 had n - 1 - k updates ago, and updates
    the newest.
    """
    import torch
    from torch import nn
    from torch.func import functional_call
    from torch.nn.functional import cross_entropy

    from arborcast.pipeline.stages import divided

    torch.set_num_threads(1)
    training, test = digits()
    model = nn.Sequential(*network(seed))
    stage_of = [stage for stage, size in enumerate(divided(len(model), stages)) for _ in range(size)]
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=MOMENTUM)
    versions: list[dict[str, Tensor]] = []  # the newest last
    seen = []
    for epoch in range(epochs):
        for images, labels in batches(training, epoch, seed):
            versions.append({name: it.detach().clone() for name, it in model.named_parameters()})
            del versions[:-stages]
            met = {}
            for name in names:
                age = stages - 1 - stage_of[int(name.split(".")[0])]
                met[name] = versions[max(0, len(versions) - 1 - age)][name].clone().requires_grad_()
            loss = cross_entropy(functional_call(model, met, (images,)), labels)
            for parameter, gradient in zip(
                model.parameters(), torch.autograd.grad(loss, [met[name] for name in names]), strict=True
            ):
                parameter.grad = gradient
            optimizer.step()
        with torch.no_grad():
            seen.append(accuracy(model(test[0]), test[1]))
    return seen


METHODS = {
    "one process": 1.0,
    "1F1B": (MICROBATCHES + STAGES - 1) / (MICROBATCHES * STAGES),
    "PipeDream, asynchronous": 1 / STAGES,
}
"""What an update takes, in passes of a batch through the whole model."""


def convergence_rows(
    *, epochs: int = 60, rates: Sequence[float] = LEARNING_RATES, seed: int = 0
) -> list[dict[str, Any]]:
    """A row for each method and learning rate: the test accuracy after each epoch, the time to the target."""
    updates = len(digits()[0][1]) // BATCH
    rows = []
    for rate in rates:
        curves = {
            "one process": asynchronous(rate, epochs, seed, stages=1),
            "1F1B": run_ranks(STAGES, synchronous, rate, epochs, seed, timeout_s=600)[0],
            "PipeDream, asynchronous": asynchronous(rate, epochs, seed),
        }
        for method, curve in curves.items():
            reached = next((epoch for epoch, it in enumerate(curve, start=1) if it >= TARGET), None)
            rows.append(
                {
                    "method": method,
                    "learning_rate": rate,
                    "epochs": epochs,
                    "accuracy": curve,
                    "best": max(curve),
                    "epoch_passes": updates * METHODS[method],
                    "epochs_to_target": reached,
                    "passes_to_target": None if reached is None else reached * updates * METHODS[method],
                }
            )
    return rows

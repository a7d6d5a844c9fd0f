"""Trains on scikit-learn's digits with accelerate: DDP over synthesized schedules, then stages of a pipeline.

    torchrun --standalone --nproc-per-node 4 examples/train_accelerate.py [--epochs N]

Both see the same batches. Ends with status 1 when the losses of the two ways differ by more than 1e-5.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from arborcast import pipeline

BATCH = 120  # images of all ranks together, 14 batches an epoch
LIMIT = 1e-5  # the same sums of float32, in another order


def network() -> pipeline.Divisible:
    """Eight layers."""
    torch.manual_seed(0)
    sizes = (64, 128, 128, 64)
    layers = [it for a, b in pairwise(sizes) for it in (nn.Linear(a, b), nn.Tanh())]
    return pipeline.Divisible(*layers, nn.Linear(64, 64), nn.Linear(64, 10))


def digits() -> DataLoader[tuple[Tensor, ...]]:
    """Whole batches, shuffled once, so that both ways see the same."""
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(images[order].float() / 16, labels[order])
    return DataLoader(data, batch_size=BATCH, drop_last=True)


def by_ddp(accelerator: Accelerator, epochs: int) -> list[float]:
    """An ordinary loop of accelerate; the process group under it is all that is not."""
    model, loader = network(), digits()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    schedule = OneCycleLR(optimizer, 0.2, total_steps=epochs * len(loader))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(epochs):
        for images, labels in loader:  # a quarter of each batch
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def right(output: Tensor, labels: Tensor) -> Tensor:
    """The share of images that are told right."""
    return (output.argmax(1) == labels).float().mean()


def by_stages(accelerator: Accelerator, epochs: int) -> list[float]:
    """The same with a trainer of ours: the first rank and the last one load data, the others need none."""
    plan = pipeline.Plan([(0, 3, [0]), (3, 6, [1, 2]), (6, 8, [3])], microbatches=4)
    losses = []
    with pipeline.Trainer(
        network(),
        plan,
        cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
        collectives="synth",
        metrics={"right": right},
    ) as trainer:
        schedule = OneCycleLR(trainer.optimizer, 0.2, total_steps=epochs * len(digits()))
        average = AveragedModel(trainer.module, avg_fn=get_ema_avg_fn(0.9))
        feed = trainer.feed(digits() if trainer.needs_inputs or trainer.needs_targets else None)
        for epoch in range(epochs):
            found = []
            for images, labels in feed:
                losses.append(trainer.step(images, labels))
                schedule.step()
                average.update_parameters(trainer.module)
                found.append(trainer.metrics["right"])
            accelerator.print(f"epoch {epoch}: loss {losses[-1]:.4f}, right {sum(found) / len(found):.1%}")
        averaged = network()
        averaged.load_state_dict(trainer.state_dict(average.module))
    images, labels = next(iter(digits()))
    accelerator.print(f"averaged weights: right {right(averaged(images), labels):.1%}")
    return losses


def main(arguments: Sequence[str] | None = None) -> int:
    """Train both ways, and compare."""
    parser = argparse.ArgumentParser(description="Digits, with accelerate over synthesized schedules.")
    parser.add_argument("--epochs", type=int, default=3)
    asked = parser.parse_args(arguments)
    dist.init_process_group("synth")  # accelerate takes the group that there is
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    data, stages = by_ddp(accelerator, asked.epochs), by_stages(accelerator, asked.epochs)
    difference = max(abs(a - b) for a, b in zip(data, stages, strict=True))
    accelerator.print(dist.group.WORLD.explain(64 << 10))
    accelerator.print(f"{len(data)} steps, largest difference of losses {difference:.1e} (limit {LIMIT:g})")
    dist.destroy_process_group()
    return 0 if difference <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())

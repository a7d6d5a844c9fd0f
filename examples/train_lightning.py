"""Trains on scikit-learn's digits with Lightning: DDP over synthesized schedules, then stages of a pipeline.

    torchrun --standalone --nproc-per-node 4 examples/train_lightning.py [--epochs N]

Both see the same batches. Ends with status 1 when the losses of the two ways differ by more than 1e-5.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
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


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of both ways."""
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def digits(rank: int = 0, ranks: int = 1) -> DataLoader[tuple[Tensor, ...]]:
    """A rank's part of every batch, shuffled once."""
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    order = order[: len(order) // BATCH * BATCH].view(-1, ranks, BATCH // ranks)[:, rank].flatten()
    return DataLoader(TensorDataset(images[order].float() / 16, labels[order]), batch_size=BATCH // ranks)


class Plain(lightning.LightningModule):
    """As anybody writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.losses = network(), list[float]()

    def training_step(self, batch: Sequence[Tensor], index: int) -> Tensor:
        """The loss of this rank's part; what is kept is that of all."""
        images, labels = batch
        loss = cross_entropy(self.network(images), labels)
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One for all."""
        return sgd(self.parameters())

    def train_dataloader(self) -> Any:
        """A quarter of each batch."""
        return digits(self.global_rank, self.trainer.world_size)


def nothing(_: Any) -> tuple[None, None]:
    """What a rank in the middle is given of a batch."""
    return None, None


class PipelineStrategy(DDPStrategy):
    """Processes and groups as for DDP, nothing else: a `pipeline.Trainer` moves data and sums gradients."""

    def configure_ddp(self) -> None:
        """Leave the module as it is."""


class Stages(lightning.LightningModule):
    """Trains by a plan, with optimizers of its own (manual optimization)."""

    automatic_optimization = False

    def __init__(self, plan: pipeline.Plan, path: str) -> None:
        super().__init__()
        self.plan, self.path, self.losses = plan, path, list[float]()

    def setup(self, stage: str) -> None:
        """Once there are process groups."""
        self.stages = pipeline.Trainer(network(), self.plan, cross_entropy, sgd, collectives="synth")

    def training_step(self, batch: Sequence[Tensor | None], index: int) -> None:
        """Whole batches on the ranks that need them."""
        self.losses.append(self.stages.step(*batch))
        self.log("loss", self.losses[-1], prog_bar=True)

    def configure_optimizers(self) -> None:
        """The stages have theirs."""

    def train_dataloader(self) -> Any:
        """As many steps on all ranks; the first and the last one load data."""
        whole = digits()
        if self.stages.needs_inputs or self.stages.needs_targets:
            return whole
        return DataLoader(range(len(whole)), batch_size=1, collate_fn=nothing)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The whole model, which fits any plan and the plain module."""
        checkpoint["state_dict"] = {f"network.{k}": it for k, it in self.stages.state_dict().items()}

    def on_train_end(self) -> None:
        """Every rank calls it, the first one writes."""
        self.trainer.save_checkpoint(self.path)

    def teardown(self, stage: str) -> None:
        """End the connections."""
        self.stages.close()


def fit(module: lightning.LightningModule, strategy: DDPStrategy, epochs: int) -> None:
    """Lightning's own loop."""
    lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),  # of one host here
        strategy=strategy,
        max_epochs=epochs,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train both ways, and compare."""
    parser = argparse.ArgumentParser(description="Digits, with Lightning over synthesized schedules.")
    parser.add_argument("--epochs", type=int, default=3)
    asked = parser.parse_args(arguments)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    dist.init_process_group("synth")
    plain, plan = Plain(), pipeline.Plan([(0, 3, [0]), (3, 6, [1, 2]), (6, 8, [3])], microbatches=4)
    with tempfile.TemporaryDirectory() as mine:
        box = [f"{mine}/last.ckpt"]
        dist.broadcast_object_list(box)  # the first rank's
        stages = Stages(plan, box[0])
        fit(plain, DDPStrategy(process_group_backend="synth"), asked.epochs)
        fit(stages, PipelineStrategy(process_group_backend="synth"), asked.epochs)
        saved = torch.load(box[0], weights_only=True)["state_dict"]  # a plain module's
        dist.barrier()  # the folder goes with the first rank
    differences = [abs(a - b) for a, b in zip(plain.losses, stages.losses, strict=True)]
    differences += [(it - saved[name]).abs().max().item() for name, it in plain.state_dict().items()]
    difference = max(differences)
    if dist.get_rank() == 0:
        print(dist.group.WORLD.explain(64 << 10))
        words = f"largest difference of losses and saved weights {difference:.1e} (limit {LIMIT:g})"
        print(f"{len(plain.losses)} steps, {words}")
    dist.destroy_process_group()
    return 0 if difference <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())

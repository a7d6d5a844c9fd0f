"""Divides the operators of a small network over all ranks and compares with serial training.

    torchrun --standalone --nproc-per-node 4 examples/train_sharded.py --topology dgx1

Ends with status 1 when losses differ by more than 1e-5 of them, or collectives are others than planned.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from arborcast import pipeline, topologies

BATCH, WORDS, WIDTH, STEPS = 64, 256, 256, 5


def network() -> nn.Module:
    """A table of words, a feed-forward block, and scores for the next word."""
    torch.manual_seed(0)
    up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), up, nn.GELU(), down, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
    )


def loss_fn(scores: Tensor, following: Tensor) -> Tensor:
    """Mean over all words."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Any optimizer of torch that goes element by element."""
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def main() -> int:
    """Train both ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="dgx1", help="the ranks are its first ones")
    fabric = topologies.load(parser.parse_args().topology)
    dist.init_process_group("gloo")
    topology = fabric.subset(range(dist.get_world_size()))
    inputs, following = torch.randint(0, WORDS, (2, BATCH, 8), generator=torch.Generator().manual_seed(1))

    traced = pipeline.trace(network(), (inputs, following), loss_fn)
    choice = pipeline.shard_model(traced, topology, "v100", batch=BATCH)
    trainer = pipeline.ShardedTrainer(traced, choice.plan, sgd)
    losses = []
    for _ in range(STEPS):
        with CommDebugMode() as mode:
            losses.append(trainer.step(inputs, following))  # whole batch in, its loss out, on every rank
    planned = sum(call.per_microbatch + call.per_step for call in trainer.calls)
    trainer.close()

    serial, difference = network(), 0.0
    optimizer = sgd(list(serial.parameters()))
    for loss in losses:
        optimizer.zero_grad()
        expected = loss_fn(serial(inputs), following)
        expected.backward()
        optimizer.step()
        difference = max(difference, abs(loss - expected.item()) / expected.item())
    if dist.get_rank() == 0:
        print(f"mesh {choice.best.mesh} of {topology.name}, losses {losses[0]:.4f} to {losses[-1]:.4f}")
        print(f"largest difference from serial training {difference:.1e} of the loss")
        print(f"collectives of a step: {mode.get_total_counts()}, planned {planned}")
    dist.destroy_process_group()
    return int(difference > 1e-5 or mode.get_total_counts() != planned)


if __name__ == "__main__":
    sys.exit(main())

"""Divides a small network into stages and their operators over ranks, and compares with serial training.

    torchrun --standalone --nproc-per-node 4 examples/train_sharded.py --topology dgx1

Ends with status 1 when losses differ by more than 1e-5 of them, or collectives or messages between stages are
others than planned. With `--microbatches 1` one stage is the fastest.
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
    parser.add_argument("--microbatches", type=int, default=4, help="of the batch")
    arguments = parser.parse_args()
    fabric = topologies.load(arguments.topology)
    dist.init_process_group("gloo")
    topology = fabric.subset(range(dist.get_world_size()))
    inputs, following = torch.randint(0, WORDS, (2, BATCH, 8), generator=torch.Generator().manual_seed(1))

    traced = pipeline.trace(network(), (inputs, following), loss_fn)
    count = arguments.microbatches
    choice = pipeline.shard_in_stages(traced, topology, "v100", batch=BATCH, microbatches=count)
    plan = choice.plan_by(choice.best, divided=True)  # also where replicas would do
    trainer = pipeline.Trainer(traced, plan, None, sgd)
    losses = []
    for _ in range(STEPS):
        with CommDebugMode() as mode:
            losses.append(trainer.step(inputs, following))  # whole batch in, its loss out, on every rank
    collectives = {
        str(kind): calls for kind, calls in mode.get_comm_counts().items() if "functional" in str(kind)
    }
    planned = sum(call.per_microbatch * count + call.per_step for call in trainer.calls)
    seen = torch.tensor([sum(collectives.values()), planned, trainer.messages.sent_bytes])
    crossing = STEPS * sum(trainer.crossing_bytes)
    trainer.close()
    dist.all_reduce(seen)

    serial, difference = network(), 0.0
    optimizer = sgd(list(serial.parameters()))
    for loss in losses:
        optimizer.zero_grad()
        expected = loss_fn(serial(inputs), following)
        expected.backward()
        optimizer.step()
        difference = max(difference, abs(loss - expected.item()) / expected.item())
    if dist.get_rank() == 0:
        for it in plan.stages:
            print(f"layers [{it.start}, {it.end}) on ranks {list(it.ranks)}, mesh {it.sharding.mesh}")
        print(f"losses {losses[0]:.4f} to {losses[-1]:.4f} on {topology.name}")
        print(f"largest difference from serial training {difference:.1e} of the loss")
        print(f"collectives of a step, of all ranks: {seen[0]}, planned {seen[1]}")
        print(f"bytes between stages: {seen[2]}, planned {crossing}")
    dist.destroy_process_group()
    return int(difference > 1e-5 or seen[0] != seen[1] or seen[2] != crossing)


if __name__ == "__main__":
    sys.exit(main())

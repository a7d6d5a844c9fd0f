"""Trains a small transformer as torchtitan does, FSDP2 times tensor parallelism over "synth", and serially.

    torchrun --standalone --nproc-per-node 4 examples/train_fsdp.py [--steps N] [--tensor-ranks 2]

A mesh of "data" and "tensor": blocks are divided by `parallelize_module` (sequence parallel between them) and
sharded by `fully_shard`. Ends with status 1 when a loss differs by more than 1e-5 of it from serial training,
or schedules served no call of a kind along an axis.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

WORDS, LENGTH, WIDTH, HEADS, BLOCKS, BATCH = 64, 16, 64, 4, 2, 8
LIMIT = 1e-5
SHOWN = 64 << 10  # bytes of the calls whose schedules are told


class Attention(nn.Module):
    """Causal, over as many heads as the rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        """From (batch, length, width) to the same."""
        query, key, value = (
            part(inputs).unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return result


class FeedForward(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        """From (batch, length, width) to the same."""
        result: Tensor = self.down(gelu(self.up(inputs)))
        return result


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.second_norm, self.feed_forward = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, inputs: Tensor) -> Tensor:
        """From (batch, length, width) to the same."""
        inputs = inputs + self.attention(self.first_norm(inputs))
        result: Tensor = inputs + self.feed_forward(self.second_norm(inputs))
        return result


def network() -> nn.Sequential:
    """Scores for the next word; the same weights each time."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(BLOCKS)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))


def shared(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """The model over a mesh: blocks and their matrices along "tensor", all parameters along "data"."""
    along = mesh["tensor"]
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        str(BLOCKS + 1): SequenceParallel(),
        str(BLOCKS + 2): ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, along, plan)
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for block in list(model)[1 : BLOCKS + 1]:
        columns = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        parallelize_module(
            block,
            along,
            columns
            | {
                "first_norm": SequenceParallel(),
                "attention": whole,
                "attention.out": RowwiseParallel(output_layouts=Shard(1)),
                "second_norm": SequenceParallel(),
                "feed_forward": whole,
                "feed_forward.up": ColwiseParallel(),
                "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model


def batches(steps: int, parts: int, part: int) -> list[Tensor]:
    """One part in so many of each step's batch: sequences that count on from a word by some stride."""
    generator = torch.Generator().manual_seed(1)
    starts, strides = torch.randint(WORDS, (2, steps, BATCH, 1), generator=generator)
    sequences = (starts + strides % 3 * torch.arange(LENGTH + 1)) % WORDS
    return [step.chunk(parts)[part] for step in sequences]


def losses(model: nn.Module, data: Sequence[Tensor]) -> list[Tensor]:
    """Train, a step for each batch; its mean losses before."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for batch in data:
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        seen.append(loss.detach())
    return seen


def main(arguments: Sequence[str] | None = None) -> int:
    """Train both ways."""
    parser = argparse.ArgumentParser(description="FSDP2 times tensor parallelism over synthesized schedules.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tensor-ranks", type=int, choices=(1, 2, 4), default=2, help="that share a block")
    asked = parser.parse_args(arguments)
    if asked.steps < 1:
        parser.error(f"--steps {asked.steps} must be positive")
    if not dist.is_torchelastic_launched():
        parser.error("start it with: torchrun --standalone --nproc-per-node 4 examples/train_fsdp.py")
    dist.init_process_group("synth")
    ranks = dist.get_world_size()
    if ranks % asked.tensor_ranks:
        parser.error(f"--tensor-ranks {asked.tensor_ranks} must divide {ranks} ranks")
    replicas = ranks // asked.tensor_ranks
    mesh = init_device_mesh("cpu", (replicas, asked.tensor_ranks), mesh_dim_names=("data", "tensor"))
    mine = batches(asked.steps, replicas, mesh.get_local_rank("data"))
    means = torch.stack(losses(shared(network(), mesh), mine))
    dist.all_reduce(means, dist.ReduceOp.AVG)
    serial = torch.stack(losses(network(), batches(asked.steps, 1, 0)))
    difference = float(((means - serial).abs() / serial).max())

    by_schedule = True
    for axis in (name for name in ("data", "tensor") if mesh[name].size() > 1):
        group: Any = mesh.get_group(axis)
        for kind in ("allgather", "reduce-scatter"):
            counts = group.counters()[kind]
            by_schedule = by_schedule and counts["schedule"] > 0
            if dist.get_rank() == 0:
                print(f"{axis}: {counts['schedule']} by schedule, {counts['gloo']} by gloo:")
                print(f"    {group.explain(SHOWN, kind)}")
    if dist.get_rank() == 0:
        print(f"loss {means[0]:.4f} to {means[-1]:.4f} in {asked.steps} steps")
        print(f"largest difference from serial training {difference:.1e} of the loss (limit {LIMIT:.0e})")
    dist.destroy_process_group()
    return int(not (difference <= LIMIT and by_schedule))


if __name__ == "__main__":
    sys.exit(main())

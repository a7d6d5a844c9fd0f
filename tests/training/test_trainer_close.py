"""What a closed trainer leaves: its module and counters, and no thread of its groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from arborcast import pipeline
from arborcast.pipeline.run.failures import TrainingError
from tests.support.ranks import run_ranks

RANKS_IMPORT = ("torch._dynamo",)


def threads() -> int:
    """Of this process, those of libraries too."""
    return len(list(Path("/proc/self/task").iterdir()))


def train_and_close(rank: int, size: int) -> list[tuple[int, list[str]]]:
    """Threads that a closed trainer leaves while it is still referenced, and what it answers."""
    return [closed(collectives) for collectives in ("gloo", "synth")]


def closed(collectives: str) -> tuple[int, list[str]]:
    torch.manual_seed(0)
    inputs, targets = torch.randn(8, 4), torch.randn(8, 4)
    plan = pipeline.Plan([(0, 1, [0]), (1, 2, [1, 2])], microbatches=2)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    dist.barrier()
    before = threads()
    trainer = pipeline.Trainer(
        pipeline.Divisible(layers), plan, nn.functional.mse_loss, torch.optim.Adam, collectives=collectives
    )
    trainer.step(inputs, targets)
    trainer.close()
    trainer.close()
    left = threads() - before
    said = [f"{len(list(trainer.module.parameters()))} {type(trainer.optimizer).__name__}"]
    calls: list[Any] = [lambda: trainer.step(inputs, targets), trainer.state_dict, trainer.timeline]
    for call in calls:
        with pytest.raises(TrainingError, match="the trainer was closed"):
            call()
    assert trainer.messages.sent and len(trainer.losses) == 2
    return left, said


def test_a_closed_trainer_keeps_no_thread() -> None:
    # A thread of gloo that lives on when the interpreter ends can abort the process.
    for (first, said), (second, again) in run_ranks(3, train_and_close):
        # Torch's own for backward passes starts with the first one.
        assert first <= 1 and second <= 0, f"{first} and {second} threads are left"
        assert said == again == ["2 Adam"]

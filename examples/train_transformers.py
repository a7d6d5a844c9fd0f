"""Trains a small BERT with transformers' own Trainer, whose DDP runs over synthesized schedules.

    torchrun --standalone --nproc-per-node 4 examples/train_transformers.py [--steps N]

The task is made up: which of two words comes more often. Ends with status 1 when it is not learned.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

WORDS, LENGTH = 16, 9


def samples(count: int) -> list[dict[str, Tensor]]:
    """Sequences of words, labelled by whether there are more of the second than of the first."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 2, (count, LENGTH), generator=generator)
    return [{"input_ids": row + 2, "labels": (2 * row.sum() > LENGTH).long()} for row in words]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and look at the loss."""
    parser = argparse.ArgumentParser(description="transformers' Trainer over synthesized schedules.")
    parser.add_argument("--steps", type=int, default=40)
    asked = parser.parse_args(arguments)
    dist.init_process_group("synth")  # transformers takes the group that there is
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            max_steps=asked.steps,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            logging_steps=5,
            ddp_find_unused_parameters=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(BertForSequenceClassification(config), options, train_dataset=samples(2048))
        trainer.train()
    losses = [it["loss"] for it in trainer.state.log_history if "loss" in it]
    if dist.get_rank() == 0:
        print(f"loss {float(losses[0]):.4f} to {float(losses[-1]):.4f} in {asked.steps} steps")
        print(f"allreduces: {dist.group.WORLD.counters()['allreduce']}")
    dist.destroy_process_group()
    return 0 if float(losses[-1]) < 0.8 * float(losses[0]) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Does a larger BERT learn more? One and another of five times its size, trained from meta on four ranks.

RaNNC's authors end with such a pair (BERT-Large and BERT-Tall); this one is small enough for a CPU. The text
is what Python itself ships (`pydoc_data.topics`, the help pages), read as characters; the last tenth is for
evaluation. One character of seven is hidden, and told from those around it. The larger model is wider, not
deeper, so that both learn in the same few steps; each at a learning rate in inverse proportion to its width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from arborcast.bench.harness.processes import run_ranks

if TYPE_CHECKING:
    from torch import Tensor, nn

RANKS = 4
MICROBATCHES = 4
BATCH = 64
POSITIONS = 16
HIDDEN = 128
"""The token in place of a hidden character; those are ASCII."""
VOCABULARY = 129
HIDDEN_SHARE = 1 / 7
EVALUATED = 24
"""Batches of the evaluation."""


@dataclass(frozen=True, slots=True)
class Size:
    """A BERT; its blocks are divided among the ranks evenly."""

    name: str
    blocks: int
    width: int
    heads: int


SIZES = (Size("small", 4, 64, 4), Size("five times as large", 4, 144, 4))
DEVIATION = 0.05
"""Of the first weights; 0.02, as published, is for models some ten times as wide."""
RATE = 0.002
"""The greatest learning rate of a model of width 64."""
WARM_UP = 150
"""Steps in which the rate rises; it falls to nothing at the last one."""


def text() -> tuple[Tensor, Tensor]:
    """Characters to train with and to evaluate with."""
    from pydoc_data.topics import topics

    import torch

    known = "".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    tokens = torch.frombuffer(bytearray(known), dtype=torch.uint8).long()
    split = len(tokens) * 9 // 10
    return tokens[:split], tokens[split:]


def batch(tokens: Tensor, seed: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Pieces of the text with hidden characters, their segments and padding; what is hidden, or -100."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - POSITIONS, (BATCH, 1), generator=draw)
    pieces = tokens[starts + torch.arange(POSITIONS)]
    is_hidden = torch.rand(pieces.shape, generator=draw) < HIDDEN_SHARE
    inputs = pieces.masked_fill(is_hidden, HIDDEN)
    nothing = torch.zeros_like(inputs)
    return (inputs, nothing, nothing.bool()), pieces.masked_fill(~is_hidden, -100)


def first_values(module: nn.Module) -> None:
    """Weights from a normal distribution, norms from one and zero."""
    from torch import nn

    for name, parameter in module.named_parameters(recurse=False):
        if isinstance(module, nn.LayerNorm):
            nn.init.constant_(parameter, 1.0 if name == "weight" else 0.0)
        elif name == "bias":
            nn.init.zeros_(parameter)
        else:
            nn.init.normal_(parameter, std=DEVIATION)


def loss(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over hidden characters, and how many they are."""
    from torch.nn.functional import cross_entropy

    total = cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()


def train(rank: int, size: Size, steps: int, seed: int) -> tuple[list[float], float, int]:
    """The losses of all steps, the mean loss on what was not trained with, and the model's parameters."""
    import torch

    from arborcast import pipeline
    from arborcast.pipeline.stages import Plan, divided
    from arborcast.pipeline.zoo.bert import bert_for_tokens

    torch.set_num_threads(1)
    with pipeline.on_meta():
        model = bert_for_tokens(
            size.width, size.heads, size.blocks, inner=4 * size.width, vocabulary=VOCABULARY
        )
    training, rest = text()
    stages, start = [], 0
    for stage, count in enumerate(divided(model.depth, RANKS)):
        stages.append((start, start + count, [stage]))
        start += count
    with pipeline.Trainer(
        model,
        Plan(stages, MICROBATCHES, "1f1b"),
        loss,
        lambda parameters: torch.optim.AdamW(parameters, RATE * 64 / size.width),
        weights=first_values,
        seed=seed,
        check_loss=False,
    ) as trainer:
        schedule = torch.optim.lr_scheduler.LambdaLR(
            trainer.optimizer, lambda step: min((step + 1) / WARM_UP, 1 - step / steps)
        )
        losses = []
        for step in range(steps):
            losses.append(trainer.step(*batch(training, step)))
            schedule.step()
        evaluated = [trainer.evaluate(*batch(rest, -1 - index)) for index in range(EVALUATED)]
    parameters = {id(it): it.numel() for it in model.divide(0, model.depth).parameters()}
    return losses, sum(evaluated) / len(evaluated), sum(parameters.values())


def pair_rows(*, steps: int = 1200, seed: int = 0) -> list[dict[str, Any]]:
    """A row for each size."""
    rows = []
    for size in SIZES:
        losses, evaluated, parameters = run_ranks(RANKS, train, size, steps, seed, timeout_s=900)[0]
        rows.append(
            {
                "model": size.name,
                "parameters": parameters,
                "layers": size.blocks,
                "width": size.width,
                "ranks": RANKS,
                "steps": steps,
                "first_loss": losses[0],
                "last_loss": sum(losses[-20:]) / len(losses[-20:]),
                "evaluation_loss": evaluated,
                "losses": [sum(losses[it : it + 20]) / 20 for it in range(0, steps - 19, 20)],
            }
        )
    return rows

"""Models that nobody here chose: drawn from the lists of transformers and torchvision, trained as serially.

    python -c "from tests.training.test_drawn_models import main; main(34, 14, 6)"  # seed, of each library

prints a row for each, also of those for which no small configuration follows from the names of its options.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from arborcast import pipeline
from arborcast.bench.training import user_models
from arborcast.bench.training.in_stages import deterministic
from arborcast.bench.training.user_models import BATCHES
from tests.support.ranks import run_ranks

RANKS_IMPORT = ("torch._dynamo", "torch.export._trace")
SEED, STEPS, LIMIT = 34, 3, 1e-6
MOST_PARAMETERS = 30_000_000
TASKS = {
    "CAUSAL_LM": "words",
    "MASKED_LM": "words",
    "SEQ_TO_SEQ_CAUSAL_LM": "words",
    "SEQUENCE_CLASSIFICATION": "sentences",
    "IMAGE_CLASSIFICATION": "images",
}
"""What a batch has, by transformers' lists of models."""
SMALL: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_inner", "hidden_dim", "d_ff"), 24),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 4),
    **dict.fromkeys(("num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "v_head_dim", "q_lora_rank", "kv_lora_rank"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "patch_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "attention_window"), 4),
    **dict.fromkeys(("sliding_window", "state_size", "rotary_dim"), 4),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "moe_num_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_group", "topk_group", "bos_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "type_vocab_size"), 2),
    **{"vocab_size": 41, "pad_token_id": 0, "decoder_start_token_id": 1},
    **{"image_size": 16, "word_embed_proj_dim": 16, "kv_channels": 8},
}
"""Of options of configurations, wherever a model has one of that name."""


@dataclass(frozen=True)
class Drawn:
    """A model of a library, by its class or name there, and what its batches have."""

    library: str
    name: str
    task: str

    def make(self) -> nn.Module:
        """With the same values on every rank, and nothing random in training."""
        torch.manual_seed(0)
        if self.library == "torchvision":
            user_models._loads_without_operators("torchvision")
            made = importlib.import_module("torchvision.models").get_model(
                self.name, weights=None, num_classes=3
            )
        else:
            kind = getattr(importlib.import_module("transformers"), self.name)
            made = kind(_small(kind.config_class))
        return deterministic(made)

    def batch(self, step: int) -> tuple[Any, Tensor | None]:
        torch.manual_seed(100 + step)
        if self.library == "torchvision":
            return torch.randn(6, 3, 64, 64), torch.randint(0, 3, (6,))
        return BATCHES[self.task](), None

    def serial(self) -> tuple[list[float], int]:
        """Losses, and how many microbatches give the same: batch norm is of each alone."""
        model = self.make()
        if (count := sum(it.numel() for it in model.parameters())) > MOST_PARAMETERS:
            raise ValueError(f"{count / 1e6:.0f} million parameters, {MOST_PARAMETERS / 1e6:.0f} at most")
        optimizer, losses = momentum(model.parameters()), []
        for step in range(STEPS):
            inputs, targets = self.batch(step)
            optimizer.zero_grad()
            made = model(inputs) if targets is not None else model(**inputs)
            loss = cross_entropy(made, targets) if targets is not None else made["loss"]
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        has_norm = any(isinstance(it, nn.modules.batchnorm._BatchNorm) for it in model.modules())
        return losses, 1 if has_norm else 2


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """Slow enough not to multiply the last bits of float32 past the limit."""
    return torch.optim.SGD(parameters, 0.002, momentum=0.9)


def _small(kind: Any) -> Any:
    """A configuration with few of everything, those inside it too."""
    whole = kind()

    def options(config: Any) -> dict[str, Any]:
        has = config.to_dict()
        return {
            name: size
            for name, size in SMALL.items()
            if name in has and (has[name] is None or type(has[name]) is int)
        }

    inner = {name: options(it) for name, it in vars(whole).items() if hasattr(it, "to_diff_dict")}
    return kind(num_labels=3, **options(whole), **inner)


def drawn(library: str, seed: int = SEED) -> Iterator[Drawn]:
    """All of a library in an order that the seed says, but those that `user_models.yaml` names."""
    known = Path(user_models.__file__).with_name("user_models.yaml").read_text(encoding="utf-8")
    found: dict[str, str] = {}
    if library == "torchvision":
        user_models._loads_without_operators("torchvision")
        models = importlib.import_module("torchvision.models")
        found = dict.fromkeys(models.list_models(module=models), "photographs")
    else:
        lists = importlib.import_module("transformers.models.auto.modeling_auto")
        for task, batches in TASKS.items():
            for names in getattr(lists, f"MODEL_FOR_{task}_MAPPING_NAMES").values():
                for name in (names,) if isinstance(names, str) else names:
                    found.setdefault(name, batches)
    order = sorted(it for it in found if it not in known)
    random.Random(seed).shuffle(order)
    return (Drawn(library, name, found[name]) for name in order)


def in_two_stages(rank: int, size: int, model: Drawn, microbatches: int) -> list[float]:
    torch.set_num_threads(1)
    inputs, targets = model.batch(0)
    traced = pipeline.trace(model.make(), inputs, layers=4, evaluation=False)
    plan = pipeline.Plan([(0, 2, [0]), (2, 4, [1])], microbatches)
    loss_fn = None if targets is None else cross_entropy
    with pipeline.Trainer(traced, plan, loss_fn, momentum, collectives="gloo") as trainer:
        return [trainer.step(*model.batch(step)) for step in range(STEPS)]


def difference(model: Drawn, expected: list[float], microbatches: int) -> float:
    """The largest of all losses on all ranks, relative where a loss is above 1."""
    ranks = run_ranks(2, in_two_stages, model, microbatches, timeout_s=300, group_timeout_s=200)
    pairs = [pair for losses in ranks for pair in zip(losses, expected, strict=True)]
    return max(abs(mine - serial) / max(1.0, abs(serial)) for mine, serial in pairs)


def first(library: str, count: int, refuse: Callable[[Drawn, str], None], seed: int = SEED) -> Iterator[Any]:
    """The first ones that are small and give a loss, with what serial training gives; others are told of."""
    for model in drawn(library, seed):
        if not count:
            return
        try:
            losses, microbatches = model.serial()
        except Exception as error:  # of the library, which was not told what it wants
            refuse(model, f"{type(error).__name__}: {error}".splitlines()[0])
            continue
        count -= 1
        yield model, losses, microbatches


@pytest.mark.long
@pytest.mark.parametrize(("library", "count"), [("transformers", 5), ("torchvision", 2)])
def test_models_that_a_seed_draws_train_as_serially(library: str, count: int) -> None:
    pytest.importorskip(library)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = list(first(library, count, lambda model, why: None))
        assert len(found) == count
        for model, losses, microbatches in found:
            assert difference(model, losses, microbatches) < LIMIT, model
    finally:
        torch.set_num_threads(threads)


def main(seed: int, *counts: int) -> None:
    """Print a row for each model of a draw."""
    torch.set_num_threads(1)
    row = functools.partial(print, sep=" | ", flush=True)
    for library, count in zip(("transformers", "torchvision"), counts, strict=True):
        for model, losses, microbatches in first(
            library, count, lambda it, why: row(it.name, "not built", why), seed
        ):
            try:
                row(model.name, f"{difference(model, losses, microbatches):.1e}")
            except BaseException as error:
                row(model.name, "failed", str(error).splitlines()[-1])

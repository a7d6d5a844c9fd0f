"""Models as their libraries give them, for `in_stages`: from small configurations, with random weights.

Those of transformers, torchvision and timm stand in `user_models.yaml`, the rest in `own_models.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from arborcast.bench.training import own_models as own

SAMPLES, TOKENS, WORDS = 5, 8, 41
LENGTHS = (8, 5, 7, 3, 6)
"""Of the sentences, so that tokens that count are uneven over microbatches."""


@dataclass(frozen=True)
class UserModel:
    """A model as a user brings it.

    Attributes:
        name: library and class.
        make: the model.
        batch: its inputs, with labels where it returns its loss.
        loss_fn: of a model that returns none, a mean over samples of output and targets.
        targets: of a batch.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    targets: Callable[[], Any] | None = None


def catalog() -> list[UserModel]:
    """All of them whose library is there."""
    listed = yaml.safe_load(Path(__file__).with_name("user_models.yaml").read_text(encoding="utf-8"))
    found = list(_in_house())
    if importlib.util.find_spec("transformers") is not None:
        found += _transformers(listed)
    if _loads_without_operators("torchvision"):
        found += _torchvision(listed)
        if importlib.util.find_spec("timm") is not None:
            found += _timm(listed)
    return found


# ---------------------------------------------------------------------- libraries


def _transformers(listed: dict[str, Any]) -> Iterator[UserModel]:
    for name, task, options in listed["transformers"]:
        yield UserModel(f"transformers {name}", partial(_pretrained, name, options), BATCHES[task])
    yield UserModel(
        "transformers WhisperEncoder, loss of a dict's entry",
        lambda: _pretrained("WhisperModel", listed["whisper"]).encoder,
        lambda: {"input_features": torch.randn(SAMPLES, 8, 16)},
        lambda output, target: own.squared(output.last_hidden_state.mean(1), target),
        lambda: torch.randn(SAMPLES, 16),
    )


def _pretrained(name: str, options: dict[str, Any]) -> Any:
    kind = getattr(importlib.import_module("transformers"), name)
    return kind(kind.config_class(**options))


def _torchvision(listed: dict[str, Any]) -> Iterator[UserModel]:
    def make(name: str, options: dict[str, Any]) -> Any:
        *parts, kind = name.split(".")
        home = importlib.import_module(".".join(["torchvision.models", *parts]))
        return getattr(home, kind)(num_classes=3, **options)

    for name, size, options in listed["torchvision"]:
        yield UserModel(
            f"torchvision {name}", partial(make, name, options), _images(size), cross_entropy, _kinds
        )

    def both(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return cross_entropy(output["out"], target) + 0.5 * cross_entropy(output["aux"], target)

    yield UserModel(
        "torchvision fcn_resnet50, loss of a dict's entries",
        lambda: make("segmentation.fcn_resnet50", {"weights_backbone": None, "aux_loss": True}),
        _images(32),
        both,
        lambda: torch.randint(0, 3, (SAMPLES, 32, 32)),
    )


def _timm(listed: dict[str, Any]) -> Iterator[UserModel]:
    def make(name: str, options: dict[str, Any]) -> Any:
        return importlib.import_module("timm").create_model(name, num_classes=3, **options)

    def of_all(output: Any, target: Tensor) -> Any:  # a distilled model gives two answers in training
        return sum(cross_entropy(it, target) for it in (output if isinstance(output, tuple) else (output,)))

    for name, size, options in listed["timm"]:
        yield UserModel(f"timm {name}", partial(make, name, options), _images(size), of_all, _kinds)


def _loads_without_operators(library: str) -> bool:
    """Whether torchvision is there; its own operators, of which no model here needs one, need not load.

    Its packages on PyPI are built for CUDA. Beside a torch for CPUs, its import fails for want of two
    declarations, which are made here.
    """
    if importlib.util.find_spec(library) is None:
        return False
    if torch.version.cuda is None and not hasattr(torch.ops.torchvision, "nms"):
        for name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
    return True


# ---------------------------------------------------------------------- batches


def _words() -> dict[str, Tensor]:
    """Sentences of unlike lengths, padded; each token is its label."""
    words = torch.randint(3, WORDS, (SAMPLES, TOKENS))
    mask = (torch.arange(TOKENS) < torch.tensor(LENGTHS)[:, None]).long()
    labels = torch.where(mask > 0, words, -100)
    return {"input_ids": words * mask, "attention_mask": mask, "labels": labels}


def _kinds() -> Tensor:
    return torch.randint(0, 3, (SAMPLES,))


def _images(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(SAMPLES, 3, shape[0], shape[0])


def _without(*names: str) -> dict[str, Tensor]:
    return {name: value for name, value in _words().items() if name not in names}


BATCHES: dict[str, Callable[[], dict[str, Any]]] = {
    "words": _words,
    "unmasked": lambda: _without("attention_mask"),
    "replaced": lambda: _words() | {"labels": _words()["attention_mask"]},
    "pretraining": lambda: _words() | {"next_sentence_label": _kinds() % 2},
    "sentences": lambda: _words() | {"labels": _kinds()},
    "spans": lambda: _without("labels") | {"start_positions": _kinds(), "end_positions": 2 + _kinds()},
    "choices": lambda: {"input_ids": torch.randint(3, WORDS, (SAMPLES, 2, TOKENS)), "labels": _kinds() % 2},
    "images": lambda: {"pixel_values": torch.randn(SAMPLES, 3, 16, 16), "labels": _kinds()},
    "larger images": lambda: {"pixel_values": torch.randn(SAMPLES, 3, 32, 32), "labels": _kinds()},
    "films": lambda: {"pixel_values": torch.randn(SAMPLES, 4, 3, 16, 16), "labels": _kinds()},
    "pairs": lambda: (
        _without("labels") | {"pixel_values": torch.randn(SAMPLES, 3, 16, 16), "return_loss": True}
    ),
    "speech": lambda: {"input_features": torch.randn(SAMPLES, 8, 16), "labels": _words()["labels"]},
    "sounds": lambda: {"input_values": torch.randn(SAMPLES, 256), "labels": _kinds()},
    "transcripts": lambda: {"input_values": torch.randn(SAMPLES, 256), "labels": _words()["labels"][:, :4]},
}


# ---------------------------------------------------------------------- in-house models


def _in_house() -> Iterator[UserModel]:
    def tokens() -> Tensor:
        return torch.randn(SAMPLES, TOKENS, 8)

    def features() -> Tensor:
        return torch.randn(SAMPLES, 8)

    def points() -> Tensor:
        return torch.randn(SAMPLES, 2, 16, 16)

    yield UserModel("U-Net with skips", own.UNet, points, own.squared, points)
    yield UserModel("mixture of experts", own.Experts, tokens, own.squared, tokens)
    yield UserModel(
        "mixture of experts, load-balancing loss",
        lambda: own.Experts(balanced=True),
        lambda: {"x": tokens(), "target": tokens()},
    )
    yield UserModel(
        "control flow on shapes", own.Shaped, lambda: torch.randn(SAMPLES, 12, 8), own.squared, features
    )
    yield UserModel("control flow on values", own.Choosing, features, own.squared, features)
    yield UserModel(
        "dataclass out, optional input",
        own.Named,
        lambda: {"x": features(), "scale": 0.5},
        lambda output, target: own.squared(output.y, target),
        features,
    )
    yield UserModel(
        "several losses with weights of classes",
        own.SeveralLosses,
        lambda: {"x": features(), "kinds": _kinds(), "values": torch.randn(SAMPLES)},
    )
    yield UserModel(
        "masked mean by hand",
        own.Masked,
        lambda: {"x": tokens(), "target": tokens(), "mask": _words()["attention_mask"]},
    )
    yield UserModel("LSTM", own.Recurrent, lambda: torch.randn(SAMPLES, 6, 8), own.squared, features)

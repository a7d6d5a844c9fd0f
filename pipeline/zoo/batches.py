"""Inputs, targets and losses of the networks, in the sizes that their papers train with.

Images have the size of each paper; questions have 384 tokens (BERT's own script for SQuAD) for all three
encoders, so that they compare; sentences to translate have 64 tokens on either side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from arborcast.pipeline.costs.layer_pass import LossFunction, OptimizerFactory
from arborcast.pipeline.zoo import bert, transformer, vision, xlnet

Batch: TypeAlias = tuple[tuple[Any, Any], LossFunction]
"""(inputs, targets), and the loss."""

QUESTION_TOKENS = 384
SENTENCE_TOKENS = 64


def images(pixels: int, samples: int) -> Batch:
    """Images, and the class of each."""
    image = torch.empty(samples, 3, pixels, pixels).normal_()
    return (image, torch.randint(vision.CLASSES, (samples,))), functional.cross_entropy


def sentences(samples: int) -> Batch:
    """Sentences with their translations, and the token that comes next at each place of a translation."""
    source, target, following = (
        torch.randint(transformer.VOCABULARY, (samples, SENTENCE_TOKENS)) for _ in range(3)
    )
    return ((source, target), following), next_token_loss


def questions(samples: int) -> Batch:
    """Questions for BERT without padding, and where each answer starts and ends."""
    tokens, segments, spans = _questions(bert.VOCABULARY, samples)
    return ((tokens, segments, torch.zeros_like(tokens, dtype=torch.bool)), spans), span_loss


def questions_for_xlnet(samples: int) -> Batch:
    """Likewise for XLNet."""
    tokens, segments, spans = _questions(xlnet.VOCABULARY, samples)
    return ((tokens, segments), spans), span_loss


def _questions(vocabulary: int, samples: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randint(vocabulary, (samples, QUESTION_TOKENS))
    return tokens, torch.randint(2, tokens.shape), torch.randint(QUESTION_TOKENS, (samples, 2))


def next_token_loss(scores: Tensor, following: Tensor) -> Tensor:
    """Cross entropy with the smoothing of labels of the Transformer's paper (section 5.4)."""
    return functional.cross_entropy(scores.flatten(0, 1), following.flatten(), label_smoothing=0.1)


def span_loss(scores: Tensor, spans: Tensor) -> Tensor:
    """Mean cross entropy of both ends of the answer, over all positions."""
    return functional.cross_entropy(scores, spans)


def usual_optimizer(name: str) -> OptimizerFactory:
    """What the network's paper trains with, near enough for the bytes of its state.

    VGG and ResNet: momentum; Inception-V3: RMSProp (its state is as large); the others: Adam.
    """
    if BATCHES[name] in _IMAGES:
        return _momentum
    return _adam


def _momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


_IMAGES = (partial(images, 224), partial(images, 299))

BATCHES: Mapping[str, Callable[[int], Batch]] = {
    "vgg19": _IMAGES[0],
    "resnet152": _IMAGES[0],
    "inception-v3": _IMAGES[1],
    "transformer": sentences,
    "bert-large": questions,
    "xlnet-large": questions_for_xlnet,
    "bert-base": questions,
}
"""By network."""

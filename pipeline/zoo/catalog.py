"""The networks by name: how each is made, and what it is trained with, in the sizes of its paper.

Images have the size of each paper; questions have 384 tokens (BERT's own script for SQuAD) for all three
encoders, so that they compare; sentences to translate have 64 tokens on either side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from arborcast.pipeline.costs.layer_pass import LossFunction, OptimizerFactory
from arborcast.pipeline.model.divisible import Divisible
from arborcast.pipeline.zoo import bert, transformer, vision, xlnet
from arborcast.pipeline.zoo.inception import inception_v3

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


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """For images; the state of RMSProp, Inception's, is as large."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """For language."""
    return torch.optim.Adam(parameters)


class CatalogNetwork(NamedTuple):
    """A network.

    Attributes:
        make: initialises it.
        batch: of so many samples.
        optimizer: what its paper trains it with, near enough for the bytes of its state.
    """

    make: Callable[[], Divisible]
    batch: Callable[[int], Batch]
    optimizer: OptimizerFactory


CATALOG: Mapping[str, CatalogNetwork] = {
    "vgg19": CatalogNetwork(vision.vgg19, partial(images, 224), momentum),
    "resnet152": CatalogNetwork(vision.resnet152, partial(images, 224), momentum),
    "inception-v3": CatalogNetwork(inception_v3, partial(images, 299), momentum),
    "transformer": CatalogNetwork(transformer.transformer, sentences, adam),
    "bert-large": CatalogNetwork(bert.bert_large, questions, adam),
    "xlnet-large": CatalogNetwork(xlnet.xlnet_large, questions_for_xlnet, adam),
    "bert-base": CatalogNetwork(bert.bert_base, questions, adam),
}
"""By name."""

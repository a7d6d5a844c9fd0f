"""The networks by name: how each is made, and what it is trained with, in the sizes of its paper.

Images have the size of the paper; questions have 384 tokens (BERT's own script for SQuAD).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn import functional

from arborcast.pipeline.costs.layer_pass import LossFunction, OptimizerFactory
from arborcast.pipeline.model.divisible import Divisible
from arborcast.pipeline.zoo import bert, vgg

Batch: TypeAlias = tuple[tuple[Any, Any], LossFunction]
"""(inputs, targets), and the loss."""

QUESTION_TOKENS = 384


def images(samples: int) -> Batch:
    """Images, and the class of each."""
    image = torch.empty(samples, 3, 224, 224).normal_()
    return (image, torch.randint(vgg.CLASSES, (samples,))), functional.cross_entropy


def questions(samples: int) -> Batch:
    """Questions without padding, and where each answer starts and ends: both count alike in the loss."""
    tokens = torch.randint(bert.VOCABULARY, (samples, QUESTION_TOKENS))
    segments, spans = torch.randint(2, tokens.shape), torch.randint(QUESTION_TOKENS, (samples, 2))
    return ((tokens, segments, torch.zeros_like(tokens, dtype=torch.bool)), spans), functional.cross_entropy


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
    "vgg19": CatalogNetwork(vgg.vgg19, images, partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "bert-large": CatalogNetwork(bert.bert_large, questions, torch.optim.Adam),
    "bert-base": CatalogNetwork(bert.bert_base, questions, torch.optim.Adam),
}
"""By name."""

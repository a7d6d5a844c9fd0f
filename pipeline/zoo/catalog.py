"""Which function makes which network."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from arborcast.pipeline.model.divisible import Divisible
from arborcast.pipeline.zoo.bert import bert_base, bert_large
from arborcast.pipeline.zoo.inception import inception_v3
from arborcast.pipeline.zoo.transformer import transformer
from arborcast.pipeline.zoo.vision import resnet152, vgg19
from arborcast.pipeline.zoo.xlnet import xlnet_large

MODELS: Mapping[str, Callable[[], Divisible]] = {
    "vgg19": vgg19,
    "resnet152": resnet152,
    "inception-v3": inception_v3,
    "transformer": transformer,
    "bert-large": bert_large,
    "xlnet-large": xlnet_large,
    "bert-base": bert_base,
}
"""By name."""

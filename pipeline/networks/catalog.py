"""Which function makes which network."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pipeline.divisible import Divisible
from pipeline.networks.bert import bert_base, bert_large
from pipeline.networks.inception import inception_v3
from pipeline.networks.transformer import transformer
from pipeline.networks.vision import resnet152, vgg19
from pipeline.networks.xlnet import xlnet_large

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

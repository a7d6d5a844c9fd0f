"""The networks: parameter counts as published, layers that fit together, and costs near published times."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from arborcast.pipeline import zoo as networks
from arborcast.pipeline.costs.analytic import analyse
from arborcast.pipeline.costs.devices import P100, V100
from arborcast.pipeline.costs.measured import profile
from arborcast.pipeline.errors import ProfileError
from arborcast.pipeline.model.divisible import Divisible
from arborcast.pipeline.zoo import bert, inception, transformer, vision, xlnet

POOLER_BASE, POOLER_LARGE = 768 * 769, 1024 * 1025  # BERT's: not used for questions
SPAN_BASE, SPAN_LARGE = 2 * 769, 2 * 1025  # our head
PUBLISHED = {
    "vgg19": 143_667_240,  # torchvision
    "resnet152": 60_192_808,  # torchvision
    "inception-v3": 23_851_784 - 34_432 + 17_216,  # Keras, less running statistics, with batch norm's scales
    "bert-large": 335_141_888 - POOLER_LARGE + SPAN_LARGE,  # Hugging Face, bert-large-uncased
    "xlnet-large": 360_268_800 - 1024 + SPAN_LARGE,  # Hugging Face, xlnet-large-cased; 1024: the mask vector
    "bert-base": 109_482_240 - POOLER_BASE + SPAN_BASE,  # Hugging Face, bert-base-uncased
}


def parameters(model: nn.Module) -> int:
    return sum(it.numel() for it in model.parameters())


@pytest.mark.parametrize("name", networks.NAMES)
def test_built_without_memory_with_the_published_parameters(name):
    model, _, _ = networks.build(name)
    assert all(it.is_meta for it in model.parameters())
    assert 14 <= model.depth <= 60
    if name == "transformer":  # the paper gives 65 million, and about 37,000 tokens
        assert parameters(model) == pytest.approx(65e6, rel=0.04)
    else:
        assert parameters(model) == PUBLISHED[name]


def small(name: str):
    """The same layers, narrower and fewer, with an example for them."""
    question = torch.randint(100, (3, 12)), torch.randint(2, (3, 12))
    if name == "bert":
        return bert.bert(16, 2, 2), (*question, torch.zeros(3, 12, dtype=torch.bool))
    if name == "xlnet":
        return xlnet.xlnet(16, 2, 2), question
    layers = vision.Bottleneck(3, 4), vision.Bottleneck(16, 8, 2), vision.Head(32)
    return Divisible(layers), torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize("name", ["bert", "xlnet", "resnet"])
def test_small_ones_run_and_train(name):
    model, example = small(name)
    found = profile(model, example, repeats=1, warmups=0, fixed=False)
    assert found.depth == model.depth
    output = model(*(example if isinstance(example, tuple) else (example,)))
    output.square().sum().backward()
    assert all(it.grad is not None and it.grad.isfinite().all() for it in model.parameters())


def test_cutting_changes_nothing():
    model, example = small("bert")
    model.eval()
    first, rest = model.divide(0, 2), model.divide(2, model.depth)
    assert torch.equal(rest(*first(*example)), model(*example))


def test_padding_is_not_looked_at():
    model, (tokens, segments, _) = small("bert")
    model.eval()
    padding = torch.zeros(3, 12, dtype=torch.bool)
    padding[:, 8:] = True
    other = tokens.clone()
    other[:, 8:] = 7
    scores = [model(it, segments, padding)[:, :8] for it in (tokens, other)]
    assert torch.equal(*scores)


def test_translations_do_not_look_ahead():
    block = transformer.DecoderBlock(16, 2, 32).eval()
    hidden, memory = torch.randn(2, 6, 16), torch.randn(2, 5, 16)
    changed = hidden.clone()
    changed[:, 4:] += 1
    assert torch.equal(block(hidden, memory)[0][:, :4], block(changed, memory)[0][:, :4])
    assert not torch.equal(block(hidden, memory)[0][:, 4:], block(changed, memory)[0][:, 4:])


def test_xlnet_shift_is_by_distance():
    positions = 5
    distances = torch.arange(positions, -positions, -1.0)
    scores = distances.expand(2, 3, positions, -1).contiguous()
    drawn = [[row - column for column in range(positions)] for row in range(positions)]
    assert xlnet._shifted(scores)[1, 2].tolist() == drawn


def test_xlnet_attention_by_definition():
    """The three terms of each score, added up entry by entry."""
    torch.manual_seed(3)
    module = xlnet.RelativeAttention(4, 2).eval()
    for bias in (module.content_bias, module.distance_bias, module.segment_bias, module.segments):
        nn.init.normal_(bias)
    hidden, segments = torch.randn(1, 3, 4), torch.tensor([[0, 0, 1]])
    query, key, value = (it(hidden)[0].view(3, 2, 2) for it in (module.query, module.key, module.value))
    rows = torch.zeros(3, 2, 2)
    for i in range(3):
        for head in range(2):
            scores = torch.zeros(3)
            for j in range(3):
                angles = [(i - j) / 10000 ** (power / 4) for power in (0, 2)]
                wave = torch.tensor([math.sin(it) for it in angles] + [math.cos(it) for it in angles])
                far = module.distance(wave).view(2, 2)[head]
                other = int(segments[0, i] != segments[0, j])
                scores[j] = (query[i, head] + module.content_bias[head, 0]) @ key[j, head]
                scores[j] += (query[i, head] + module.distance_bias[head, 0]) @ far
                scores[j] += (query[i, head] + module.segment_bias[head, 0]) @ module.segments[other, head]
            rows[i, head] = (scores / math.sqrt(2)).softmax(0) @ value[:, head]
    expected = module.out(rows.flatten(1))
    torch.testing.assert_close(module(hidden, segments)[0], expected)


def test_inception_keeps_and_halves():
    assert inception.block_35(192, 32)(torch.randn(1, 192, 9, 9)).shape == (1, 256, 9, 9)
    assert inception.reduce_17()(torch.randn(1, 768, 17, 17)).shape == (1, 1280, 8, 8)


def test_a_profile_by_name():
    found = networks.analytic_profile("vgg19", "V100", samples=2)
    assert (found.model, found.samples, found.depth) == ("vgg19", 2, 24)
    assert found.source == "v100, from operators"
    assert found.gradient_bytes(0, 24) == found.optimizer_bytes(0, 24) == 4 * PUBLISHED["vgg19"]  # momentum
    assert found.layers[1].output_bytes == 2 * 64 * 224 * 224 * 4
    assert found.layers[1].saved_bytes == 2 * 64 * 224 * 224 * 4  # the next layer has this one's output
    assert found.layers[12].forward_us == found.layers[13].forward_us  # equal blocks cost the same


def test_blocks_keep_much_more_than_they_hand_on():
    model, example = small("bert")
    found = analyse(model, example, V100)
    hidden = 3 * 12 * 16 * 4
    assert found.layers[1].output_bytes == hidden + 3 * 12
    assert found.layers[1].saved_bytes > 10 * hidden


def test_the_transformer_shares_its_embedding():
    assert networks.build("transformer").model.ties == (("0.tokens.weight", (0, 7, 14)),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("alexnet",), "network alexnet: must be one of vgg19, resnet152, inception-v3, transformer"),
        (("bert-base", "v1"), "device v1: must be one of v100"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ProfileError, match=message):
        networks.analytic_profile(*arguments)


def test_no_batch_without_a_sample():
    with pytest.raises(ProfileError, match="network vgg19: samples must be at least 1, got 0"):
        networks.build("vgg19", samples=0)


@pytest.mark.long
def test_times_are_within_a_factor_of_two_of_published_ones():
    """Training on one GPU in float32, samples per second.

    P100: TensorFlow's guide to performance (2017), synthetic data, 64 images. V100, 32 GB: NVIDIA's BERT
    examples for TensorFlow (2019), fine-tuning on SQuAD with 7 samples; its step has the update, too.
    """

    def rate(found):
        step = found.forward_us(0, found.depth, found.samples) + found.backward_us(
            0, found.depth, found.samples
        )
        return found.samples / step * 1e6

    with torch.device("meta"):
        resnet50 = analyse(vision.resnet((3, 4, 6, 3)), torch.empty(64, 3, 224, 224), P100)
    published = [
        (networks.analytic_profile("inception-v3", P100, samples=64), 142),
        (networks.analytic_profile("resnet152", P100, samples=64), 91.8),
        (networks.analytic_profile("bert-large", V100, samples=7), 7.56),
        (resnet50, 219),
    ]
    for found, per_second in published:
        assert per_second / 2 < rate(found) < 2 * per_second


@pytest.mark.long
def test_all_profiles():
    found = {name: networks.analytic_profile(name) for name in networks.NAMES}
    assert tuple(found) == networks.NAMES
    assert all(profile.parameter_bytes(0, profile.depth) > 0 for profile in found.values())

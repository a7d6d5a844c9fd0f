"""The networks: parameter counts as published, layers that fit together, and costs near published times."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from arborcast.pipeline import zoo as networks
from arborcast.pipeline.costs.analytic import analyse
from arborcast.pipeline.costs.devices import V100
from arborcast.pipeline.errors import ProfileError
from arborcast.pipeline.zoo import bert

POOLER_BASE, POOLER_LARGE = 768 * 769, 1024 * 1025  # BERT's: not used for questions
SPAN_BASE, SPAN_LARGE = 2 * 769, 2 * 1025  # our head
PUBLISHED = {
    "vgg19": 143_667_240,  # torchvision
    "bert-large": 335_141_888 - POOLER_LARGE + SPAN_LARGE,  # Hugging Face, bert-large-uncased
    "bert-base": 109_482_240 - POOLER_BASE + SPAN_BASE,  # Hugging Face, bert-base-uncased
}


def parameters(model: nn.Module) -> int:
    return sum(it.numel() for it in model.parameters())


@pytest.mark.parametrize("name", networks.NAMES)
def test_built_without_memory_with_the_published_parameters(name):
    model, _, _ = networks.build(name)
    assert all(it.is_meta for it in model.parameters())
    assert 14 <= model.depth <= 60
    assert parameters(model) == PUBLISHED[name]


def small():
    """The same layers as BERT's, narrower and fewer, with an example for them."""
    tokens, segments = torch.randint(100, (3, 12)), torch.randint(2, (3, 12))
    return bert.bert(16, 2, 2), (tokens, segments, torch.zeros(3, 12, dtype=torch.bool))


def test_a_small_one_runs_and_trains():
    model, example = small()
    model(*example).square().sum().backward()
    assert all(it.grad is not None and it.grad.isfinite().all() for it in model.parameters())


def test_cutting_changes_nothing():
    model, example = small()
    model.eval()
    first, rest = model.divide(0, 2), model.divide(2, model.depth)
    assert torch.equal(rest(*first(*example)), model(*example))


def test_padding_is_not_looked_at():
    model, (tokens, segments, _) = small()
    model.eval()
    padding = torch.zeros(3, 12, dtype=torch.bool)
    padding[:, 8:] = True
    other = tokens.clone()
    other[:, 8:] = 7
    scores = [model(it, segments, padding)[:, :8] for it in (tokens, other)]
    assert torch.equal(*scores)


def test_a_profile_by_name():
    found = networks.analytic_profile("vgg19", "V100", samples=2)
    assert (found.model, found.samples, found.depth) == ("vgg19", 2, 24)
    assert found.source == "v100, from operators"
    assert found.gradient_bytes(0, 24) == found.optimizer_bytes(0, 24) == 4 * PUBLISHED["vgg19"]  # momentum
    assert found.layers[1].output_bytes == 2 * 64 * 224 * 224 * 4
    assert found.layers[1].saved_bytes == 2 * 64 * 224 * 224 * 4  # the next layer has this one's output
    assert found.layers[12].forward_us == found.layers[13].forward_us  # equal blocks cost the same


def test_blocks_keep_much_more_than_they_hand_on():
    model, example = small()
    found = analyse(model, example, V100)
    hidden = 3 * 12 * 16 * 4
    assert found.layers[1].output_bytes == hidden + 3 * 12
    assert found.layers[1].saved_bytes > 10 * hidden


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("alexnet",), "network alexnet: must be one of vgg19, bert-large, bert-base"),
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

    V100, 32 GB: NVIDIA's BERT examples for TensorFlow (2019), fine-tuning on SQuAD with 7 samples; its step
    has the update, too.
    """
    found = networks.analytic_profile("bert-large", V100, samples=7)
    step = found.forward_us(0, found.depth, 7) + found.backward_us(0, found.depth, 7)
    assert 7.56 / 2 < 7 / step * 1e6 < 2 * 7.56


@pytest.mark.long
def test_all_profiles():
    found = {name: networks.analytic_profile(name) for name in networks.NAMES}
    assert tuple(found) == networks.NAMES
    assert all(profile.parameter_bytes(0, profile.depth) > 0 for profile in found.values())

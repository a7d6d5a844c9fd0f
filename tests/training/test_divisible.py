"""A sequential model that divides by the indices of its layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arborcast.pipeline.errors import PartitionError
from arborcast.pipeline.model.divisible import Divisible
from arborcast.pipeline.model.layered import Layered
from tests.support.training_cases import FEATURES, branching, network, tied


def test_parts_share_names_and_parameters_with_the_whole() -> None:
    model = network()
    part = model.divide(2, 5)
    assert part.layer_names == ("2 Linear", "3 ReLU", "4 Linear")
    assert list(part.state_dict()) == ["2.weight", "2.bias", "4.weight", "4.bias"]
    whole = dict(model.named_parameters())
    assert all(parameter is whole[name] for name, parameter in part.named_parameters())
    assert list(part.divide(1, 3).state_dict()) == ["4.weight", "4.bias"]
    assert part[2] is model[4]


@pytest.mark.parametrize("make", [network, branching, tied])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_parts_after_another_are_the_whole(make: Any, cut: int) -> None:
    model = make()
    inputs = torch.randn(5, FEATURES)
    middle = model.divide(0, cut)(inputs.clone())
    middle = middle if isinstance(middle, tuple) else (middle,)
    result: Tensor = model.divide(cut, model.depth)(*middle)
    assert torch.equal(result, model(inputs.clone()))


def test_it_is_layered() -> None:
    model = tied()
    assert isinstance(model, Layered)
    assert model.ties == (("0.weight", (0, 4)),)
    assert model.depth == len(model) == 5
    assert model.divide(1, 4).ties == ()
    assert model.sample_dims(2) == (0,)


def test_layers_used_twice_are_ties() -> None:
    layer = nn.Linear(4, 4)
    assert Divisible(layer, nn.Tanh(), layer).ties == (("0.weight", (0, 2)), ("0.bias", (0, 2)))


def test_append() -> None:
    model = Divisible([nn.Linear(2, 3)])
    assert model.append(nn.ReLU()) is model
    part = model.divide(1, 2).append(nn.Linear(3, 1))
    assert list(part.state_dict()) == ["2.weight", "2.bias"]
    assert model.depth == 2


def test_modes_of_layers_are_left_alone() -> None:
    model = network()
    model[1].eval()
    part = model.divide(0, 3)
    assert [layer.training for layer in part] == [True, False, True]
    assert not network().eval().divide(0, 3).training


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 2), (3, 2), (0, 9)])
def test_ranges_that_there_are_not(start: int, end: int) -> None:
    with pytest.raises(PartitionError, match=rf"divide\({start}, {end}\): must be 0 <= start < end <= 8"):
        network().divide(start, end)


def test_layers_that_are_none() -> None:
    layers: Any = [nn.ReLU(), torch.relu]
    with pytest.raises(PartitionError, match="layer 1 of a Divisible: must be a module, got builtin"):
        Divisible(layers)

"""Backward passes in two halves: together what one pass does, and which parameters wait for the second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from arborcast.pipeline.model.split import SplitBackward


class Many(nn.Module):
    """Operators of many kinds, with a parameter that two use, one that nobody uses, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bare = nn.Linear(6, 8), nn.Linear(8, 8, bias=False)
        self.norm, self.scale = nn.LayerNorm(8), nn.Parameter(torch.ones(8))
        self.twice, self.unused = nn.Linear(8, 8), nn.Linear(2, 2)
        self.conv, self.recurrent = nn.Conv1d(1, 2, 3), nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.norm(torch.relu(self.bare(torch.tanh(self.linear(x))))) * self.scale
        hidden = self.twice(torch.relu(self.twice(hidden))) + hidden
        seen, _ = self.recurrent(hidden[:, None, :].expand(-1, 3, -1))
        attended, _ = self.attention(seen, seen, seen)
        return self.conv(hidden[:, None, :]).flatten(1), attended.sum(1)


class Embedded(nn.Module):
    """Takes no gradient in."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(9, 4), nn.Embedding(5, 4)
        self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x) + self.places(torch.arange(5))
        return self.norm(nn.functional.dropout(self.inner(hidden), 0.5))


class Product(torch.autograd.Function):
    """A product that counts its backward passes."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        Product.calls += 1
        return gradient * weight, (gradient * x).sum(0)


class Handmade(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.full((6,), 2.0)), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(Product.apply(x, self.weight))  # type: ignore[no-untyped-call]
        return result


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    model[2].requires_grad_(False)
    return model


ATTENTION = {
    f"attention.{it}" for it in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
}
LSTM = {f"recurrent.{kind}_{of}_l0" for kind in ("weight", "bias") for of in ("ih", "hh")}
WHOLE = {f"{layer}.{it}" for layer in ("linear", "norm", "conv") for it in ("weight", "bias")}

CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], set[str]]] = {
    "many": (
        Many,
        lambda: torch.randn(5, 6, requires_grad=True),
        {*WHOLE, "bare.weight", "scale"} | LSTM | ATTENTION,
    ),
    "no gradient in": (Many, lambda: torch.randn(5, 6), {*WHOLE, "bare.weight", "scale"} | LSTM | ATTENTION),
    "embedded": (
        Embedded,
        lambda: torch.randint(0, 9, (3, 5)),
        {f"{layer}.{it}" for layer in ("inner", "norm") for it in ("weight", "bias")}
        | {"words.weight", "places.weight"},
    ),
    "handmade": (
        Handmade,
        lambda: torch.randn(5, 6, requires_grad=True),
        {"linear.weight", "linear.bias"},
    ),
    "frozen": (
        frozen,
        lambda: torch.randn(5, 6, requires_grad=True),
        {f"{layer}.{it}" for layer in (0, 4) for it in ("weight", "bias")},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_both_halves_are_one_pass(name: str) -> None:
    make, data, waiting = CASES[name]
    torch.manual_seed(0)
    model, x = make(), data()

    def ends() -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(1)
        made = model(x)
        outputs = list(made) if isinstance(made, tuple) else [made]
        return outputs, [torch.randn_like(it) for it in outputs]

    def given() -> dict[str, Tensor]:
        return {name: it.grad for name, it in model.named_parameters() if it.grad is not None}

    for _ in range(2):  # gradients add up
        torch.autograd.backward(*ends())
    whole, of_input = given(), x.grad
    model.zero_grad()
    split = SplitBackward(model.parameters())
    Product.calls, passes = 0, []
    for _ in range(2):
        outputs, gradients = ends()
        passes.append(split.first([get_gradient_edge(it) for it in outputs], gradients, [x]))
    assert whole.keys() - given().keys() == waiting
    for _, later in passes:
        SplitBackward.second(later)
        assert not later
    for parameter, gradient in given().items():
        torch.testing.assert_close(gradient, whole.pop(parameter), atol=1e-6, rtol=1e-6)
    assert not whole
    if of_input is None:
        assert all(found == [None] for found, _ in passes)
    else:
        torch.testing.assert_close(sum(found[0] for found, _ in passes), of_input)
    assert Product.calls == (2 if name == "handmade" else 0), "a Python function runs once in a pass"


def test_a_product_is_left_for_the_second_half() -> None:
    """The work of the halves: of two layers the first half multiplies once each, and so does the second."""
    from torch.utils.flop_counter import FlopCounterMode

    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    x = torch.randn(4, 8, requires_grad=True)
    split = SplitBackward(model.parameters())
    outputs = model(x)
    halves = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with halves[0]:
        _, later = split.first([get_gradient_edge(outputs)], [torch.ones(4, 8)], [x])
    with halves[1]:
        SplitBackward.second(later)
    assert [it.get_total_flops() for it in halves] == [2 * 2 * 4 * 8 * 8] * 2


def test_what_no_gradient_reaches_has_none() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x), self.other(x)

    model, x = Two(), torch.randn(2, 3, requires_grad=True)
    split = SplitBackward(model.parameters())
    outputs = model(x)
    (of_input,), later = split.first([get_gradient_edge(outputs[0])], [torch.ones(2, 3)], [x])
    SplitBackward.second(later)
    assert of_input is not None and model.one.weight.grad is not None and model.other.weight.grad is None


class Hooked(nn.Module):
    """Hooks that halve gradients: of outputs with and without a bias, of weights that one or two use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.once, self.twice = nn.Linear(6, 6), nn.Linear(6, 6)
        for layer in (self.first, self.once, self.twice):
            layer.weight.register_hook(lambda gradient: gradient / 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = [layer(x) for layer in (self.first, self.other)]
        hidden.append(self.once(torch.relu(hidden[0] + hidden[1])))
        for it in hidden:
            it.register_hook(lambda gradient: gradient / 2)
        result: Tensor = self.twice(torch.relu(self.twice(hidden[2])))
        return result


@pytest.mark.parametrize("takes_gradient", [True, False])
def test_hooks_change_gradients_once(takes_gradient: bool) -> None:
    torch.manual_seed(0)
    model, x = Hooked(), torch.randn(5, 6, requires_grad=takes_gradient)
    model(x).sum().backward()
    whole = {name: it.grad for name, it in model.named_parameters()}
    model.zero_grad()
    for _ in range(2):  # hooks stay
        _, later = SplitBackward(model.parameters()).first([get_gradient_edge(model(x).sum())], [None], [x])
        SplitBackward.second(later)
    for name, it in model.named_parameters():
        torch.testing.assert_close(it.grad, 2 * whole[name], msg=name)

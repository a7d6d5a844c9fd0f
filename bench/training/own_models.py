"""Models with what makes cutting hard: skips, experts, control flow, several losses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


def squared(output: Tensor, target: Tensor) -> Tensor:
    """The mean of squared differences."""
    return functional.mse_loss(output, target)


class UNet(nn.Module):
    """Two levels down and up; what each level gives skips to the other side."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)])
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(16, 4, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)])
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = functional.gelu(layer(x))
            skips.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.norm(self.middle(x))
        for layer in self.up:
            x = functional.interpolate(x, scale_factor=2, mode="nearest")
            x = functional.gelu(layer(torch.cat([x, skips.pop()], 1)))
        result: Tensor = self.head(x)
        return result


class Experts(nn.Module):
    """Three layers of four experts, two for each token; with a loss that sees how evenly they are used."""

    def __init__(self, balanced: bool = False) -> None:
        super().__init__()
        self.balanced = balanced
        self.routers = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))
        self.weights = nn.ParameterList(torch.randn(4, 8, 8) * 0.3 for _ in range(3))

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        uneven = torch.zeros(())
        for router, weight in zip(self.routers, self.weights, strict=True):
            shares = router(x).softmax(-1)
            best, chosen = shares.topk(2, -1)
            gates = torch.zeros_like(shares).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
            x = x + torch.einsum("ste,std,edf->stf", gates, x, weight).tanh()
            used = functional.one_hot(chosen, 4).float().mean((0, 1, 2))
            uneven = uneven + 4 * (used * shares.mean((0, 1))).sum()
        if target is None:
            return x
        return squared(x, target) + (0.01 * uneven if self.balanced else 0.0)


class Shaped(nn.Module):
    """As many halvings as the length allows, and a branch on the width."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.wide = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if x.shape[1] % 2 == 0:
                x = x[:, ::2] + x[:, 1::2]
        if x.shape[-1] >= 8:
            x = self.wide(x)
        return x.mean(1)


class Choosing(nn.Module):
    """Control flow on the values of a batch, which no cut can keep."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if x.sum() > 0:
            x = torch.tanh(x)
        return x


@dataclass(frozen=True)
class Answer:
    """What `Named` returns."""

    y: Tensor
    hidden: tuple[Tensor, ...]
    note: str | None = None


class Named(nn.Module):
    """Takes a number and an optional tensor, and returns a frozen dataclass with a tuple in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, scale: float, bias: Tensor | None = None) -> Answer:
        hidden = []
        for layer in self.layers:
            x = torch.tanh(layer(x)) * scale
            hidden.append(x)
        return Answer(x if bias is None else x + bias, tuple(hidden), note="as it is")


class SeveralLosses(nn.Module):
    """Cross entropy with weights of classes, a squared error and a penalty on a weight, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.kind, self.value = nn.Linear(8, 3), nn.Linear(8, 1)
        self.importance: Tensor
        self.register_buffer("importance", torch.tensor([0.2, 1.0, 3.0]))

    def forward(self, x: Tensor, kinds: Tensor, values: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        kind, value = self.kind(x), self.value(x).squeeze(-1)
        first = functional.cross_entropy(kind, kinds, weight=self.importance)
        second = functional.mse_loss(value, values)
        penalty = self.value.weight.square().sum()
        return {"loss": first + 0.5 * second + 0.01 * penalty, "first": first, "kind": kind}


class Masked(nn.Module):
    """A mean over what a mask keeps, written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        each = (x - target).square().mean(-1)
        return (each * mask).sum() / mask.sum().clamp(min=1)


class Recurrent(nn.Module):
    """A recurrent layer between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.memory = nn.LSTM(8, 8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        every, _ = self.memory(torch.tanh(self.first(x)))
        result: Tensor = self.last(torch.tanh(every[:, -1]))
        return result

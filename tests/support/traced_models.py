"""Unmodified models that tests of tracing cut: each has something that makes cutting hard."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Residual(nn.Module):
    """Convolutions with a skip connection, batch norm, and changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norms[0](self.first(x)))
        skipped = x
        x = self.norms[1](self.second(x))
        x += skipped
        result: Tensor = self.head(self.relu(x).mean((2, 3)))
        return result


class Language(nn.Module):
    """Two inputs, a mask made in forward, dropout, weights tied between both ends, a buffer not saved."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.places = nn.Embedding(5, 8)
        block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, layers)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, words: Tensor, weights: Tensor) -> Tensor:
        length = words.shape[1]
        mask = torch.full((length, length), float("-inf")).triu_(1)
        x = self.words(words) + self.places(torch.arange(length))
        x = self.encoder(x * self.scale, mask=mask, is_causal=False)
        result: Tensor = self.head(x) * weights.unsqueeze(-1)
        return result


class Recurrent(nn.Module):
    """An operator with several results; a state of zeros, as many as there are samples; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        every, _ = self.memory(x)
        with torch.no_grad():
            hint = torch.tensor([1.0, 2.0]).cumsum(0)
        return self.head(every[:, -1]) + hint, every


class Regularised(nn.Module):
    """Values of parameters alone, used at several places; random ones, which must be drawn once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        kernel = functional.normalize(self.weight.t(), dim=1)
        noise = torch.rand(4)
        x = torch.tanh(x @ kernel)
        x = torch.sigmoid(x * noise) + noise
        x = torch.tanh(self.last(x))
        return torch.relu(x @ kernel)


class Choosing(nn.Module):
    """Control flow that depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = -x
        result: Tensor = self.linear(x)
        return result

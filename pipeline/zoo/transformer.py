"""The base Transformer of Vaswani et al. (2017) for translation, as a chain of its encoder and its decoder.

Through the encoder cross its hidden states and the target's tokens (a few bytes); through the decoder, its
hidden states and what the encoder made. Padding is left out: sentences of a batch are equally long.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from arborcast.pipeline.model.divisible import Divisible
from arborcast.pipeline.zoo.attention import Attention, FeedForward

VOCABULARY = 37000


def _positions(hidden: Tensor) -> Tensor:
    """Sines and cosines of the positions: (positions, width), section 3.5."""
    positions, width = hidden.shape[1:]
    places = torch.arange(positions, device=hidden.device, dtype=hidden.dtype)
    powers = torch.arange(0, width, 2, device=hidden.device, dtype=hidden.dtype) / width
    angles = places[:, None] / 10000**powers
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


class Embedding(nn.Module):
    """Tokens, scaled, with their positions."""

    def __init__(self, tokens: nn.Embedding) -> None:
        super().__init__()
        self.tokens = tokens
        self.dropout = nn.Dropout(0.1)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Hidden states (samples, positions, width)."""
        hidden = self.tokens(tokens) * math.sqrt(self.tokens.embedding_dim)
        result: Tensor = self.dropout(hidden + _positions(hidden))
        return result


class SourceEmbedding(Embedding):
    """The first layer."""

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states of the source, and the target's tokens as they came."""
        return self.embedded(source), target


class TargetEmbedding(Embedding):
    """Between encoder and decoder."""

    def forward(self, memory: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states of the target, and what the encoder made, as it came."""
        return self.embedded(target), memory


class EncoderBlock(nn.Module):
    """Attention and feed-forward, each added to its input and then normalised."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.feed_forward = FeedForward(width, inner, nn.ReLU)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states of the source, and the target's tokens as they came."""
        hidden = self.norms[0](hidden + self.dropout(self.attention(hidden, hidden)))
        return self.norms[1](hidden + self.dropout(self.feed_forward(hidden))), target


class DecoderBlock(nn.Module):
    """Attention to what comes before, attention to the source, and feed-forward."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.source_attention = Attention(width, heads)
        self.feed_forward = FeedForward(width, inner, nn.ReLU)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states of the target, and what the encoder made, as it came."""
        length = hidden.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
        hidden = self.norms[0](hidden + self.dropout(self.attention(hidden, hidden, later)))
        hidden = self.norms[1](hidden + self.dropout(self.source_attention(hidden, memory)))
        return self.norms[2](hidden + self.dropout(self.feed_forward(hidden))), memory


class NextToken(nn.Module):
    """Scores of every token, by the embedding's own weights."""

    def __init__(self, tokens: nn.Embedding) -> None:
        super().__init__()
        self.weight = tokens.weight

    def forward(self, hidden: Tensor, memory: Tensor) -> Tensor:
        """Scores (samples, positions, vocabulary)."""
        return hidden @ self.weight.t()


def transformer() -> Divisible:
    """The base model: width 512, 8 heads, feed-forward 2048, 6 + 6 blocks, one embedding for all three uses.

    63,082,496 parameters with the about 37,000 tokens of section 5.1; the paper's table 3 gives 65 million.
    """
    tokens = nn.Embedding(VOCABULARY, 512)
    return Divisible(
        [
            SourceEmbedding(tokens),
            *(EncoderBlock(512, 8, 2048) for _ in range(6)),
            TargetEmbedding(tokens),
            *(DecoderBlock(512, 8, 2048) for _ in range(6)),
            NextToken(tokens),
        ]
    )

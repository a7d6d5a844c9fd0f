"""XLNet-Large for questions on a text (SQuAD), of Yang et al. (2019).

Fine-tuning uses the content stream alone. Left out: the query stream with its one mask vector, memory of
earlier segments, and the beam search over ends of answers. Attention by relative position (Dai et al., 2019,
section 3.3) and by relative segment is there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from arborcast.pipeline.model.divisible import Divisible
from arborcast.pipeline.zoo.attention import FeedForward, split_heads, weighted
from arborcast.pipeline.zoo.bert import SpanHead

VOCABULARY = 32000


class XLNetEmbedding(nn.Module):
    """Tokens; positions and segments enter in the attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states, and the segments as they came; both arguments are (samples, positions)."""
        return self.dropout(self.tokens(tokens)), segments


class RelativeAttention(nn.Module):
    """Attention whose scores are the sum of three: by content, by distance, by same or other segment."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = 1 / math.sqrt(width / heads)
        self.query, self.key, self.value, self.distance, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(5)
        )
        part = width // heads
        self.content_bias, self.distance_bias, self.segment_bias = (
            nn.Parameter(torch.zeros(heads, 1, part)) for _ in range(3)
        )
        self.segments = nn.Parameter(torch.zeros(2, heads, part))
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor, segments: Tensor) -> Tensor:
        """What each position takes from all."""
        query = split_heads(self.query(hidden), self.heads)
        key = split_heads(self.key(hidden), self.heads)
        by_content = (query + self.content_bias) @ key.transpose(2, 3)
        far = split_heads(self.distance(_waves(hidden))[None], self.heads)
        by_distance = _shifted((query + self.distance_bias) @ far.transpose(2, 3))
        both = torch.einsum("bhid,shd->bhis", query + self.segment_bias, self.segments)
        other = (segments[:, None, :, None] != segments[:, None, None, :]).expand_as(by_content)
        by_segment = torch.where(other, both[..., 1:], both[..., :1])
        scores = (by_content + by_distance + by_segment) * self.scale
        result: Tensor = self.out(
            weighted(scores, split_heads(self.value(hidden), self.heads), None, self.dropout)
        )
        return result


def _waves(hidden: Tensor) -> Tensor:
    """Sines and cosines of the distances positions, ..., 1 - positions: (2 positions, width)."""
    positions, width = hidden.shape[1:]
    distances = torch.arange(positions, -positions, -1, device=hidden.device, dtype=hidden.dtype)
    powers = torch.arange(0, width, 2, device=hidden.device, dtype=hidden.dtype) / width
    angles = distances[:, None] / 10000**powers
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def _shifted(scores: Tensor) -> Tensor:
    """From scores by distance to scores by position: entry (i, j) is the one of distance i - j.

    Row i of the distances begins at `positions` and must begin at i: a copy of the memory, read with rows
    shorter by one, moves each row by one more than the row before.
    """
    samples, heads, positions, _ = scores.shape
    rows = scores.reshape(samples, heads, 2 * positions, positions)[:, :, 1:]
    return rows.reshape(samples, heads, positions, 2 * positions - 1)[..., :positions]


class XLNetBlock(nn.Module):
    """Relative attention and feed-forward, each added to its input and then normalised."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = RelativeAttention(width, heads)
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.feed_forward = FeedForward(width, 4 * width, nn.GELU)
        self.feed_forward_norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states, and the segments as they came."""
        hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden, segments)))
        hidden = self.feed_forward_norm(hidden + self.dropout(self.feed_forward(hidden)))
        return hidden, segments


def xlnet(width: int, heads: int, blocks: int) -> Divisible:
    """Embedding, blocks and the head for questions."""
    return Divisible(
        [XLNetEmbedding(width), *(XLNetBlock(width, heads) for _ in range(blocks)), SpanHead(width)]
    )


def xlnet_large() -> Divisible:
    """XLNet-Large, cased, with a head for questions: 360,269,826 parameters.

    Published: 360,268,800 for the model with its mask vector (1,024) and without our head (2 * 1025 = 2,050),
    in Hugging Face's xlnet-large-cased.
    """
    return xlnet(1024, 16, 24)

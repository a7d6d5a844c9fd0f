"""What the language models share: attention over heads, written out, and the feed-forward block.

Attention is a product, a softmax and a product, as frameworks ran it when the figures that planners are
compared on were taken; a fused kernel would keep less memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn


def split_heads(values: Tensor, heads: int) -> Tensor:
    """From (samples, positions, width) to (samples, heads, positions, width / heads)."""
    samples, positions, width = values.shape
    return values.view(samples, positions, heads, width // heads).transpose(1, 2)


def join_heads(values: Tensor) -> Tensor:
    """The inverse of `split_heads`."""
    samples, heads, positions, width = values.shape
    return values.transpose(1, 2).reshape(samples, positions, heads * width)


def weighted(scores: Tensor, values: Tensor, hidden: Tensor | None, dropout: nn.Module) -> Tensor:
    """Values weighted by scores, heads joined.

    Args:
        scores: (samples, heads, positions, positions looked at).
        values: (samples, heads, positions looked at, width of a head).
        hidden: true where a position may not be looked at; broadcast to the scores.
        dropout: on the weights.
    """
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return join_heads(dropout(scores.softmax(dim=-1)) @ values)


class Attention(nn.Module):
    """Multi-head attention of Vaswani et al. (2017), section 3.2.2, with biases.

    Args:
        width: of the model.
        heads: that divide it.
        dropout: share of weights dropped.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads = heads
        self.scale = 1 / math.sqrt(width / heads)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: Tensor, seen: Tensor, hidden: Tensor | None = None) -> Tensor:
        """What each position of `values` takes from the positions of `seen` that are not hidden."""
        query = split_heads(self.query(values), self.heads) * self.scale
        key = split_heads(self.key(seen), self.heads)
        taken = weighted(
            query @ key.transpose(2, 3), split_heads(self.value(seen), self.heads), hidden, self.dropout
        )
        result: Tensor = self.out(taken)
        return result


class FeedForward(nn.Sequential):
    """Two linear layers with an activation between."""

    def __init__(self, width: int, inner: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__(nn.Linear(width, inner), activation(), nn.Linear(inner, width))

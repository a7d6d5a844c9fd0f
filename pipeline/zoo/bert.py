"""BERT for questions on a text (SQuAD), base and large, of Devlin et al. (2018).

Between layers cross the hidden states and, as a second tensor, which positions are padding. Attention is a
product, a softmax and a product, as frameworks ran it when the figures that planners are compared on were
taken; a fused kernel would keep less memory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from arborcast.pipeline.model.divisible import Divisible

VOCABULARY = 30522
POSITIONS = 512


class BertEmbedding(nn.Module):
    """Tokens, positions and segments, summed and normalised."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(POSITIONS, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor, segments: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states, and the padding as it came.

        Args:
            tokens: (samples, positions), whole numbers.
            segments: likewise, 0 or 1.
            padding: likewise, true where there is no token.
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        total = self.tokens(tokens) + self.positions(places) + self.segments(segments)
        return self.dropout(self.norm(total)), padding


class Attention(nn.Module):
    """Multi-head attention of Vaswani et al. (2017), section 3.2.2, with biases.

    Args:
        width: of the model.
        heads: that divide it.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = 1 / math.sqrt(width / heads)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor, unseen: Tensor) -> Tensor:
        """What each position takes from all but the unseen; those are true, broadcast to the scores."""
        query = self._by_head(self.query(hidden)) * self.scale
        scores = query @ self._by_head(self.key(hidden)).transpose(2, 3)
        values, scores = self._by_head(self.value(hidden)), scores.masked_fill(unseen, float("-inf"))
        taken = self.dropout(scores.softmax(dim=-1)) @ values
        result: Tensor = self.out(taken.transpose(1, 2).reshape(hidden.shape))
        return result

    def _by_head(self, values: Tensor) -> Tensor:
        """From (samples, positions, width) to (samples, heads, positions, width / heads)."""
        samples, positions, width = values.shape
        return values.view(samples, positions, self.heads, width // self.heads).transpose(1, 2)


class BertBlock(nn.Module):
    """Attention and feed-forward, four times as wide inside, each added to its input and then normalised."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.feed_forward_norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states, and the padding as it came."""
        taken = self.attention(hidden, padding[:, None, None, :])
        hidden = self.attention_norm(hidden + self.dropout(taken))
        hidden = self.feed_forward_norm(hidden + self.dropout(self.feed_forward(hidden)))
        return hidden, padding


class SpanHead(nn.Module):
    """For each position, how well the answer starts there and how well it ends there."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.span = nn.Linear(width, 2)

    def forward(self, hidden: Tensor, rest: Tensor) -> Tensor:
        """Scores (samples, positions, 2)."""
        scores: Tensor = self.span(hidden)
        return scores


def bert(width: int, heads: int, blocks: int) -> Divisible:
    """Embedding, blocks and the head for questions; without the pooler, which that task does not use."""
    return Divisible(
        [BertEmbedding(width), *(BertBlock(width, heads) for _ in range(blocks)), SpanHead(width)]
    )


def bert_base() -> Divisible:
    """BERT-Base, uncased, with the head for questions: 108,893,186 parameters.

    Published: 110 million (the paper); 109,482,240 for the model with its pooler (768 * 769 = 590,592) and
    without our head (2 * 769 = 1,538), in Hugging Face's bert-base-uncased.
    """
    return bert(768, 12, 12)


def bert_large() -> Divisible:
    """BERT-Large, uncased, with the head for questions: 334,094,338 parameters.

    Published: 340 million (the paper); 335,141,888 for the model with its pooler (1024 * 1025 = 1,049,600)
    and without our head (2 * 1025 = 2,050), in Hugging Face's bert-large-uncased.
    """
    return bert(1024, 16, 24)

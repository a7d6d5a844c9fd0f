"""Operators of traced models: labels checked by dividing real tensors, merging and repeats as drawn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from arborcast.pipeline import trace
from arborcast.pipeline.model.traced.operator_reader import operator_trace
from arborcast.pipeline.model.traced.rules import OperatorCall, form_of
from arborcast.pipeline.operators import OperatorTrace
from arborcast.pipeline.sharding.graph import merged
from arborcast.pipeline.sharding.repeats import classes


def test_a_table_of_tokens_is_divided_by_rows_and_columns():
    call = OperatorCall({"weight": (1000, 64), "indices": (8, 16)}, {}, (8, 16, 64))
    form = form_of("embedding", call, is_pointwise=False)
    assert form is not None
    assert form.inputs == {"weight": ("v", "n"), "indices": ("i0", "i1")}
    assert (form.output, form.summed) == (("i0", "i1", "n"), {"v"})


def test_a_view_is_divided_by_its_outermost_dimensions():
    joined = form_of("view", OperatorCall({"self": (8, 16, 4, 32)}, {}, (8, 16, 128)), is_pointwise=False)
    split = form_of("view", OperatorCall({"self": (8, 16, 128)}, {}, (8, 16, 4, 32)), is_pointwise=False)
    flat = form_of("view", OperatorCall({"self": (8, 16, 128)}, {}, (128, 128)), is_pointwise=False)
    assert joined is not None
    assert split is not None
    assert flat is not None
    assert (joined.inputs["self"], joined.output) == (("i0", "i1", "i2", None), ("i0", "i1", "i2"))
    assert (split.inputs["self"], split.output) == (("i0", "i1", "i2"), ("i0", "i1", "i2", None))
    assert joined.parts == split.parts == {"i0": 8, "i1": 16, "i2": 4}  # heads are not divided
    assert (flat.inputs["self"], flat.output) == (("i0", None, "i1"), ("i0", "i1"))


class Block(nn.Module):
    """Attention over heads and a feed-forward block, each added to what it read."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (
            it(y).view(*y.shape[:2], self.heads, -1).transpose(1, 2)
            for it in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


def gpt(blocks: int, samples: int = 8) -> OperatorTrace:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Embedding(1000, 64), *(Block(64, 4) for _ in range(blocks)), nn.Linear(64, 1000)
        )
        tokens = torch.zeros(4, 16, dtype=torch.long)

    def loss(scores: Tensor, following: Tensor) -> Tensor:
        return functional.cross_entropy(scores.flatten(0, 1), following.flatten())

    return operator_trace(trace(model, (tokens, tokens), loss), samples)


@pytest.fixture(scope="module")
def two() -> OperatorTrace:
    return gpt(2)


def test_a_transformer_as_drawn(two):
    graph = merged(two)
    inner = [it for it in graph.operators if it.given is None]
    block = (
        "layer_norm",
        "linear view transpose",
        "linear view transpose",
        "linear view transpose",
        "scaled_dot_product_attention transpose reshape",
        "linear add",
        "layer_norm",
        "linear gelu",
        "linear add",
    )
    kinds = {it.name: it.kind for it in two.operators}
    drawn = [" ".join(kinds[name] for name in it.members) for it in inner]
    ends = ["linear", "flatten", "flatten", "cross_entropy_loss"]
    assert drawn == ["embedding", *block * 2, *ends]
    assert graph.unknown == ()
    query = inner[2]
    # samples, positions, columns by heads, rows; the weight is (columns, rows)
    assert query.parts == (8, 16, 4, 64)
    assert query.summed == {3}
    assert [it.labels for it in query.inputs] == [(0, 1, 3), (2, 3), (2,)]
    assert [it.labels for it in query.outputs] == [(0, 2, 1, None)]
    assert sum(it.flops for it in query.kernels) == 2 * 8 * 16 * 64 * 64
    assert sum(it.backward_flops for it in query.kernels) == 2 * 2 * 8 * 16 * 64 * 64
    assert all(it.sample == 0 for it in inner)
    # the residual joins behind the sum
    assert [it.value for it in inner[6].joined] == ["embedding"]


def test_repeated_blocks_are_found(two):
    graph = merged(two)
    grouping = classes(graph)
    inner = [number for number, it in enumerate(graph.operators) if it.given is None]
    found = [inner.index(grouping[number]) for number in inner]
    assert found == [0, *[*range(1, 10)] * 2, 19, 20, 21, 22]
    weights = [number for number, it in enumerate(graph.operators) if it.kind == "parameter"]
    assert len(weights) == 1 + 2 * 16 + 2
    assert len({grouping[number] for number in weights}) == 1 + 16 + 2
    # one feed-forward wider: its block is no longer equal
    other = replace(
        graph,
        operators=tuple(
            replace(it, parts=(*it.parts[:2], 2, 64)) if number == inner[8] else it
            for number, it in enumerate(graph.operators)
        ),
    )
    assert len(set(classes(other))) > len(set(grouping))


def test_an_operator_without_a_rule_stays_whole():
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cummax(self.linear(x), 1)[0] * 2

    graph = merged(operator_trace(trace(Sorted(), torch.zeros(4, 8))))
    assert graph.unknown == ("cummax",)
    assert next(it for it in graph.operators if it.name == "cummax").parts == ()

"""Strategies carried out on real tensors, forward and backward: what the ranks have is the whole.

Each rank runs the operator on the parts that a strategy lets it read. Along axes that divide a summed label
the results are added up; gradients are, along axes where `Demand.gradient` says that ranks have summands.
What operators need beside that (which rows of a table are here, sums inside) is written here once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from arborcast.pipeline.model.traced.rules import Call, form_of
from arborcast.pipeline.operators import Dims, Given, Operand, OperatorTrace, Primitive, Statistic
from arborcast.pipeline.sharding.graph import Graph, merged
from arborcast.pipeline.sharding.mesh import FabricPrices, Mesh
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.sharding.specs import SUM, Spec
from arborcast.pipeline.sharding.strategies import Strategy, strategies
from tests.sharding.examples import UNIT, ring

SETTING = Setting(FabricPrices(ring(4), Mesh((2, 2), (0, 1, 3, 2))), UNIT)  # rows and columns are neighbours
SIZES = SETTING.sizes
PLACES = list(product(*map(range, SIZES)))

Parts = Mapping[str, Tensor]
Starts = Mapping[str, int]
"""By label, where the part of a rank begins."""
Ranks = Sequence[tuple[Parts, Starts]]


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """An operator: what it computes from tensors by the names of torch's arguments.

    Attributes:
        kind: torch's name.
        run: on whole tensors.
        tensors: that it reads.
        options: what the rule sees besides.
        local: one rank's run, told where its parts begin; by default as on whole tensors.
        together: the run of ranks that add something up inside, from the parts of all.
        late: what is added to the sum of the results, behind it so many dimensions of length 1.
    """

    kind: str
    run: Callable[..., Tensor]
    tensors: Mapping[str, Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    local: Callable[..., Tensor] | None = None
    together: Callable[[Ranks], list[Tensor]] | None = None
    late: tuple[str, int] | None = None


def _rows(parts: Parts, starts: Starts) -> Tensor:
    """Of tokens whose rows are elsewhere, zeros."""
    weight, tokens = parts["weight"], parts["indices"] - starts.get("v", 0)
    here = (tokens >= 0) & (tokens < len(weight))
    return functional.embedding(tokens.clamp(0, len(weight) - 1), weight) * here[..., None]


def _batch_norm(ranks: Ranks) -> list[Tensor]:
    """Mean and variance from sums over all parts; gradients go back through the sums."""
    count = sum(parts["input"][:, 0].numel() for parts, _ in ranks)
    mean = sum(parts["input"].sum((0, 2, 3)) for parts, _ in ranks) / count
    square = sum((parts["input"] ** 2).sum((0, 2, 3)) for parts, _ in ranks) / count
    scale = (square - mean**2 + 1e-5).rsqrt()
    found = []
    for parts, _ in ranks:
        shift, factor = (it[None, :, None, None] for it in (mean, scale))
        weight, bias = (parts[name][None, :, None, None] for name in ("weight", "bias"))
        found.append((parts["input"] - shift) * factor * weight + bias)
    return found


def _cross_entropy(ranks: Ranks) -> list[Tensor]:
    """Each rank from the classes that it has; what others have comes as three numbers for each row."""

    def scores(parts: Parts, starts: Starts) -> Tensor:
        """Of the targets that are here; else zero."""
        classes = parts["target"] - starts.get("v", 0)
        here = (classes >= 0) & (classes < parts["self"].size(1))
        at = classes.clamp(0, parts["self"].size(1) - 1)
        return parts["self"].gather(1, at[:, None])[:, 0] * here

    found = []
    for mine in ranks:
        top = torch.stack([parts["self"].detach().max(1)[0] for parts, _ in ranks]).max(0)[0]
        both: list[Tensor] = []
        for them in ranks:
            summands = (them[0]["self"] - top[:, None]).exp().sum(1), scores(*them)
            both.append(torch.stack([it if them is mine else it.detach() for it in summands]))
        total, score = torch.stack(both).sum(0)
        found.append((top + total.log() - score).sum())
    return found


def tokens(*shape: int, below: int) -> Tensor:
    return torch.arange(math.prod(shape)).mul(7).remainder(below).view(shape)


CASES = [
    Case(
        "linear",
        lambda x, weight, _: functional.linear(x, weight),
        {"input": values(4, 2, 8), "weight": values(12, 8), "bias": values(12)},
        late=("bias", 0),
    ),
    Case(
        "addmm",
        lambda _, left, right: left @ right,
        {"self": values(12), "mat1": values(4, 8), "mat2": values(8, 12)},
        late=("self", 0),
    ),
    Case("matmul", lambda self, other: self @ other, {"self": values(4, 1, 4, 8), "other": values(4, 8, 2)}),
    Case("bmm", lambda self, mat2: self @ mat2, {"self": values(4, 4, 8), "mat2": values(4, 8, 2)}),
    Case(
        "einsum",
        lambda a, b: torch.einsum("bij,kj->ibk", a, b),
        {"a": values(4, 2, 8), "b": values(4, 8)},
        {"equation": "bij,kj->ibk"},
    ),
    Case("mm", lambda self, mat2: self @ mat2, {"self": values(4, 8), "mat2": values(8, 2)}),
    Case(
        "conv2d",
        lambda x, weight, _: functional.conv2d(x, weight, padding=1),
        {"input": values(4, 8, 3, 3), "weight": values(4, 8, 3, 3), "bias": values(4)},
        late=("bias", 2),
    ),
    Case(
        "conv1d",
        lambda x, weight: functional.conv1d(x, weight, groups=x.size(1) // 2),
        {"input": values(4, 8, 5), "weight": values(8, 2, 3)},
        {"groups": 4},
    ),
    Case(
        "embedding",
        lambda weight, indices: functional.embedding(indices, weight),
        {"weight": values(8, 4), "indices": tokens(4, 2, below=8)},
        local=_rows,
    ),
    Case(
        "scaled_dot_product_attention",
        functional.scaled_dot_product_attention,
        {"query": values(4, 2, 4, 3), "key": values(4, 2, 5, 3), "value": values(4, 2, 5, 3)},
    ),
    Case(
        "scaled_dot_product_attention",
        lambda query, key, value: functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        ),
        {"query": values(2, 8, 4, 3), "key": values(2, 4, 4, 3), "value": values(2, 4, 4, 3)},
        {"is_causal": True, "enable_gqa": True},
    ),
    Case(
        "layer_norm",
        lambda x, weight, bias: functional.layer_norm(x, [6], weight, bias),
        {"input": values(4, 4, 6), "weight": values(6), "bias": values(6)},
        {"normalized_shape": [6]},
    ),
    Case(
        "rms_norm",
        lambda x, weight: functional.rms_norm(x, [6], weight),
        {"input": values(4, 4, 6), "weight": values(6)},
        {"normalized_shape": [6]},
    ),
    Case(
        "group_norm",
        lambda x, weight, bias: functional.group_norm(x, 2, weight, bias),
        {"input": values(4, 6, 3), "weight": values(6), "bias": values(6)},
    ),
    Case(
        "batch_norm",
        lambda x, weight, bias: functional.batch_norm(x, None, None, weight, bias, training=True),
        {"input": values(4, 4, 2, 3), "weight": values(4), "bias": values(4)},
        together=_batch_norm,
    ),
    Case("softmax", lambda self: self.softmax(1), {"self": values(4, 3, 4)}, {"dim": 1}),
    Case("log_softmax", lambda self: self.log_softmax(-1), {"self": values(4, 4, 3)}, {"dim": -1}),
    Case(
        "cross_entropy_loss",
        lambda self, target: functional.cross_entropy(self, target, reduction="sum"),
        {"self": values(4, 8), "target": tokens(4, below=8)},
        together=_cross_entropy,
    ),
    Case(
        "mse_loss",
        lambda self, target: functional.mse_loss(self, target, reduction="sum"),
        {"self": values(4, 8), "target": values(4, 8) + 1},
    ),
    Case("sum", lambda self: self.sum(1), {"self": values(4, 8, 2)}, {"dim": [1]}),
    Case("mul", lambda self, other: self * other, {"self": values(4, 4, 6), "other": values(4, 1)}),
    Case("type_as", lambda self, _: self * 1, {"self": values(4, 8), "other": tokens(2, 3, 4, below=3)}),
    Case("gelu", functional.gelu, {"self": values(4, 8)}),
    Case("max_pool2d", lambda self: functional.max_pool2d(self, 2), {"self": values(4, 4, 4, 4)}),
    Case("view", lambda self: self.reshape(*self.shape[:2], -1, 2), {"self": values(4, 3, 8)}),
    Case("view", lambda self: self.flatten(0, 1), {"self": values(4, 3, 8)}),
    Case("transpose", lambda self: self.transpose(0, -1), {"self": values(4, 3, 8)}, {"dim0": 0, "dim1": -1}),
    Case("permute", lambda self: self.permute(2, 0, 1), {"self": values(4, 2, 8)}, {"dims": [2, 0, 1]}),
    Case("select", lambda self: self.select(1, 2), {"self": values(4, 3, 8)}, {"dim": 1}),
    Case("topk", lambda self: self.topk(2, -1)[0], {"self": values(4, 2, 8)}, {"dim": -1}),
    Case("amax", lambda self: self.amax((0, 2)), {"self": values(2, 4, 8)}, {"dim": [0, 2]}),
    Case("flip", lambda self: self.flip(1), {"self": values(4, 2, 8)}, {"dims": [1]}),
    Case(
        "gather",
        lambda self, index: self.gather(1, index),
        {"self": values(4, 3, 8), "index": tokens(4, 2, 8, below=3)},
        {"dim": 1},
    ),
    Case(
        "gather",  # takes rows of the first half only
        lambda self, index: self.gather(1, index),
        {"self": values(8, 3, 2), "index": tokens(4, 2, 2, below=3)},
        {"dim": 1},
    ),
    Case(
        "scatter",
        lambda self, index, src: self.scatter(1, index, src),
        {"self": values(8, 3, 2), "index": tokens(4, 2, 2, below=3), "src": values(4, 2, 2)},
        {"dim": 1},
    ),
    Case(
        "pad",
        lambda self: functional.pad(self, (0, 1)),
        {"self": values(4, 2, 8)},
        {"pad": [0, 1]},
    ),
    Case(
        "pad",  # as long as before, but shifted
        lambda self: functional.pad(self, (0, 0, 1, -1)),
        {"self": values(4, 8, 6)},
        {"pad": [0, 0, 1, -1]},
    ),
    Case(
        "pad",  # the size is computed
        lambda self: functional.pad(self, (0, 1)),
        {"self": values(4, 2, 8)},
        {"pad.0": 0, "pad.1": "size"},
    ),
    Case("cat", lambda a, b: torch.cat((a, b), 1), {"a": values(4, 2, 8), "b": values(4, 3, 8)}, {"dim": 1}),
]


def graph_of(case: Case) -> tuple[Graph, Dims]:
    """The operator alone, what it reads as weights where it has gradients, and its labels in order."""
    whole = case.run(*case.tensors.values())
    call = Call(
        {name: tuple(it.shape) for name, it in case.tensors.items()}, case.options, tuple(whole.shape)
    )
    form = form_of(case.kind, call, is_pointwise=case.kind in ("mul", "gelu"))
    assert form is not None
    assert not form.summed & set(form.output), "a label is either summed or in the result"
    parts = dict(form.parts)
    for dims, shape in (
        (form.output, whole.shape),
        *((form.inputs[name], it.shape) for name, it in case.tensors.items() if name in form.inputs),
    ):
        for label, size in zip(dims, shape, strict=True):
            if label is not None:
                parts[label] = math.gcd(parts.get(label, 0), size)

    def operand(name: str, tensor: Tensor, dims: Dims) -> Operand:
        return Operand(name, dims, tuple(tensor.shape), tensor.nbytes, False)

    primitive = Primitive(
        "result",
        case.kind,
        tuple(
            operand(name, it, form.inputs.get(name, (None,) * it.dim())) for name, it in case.tensors.items()
        ),
        operand("result", whole, form.output),
        parts,
        form.summed,
        statistics=tuple(Statistic(*it) for it in form.statistics),
    )
    given = (
        Given(name, tuple(it.shape), it.nbytes, it.is_floating_point(), it.is_floating_point(), name)
        for name, it in case.tensors.items()
    )
    return merged(OperatorTrace("case", 1, tuple(given), (primitive,))), tuple(parts)


def part(tensor: Tensor, spec: Spec, place: tuple[int, ...]) -> Tensor:
    for at, size, index in zip(spec, SIZES, place, strict=True):
        if at is not None and at != SUM:
            tensor = tensor.chunk(size, at)[index]
    return tensor


def _behind(tensor: Tensor, count: int) -> Tensor:
    return tensor.reshape(*tensor.shape, *[1] * count)


def added(tensors: Sequence[Tensor], axes: Sequence[int]) -> list[Tensor]:
    """The sums over the ranks that differ along these axes only."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, place in enumerate(PLACES):
        key = tuple(index for axis, index in enumerate(place) if axis not in axes)
        alike.setdefault(key, []).append(number)
    found = list(tensors)
    for numbers in alike.values():
        for number in numbers:
            found[number] = torch.stack([tensors[it] for it in numbers]).sum(0)
    return found


def run_on_ranks(case: Case, parts: Sequence[dict[str, Tensor]], way: Strategy, labels: Dims) -> list[Tensor]:
    """What each rank makes before anything is added up."""
    starts = [_starts(case, labels, way, place) for place in PLACES]
    if case.local is not None:
        return [case.local(mine, at) for mine, at in zip(parts, starts, strict=True)]
    if case.together is None:
        return [case.run(*mine.values()) for mine in parts]
    inside = {"batch_norm": "s", "cross_entropy_loss": "v"}[case.kind]
    axes = [axis for axis, label in enumerate(way.before) if label is not None and labels[label] == inside]
    found: list[Tensor | None] = [None] * len(PLACES)
    for number, place in enumerate(PLACES):
        if found[number] is None:
            group = [
                other
                for other, there in enumerate(PLACES)
                if all(
                    a == b for axis, (a, b) in enumerate(zip(place, there, strict=True)) if axis not in axes
                )
            ]
            made = case.together([(parts[it], starts[it]) for it in group])
            for it, tensor in zip(group, made, strict=True):
                found[it] = tensor
    return [it for it in found if it is not None]


def _starts(case: Case, labels: Dims, way: Strategy, place: tuple[int, ...]) -> dict[str, int]:
    """Where the part of a rank begins along the label "v", the rows or the classes."""
    start, length = 0, {"embedding": 8, "cross_entropy_loss": 8}.get(case.kind, 0)
    for label, size, index in zip(way.before, SIZES, place, strict=True):
        if label is not None and labels[label] == "v":
            length //= size
            start += index * length
    return {"v": start}


@pytest.mark.parametrize("case", CASES, ids=lambda it: it.kind)
def test_what_ranks_have_is_the_whole(case):
    graph, labels = graph_of(case)
    (operator,) = (it for it in graph.operators if it.given is None)
    leaves = {name: it.clone().requires_grad_(it.is_floating_point()) for name, it in case.tensors.items()}
    made = case.run(*leaves.values())
    gradient = values(*made.shape)
    bare = made.detach()
    if case.late is not None:
        made = made + _behind(leaves[case.late[0]], case.late[1])
    made.backward(gradient)
    ways = strategies(graph, operator, SETTING)
    tried = {labels[label] for way in ways for label in way.before if label is not None}
    assert tried == {label for label, count in zip(labels, operator.parts, strict=True) if count % 2 == 0}
    assert tried
    for way in ways:
        demands = dict(zip(case.tensors, way.demands, strict=True))
        parts = [
            {
                name: part(it, demands[name].spec, place).clone().requires_grad_(it.is_floating_point())
                for name, it in case.tensors.items()
            }
            for place in PLACES
        ]
        made = run_on_ranks(case, parts, way, labels)
        summed = [axis for axis, label in enumerate(way.before) if label in operator.summed]
        spec = tuple(
            None
            if label is None or axis in summed or label not in operator.result.labels
            else operator.result.labels.index(label)
            for axis, label in enumerate(way.before)
        )
        for place, mine in zip(PLACES, added([it.detach() for it in made], summed), strict=True):
            torch.testing.assert_close(mine, part(bare, spec, place))
        pieces = [part(gradient, spec, place) for place in PLACES]
        torch.autograd.backward(made, pieces)
        for mine, piece in zip(parts, pieces, strict=True):
            if case.late is not None:  # each rank adds it to its part of the sum
                it = mine[case.late[0]]
                it.grad = piece.sum_to_size(_behind(it, case.late[1]).shape).view_as(it)
        for name, demand in demands.items():
            if demand.gradient is None:
                continue
            axes = [axis for axis, at in enumerate(demand.gradient) if at == SUM]
            grads = [it[name].grad for it in parts]
            wanted = leaves[name].grad
            assert wanted is not None
            for place, mine in zip(PLACES, added(grads, axes), strict=True):
                torch.testing.assert_close(mine, part(wanted, demand.gradient, place))

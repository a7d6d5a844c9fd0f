"""Strategies carried out on real tensors, forward and backward: what the ranks have is the whole.

Each rank runs the operator as `Trainer` does, on the parts that a strategy lets it read. Along axes
that divide a summed label the results are added up; gradients are, along axes where `Demand.gradient` says
that ranks have summands. Ranks are threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
import torch
from torch import Tensor

from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.meshes import SUM, Axes, Mesh, Spec
from arborcast.pipeline.model.traced.rules import OperatorCall, form_of
from arborcast.pipeline.operators import Dims, Given, Operand, OperatorTrace, Primitive, Statistic
from arborcast.pipeline.run.intra.divided_operators import Division, called, run
from arborcast.pipeline.run.intra.mesh_collectives import MeshCollectives
from arborcast.pipeline.sharding.fabric_prices import FabricPrices
from arborcast.pipeline.sharding.graph import Graph, merged
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.sharding.strategies import Strategy, strategies
from tests.sharding.examples import UNIT, ring

aten = torch.ops.aten

SETTING = Setting(FabricPrices(ring(4), Mesh((2, 2), (0, 1, 3, 2))), UNIT)  # rows and columns are neighbours
SIZES = SETTING.sizes
PLACES = list(product(*map(range, SIZES)))
RANKS = ThreadPoolExecutor(len(PLACES))

Parts = Mapping[str, Tensor]


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def tokens(*shape: int, below: int) -> Tensor:
    return torch.arange(math.prod(shape)).mul(7).remainder(below).view(shape)


@dataclass(frozen=True)
class Case:
    """An operator.

    Attributes:
        target: of torch.
        tensors: that it reads, by the names of its arguments; those of a list as `tensors.0`.
        options: its other arguments, but for defaults.
        together: of what `Trainer` refuses: the run of ranks that add something up inside, from the
            parts of all.
    """

    target: Any
    tensors: Parts
    options: Mapping[str, Any] = field(default_factory=dict)
    together: Callable[[Sequence[Parts]], list[Tensor]] | None = None

    @cached_property
    def kind(self) -> str:
        """torch's name."""
        return str(self.target._schema.name).partition("::")[2]

    def given(self, parts: Parts) -> dict[str, Any]:
        """All arguments."""
        found: dict[str, Any] = {}
        for name, it in parts.items():
            front, dot, _ = name.partition(".")
            if dot:
                found.setdefault(front, []).append(it)
            else:
                found[front] = it
        return found | {name: it for name, it in self.all_options.items() if name not in found}

    @cached_property
    def all_options(self) -> dict[str, Any]:
        """With defaults, as a trace gives them to rules."""
        read = {name.partition(".")[0] for name in self.tensors}
        defaults = {
            it.name: it.default_value
            for it in self.target._schema.arguments
            if it.has_default_value() and it.name not in read
        }
        return defaults | dict(self.options)

    def whole(self, tensors: Parts) -> Tensor:
        """The result; of several the first."""
        return _first(called(self.target, self.given(tensors)))


def _first(made: Any) -> Tensor:
    found: Tensor = made if isinstance(made, Tensor) else made[0]
    return found


class Board:
    """Where ranks that run at the same time lay what they add up."""

    def __init__(self) -> None:
        self.barrier, self.laid = Barrier(len(PLACES), timeout=60), dict[tuple[int, ...], Tensor]()


class Collectives(MeshCollectives):
    """Of one rank among threads."""

    def __init__(self, board: Board, place: tuple[int, ...]) -> None:
        self.mesh, self.coordinates, self.board, self.place = SETTING.prices.mesh, place, board, place

    def allreduce(self, tensor: Tensor, axes: Axes, op: str = "sum") -> Tensor:
        self.board.laid[self.place] = tensor.detach()
        self.board.barrier.wait()
        line = [
            it for it in PLACES if all(it[at] == self.place[at] for at in range(len(it)) if at not in axes)
        ]
        laid = torch.stack([self.board.laid[it] for it in line])
        self.board.barrier.wait()
        return laid.sum(0) if op == "sum" else laid.amax(0)


def _batch_norm(ranks: Sequence[Parts]) -> list[Tensor]:
    """Mean and variance from sums over all parts; gradients go back through the sums."""
    count = sum(parts["input"][:, 0].numel() for parts in ranks)
    mean = sum(parts["input"].sum((0, 2, 3)) for parts in ranks) / count
    square = sum((parts["input"] ** 2).sum((0, 2, 3)) for parts in ranks) / count
    scale = (square - mean**2 + 1e-5).rsqrt()
    found = []
    for parts in ranks:
        shift, factor = (it[None, :, None, None] for it in (mean, scale))
        weight, bias = (parts[name][None, :, None, None] for name in ("weight", "bias"))
        found.append((parts["input"] - shift) * factor * weight + bias)
    return found


CASES = [
    Case(aten.linear.default, {"input": values(4, 2, 8), "weight": values(12, 8), "bias": values(12)}),
    Case(aten.addmm.default, {"self": values(12), "mat1": values(4, 8), "mat2": values(8, 12)}),
    Case(aten.matmul.default, {"self": values(4, 1, 4, 8), "other": values(4, 8, 2)}),
    Case(aten.bmm.default, {"self": values(4, 4, 8), "mat2": values(4, 8, 2)}),
    Case(
        aten.einsum.default,
        {"tensors.0": values(4, 2, 8), "tensors.1": values(4, 8)},
        {"equation": "bij,kj->ibk"},
    ),
    Case(aten.mm.default, {"self": values(4, 8), "mat2": values(8, 2)}),
    Case(
        aten.conv2d.default,
        {"input": values(4, 8, 3, 3), "weight": values(4, 8, 3, 3), "bias": values(4)},
        {"padding": [1, 1]},
    ),
    Case(aten.conv1d.default, {"input": values(4, 8, 5), "weight": values(8, 2, 3)}, {"groups": 4}),
    Case(aten.embedding.default, {"weight": values(8, 4), "indices": tokens(4, 2, below=8)}),
    Case(
        aten.embedding.default,
        {"weight": values(8, 4), "indices": tokens(4, 2, below=8)},
        {"padding_idx": 5},
    ),
    Case(
        aten.scaled_dot_product_attention.default,
        {"query": values(4, 2, 4, 3), "key": values(4, 2, 5, 3), "value": values(4, 2, 5, 3)},
    ),
    Case(
        aten.scaled_dot_product_attention.default,
        {"query": values(2, 8, 4, 3), "key": values(2, 4, 4, 3), "value": values(2, 4, 4, 3)},
        {"is_causal": True, "enable_gqa": True},
    ),
    Case(
        aten.layer_norm.default,
        {"input": values(4, 4, 6), "weight": values(6), "bias": values(6)},
        {"normalized_shape": [6]},
    ),
    Case(
        aten.rms_norm.default,
        {"input": values(4, 4, 6), "weight": values(6)},
        {"normalized_shape": [6]},
    ),
    Case(
        aten.group_norm.default,
        {"input": values(4, 6, 3), "weight": values(6), "bias": values(6)},
        {"num_groups": 2},
    ),
    Case(
        aten.batch_norm.default,
        {"input": values(4, 4, 2, 3), "weight": values(4), "bias": values(4)},
        {
            "running_mean": None,
            "running_var": None,
            "training": True,
            "momentum": 0.1,
            "eps": 1e-5,
            "cudnn_enabled": False,
        },
        together=_batch_norm,
    ),
    Case(aten.softmax.int, {"self": values(4, 3, 4)}, {"dim": 1}),
    Case(aten.log_softmax.int, {"self": values(4, 4, 3)}, {"dim": -1}),
    *(
        Case(
            aten.cross_entropy_loss.default,
            {"self": values(*shape), "target": tokens(*shape[:1], *shape[2:], below=8)},
            {"reduction": reduction, "ignore_index": 7},
        )
        for reduction in range(3)
        for shape in ((4, 8), (4, 8, 3))
    ),
    Case(
        aten.nll_loss_nd.default,
        {"self": values(4, 3), "target": tokens(4, below=3)},
        {"ignore_index": 1, "weight": values(3).abs()},
    ),
    *(
        Case(aten.mse_loss.default, {"self": values(4, 8), "target": values(4, 8) + 1}, {"reduction": it})
        for it in range(3)
    ),
    Case(aten.sum.dim_IntList, {"self": values(4, 8, 2)}, {"dim": [1]}),
    Case(aten.mean.dim, {"self": values(4, 8, 2)}, {"dim": [1], "keepdim": True}),
    Case(aten.mul.Tensor, {"self": values(4, 4, 6), "other": values(4, 1)}),
    Case(aten.type_as.default, {"self": values(4, 8), "other": tokens(2, 3, 4, below=3).double()}),
    Case(aten.gelu.default, {"self": values(4, 8)}),
    Case(aten.max_pool2d.default, {"self": values(4, 4, 4, 4)}, {"kernel_size": [2, 2]}),
    Case(aten.view.default, {"self": values(4, 3, 8)}, {"size": [4, 3, -1, 2]}),
    Case(aten.flatten.using_ints, {"self": values(4, 3, 8)}, {"start_dim": 0, "end_dim": 1}),
    Case(aten.expand.default, {"self": values(4, 1, 8)}, {"size": [4, 6, 8]}),
    Case(aten.transpose.int, {"self": values(4, 3, 8)}, {"dim0": 0, "dim1": -1}),
    Case(aten.permute.default, {"self": values(4, 2, 8)}, {"dims": [2, 0, 1]}),
    Case(aten.select.int, {"self": values(4, 3, 8)}, {"dim": 1, "index": 2}),
    Case(aten.topk.default, {"self": values(4, 2, 8)}, {"k": 2}),
    Case(aten.amax.default, {"self": values(2, 4, 8)}, {"dim": [0, 2]}),
    Case(aten.flip.default, {"self": values(4, 2, 8)}, {"dims": [1]}),
    Case(
        aten.gather.default,
        {"self": values(4, 3, 8), "index": tokens(4, 2, 8, below=3)},
        {"dim": 1},
    ),
    Case(
        aten.gather.default,  # takes rows of the first half only
        {"self": values(8, 3, 2), "index": tokens(4, 2, 2, below=3)},
        {"dim": 1},
    ),
    Case(
        aten.scatter_add.default,
        {"self": values(8, 3, 2), "index": tokens(4, 2, 2, below=3), "src": values(4, 2, 2)},
        {"dim": 1},
    ),
    Case(aten.pad.default, {"self": values(4, 2, 8)}, {"pad": [0, 1]}),
    Case(aten.pad.default, {"self": values(4, 8, 6)}, {"pad": [0, 0, 1, -1]}),  # as long, but shifted
    Case(aten.cat.default, {"tensors.0": values(4, 2, 8), "tensors.1": values(4, 3, 8)}, {"dim": 1}),
]


def graph_of(case: Case) -> tuple[Graph, Primitive]:
    """The operator alone; what it reads are weights where it has gradients."""
    whole = case.whole(case.tensors)
    call = OperatorCall(
        {name: tuple(it.shape) for name, it in case.tensors.items()}, case.all_options, tuple(whole.shape)
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
    return merged(OperatorTrace("case", 1, tuple(given), (primitive,))), primitive


def part(tensor: Tensor, spec: Spec, place: tuple[int, ...]) -> Tensor:
    for at, size, index in zip(spec, SIZES, place, strict=True):
        if at is not None and at != SUM:
            tensor = tensor.chunk(size, at)[index]
    return tensor


def added(tensors: Sequence[Tensor], axes: Sequence[int]) -> list[Tensor]:
    """The sums over the ranks that differ along these axes only."""
    return [torch.stack([tensors[it] for it in line]).sum(0) for line in lines(axes)]


def lines(axes: Sequence[int]) -> list[list[int]]:
    """For each rank those that differ from it along these axes only."""
    alike: dict[tuple[int, ...], list[int]] = {}
    keys = [tuple(index for axis, index in enumerate(place) if axis not in axes) for place in PLACES]
    for number, key in enumerate(keys):
        alike.setdefault(key, []).append(number)
    return [alike[key] for key in keys]


def run_on_ranks(
    case: Case, parts: Sequence[Parts], way: Strategy, primitive: Primitive, shape: tuple[int, ...]
) -> list[Tensor]:
    """What each rank makes before anything is added up."""
    numbers, board = {label: at for at, label in enumerate(primitive.parts)}, Board()
    divisions = [
        Division(primitive, numbers, way.before, shape, Collectives(board, place)) for place in PLACES
    ]
    if case.together is not None:
        axes = divisions[0].axes("s")
        if way.before != (None,) * len(SIZES):
            with pytest.raises(PlanError, match=r"cannot be run on parts along [sc]"):
                divisions[0].check({}, 1)
        return [
            case.together([parts[it] for it in line])[line.index(number)]
            for number, line in enumerate(lines(axes))
        ]
    divisions[0].check({}, 1)

    def on_rank(mine: Parts, division: Division) -> Tensor:
        try:
            return _first(run(case.target, case.given(mine), division))
        except BaseException:
            board.barrier.abort()
            raise

    going = [RANKS.submit(on_rank, *it) for it in zip(parts, divisions, strict=True)]
    errors = [it.exception() for it in going]
    for error in errors:
        if error is not None and not isinstance(error, BrokenBarrierError):
            raise error
    return [it.result() for it in going]


@pytest.mark.parametrize("case", CASES, ids=lambda it: it.kind)
def test_what_ranks_have_is_the_whole(case):
    graph, primitive = graph_of(case)
    labels = tuple(primitive.parts)
    (operator,) = (it for it in graph.operators if it.given is None)
    leaves = {name: it.clone().requires_grad_(it.is_floating_point()) for name, it in case.tensors.items()}
    made = case.whole(leaves)
    gradient = values(*made.shape)
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
        summed = [axis for axis, label in enumerate(way.before) if label in operator.summed]
        spec = tuple(
            None
            if label is None or axis in summed or label not in operator.result.labels
            else operator.result.labels.index(label)
            for axis, label in enumerate(way.before)
        )
        pieces = [part(gradient, spec, place) for place in PLACES]
        theirs = run_on_ranks(case, parts, way, primitive, tuple(pieces[0].shape))
        for place, mine in zip(PLACES, added([it.detach() for it in theirs], summed), strict=True):
            torch.testing.assert_close(mine, part(made.detach(), spec, place))
        torch.autograd.backward(theirs, pieces)
        for name, demand in demands.items():
            if demand.gradient is None:
                continue
            axes = [axis for axis, at in enumerate(demand.gradient) if at == SUM]
            wanted, grads = leaves[name].grad, [it[name].grad for it in parts]
            if wanted is None:  # only its type is read
                assert grads == [None] * len(PLACES)
                continue
            for place, mine in zip(PLACES, added(grads, axes), strict=True):
                torch.testing.assert_close(mine, part(wanted, demand.gradient, place))

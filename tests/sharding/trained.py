"""Models that tests train in divided stages: how each trains in one process, what ranks tell of a trainer.

`traced_for_ranks` traces them once for all ranks of the tests.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from arborcast import pipeline, topologies
from arborcast.pipeline.meshes import Mesh
from arborcast.pipeline.model.traced import Traced, trace
from arborcast.pipeline.model.traced.operator_reader import operator_trace
from arborcast.pipeline.sharding.fabric_prices import FabricPrices
from arborcast.pipeline.sharding.graph import Graph, merged
from arborcast.pipeline.sharding.layouts import LAYOUTS
from arborcast.pipeline.sharding.plan_strategies import stage_sharding
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.sharding.sharding_program import shard
from arborcast.pipeline.sharding.slices import Sliced
from arborcast.pipeline.sharding.strategies import Strategy, strategies
from arborcast.pipeline.stages import Plan, Stage
from tests.sharding.examples import UNIT
from tests.sharding.test_operators import Block

STEPS, BATCH, MICROBATCHES = 3, 24, 2
"""Samples that meshes of 1, 2 and 3 ranks divide."""


class Causal(nn.Module):
    """Attention as products and a softmax with a mask, sums of a row, and weights that two operators read."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(12, 24), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.both(x).chunk(2, -1)
        mask = torch.ones(x.size(1), x.size(1)).tril() == 0
        scores = (q @ k.transpose(1, 2) / 4).masked_fill(mask, -1e9)
        mixed = functional.relu(functional.softmax(scores, -1) @ self.out(x), inplace=True)
        return mixed + functional.linear(x, self.out.weight.t()) / (1 + x.abs().mean(-1, keepdim=True))


class Perceptrons(nn.Module):
    """Blocks around a sum; the last one has the weight of the first, too."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(12, 24) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(24, 12) for _ in range(3))
        if is_tied:
            self.ups[2].weight = self.ups[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(functional.gelu(up(x)))
        return x


def of_tokens(*inner: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Embedding(24, 12, padding_idx=3), *inner, nn.LayerNorm(12), nn.Linear(12, 24))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "two layers": lambda: nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)),
    "chain": lambda: nn.Sequential(
        nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 12)
    ),
    "mlp": lambda: Perceptrons(False),
    "tied": lambda: Perceptrons(True),
    "gpt": lambda: of_tokens(*(Block(12, 6) for _ in range(3))),
    "causal": lambda: of_tokens(Block(12, 6), Causal()),
    # Statistics of microbatches count once, random numbers come again.
    "noisy": lambda: nn.Sequential(
        nn.Linear(12, 24), nn.Dropout(0.3), nn.GELU(), nn.BatchNorm1d(24), nn.Linear(24, 12)
    ),
}


def made(name: str) -> nn.Module:
    """A model, with the same weights each time."""
    torch.manual_seed(0)
    return MODELS[name]()


def batch(name: str, number: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets; of tokens so many are left out that microbatches have unequal weight."""
    draws = torch.Generator().manual_seed(number)
    if name in ("gpt", "causal"):
        both = torch.randint(0, 24, (2, BATCH, 6), generator=draws)
        both[1, 3, 2:] = both[1, 5:9, 1] = -100
    else:
        both = torch.randn(2, BATCH, 12, generator=draws)
    return both[0], both[1]


def cross_entropy(scores: Tensor, following: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def loss_of(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    return cross_entropy if name in ("gpt", "causal") else functional.mse_loss


@cache
def traced(name: str, layers: int | None = None, *, evaluation: bool = False) -> Traced:
    return trace(made(name), batch(name), loss_of(name), layers=layers, evaluation=evaluation)


def chosen_for(graph: Graph, setting: Setting, layout: str) -> Sequence[Strategy | None]:
    """The best of a fixed layout, the free choice, or any strategy for each operator ("any 1")."""
    if not layout.startswith("any"):
        if layout == "free" or not setting.sizes:
            return shard(graph, setting).chosen
        allowed = LAYOUTS[layout](setting.sizes)
        return shard(graph, setting, allowed=lambda it, way: it.is_end or allowed(it, way)).chosen
    draws = random.Random(layout)
    ways = [strategies(graph, it, setting) for it in graph.operators]
    return [draws.choice(it) if it else None for it in ways]


def plan_of(
    model: Traced,
    shapes: list[tuple[int, ...]],
    layout: str,
    spare: int = 0,
    *,
    microbatches: int = MICROBATCHES,
    **how: Any,
) -> Plan:
    """A layer a stage, on meshes of these shapes, one after another, then ranks without work.

    A stage that is alone holds the whole model as one layer.
    """
    sizes = [torch.Size(it).numel() for it in shapes]
    fabric = topologies.load(f"full:{sum(sizes) + spare},bandwidth=10")
    several = len(shapes) > 1
    whole = merged(operator_trace(model, BATCH // microbatches, by_layer=several))
    stages, place = [], 0
    for number, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
        mesh = Mesh(shape, tuple(range(place, place + size)))
        graph = Sliced(whole, fabric.ranks).stage(number, number + 1) if several else whole
        setting = Setting(FabricPrices(fabric, mesh), UNIT, microbatches)
        sharding = stage_sharding(graph, chosen_for(graph, setting, layout), mesh)
        stages.append(Stage.divided(number, number + 1, sharding))
        place += size
    return Plan(stages, microbatches, topology=fabric, model=model.name, batch=BATCH, **how)


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Gradients that are zero but for rounding, as those of a bias of keys, stay small beside its eps."""
    return torch.optim.AdamW(parameters, 0.01, eps=1e-4)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def optimizer_of(layout: str) -> Callable[[Any], torch.optim.Optimizer]:
    return adam if layout == "zero-3" else momentum


def trainer_of(model: Traced, plan: Plan, layout: str = "", **options: Any) -> pipeline.Trainer:
    """Over gloo, divided at exact rates, with the optimizer of the layout."""
    given = {"collectives": "gloo", "by_schedule": False} | options
    return pipeline.Trainer(model, plan, None, optimizer_of(layout), **given)


def mesh_of(plan: Plan, rank: int) -> Mesh:
    (mesh,) = (it.mesh for it in plan.stages if rank in it.ranks)
    return mesh


def numbers(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """As a rank can send them."""
    return {key: it.detach().numpy().copy() for key, it in tensors.items()}


def check_weights(found: Mapping[str, Any], wanted: Mapping[str, Any], atol: float = 1e-6) -> None:
    """Of the same names, equal but for rounding."""
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        np.testing.assert_allclose(found[key], tensor, rtol=0, atol=atol, err_msg=key)


@dataclass
class Serial:
    """A training in one process: by step the loss, and of each update the gradients' norm; evaluations."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)


def serial(
    name: str,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    steps: Iterable[int] = range(STEPS),
    *,
    clip: float = torch.inf,
    accumulate: int = 1,
    evaluated: bool = False,
    autocast: bool = False,
) -> Serial:
    """Train a model on the batches of these numbers."""
    module, told, loss_fn = made(name), Serial(), loss_of(name)
    stepping = optimizer(module.parameters())
    for number in steps:
        inputs, targets = batch(name, number)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_fn(module(inputs), targets)
        (loss / accumulate).backward()
        told.losses.append(loss.item())
        if (number + 1) % accumulate == 0:
            told.norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), clip)))
            stepping.step()
            stepping.zero_grad()
        if evaluated:
            with torch.no_grad():
                told.evaluated.append(loss_fn(module(batch(name, 9)[0]), batch(name, 9)[1]).item())
    told.weights = numbers(module.state_dict())
    return told


KINDS = {
    "all_reduce": "allreduce",
    "all_gather_into_tensor": "allgather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "alltoall",
}
"""Of torch's functional collectives."""


class Counting(TorchDispatchMode):
    """Notes kind, axes and bytes of the whole buffer of every collective."""

    def __init__(self, trainer: pipeline.Trainer, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.axes = {trainer.line(it).group_name: it for it in mesh.ways}
        self.found: Counter[tuple[str, tuple[int, ...], int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = str(func.overloadpacket).partition(".")
        if space == "_c10d_functional" and name != "wait_tensor":
            kind, axes = KINDS[name], self.axes[args[-1]]
            size = args[0].nbytes * (self.mesh.size(axes) if kind == "allgather" else 1)
            self.found[kind, axes, size] += 1
        return func(*args, **(kwargs or {}))


def planned(trainer: pipeline.Trainer, microbatches: int) -> Counter[tuple[str, tuple[int, ...], int]]:
    found: Counter[tuple[str, tuple[int, ...], int]] = Counter()
    for it in trainer.calls:
        found[str(it.kind), it.axes, it.size_bytes] += it.per_microbatch * microbatches + it.per_step
    return +found


def kinds_of(calls: Counter[tuple[str, tuple[int, ...], int]]) -> Counter[str]:
    """How many collectives of each kind."""
    found = Counter[str]()
    for (kind, _, _), count in calls.items():
        found[kind] += count
    return found

"""Divided models on real processes: serial losses and weights, and exactly the collectives of the plan."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from arborcast import pipeline, topologies
from arborcast.pipeline.meshes import Mesh
from arborcast.pipeline.model.traced import Traced, trace
from arborcast.pipeline.model.traced.operator_reader import operator_trace
from arborcast.pipeline.run.failures import TrainingError
from arborcast.pipeline.run.prepared_layers import local
from arborcast.pipeline.sharding.fabric_prices import FabricPrices
from arborcast.pipeline.sharding.graph import Graph, merged
from arborcast.pipeline.sharding.layouts import LAYOUTS
from arborcast.pipeline.sharding.plan_strategies import stage_sharding
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.sharding.sharding_program import shard
from arborcast.pipeline.sharding.strategies import Strategy, strategies
from arborcast.pipeline.stages import Plan, Stage
from arborcast.synth.errors import InputError
from tests.sharding.examples import UNIT
from tests.sharding.test_operators import Block
from tests.support.commands import Command
from tests.support.ranks import run_ranks

RANKS_IMPORT = ("torch._dynamo", "torch.distributed.tensor", "torch.export._trace")
STEPS = 3
BATCH = 8


def draw(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


@dataclass(frozen=True)
class Model:
    """What is trained: made anew by `make`, alike each time; data, loss, microbatches."""

    make: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    microbatches: int

    def traced(self) -> Traced:
        return trace(self.make(), (self.inputs, self.targets), self.loss, evaluation=False)


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


class Causal(nn.Module):
    """Attention as products and a softmax with a mask, sums of a row, and weights that two operators read."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.both(x).chunk(2, -1)
        mask = torch.ones(x.size(1), x.size(1)).tril() == 0
        scores = (q @ k.transpose(1, 2) / 4).masked_fill(mask, -1e9)
        mixed = functional.relu(functional.softmax(scores, -1) @ self.out(x), inplace=True)
        return mixed + functional.linear(x, self.out.weight.t()) / (1 + x.abs().mean(-1, keepdim=True))


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(32, 16, padding_idx=3), Block(16, 4), Causal(), nn.LayerNorm(16), nn.Linear(16, 32)
    )


def of_tokens(scores: Tensor, following: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def tokens(number: int) -> Tensor:
    return torch.randint(0, 32, (BATCH, 8), generator=draw(number))


def padded(number: int) -> Tensor:
    """Samples with unequal numbers of tokens that count."""
    given = tokens(number)
    given[1, 3:] = given[4:7, 1] = -100
    return given


MODELS = {
    "mlp": Model(
        two_layers,
        torch.randn(BATCH, 16, generator=draw(1)),
        torch.randn(BATCH, 16, generator=draw(2)),
        functional.mse_loss,
        2,
    ),
    "transformer": Model(transformer, tokens(1), padded(2), of_tokens, 1),
}


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


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Gradients that are zero but for rounding, as those of a bias of keys, stay small beside its eps."""
    return torch.optim.AdamW(parameters, 0.01, eps=1e-4)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def divided(rank: int, size: int, name: str, layouts: list[str], collectives: str) -> list[dict[str, Any]]:
    """What training by each layout gives."""
    from torch.distributed.tensor.debug import CommDebugMode

    model, fabric = MODELS[name], topologies.load(f"full:{size},bandwidth=10")
    mesh = Mesh((size,) if size == 2 else (2, 2), tuple(range(size)))
    setting = Setting(FabricPrices(fabric, mesh), UNIT, model.microbatches)
    traced = model.traced()
    graph = merged(operator_trace(traced, BATCH // model.microbatches))
    results = []
    for layout in layouts:
        stage = Stage.divided(0, 1, stage_sharding(graph, chosen_for(graph, setting, layout), mesh))
        trainer = pipeline.Trainer(
            traced,
            Plan([stage], model.microbatches, topology=fabric, model=graph.name, batch=BATCH),
            None,
            adam if layout == "zero-3" else momentum,
            collectives=collectives,
            by_schedule=False,
        )
        losses = []
        for _ in range(STEPS):
            with CommDebugMode() as mode, Counting(trainer, mesh) as counting:
                losses.append(trainer.step(model.inputs, model.targets))
        served = Counter[str]()
        if collectives == "synth":
            for axes in mesh.ways:
                for kind, calls in trainer.line(axes).counters().items():  # type: ignore[attr-defined]
                    served[kind] += calls["schedule"]
        results.append(
            {
                "losses": losses,
                "weights": {key: it.numpy() for key, it in trainer.state_dict().items()},
                "planned": planned(trainer, model.microbatches),
                "counted": counting.found,
                "in all": mode.get_total_counts(),
                "held": sum(local(it).numel() for it in trainer.module.parameters()),
                "served": served,
            }
        )
        trainer.close()
    return results


def serial(model: Model, optimizer: Callable[[Any], torch.optim.Optimizer]) -> tuple[list[float], nn.Module]:
    module = model.make()
    stepping, losses = optimizer(module.parameters()), []
    for _ in range(STEPS):
        stepping.zero_grad()
        loss = model.loss(module(model.inputs), model.targets)
        loss.backward()
        stepping.step()
        losses.append(loss.item())
    return losses, module


def check(name: str, size: int, layouts: list[str], collectives: str = "gloo") -> list[dict[str, Any]]:
    """Losses and weights of all ranks are serial ones, collectives those of the plan."""
    found = run_ranks(size, divided, name, layouts, collectives, timeout_s=400, group_timeout_s=200)
    for number, layout in enumerate(layouts):
        losses, module = serial(MODELS[name], adam if layout == "zero-3" else momentum)
        for mine in (ranks[number] for ranks in found):
            assert mine["losses"] == pytest.approx(losses, rel=1e-6)
            if collectives == "gloo":  # synthesized allreduces of few bytes are added up by every rank itself
                assert mine["losses"] == found[0][number]["losses"]
            for key, tensor in module.state_dict().items():
                torch.testing.assert_close(torch.tensor(mine["weights"][key]), tensor, rtol=0, atol=1e-6)
            assert mine["counted"] == mine["planned"], layout
            assert mine["in all"] == mine["planned"].total() + 1  # and the losses
    return found[0]


def test_two_layers_on_two_ranks() -> None:
    """Any division, and ZeRO-3: of the four collectives and updates divided."""
    _, zero = check("mlp", 2, ["any 1", "zero-3"])
    weights = sum(it.numel() for it in two_layers().parameters())
    assert zero["held"] == weights / 2
    # both weights and biases gathered for the forward pass, the second weight again for the backward one,
    # as only its operator has an input with a gradient; gradients leave in each of two microbatches
    kinds = Counter[str]()
    for (kind, _, _), count in zero["planned"].items():
        kinds[kind] += count
    assert kinds == {"allgather": 2 * 5, "reduce-scatter": 2 * 4, "allreduce": 2}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_layouts_and_any_divisions_on_four_ranks(name: str) -> None:
    layouts = ["free", *LAYOUTS, *(f"any {it}" for it in range(4))]
    found = check(name, 4, layouts)
    kinds = {kind for it in found for kind, _, _ in it["planned"]}
    assert kinds == set(KINDS.values())


@pytest.mark.long
def test_synthesized_schedules_run_a_division() -> None:
    """Classes of the cross entropy over one axis, samples over the other, as the layout says."""
    (found,) = check("transformer", 4, ["megatron"], "synth")
    assert found["served"]["allreduce"]


def of_a_file(rank: int, size: int, file: str, orders: list[tuple[int, ...]]) -> list[Any]:
    """Losses by the plan of a file with each order of ranks; what is said where it cannot be run."""
    model, plan, found = MODELS["mlp"], pipeline.read_sharded_plan(file), []
    traced = model.traced()
    (stage,) = plan.stages
    for ranks in (stage.ranks, *orders):
        mesh = Mesh(stage.sharding.mesh.shape, ranks)
        stages = (replace(stage, sharding=replace(stage.sharding, mesh=mesh)),)
        trainer = pipeline.Trainer(traced, replace(plan, stages=stages), None, momentum, collectives="gloo")
        found.append([trainer.step(model.inputs, model.targets) for _ in range(STEPS)])
        found.append({key: it.numpy() for key, it in trainer.state_dict().items()})
        trainer.close()
    return found


@pytest.mark.long
def test_what_the_command_writes_is_trained(command: Command, tmp_path: Path) -> None:
    """Planned for a torus whose device order does not ascend, then with the ranks in other orders."""
    (tmp_path / "two.py").write_text(
        "from torch.nn import functional\n"
        "from tests.sharding.test_running import MODELS\n"
        "def make():\n"
        "    model = MODELS['mlp']\n"
        "    return model.make(), (model.inputs, model.targets), functional.mse_loss\n"
    )
    file = str(tmp_path / "plan.json")
    asked = "plan", f"{tmp_path}/two.py:make", "torus:2x2,bandwidth=1000", "--intra", "--stages", "1"
    ran = command(*asked, "--microbatches", "2", "--device", "v100", "-o", file)
    assert (ran.status, ran.err) == (0, "")
    orders = [(0, 1, 3, 2), (3, 1, 2, 0)]
    losses, module = serial(MODELS["mlp"], momentum)
    for found in run_ranks(4, of_a_file, file, orders, timeout_s=400, group_timeout_s=200):
        for mine, weights in zip(found[::2], found[1::2], strict=True):
            assert mine == pytest.approx(losses, rel=1e-6)
            for key, tensor in module.state_dict().items():
                torch.testing.assert_close(torch.tensor(weights[key]), tensor, rtol=0, atol=1e-6)


def said(make: Callable[[], Any]) -> str:
    try:
        make()
    except (InputError, TrainingError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refused(rank: int, size: int) -> list[str]:
    model, fabric = MODELS["mlp"], topologies.load("full:2")
    traced = model.traced()
    plan = pipeline.shard_model(traced, fabric, UNIT, batch=BATCH).plan

    def on(ranks: tuple[int, ...], topology: str) -> Plan:
        sharding = replace(plan.stages[0].sharding, mesh=Mesh((2,), ranks))
        return replace(plan, stages=(Stage.divided(0, 1, sharding),), topology=topologies.load(topology))

    def trainer(plan: Plan = plan, model: Traced = traced) -> pipeline.Trainer:
        return pipeline.Trainer(model, plan, None, momentum, collectives="gloo")

    made = trainer()
    (stage,) = plan.stages
    two = tuple(Stage.divided(it, it + 1, replace(stage.sharding, mesh=Mesh((), (it,)))) for it in range(2))
    found = [
        said(lambda: trainer(on((2, 3), "full:4"))),
        said(lambda: trainer(replace(plan, stages=two))),
        said(lambda: pipeline.Trainer(traced, plan, None, momentum, clip_norm=-1.0)),
        said(lambda: pipeline.Trainer(traced, plan, None, momentum, precision="float8")),
        said(lambda: trainer(model=trace(two_layers(), model.inputs, evaluation=False))),
        said(lambda: trainer(model=MODELS["transformer"].traced())),
        said(lambda: made.step(model.inputs[:4], model.targets[:4])),
        said(lambda: made.evaluate(model.inputs, model.targets)),
    ]
    made.close()
    return found


@pytest.mark.long
def test_a_plan_for_another_job_is_refused_in_a_line() -> None:
    for lines in run_ranks(2, refused, timeout_s=200):
        assert lines == [
            "PlanError: plan: ranks must be in 0..1 of the job, got 3",
            "PlanError: plan: must have as many layers as the model, 3, got 2",
            "InputError: clip_norm: must not be negative, got -1.0",
            "InputError: precision: dtype must be one of float32, bfloat16, float16, got float8",
            "PlanError: model Sequential: must be traced with its loss to be trained",
            "PlanError: plan: stage of layers [0, 1): is for another model: it lacks 1.norms.0.weight",
            "BatchError: batch: must have 8 samples, as the plan says, got 4",
            "InputError: evaluate: model Sequential: must be traced with evaluation=True to be evaluated",
        ]


class Normed(nn.Module):
    """Tied weights between which batch norm counts, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.two.weight, self.norm = self.one.weight, nn.BatchNorm1d(16)
        self.register_buffer("shift", torch.ones(16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.norm(self.one(x)) + self.shift)


def normed(buffers: float) -> nn.Module:
    torch.manual_seed(0)
    module = Normed()
    for buffer in (module.norm.running_mean, module.shift):
        assert isinstance(buffer, Tensor)
        buffer.fill_(buffers)
    return module


def whole_on(graph: Graph, setting: Setting) -> list[Strategy | None]:
    """Nothing is divided but updates, for which ranks need each other."""
    none = (None,) * len(setting.sizes)
    ways = [strategies(graph, it, setting) for it in graph.operators]
    return [
        next((it for it in some if (it.before, it.after) == (none, none) and it.update in (None, (0,))), None)
        for some in ways
    ]


def plan_of(traced: Traced, *, size: int, is_whole: bool) -> Plan:
    fabric, mesh = topologies.load(f"full:{size}"), Mesh((size,), tuple(range(size)))
    setting = Setting(FabricPrices(fabric, mesh), UNIT)
    graph = merged(operator_trace(traced, BATCH))
    chosen = whole_on(graph, setting) if is_whole else chosen_for(graph, setting, "data-parallel")
    stage = Stage.divided(0, 1, stage_sharding(graph, chosen, mesh))
    return Plan([stage], 1, topology=fabric, model=graph.name, batch=BATCH)


def of_sums(made: Tensor, wanted: Tensor) -> Tensor:
    return functional.mse_loss(made, wanted, reduction="sum")


def one_differs(rank: int, size: int) -> tuple[list[str], dict[str, Any], bool]:
    """What a rank says when one alone refuses; what it holds in between; whether its model stayed."""
    model = MODELS["mlp"]
    module = normed(buffers=rank + 1)
    before = {key: it.clone() for key, it in module.named_buffers()}
    traced = trace(module, (model.inputs, model.targets), model.loss, evaluation=False)
    plan = plan_of(traced, size=size, is_whole=True)

    def trainer(plan: Plan = plan, seed: int = 0) -> pipeline.Trainer:
        return pipeline.Trainer(traced, plan, None, momentum, collectives="gloo", seed=seed)

    divided, clipped = plan_of(traced, size=size, is_whole=False), -1.0 if rank else None
    found = [said(lambda: trainer(divided if rank else plan)), said(lambda: trainer(divided))]
    found.append(said(lambda: pipeline.Trainer(traced, plan, None, momentum, clip_norm=clipped)))
    found.append(said(lambda: trainer(seed=rank)))
    summed = trace(module, (model.inputs, model.targets), of_sums, evaluation=False)
    halves = replace(plan, microbatches=2)
    found.append(said(lambda: pipeline.Trainer(summed, halves, None, momentum, collectives="gloo")))
    made, short = trainer(), model.inputs[:4]
    found.append(said(lambda: made.step(short if rank else model.inputs, short if rank else model.targets)))
    made.step(model.inputs, model.targets)
    other = {key: it + 1 for key, it in made.state_dict().items() if not rank or key != "one.weight"}
    found.append(said(lambda: made.load_state_dict(other)))
    state = {key: it.numpy() for key, it in made.state_dict().items()}
    found.append(said(lambda: made.step(short, short)))
    made._meeting.grace_s = 0.1  # before, all refuse theirs, however late they come
    found.append(said(lambda: made.step(short if rank else model.inputs, short if rank else model.targets)))
    made.close()
    return found, state, all(before[key].equal(it) for key, it in module.named_buffers())


def test_what_one_rank_refuses_ends_the_others_and_buffers_are_those_of_the_first() -> None:
    found = run_ranks(2, one_differs, timeout_s=200, group_timeout_s=200)
    module = normed(buffers=1)
    model, optimizer = MODELS["mlp"], momentum(module.parameters())
    model.loss(module(model.inputs), model.targets).backward()
    optimizer.step()
    for _, state, is_unchanged in found:
        assert is_unchanged
        assert list(state) == list(module.state_dict())
        for key, value in module.state_dict().items():
            torch.testing.assert_close(torch.tensor(state[key]), value, rtol=0, atol=1e-6)
    divided = (
        "PlanError: operator batch_norm (batch_norm): cannot be run on parts along s, into which the "
        "sharding divides it 2 times"
    )
    short = "batch: must have 8 samples, as the plan says, got 4"
    theirs = f"what is refused: {short} on rank 1"
    for (lines, _, _), own in zip(found, (False, True), strict=True):
        plans, alike, clip, seeds, sums, first, lacks, both, last = lines
        assert lacks.startswith("CheckpointError: checkpoint: must hold one.weight of the model, got ")
        assert sums == (
            "PlanError: plan: must have 1 microbatch, as the loss of Normed is not the mean of those of "
            "microbatches, got 2: it is the sum of theirs"
        )
        assert plans.startswith("InputError: trainer: all ranks must be given the same one, got plan "), plans
        assert alike == divided
        norm = "clip_norm: must not be negative, got -1.0"
        assert clip.endswith(norm if own else f" and what is refused: {norm} on rank 1"), clip
        assert seeds.startswith("InputError: trainer: all ranks must be given the same one, got plan "), seeds
        assert " seed 1, " in seeds.partition(" on rank 0 and ")[2], seeds
        assert first.startswith("BatchError: ") and first.endswith(theirs), first
        assert both == f"BatchError: {short}"
        assert last.startswith(f"TrainingError: rank {own:d}"), last
        assert f"what is refused: {short}" in last, last

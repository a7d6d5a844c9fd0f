"""Divided models on real processes: serial losses and weights, and exactly the collectives of the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

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
from arborcast.pipeline.sharding.strategies import Strategy, strategies
from arborcast.pipeline.stages import Plan, Stage
from arborcast.synth.errors import InputError
from tests.sharding.examples import UNIT
from tests.sharding.trained import (
    BATCH,
    KINDS,
    MICROBATCHES,
    STEPS,
    Counting,
    batch,
    check_weights,
    kinds_of,
    made,
    mesh_of,
    momentum,
    numbers,
    optimizer_of,
    plan_of,
    planned,
    serial,
    traced,
    trainer_of,
)
from tests.support.commands import Command
from tests.support.ranks import run_ranks

RANKS_IMPORT = ("tests.sharding.traced_for_ranks",)


def divided(
    rank: int, size: int, name: str, shapes: list[tuple[int, ...]], layouts: list[str], collectives: str
) -> list[dict[str, Any]]:
    """What training by each layout gives, with a stage on each mesh."""
    from torch.distributed.tensor.debug import CommDebugMode

    model, results = traced(name, len(shapes) if len(shapes) > 1 else None), []
    for layout in layouts:
        plan = plan_of(model, shapes, layout)
        mesh, losses, served = mesh_of(plan, rank), [], Counter[str]()
        with trainer_of(model, plan, layout, collectives=collectives) as trainer:
            for number in range(STEPS):
                with CommDebugMode() as mode, Counting(trainer, mesh) as counting:
                    losses.append(trainer.step(*batch(name, number)))
            if collectives == "synth":
                for axes in mesh.ways:
                    for kind, calls in trainer.line(axes).counters().items():  # type: ignore[attr-defined]
                        served[kind] += calls["schedule"]
            results.append(
                {
                    "losses": losses,
                    "weights": numbers(trainer.state_dict()),
                    "planned": planned(trainer, MICROBATCHES),
                    "counted": counting.found,
                    "in all": mode.get_total_counts(),
                    "ties": len(trainer._local.update._ties.mine),
                    "sent": trainer.messages.sent_bytes,
                    "crossing": trainer.crossing_bytes,
                    "held": sum(local(it).numel() for it in trainer.module.parameters()),
                    "served": served,
                }
            )
    return results


def check(
    name: str, shapes: list[tuple[int, ...]], layouts: list[str], collectives: str = "gloo"
) -> list[dict[str, Any]]:
    """Losses and weights of all ranks are serial ones, collectives and messages those of the plan."""
    size = sum(torch.Size(it).numel() for it in shapes)
    found = run_ranks(size, divided, name, shapes, layouts, collectives, timeout_s=400, group_timeout_s=200)
    for number, layout in enumerate(layouts):
        wanted, ranks = serial(name, optimizer_of(layout)), [it[number] for it in found]
        for mine in ranks:
            assert mine["losses"] == pytest.approx(wanted.losses, rel=1e-6)
            if collectives == "gloo":  # synthesized allreduces of few bytes are added up by every rank itself
                assert mine["losses"] == ranks[0]["losses"]
            check_weights(mine["weights"], wanted.weights)
            assert mine["counted"] == mine["planned"], layout
            assert mine["in all"] == mine["planned"].total() + mine["ties"] + 1  # and the losses
        assert sum(it["sent"] for it in ranks) == STEPS * sum(ranks[0]["crossing"])
    return found[0]


def test_two_layers_on_two_ranks() -> None:
    """Any division, and ZeRO-3: of the four collectives and updates divided."""
    _, zero = check("two layers", [(2,)], ["any 1", "zero-3"])
    assert zero["held"] == sum(it.numel() for it in made("two layers").parameters()) / 2
    # both weights and biases gathered for the forward pass, the second weight again for the backward one,
    # as only its operator has an input with a gradient; gradients leave in each of two microbatches
    assert kinds_of(zero["planned"]) == {"allgather": 2 * 5, "reduce-scatter": 2 * 4, "allreduce": 2}


@pytest.mark.long
@pytest.mark.parametrize("name", ["two layers", "causal"])
def test_layouts_and_any_divisions_on_four_ranks(name: str) -> None:
    layouts = ["free", *LAYOUTS, *(f"any {it}" for it in range(4))]
    found = check(name, [(2, 2)], layouts)
    assert {kind for it in found for kind, _, _ in it["planned"]} == set(KINDS.values())


@pytest.mark.long
def test_synthesized_schedules_run_a_division() -> None:
    """Classes of the cross entropy over one axis, samples over the other, as the layout says."""
    (found,) = check("causal", [(2, 2)], ["megatron"], "synth")
    assert found["served"]["allreduce"]


def test_stages_of_two_ranks_train_as_one_process() -> None:
    check("mlp", [(2,), (2,)], ["any 1"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "shapes", "layouts"),
    [
        ("mlp", [(3,), ()], ["any 2", "free", "zero-3"]),
        ("mlp", [(2,), ()], ["free", "zero-3"]),
        ("tied", [(), (2,), (2,)], ["any 3", "zero-3"]),
        ("gpt", [(2,), (2,)], ["free", "megatron", "zero-3", "any 4", "any 5"]),
        ("gpt", [(), (3,)], ["free", "data-parallel", "any 6"]),
        ("gpt", [(2, 2), (2,)], ["free", "any 7"]),
    ],
)
def test_unequal_meshes_three_stages_and_ties(
    name: str, shapes: list[tuple[int, ...]], layouts: list[str]
) -> None:
    check(name, shapes, layouts)


def of_a_file(rank: int, size: int, file: str, orders: list[tuple[int, ...]]) -> list[Any]:
    """Losses and weights by the plan of a file with each order of ranks."""
    plan, found = pipeline.read_sharded_plan(file), []
    (stage,) = plan.stages
    for ranks in (stage.ranks, *orders):
        mesh = Mesh(stage.sharding.mesh.shape, ranks)
        stages = (Stage.divided(stage.start, stage.end, replace(stage.sharding, mesh=mesh)),)
        with trainer_of(traced("two layers"), replace(plan, stages=stages)) as trainer:
            losses = [trainer.step(*batch("two layers", number)) for number in range(STEPS)]
            found.append((losses, numbers(trainer.state_dict())))
    return found


@pytest.mark.long
def test_what_the_command_writes_is_trained(command: Command, tmp_path: Path) -> None:
    """Planned for a torus whose device order does not ascend, then with the ranks in other orders."""
    (tmp_path / "two.py").write_text(
        "from tests.sharding.trained import batch, loss_of, made\n"
        "def make():\n"
        "    return made('two layers'), batch('two layers'), loss_of('two layers')\n"
    )
    file = str(tmp_path / "plan.json")
    asked = "plan", f"{tmp_path}/two.py:make", "torus:2x2,bandwidth=1000", "--intra", "--stages", "1"
    ran = command(*asked, "--microbatches", "2", "--device", "v100", "-o", file)
    assert (ran.status, ran.err) == (0, "")
    orders, wanted = [(0, 1, 3, 2), (3, 1, 2, 0)], serial("two layers", momentum)
    for found in run_ranks(4, of_a_file, file, orders, timeout_s=400, group_timeout_s=200):
        for mine, weights in found:
            assert mine == pytest.approx(wanted.losses, rel=1e-6)
            check_weights(weights, wanted.weights)


def said(make: Callable[[], Any]) -> str:
    try:
        make()
    except (InputError, TrainingError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refused(rank: int, size: int) -> list[str]:
    model, (inputs, targets) = traced("two layers"), batch("two layers")
    plan = pipeline.shard_model(model, topologies.load("full:2"), UNIT, batch=BATCH).plan

    def on(ranks: tuple[int, ...], topology: str) -> Plan:
        sharding = replace(plan.stages[0].sharding, mesh=Mesh((2,), ranks))
        return replace(plan, stages=(Stage.divided(0, 1, sharding),), topology=topologies.load(topology))

    trained = trainer_of(model, plan)
    two = ((0, 1, (0,)), (1, 2, (1,)))
    found = [
        said(lambda: trainer_of(model, on((2, 3), "full:4"))),
        said(lambda: trainer_of(model, replace(plan, stages=two))),
        said(lambda: trainer_of(model, plan, clip_norm=-1.0)),
        said(lambda: trainer_of(model, plan, precision="float8")),
        said(lambda: trainer_of(trace(made("two layers"), inputs, evaluation=False), plan)),
        said(lambda: trainer_of(traced("causal"), plan)),
        said(lambda: trained.step(inputs[:4], targets[:4])),
        said(lambda: trained.evaluate(inputs, targets)),
    ]
    trained.close()
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
            "BatchError: batch: must have 24 samples, as the plan says, got 4",
            "InputError: evaluate: model Sequential: must be traced with evaluation=True to be evaluated",
        ]


class Normed(nn.Module):
    """Tied weights between which batch norm counts, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(12, 12, bias=False), nn.Linear(12, 12, bias=False)
        self.two.weight, self.norm = self.one.weight, nn.BatchNorm1d(12)
        self.register_buffer("shift", torch.ones(12), persistent=False)

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


def plan_of_whole(model: Traced, size: int) -> Plan:
    fabric, mesh = topologies.load(f"full:{size}"), Mesh((size,), tuple(range(size)))
    setting = Setting(FabricPrices(fabric, mesh), UNIT)
    graph = merged(operator_trace(model, BATCH))
    stage = Stage.divided(0, 1, stage_sharding(graph, whole_on(graph, setting), mesh))
    return Plan([stage], 1, topology=fabric, model=graph.name, batch=BATCH)


def of_sums(made: Tensor, wanted: Tensor) -> Tensor:
    return functional.mse_loss(made, wanted, reduction="sum")


def one_differs(rank: int, size: int) -> tuple[list[str], dict[str, Any], bool]:
    """What a rank says when one alone refuses; what it holds in between; whether its model stayed."""
    inputs, targets = batch("two layers")
    module = normed(buffers=rank + 1)
    before = {key: it.clone() for key, it in module.named_buffers()}
    model = trace(module, (inputs, targets), functional.mse_loss, evaluation=False)
    plan = plan_of_whole(model, size)
    divided, clipped = plan_of(model, [(size,)], "data-parallel", microbatches=1), -1.0 if rank else None
    found = [said(lambda: trainer_of(model, divided if rank else plan))]
    found.append(said(lambda: trainer_of(model, divided)))
    found.append(said(lambda: trainer_of(model, plan, clip_norm=clipped)))
    found.append(said(lambda: trainer_of(model, plan, seed=rank)))
    summed = trace(module, (inputs, targets), of_sums, evaluation=False)
    found.append(said(lambda: trainer_of(summed, replace(plan, microbatches=2))))
    trained = trainer_of(model, plan)

    def step(is_short: bool) -> str:
        return said(lambda: trained.step(*((inputs[:4], targets[:4]) if is_short else (inputs, targets))))

    found.append(step(bool(rank)))
    trained.step(inputs, targets)
    other = {key: it + 1 for key, it in trained.state_dict().items() if not rank or key != "one.weight"}
    found.append(said(lambda: trained.load_state_dict(other)))
    state = numbers(trained.state_dict())
    found.append(step(True))
    trained._meeting.grace_s = 0.1  # before, all refuse theirs, however late they come
    found.append(step(bool(rank)))
    trained.close()
    return found, state, all(before[key].equal(it) for key, it in module.named_buffers())


def test_what_one_rank_refuses_ends_the_others_and_buffers_are_those_of_the_first() -> None:
    found = run_ranks(2, one_differs, timeout_s=200, group_timeout_s=200)
    module, (inputs, targets) = normed(buffers=1), batch("two layers")
    optimizer = momentum(module.parameters())
    functional.mse_loss(module(inputs), targets).backward()
    optimizer.step()
    for _, state, is_unchanged in found:
        assert is_unchanged
        check_weights(state, numbers(module.state_dict()))
    divided = (
        "PlanError: operator batch_norm (batch_norm): cannot be run on parts along s, into which the "
        "sharding divides it 2 times"
    )
    short = "batch: must have 24 samples, as the plan says, got 4"
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

"""Plans of several divided stages on real processes: serial losses, the plan's collectives and bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from arborcast import pipeline, topologies
from arborcast.pipeline.costs.saved_bytes import Segment, Treatment
from arborcast.pipeline.meshes import Mesh
from arborcast.pipeline.model.traced import Traced, trace
from arborcast.pipeline.model.traced.operator_reader import operator_trace
from arborcast.pipeline.sharding.fabric_prices import FabricPrices
from arborcast.pipeline.sharding.graph import merged
from arborcast.pipeline.sharding.plan_strategies import stage_sharding
from arborcast.pipeline.sharding.setting import Setting
from arborcast.pipeline.sharding.slices import Sliced
from arborcast.pipeline.stages import Plan, Stage
from arborcast.synth.errors import InputError
from tests.sharding.examples import UNIT
from tests.sharding.test_operators import Block
from tests.sharding.test_running import Counting, adam, chosen_for, draw, momentum, of_tokens, planned
from tests.support.ranks import run_ranks

RANKS_IMPORT = ("torch._dynamo", "torch.distributed.tensor", "torch.export._trace")
STEPS, BATCH, MICROBATCHES = 3, 24, 2
"""Samples that meshes of 1, 2 and 3 ranks divide."""


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
            x = x + down(nn.functional.gelu(up(x)))
        return x


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "gpt":
        blocks = (Block(12, 6) for _ in range(3))
        return nn.Sequential(nn.Embedding(24, 12), *blocks, nn.LayerNorm(12), nn.Linear(12, 24))
    if name == "noisy":  # statistics of microbatches count once, random numbers come again
        inner = nn.Dropout(0.3), nn.GELU(), nn.BatchNorm1d(24)
        return nn.Sequential(nn.Linear(12, 24), *inner, nn.Linear(24, 12))
    if name == "chain":
        return nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 12))
    return Perceptrons(name == "tied")


def batch(name: str, number: int = 0) -> tuple[Tensor, Tensor]:
    if name == "gpt":
        both = torch.randint(0, 24, (2, BATCH, 6), generator=draw(number))
        both[1, 3, 2:] = both[1, 5:9, 1] = -100  # microbatches of unequal weight
    else:
        both = torch.randn(2, BATCH, 12, generator=draw(number))
    return both[0], both[1]


def loss_of(name: str) -> Any:
    return of_tokens if name == "gpt" else nn.functional.mse_loss


def traced(name: str, layers: int, *, evaluation: bool = False) -> Traced:
    return trace(made(name), batch(name), loss_of(name), layers=layers, evaluation=evaluation)


def plan_of(
    model: Traced,
    shapes: list[tuple[int, ...]],
    layout: str,
    spare: int = 0,
    *,
    microbatches: int = MICROBATCHES,
    **how: Any,
) -> Plan:
    """One layer a stage, on meshes of these shapes, one after another, then ranks without work."""
    sizes = [torch.Size(it).numel() for it in shapes]
    ranks = range(sum(sizes))
    fabric = topologies.load(f"full:{len(ranks) + spare},bandwidth=10")
    sliced = Sliced(merged(operator_trace(model, BATCH // microbatches, by_layer=True)), fabric.ranks)
    stages, place = [], 0
    for number, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
        mesh = Mesh(shape, tuple(ranks[place : place + size]))
        graph = sliced.stage(number, number + 1)
        setting = Setting(FabricPrices(fabric, mesh), UNIT, microbatches)
        sharding = stage_sharding(graph, chosen_for(graph, setting, layout), mesh)
        stages.append(Stage.divided(number, number + 1, sharding))
        place += size
    return Plan(stages, microbatches, topology=fabric, model=model.name, batch=BATCH, **how)


def serial(name: str, layout: str) -> tuple[list[float], nn.Module]:
    module = made(name)
    stepping, losses = optimizer_of(layout)(module.parameters()), []
    for number in range(STEPS):
        inputs, targets = batch(name, number)
        stepping.zero_grad()
        loss = loss_of(name)(module(inputs), targets)
        loss.backward()
        stepping.step()
        losses.append(loss.item())
    return losses, module


def optimizer_of(layout: str) -> Any:
    return adam if layout == "zero-3" else momentum


def divided(
    rank: int, size: int, name: str, shapes: list[tuple[int, ...]], layouts: list[str], collectives: str
) -> Any:
    from torch.distributed.tensor.debug import CommDebugMode

    model, results = traced(name, len(shapes)), []
    for layout in layouts:
        plan = plan_of(model, shapes, layout)
        trainer = pipeline.Trainer(
            model, plan, None, optimizer_of(layout), collectives=collectives, by_schedule=False
        )
        (mesh,) = (it.sharding.mesh for it in plan.stages if rank in it.ranks)
        losses = []
        for number in range(STEPS):
            with CommDebugMode() as mode, Counting(trainer, mesh) as counting:
                losses.append(trainer.step(*batch(name, number)))
        results.append(
            {
                "losses": losses,
                "weights": {key: it.numpy() for key, it in trainer.state_dict().items()},
                "planned": planned(trainer, MICROBATCHES),
                "counted": counting.found,
                "in all": mode.get_total_counts(),
                "ties": len(trainer._local.update._ties.mine),
                "sent": trainer.messages.sent_bytes,
                "crossing": trainer.crossing_bytes,
            }
        )
        trainer.close()
    return results


def check(name: str, shapes: list[tuple[int, ...]], layouts: list[str], collectives: str = "gloo") -> None:
    size = sum(torch.Size(it).numel() for it in shapes)
    found = run_ranks(size, divided, name, shapes, layouts, collectives, timeout_s=400, group_timeout_s=200)
    for number, layout in enumerate(layouts):
        losses, module = serial(name, layout)
        for mine in (ranks[number] for ranks in found):
            assert mine["losses"] == pytest.approx(losses, rel=1e-6)
            for key, tensor in module.state_dict().items():
                torch.testing.assert_close(torch.tensor(mine["weights"][key]), tensor, rtol=0, atol=1e-6)
            assert mine["counted"] == mine["planned"], layout
            assert mine["in all"] == mine["planned"].total() + mine["ties"] + 1  # and the losses
        sent = sum(ranks[number]["sent"] for ranks in found)
        assert sent == STEPS * sum(found[0][number]["crossing"])


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


HOW: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"order": "gpipe"},
    "pe with a cap": {"order": "pe", "max_in_flight": 2},
    "zb-h1": {"order": "zb-h1"},
    "recompute": {"recompute": True},
}


def carried_out(rank: int, size: int, name: str, shapes: list[tuple[int, ...]], layout: str) -> Any:
    model, found = traced(name, len(shapes)), {}
    plans = {how: plan_of(model, shapes, layout, microbatches=4, **options) for how, options in HOW.items()}
    *others, last = plans["1f1b"].stages  # which keep, and one that offloads
    last = replace(last, segments=(Segment(last.start, last.end, Treatment.OFFLOAD),))
    plans["offload"] = replace(plans["1f1b"], stages=(*others, last), offload_gbps=10.0)
    for how, plan in plans.items():
        with pipeline.Trainer(
            model, plan, None, optimizer_of(layout), collectives="gloo", by_schedule=False
        ) as trainer:
            (mesh,) = (it.sharding.mesh for it in plan.stages if rank in it.ranks)
            with Counting(trainer, mesh) as counting:
                losses = [trainer.step(*batch(name, number)) for number in range(STEPS)]
            (passes,) = trainer._local.executor._loop.stages.values()
            found[how] = {
                "losses": losses,
                "weights": {key: it.numpy() for key, it in trainer.state_dict().items()},
                "more": counting.found.total() - STEPS * planned(trainer, 4).total(),
                "moved": passes._treated.host.moved_bytes,
                "ranks": mesh.size(tuple(range(len(mesh.shape)))),
            }
    return found


@pytest.mark.parametrize(
    ("name", "shapes", "layout"),
    [
        ("tied", [(), (2,)], "zero-3"),
        pytest.param("noisy", [(), ()], "any 1", marks=pytest.mark.long),
        pytest.param("gpt", [(2,), (2,)], "zero-3", marks=pytest.mark.long),
        pytest.param("gpt", [(2,), (2,)], "any 4", marks=pytest.mark.long),
        pytest.param("mlp", [(2,), (), (2,)], "free", marks=pytest.mark.long),
    ],
)
def test_every_order_and_treatment_trains_as_one_process(
    name: str, shapes: list[tuple[int, ...]], layout: str
) -> None:
    size = sum(torch.Size(it).numel() for it in shapes)
    ranks = run_ranks(size, carried_out, name, shapes, layout, timeout_s=500, group_timeout_s=200)
    if name == "noisy":  # serial training draws other numbers
        losses, weights = ranks[0]["1f1b"]["losses"], ranks[0]["1f1b"]["weights"]
    else:
        losses, module = serial(name, layout)
        weights = {key: it.numpy() for key, it in module.state_dict().items()}
    for how in (*HOW, "offload"):
        for mine in (found[how] for found in ranks):
            # Forward passes that come twice gather weights twice.
            again = how == "recompute" and layout == "zero-3" and mine["ranks"] > 1
            assert mine["more"] > 0 if again else mine["more"] == 0 or how == "recompute", how
            assert mine["losses"] == pytest.approx(losses, rel=1e-6), how
            assert mine["weights"].keys() == weights.keys()
            for key, tensor in weights.items():
                np.testing.assert_allclose(mine["weights"][key], tensor, rtol=0, atol=1e-6, err_msg=how)
        assert (ranks[-1][how]["moved"] > 0) == (how == "offload")
        assert ranks[0][how]["moved"] == 0


def resumed(rank: int, size: int, name: str, folder: str) -> Any:
    """Losses, norms and evaluations of four steps; of the last two again from a checkpoint by two plans."""
    model = traced(name, 2, evaluation=True)
    found: dict[str, Any] = {}

    def train(plan: Plan, steps: range, load: bool, layout: str) -> None:
        trainer = pipeline.Trainer(
            model, plan, None, adam, collectives="gloo", clip_norm=0.2, by_schedule=False
        )
        with trainer:
            if load:
                trainer.load(folder)
            seen = found[layout] = {"losses": [], "norms": [], "evaluated": []}
            for number in steps:
                seen["losses"].append(trainer.step(*batch(name, number)))
                seen["norms"].append(trainer.gradient_norm)
                seen["evaluated"].append(trainer.evaluate(*batch(name, 9)))
                if number == 1 and not load:
                    trainer.save(folder)
            seen["weights"] = {key: it.numpy() for key, it in trainer.state_dict().items()}

    train(plan_of(model, [(2,), ()], "zero-3"), range(4), False, "whole")
    train(plan_of(model, [(2,), ()], "zero-3"), range(2, 4), True, "again")
    train(plan_of(model, [(), (2,)], "any 1"), range(2, 4), True, "other")
    plan = pipeline.Plan([(0, 1, [0]), (1, 2, [1, 2])], MICROBATCHES)
    with pipeline.Trainer(model, plan, None, adam, collectives="gloo", clip_norm=0.2) as trainer:
        trainer.load(folder)
        found["undivided"] = [trainer.step(*batch(name, number)) for number in range(2, 4)]
    return found


@pytest.mark.parametrize("name", ["tied", pytest.param("gpt", marks=pytest.mark.long)])
def test_checkpoints_go_on_with_any_plan_and_gradients_are_clipped(name: str, tmp_path: Path) -> None:
    ranks = run_ranks(3, resumed, name, str(tmp_path / "c"), timeout_s=300, group_timeout_s=200)
    losses, norms, evaluated, module = [], [], [], made(name)
    stepping = adam(module.parameters())
    for number in range(4):
        inputs, targets = batch(name, number)
        stepping.zero_grad()
        loss = loss_of(name)(module(inputs), targets)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.2)))
        stepping.step()
        losses.append(loss.item())
        with torch.no_grad():
            evaluated.append(loss_of(name)(module(batch(name, 9)[0]), batch(name, 9)[1]).item())
    assert min(norms) > 0.2
    for found in ranks:
        for how, first in (("whole", 0), ("again", 2), ("other", 2)):
            seen = found[how]
            assert seen["losses"] == pytest.approx(losses[first:], rel=1e-6), how
            assert seen["norms"] == pytest.approx(norms[first:], rel=1e-5), how
            assert seen["evaluated"] == pytest.approx(evaluated[first:], rel=1e-6), how
            for key, tensor in module.state_dict().items():
                torch.testing.assert_close(torch.tensor(seen["weights"][key]), tensor, rtol=0, atol=2e-6)
        assert found["undivided"] == pytest.approx(losses[2:], rel=1e-6)
        for key, tensor in found["whole"]["weights"].items():
            assert (tensor == found["again"]["weights"][key]).all()


def lowered(rank: int, size: int, cases: list[tuple[str, str]]) -> Any:
    found = []
    for name, layout in cases:
        model = traced(name, 2)
        plan = plan_of(model, [(2,), ()], layout)
        trainer = pipeline.Trainer(
            model, plan, None, momentum, collectives="gloo", by_schedule=False, precision="bfloat16"
        )
        (mesh,) = (it.sharding.mesh for it in plan.stages if rank in it.ranks)
        losses = []
        for number in range(STEPS):
            with Counting(trainer, mesh) as counting:
                losses.append(trainer.step(*batch(name, number)))
        calls = Counter[str](), Counter[str]()
        for counted, given in zip(calls, (counting.found, planned(trainer, MICROBATCHES)), strict=True):
            for (kind, _, _), count in given.items():
                counted[kind] += count
        found.append((losses, calls, trainer.messages.sent_bytes, trainer.crossing_bytes))
        trainer.close()
    return found


@pytest.mark.long
def test_bfloat16_as_autocast_has_it() -> None:
    """Values cross in the types that autocast gives them, and weights are gathered as often as planned."""
    cases = [("gpt", "zero-3"), ("gpt", "megatron"), ("chain", "zero-3")]
    ranks = run_ranks(3, lowered, cases, timeout_s=300, group_timeout_s=200)
    for case, (name, layout) in enumerate(cases):
        module, losses = made(name), []
        stepping = momentum(module.parameters())
        for number in range(STEPS):
            inputs, targets = batch(name, number)
            stepping.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(name)(module(inputs), targets)
            loss.backward()
            stepping.step()
            losses.append(loss.item())
        for mine, (counted, wanted), *_ in (found[case] for found in ranks):
            assert mine == pytest.approx(losses, rel=2e-3), (name, layout)
            assert counted == wanted, (name, layout)
    # of a chain of products halves of what would cross in float32, and for each message once the types
    sent, ((crossing,), *_) = sum(found[-1][2] for found in ranks), (found[-1][3] for found in ranks)
    assert sent == STEPS * crossing / 2 + 2 * 8


def fed(rank: int, size: int, folder: str) -> Any:
    """Losses and norms of a training that accumulates two batches, with a loader on ranks with work."""
    model = traced("gpt", 2)
    plan = plan_of(model, [(2,), ()], "zero-3", spare=1)
    trainer = pipeline.Trainer(
        model,
        plan,
        None,
        adam,
        collectives="gloo",
        clip_norm=0.2,
        by_schedule=False,
        accumulate=2,
        record=True,
    )
    assert (trainer.needs_inputs, trainer.needs_targets) == (rank < 3, rank < 3)
    losses, norms = [], []
    for inputs, targets in trainer.feed([batch("gpt", it) for it in range(4)] if rank < 3 else None):
        losses.append(trainer.step(inputs, targets))
        norms.append(trainer.gradient_norm)
        if len(losses) == 1:
            with pytest.raises(InputError, match="must be written between updates"):
                trainer.save(folder)
    timeline = trainer.timeline()
    kinds = {(it.rank, it.kind) for it in timeline.intervals if it.kind in ("forward", "backward")}
    weights = {key: it.numpy() for key, it in trainer.state_dict().items()}
    trainer.close()
    return losses, norms, kinds, weights


def test_divided_stages_are_fed_and_recorded_and_accumulate_as_others(tmp_path: Path) -> None:
    """The last rank has no work, and is given nothing."""
    found = run_ranks(4, fed, str(tmp_path), timeout_s=300, group_timeout_s=200)
    module, losses, norms = made("gpt"), [], []
    stepping = adam(module.parameters())
    for number in range(4):
        inputs, targets = batch("gpt", number)
        loss = of_tokens(module(inputs), targets)
        (loss / 2).backward()
        losses.append(loss.item())
        if number % 2:
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), 0.2)))
            stepping.step()
            stepping.zero_grad()
    for mine, theirs, kinds, weights in found:
        assert mine == pytest.approx(losses, rel=1e-6)
        assert theirs[1::2] == pytest.approx(norms, rel=1e-5)
        assert kinds == {(rank, kind) for rank in range(3) for kind in ("forward", "backward")}
        for key, tensor in module.state_dict().items():
            torch.testing.assert_close(torch.tensor(weights[key]), tensor, rtol=0, atol=2e-6)

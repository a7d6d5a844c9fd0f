"""How divided stages train beyond one step after another: orders, treatments, checkpoints, types, feeding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from arborcast.pipeline.costs.saved_bytes import Segment, Treatment
from arborcast.pipeline.stages import Plan
from arborcast.synth.errors import InputError
from tests.sharding.trained import (
    MICROBATCHES,
    STEPS,
    Counting,
    adam,
    batch,
    check_weights,
    kinds_of,
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
from tests.support.ranks import run_ranks

RANKS_IMPORT = ("tests.sharding.traced_for_ranks",)

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
        mesh = mesh_of(plan, rank)
        with trainer_of(model, plan, layout) as trainer:
            with Counting(trainer, mesh) as counting:
                losses = [trainer.step(*batch(name, number)) for number in range(STEPS)]
            (passes,) = trainer._local.executor._loop.stages.values()
            found[how] = {
                "losses": losses,
                "weights": numbers(trainer.state_dict()),
                "more": counting.found.total() - STEPS * planned(trainer, 4).total(),
                "moved": passes._treated.moved_bytes,
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
        wanted = serial(name, optimizer_of(layout))
        losses, weights = wanted.losses, wanted.weights
    for how in (*HOW, "offload"):
        for mine in (found[how] for found in ranks):
            # Forward passes that come twice gather weights twice.
            again = how == "recompute" and layout == "zero-3" and mine["ranks"] > 1
            assert mine["more"] > 0 if again else mine["more"] == 0 or how == "recompute", how
            assert mine["losses"] == pytest.approx(losses, rel=1e-6), how
            check_weights(mine["weights"], weights)
        assert (ranks[-1][how]["moved"] > 0) == (how == "offload")
        assert ranks[0][how]["moved"] == 0


def resumed(rank: int, size: int, name: str, folder: str) -> Any:
    """Losses, norms and evaluations of four steps; of the last two again from a checkpoint by two plans."""
    model = traced(name, 2, evaluation=True)
    found: dict[str, Any] = {}

    def train(how: str, plan: Plan, steps: range) -> None:
        seen = found[how] = {"losses": [], "norms": [], "evaluated": []}
        with trainer_of(model, plan, "zero-3", clip_norm=0.2) as trainer:
            if how != "whole":
                trainer.load(folder)
            for number in steps:
                seen["losses"].append(trainer.step(*batch(name, number)))
                seen["norms"].append(trainer.gradient_norm)
                seen["evaluated"].append(trainer.evaluate(*batch(name, 9)))
                if number == 1:
                    trainer.save(folder)
            seen["weights"] = numbers(trainer.state_dict())

    plan, rest = plan_of(model, [(2,), ()], "zero-3"), range(2, 4)
    train("whole", plan, range(4))
    train("again", plan, rest)
    train("other", plan_of(model, [(), (2,)], "any 1"), rest)
    train("undivided", Plan([(0, 1, [0]), (1, 2, [1, 2])], MICROBATCHES), rest)
    return found


@pytest.mark.parametrize("name", ["tied", pytest.param("gpt", marks=pytest.mark.long)])
def test_checkpoints_go_on_with_any_plan_and_gradients_are_clipped(name: str, tmp_path: Path) -> None:
    ranks = run_ranks(3, resumed, name, str(tmp_path / "c"), timeout_s=300, group_timeout_s=200)
    wanted = serial(name, adam, range(4), clip=0.2, evaluated=True)
    assert min(wanted.norms) > 0.2
    for found in ranks:
        for how, first in (("whole", 0), ("again", 2), ("other", 2), ("undivided", 2)):
            seen = found[how]
            assert seen["losses"] == pytest.approx(wanted.losses[first:], rel=1e-6), how
            assert seen["norms"] == pytest.approx(wanted.norms[first:], rel=1e-5), how
            assert seen["evaluated"] == pytest.approx(wanted.evaluated[first:], rel=1e-6), how
            check_weights(seen["weights"], wanted.weights, atol=2e-6)
        for key, tensor in found["whole"]["weights"].items():
            assert (tensor == found["again"]["weights"][key]).all()


def lowered(rank: int, size: int, cases: list[tuple[str, str]]) -> Any:
    found = []
    for name, layout in cases:
        model = traced(name, 2)
        plan = plan_of(model, [(2,), ()], layout)
        losses = []
        with trainer_of(model, plan, precision="bfloat16") as trainer:
            for number in range(STEPS):
                with Counting(trainer, mesh_of(plan, rank)) as counting:
                    losses.append(trainer.step(*batch(name, number)))
            calls = kinds_of(counting.found), kinds_of(planned(trainer, MICROBATCHES))
            found.append((losses, calls, trainer.messages.sent_bytes, trainer.crossing_bytes))
    return found


@pytest.mark.long
def test_bfloat16_as_autocast_has_it() -> None:
    """Values cross in the types that autocast gives them, and weights are gathered as often as planned."""
    cases = [("gpt", "zero-3"), ("gpt", "megatron"), ("chain", "zero-3")]
    ranks = run_ranks(3, lowered, cases, timeout_s=300, group_timeout_s=200)
    for case, (name, layout) in enumerate(cases):
        losses = serial(name, momentum, autocast=True).losses
        for mine, (counted, wanted), *_ in (found[case] for found in ranks):
            assert mine == pytest.approx(losses, rel=2e-3), (name, layout)
            assert counted == wanted, (name, layout)
    # of a chain of products half of what would cross in float32, and nothing else: all know the types
    sent, ((crossing,), *_) = sum(found[-1][2] for found in ranks), (found[-1][3] for found in ranks)
    assert sent == STEPS * crossing / 2


def fed(rank: int, size: int, folder: str) -> Any:
    """Losses and norms of a training that accumulates two batches, with a loader on ranks with work."""
    model = traced("gpt", 2)
    plan = plan_of(model, [(2,), ()], "zero-3", spare=1)
    losses, norms = [], []
    with trainer_of(model, plan, "zero-3", clip_norm=0.2, accumulate=2, record=True) as trainer:
        assert (trainer.needs_inputs, trainer.needs_targets) == (rank < 3, rank < 3)
        for inputs, targets in trainer.feed([batch("gpt", it) for it in range(4)] if rank < 3 else None):
            losses.append(trainer.step(inputs, targets))
            norms.append(trainer.gradient_norm)
            if len(losses) == 1:
                with pytest.raises(InputError, match="must be written between updates"):
                    trainer.save(folder)
        intervals = trainer.timeline().intervals
        kinds = {(it.rank, it.kind) for it in intervals if it.kind in ("forward", "backward")}
        return losses, norms, kinds, numbers(trainer.state_dict())


def test_divided_stages_are_fed_and_recorded_and_accumulate_as_others(tmp_path: Path) -> None:
    """The last rank has no work, and is given nothing."""
    found = run_ranks(4, fed, str(tmp_path), timeout_s=300, group_timeout_s=200)
    wanted = serial("gpt", adam, range(4), clip=0.2, accumulate=2)
    for mine, norms, kinds, weights in found:
        assert mine == pytest.approx(wanted.losses, rel=1e-6)
        assert norms[1::2] == pytest.approx(wanted.norms, rel=1e-5)
        assert kinds == {(rank, kind) for rank in range(3) for kind in ("forward", "backward")}
        check_weights(weights, wanted.weights, atol=2e-6)

"""Training by a plan, in real processes: equal to serial training, whatever the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from ranks import run_ranks  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from training_cases import (  # noqa: E402
    LAYERS,
    Curve,
    batches,
    branching,
    check_close,
    cross_entropy,
    frozen,
    momentum,
    network,
    normalised,
    plan_of,
    serial,
    tied,
)

from pipeline.divisible import Divisible  # noqa: E402
from pipeline.errors import BatchError, PlanError  # noqa: E402
from pipeline.stages import Plan, overlaps, shares  # noqa: E402
from pipeline.trainer import Trainer  # noqa: E402
from synth.errors import InputError  # noqa: E402

FABRIC = {"ARBORCAST_TOPOLOGY": "full:4", "ARBORCAST_METHOD": "trees", "ARBORCAST_GLOO_BELOW": "0"}
"""Gradients of a few bytes go by schedules too."""


def trained(
    plan: Plan, make: Callable[[], Divisible], given: Sequence[tuple[Tensor, Tensor]], **options: Any
) -> Curve:
    """Train by a plan; the state is that of the whole model."""
    options = {"collectives": "gloo", "timeout_s": 60.0} | options
    loss_fn = options.pop("loss_fn", cross_entropy)
    optimizer = options.pop("optimizer", momentum)
    with Trainer(make(), plan, loss_fn, optimizer, **options) as trainer:
        losses = [trainer.step(*batch) for batch in given]
        gradients = {
            name: it.grad.numpy().copy()
            for name, it in trainer.module.named_parameters()
            if it.grad is not None
        }
        state = {name: value.numpy().copy() for name, value in trainer.state_dict().items()}
    return Curve(losses, gradients, state)


def merged(curves: Sequence[Curve]) -> Curve:
    """What all ranks saw; losses and states must be alike on all of them."""
    for curve in curves:
        assert curve.losses == curves[0].losses
        for name, value in curve.state.items():
            np.testing.assert_array_equal(value, curves[0].state[name])
    return Curve(
        curves[0].losses,
        {name: value for curve in curves for name, value in curve.gradients.items()},
        curves[0].state,
    )


# Plans ---------------------------------------------------------------------------------------------

PLANS = {
    "one rank": plan_of([1], first=2),
    "replicas only": plan_of([4], "gpipe", microbatches=1),
    "two stages": plan_of([1, 1], "gpipe", first=1),
    "three stages": plan_of([1, 1, 1], "pe"),
    "four stages": plan_of([1, 1, 1, 1], "1f1b"),
    "four stages, capped": plan_of([1, 1, 1, 1], "pe", microbatches=5, max_in_flight=2),
    "1-2-1 fill and drain": plan_of([1, 2, 1], "gpipe"),
    "1-2-1": plan_of([1, 2, 1], "1f1b"),
    "1-2-1 list order": plan_of([1, 2, 1], "pe"),
    "2-1-1": plan_of([2, 1, 1], "1f1b"),
    "1-1-2, recomputed": plan_of([1, 1, 2], "gpipe", recompute=True),
    "2-2": plan_of([2, 2], "pe"),
    "1-3": plan_of([1, 3], "1f1b", microbatches=2),
    "3-1, recomputed": plan_of([3, 1], "pe", microbatches=2, recompute=True),
    "ranks in any order": Plan([(0, 3, (3,)), (3, 5, (2, 0)), (5, LAYERS, (1,))], 3, "1f1b"),
}
STEPS = 20


def by_all_plans(rank: int, size: int) -> dict[str, Curve]:
    given = batches(STEPS)
    return {
        name: trained(plan, network, given, collectives="synth" if index % 2 else "gloo")
        for index, (name, plan) in enumerate(PLANS.items())
    }


def test_any_plan_trains_as_serially() -> None:
    """Losses of 20 steps of batches of 13 and 7 samples, and gradients; ranks outside a plan see them too."""
    expected = serial(network, batches(STEPS))
    found = run_ranks(4, by_all_plans, environ=FABRIC)
    for name in PLANS:
        curve = merged([curves[name] for curves in found])
        assert curve.gradients.keys() == expected.gradients.keys(), name
        check_close(curve, expected)


# Models --------------------------------------------------------------------------------------------


def summed(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output, target, reduction="sum")


def of_many_kinds(rank: int, size: int) -> dict[str, Curve]:
    given = batches(6)
    return {
        "branching": trained(plan_of([1, 2, 1], depth=4), branching, given),
        "branching, recomputed": trained(
            plan_of([2, 1, 1], "pe", depth=4, recompute=True), branching, given
        ),
        "frozen": trained(plan_of([1, 1, 2]), frozen, given),
        "normalised": trained(plan_of([1, 2, 1], depth=5), normalised, given),
        "normalised, recomputed": trained(
            plan_of([1, 2, 1], "gpipe", depth=5, recompute=True), normalised, given, collectives="synth"
        ),
        "tied": trained(plan_of([1, 2, 1], depth=5), tied, given),
        "summed": trained(plan_of([1, 2, 1]), network, given, loss_fn=summed, loss_reduction="sum"),
        "accumulated": trained(plan_of([2, 2]), network, given, accumulate=3),
        "clipped": trained(plan_of([1, 2, 1]), network, given, clip_norm=0.1),
        "bfloat16": trained(plan_of([1, 1, 1, 1]), network, given, precision="bfloat16"),
    }


def test_models_and_ways_of_training() -> None:
    given = batches(6)
    found = run_ranks(4, of_many_kinds, environ=FABRIC)
    curves = {name: merged([each[name] for each in found]) for name in found[0]}
    for name in ("branching", "branching, recomputed"):
        check_close(curves[name], serial(branching, given))
    check_close(curves["frozen"], serial(frozen, given))
    assert set(curves["frozen"].gradients) == {f"{i}.{it}" for i in (4, 7) for it in ("weight", "bias")}
    for name in ("normalised", "normalised, recomputed"):
        check_close(curves[name], serial(normalised, given, microbatches=3))
    check_close(curves["tied"], serial(tied, given))
    check_close(curves["accumulated"], serial(network, given, accumulate=3))
    check_close(curves["clipped"], serial(network, given, clip_norm=0.1))
    of_sums = serial(network, given, loss_fn=lambda x, y: summed(x, y))
    check_close(curves["summed"], of_sums, tolerance=1e-5)  # losses of about 18

    check_close(curves["bfloat16"], serial(network, given, microbatches=3, autocast=True))

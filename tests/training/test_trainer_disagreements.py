"""Ranks that do not do the same in a training: all of them raise, and nothing is mixed up or half done."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from arborcast.pipeline.errors import BatchError
from arborcast.pipeline.model.divisible import Divisible
from arborcast.pipeline.run.batches import Batch
from arborcast.pipeline.run.losses import Losses
from arborcast.pipeline.trainer import Trainer
from tests.support.ranks import run_ranks, store_path
from tests.support.training_cases import (
    Curve,
    Unmodified,
    batches,
    check_close,
    cross_entropy,
    momentum,
    network,
    plan_of,
    said,
    serial,
    trained,
)

RANKS_IMPORT = ("torch._dynamo", "torch.export._trace")

FABRIC = {"ARBORCAST_TOPOLOGY": "full:3", "ARBORCAST_METHOD": "trees", "ARBORCAST_GLOO_BELOW": "0"}
SOON_S = 3.0


def make(model: nn.Module, plan: Any, **options: Any) -> Trainer:
    return Trainer(
        model, plan, cross_entropy, momentum, **{"collectives": "gloo", "timeout_s": SOON_S} | options
    )


def shapes_that_are_known(rank: int, size: int) -> str:
    """Both know both shapes, so that nobody asks; gloo ends a process that gets more than it expects."""
    long, short = batches(2, sizes=(13, 8))
    with make(network(), plan_of([1, 1])) as trainer:
        trainer.step(*long)
        trainer.step(*short)
        return said(lambda: trainer.step(*(long if rank else short)))


def refused_by_one(rank: int, size: int) -> tuple[str, str]:
    """The last stage refuses its batch and comes with the next one: no other rank's batch may be mixed in."""
    first, second = batches(2, sizes=(13,))
    with make(network(), plan_of([1, 1])) as trainer:
        trainer.step(*first)
        if rank == 1:
            one = said(lambda: trainer.step(first[0], first[1][:5]))
            return one, said(lambda: trainer.step(*second))
        return said(lambda: trainer.step(*first)), said(lambda: trainer.step(*second))


def other_arguments(rank: int, size: int) -> str:
    return said(lambda: make(network(), plan_of([1, 1]), accumulate=1 + rank))


def no_weights_yet(rank: int, size: int) -> list[str]:
    """Before the first step of an unmodified model; the last rank has no work."""
    with make(Unmodified(), plan_of([1, 1], depth=4)) as trainer:
        return [said(trainer.state_dict), said(lambda: trainer.load("c"))]


def half_a_checkpoint(rank: int, size: int) -> tuple[str, bool, float]:
    """It lacks what the second stage needs; the first one must not take its part."""
    folder = store_path().with_name("half")
    with make(network(), plan_of([1, 1])) as trainer:
        if rank == 0:
            state = {name: value * 2 for name, value in network().state_dict().items() if name != "7.bias"}
            dcp.save({"model": state}, checkpoint_id=folder, no_dist=True)
        before = trainer.state_dict()  # which the other rank waits for
        error = said(lambda: trainer.load(folder))
        other = {name: it + 1 for name, it in before.items() if rank == 0 or name != "7.bias"}
        assert said(lambda: trainer.load_state_dict(other)) == error.replace(f"{folder}", "checkpoint")
        after = trainer.state_dict()
        same = all(torch.equal(before[name], after[name]) for name in before)
        return error.replace(str(folder), "half"), same, trainer.step(*batches(1)[0])


class Buffers(nn.Module):
    """Buffers of types that collectives do not add, and one whose values are repeated in place."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(6, 4)
        self.register_buffer("mask", torch.rand(4) > 0.5)
        self.register_buffer("phases", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("halves", torch.randn(3).to(torch.bfloat16))
        self.register_buffer("repeated", torch.randn(1, 4).expand(5, 4))
        self.register_buffer("none", torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) * self.mask + self.repeated[0]
        return result


def buffers(rank: int, size: int, collectives: str) -> dict[str, list[Any]]:
    plan = plan_of([2], depth=1, recompute=True)
    with make(Divisible(Buffers(rank)), plan, collectives=collectives, timeout_s=90.0) as trainer:
        trainer.step(*batches(1)[0])
        return values_of(trainer.module)


def values_of(module: nn.Module) -> dict[str, list[Any]]:
    return {name.rpartition(".")[2]: it.tolist() for name, it in module.named_buffers()}


class Exact(nn.Module):
    """Multiplies matrices in float32, whatever is around it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(x.float() @ self.weight)


def partly_exact() -> Divisible:
    torch.manual_seed(0)
    return Divisible(nn.Linear(6, 8), nn.Tanh(), Exact(), Exact(), nn.Linear(8, 4))


def in_bfloat16(rank: int, size: int) -> dict[bool, Curve]:
    return {
        recompute: trained(
            plan_of([1, 1], depth=5, recompute=recompute), partly_exact, batches(2), precision="bfloat16"
        )
        for recompute in (False, True)
    }


def all_of_them(rank: int, size: int) -> dict[str, Any]:
    calls = (
        shapes_that_are_known,
        refused_by_one,
        other_arguments,
        no_weights_yet,
        half_a_checkpoint,
        in_bfloat16,
    )
    found = {call.__name__: call(rank, size) for call in calls}
    return found | {f"buffers by {it}": buffers(rank, size, it) for it in ("gloo", "synth")}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(3, all_of_them, environ=FABRIC)


def test_batches_that_differ_are_never_mixed(found: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(found):
        assert each["shapes_that_are_known"].startswith(f"TrainingError: rank {rank}"), each
        for line in each["refused_by_one"]:
            assert line.startswith(f"TrainingError: rank {rank}"), line
    assert "targets[0] must have as many samples as inputs[0], 13, got 5" in found[1]["refused_by_one"][0]


def test_arguments_that_differ_are_refused(found: list[dict[str, Any]]) -> None:
    for each in found:
        same = "layers [0, 4) on 0 [4, 8) on 1, 3 microbatches, order 1f1b, loss_reduction mean"
        rest = "clip_norm None, precision float32, seed 0, batch_norm microbatch, collectives gloo"
        rest += ", device cpu"
        assert each["other_arguments"] == (
            f"InputError: trainer: all ranks must be given the same one, got {same}, accumulate 1, {rest} on "
            f"rank 0 and {same}, accumulate 2, {rest} on rank 1"
        )


def test_checkpoints_are_taken_by_all_ranks_or_none(found: list[dict[str, Any]]) -> None:
    for each in found:
        for line in each["no_weights_yet"]:
            assert line == (
                "InputError: trainer: a model that is not Layered is traced in the first step, got none yet"
            )
        error, unchanged, loss = each["half_a_checkpoint"]
        assert error == "CheckpointError: half: must hold 7.bias of the model, got 7 others"
        assert unchanged
        assert loss == pytest.approx(serial(network, batches(1)).losses[0], abs=1e-6)


def test_backward_passes_are_as_exact_as_serially(found: list[dict[str, Any]]) -> None:
    """They are not in autocast: those of layers that are kept out of it would be rounded."""
    expected = serial(partly_exact, batches(2), microbatches=3, autocast=torch.bfloat16)
    for each in found:
        for curve in each["in_bfloat16"].values():
            check_close(curve, expected)


@pytest.mark.parametrize("collectives", ["gloo", "synth"])
def test_replicas_begin_with_equal_buffers(found: list[dict[str, Any]], collectives: str) -> None:
    expected = values_of(Buffers(0))
    for each in found[:2]:
        assert each[f"buffers by {collectives}"] == expected


def test_as_many_inputs_as_the_model_takes() -> None:
    x = torch.zeros(8, 2)
    with pytest.raises(BatchError, match="inputs must be 2 tensors, as the model takes, got 3"):
        Batch.of((x, x, x), x, (0, 0), plan_of([1]))


@pytest.mark.parametrize(("dtype", "weight"), [(torch.float16, 1e-8), (torch.bfloat16, 1e-3)])
def test_a_weight_is_not_rounded_to_the_type_of_the_loss(dtype: torch.dtype, weight: float) -> None:
    losses = Losses(lambda output, _: output, "mean", [1], round(1 / weight), lambda it: it, nullcontext)
    start = losses.add(losses.of(None, 0, torch.tensor([3.0], dtype=dtype, requires_grad=True)), None, 0)
    assert start.item() == pytest.approx(3 * weight, rel=1e-6)

"""A rank that dies, raises or does not come, in the middle of training: all others raise soon, in a line."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from arborcast.pipeline.model.divisible import Divisible
from arborcast.pipeline.trainer import Trainer
from tests.support.faults import LIMIT_S, PATIENCE_S, Ended, check_failed, ended
from tests.support.ranks import Failure, run_ranks
from tests.support.training_cases import batches, cross_entropy, momentum, network, plan_of
from tests.support.waiting import until

RANKS_IMPORT = ("torch._dynamo",)

FABRIC = {"ARBORCAST_TOPOLOGY": "full:4", "ARBORCAST_METHOD": "trees", "ARBORCAST_GLOO_BELOW": "0"}
LATE_S = 5.0


class Trap(nn.Module):
    """Does something in its n-th forward or backward pass."""

    def __init__(self, call: int, spring: Callable[[], None], *, backward: bool) -> None:
        super().__init__()
        self.left = call
        self.spring = spring
        self.backward = backward

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is not Tensor:  # without values, for its shape only
            return x * 1
        if self.backward:
            x = x * 1
            if x.requires_grad:
                x.register_hook(lambda _: self.count())
            return x
        self.count()
        return x * 1

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.spring()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ArithmeticError("no such number\nas this")


WAYS = {
    "dies in a forward pass": (2, die, False),
    "dies in a backward pass": (2, die, True),
    "raises in a forward pass": (0, fail, False),
    "raises in a backward pass": (3, fail, True),
    "does not come": (1, None, False),
}
"""Which rank, what it does, and where."""


def struck(rank: int, size: int, way: str, gone: str) -> tuple[Ended, Ended] | None:
    """The third step and one after it. The fault is in its second microbatch, the fifth pass in all."""
    victim, spring, backward = WAYS[way]
    layers = list(network())
    if rank == victim and spring is not None:
        layers[{0: 0, 1: 3, 2: 3, 3: 6}[rank]] = nn.Sequential(
            layers[{0: 0, 1: 3, 2: 3, 3: 6}[rank]], Trap(2 * 3 + 2, spring, backward=backward)
        )
    model = Divisible(layers)
    timeout_s = LATE_S if spring is None else PATIENCE_S
    trainer = Trainer(model, plan_of([1, 2, 1]), cross_entropy, momentum, timeout_s=timeout_s)
    given = batches(3, sizes=(13,))
    for batch in given[:2]:
        trainer.step(*batch)
    if rank == victim and spring is None:
        until(lambda: len(list(Path(gone).iterdir())) == size - 1)  # all others have given up
        return None
    first = ended(lambda: trainer.step(*given[2]))
    again = ended(lambda: trainer.step(*given[2]))
    Path(gone, str(rank)).touch()
    trainer.close()
    trainer.close()
    return first, again


RELATIVES = ("dies in a backward pass", "raises in a forward pass")


@pytest.mark.parametrize(
    "way", [pytest.param(it, marks=pytest.mark.long) if it in RELATIVES else it for it in WAYS]
)
def test_every_rank_raises_in_time(way: str, tmp_path: Path) -> None:
    found: list[Any] = run_ranks(
        4, struck, way, str(tmp_path), environ=FABRIC, may_fail=True, timeout_s=LIMIT_S
    )
    victim, spring, _ = WAYS[way]
    for rank, result in enumerate(found):
        if rank == victim and spring is die:
            assert isinstance(result, Failure)
            assert result.error == "killed"
            continue
        if rank == victim and spring is None:
            continue
        first, again = result
        check_failed(first, rf"rank {rank} \(stage {(0, 1, 1, 2)[rank]}\): ")
        assert first.error == "TrainingError", first
        assert "\n" not in first.message
        if spring is fail:
            doing = "backward" if "backward" in way else "forward"
            said = (
                f"rank {victim} (stage {(0, 1, 1, 2)[victim]}): {doing} pass of microbatch 1: ArithmeticError"
            )
            assert f"{said}: no such number" in first.message
        elif spring is None:
            assert "nothing came" in first.message or "closed" in first.message
        else:
            assert "closed" in first.message
        check_failed(again, "this trainer has ended, make a new one")


def alone_with_a_new_shape(rank: int, size: int) -> Ended:
    """Rank 1 is given another batch than the others, which know theirs."""
    inputs, targets = batches(1)[0]
    with Trainer(
        network(), plan_of([1, 1]), cross_entropy, momentum, collectives="gloo", timeout_s=LATE_S
    ) as trainer:
        trainer.step(inputs, targets)
        count = 12 if rank else 13
        return ended(lambda: trainer.step(inputs[:count], targets[:count]))


def test_a_new_shape_on_some_ranks_only() -> None:
    first, second = run_ranks(2, alone_with_a_new_shape)
    for result in (first, second):
        check_failed(result, "rank")
    assert second.message == (
        f"rank 1: got no word of rank 0 within {LATE_S:g} s, where all ranks must come to the same step "
        "(train inputs float32[12, 6], targets int64[12])"
    )
    assert first.message.startswith(
        "rank 0 (stage 0): waiting for the gradient of microbatch 0 from rank 1: "
    )
    assert "rank 1 came to train inputs float32[12, 6], targets int64[12]" in first.message

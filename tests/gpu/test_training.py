"""Training on GPUs: the plans that tests train on a simulated device, equal to serial training."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from arborcast.pipeline.model.traced import trace
from arborcast.pipeline.run.failures import TrainingError
from arborcast.pipeline.trainer import Trainer
from tests.gpu.sharing import join_nccl
from tests.support.ranks import Failure, run_ranks
from tests.support.training_cases import (
    Curve,
    batches,
    check_close,
    cross_entropy,
    merged,
    momentum,
    network,
    plan_of,
    trained,
)
from tests.training.test_devices import CASES, STEPS, initialised, made

RANKS_IMPORT = ("torch._dynamo", "torch.export._trace")


def on_gpus(rank: int, size: int, names: list[str], collectives: str) -> dict[str, Curve | str]:
    join_nccl(rank, size)
    torch.backends.cuda.matmul.allow_tf32 = False
    found: dict[str, Curve | str] = {}
    for name in names:
        case, given = CASES[name], batches(STEPS)
        options = {"collectives": collectives, "device": "cuda", "check_loss": False} | case.options

        def make(name: str = name) -> Any:
            case = CASES[name]
            if not name.startswith("traced"):
                return case.make()
            return trace(initialised(case.make), batches(1)[0][0], layers=case.plan.depth)

        try:
            found[name] = trained(case.plan, make, given, **options)
        except Exception as error:  # the others are trained all the same
            found[name] = f"{type(error).__name__}: {error}"[:400]
    return found


@pytest.mark.parametrize("collectives", ["synth", "nccl", "gloo"])
def test_training_on_gpus_is_serial_training(collectives: str) -> None:
    names = list(CASES) if collectives == "synth" else ["1-2-1", "tied", "V, replicas"]
    every = run_ranks(4, on_gpus, names, collectives, backend=None, timeout_s=200)
    wrong = []
    for name in names:
        case = CASES[name]
        curves = [found[name] for found in every]
        said = [it for it in curves if isinstance(it, str)]
        if said:
            wrong.append((name, said))
            continue
        try:
            check_close(merged(curves), case.expected(batches(STEPS), made(name)), 1e-4)
        except AssertionError as error:
            wrong.append((name, [str(error)[:400]]))
    assert wrong == []


def dies(rank: int, size: int) -> str:
    join_nccl(rank, size)
    with Trainer(
        network(), plan_of([1, 1, 1]), cross_entropy, momentum, device="cuda", timeout_s=20.0
    ) as trainer:
        given = batches(2)
        trainer.step(*given[0])
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(TrainingError) as raised:
            trainer.step(*given[1])
    return str(raised.value)


def test_a_rank_that_dies_ends_the_others() -> None:
    first, dead, last = run_ranks(3, dies, backend=None, may_fail=True)
    assert isinstance(dead, Failure)
    assert "rank 0" in first and "rank 2" in last

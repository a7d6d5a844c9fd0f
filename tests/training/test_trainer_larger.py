"""Models that no rank holds as a whole: made or read stage by stage, saved in parts; what goes wrong."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from arborcast.pipeline.model.deferred_init import initialise, on_meta, tensors_on_meta
from arborcast.pipeline.model.divisible import Divisible
from arborcast.pipeline.trainer import Trainer
from tests.support.faults import LIMIT_S, PATIENCE_S, Ended, check_failed, ended
from tests.support.ranks import Failure, run_ranks, store_path
from tests.support.training_cases import (
    Curve,
    Unmodified,
    batches,
    check_close,
    cross_entropy,
    curve_of,
    momentum,
    network,
    plan_of,
    serial,
    tied,
)

RANKS_IMPORT = ("torch._dynamo", "torch.distributed.checkpoint")
SEED = 3


def without_values(make: Callable[[], nn.Module]) -> nn.Module:
    with on_meta():
        return make()


def begun(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The whole model in one process."""

    def made() -> nn.Module:
        model = without_values(make)
        initialise(model, SEED)
        return model

    return made


def trained(model: Any, plan: Any, **options: Any) -> tuple[Curve, int]:
    """Four steps, the optimizer's from a checkpoint in the middle; and how much stayed without values."""
    given = batches(4)
    with Trainer(model, plan, cross_entropy, momentum, collectives="gloo", seed=SEED, **options) as trainer:
        losses = [trainer.step(*batch) for batch in given]
        return curve_of(trainer, losses), sum(it.is_meta for it in model.parameters())


class Masked(nn.Module):
    """A buffer that is computed when it is made, and that nothing makes again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.mask  # type: ignore[no-any-return]


def masked() -> Divisible:
    return Divisible(nn.Linear(6, 8), Masked(), nn.Linear(8, 4))


def started(rank: int, size: int) -> dict[str, Any]:
    """Every way to begin; two stages, one of them on two ranks."""
    folder = store_path().with_name("first")
    found: dict[str, Any] = {
        "in a row": trained(without_values(network), plan_of([1, 2])),
        "tied": trained(without_values(tied), plan_of([2, 1], depth=5)),
        "unmodified": trained(without_values(Unmodified), plan_of([1, 1, 1], depth=7)),
    }
    if rank == 0:
        dcp.save({"model": network(9).state_dict()}, checkpoint_id=folder, no_dist=True)
    for name, model in (("read", without_values(network)), ("read over", network(4))):
        found[name] = trained(model, plan_of([2, 1]), weights=folder)
    with torch.device("meta"):
        left_over = masked()
    small = {name: it[:2] for name, it in network().state_dict().items()}
    if rank == 0:
        dcp.save({"model": small}, checkpoint_id=folder.with_name("small"), no_dist=True)
    refusals = {
        "left over": (left_over, {}),
        "another": (without_values(network), {"weights": folder.with_name("small")}),
        "nothing": (without_values(network), {"weights": folder.with_name("none")}),
    }
    for name, (model, options) in refusals.items():
        plan = plan_of([1, 2], depth=model.depth)  # type: ignore[arg-type]
        result = ended(lambda model=model, plan=plan, options=options: trained(model, plan, **options))
        found[name] = result.error, result.message.replace(f"{folder.parent}/", "")
    return found


REFUSED = {
    "left over": (
        "PartitionError",
        "model Divisible: 1.mask is on meta and must be given a value, which no reset_parameters does (of "
        "Masked, mask): build the model under pipeline.on_meta(), which keeps buffers, or say weights=",
    ),
    "another": ("CheckpointError", "small: 0.weight must have shape (8, 6) of the model, got (2, 6)"),
    "nothing": ("CheckpointError", "none: cannot be read: No such file or directory"),
}


def test_each_rank_begins_with_its_part_of_what_serial_training_begins_with() -> None:
    expected = {
        "in a row": serial(begun(network), batches(4)),
        "tied": serial(begun(tied), batches(4)),
        "unmodified": serial(begun(Unmodified), batches(4), microbatches=3),
        "read": serial(lambda: network(9), batches(4)),
    }
    expected["read over"] = expected["read"]
    for found in run_ranks(3, started, environ={"ARBORCAST_TOPOLOGY": "full:3"}):
        for name, curve in expected.items():
            check_close(found[name][0], curve)
        assert found["in a row"][1] == 4  # of 8 tensors, those of the other stage
        assert 0 < found["unmodified"][1] <= 8  # the middle stage has no parameter
        assert found["read over"][1] == 0
        for name, line in REFUSED.items():
            assert found[name] == line


# ---------------------------------------------------------------------- a rank that takes its time

STEP_S = 10.0  # what is not patient takes far less, on a slow machine as well
SLOW_S = 1.5 * STEP_S


class Slow(torch.optim.SGD):
    """Gives its state, as it must to be saved, checked and loaded, in more time than a step may take."""

    def state_dict(self) -> dict[str, Any]:
        time.sleep(SLOW_S)
        return super().state_dict()


def one_is_slow(rank: int, size: int) -> Ended:
    """Rank 1 fills, writes and reads for longer than a step may take."""
    folder = store_path().with_name("saved")

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            time.sleep(SLOW_S * rank / 2)  # of two
            module.reset_parameters()

    def begin() -> None:
        with Trainer(
            without_values(lambda: Divisible(nn.Linear(6, 8), nn.Linear(8, 4))),
            plan_of([1, 1], depth=2),
            cross_entropy,
            lambda parameters: (Slow if rank else torch.optim.SGD)(parameters, 0.1),
            collectives="gloo",
            timeout_s=STEP_S,
            weights=fill,
        ) as trainer:
            trainer.save(folder)
            trainer.load(folder)

    return ended(begin)


@pytest.mark.long
def test_others_wait_while_a_rank_fills_its_part_saves_it_and_loads_it() -> None:
    assert run_ranks(2, one_is_slow, timeout_s=2 * LIMIT_S) == [Ended(None, "", True)] * 2


# ---------------------------------------------------------------------- saving that fails


def saving_fails(rank: int, size: int, way: str) -> dict[str, Any]:
    """The second checkpoint of the same name: rank 1 cannot write its part."""
    folder, given = store_path().with_name("saved"), batches(4, sizes=(13,))
    write = dcp.FileSystemWriter.write_data

    def fails(self: Any, *arguments: Any) -> Any:
        write(self, *arguments).wait()
        if way == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(28, "No space left on device")

    found: dict[str, Any] = {}
    with Trainer(
        network(), plan_of([1, 1, 1]), cross_entropy, momentum, collectives="gloo", timeout_s=PATIENCE_S
    ) as trainer:
        losses = [trainer.step(*given[0])]
        trainer.save(folder)
        losses.append(trainer.step(*given[1]))
        if rank == 1:
            dcp.FileSystemWriter.write_data = fails  # type: ignore[method-assign]
        found["saving"] = ended(lambda: trainer.save(folder))
        dcp.FileSystemWriter.write_data = write  # type: ignore[method-assign]
        found["after"] = ended(lambda: losses.append(trainer.step(*given[2])))
        if rank == 0:  # which makes and removes it all: others may already see the next one
            found["lying"] = sorted(path.name for path in folder.parent.iterdir() if "saved" in path.name)
        if way != "dies":
            found["again"] = ended(lambda: trainer.save(folder))
            found["loaded"] = ended(lambda: trainer.load(folder))
            losses.append(trainer.step(*given[3]))
    found["losses"] = losses
    found["old"] = [float(it) for it in loaded(folder)["0.bias"]] if way == "dies" and rank == 0 else None
    return found


def loaded(folder: Path) -> dict[str, Tensor]:
    model = network(5)
    state = model.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder, no_dist=True)
    return state


@pytest.mark.long
def test_a_rank_that_cannot_write_is_named_and_training_goes_on() -> None:
    expected = serial(network, batches(4, sizes=(13,))).losses
    for each in run_ranks(3, saving_fails, "raises", timeout_s=LIMIT_S):
        check_failed(
            each["saving"], r"saved: cannot be written: OSError: \[Errno 28\] No space left .* on rank 1$"
        )
        assert each["saving"].error == "CheckpointError"
        for name in ("after", "again", "loaded"):
            assert each[name] == Ended(None, "", True), name
        assert each.get("lying", ["saved"]) == ["saved"]
        assert each["losses"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.long
def test_a_rank_that_dies_while_saving_leaves_the_old_checkpoint() -> None:
    first, victim, last = run_ranks(3, saving_fails, "dies", may_fail=True, timeout_s=LIMIT_S)
    assert isinstance(victim, Failure)
    model = network()
    optimizer = momentum(model.parameters())
    inputs, targets = batches(1, sizes=(13,))[0]
    cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    assert first["old"] == pytest.approx(model[0].bias.tolist(), abs=1e-6)  # type: ignore[union-attr, operator]
    for rank, each in ((0, first), (2, last)):
        check_failed(
            each["saving"], rf"^rank {rank} \(stage {rank}\): saving .*saved: its connection was closed"
        )
        assert each["saving"].error == "TrainingError"
        check_failed(each["after"], "this trainer has ended, make a new one")
    assert first["lying"] == ["saved"]
    assert tensors_on_meta(model) == {}

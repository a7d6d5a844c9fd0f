"""Training on a device, which is simulated: equal to serial training, and the host seldom waits for it."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from arborcast.pipeline.model.deferred_init import initialise, on_meta
from arborcast.pipeline.model.traced import trace
from arborcast.pipeline.run import activation_treatment
from arborcast.pipeline.run.failures import TrainingError
from arborcast.pipeline.run.precision import Precision
from arborcast.pipeline.trainer import Trainer
from arborcast.synth.errors import InputError
from tests.support.ranks import Failure, run_ranks
from tests.support.simulated_device import Factories, OnDevice, simulated_device
from tests.support.training_cases import (
    CLASSES,
    FEATURES,
    LAYERS,
    Case,
    Curve,
    Unmodified,
    around,
    aside,
    batches,
    branching,
    by_layer,
    check_close,
    cross_entropy,
    decaying,
    merged,
    momentum,
    network,
    normalised,
    plan_of,
    stopped,
    tied,
    trained,
)

RANKS_IMPORT = ("torch._dynamo", "torch.export._trace")
STEPS = 3


class Placed(nn.Module):
    """Makes tensors on the device of what it is given, and on that which its code names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.register_buffer("table", torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(8, device=x.device) / 8 + self.table
        h = torch.tanh(self.first(x) + places) * torch.ones(8, device="cpu")
        made: Tensor = self.last(h)
        return made


def pair(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A sum, and how many targets count."""
    counted = targets != 0
    return (nn.functional.cross_entropy(output, targets, reduction="none") * counted).sum(), counted.sum()


def initialised(make: Callable[[], nn.Module]) -> nn.Module:
    with on_meta():
        model = make()
    initialise(model)
    return model


def made(name: str) -> Callable[[], nn.Module]:
    """What serial training makes of a case: of what is traced on "meta" its first values."""
    make = CASES[name].make
    return partial(initialised, make) if name.startswith("traced") else make


CASES = {
    "1-2-1": Case(plan_of([1, 2, 1])),
    "pairs, clipped": Case(plan_of([2, 1], "gpipe"), network, {"loss_fn": pair, "clip_norm": 0.3}, waits=3),
    "types": Case(plan_of([1, 2], depth=4), branching, waits=2),
    "interleaved": Case(around([1, 1], "interleaved", depth=LAYERS)),
    "interleaved, ragged": Case(around([1, 1, 1, 1], "interleaved", depth=LAYERS, microbatches=5)),
    "V, replicas": Case(around([2, 2], "zb-v", depth=LAYERS), waits=2),
    "list order": Case(plan_of([1, 2, 1], "pe")),
    "recomputed, offloaded": Case(by_layer(plan_of([1, 2, 1]), "rko")),
    "batch norm": Case(plan_of([2, 1], depth=5, microbatches=1), normalised),
    "tied": Case(plan_of([1, 2, 1], depth=5), tied, waits=2),
    "absent": Case(plan_of([1, 1, 1], depth=3), aside, {"optimizer": decaying}),
    "absent from a stage": Case(plan_of([1, 2], depth=5), stopped, {"optimizer": decaying}, waits=2),
    "traced": Case(plan_of([1, 2], depth=3, microbatches=1), Unmodified, waits=3),
    "traced with devices": Case(plan_of([1, 1], depth=2), Placed),
}
OTHERS = ("1-2-1", "interleaved", "list order", "absent", "traced")
"""Cases of which `make test` has a relative: recomputed, ragged, pairs, absent from a stage, with devices."""


Found = dict[str, tuple[Curve, list[dict[str, int]]]]


def on_a_device(rank: int, size: int, names: Sequence[str]) -> Found:
    """What each training gave, and what was noted in each of its steps."""
    found = {}
    # To it a tensor of another class is none of memory alone.
    activation_treatment.Tensor = OnDevice  # type: ignore[misc,attr-defined]
    with simulated_device() as device:
        activation_treatment._copier().submit(Factories().__enter__).result()
        for name in names:
            case, given, notes = CASES[name], batches(STEPS), []
            model = case.make()
            if name.startswith("traced"):  # on "meta", for torch holds on to what it has traced
                with on_meta():
                    model = trace(case.make(), given[0][0], layers=case.plan.depth, evaluation=False)

            def note(notes: list[dict[str, int]] = notes) -> None:
                notes.append(dict(device.noted))
                device.noted.clear()

            options = {"collectives": "simulated", "device": "simulated", "check_loss": False} | case.options
            curve = trained(case.plan, lambda model=model: model, given, note, **options)  # type: ignore[misc]
            device.noted.clear()
            found[name] = curve, notes[1:]
    return found


@pytest.mark.parametrize(
    "names",
    [tuple(it for it in CASES if it not in OTHERS), pytest.param(OTHERS, marks=pytest.mark.long)],
    ids=["few", "others"],
)
def test_training_on_a_device_is_serial_training(names: Sequence[str]) -> None:
    """Losses, gradients and weights; and of a step's waits, each has its reason (`Trainer`, `device`)."""
    ranks: list[Found] = run_ranks(4, on_a_device, names)
    for name in names:
        case = CASES[name]
        expected = case.expected(batches(STEPS), made(name))
        check_close(merged([found[name][0] for found in ranks]), expected)
        for rank, found in enumerate(ranks):
            for noted in found[name][1]:
                waits = noted.pop("waited for it", 0)
                assert waits <= case.waits, (name, rank, waits)
                assert noted.keys() <= {"copied to it", "copied from it"}, (name, rank, noted)
        assert any(noted for _, notes in (found[name] for found in ranks) for noted in notes), name


def what_else(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Of a training on the host and one on a device what else a trainer tells, and goes on from."""
    found: dict[str, Any] = {}
    with simulated_device():
        for device, collectives in (("cpu", "gloo"), ("simulated", "simulated")):
            options = {"collectives": collectives, "device": device, "metrics": {"pair": pair}}
            options |= {"keep_outputs": True, "record": True}
            told: list[Any] = []
            with Trainer(network(), plan_of([1, 2, 1]), cross_entropy, momentum, **options) as trainer:
                for batch in batches(2):
                    told += [trainer.step(*batch), trainer.metrics, trainer.evaluate(*batch)]
                told.append(trainer.outputs().tolist())
                counted = Counter(it.kind for it in trainer.timeline().intervals)
                trainer.save(f"{folder}/{device}")
            with Trainer(network(1), plan_of([2, 1]), cross_entropy, momentum, **options) as trainer:
                trainer.load(f"{folder}/{device}")
                told.append(trainer.step(*batches(3)[2]))
                told.append({name: it.tolist() for name, it in trainer.state_dict().items()})
            found[device] = told, {kind: counted[kind] for kind in ("forward", "backward", "update")}
    return found


def test_what_a_trainer_tells_and_writes_is_the_same(tmp_path: Path) -> None:
    """Metrics, evaluation, outputs, the timeline's passes, and what checkpoints go on with."""
    for found in run_ranks(4, what_else, str(tmp_path)):
        host, device = found["cpu"], found["simulated"]
        assert host == device


def dies(rank: int, size: int) -> str:
    with simulated_device():
        options = {"collectives": "simulated", "device": "simulated", "timeout_s": 20.0}
        with Trainer(network(), plan_of([1, 1, 1]), cross_entropy, momentum, **options) as trainer:
            given = batches(2)
            trainer.step(*given[0])
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            with pytest.raises(TrainingError) as raised:
                trainer.step(*given[1])
    return str(raised.value)


def test_a_rank_that_dies_on_a_device_ends_the_others() -> None:
    first, dead, last = run_ranks(3, dies, may_fail=True)
    assert isinstance(dead, Failure)
    assert "rank 0" in first and "rank 2" in last


def refused(rank: int, size: int) -> list[str]:
    words = []
    with simulated_device():
        for options in (
            {"device": "nowhere"},
            {"device": "simulated:1"},
            {"device": "simulated"},
            {"device": "simulated", "collectives": "gloo", "precision": Precision("bfloat16")},
            {"device": "simulated", "collectives": "gloo", "timeout_s": 1.0},
        ):
            if "timeout_s" in options:
                dist.distributed_c10d._get_default_group().bound_device_id = torch.device("simulated", 0)
            with pytest.raises(InputError) as raised:
                Trainer(network(), plan_of([1]), cross_entropy, momentum, **options)  # type: ignore[arg-type]
            words.append(str(raised.value))
    return words


def test_devices_that_are_refused() -> None:
    assert run_ranks(1, refused) == [
        [
            "device: must be one of torch's, got nowhere",
            "device: number must be below the 1 that there are, got 1",
            "collectives: must be one of gloo, simulated, got synth",
            "precision: must be for device simulated, got one for cpu",
            "device: init_process_group must be called without device_id, since groups that connect at once "
            "send one message after another, got simulated and one",
        ]
    ]

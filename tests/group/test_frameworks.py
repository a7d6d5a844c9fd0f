"""PyTorch's own parallel training on the group "synth", beside the same on gloo, step by step.

Each family of checks is one launch of four processes (its long ones another), which make the default group on
gloo, do all checks, and start again on "synth" or "cpu:synth", by turns of the families: what torch calls is
the same under both names. The tensors that the checks return must agree with gloo's.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.framework_checks import FAMILIES, RANKS, Values, calls_by_schedule, small_model, train
from tests.support.ranks import run_ranks

RANKS_IMPORT = ("torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp")

REFERENCE = "gloo"
BACKENDS = {
    family: (REFERENCE, name)
    for family, name in zip(FAMILIES, itertools.cycle(("synth", "cpu:synth")), strict=False)
}
LONG = {
    "ddp": {"bucket view", "static graph", "uneven inputs", "bf16 hook", "allreduce hook", "python hook"},
    "sharded": {"fsdp2", "tensor parallel"},
    "clients": {"accumulation", "hybrid accumulation", "kept on two ranks"},
    "groups": {"functional", "compiled eager", "objects"},
}
"""Checks of which `make test` has a relative that goes by the same calls."""
ENVIRON = {"ARBORCAST_TOPOLOGY": f"full:{RANKS}", "ARBORCAST_GLOO_BELOW": "0"}
Array: TypeAlias = np.ndarray[Any, Any]

# Of the largest element. Sums of four terms in another order, over three steps; where gradients travel as
# float16 or bfloat16, one such sum may be off by 2**-11 or 2**-8 of itself.
TOLERANCE = 1e-6
TOLERANCES = {"fp16 hook": 1e-4, "bf16 hook": 1e-3}
# Gloo exchanges parts of several sizes, and gathers the parts of a ShardedTensor.
WITHOUT_SCHEDULES = {"uneven exchange", "sharded tensor"}


@dataclass(frozen=True)
class Outcome:
    """What one check gave on one rank, and how many collectives schedules served meanwhile."""

    values: list[Array]
    by_schedule: int


# ------------------------------------------------------------------------------------------------ harness


def _run_family(rank: int, size: int, family: str, checks: Sequence[str]) -> dict[str, dict[str, Outcome]]:
    """On one rank: checks of a family, on one backend after the other."""
    warnings.simplefilter("ignore", FutureWarning)  # torch is renaming collectives; both names are in use
    outcomes: dict[str, dict[str, Outcome]] = {}
    # A thread of gloo's that lets go of its group last waits for itself, and torch ends the process.
    kept: list[object] = []
    for backend in BACKENDS[family]:
        _begin(backend, rank, size, backend.replace(":", "-"))
        outcomes[backend] = {}
        for name in checks:
            check = FAMILIES[family][name]
            before = _calls_by_schedule()
            try:
                values = _as_arrays(check(rank))
            except Exception as error:
                raise RuntimeError(f"{family}, {name}, {backend}: {type(error).__name__}: {error}") from error
            outcomes[backend][name] = Outcome(values, _calls_by_schedule() - before)
        if backend == REFERENCE:
            kept.append(dist.group.WORLD)
        dist.destroy_process_group()
    return outcomes


def _begin(backend: str, rank: int, size: int, name: str) -> None:
    """Make the default group, as any script would; the name is new each time."""
    import arborcast.torch_backend  # noqa: F401

    store = dist.FileStore(f"{os.environ['TEST_STORE']}-{name}-store", size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))


def _as_arrays(tensors: Values) -> list[Array]:
    """What a pipe takes without sharing memory with a process that ends."""
    return [tensor.detach().clone().numpy() for tensor in tensors]


def _differences(got: list[Array], expected: list[Array], tolerance: float = TOLERANCE) -> list[str]:
    assert len(got) == len(expected) > 0
    differences = []
    for index, (value, wanted) in enumerate(zip(got, expected, strict=True)):
        assert (value.dtype, value.shape) == (wanted.dtype, wanted.shape)
        limit = tolerance * np.abs(wanted).max(initial=0) if value.dtype.kind == "f" else 0
        difference = np.abs(value - wanted).max(initial=0)
        if not difference <= limit:
            differences.append(f"value {index} is off by {difference}, allowed {limit}")
    return differences


def _calls_by_schedule() -> int:
    """Of all groups that this process has."""
    return sum(calls_by_schedule(group) for group in dist.distributed_c10d._world.pg_map)


@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.long)], ids=["few", "others"])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_gives_what_gloo_gives(family: str, long: bool) -> None:
    checks = [name for name in FAMILIES[family] if (name in LONG[family]) == long]
    outcomes = run_ranks(RANKS, _run_family, family, checks, backend=None, environ=ENVIRON, timeout_s=200)
    wrong = []
    for rank, backend, check in product(range(RANKS), BACKENDS[family][1:], checks):
        got, expected = outcomes[rank][backend][check], outcomes[rank][REFERENCE][check]
        texts = _differences(got.values, expected.values, TOLERANCES.get(check, TOLERANCE))
        if not got.by_schedule and check not in WITHOUT_SCHEDULES:
            texts.append("no call went by a schedule")
        wrong += [f"rank {rank}, {backend}, {check}: {text}" for text in texts]
    assert not wrong, "\n".join(wrong)


# --------------------------------------------------------------------- checkpoints from group to group


def _train_through_checkpoints(rank: int, size: int, *ways: tuple[str, ...]) -> list[list[Array]]:
    """For each way: a step of FSDP2 on each of its backends, from one to the next by a checkpoint.

    What the last step gave: loss and parameters.
    """
    return [_along(way, f"way-{number}", rank, size) for number, way in enumerate(ways)]


def _along(way: tuple[str, ...], name: str, rank: int, size: int) -> list[Array]:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    folder = f"{os.environ['TEST_STORE']}-{name}"
    values: Values = []
    for turn, backend in enumerate(way):
        _begin(backend, rank, size, f"{name}-{turn}")
        model = small_model(seed=turn)  # other weights each time: only the checkpoint has the right ones
        fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if turn:
            weights, moments = get_state_dict(model, optimizer)
            checkpoint.load({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{turn - 1}")  # type: ignore[attr-defined]
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        values = train(turn, model, optimizer, steps=1)
        weights, moments = get_state_dict(model, optimizer)
        checkpoint.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{turn}")  # type: ignore[attr-defined]
        assert backend == REFERENCE or _calls_by_schedule() > 0
        dist.destroy_process_group()
    return _as_arrays(values)


def test_checkpoints_pass_from_group_to_group() -> None:
    ways = (("gloo", "synth", "gloo"), ("gloo", "gloo", "gloo"))
    for rank, (mixed, pure) in enumerate(
        run_ranks(RANKS, _train_through_checkpoints, *ways, backend=None, environ=ENVIRON)
    ):
        assert not _differences(mixed, pure), f"rank {rank}"

"""A schedule as an operation of torch on tensors of real processes, traced by torch.compile as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from arborcast import synth, topologies
from arborcast.synth.collective import NAMED_KINDS, Collective
from arborcast.synth.errors import InputError
from tests.device.needs_triton import NEEDS_TRITON
from tests.device.rank_processes import sleep_while_waiting
from tests.support.definition import define
from tests.support.ranks import run_ranks

pytestmark = NEEDS_TRITON

INTERPRETED = {"TRITON_INTERPRET": "1"}
RANKS = 3
FEW = ["allgather", "allreduce", "scatter"]


def calls(rank: int, size: int, kinds: list[str]) -> dict[str, tuple[bool, bool]]:
    """Of each kind, whether the operation gives what it must, and whether it does so in a traced function."""
    from arborcast.backends import device

    sleep_while_waiting()
    fabric, found = topologies.load(f"ring:{size}"), {}
    for kind in kinds:
        collective = Collective.on(fabric, kind, root=1)
        call = device.compile(synth.solve(fabric, collective), device="cpu", piece=64, lanes=2)
        traced = torch.compile(lambda given, call=call: call(2 * given) + 1, fullgraph=True, backend="eager")
        tensors = [torch.arange(30.0).reshape(6, 5) + 100 * one for one in range(size)]
        wanted = define(collective, [one.flatten().long().numpy() for one in tensors])[rank]
        want = torch.zeros(0, 5) if wanted is None else torch.from_numpy(wanted).reshape(-1, 5).float()
        found[kind] = (
            torch.equal(call(tensors[rank]), want),
            torch.equal(traced(tensors[rank]), 2 * want + 1),
        )
    return found


@pytest.mark.parametrize(
    "kinds",
    [FEW, pytest.param(sorted({*NAMED_KINDS} - {*FEW}), marks=pytest.mark.long)],
    ids=["few", "others"],
)
def test_every_kind_gives_what_it_must_also_where_it_is_traced(kinds: list[str]) -> None:
    for found in run_ranks(RANKS, calls, kinds, environ=INTERPRETED):
        assert found == dict.fromkeys(kinds, (True, True))


def sums_of_all_pairs(rank: int, size: int, dtype_name: str) -> int:
    """Sums that are not torch's of float32, rounded by it, bit for bit, of all pairs of 8 bits."""
    from arborcast.backends import device

    sleep_while_waiting()
    dtype, codes = getattr(torch, dtype_name), torch.arange(256).to(torch.uint8)
    pairs = [codes.repeat_interleave(256).view(dtype), codes.repeat(256).view(dtype)]
    schedule = synth.solve(topologies.load("full:2"), "allreduce")
    got = device.compile(schedule, dtype=dtype, device="cpu")(pairs[rank])
    want = (pairs[0].float() + pairs[1].float()).to(dtype)
    are_numbers = ~(got.float().isnan() & want.float().isnan())
    return int(((got.view(torch.uint8) != want.view(torch.uint8)) & are_numbers).sum())


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bits_are_rounded_as_torch_does(dtype: str) -> None:
    """Ties, numbers below the least normal one, what is too large, infinities and NaN among them."""
    assert run_ranks(2, sums_of_all_pairs, dtype, environ=INTERPRETED) == [0, 0]


def refusals(rank: int, size: int) -> list[str]:
    from arborcast.backends import device

    sleep_while_waiting()
    fabric = topologies.load(f"full:{size}")
    allgather, scattered = (synth.solve(fabric, kind) for kind in ("allgather", "reduce-scatter"))
    call = device.compile(scattered, device="cpu")
    asked: list[Any] = [
        lambda: device.compile(allgather if rank else scattered, device="cpu"),
        lambda: device.compile(allgather, device="cpu", lanes=1 + rank),
        lambda: device.compile(synth.solve(topologies.load("full:3"), "allgather"), device="cpu"),
        lambda: device.compile(allgather, device="cpu", op="mean"),
        lambda: call(torch.zeros(5)),
        lambda: call(torch.zeros(4, dtype=torch.int32)),
    ]
    said = []
    for each in asked:
        with pytest.raises(InputError) as refused:
            each()
        said.append(str(refused.value))
    dist.barrier()
    return said


def test_what_does_not_fit_is_refused_on_every_rank() -> None:
    for rank, said in enumerate(run_ranks(2, refusals, environ=INTERPRETED)):
        assert said == [
            f"device: schedule must be the same on all ranks, differs on {rank} and {1 - rank}",
            f"device: lanes must be the same on all ranks, differs on {rank} and {1 - rank}",
            "device: the schedule is for 3 ranks, the group has 2",
            "device: operation must be one of sum, max, min, got mean",
            "device: reduce-scatter needs a first dimension that 2 ranks divide, got shape (5,)",
            "device: input must be contiguous, of 4 elements of torch.float32 on cpu, "
            "got 4 of torch.int32 on cpu",
        ]


def compiled_alone(rank: int, size: int) -> str:
    from arborcast.backends import device

    with pytest.raises(InputError) as refused:
        device.compile(synth.solve(topologies.load("full:2"), "allreduce"), device="cpu")
    return str(refused.value)


def test_a_cpu_needs_the_interpreter() -> None:
    said = "device: cpu needs Triton's interpreter: set TRITON_INTERPRET=1 before triton is imported"
    assert run_ranks(2, compiled_alone, environ={"TRITON_INTERPRET": "0"}) == [said, said]

"""The kernel in Triton's interpreter across processes: exact results for all kinds, types and lengths."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from arborcast.backends.device.plan import DevicePlan
from arborcast.synth.errors import InputError
from tests.device.needs_triton import NEEDS_TRITON
from tests.device.rank_processes import Case, run_cases
from tests.support.drawn_schedules import ring_allreduce

pytestmark = NEEDS_TRITON

TYPES = ("float32", "float64", "bfloat16", "float16", "int8", "uint8", "int16", "int32", "int64")

FABRICS = ("full:2", "full:4", "ring:3", "ring:5", "torus:2x3", "hypercube:3", "dgx1", "dgx-a100")

FEW = [
    Case("full:2", "allreduce", (37, 5, 0, 64)),
    Case("full:3", "allreduce", (33, 33), dtype="bfloat16", in_place=True, push=False),
    Case("ring:4", "allgather", (37,), dtype="int32", late=1),
    Case("dgx1", "allreduce", (37, 5), ranks=(0, 1, 4), ipc=True),
    Case("full:3", "allreduce", (150,), dtype="float8_e4m3fn", bits=True),
    Case("full:2", "allgather", (37,), dtype="float8_e5m2", bits=True),
]

BY_IPC = [
    Case(fabric, kind, (75, 13), ranks=ranks, push=push, ipc=True)
    for fabric, ranks in (("dgx1", ()), ("dgx1", (0, 1, 2, 3, 4, 5)), ("dgx1", (0, 1, 4)), ("a100-pcie", ()))
    for kind, push in (("allreduce", True), ("allreduce", False), ("allgather", False))
]


def all_cases() -> Iterator[Case]:
    for push in (True, False):
        for dtype in TYPES:
            yield Case("full:4", "allreduce", (151, 150), dtype=dtype, push=push)
        for dtype in (
            "float8_e4m3fn",
            "float8_e5m2",
            "float16",
            "float32",
        ):  # bfloat16 the interpreter cuts off
            for kind in ("allreduce", "reduce-scatter", "allgather"):
                yield Case("full:4", kind, (151, 150), dtype=dtype, push=push, bits=True)
        for fabric in FABRICS:
            for kind in ("allreduce", "allgather"):
                yield Case(fabric, kind, (77, 13), push=push)
        for fabric in ("dgx1", "full:3"):
            for kind in ("reduce-scatter", "alltoall"):
                yield Case(fabric, kind, (67, 13), push=push)
            for kind in ("broadcast", "reduce", "gather", "scatter"):
                yield Case(fabric, kind, (67, 13), {"root": 2}, push=push)
        for method in ("ring", "halving-doubling", "recursive-doubling", "swing", "binary-tree"):
            yield Case("full:8", "allreduce", (75, 13), {"method": method}, push=push)
        for ranks in ((0, 1, 2, 3, 4, 5), (0, 1, 4)):
            yield Case("dgx1", "allreduce", (75, 13), ranks=ranks, push=push)
        yield Case("a100-pcie", "allreduce", (75, 13), push=push)
        yield Case("ring:3", "allreduce", (1, 7, 332, 0, 5), push=push)
        yield Case("ring:3", "allreduce", (100, 100), in_place=True, push=push)
        yield Case("ring:3", "allreduce", (100, 100, 100), late=1, push=push)
        yield Case("ring:3", "allreduce", (200, 200), begun=2**31 - 4, push=push)
        yield Case("ring:3", "allreduce", (200,), op="max", push=push)
        yield Case("ring:3", "allreduce", (200,), op="min", dtype="float16", push=push)


@pytest.fixture(scope="module")
def outcomes() -> list[str]:
    """Of some cases, the last without its second rank, in one start of Triton."""
    return run_cases([*FEW, Case("full:2", "allreduce", (8,), missing=1)])


def test_the_kernel_is_exact(outcomes: list[str]) -> None:
    assert outcomes[:-1] == ["right"] * len(FEW)


def test_tensors_that_do_not_fit_are_refused() -> None:
    import torch

    from arborcast.backends.device.executor import DeviceExecutor
    from arborcast.backends.device.memory import SharedMemory

    plan = DevicePlan(ring_allreduce(3))
    rank = DeviceExecutor(plan, 0, SharedMemory(plan.shape, 4), torch.float32)
    whole = torch.zeros(9)
    with pytest.raises(
        InputError, match=r"input must be contiguous, of 9 elements of torch.float32 on cpu, got 8 of"
    ):
        rank(whole[:8], whole, 9)
    with pytest.raises(InputError, match=r"output must be .* got 9 of torch.int32"):
        rank(whole, whole.int(), 9)
    with pytest.raises(InputError, match=r"output must be .* on cpu, got 9 of torch.float32 on meta"):
        rank(whole, whole.to("meta"), 9)
    with pytest.raises(InputError, match=r"got 9 of torch.float32 on cpu, not contiguous"):
        rank(torch.zeros(18)[::2], whole, 9)
    with pytest.raises(InputError, match="operation must be one of sum, max, min, got mean"):
        rank(whole, whole, 9, "mean")
    with pytest.raises(
        InputError, match=r"type must be one of 11 of the plan's item size, got torch.float16"
    ):
        DeviceExecutor(plan, 0, SharedMemory(plan.shape, 4), torch.float16)


def test_a_missing_peer_ends_the_call_in_time(outcomes: list[str]) -> None:
    assert outcomes[-1] == "rank 0: device: rank 0 waited 3.0 s for a peer in allreduce of 16 elements"


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_the_kernel_is_exact_for_all_kinds_and_types() -> None:
    cases = [*all_cases(), *BY_IPC]
    assert len(cases) >= 80
    assert [(case, said) for case, said in zip(cases, run_cases(cases), strict=True) if said != "right"] == []

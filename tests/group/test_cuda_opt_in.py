"""Which groups run schedules on CUDA tensors; the groups are real, the NCCL in them is gloo."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from arborcast.backends import Options
from arborcast.backends.group import process_group
from tests.support.ranks import run_ranks


def opted_in(rank: int, size: int, topology: str | None) -> bool:
    def new_nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return process_group.new_gloo(store, rank, size, timeout)  # type: ignore[attr-defined]

    process_group.has_nccl = lambda: True  # type: ignore[attr-defined]
    process_group.new_nccl = new_nccl  # type: ignore[attr-defined]
    import arborcast.torch_backend  # noqa: F401

    options: Any = Options(topology=topology, prepare=())
    group: Any = dist.new_group(backend="synth", pg_options=options)
    return group._cuda is not None


@pytest.mark.parametrize(("topology", "is_opted_in"), [(None, False), ("full:2", True)])
def test_cuda_tensors_stay_with_nccl_unless_the_fabric_is_described(
    topology: str | None, is_opted_in: bool
) -> None:
    assert run_ranks(2, opted_in, topology) == [is_opted_in] * 2

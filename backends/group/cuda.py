"""The CUDA side of a group: an inner NCCL, and synthesized allreduce and broadcast on its messages.

Opt-in: only on a fabric that somebody described (ARBORCAST_TOPOLOGY or options); on one that is assumed NCCL
does everything. Nothing here has run on a GPU yet; `executors.torch_p2p` says which of its parts have run on
CPU tensors. What schedules do not serve, and small messages, NCCL does by itself.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from arborcast.backends.executors.torch_p2p import Executor
from arborcast.backends.tensors.torch_compat import Store
from arborcast.synth.collective import Kind
from arborcast.synth.implicit_schedule import AnySchedule

NCCL_BELOW = 1 << 20
"""Bytes below which NCCL serves by itself: an estimate, not measured on a GPU yet."""


def has_nccl() -> bool:
    """Whether there are GPUs and torch can talk to them over NCCL."""
    return torch.cuda.is_available() and dist.is_nccl_available()


def new_nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """NCCL on all ranks of a group; it connects at its first call."""
    options = c10d.ProcessGroupNCCL.Options()
    cast(Any, options)._timeout = timeout
    return c10d.ProcessGroupNCCL(store, rank, size, options)


class CudaSchedules:
    """Runs schedules on the CUDA tensors of one group, on the calling thread and its streams.

    Args:
        group: with NCCL as its backend for CUDA tensors.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._executors: dict[tuple[int, torch.device], Executor] = {}
        self.calls: Counter[Kind] = Counter()

    def allreduce(self, schedule: AnySchedule, tensor: Tensor, op: dist.ReduceOp) -> dist.Work:
        """Combine the tensors of all ranks, in place; the work lets streams wait, not the host."""
        self.calls[Kind.ALLREDUCE] += 1
        return _work(self._executor(schedule, tensor.device).allreduce(tensor, op, async_op=True))

    def broadcast(self, schedule: AnySchedule, tensor: Tensor) -> dist.Work:
        """Fill the tensor on all ranks with the root's."""
        self.calls[Kind.BROADCAST] += 1
        return _work(self._executor(schedule, tensor.device).broadcast(tensor, async_op=True))

    def _executor(self, schedule: AnySchedule, device: torch.device) -> Executor:
        """One per schedule and device, so that plans are made once; all ranks make them together."""
        key = (id(schedule), device)
        executor = self._executors.get(key)
        if executor is None:
            executor = self._executors[key] = Executor(schedule, self._group, device=device)
        return executor


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "asynchronous calls return work"
    return work

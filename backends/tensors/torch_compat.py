"""Names of torch.distributed that its type stubs lack or misplace, in one place."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

Store = c10d.Store
PrefixStore = c10d.PrefixStore
FileStore = c10d.FileStore

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Their names since torch 2.13."""

_NOBODY_SENDS = (1 << 31) - 1
"""A tag."""


def new_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A process group of gloo with all its methods; the stubs know none of them."""
    return c10d.ProcessGroupGloo(store, rank, size, timeout)


def break_gloo(gloo: Any) -> None:
    """End all calls of a gloo group, now and later, here and on ranks that wait for this one.

    Gloo has no such call: its `abort` does nothing. But a receive that waits in vain closes all connections.
    """
    if gloo.size() > 1:
        peer = (gloo.rank() + 1) % gloo.size()
        with contextlib.suppress(RuntimeError):
            gloo.recv([torch.empty(1)], peer, _NOBODY_SENDS).wait(timedelta(milliseconds=1))


def forget_meshes() -> None:
    """Have `DTensor` forget what it derived for meshes: it takes a new one for an old one of the same ranks.

    Its results would then name process groups that may be gone; torch forgets nothing.
    """
    from torch.distributed.tensor import DTensor

    propagator = cast(Any, DTensor)._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()
    with contextlib.suppress(AttributeError):  # has a cache of its own since torch 2.10
        cast(Any, torch._C)._clear_DTensor_sharding_propagator_cache()


def own_connection(store: Store) -> Store:
    """The same store by a connection of its own: one of a TCP store serves one thread at a time."""
    return cast(Store, cast(Any, store).clone())


def work_of(future: torch.futures.Future[Any]) -> dist.Work:
    """Work that is complete when a future is."""
    return cast(dist.Work, cast(Any, c10d)._create_work_from_future(future))


def split(tensor: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
    """`Tensor.split`, which has no types."""
    return cast(tuple[Tensor, ...], cast(Any, tensor).split(lengths))

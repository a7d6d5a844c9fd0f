"""Names of torch.distributed that its type stubs lack or misplace, in one place."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

Store = c10d.Store
PrefixStore = c10d.PrefixStore
FileStore = c10d.FileStore
DistStoreError: type[RuntimeError] = cast(Any, torch._C)._DistStoreError

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Their names since torch 2.13."""

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"

_NOBODY_SENDS = (1 << 31) - 1
"""A tag."""


class _Gloo(c10d.ProcessGroupGloo):
    """A gloo that says when torch sets its timeout; torch asks a group for its gloo, and tells that."""

    timeout_changed: Callable[[timedelta], None] | None = None

    def _set_default_timeout(self, timeout: timedelta) -> None:
        cast(Any, super())._set_default_timeout(timeout)
        if self.timeout_changed is not None:
            self.timeout_changed(timeout)


def timeout_of(store: Store) -> timedelta:
    """How long a store waits for a key."""
    return cast(timedelta, cast(Any, store).timeout)


def new_gloo(store: Store, rank: int, size: int, timeout: timedelta, address: str | None = None) -> Any:
    """A process group of gloo with all its methods; the stubs know none of them.

    It connects two ranks at their first message, and so waits for none here; by that address of this host, or
    by the interfaces that the environment names.
    """
    gloo: Any = _Gloo
    options = gloo._Options()
    options._timeout = timeout
    options._threads = 2  # as torch has it
    names = [name for name in os.environ.get(INTERFACE_VARIABLE, "").split(",") if name]
    if address is not None:
        options._devices = [gloo.create_device(hostname=address, lazy_init=True)]
    else:
        options._devices = [gloo.create_device(interface=name, lazy_init=True) for name in names] or [
            gloo.create_default_device(lazy_init=True)
        ]
    return gloo(store, rank, size, options)


_Class = TypeVar("_Class", bound=type)


def outside_compilers(cls: _Class) -> _Class:
    """Have `torch.compile` neither look into the methods of a class nor compile what they call.

    Torch's own means, `torch.compiler.disable`, imports the whole compiler, which takes seconds, and costs
    something at each call.
    """
    frames: Any = cast(Any, torch._C)._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    for method in filter(inspect.isfunction, vars(cls).values()):
        cast(Any, method)._torchdynamo_disable = True
        frames.set_code_exec_strategy(method.__code__, frames._FrameExecStrategy(skip, skip))
    return cls


def new_holder_of_names(rank: int, size: int) -> Any:
    """A backend for tensors without data ("meta"), whose collectives do nothing; costs nothing.

    To C++ a group has its backends' name, and none where it has no backend.
    """
    return cast(Any, c10d).FakeProcessGroup._create_internal(rank, size)


def has_nccl() -> bool:
    """Whether there are GPUs and torch can talk to them over NCCL."""
    return torch.cuda.is_available() and dist.is_nccl_available()


def is_of_nccl(options: object) -> bool:
    """Whether what a caller gave as `pg_options` is NCCL's."""
    nccl = getattr(c10d, "ProcessGroupNCCL", None)
    return nccl is not None and isinstance(options, nccl.Options)


def new_nccl(store: Store, rank: int, size: int, timeout: timedelta, options: Any = None) -> Any:
    """NCCL on all ranks of a group, with its own options or without; it connects at its first call."""
    options = options or c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return c10d.ProcessGroupNCCL(store, rank, size, options)


def asked_of_caller(name: str) -> tuple[frozenset[str] | None, torch.device | None]:
    """What torch was asked for when it has a group made, which it does not tell the backend that makes it.

    Returns:
        The devices whose tensors go by the backend of this name, as in "cpu:gloo,cuda:synth", None for all;
        and the `device_id` that was given.
    """
    code = dist.distributed_c10d._new_process_group_helper.__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is None:
        return None, None
    by_device = cast(Any, frame.f_locals["backend_config"]).get_device_backend_map()
    devices = frozenset(device for device, backend in by_device.items() if backend == name)
    return devices, cast("torch.device | None", frame.f_locals["device_id"])


class PeerCalls:
    """Sends and receives by a backend that takes several as one call, such as NCCL.

    Those of one `torch.distributed.batch_isend_irecv` must be one call: one after another, two ranks that
    send each other something would wait for ever. Torch sees to it only for groups of its own class, so that
    here the function is known by its frame.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._batch: Any = None
        self._begun = 0

    def call(self, method: str, *arguments: Any) -> dist.Work | None:
        """The work; None for all but the last of a batch, whose work is that of all."""
        operations = _operations_of_caller()
        if operations is None:
            return cast(dist.Work, getattr(self._backend, method)(*arguments))
        if operations is not self._batch:
            self._batch, self._begun = operations, 0
            self._backend._start_coalescing()
        getattr(self._backend, method)(*arguments)
        self._begun += 1
        if self._begun < len(operations):
            return None
        self._batch = None
        return cast(dist.Work, self._backend._end_coalescing())


def _operations_of_caller() -> list[dist.P2POp] | None:
    """What `batch_isend_irecv` was given, where it is among the next callers of the group."""
    code = inspect.unwrap(dist.batch_isend_irecv).__code__
    frame = inspect.currentframe()
    for _ in range(6):  # this, `call`, the group's two, torch's `isend`, the function itself
        if frame is None or frame.f_code is code:
            break
        frame = frame.f_back
    else:
        return None
    return None if frame is None else cast("list[dist.P2POp]", frame.f_locals["p2p_op_list"])


BREAK_S = 1.0
"""How long to wait for a gloo to be broken."""


def break_gloo(gloo: Any, *, has_ring: bool = False) -> None:
    """End all calls of a gloo group, now and later, here and on ranks that wait for this one.

    Gloo has no such call: its `abort` does nothing. But a receive that waits in vain closes all connections.
    One from anybody makes none before; but where another rank has closed one already, gloo ends the process.

    Args:
        gloo: the group.
        has_ring: whether all ranks make calls on it together, so that the next rank is connected with this
            one; else it may not be, and would be waited for as long as any other rank.
    """
    if gloo.size() == 1:
        return

    def wait_in_vain() -> None:
        peer, nothing = (gloo.rank() + 1) % gloo.size(), [torch.empty(1)]
        with contextlib.suppress(RuntimeError):
            work = (
                gloo.recv(nothing, peer, _NOBODY_SENDS)
                if has_ring
                else gloo.recv_anysource(nothing, _NOBODY_SENDS)
            )
            work.wait(timedelta(milliseconds=1))

    breaking = threading.Thread(target=wait_in_vain, daemon=True)
    breaking.start()
    breaking.join(BREAK_S)


def forget_meshes() -> None:
    """Have `DTensor` forget what it derived for meshes: it takes a new one for an old one of the same ranks.

    Its results would then name process groups that may be gone; torch forgets nothing.
    """
    from torch.distributed.tensor import DTensor

    propagator = cast(Any, DTensor)._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()
    with contextlib.suppress(AttributeError):  # has a cache of its own since torch 2.10
        cast(Any, torch._C)._clear_DTensor_sharding_propagator_cache()


def hooks_of_saved_tensors() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """What packs and unpacks what autograd saves here, so that hooks inside can pass on what is not theirs.

    Torch calls the innermost pair of `saved_tensors_hooks` alone.
    """
    pair: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return (lambda it: it, lambda it: it) if pair is None else pair


def future_of(work: Any) -> Any:
    """The future of a work of gloo; None where it has none, as those of its reduce-scatters."""
    try:
        return work.get_future()
    except RuntimeError:
        return None


def split(tensor: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
    """`Tensor.split`, which has no types."""
    return cast(tuple[Tensor, ...], cast(Any, tensor).split(lengths))

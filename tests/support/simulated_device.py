"""A device that there is not: tensors on it have values, and whatever the host copies or waits for is noted.

    with simulated_device() as device:
        Trainer(model, plan, loss_fn, optimizer, device="simulated", collectives="simulated")
        device.noted                      # Counter({"copied to it": 12, "waited for it": 1})

As with a GPU, a tensor on it and one in host memory do not meet in one operator; its backend for
`torch.distributed` ("simulated") knows no tags, and fails where two ranks send each other something over one
group, as NCCL might wait for ever. Products of matrices first wait for all messages that this process has
begun, as a GPU does where an operator loads code. Operators compute in host memory, with its random numbers.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from arborcast.backends.tensors.torch_compat import new_gloo

NAME = "simulated"
HOST = torch.device("cpu")
ATEN = torch.ops.aten


class OnDevice(Tensor):
    """A tensor on the device; `host` has its values."""

    host: Tensor

    def __new__(cls, host: Tensor) -> OnDevice:
        made: OnDevice = Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=f"{NAME}:0",
        )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stubs know it as a mode's
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


_noted: Counter[str] = Counter()
_open: list[Any] = []
"""Messages that are under way."""

LOADING = (ATEN.addmm.default, ATEN.mm.default)


def _is_named(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _values(value: Any) -> Any:
    if isinstance(value, OnDevice):
        return value.host
    return HOST if isinstance(value, torch.device) and value.type == NAME else value


def _run(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    tensors = [it for it in tree_leaves((args, kwargs)) if isinstance(it, Tensor)]
    there = [it for it in tensors if isinstance(it, OnDevice)]
    if func is ATEN.record_stream.default:
        return None
    while func in LOADING and _open:
        _open.pop(0).wait()
    device = kwargs.get("device")
    target = _is_named(device) if device is not None else bool(there)
    if func in (ATEN._to_copy.default, ATEN.copy_.default):
        source = args[func is ATEN.copy_.default]
        target = isinstance(args[0], OnDevice) if func is ATEN.copy_.default else target
        waits = not (kwargs.get("non_blocking") or args[2:] == (True,))
        if target and not isinstance(source, OnDevice):
            _noted["waited while copying to it" if waits else "copied to it"] += 1
        elif isinstance(source, OnDevice) and not target:
            _noted["waited for it" if waits else "copied from it"] += 1
    else:
        if func is ATEN._local_scalar_dense.default:
            _noted["waited for it"] += 1
        for it in tensors:
            if there and not isinstance(it, OnDevice) and it.dim():
                raise RuntimeError(f"{func}: expected all tensors to be on one device, got two")
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    made = func(*tree_map(_values, args), **tree_map(_values, dict(kwargs)))
    known = {id(it.host): it for it in there}

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor) or not target:
            return value
        return known[id(value)] if id(value) in known else OnDevice(value)

    return tree_map(wrapped, made)


class Factories(TorchDispatchMode):
    """Lets tensors be made on the device; each thread has its own modes."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if _is_named((kwargs or {}).get("device")) or any(issubclass(it, OnDevice) for it in types):
            return _run(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Device:
    """What torch asks of the module of a device; and its random numbers, which are the host's."""

    noted = _noted

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, number: int) -> None:
        assert number == 0

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        """The host's is set beside it."""

    def manual_seed(self, number: int) -> None:
        torch.default_generator.manual_seed(number)

    def manual_seed_all(self, number: int) -> None:
        """`manual_seed` of torch does so."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def current_stream(self, device: Any = None) -> torch.Stream:
        return torch.Stream(f"{NAME}:0")

    def stream(self, stream: torch.Stream) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self, device: Any = None) -> None:
        _noted["waited for all"] += 1


class _Backend(dist.ProcessGroup):
    """By gloo, without tags; messages go one way only."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo = new_gloo(store, rank, size, timeout)
        self._ways: set[bool] = set()

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return NAME

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        self._one_way(peer > self.rank())
        return _begun(self._gloo.send([it.host for it in tensors], peer, 0))

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        self._one_way(peer < self.rank())
        return _begun(self._gloo.recv([it.host for it in tensors], peer, 0))

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        return self._gloo.allreduce([it.host for it in tensors], opts or dist.AllreduceOptions())

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        return self._gloo.broadcast([it.host for it in tensors], opts or dist.BroadcastOptions())

    def all_gather_single(self, output: Any, given: Any, opts: Any = None) -> Any:
        return self._gloo._allgather_base(output.host, given.host)

    _allgather_base = all_gather_single

    def abort(self) -> None:
        """A rank that dies closes its connections, which is all that tests need."""

    def shutdown(self) -> None:
        """Its connections end with it."""

    def _one_way(self, is_up: bool) -> None:
        self._ways.add(is_up)
        assert len(self._ways) == 1, "messages both ways over one group"


class _Message(dist.Work):
    """Waited for by gloo once, however often it is asked for."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._work = work
        self._lock = threading.Lock()

    def wait(self, timeout: Any = None) -> bool:
        with self._lock:
            if self._work is not None:
                self._work.wait()
                self._work = None
        return True


def _begun(work: Any) -> _Message:
    message = _Message(work)
    _open.append(message)
    return message


def _created(store: Any, rank: int, size: int, timeout: timedelta) -> _Backend:
    return _Backend(store, rank, size, timeout)


@contextmanager
def simulated_device() -> Iterator[_Device]:
    """Inside there is such a device; once in a process."""
    device = _Device()
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=device)
    dist.Backend.register_backend(NAME, _created, devices=[NAME])
    torch.__future__.set_swap_module_params_on_conversion(True)  # tensors of other classes stay objects
    with Factories():
        yield device

"""A store without a past: torchrun keeps the store of a job when it starts the processes again, keys and all.

Whoever reads an address there, as gloo does, may get that of a process that has died. So the ranks of a group
first find each other by numbers that nobody has used before, and then keep to a part named by one of them.

    rank 1, 2, ...: hello/RANK = a number of this process      rank 0: welcome/that number = the part's name
                    here/the part's name/RANK                          until all are here
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from datetime import timedelta

from arborcast.backends.errors import ExecutionError
from arborcast.backends.tensors.torch_compat import PrefixStore, Store

_LOOK_EVERY_S = 0.005
_NUMBER_BYTES = 8


def fresh_store(store: Store, rank: int, size: int, *, timeout_s: float) -> Store:
    """The part of a store that only the present processes of a group know; all ranks make this call.

    Args:
        store: of the group; it may hold anything that earlier processes of the same group have left.
        rank: this one.
        size: ranks of the group.
        timeout_s: how long to wait for the others.

    Raises:
        ExecutionError: a rank did not come in time; the message names it.
    """
    number = secrets.token_hex(_NUMBER_BYTES)
    if rank == 0:
        _gather(store, number, size, timeout_s)
        return PrefixStore(number, store)
    store.set(f"hello/{rank}", number)
    try:
        store.wait([f"welcome/{number}"], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise _late(rank, [0], timeout_s) from error
    name = store.get(f"welcome/{number}").decode()
    store.set(f"here/{name}/{rank}", "")
    return PrefixStore(name, store)


def _gather(store: Store, name: str, size: int, timeout_s: float) -> None:
    """On rank 0: welcome everybody, until all have heard it; a number may be that of a process that died."""
    missing = set(range(1, size))
    welcomed: dict[int, bytes] = {}
    end = time.monotonic() + timeout_s
    while True:
        for rank in sorted(missing):
            if rank in welcomed and store.check([f"here/{name}/{rank}"]):
                missing.remove(rank)
            elif store.check([f"hello/{rank}"]):
                number = store.get(f"hello/{rank}")
                if welcomed.get(rank) != number:
                    store.set(f"welcome/{number.decode()}", name)
                    welcomed[rank] = number
        if not missing:
            return
        if time.monotonic() > end:
            raise _late(0, missing, timeout_s)
        time.sleep(_LOOK_EVERY_S)


def _late(rank: int, missing: Iterable[int], timeout_s: float) -> ExecutionError:
    who = ", ".join(map(str, sorted(missing)))
    return ExecutionError(f"rank {rank} waited {timeout_s:g} s for rank {who} to make the group, in vain")

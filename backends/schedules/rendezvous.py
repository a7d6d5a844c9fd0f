"""What the ranks of a group tell each other through its store: that they are there, settings, tables.

torchrun keeps the store of a job when it starts the processes again, keys and all: whoever reads an address
there may get that of a process that has died. So ranks first find each other by numbers that nobody has used
before, and then keep to a fresh key prefix, named by one of them (`fresh_store`):

    rank 1, 2, ...: hello/RANK = a number of this process      rank 0: welcome/that number = the prefix
                    here/the prefix/RANK                               until all are here

What goes wrong at rank 0 goes wrong everywhere: its error travels as its answer would, so that no rank waits
for what will never come, or runs something else.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from arborcast.backends.errors import ExecutionError
from arborcast.backends.schedules.table import Table
from arborcast.backends.tensors.torch_compat import PrefixStore, Store
from arborcast.backends.transport.addresses import boot_id
from arborcast.synth.errors import InfeasibleError, InputError, TimedOutError

PART_BYTES = 1 << 20
"""The longest value that is put into the store; not every store takes longer ones."""

_LOOK_EVERY_S = 0.005
_ERRORS: tuple[type[Exception], ...] = (InputError, InfeasibleError, TimedOutError, ExecutionError)
"""The errors that keep their class on the way; subclasses of them become them, others the last."""


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
    number = secrets.token_hex(8)
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


def compare_settings(store: Store, rank: int, size: int, settings: Mapping[str, object] | Exception) -> None:
    """Refuse to begin with ranks that would decide otherwise, on all ranks alike.

    Args:
        store: of the group.
        rank: this one.
        size: ranks of the group.
        settings: values that JSON can hold; or why this rank has none, which it is to raise itself.

    Raises:
        InputError: a rank differs from rank 0, or has no settings; names the setting and both values, or says
            why it has none. The same on all ranks.
    """
    said = {"refused": str(settings)} if isinstance(settings, Exception) else dict(settings)
    difference = _decide(store, "settings", rank, size, said, _difference)
    if difference:
        raise InputError(difference)


def are_on_one_host(store: Store, rank: int, size: int) -> bool:
    """Whether all ranks run under one kernel and in one network; the same answer on all of them."""
    network = Path("/proc/self/ns/net")
    inside = network.readlink() if network.is_symlink() else ""
    here = f"{boot_id() or socket.gethostname()} {inside}"
    return bool(_decide(store, "host", rank, size, here, lambda hosts: len(set(hosts)) == 1))


def _decide(
    store: Store, key: str, rank: int, size: int, said: object, decide: Callable[[Sequence[Any]], object]
) -> Any:
    """What rank 0 decides once it has heard what all ranks say; the same on all of them."""
    store.set(f"{key}/{rank}", json.dumps(said))
    if rank == 0:
        # All of them first: whoever leaves at once would break connections that others are still making.
        everybody = [json.loads(store.get(f"{key}/{other}")) for other in range(size)]
        store.set(key, json.dumps(decide(everybody)))
    return json.loads(store.get(key))


def _difference(everybody: Sequence[Mapping[str, object]]) -> str:
    """The first setting that is not as rank 0's; empty where all are alike."""
    first = everybody[0]
    for rank, settings in enumerate(everybody):
        if "refused" in settings:
            return f"rank {rank}: {settings['refused']}"
        for name, value in first.items():
            if settings[name] != value:
                ours, theirs = ("nothing" if it is None else it for it in (value, settings[name]))
                return (
                    f"{name}: must be the same on all ranks, got {ours} on rank 0 and {theirs} on rank {rank}"
                )
    return ""


def share_table(
    store: Store, key: str, rank: int, make: Callable[[], Table], *, timeout_s: float = 60.0
) -> Table:
    """The table that rank 0 makes, on every rank of a group.

    Args:
        store: of the group; any of torch's.
        key: used for nothing else in this store, ever.
        rank: of the group.
        make: makes the table; called on rank 0 only.
        timeout_s: how long the others wait for rank 0, which should be longer than `make` may take.

    Raises:
        InputError: `make` raised it on rank 0, as it may the next three.
        InfeasibleError: likewise.
        TimedOutError: likewise.
        ExecutionError: `make` raised it or anything else, rank 0 did not answer in time, or what arrived is
            not what it sent.
    """
    return _give(store, key, make) if rank == 0 else _take(store, key, rank, timeout_s)


def _give(store: Store, key: str, make: Callable[[], Table]) -> Table:
    try:
        table = make()
        data = table.to_bytes()
        parts = range(0, len(data), PART_BYTES)
        for index, start in enumerate(parts):
            store.set(f"{key}/{index}", data[start : start + PART_BYTES])  # type: ignore[arg-type]  # takes both
        # Last, so that whoever sees it finds the rest.
        store.set(key, json.dumps({"sha256": _hash(data), "bytes": len(data), "parts": len(parts)}))
    except Exception as error:
        kind = next((known for known in _ERRORS if isinstance(error, known)), None)
        line = " ".join(str(error).split())
        failure = kind(line) if kind else ExecutionError(f"{type(error).__name__}: {line}")
        store.set(key, json.dumps({"error": type(failure).__name__, "message": str(failure)}))
        raise failure from error
    return table


def _take(store: Store, key: str, rank: int, timeout_s: float) -> Table:
    try:
        store.wait([key], timedelta(seconds=timeout_s))
        head = json.loads(store.get(key))
    except Exception as error:  # torch has several classes for this
        raise ExecutionError(
            f"rank {rank}: rank 0 did not say within {timeout_s:g} s which schedules to run ({key}): "
            f"{' '.join(str(error).split())}"
        ) from error
    if "error" in head:
        kind = next(known for known in _ERRORS if known.__name__ == head["error"])
        raise kind(head["message"])
    data = b"".join(store.get(f"{key}/{index}") for index in range(head["parts"]))
    if _hash(data) != head["sha256"]:
        raise ExecutionError(
            f"rank {rank}: schedules of rank 0 ({key}): SHA-256 of {head['bytes']} bytes must be "
            f"{head['sha256']}, got {_hash(data)} of {len(data)} bytes"
        )
    return Table.from_bytes(data, f"schedules of rank 0 ({key})")


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

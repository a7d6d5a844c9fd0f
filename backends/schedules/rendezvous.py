"""What the ranks of a group tell each other through its store: that they are there, settings, tables.

torchrun keeps the store of a job when it starts the processes again, keys and all: whoever reads an address
there may get that of a process that has died. So ranks first find each other by numbers that nobody has used
before, and then keep to a fresh name, given by rank 0 (`meet`):

    rank 1, 2, ...: hello/RANK = a number of this process      rank 0: welcome/that number = the name
                    NAME/said/RANK = its settings                      until all have said theirs: NAME/all

What goes wrong at rank 0 goes wrong everywhere: its error travels as its answer would, so that no rank waits
for what will never come, or runs something else.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from arborcast.backends.errors import ExecutionError
from arborcast.backends.schedules.schedule_table import ScheduleTable
from arborcast.backends.tensors.torch_compat import Store, timeout_of
from arborcast.backends.transport.addresses import boot_id
from arborcast.synth.errors import InfeasibleError, InputError, TimedOutError

PART_BYTES = 1 << 20
"""The longest value that is put into the store; not every store takes longer ones."""

_PATIENCE_S = 0.05, 1.0
"""How long rank 0 waits for answers before it looks whether others have come: first, and then ever longer, at
most."""
_SAYING_S = 5.0
_ERRORS: tuple[type[Exception], ...] = (InputError, InfeasibleError, TimedOutError, ExecutionError)
"""The errors that keep their class on the way; subclasses of them become them, others the last."""


def meet(store: Store, rank: int, size: int, said: object, *, timeout_s: float) -> tuple[str, list[Any]]:
    """Find the present processes of a group; all ranks make this call.

    Args:
        store: of the group; it may hold anything that earlier processes of the same group have left.
        rank: this one.
        size: ranks of the group.
        said: what the others are to know of this one; anything that JSON can hold.
        timeout_s: how long to wait for the others.

    Returns:
        a prefix of keys that only these processes know, and what each of them has said.

    Raises:
        ExecutionError: a rank did not come in time; the message names it.
    """
    number = secrets.token_hex(8)
    if rank == 0:
        return number, _gather(store, number, said, size, timeout_s)
    store.set(f"hello/{rank}", number)
    try:
        store.wait([f"welcome/{number}"], timedelta(seconds=timeout_s))
        name = store.get(f"welcome/{number}").decode()
        store.set(f"{name}/said/{rank}", json.dumps(said))
        # Longer than rank 0, so that it can say for whom it waits in vain.
        store.wait([f"{name}/all"], timedelta(seconds=timeout_s + _SAYING_S))
        everybody = json.loads(store.get(f"{name}/all"))
    except RuntimeError as error:
        raise _late(rank, [0], timeout_s) from error
    if isinstance(everybody, str):
        raise ExecutionError(everybody)
    return name, list(everybody)


def _gather(store: Store, name: str, said: object, size: int, timeout_s: float) -> list[Any]:
    """On rank 0: welcome everybody until all have answered; a number may be that of a process that died."""
    end = time.monotonic() + timeout_s
    missing = _missing(store, {rank: f"hello/{rank}" for rank in range(1, size)}, timeout_s)
    is_late = bool(missing)
    missing = missing or dict.fromkeys(range(1, size), "")
    patience_s, longest_s = _PATIENCE_S
    welcomed: dict[int, bytes] = {}
    while missing and not is_late:
        for rank in missing:
            number = store.get(f"hello/{rank}")
            if welcomed.get(rank) != number:
                store.set(f"welcome/{number.decode()}", name)
                welcomed[rank] = number
        answers = {rank: f"{name}/said/{rank}" for rank in missing}
        missing = _missing(store, answers, min(patience_s, end - time.monotonic()))
        patience_s = min(2 * patience_s, longest_s)
        is_late = time.monotonic() > end
    if missing:
        error = _late(0, missing, timeout_s)
        store.set(f"{name}/all", json.dumps(str(error)))
        raise error
    others = (json.loads(store.get(f"{name}/said/{rank}")) for rank in range(1, size))
    text = json.dumps([said, *others])
    store.set(f"{name}/all", text)
    return list(json.loads(text))  # as everybody reads it


def _missing(store: Store, keys: Mapping[int, str], seconds: float) -> dict[int, str]:
    """Those of some keys that are not in the store, the sooner the better, or after that time."""
    try:
        if keys:
            store.wait(list(keys.values()), timedelta(seconds=max(0.001, seconds)))
    except RuntimeError:
        return {rank: key for rank, key in keys.items() if not store.check([key])}
    return {}


def _late(rank: int, missing: Iterable[int], timeout_s: float) -> ExecutionError:
    who = ", ".join(map(str, sorted(missing)))
    return ExecutionError(f"rank {rank} waited {timeout_s:g} s for rank {who} to make the group, in vain")


def are_on_one_host(store: Store, rank: int, size: int) -> bool:
    """Whether all ranks have one `whereabouts`; the same answer on all of them."""
    timeout_s = timeout_of(store).total_seconds()
    _, everybody = meet(store, rank, size, whereabouts(), timeout_s=timeout_s)
    return len(set(everybody)) == 1


def whereabouts() -> str:
    """What two processes have alike that run under one kernel and in one network."""
    network = Path("/proc/self/ns/net")
    inside = network.readlink() if network.is_symlink() else ""
    return f"{boot_id() or socket.gethostname()} {inside}"


def processors() -> list[int]:
    """Those of this host that this process may run on."""
    return (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )


def difference(everybody: Sequence[Mapping[str, object]]) -> str:
    """The first setting that is not as rank 0's; empty where all are alike.

    Args:
        everybody: the settings of all ranks; of one that has none, why, as "refused".
    """
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
    store: Store, key: str, rank: int, make: Callable[[], ScheduleTable | None], *, timeout_s: float = 60.0
) -> ScheduleTable | None:
    """The table that rank 0 makes, on every rank of a group; None on all where there is none yet.

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


def _give(store: Store, key: str, make: Callable[[], ScheduleTable | None]) -> ScheduleTable | None:
    try:
        table = make()
        if table is None:
            store.set(key, json.dumps({"parts": 0}))
            return None
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


def _take(store: Store, key: str, rank: int, timeout_s: float) -> ScheduleTable | None:
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
    if not head["parts"]:
        return None
    if head["sha256"] in _taken:  # from another group of this process
        return _taken[head["sha256"]]
    data = b"".join(store.get(f"{key}/{index}") for index in range(head["parts"]))
    if _hash(data) != head["sha256"]:
        raise ExecutionError(
            f"rank {rank}: schedules of rank 0 ({key}): SHA-256 of {head['bytes']} bytes must be "
            f"{head['sha256']}, got {_hash(data)} of {len(data)} bytes"
        )
    source = f"schedules of rank 0 ({key})"
    try:
        table = _taken[head["sha256"]] = ScheduleTable.from_bytes(data, source).check(source)
    except InputError as error:
        raise ExecutionError(f"rank {rank}: {error}") from error
    return table


_taken: weakref.WeakValueDictionary[str, ScheduleTable] = weakref.WeakValueDictionary()
"""The tables that this process has from others, by the hash of their bytes, as long as a group has them."""


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

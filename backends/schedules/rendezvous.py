"""What the ranks of a group tell each other through its store: that they are there, settings, tables.

torchrun keeps the store of a job when it starts the processes again, keys and all: whoever reads an address
there may get that of a process that has died. So ranks first find each other by numbers that nobody has used
before, and then keep to a fresh name, given by rank 0 (`meet`):

    rank 1, 2, ...: hello/RANK = a number of this process      rank 0: welcome/that number = the name, digest
                    NAME/said/RANK = its words                         until all have said theirs: NAME/all

Settings that must be the same are compared by that digest, and sent only where they differ; what follows from
all words is worked out on rank 0. So each rank writes and reads as much in a group of thousands as of two.

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
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from arborcast.backends.errors import ExecutionError
from arborcast.backends.schedules.schedule_table import ScheduleTable
from arborcast.backends.tensors.torch_compat import Store, timeout_of
from arborcast.backends.transport.addresses import boot_id
from arborcast.backends.transport.alarm import LOOK_S, Alarm
from arborcast.synth.errors import InfeasibleError, InputError, TimedOutError

PART_BYTES = 1 << 16
"""The longest value that is put into the store; not every store takes longer ones."""

SHOWN_CHARACTERS = 1000
"""Of a setting that differs; of what is longer the begin and a digest are shown."""

NAMED = 16
"""Of the ranks for which others wait in vain; more are only counted."""

_PATIENCE_S = 0.05, LOOK_S
"""How long rank 0 waits for answers before it looks whether others have come: first, and then ever longer, at
most."""
_SAYING_S = 5.0
_ERRORS: tuple[type[Exception], ...] = (InputError, InfeasibleError, TimedOutError, ExecutionError)
"""The errors that keep their class on the way; subclasses of them become them, others the last."""


def meet(
    store: Store,
    rank: int,
    size: int,
    said: object,
    conclude: Callable[[list[Any]], object],
    *,
    alike: Mapping[str, object] | None = None,
    timeout_s: float,
    alarm: Alarm | None = None,
) -> tuple[str, Any]:
    """Find the present processes of a group; all ranks make this call.

    Args:
        store: of the group; it may hold anything that earlier processes of the same group have left.
        rank: this one.
        size: ranks of the group.
        said: what this rank has to say; anything that JSON can hold, and short.
        conclude: what follows from the words of all ranks, in their order; likewise. Only rank 0 asks.
        alike: settings that must be the same on all ranks; of a rank that has none, why, as "refused".
        timeout_s: how long to wait for the others.
        alarm: known to all present ranks before; None where nothing is.

    Returns:
        a prefix of keys that only these processes know, and what `conclude` gave.

    Raises:
        ExecutionError: a rank did not come in time, or ended; the message names it.
        InputError: settings differ, or are refused.
    """
    settings = {name: _shown(value) for name, value in (alike or {}).items()}
    digest = _hash(json.dumps(alike, sort_keys=True).encode())
    try:
        if rank == 0:
            return _gather(store, digest, settings, said, conclude, size, timeout_s, alarm)
        number = secrets.token_hex(8)
        store.set(f"hello/{rank}", number)
        try:
            name, theirs = _awaited(store, f"welcome/{number}", rank, timeout_s, alarm).decode().split()
            words = {"said": said} if theirs == digest else {"said": said, "alike": settings}
            store.set(f"{name}/said/{rank}", json.dumps(words))
            # Longer than rank 0, so that it can say for whom it waits in vain.
            head = json.loads(_awaited(store, f"{name}/all", rank, timeout_s + _SAYING_S, alarm))
        except ExecutionError:
            raise
        except RuntimeError as error:
            raise _late(rank, [0], timeout_s) from error
    except ExecutionError as error:
        if alarm is not None:
            alarm.sound(str(error))
        raise
    if "error" in head:
        _raise(head)
    return name, head["conclusion"]


def _awaited(store: Store, key: str, rank: int, timeout_s: float, alarm: Alarm | None) -> bytes:
    """What rank 0 writes; each rank meanwhile sees to the one before it, so that none ends unnoticed."""
    end = time.monotonic() + timeout_s
    while _missing(store, {0: key}, min(LOOK_S, end - time.monotonic())):
        if alarm is not None:
            alarm.look([rank - 1])
        if time.monotonic() > end:
            raise _late(rank, [0], timeout_s)
    return store.get(key)


def _gather(
    store: Store,
    digest: str,
    settings: Mapping[str, object],
    said: object,
    conclude: Callable[[list[Any]], object],
    size: int,
    timeout_s: float,
    alarm: Alarm | None,
) -> tuple[str, Any]:
    """On rank 0: welcome everybody until all have answered; a number may be that of a process that died."""
    name, end = secrets.token_hex(8), time.monotonic() + timeout_s
    absent = {rank: f"hello/{rank}" for rank in range(1, size)}
    answers = {rank: f"{name}/said/{rank}" for rank in range(1, size)}
    patience_s, longest_s = _PATIENCE_S
    welcomed: dict[int, bytes] = {}
    try:
        while answers:
            absent = _missing(store, absent, min(patience_s, end - time.monotonic()))
            for rank in [rank for rank in answers if rank not in absent]:
                number = store.get(f"hello/{rank}")
                if welcomed.get(rank) != number:
                    store.set(f"welcome/{number.decode()}", f"{name} {digest}")
                    welcomed[rank] = number
            if not absent:
                answers = _missing(store, answers, min(patience_s, end - time.monotonic()))
            if (waits_for := absent or answers) and alarm is not None:
                alarm.look(waits_for)
            patience_s = min(2 * patience_s, longest_s)
            if waits_for and time.monotonic() > end:
                raise _late(0, waits_for, timeout_s)
        words = [json.loads(store.get(f"{name}/said/{rank}")) for rank in range(1, size)]
        others = {rank: each["alike"] for rank, each in enumerate(words, 1) if "alike" in each}
        if refused := difference({0: settings, **others}):
            raise InputError(refused)
        text = json.dumps({"conclusion": conclude([said, *(each["said"] for each in words)])})
    except (ExecutionError, InputError) as error:
        store.set(f"{name}/all", json.dumps(_failure(error)))
        raise
    store.set(f"{name}/all", text)
    return name, json.loads(text)["conclusion"]  # as everybody reads it


def _shown(value: object) -> object:
    """A setting as messages show it."""
    text = json.dumps(value)
    if len(text) <= SHOWN_CHARACTERS:
        return json.loads(text)  # as others read it
    return f"{text[:SHOWN_CHARACTERS]}... ({len(text)} characters, SHA-256 {_hash(text.encode())[:12]})"


def _missing(store: Store, keys: Mapping[int, str], seconds: float) -> dict[int, str]:
    """Those of some keys that are not in the store, the sooner the better, or after that time."""
    try:
        if keys:
            store.wait(list(keys.values()), timedelta(seconds=max(0.001, seconds)))
    except RuntimeError:
        return {rank: key for rank, key in keys.items() if not store.check([key])}
    return {}


def _late(rank: int, missing: Iterable[int], timeout_s: float) -> ExecutionError:
    ranks = sorted(missing)
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    who = ", ".join(map(str, ranks[:NAMED])) + more
    return ExecutionError(f"rank {rank} waited {timeout_s:g} s for rank {who} to make the group, in vain")


def _failure(error: Exception) -> dict[str, str]:
    """An error as it travels."""
    kind = next((known for known in _ERRORS if isinstance(error, known)), None)
    line = " ".join(str(error).split())
    message = line if kind else f"{type(error).__name__}: {line}"
    return {"error": (kind or ExecutionError).__name__, "message": message[: PART_BYTES // 8]}


def _raise(head: Mapping[str, str]) -> NoReturn:
    kind = next(known for known in _ERRORS if known.__name__ == head["error"])
    raise kind(head["message"])


def are_on_one_host(store: Store, rank: int, size: int) -> bool:
    """Whether all ranks have one `location`; the same answer on all of them."""
    timeout_s = timeout_of(store).total_seconds()
    _, is_one = meet(store, rank, size, location(), lambda all_: len(set(all_)) == 1, timeout_s=timeout_s)
    return bool(is_one)


def location() -> str:
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


def difference(settings: Mapping[int, Mapping[str, object]]) -> str:
    """The first setting that is not as rank 0's; empty where all are alike.

    Args:
        settings: of ranks, with those of rank 0; of one that has none, why, as "refused".
    """
    first = settings[0]
    for rank, own in settings.items():
        if "refused" in own:
            return f"rank {rank}: {own['refused']}"
        for name, value in first.items():
            if own[name] != value:
                ours, theirs = ("nothing" if it is None else it for it in (value, own[name]))
                return (
                    f"{name}: must be the same on all ranks, got {ours} on rank 0 and {theirs} on rank {rank}"
                )
    return ""


def share_table(
    store: Store,
    key: str,
    rank: int,
    make: Callable[[], ScheduleTable | None],
    *,
    timeout_s: float = 60.0,
    alike: bool = True,
) -> ScheduleTable | None:
    """The table that rank 0 makes, on every rank of a group; None on all where there is none yet.

    Args:
        store: of the group; any of torch's.
        key: used for nothing else in this store, ever.
        rank: of the group.
        make: makes the table; called on rank 0 only.
        timeout_s: how long the others wait for rank 0, which should be longer than `make` may take.
        alike: whether ranks must get the same bits by it.

    Raises:
        InputError: `make` raised it on rank 0, as it may the next three.
        InfeasibleError: likewise.
        TimedOutError: likewise.
        ExecutionError: `make` raised it or anything else, rank 0 did not answer in time, or what arrived is
            not what it sent.
    """
    return _give(store, key, make) if rank == 0 else _take(store, key, rank, timeout_s, alike)


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
        head = _failure(error)
        store.set(key, json.dumps(head))
        try:
            _raise(head)
        except _ERRORS as failure:
            raise failure from error
    return table


def _take(store: Store, key: str, rank: int, timeout_s: float, alike: bool) -> ScheduleTable | None:
    try:
        store.wait([key], timedelta(seconds=timeout_s))
        head = json.loads(store.get(key))
    except Exception as error:  # torch has several classes for this
        raise ExecutionError(
            f"rank {rank}: rank 0 did not say within {timeout_s:g} s which schedules to run ({key}): "
            f"{' '.join(str(error).split())}"
        ) from error
    if "error" in head:
        _raise(head)
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
        table = _taken[head["sha256"]] = ScheduleTable.from_bytes(data, source).check(source, alike=alike)
    except InputError as error:
        raise ExecutionError(f"rank {rank}: {error}") from error
    return table


_taken: weakref.WeakValueDictionary[str, ScheduleTable] = weakref.WeakValueDictionary()
"""The tables that this process has from others, by the hash of their bytes, as long as a group has them."""


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

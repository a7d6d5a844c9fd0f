"""One table for all ranks: rank 0 makes it, the others take its bytes through the store and check the hash.

What goes wrong at rank 0 goes wrong everywhere: its error travels the same way, so that no rank waits for a
table that will never come, or runs something else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from arborcast.backends.errors import ExecutionError
from arborcast.backends.schedules.table import Table
from arborcast.synth.errors import InfeasibleError, InputError, TimedOutError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

PART_BYTES = 1 << 20
"""The longest value that is put into the store; not every store takes longer ones."""

_ERRORS: tuple[type[Exception], ...] = (InputError, InfeasibleError, TimedOutError, ExecutionError)
"""The errors that keep their class on the way; subclasses of them become them, others the last."""


def share_table(
    store: Store, key: str, rank: int, make: Callable[[], Table], *, timeout_s: float = 60.0
) -> Table:
    """The same table on every rank of a group.

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
        head: dict[str, Any] = {"sha256": _hash(data), "bytes": len(data), "parts": len(parts)}
        # Last, so that whoever sees it finds the rest.
        store.set(key, json.dumps(head))
    except Exception as error:
        failure = _portable(error)
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
            f"{_line(error)}"
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


def _portable(error: Exception) -> Exception:
    """The same line in one of the classes that travel; the error itself where it is one."""
    for kind in _ERRORS:
        if isinstance(error, kind):
            return kind(_line(error))
    return ExecutionError(f"{type(error).__name__}: {_line(error)}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

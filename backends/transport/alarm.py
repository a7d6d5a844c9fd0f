"""What keeps ranks from connecting, told to all that wait: there are no channels yet that could say it.

Who fails writes why into the group's store, where all others look while they wait. Somebody must notice that
a process has ended, though: each listens at a port, its door, as long as it lives, and accepts nobody there.
Who knocks is let in by the kernel while the process lives, stopped or busy as it may be, and refused after.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable

from arborcast.backends.errors import ExecutionError
from arborcast.backends.tensors.torch_compat import Store
from arborcast.backends.transport.addresses import listening_socket

LOOK_S = 1.0
"""Between two looks of a rank that waits."""

KNOCK_S = 0.5
"""How long a kernel may take to let somebody in before it is taken to do so."""

_FAILED = "failed"
_REASON_CHARACTERS = 2048

_doors: dict[str, socket.socket] = {}
"""Of this process, by the address that it listens at."""


def _close_in_child() -> None:
    """After a fork: the door tells of the parent, which the child may outlive."""
    while _doors:
        _doors.popitem()[1].close()


os.register_at_fork(after_in_child=_close_in_child)


def door(address: str) -> int:
    """The port at a numeric address of this host that is open as long as this process lives.

    Raises:
        OSError: there is no listening at that address.
    """
    if address not in _doors:
        _doors[address] = listening_socket(address)
    return int(_doors[address].getsockname()[1])


def is_closed(host: str, port: int) -> bool:
    """Whether nobody has that door any more; False where nobody can tell, as without a way to the host."""
    try:
        socket.create_connection((host, port), KNOCK_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


class Alarm:
    """One rank's part in telling all others of its group what keeps it from connecting.

    Args:
        store: that the present ranks of the group share, and nobody else.
        has_ended: whether the process of a rank of the group is known to have ended.
    """

    def __init__(self, store: Store, has_ended: Callable[[int], bool] = lambda _: False) -> None:
        self._store = store
        self._has_ended = has_ended
        self._heard: str | None = None
        self._due = 0.0
        self._knocks = 0
        self._suspect: int | None = None

    def sound(self, reason: str) -> None:
        """Tell all that wait, now or later; not again what this rank has heard itself."""
        if self._heard is None:
            with contextlib.suppress(RuntimeError):  # a store that is gone is noticed by everybody
                # Nothing is asked of it: the process that serves it may be stopped.
                self._store.set(_FAILED, reason[:_REASON_CHARACTERS])

    def look(self, awaited: Iterable[int]) -> None:
        """Return where there is hope; to be called again and again by who waits, which costs little.

        Args:
            awaited: the ranks without which the caller cannot go on.

        Raises:
            ExecutionError: a rank has given up, or the process of one that is awaited has ended.
        """
        if time.monotonic() < self._due:
            return
        trouble = None
        with contextlib.suppress(RuntimeError):  # a store that cannot answer now tells nothing
            trouble = self._trouble(awaited)
        self._due = time.monotonic() + LOOK_S
        if trouble is not None:
            raise ExecutionError(trouble)

    def _trouble(self, awaited: Iterable[int]) -> str | None:
        if self._store.check([_FAILED]):
            self._heard = self._store.get(_FAILED).decode(errors="replace")
            return self._heard
        ranks = sorted(awaited)
        if not ranks:
            return None
        # Twice, as what was awaited may have come before the process ended, and not yet been seen.
        rank = self._suspect if self._suspect in ranks else ranks[self._knocks % len(ranks)]
        self._knocks += 1
        is_gone = self._has_ended(rank)
        if is_gone and rank == self._suspect:
            return f"rank {rank} ended before it was connected with all others"
        self._suspect = rank if is_gone else None
        return None

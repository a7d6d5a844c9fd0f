"""One listener for all groups of this process: who connects says the token of the group that is meant.

A process with a hundred groups listens at two sockets, not at two hundred. Whichever group waits accepts for
all of them, one thread at a time; connections that know no token of a group that is here are dropped.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable

from arborcast.backends.errors import ExecutionError
from arborcast.backends.transport.handshake import Handshake
from arborcast.backends.transport.listener import Listener, PendingConnection

LEAST_SILENT = 16
"""Connections without a handshake that may be there at a time, in small groups."""

LOOK_S = 0.05
"""That a thread accepts for others at a time, before it lets another do so."""


class _Shared:
    """A listener and what it accepted, by token."""

    def __init__(self, addresses: tuple[str, ...], *, is_local: bool) -> None:
        self.listener = Listener(addresses, is_local=is_local, most_silent=LEAST_SILENT)
        self.of_token: dict[bytes, list[PendingConnection]] = {}
        self.sizes: dict[bytes, int] = {}  # of the groups
        self.accepting = threading.Lock()

    def bound(self) -> None:
        """Let as many connections be without a handshake as the largest group may need."""
        self.listener.most_silent = max([LEAST_SILENT, *(2 * size for size in self.sizes.values())])

    def sort(self) -> None:
        """Give each group its connections."""
        came, self.listener.pending = self.listener.pending, []
        with _lock:
            for connection in came:
                handshake = connection.handshake
                assert handshake is not None, "the listener waits for it"
                if handshake.token in self.of_token:
                    self.of_token[handshake.token].append(connection)
                else:
                    connection.close()


_lock = threading.Lock()
_shared: dict[tuple[tuple[str, ...], bool], _Shared] = {}
"""The listeners of this process, by addresses and whether they have a Unix socket."""


def _close_in_child() -> None:
    """After a fork: who connects is meant for the parent; the child's groups get a listener of their own."""
    for shared in _shared.values():
        shared.listener.close()
        _close_all(connection for waiting in shared.of_token.values() for connection in waiting)
    _shared.clear()
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_close_in_child)


class Reception:
    """Where the ranks of one group connect to this one.

    Args:
        addresses: numeric, to listen at.
        token: of the group on this rank; who connects has to say it.
        is_local: whether there must be a Unix socket too.
        size: of the group; twice as many connections may be without a handshake at a time.

    Attributes:
        doors, name: of the process's `Listener`.

    Raises:
        OSError: there is no listening at one of these addresses.
    """

    def __init__(self, addresses: tuple[str, ...], token: bytes, *, is_local: bool, size: int) -> None:
        self._key = addresses, is_local
        self._token = token
        with _lock:
            shared = _shared.get(self._key)
            if shared is None:
                shared = _shared[self._key] = _Shared(addresses, is_local=is_local)
            shared.of_token[token] = []
            shared.sizes[token] = size
            shared.bound()
        self._mine: _Shared | None = shared
        self.doors, self.name = shared.listener.doors, shared.listener.name

    def wait(self, seconds: float) -> None:
        """Return when somebody has come, to whatever group, or after that time.

        Raises:
            ExecutionError: another thread closes this meanwhile.
        """
        until = time.monotonic() + seconds
        while True:
            shared, left = self._mine, max(0.0, until - time.monotonic())
            if shared is None:
                raise ExecutionError("this rank left the group while it was connecting")
            if shared.of_token.get(self._token):
                return
            if shared.accepting.acquire(timeout=min(left, LOOK_S)):
                try:
                    came = self._mine is not None and shared.listener.wait(min(left, LOOK_S))
                    shared.sort()
                finally:
                    shared.accepting.release()
                if came:
                    return
            if not left:
                return

    @property
    def trouble(self) -> str | None:
        """Why the last connection that came could not be accepted; None where it could."""
        return None if self._mine is None else self._mine.listener.trouble

    def take(self) -> list[tuple[PendingConnection, Handshake]]:
        """The connections that wait for this group, whose they are from now on."""
        shared = self._mine
        if shared is None:
            return []
        with _lock:
            found, shared.of_token[self._token] = shared.of_token[self._token], []
        return [(one, one.handshake) for one in found if one.handshake is not None]

    def close(self) -> None:
        """Drop who still waits; the last group that leaves closes the listener. May be called twice."""
        shared, self._mine = self._mine, None
        if shared is None:
            return
        with _lock:
            _close_all(shared.of_token.pop(self._token, ()))
            del shared.sizes[self._token]
            shared.bound()
            is_last = not shared.of_token and _shared.get(self._key) is shared
            if is_last:
                del _shared[self._key]
        if is_last:
            with shared.accepting:  # not while a thread of this group looks
                shared.listener.close()


def _close_all(connections: Iterable[PendingConnection]) -> None:
    for connection in connections:
        connection.close()

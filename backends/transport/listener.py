"""Where other ranks connect to this one: its listeners, and accepted connections not yet matched."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import selectors
import socket
import time
from collections.abc import Sequence

from arborcast.backends.transport.addresses import listening_socket
from arborcast.backends.transport.handshake import (
    HANDSHAKE_BYTES,
    MEMORIES,
    TOKEN_BYTES,
    Handshake,
    closed_in_children,
    is_of_this_user,
    receive_descriptors,
)

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
"""That a connection may be silent before its handshake is here; whoever belongs here sends it at once."""

PAUSE_S = 0.05
"""That nobody is accepted where there are no descriptors, so that who waits for some does not spin."""

_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class PendingConnection:
    """A connection that somebody made to this rank and that is not yet a channel.

    Attributes:
        sock: the connection.
        since: when it was accepted (of `time.monotonic`).
        descriptors: what came with the handshake; the connection's to close until somebody takes them out.
        handshake: None until all of it is here.
        trouble: what this process lacks for it, None where that is nothing.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.since = time.monotonic()
        self.descriptors: list[int] = []
        self.handshake: Handshake | None = None
        self.trouble: str | None = None
        self._said = b""
        closed_in_children.add(self)

    def listen(self) -> bool:
        """Read on; False where the connection is gone or says something else than a handshake."""
        missing = HANDSHAKE_BYTES - len(self._said)
        try:
            if self.sock.family == socket.AF_UNIX:
                said, is_short = receive_descriptors(self.sock, missing, self.descriptors)
                if is_short:  # the memory that should have come with it is lost
                    self.trouble = os.strerror(errno.EMFILE)
                    return False
                if len(self.descriptors) > MEMORIES:  # what is looked at is what is used
                    return False
            else:
                said = self.sock.recv(missing)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._said += said
        if len(self._said) == HANDSHAKE_BYTES:
            self.handshake = Handshake.from_bytes(self._said)
            return self.handshake is not None
        return bool(said)

    def close(self) -> None:
        """Drop the connection and what came with it."""
        self.sock.close()
        while self.descriptors:
            os.close(self.descriptors.pop())


class Listener:
    """Sockets that listen, and the connections that they accepted.

    Args:
        addresses: numeric, of TCP listeners.
        is_local: whether to listen at a Unix socket too, under a name that the kernel forgets with it, to
            processes of the same user.
        most_silent: connections without a handshake at a time; of more, the oldest is dropped. Should that be
            a rank's, it dials again.

    Attributes:
        doors: host and port of each TCP listener.
        name: of the Unix socket, without the zero byte before it; None where there is none.
        pending: connections whose handshake is here, not yet matched to a rank.
        trouble: why the last connection that came could not be accepted; None where it could.

    Raises:
        OSError: there is no listening at one of these addresses.
    """

    def __init__(self, addresses: Sequence[str], *, is_local: bool, most_silent: int) -> None:
        self.pending: list[PendingConnection] = []
        self.trouble: str | None = None
        self.most_silent = most_silent
        self._silent: dict[PendingConnection, None] = {}  # without a handshake, the oldest first
        self.name: str | None = None
        self._selector = selectors.PollSelector()
        self.doors: list[tuple[str, int]] = []
        try:
            for address in addresses:
                tcp = listening_socket(address)
                self._watch(tcp, None)
                self.doors.append(tcp.getsockname()[:2])
            if is_local:
                self.name = f"arborcast-{secrets.token_hex(TOKEN_BYTES)}"
                local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._watch(local, None)
                local.bind(f"\0{self.name}")
                local.listen(socket.SOMAXCONN)
        except OSError:
            self.close()
            raise

    def wait(self, seconds: float) -> bool:
        """Accept connections and read their handshakes, for at most that long; whether anything happened.

        Connections that have been silent for `HANDSHAKE_S` are dropped.
        """
        events = self._selector.select(seconds)
        for key, _ in events:
            connection = key.data
            if connection is None:
                self._accept(key.fileobj, seconds)
            elif not connection.listen():
                self._lack(connection.trouble)
                self._forget(connection)
                connection.close()
            elif connection.handshake is not None:
                self._forget(connection)
                self.pending.append(connection)
        self._drop_silent()
        return bool(events)

    def close(self) -> None:
        """Close the sockets and what they accepted."""
        for key in list((self._selector.get_map() or {}).values()):
            sock = key.fileobj if key.data is None else key.data
            assert isinstance(sock, socket.socket | PendingConnection)
            sock.close()
        for connection in self.pending:
            connection.close()
        self.pending.clear()
        self._selector.close()

    def _accept(self, door: object, seconds: float) -> None:
        assert isinstance(door, socket.socket)
        try:
            sock = door.accept()[0]
        except OSError as error:
            if error.errno in _NO_ROOM:  # else it is gone again
                self._lack(error.strerror)
                if self._silent:
                    self._drop_oldest()
                else:
                    time.sleep(min(seconds, PAUSE_S))
            return
        self.trouble = None
        if sock.family == socket.AF_UNIX and not is_of_this_user(sock):
            sock.close()
            return
        connection = PendingConnection(sock)
        self._watch(sock, connection)
        self._silent[connection] = None

    def _lack(self, trouble: str | None) -> None:
        """Note, and say once, what keeps this process from accepting."""
        if trouble is not None and self.trouble is None:
            log.warning("who connects cannot be accepted: %s (see ulimit -n)", trouble)
        self.trouble = trouble

    def _forget(self, connection: PendingConnection) -> None:
        """Read no more from it."""
        self._selector.unregister(connection.sock)
        self._silent.pop(connection, None)

    def _drop_silent(self) -> None:
        """Close connections of strangers, who could otherwise hold all descriptors that there are."""
        late = time.monotonic() - HANDSHAKE_S
        while self._silent and (
            len(self._silent) > self.most_silent or next(iter(self._silent)).since < late
        ):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._silent))
        self._forget(oldest)
        oldest.close()

    def _watch(self, sock: socket.socket, connection: PendingConnection | None) -> None:
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, connection)

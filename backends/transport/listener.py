"""Where other ranks connect to this one: its listeners, and who came before there was a seat for him."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket

from arborcast.backends.transport.addresses import listener
from arborcast.backends.transport.handshake import GREETING_BYTES, TOKEN_BYTES, Greeting


class Guest:
    """A connection that somebody made to this rank and that is not yet a channel.

    Attributes:
        sock: the connection.
        descriptors: what came with the greeting; the guest's to close until somebody takes them out.
        greeting: None until all of it is here.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.descriptors: list[int] = []
        self.greeting: Greeting | None = None
        self._said = b""

    def listen(self) -> bool:
        """Read on; False where the guest is gone or says something else than a greeting."""
        missing = GREETING_BYTES - len(self._said)
        try:
            if self.sock.family == socket.AF_UNIX:
                said, descriptors, _, _ = socket.recv_fds(self.sock, missing, 1)
                self.descriptors += descriptors
                for descriptor in descriptors:  # `recv_fds` of Python 3.11 forgets the flag that says so
                    os.set_inheritable(descriptor, False)
            else:
                said = self.sock.recv(missing)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._said += said
        if len(self._said) == GREETING_BYTES:
            self.greeting = Greeting.from_bytes(self._said)
            return self.greeting is not None
        return bool(said)

    def close(self) -> None:
        """Drop the connection and what came with it."""
        self.sock.close()
        while self.descriptors:
            os.close(self.descriptors.pop())


class Reception:
    """Listeners and guests.

    Args:
        address: numeric, of a TCP listener at any free port.
        is_local: whether to listen at a Unix socket too, under a name that the kernel forgets with it.

    Attributes:
        host, port: of the TCP listener.
        name: of the Unix socket, without the zero byte before it; None where there is none.
        guests: who has greeted and waits.

    Raises:
        OSError: there is no listening at that address.
    """

    def __init__(self, address: str, *, is_local: bool) -> None:
        self.guests: list[Guest] = []
        self.name: str | None = None
        self._selector = selectors.PollSelector()
        tcp = listener(address)
        self.host, self.port = tcp.getsockname()[:2]
        self._watch(tcp, None)
        if is_local:
            self.name = f"arborcast-{secrets.token_hex(TOKEN_BYTES)}"
            local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._watch(local, None)
            try:
                local.bind(f"\0{self.name}")
                local.listen(socket.SOMAXCONN)
            except OSError:
                self.close()
                raise

    def wait(self, seconds: float) -> bool:
        """Let guests in and hear them, for at most that long; whether anything happened."""
        events = self._selector.select(seconds)
        for key, _ in events:
            guest = key.data
            if guest is None:
                self._let_in(key.fileobj)
            elif not guest.listen():
                self._selector.unregister(guest.sock)
                guest.close()
            elif guest.greeting is not None:
                self._selector.unregister(guest.sock)
                self.guests.append(guest)
        return bool(events)

    def close(self) -> None:
        """Close the listeners and whoever waits."""
        for key in list((self._selector.get_map() or {}).values()):
            sock = key.fileobj if key.data is None else key.data
            assert isinstance(sock, socket.socket | Guest)
            sock.close()
        for guest in self.guests:
            guest.close()
        self.guests.clear()
        self._selector.close()

    def _let_in(self, door: object) -> None:
        assert isinstance(door, socket.socket)
        with contextlib.suppress(OSError):  # gone again
            guest = Guest(door.accept()[0])
            self._watch(guest.sock, guest)

    def _watch(self, sock: socket.socket, guest: Guest | None) -> None:
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, guest)

"""What both kinds of channel share: a socket that never blocks, an outbox for short frames, and the end.

The end of a channel is where care is needed. A rank that leaves or gives up says so in a last frame, shuts
its direction down and drops what still comes; it waits only a moment for the kernel to get its bytes across,
because a TCP socket closed over unread bytes discards the bytes that it has not yet sent.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import termios
import time
import weakref

from arborcast.backends.errors import ChannelClosedError
from arborcast.backends.transport.channel import Channel
from arborcast.backends.transport.frames import abort_frame, bye_frame
from arborcast.backends.transport.silence import unheard_s

FAREWELL_S = 1.0  # that the last bytes may take, also to a peer that waits for a processor
_DISCARD_BYTES = 1 << 16
_DISCARDS = 64  # in a row: a peer that never stops sending must not keep this rank


_open: weakref.WeakSet[SocketChannel] = weakref.WeakSet()
"""The channels of this process."""


def _close_in_child() -> None:
    """After a fork: a child that lives longer than a rank that is killed must not keep its connections open.

    The peers would see no end and wait for the dead. Closing here ends nothing for the parent.
    """
    for channel in list(_open):
        channel.let_go()


os.register_at_fork(after_in_child=_close_in_child)


class SocketChannel(Channel):
    """A channel over a connected stream socket, which it owns from now on."""

    def __init__(self, sock: socket.socket, peer: int) -> None:
        sock.setblocking(False)
        self.peer = peer
        self._socket = sock
        self._outbox = bytearray()  # frames for which the socket had no room
        self._gone: ChannelClosedError | None = None
        self._ending = False
        _open.add(self)

    def fileno(self) -> int:
        """The descriptor to poll, -1 once closed."""
        return self._socket.fileno()

    def unheard_s(self) -> float:
        """See `Channel.unheard_s`."""
        return unheard_s(self._socket)

    def abort(self, reason: str) -> None:
        """See `Channel.abort`."""
        self.begin_close(reason)
        self.finish_close(time.monotonic() + FAREWELL_S)

    def close(self) -> None:
        """See `Channel.close`."""
        self.begin_close()
        self.finish_close(time.monotonic() + FAREWELL_S)

    def begin_close(self, reason: str | None = None) -> None:
        """First half of an end: say the last words and shut this direction, without waiting.

        Args:
            reason: why this rank gives up; None where it leaves in good order.
        """
        if self._ending:
            return
        self._ending = True
        if self._gone is None:
            self._gone = ChannelClosedError(self.peer, "cannot be reached: this rank has closed the channel")
        self._outbox += self._filler() + (bye_frame() if reason is None else abort_frame(reason))
        self._push()

    def finish_close(self, deadline: float) -> None:
        """Second half of an end: see the last bytes off until `deadline` (of `time.monotonic`), and close."""
        if self._socket.fileno() < 0:
            return
        try:
            while (self._push() or self._unsent_bytes()) and (left := deadline - time.monotonic()) > 0:
                if not self._discard():
                    break
                # The kernel does not tell when the last bytes are acknowledged, so this looks again.
                events = select.POLLIN | (select.POLLOUT if self._outbox else 0)
                poll = select.poll()
                poll.register(self._socket, events)
                poll.poll(min(5, 1000 * left))
            self._discard()
        finally:
            self._socket.close()
            self.drop_memory()

    def let_go(self) -> None:
        """Close this process's end of the socket without a word to the peer."""
        self._ending = True
        self._socket.close()
        self.drop_memory()

    def _raise_if_gone(self) -> None:
        if self._gone is not None:
            raise self._gone

    def _filler(self) -> bytes:
        """What must go before a last frame."""
        return b""

    def drop_memory(self) -> None:
        """Let go of what the channel holds besides its socket."""

    def _push(self) -> bool:
        """Whether the outbox still holds something after what the socket takes now; shut down when empty."""
        try:
            if self._outbox:
                del self._outbox[: self._socket.send(self._outbox)]
            if not self._outbox:
                self._socket.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return True
        except OSError:
            self._outbox.clear()
        return bool(self._outbox)

    def _unsent_bytes(self) -> int:
        """Bytes that the peer's kernel has not acknowledged: of TCP; Unix sockets deliver at once."""
        if self._socket.family == socket.AF_UNIX:
            return 0
        try:
            return int(struct.unpack("i", fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)))[0])
        except OSError:
            return 0

    def _discard(self) -> bool:
        """Drop what has come; whether more may come."""
        try:
            for _ in range(_DISCARDS):
                if not self._socket.recv(_DISCARD_BYTES):
                    return False
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

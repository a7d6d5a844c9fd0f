"""A channel over TCP, or over any stream socket: each part is a header and its bytes.

Bytes go from the caller's tensor into the socket and from the socket into the caller's tensor, with no copy
between; the header of the next frame is read ahead in the same call as the end of a part.

    header | part's bytes | header | part's bytes | header | opening | ...
    `---- one sendmsg ---'           `-- one recvmsg_into --'
"""

from __future__ import annotations

import socket
from typing import NoReturn

import torch
from torch import Tensor

from backends.channels.frames import HEADER, Code, opening_frame
from backends.channels.opening import OPENING_BYTES
from backends.channels.socket_channel import SocketChannel
from backends.errors import ChannelClosedError, DisagreementError

PART_BYTES = 256 << 10
_SKIM_BYTES = 1 << 16


class StreamChannel(SocketChannel):
    """A channel over a connected stream socket.

    Args:
        sock: connected; the channel owns it from now on.
        peer: the rank at the other end.
        part_bytes: the longest part, the same at both ends.
    """

    transport = "sockets"

    def __init__(self, sock: socket.socket, peer: int, part_bytes: int = PART_BYTES) -> None:
        super().__init__(sock, peer)
        self.part_bytes = part_bytes
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._owed = 0  # bytes of the part whose header is sent, that the caller still has
        self._no_room = False
        self._header = bytearray(HEADER.size)
        self._header_view = memoryview(self._header)
        self._read_ahead = 0  # bytes of the next header that are here
        self._coming = 0  # bytes of the current part that are not here
        self._body = bytearray()  # of an opening or a reason that is not all here
        self._landing: Tensor | None = None
        self._landed = 0

    @property
    def wants_read(self) -> bool:
        """Never: the kernel alone says when there is room."""
        return False

    @property
    def wants_write(self) -> bool:
        """See `Channel.wants_write`."""
        return self._no_room or bool(self._outbox)

    @property
    def is_within_a_part(self) -> bool:
        """See `SocketChannel.is_within_a_part`."""
        return self._owed > 0

    def on_ready(self) -> None:
        """See `Channel.on_ready`."""
        if self._outbox:
            self._send(b"")
        if not self._coming:
            self._next_frame()

    def open(self, opening: bytes) -> None:
        """See `Channel.open`."""
        assert not self._owed, "an opening within a message"
        self._outbox += opening_frame(opening)
        self._send(b"")

    def send(self, data: Tensor) -> int:
        """See `Channel.send`."""
        view = memoryview(data.numpy())
        size, done = len(view), 0
        self._no_room = False
        while done < size:
            if not self._owed:
                self._owed = min(self.part_bytes, size - done)
                self._outbox += HEADER.pack(Code.PART, self._owed)
            taken = self._send(view[done : done + self._owed])
            done += taken
            self._owed -= taken
            if self._owed:
                self._no_room = True
                break
        return done

    def _send(self, data: memoryview | bytes) -> int:
        """Send the outbox and as much of `data` as there is room for; returns the bytes of `data`."""
        if self._gone is not None:
            raise self._gone
        waiting = len(self._outbox)
        try:
            sent = self._socket.sendmsg([self._outbox, data]) if waiting else self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._gone = self._last_words()
            raise self._gone from error
        if sent < waiting:
            del self._outbox[:sent]
            return 0
        self._outbox.clear()
        return sent - waiting

    def opening(self) -> bytes | None:
        """See `Channel.opening`."""
        if self._coming:
            return None
        frame = self._next_frame()
        if frame is None or frame[0] != Code.OPENING:
            return None
        opening = self._whole_body(frame[1])
        if opening is not None and len(opening) != OPENING_BYTES:
            raise DisagreementError(
                f"rank {self.peer} sent an opening of {len(opening)} bytes, but one has {OPENING_BYTES}"
            )
        return opening

    def receive(self, into: Tensor) -> int:
        """See `Channel.receive`."""
        return self._fill(memoryview(into.numpy()), 0)

    def take(self, length: int) -> Tensor | None:
        """See `Channel.take`."""
        if self._landing is None:
            self._landing = torch.empty(self.part_bytes, dtype=torch.uint8)
        part = self._landing[:length]
        self._landed = self._fill(memoryview(part.numpy()), self._landed)
        if self._landed < length:
            return None
        self._landed = 0
        return part

    def _fill(self, view: memoryview, done: int) -> int:
        """Fill the rest of a message behind its first `done` bytes; returns how many of them are here then."""
        size = len(view)
        while done < size:
            if not self._coming and not self._begin_part(min(self.part_bytes, size - done)):
                break
            coming = self._coming
            got = self._recv([view[done : done + coming], self._header_view])
            taken = min(got, coming)
            done += taken
            self._coming -= taken
            if not self._coming:
                self._read_ahead = got - taken
            if got < coming + HEADER.size:
                break  # a short read has emptied the socket
        return done

    def _begin_part(self, expected: int) -> bool:
        """Whether the header of the next part, of `expected` bytes, is here; it is then done with."""
        frame = self._next_frame()
        if frame is None:
            return False
        if frame != (Code.PART, expected):
            self._disagree(*frame, expected)
        self._read_ahead = 0
        self._coming = expected
        return True

    def _disagree(self, code: int, length: int, expected: int) -> NoReturn:
        what = f"a part of {length} bytes" if code == Code.PART else "another collective"
        raise DisagreementError(f"rank {self.peer} sends {what} where a part of {expected} bytes is due")

    def _next_frame(self) -> tuple[int, int] | None:
        """Code and length of the next frame, a part or an opening, where its header is here.

        Raises:
            ChannelClosedError: it is the peer's last one.
        """
        if self._read_ahead < HEADER.size:
            self._read_ahead += self._recv([self._header_view[self._read_ahead :]])
            if self._read_ahead < HEADER.size:
                return None
        code, length = HEADER.unpack(self._header)
        if code in (Code.PART, Code.OPENING):
            return code, length
        if code == Code.BYE:
            self._gone = self._left()
            raise self._gone
        if code != Code.ABORT:
            raise DisagreementError(f"rank {self.peer} sent {bytes(self._header).hex()} where a frame begins")
        reason = self._whole_body(length)
        if reason is None:
            return None
        self._gone = ChannelClosedError(self.peer, reason.decode(errors="replace"))
        raise self._gone

    def _whole_body(self, length: int) -> bytes | None:
        """The `length` bytes behind the header that is here, where they are all here; the frame is then done."""
        if len(self._body) < length:
            room = bytearray(length - len(self._body))
            self._body += room[: self._recv([room])]
            if len(self._body) < length:
                return None
        body = bytes(self._body)
        self._body.clear()
        self._read_ahead = 0
        return body

    def _recv(self, buffers: list[memoryview | bytearray]) -> int:
        """Bytes read into the buffers, 0 where nothing is there now."""
        if self._gone is not None:
            raise self._gone
        try:
            got = self._socket.recvmsg_into(buffers)[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            self._gone = ChannelClosedError(self.peer)
            raise self._gone from error
        if not got:
            self._gone = ChannelClosedError(self.peer)
            raise self._gone
        return got

    def _last_words(self) -> ChannelClosedError:
        """Why a peer takes nothing any more: from its last frame, which may lie behind unread parts."""
        unread = bytearray(self._header[: self._read_ahead])
        try:
            while piece := self._socket.recv(_SKIM_BYTES):
                unread += piece
        except OSError:
            pass
        at = self._coming
        while at + HEADER.size <= len(unread):
            code, length = HEADER.unpack_from(unread, at)
            at += HEADER.size
            if code == Code.BYE:
                return self._left()
            if code == Code.ABORT:
                return ChannelClosedError(self.peer, unread[at : at + length].decode(errors="replace"))
            at += length
        return ChannelClosedError(self.peer)

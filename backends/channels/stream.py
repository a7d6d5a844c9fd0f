"""A channel over TCP, or over any stream socket: each part is a header, its bytes and a seal.

Bytes go from the caller's tensor into the socket and from the socket into the caller's tensor, with no copy
between; the header of the next frame is read ahead in the same call as the end of a part.

    header | part's bytes | seal | header | part's bytes | seal | header | opening | ...
    `------- one sendmsg -------'         `-------- one recvmsg_into -------'

The seal is one byte which says that the part is what it should be. A rank that gives up in the middle of a
part fills it up, breaks the seal and can still say why: the last byte of a part counts as received only with
a good seal, so that no message with such a part is ever complete.
"""

from __future__ import annotations

import socket
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from backends.channels.frames import HEADER, REASON_BYTES, Code, opening_frame
from backends.channels.opening import OPENING_BYTES
from backends.channels.socket_channel import SocketChannel
from backends.errors import ChannelClosedError, DisagreementError, PeerLeftError

# Parts of 256 KiB take 1.2 times the CPU time from 4 MiB on; larger buffers in the kernel gain nothing.
PART_BYTES = 1024 << 10
PATIENCE_BYTES = 128 << 10
_GOOD, _BROKEN = b"\1", b"\0"  # seals
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
        self._patience = 1  # bytes that must be here before the descriptor is readable
        self._tail = bytearray(1 + HEADER.size)  # the seal of a part and the header of the next frame
        self._tail_view = memoryview(self._tail)
        self._header_view = self._tail_view[1:]
        self._read_ahead = 0  # bytes of the next header that are here
        self._is_within_part = False  # between the header of a part and its seal
        self._coming = 0  # bytes of the current part that are not here, without its seal
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

    def _filler(self) -> bytes:
        """What ends a part of which the peer has got only some."""
        return bytes(self._owed) + _BROKEN if self._owed else b""

    def on_ready(self) -> None:
        """See `Channel.on_ready`."""
        self._raise_if_gone()
        if self._outbox:
            self._send(b"")
        if not self._is_within_part:
            self._next_frame()

    def open(self, opening: bytes) -> None:
        """See `Channel.open`."""
        self._raise_if_gone()
        assert not self._owed, "an opening within a message"
        self._outbox += opening_frame(opening)
        self._send(b"")

    def send(self, data: Tensor) -> int:
        """See `Channel.send`."""
        self._raise_if_gone()
        view = _view(data)
        size, done = len(view), 0
        self._no_room = False
        if not self._owed and not self._outbox and 0 < size <= self.part_bytes:
            done = self._send_part(view, size)
            if done == size or self._no_room:
                return done
        while done < size:
            if not self._owed:
                self._owed = min(self.part_bytes, size - done)
                self._outbox += HEADER.pack(Code.PART, self._owed)
            taken = self._send(view[done : done + self._owed], _GOOD)
            done += taken
            self._owed -= taken
            if self._owed:
                self._no_room = True
                break
        return done

    def _send_part(self, view: memoryview, size: int) -> int:
        """Send a message of one part in one call, which is what mostly happens; returns its bytes."""
        try:
            sent = self._socket.sendmsg([HEADER.pack(Code.PART, size), view, _GOOD])
        except BlockingIOError:
            self._no_room = True
            return 0
        except OSError as error:
            raise self.last_words() from error
        sent -= HEADER.size
        if sent > size:
            return size
        if sent < 0:
            self._outbox += HEADER.pack(Code.PART, size)[sent:]
            sent = 0
        elif sent == size:
            self._outbox += _GOOD
            return size
        self._owed = size - sent
        self._no_room = True
        return sent

    def _send(self, data: memoryview | bytes, seal: bytes = b"") -> int:
        """Send the outbox, and as much of `data` as there is room for; returns the bytes of `data`.

        A seal that finds no room after all of `data` is kept in the outbox.
        """
        waiting = len(self._outbox)
        try:
            sent = self._socket.sendmsg([self._outbox, data, seal])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self.last_words() from error
        if sent < waiting:
            del self._outbox[:sent]
            return 0
        self._outbox.clear()
        sent -= waiting
        if sent < len(data):
            return sent
        if sent == len(data):
            self._outbox += seal
        return len(data)

    def opening(self) -> bytes | None:
        """See `Channel.opening`."""
        frame = None if self._is_within_part else self._next_frame()
        if frame is None:
            self._wait_for(1)
            return None
        if frame != (Code.OPENING, OPENING_BYTES):
            self._disagree(*frame, "a collective should begin")
        return self._whole_body(OPENING_BYTES)

    def receive(self, into: Tensor) -> int:
        """See `Channel.receive`."""
        view = _view(into)
        landed = self._landed
        if landed:  # somebody tried to take this part before all of it was there
            assert self._landing is not None
            view[:landed] = _view(self._landing[:landed])
            self._landed = 0
        return self._fill(view, landed)

    def take(self, length: int) -> Tensor | None:
        """See `Channel.take`."""
        if self._landing is None:
            self._landing = torch.empty(self.part_bytes, dtype=torch.uint8)
        part = self._landing[:length]
        self._landed = self._fill(_view(part), self._landed)
        if self._landed < length:
            return None
        self._landed = 0
        return part

    def _fill(self, view: memoryview, done: int) -> int:
        """Fill the rest of a message behind its first `done` bytes; how many of them are received then."""
        size = len(view)
        while done < size:
            if not self._is_within_part and not self._begin_part(min(self.part_bytes, size - done)):
                break
            coming = self._coming
            if coming:
                asked = coming + len(self._tail)
                got = self._recv([view[done : done + coming], self._tail_view])
                taken = min(got, coming)
                self._coming -= taken
                done += taken
                if self._coming:
                    break
                done -= 1  # until the seal is seen
            else:
                asked = len(self._tail)
                got, taken = self._recv([self._tail_view]), 0
            if got == taken or not self._see_seal(got - taken):
                break
            done += 1
            if got < asked:
                break  # a short read has emptied the socket
        if done < size:
            within = self._is_within_part
            missing = (
                self._coming if within else HEADER.size - self._read_ahead + min(self.part_bytes, size - done)
            )
            self._wait_for(missing + 1)
        return done

    def _wait_for(self, size: int) -> None:
        """Let the kernel wake us only when a part is here, or much of it: waking costs as much as a part.

        It wakes us earlier when the peer leaves or gives up, since that ends the stream, and when there is no
        more room.
        """
        size = max(1, min(size, PATIENCE_BYTES))
        if size != self._patience:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
            self._patience = size

    def _begin_part(self, expected: int) -> bool:
        """Whether the header of the next part, of `expected` bytes, is here; it is then done with."""
        frame = self._next_frame()
        if frame is None:
            return False
        if frame != (Code.PART, expected):
            self._disagree(*frame, f"a part of {expected} bytes is due")
        self._read_ahead = 0
        self._is_within_part = True
        self._coming = expected
        return True

    def _see_seal(self, got: int) -> bool:
        """End a part of which the first `got` bytes of the tail are here; whether it is good."""
        self._is_within_part = False
        self._read_ahead = got - 1
        return self._tail[:1] == _GOOD

    def _disagree(self, code: int, length: int, due: str) -> NoReturn:
        what = f"a part of {length} bytes" if code == Code.PART else "the begin of a collective"
        raise DisagreementError(f"rank {self.peer} sends {what} where {due}")

    def _next_frame(self) -> tuple[int, int] | None:
        """Code and length of the next frame, a part or an opening, where its header is here.

        Raises:
            ChannelClosedError: it is the peer's last one.
        """
        if self._read_ahead < HEADER.size:
            self._read_ahead += self._recv([self._header_view[self._read_ahead :]])
            if self._read_ahead < HEADER.size:
                return None
        code, length = HEADER.unpack(self._header_view)
        if code in (Code.PART, Code.OPENING):
            return code, length
        if code == Code.BYE:
            self._gone = PeerLeftError(self.peer)
            raise self._gone
        if code != Code.ABORT or length > REASON_BYTES:
            raise DisagreementError(f"rank {self.peer} sent {self._header_view.hex()} where a frame begins")
        reason = self._whole_body(length)
        if reason is None:
            return None
        self._gone = ChannelClosedError(self.peer, reason.decode(errors="replace"))
        raise self._gone

    def _whole_body(self, length: int) -> bytes | None:
        """The `length` bytes behind the header, where they are all here; the frame is then done with."""
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
        self._raise_if_gone()
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

    def last_words(self) -> ChannelClosedError:
        """See `Channel.last_words`; they may lie behind unread parts."""
        if self._gone is not None:
            return self._gone
        unread = bytearray(self._header_view[: self._read_ahead]) + self._body
        try:
            while piece := self._socket.recv(_SKIM_BYTES):
                unread += piece
        except OSError:
            pass
        self._gone = self._find_last_words(unread)
        return self._gone

    def _find_last_words(self, unread: bytearray) -> ChannelClosedError:
        at = self._coming + 1 if self._is_within_part else 0
        while at + HEADER.size <= len(unread):
            code, length = HEADER.unpack_from(unread, at)
            at += HEADER.size
            if code == Code.BYE:
                return PeerLeftError(self.peer)
            if code == Code.ABORT:
                return ChannelClosedError(self.peer, unread[at : at + length].decode(errors="replace"))
            at += length + 1 if code == Code.PART else length
        return ChannelClosedError(self.peer)


def _view(data: Tensor) -> memoryview:
    return memoryview(cast(Any, data.numpy()))

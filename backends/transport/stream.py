"""A channel over TCP, or over any stream socket: each part is a header, its bytes and a trailer.

Long parts go from the socket into the caller's memory with no copy between. Short ones land together, by one
read, and are used from there; those that are ready together leave together, by one call and with no copy.

    header | part's bytes | trailer | header | part's bytes | trailer | header | opening | ...
    `------------------ one sendmsg ---------------------'

The last byte of a trailer says that the part is what it should be. A rank that gives up in the middle of a
part fills it up, breaks the trailer and can still say why: the last byte of a part counts as received only
with a good trailer, so that no message with such a part is ever complete.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from arborcast.backends.errors import ChannelClosedError, DisagreementError, PeerLeftError
from arborcast.backends.transport.fingerprint import OPENING_BYTES
from arborcast.backends.transport.frames import (
    GOOD_TRAILERS,
    HEADER,
    REASON_BYTES,
    Code,
    opening_frame,
    part_frame_bytes,
)
from arborcast.backends.transport.receive_buffer import LONG_BYTES, ReceiveBuffer
from arborcast.backends.transport.socket_channel import SocketChannel

# Parts of 256 KiB take 1.2 times the CPU time from 4 MiB on; larger buffers in the kernel gain nothing.
PART_BYTES = 1024 << 10
LOW_WATER_BYTES = 128 << 10
_SKIM_BYTES = 1 << 16


class StreamChannel(SocketChannel):
    """A channel over a connected stream socket.

    Args:
        sock: connected; the channel owns it from now on.
        peer: the rank at the other end.
        part_bytes: the longest part, the same at both ends.
        long_bytes: parts from this length on are received without a copy.
    """

    transport = "sockets"

    def __init__(
        self, sock: socket.socket, peer: int, part_bytes: int = PART_BYTES, long_bytes: int = LONG_BYTES
    ) -> None:
        super().__init__(sock, peer)
        self.part_bytes = part_bytes
        self._long_bytes = long_bytes
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._owed = 0  # bytes of the part whose header is sent, that the caller still has
        self._owed_trailer = b""  # what follows them
        self._no_room = False
        self._buffer = ReceiveBuffer(part_frame_bytes(part_bytes))
        self._is_dry = False  # whether the last read got all that there was
        self._low_water = 1  # bytes that must be here before the descriptor is readable
        self._awaited = HEADER.size  # of the frame that somebody tried to take
        self._is_within_part = False  # of a long part, between its header and its trailer
        self._coming = 0  # bytes of that part that are not here, without its trailer
        self._trailer_bytes = 0  # of its trailer

    @property
    def wants_write(self) -> bool:
        """See `Channel.wants_write`."""
        return self._no_room or bool(self._outbox)

    def _filler(self) -> bytes:
        """What ends a part of which the peer has got only some."""
        return bytes(self._owed + len(self._owed_trailer)) if self._owed else b""

    def on_ready(self) -> None:
        """See `Channel.on_ready`."""
        self._raise_if_gone()
        if self._outbox:
            self._send(b"")
        self._is_dry = False
        if self._is_within_part:
            return
        if self._buffer.header() is None:
            is_long = self._awaited > LONG_BYTES
            self._read(0 if is_long else self._awaited, alone=is_long)
        self._find_end()

    def open(self, opening: bytes) -> None:
        """See `Channel.open`."""
        self._raise_if_gone()
        assert not self._owed, "an opening within a message"
        self._outbox += opening_frame(opening)
        self._send(b"")

    def send(self, data: memoryview) -> int:
        """See `Channel.send`."""
        self._raise_if_gone()
        size, done = len(data), 0
        self._no_room = False
        while done < size:
            if not self._owed:
                self._owed = min(self.part_bytes, size - done)
                self._owed_trailer = GOOD_TRAILERS[self._owed & 7]
                self._outbox += HEADER.pack(Code.PART, self._owed)
            taken = self._send(data[done : done + self._owed], self._owed_trailer)
            done += taken
            self._owed -= taken
            if self._owed:
                self._no_room = True
                break
        return done

    def send_all(self, messages: Sequence[memoryview]) -> int:
        """See `Channel.send_all`; those of one part each leave by one call."""
        if self._owed or self._outbox or max(map(len, messages)) > self.part_bytes:
            return super().send_all(messages)
        self._raise_if_gone()
        buffers: list[bytes | memoryview] = []
        trailer = b""
        for data in messages:
            if size := len(data):
                buffers += (trailer + HEADER.pack(Code.PART, size), data)
                trailer = GOOD_TRAILERS[size & 7]
        buffers.append(trailer)
        self._no_room = False
        try:
            sent = self._socket.sendmsg(buffers)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise self.last_words() from error
        return self._account(messages, sent)

    def _account(self, messages: Sequence[memoryview], sent: int) -> int:
        """Bytes of the messages among the first `sent` bytes of their frames; the next one may have begun."""
        taken = 0
        for at, data in enumerate(messages):
            size = len(data)
            frame = part_frame_bytes(size) if size else 0
            if sent < frame:
                count = self._stop_within(size, sent) if sent else 0
                # Else only the trailer waits for room, or nothing: the caller need not come again for that.
                self._no_room = count < size or any(messages[at + 1 :])
                return taken + count
            sent -= frame
            taken += size
        return taken

    def _stop_within(self, size: int, sent: int) -> int:
        """The socket took `sent` bytes of the frame of a part; returns how many of them are the part's."""
        trailer = GOOD_TRAILERS[size & 7]
        if sent < HEADER.size:
            self._outbox += HEADER.pack(Code.PART, size)[sent:]
        handed_over = min(max(sent - HEADER.size, 0), size)
        self._owed = size - handed_over
        self._owed_trailer = trailer
        if not self._owed:
            self._outbox += trailer[sent - HEADER.size - size :]
        return handed_over

    def _send(self, data: memoryview | bytes, trailer: bytes = b"") -> int:
        """Send the outbox, and as much of `data` as there is room for; returns the bytes of `data`.

        Of a trailer that finds no room after all of `data` the rest is kept in the outbox.
        """
        waiting = len(self._outbox)
        try:
            sent = self._socket.sendmsg([self._outbox, data, trailer])
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
        self._outbox += trailer[sent - len(data) :]
        return len(data)

    def opening(self) -> bytes | None:
        """See `Channel.opening`."""
        if self._is_within_part:
            return None
        self._is_dry = False
        if not self._is_here(Code.OPENING, OPENING_BYTES, "a collective should begin"):
            return None
        return bytes(self._buffer.drop(HEADER.size + OPENING_BYTES)[HEADER.size :])

    def receive(self, into: memoryview, *, look: bool = True) -> int:
        """See `Channel.receive`."""
        if look:
            self._is_dry = False
        size, done = len(into), 0
        while done < size:
            length = min(self.part_bytes, size - done)
            if self._is_within_part or length >= self._long_bytes:
                count = self._receive_long(into[done:], length)
                if not count:
                    break
                done += count
            else:
                part = self.take(length, look=False)
                if part is None:
                    break
                into[done : done + length] = part
                done += length
        return done

    def take(self, length: int, *, look: bool = True) -> memoryview | None:
        """See `Channel.take`."""
        part = self._buffer.part(length)
        if part is not None:
            return part
        if look:
            self._is_dry = False
        if not self._is_here(Code.PART, length, f"a part of {length} bytes is due"):
            return None
        part = self._buffer.part(length)
        if part is None:  # its trailer is broken: why comes next
            self._buffer.drop(part_frame_bytes(length))
            self._find_end()
        return part

    def _is_here(self, code: Code, length: int, due: str) -> bool:
        """Whether all of the next frame is in the buffer, after reading on; it must be what is due."""
        buffer = self._buffer
        frame = part_frame_bytes(length) if code is Code.PART else HEADER.size + length
        while True:
            header = buffer.header()
            if header is not None and header != (code, length):
                self._find_end()
                self._disagree(*header, due)
                return False
            missing = frame - (buffer.end - buffer.at)
            if missing <= 0:
                return True
            if self._is_dry:
                self._wait_for(frame, missing)
                return False
            self._read(frame, alone=frame > LONG_BYTES)

    def _receive_long(self, into: memoryview, length: int) -> int:
        """Bytes of a part that are received into place now, the last one of all only with a good trailer.

        Args:
            into: where the rest of the message goes.
            length: of the part, if it has not begun.
        """
        if not self._is_within_part and not self._begin_long(length):
            return 0
        buffer, done = self._buffer, 0
        before = self._coming
        if before:
            done = min(buffer.end - buffer.at, before)
            into[:done] = buffer.drop(done)
            if done < before and not self._is_dry:
                done += self._read_long(into[done:before])
            self._coming = before - done
            done -= not self._coming  # until the trailer is seen
        if not self._coming:
            done += self._see_trailer()
        if self._is_within_part:
            self._wait_for(0, self._coming + self._trailer_bytes)
        return done

    def _begin_long(self, length: int) -> bool:
        """Whether the header of the next part, of `length` bytes, is here; it is then done with."""
        buffer = self._buffer
        while (header := buffer.header()) is None:
            if self._is_dry:
                frame = part_frame_bytes(length)
                self._wait_for(frame, frame - (buffer.end - buffer.at))
                return False
            self._read(0, alone=True)
        if header != (Code.PART, length):
            self._find_end()
            self._disagree(*header, f"a part of {length} bytes is due")
            return False
        buffer.drop(HEADER.size)
        self._is_within_part = True
        self._coming = length
        self._trailer_bytes = 8 - (length & 7)
        return True

    def _see_trailer(self) -> bool:
        """End a part of which all bytes are here, if its trailer is; whether it is there and good."""
        buffer, size = self._buffer, self._trailer_bytes
        if buffer.end - buffer.at < size and not self._is_dry:
            self._read(size, alone=True)
        if buffer.end - buffer.at < size:
            return False
        self._is_within_part = False
        return buffer.drop(size)[-1] == 1

    def _wait_for(self, frame: int, missing: int) -> None:
        """Let the kernel wake us only when a part is all here, or much of it: waking costs as much as a part.

        It wakes us earlier when the peer leaves or gives up, since that ends the stream, and when there is no
        more room.
        """
        self._awaited = frame
        missing = min(missing, LOW_WATER_BYTES)
        if missing != self._low_water:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, missing)
            self._low_water = missing

    def _disagree(self, code: int, length: int, due: str) -> None:
        """Raise if the next frame is a part or an opening, which is not what is due."""
        if code in (Code.PART, Code.OPENING):
            what = f"a part of {length} bytes" if code == Code.PART else "the begin of a collective"
            raise DisagreementError(f"rank {self.peer} sends {what} where {due}")

    def _find_end(self) -> None:
        """Look whether the next frame is the peer's last one.

        Raises:
            ChannelClosedError: it is, and all of it is here.
            DisagreementError: it is no frame.
        """
        buffer = self._buffer
        header = buffer.header()
        if header is None or header[0] in (Code.PART, Code.OPENING):
            return
        code, length = header
        if code == Code.BYE:
            self._gone = PeerLeftError(self.peer)
            raise self._gone
        if code != Code.ABORT or length > REASON_BYTES:
            found = buffer.drop(HEADER.size).hex()
            raise DisagreementError(f"rank {self.peer} sent {found} where a frame begins")
        frame = HEADER.size + length
        while (missing := frame - (buffer.end - buffer.at)) > 0:
            if self._is_dry:
                self._wait_for(frame, missing)
                return
            self._read(frame, alone=False)
        reason = bytes(buffer.drop(frame)[HEADER.size :])
        self._gone = ChannelClosedError(self.peer, reason.decode(errors="replace"))
        raise self._gone

    def _read(self, frame_bytes: int, *, alone: bool) -> None:
        """Read to where frames land; see `ReceiveBuffer.room`."""
        room = self._buffer.room(frame_bytes, alone=alone)
        self._buffer.end += self._recv([room], len(room))

    def _read_long(self, into: memoryview) -> int:
        """Read the rest of a part to its place, and what ends it; returns the bytes of the part."""
        tail = self._buffer.behind(self._trailer_bytes)
        size = len(into)
        got = self._recv([into, tail], size + len(tail))
        if got > size:
            self._buffer.end += got - size
            return size
        return got

    def _recv(self, buffers: list[memoryview], asked: int) -> int:
        """Bytes read into the buffers, 0 where nothing is there now."""
        self._raise_if_gone()
        try:
            got = self._socket.recvmsg_into(buffers)[0]
        except BlockingIOError:
            self._is_dry = True
            return 0
        except OSError as error:
            self._gone = ChannelClosedError(self.peer)
            raise self._gone from error
        if not got:
            self._gone = ChannelClosedError(self.peer)
            raise self._gone
        self._is_dry = got < asked
        return got

    def last_words(self) -> ChannelClosedError:
        """See `Channel.last_words`; they may lie behind unread parts."""
        if self._gone is not None:
            return self._gone
        buffer = self._buffer
        unread = bytearray(buffer.memory[buffer.at : buffer.end])
        buffer.clear()
        try:
            while piece := self._socket.recv(_SKIM_BYTES):
                unread += piece
        except OSError:
            pass
        self._gone = self._find_last_words(unread)
        return self._gone

    def _find_last_words(self, unread: bytearray) -> ChannelClosedError:
        at = self._coming + self._trailer_bytes if self._is_within_part else 0
        while at + HEADER.size <= len(unread):
            code, length = HEADER.unpack_from(unread, at)
            body = at + HEADER.size
            if code == Code.BYE:
                return PeerLeftError(self.peer)
            if code == Code.ABORT:
                return ChannelClosedError(self.peer, unread[body : body + length].decode(errors="replace"))
            at = at + part_frame_bytes(length) if code == Code.PART else body + length
        return ChannelClosedError(self.peer)

    def drop_memory(self) -> None:
        """Let go of what has landed."""
        self._buffer.clear()

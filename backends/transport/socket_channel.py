"""The way to one other rank: bytes in order, both ways, and no call that blocks.

The two ends know from their programs which messages come in which order, and how long each is, so that
messages carry no names. A message is cut into parts of `part_bytes` from its start (the last is shorter), and
before the first message of a collective comes its opening, which says what the sender believes it to be.

    peer's stream:   opening | part part part | part | part part | opening | part ...
                               one message      next   next        next collective

The bytes are the library's (`native/channel.c`), the words are here, and the end, which is where care is
needed. A rank that leaves or gives up says so in a last frame, shuts its direction down and drops what still
comes; it waits only a moment for the kernel to get its bytes across, because a TCP socket closed over unread
bytes discards the bytes that it has not yet sent.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import socket
import struct
import termios
import time
import weakref
from typing import NoReturn

import numpy as np

from arborcast.backends.errors import ChannelClosedError, DisagreementError, PeerLeftError
from arborcast.backends.native.library import ChannelState, FrameCode, Gone, Moment, Trouble, at_once
from arborcast.backends.transport.frames import abort_frame, bye_frame
from arborcast.backends.transport.silence import unheard_s

FAREWELL_S = 1.0  # that the last bytes may take, also to a peer that waits for a processor
SILENT_S = 0.5  # a peer that has acknowledged nothing for so long is not waited for
_DISCARD_BYTES = 1 << 16
_DISCARDS = 64  # in a row: a peer that never stops sending must not keep this rank


_open: weakref.WeakSet[SocketChannel] = weakref.WeakSet()
"""The channels of this process."""


def _close_in_child() -> None:
    """After a fork: a child that lives longer than a rank that is killed must not keep its connections open.

    The peers would see no end and wait for the dead. Closing here ends nothing for the parent.
    """
    for channel in list(_open):
        channel.release()


os.register_at_fork(after_in_child=_close_in_child)


class SocketChannel:
    """Both directions between this rank and one other, over a connected stream socket.

    Memory is given as contiguous views of bytes (format B). All calls come from one thread at a time. All of
    them raise `ChannelClosedError` once the peer is gone and what it sent before has been read.

    Args:
        sock: connected; the channel owns it from now on.
        peer: the rank at the other end.
        part_bytes: the longest part of a message, the same at both ends.

    Attributes:
        peer: the other rank.
        transport: as reports call it: "sockets" or "shared memory".
        part_bytes: as given.
        state: the library's.
    """

    transport: str

    def __init__(self, sock: socket.socket, peer: int, part_bytes: int) -> None:
        sock.setblocking(False)
        self.peer = peer
        self.part_bytes = part_bytes
        self.state = ChannelState(fd=sock.fileno(), part_bytes=part_bytes, low_water=1, place=-1)
        self.address = ctypes.addressof(self.state)
        self._socket = sock
        self._farewell = bytearray()  # last frames for which the socket had no room
        self._gone: ChannelClosedError | None = None
        self._ending = False
        _open.add(self)

    def __del__(self) -> None:
        at_once.channel_release(self.address)

    def fileno(self) -> int:
        """The descriptor to poll, -1 once closed."""
        return self._socket.fileno()

    def unheard_s(self) -> float:
        """For how long the peer's kernel has not answered this one; 0 where it need not answer."""
        return unheard_s(self._socket)

    @property
    def wants_write(self) -> bool:
        """Whether something waits for room, so that `wanted` must be asked before a sleep."""
        return bool(self.state.is_full or self.state.outbox_bytes)

    def wanted(self, *, reads: bool = True) -> int | None:
        """What to poll the descriptor for before a sleep; None where `on_ready` is to be called at once.

        Args:
            reads: whether what comes is wanted.
        """
        events: int = at_once.channel_wanted(self.address, reads, bool(self.state.is_full))
        return None if events < 0 else events

    def on_ready(self) -> None:
        """To be called after a sleep: move what moves by itself, and notice the end."""
        self._done(at_once.channel_look(self.address))

    def open(self, opening: bytes) -> None:
        """Send the opening of a collective (`OPENING_BYTES` long); it is kept where there is no room now."""
        self._done(at_once.channel_open(self.address, opening, False))

    def send(self, data: memoryview) -> int:
        """Hand over a prefix of what is left of a message; returns its bytes, 0 where there is no room now.

        What was handed over may be overwritten. The next call continues where this one stopped.
        """
        return self._done(at_once.channel_send(self.address, _address_of(data), len(data)))

    def opening(self) -> bytes | None:
        """The peer's next opening, where that is what comes next and all of it is there."""
        self.state.is_dry = 0
        return bytes(self.state.opening) if self._done(at_once.channel_opening(self.address)) else None

    def receive(self, into: memoryview) -> int:
        """Fill a prefix of what is left of a message; returns its bytes, 0 where nothing is there now."""
        self.state.is_dry = 0
        arguments = self.address, _address_of(into), len(into)
        count = self._done(at_once.channel_receive(*arguments))
        if count or not len(into):
            return count
        self.on_ready()  # where the peer is gone, the socket says so
        return self._done(at_once.channel_receive(*arguments))

    def last_words(self) -> ChannelClosedError:
        """Why a peer is gone, as far as it said; what is unread may be lost, so this is for who gives up."""
        at_once.channel_last_words(self.address)
        return self.error()

    def error(self) -> ChannelClosedError:
        """What to raise when the peer is gone."""
        if self._gone is None:
            match self.state.gone:
                case Gone.LEFT:
                    self._gone = PeerLeftError(self.peer)
                case Gone.GAVE_UP:
                    reason = bytes(self.state.reason[: self.state.reason_have])
                    self._gone = ChannelClosedError(self.peer, reason.decode(errors="replace"))
                case _:
                    self._gone = ChannelClosedError(self.peer)
        return self._gone

    def fail(self, trouble: int) -> NoReturn:
        """Raise what the library's answer means.

        Raises:
            ChannelClosedError: the peer is gone.
            DisagreementError: it sends what is not due.
        """
        if trouble == Trouble.CLOSED:
            raise self.error()
        if trouble == Trouble.NO_MEMORY:
            raise MemoryError(f"for what waits to be sent to rank {self.peer}")
        state = self.state
        if trouble == Trouble.BROKEN:
            raise DisagreementError(
                f"rank {self.peer} says that more bytes are in the ring than its {state.ring_bytes}"
            )
        if trouble == Trouble.STRANGE:
            found = bytes(state.header).hex()
            raise DisagreementError(f"rank {self.peer} sent {found} where a frame begins")
        what = (
            "the begin of a collective"
            if state.code == FrameCode.OPENING
            else f"a part of {state.length} bytes"
        )
        due = f"a part of {state.due} bytes is due" if state.due >= 0 else "a collective should begin"
        raise DisagreementError(f"rank {self.peer} sends {what} where {due}")

    def _done(self, answer: int) -> int:
        if self._ending:
            raise self.error()
        if answer < 0:
            self.fail(answer)
        return answer

    def record(self, room: int) -> None:
        """From now on note what moves, up to so many times; `recorded` says what did."""
        self._moments = (Moment * room)()
        self.state.moments = ctypes.addressof(self._moments)
        self.state.moments_room, self.state.moments_count = room, 0

    def recorded(self) -> list[tuple[float, int]]:
        """The times, by `time.monotonic`, at which bytes went or (negative) came; they are forgotten."""
        found = [(moment.seconds, moment.bytes) for moment in self._moments[: self.state.moments_count]]
        self.state.moments_count = 0
        return found

    # ------------------------------------------------------------------ the end

    def abort(self, reason: str) -> None:
        """Tell the peer why this rank gives up, as far as that is possible without waiting, and close."""
        self.begin_close(reason)
        self.finish_close(time.monotonic() + FAREWELL_S)

    def close(self) -> None:
        """End both directions; what was handed over before still arrives. May be called twice."""
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
        if not self.state.gone:
            self._gone = ChannelClosedError(self.peer, "cannot be reached: this rank has closed the channel")
        self.error()
        self._farewell += self._unfinished(is_failure=reason is not None)
        self._farewell += bye_frame() if reason is None else abort_frame(reason)
        self._push()

    def finish_close(self, deadline: float) -> None:
        """Second half of an end: see the last bytes off until `deadline` (of `time.monotonic`), and close."""
        if self._socket.fileno() < 0:
            return
        try:
            while (self._push() or self._unsent_bytes()) and (left := deadline - time.monotonic()) > 0:
                if not self._discard() or self.unheard_s() > SILENT_S:
                    break
                # The kernel does not tell when the last bytes are acknowledged, so this looks again.
                events = select.POLLIN | (select.POLLOUT if self._farewell else 0)
                poll = select.poll()
                poll.register(self._socket, events)
                poll.poll(min(5, 1000 * left))
            self._discard()
        finally:
            self._release()

    def release(self) -> None:
        """Close this process's end of the socket without a word to the peer."""
        self._ending = True
        self.error()
        self._release()

    def _release(self) -> None:
        self._socket.close()
        self.state.fd = -1
        self.state.gone = self.state.gone or Gone.DIED
        at_once.channel_release(self.address)
        self.drop_memory()

    def _unfinished(self, *, is_failure: bool) -> bytes:
        """What must go before a last frame; zeros that end a part which has begun say that it is bad."""
        state = self.state
        waiting = ctypes.string_at(state.outbox, state.outbox_bytes) if state.outbox_bytes else b""
        return waiting + (bytes(state.owed + state.owed_trailer) if state.owed else b"")

    def _has_unsent(self) -> bool:
        """Whether something that goes another way than the last frame must go before it."""
        return False

    def drop_memory(self) -> None:
        """Let go of what the channel holds besides its socket."""

    def _push(self) -> bool:
        """Whether something is still to be sent after what the socket takes now; shut down when not."""
        if self._has_unsent():
            return True
        try:
            if self._farewell:
                del self._farewell[: self._socket.send(self._farewell)]
            if not self._farewell:
                self._socket.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return True
        except OSError:
            self._farewell.clear()
        return bool(self._farewell)

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


def _address_of(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data) if len(data) else 0

"""How two ranks connect: the handshake's bytes, and dialing another rank by a name or an address."""

from __future__ import annotations

import os
import socket
import struct
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from arborcast.backends.errors import ExecutionError
from arborcast.backends.transport.shared_memory import create_memory

_MAGIC = b"arborch1"
TOKEN_BYTES = 16
_HANDSHAKE = struct.Struct(f"<8s{TOKEN_BYTES}sIIQI?")
_ANSWER = struct.Struct("<8sI")
HANDSHAKE_BYTES = _HANDSHAKE.size
_LONGEST_REFUSAL = 4096
_RETRY_S = 0.01  # where the other's queue of callers is full
_LOOK_S = 0.1  # how often who waits for an answer asks whether to go on
_LONGEST_S = 86400.0  # of one wait; sockets know no more than 24.8 days
MEMORIES = 2
"""Descriptors that go with the handshake over a Unix socket: the memory for both ranks, and the shelf."""

_CREDENTIALS = struct.Struct("3i")  # process, user, group


class _Connection(Protocol):
    def close(self) -> None:
        """Close it here; the other end sees that where no other process has it open."""


closed_in_children: weakref.WeakSet[_Connection] = weakref.WeakSet()
"""Connections that are not yet channels: a forked child, which lives on, must not keep them open."""


def _close_in_child() -> None:
    for connection in list(closed_in_children):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


@dataclass(frozen=True, slots=True)
class Handshake:
    """The first bytes of a connection.

    Attributes:
        token: what the rank that is called has published; who lacks it belongs to somebody else.
        rank: who connects; along a further lane the lane's number (`transport.lanes`).
        to: to whom.
        slot_bytes: bytes of a slot of shared memory.
        slots: of each direction.
        wants_memory: whether a connection without memory is of no use.
    """

    token: bytes
    rank: int
    to: int
    slot_bytes: int
    slots: int
    wants_memory: bool

    def to_bytes(self) -> bytes:
        """`HANDSHAKE_BYTES` bytes."""
        return _HANDSHAKE.pack(
            _MAGIC, self.token, self.rank, self.to, self.slot_bytes, self.slots, self.wants_memory
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Handshake | None:
        """What `to_bytes` made; None where the bytes are something else."""
        magic, *said = _HANDSHAKE.unpack(data)
        return cls(*said) if magic == _MAGIC else None


def answer(refusal: str = "") -> bytes:
    """The answer to a handshake: welcome, or why not."""
    text = refusal.encode()[:_LONGEST_REFUSAL]
    return _ANSWER.pack(_MAGIC, len(text)) + text


@dataclass(frozen=True, slots=True)
class UnansweredCall:
    """A connection to a rank that has not answered yet.

    Attributes:
        sock: the connection.
        memory: descriptor of the memory that was sent along, None over TCP.
        came: descriptors that came with the answer; the call's to close until somebody takes them out.
    """

    sock: socket.socket
    memory: int | None = None
    came: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        closed_in_children.add(self.sock)

    def close(self) -> None:
        """Give up."""
        self.sock.close()
        if self.memory is not None:
            os.close(self.memory)
        while self.came:
            os.close(self.came.pop())


def is_of_this_user(sock: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket called, or listened, as the user of this one."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.geteuid())


def dial_unix(name: str, handshake: Handshake, shelf: int, deadline: float) -> UnansweredCall | None:
    """Call by an abstract name; None where no process of this user has it here, as in another namespace.

    New memory for both, and that of this rank's shelf, a descriptor, go along.

    Anybody may listen at a name that is free; who does so as somebody else gets no memory of ours.

    Raises:
        OSError: there is no memory, or the other rank ended (BrokenPipeError).
        TimeoutError: its queue stayed full until `deadline` (of `time.monotonic`).
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        while True:
            sock.settimeout(seconds_until(deadline))
            try:
                sock.connect(f"\0{name}")
                break
            except BlockingIOError:  # never a wait: the kernel says at once that a queue is full
                if time.monotonic() >= deadline:
                    raise TimeoutError from None
                time.sleep(_RETRY_S)
            except (ConnectionRefusedError, PermissionError):
                sock.close()
                return None
        if not is_of_this_user(sock):
            sock.close()
            return None
        memory = create_memory(handshake.slot_bytes, handshake.slots)
        try:
            socket.send_fds(sock, [handshake.to_bytes()], [memory, shelf])
        except BaseException:
            os.close(memory)
            raise
    except BaseException:
        sock.close()
        raise
    return UnansweredCall(sock, memory)


def dial_tcp(
    host: str, port: int, handshake: Handshake, deadline: float, *, source: str | None = None
) -> UnansweredCall:
    """Call by an address, from any of this host or from one.

    Raises:
        OSError: nobody is there.
        TimeoutError: nothing came back until `deadline` (of `time.monotonic`).
    """
    own = None if source is None else (source, 0)
    sock = socket.create_connection((host, port), seconds_until(deadline), own)
    try:
        sock.sendall(handshake.to_bytes())
    except BaseException:
        sock.close()
        raise
    return UnansweredCall(sock)


def read_reply(call: UnansweredCall, peer: int, deadline: float, look: Callable[[], None]) -> str:
    """What a rank refuses a call with, empty where it welcomes it; descriptors that come are the call's.

    Args:
        call: to it.
        peer: the rank.
        deadline: of `time.monotonic`.
        look: called while nothing comes; raises where waiting is of no more use.

    Raises:
        ExecutionError: who answered is not a rank.
        OSError: the connection ended.
        TimeoutError: no answer came until `deadline` (of `time.monotonic`).
    """
    magic, length = _ANSWER.unpack(_read(call, _ANSWER.size, deadline, look))
    if magic != _MAGIC or length > _LONGEST_REFUSAL:
        raise ExecutionError(f"what listens at the address of rank {peer} is not a rank of this group")
    return _read(call, length, deadline, look).decode(errors="replace")


def receive_descriptors(sock: socket.socket, most: int, came: list[int]) -> tuple[bytes, bool]:
    """Read from a Unix socket; descriptors that come along are put behind those that came.

    Returns:
        the bytes; and whether descriptors were lost, since this process has no room for them.

    Raises:
        OSError: as `recv` does.
    """
    said, descriptors, flags, _ = socket.recv_fds(sock, most, MEMORIES)
    came += descriptors
    for descriptor in descriptors:  # `recv_fds` of Python 3.11 forgets the flag that says so
        os.set_inheritable(descriptor, False)
    return said, bool(flags & socket.MSG_CTRUNC)


def _read(call: UnansweredCall, length: int, deadline: float, look: Callable[[], None]) -> bytes:
    data = b""
    while len(data) < length:
        call.sock.settimeout(min(_LOOK_S, seconds_until(deadline)))
        try:
            if call.sock.family == socket.AF_UNIX:
                got, _ = receive_descriptors(call.sock, length - len(data), call.came)
            else:
                got = call.sock.recv(length - len(data))
        except TimeoutError:
            look()
            if time.monotonic() >= deadline:
                raise
            continue
        if not got:
            raise ConnectionResetError
        data += got
    return data


def seconds_until(deadline: float) -> float:
    """For a timeout, which must not be 0: that would mean not to wait and not to say so."""
    return min(max(0.001, deadline - time.monotonic()), _LONGEST_S)

"""A channel through memory that both ranks see: a ring of bytes in each direction, and a socket that wakes.

The memory is anonymous (memfd) and reaches the peer as a descriptor, so that nothing remains of it whoever is
killed. The writer moves the head of its ring and the reader the tail; who finds nothing to do says so in the
ring and sleeps, and the other one then wakes it by a byte over the socket. While both are busy nobody calls
the kernel.

What a rank sends to several others of its host it lays on its shelf, memory that all of them see, and sends
each its place: it is copied once, not once for each.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import weakref

import numpy as np
import torch

from arborcast.backends.native.library import (
    RING_AT,
    SHELF_AT,
    SHELF_PLACES,
    ShelfState,
    at_once,
)
from arborcast.backends.transport.socket_channel import SocketChannel

SLOT_BYTES = 1024 << 10
SLOTS = 2
"""A ring is so many times the longest part long."""

PLACE_BYTES = 128 << 10
"""Of a shelf: the longest part that lies in one piece."""

LEAST_LAID_BYTES = 8 << 10
"""What is shorter is copied to each reader: that costs less than a place."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def memory_bytes(slot_bytes: int, slots: int) -> int:
    """Of both directions."""
    return 2 * _half(slot_bytes * slots)


def shelf_bytes(place_bytes: int = PLACE_BYTES) -> int:
    """Of the memory of a shelf; touched only as it is used."""
    return SHELF_AT + SHELF_PLACES * place_bytes


def _half(ring_bytes: int) -> int:
    return RING_AT + (ring_bytes + RING_AT - 1) // RING_AT * RING_AT


def create_memory(slot_bytes: int, slots: int) -> int:
    """Descriptor of anonymous memory for both directions; touched only as it is used.

    It is sealed: neither end can shrink it, at which the other would be killed (SIGBUS).
    """
    return _sealed(memory_bytes(slot_bytes, slots))


def _sealed(length: int) -> int:
    descriptor = os.memfd_create("arborcast", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(descriptor, length)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def why_no_memory() -> str | None:
    """Why this process cannot make memory for others and see it; None where it can.

    A filter of system calls, a sandbox or a missing /proc may forbid any step, so all are tried.
    """
    if not hasattr(os, "memfd_create"):
        return "this system has no anonymous shared memory (memfd_create)"
    try:
        descriptor = create_memory(8, 1)
        try:
            _mapped(descriptor, memory_bytes(8, 1))[0] = 1
        finally:
            os.close(descriptor)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind("")  # to a name that the kernel picks
    except (OSError, RuntimeError) as error:  # torch maps it
        return f"this process may not make shared memory: {' '.join(str(error).split())}"
    return None


def is_sealed(descriptor: int) -> bool:
    """Whether the length of memory that somebody sent can change no more."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:  # no such memory, but a file
        return False


class Shelf:
    """The memory in which a rank lays what several others of its host read.

    Args:
        place_bytes: the longest part that lies in one piece, the same on all ranks; a multiple of 8.
        least_bytes: messages that are shorter are copied to each reader.

    Attributes:
        descriptor: of the memory, sealed; for the others.
        state: the library's.
    """

    def __init__(self, place_bytes: int = PLACE_BYTES, least_bytes: int = LEAST_LAID_BYTES) -> None:
        assert place_bytes % 8 == 0, "elements must not lie in two places"
        self.descriptor = _sealed(shelf_bytes(place_bytes))
        try:
            self._memory = _mapped(self.descriptor, shelf_bytes(place_bytes))
        except BaseException:
            self.close()
            raise
        _shelves.add(self)
        first = int(np.frombuffer(self._memory, np.uint8).ctypes.data)
        self.state = ShelfState(readers=first, place_bytes=place_bytes, least_bytes=least_bytes)

    def close(self) -> None:
        """Give nobody the memory any more; who has it keeps it. May be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def release(self) -> None:
        """Hold the memory no longer; no channel may have it any more."""
        self.close()
        self.state.readers = None
        self._memory = memoryview(b"")


_shelves: weakref.WeakSet[Shelf] = weakref.WeakSet()
"""Those of this process."""


def _close_in_child() -> None:
    """After a fork, when the child's channels are closed: it keeps no memory of its parent."""
    for shelf in list(_shelves):
        shelf.release()


os.register_at_fork(after_in_child=_close_in_child)


class SharedMemoryChannel(SocketChannel):
    """A channel between two ranks on one host.

    Args:
        sock: a connected Unix stream socket; the channel owns it from now on.
        peer: the rank at the other end.
        descriptor: what `create_memory` gave at one of the ends; still the caller's to close.
        is_first: whether this end sends through the first half of the memory; the other end must not.
        slot_bytes: the longest part, the same at both ends; a multiple of 8.
        slots: of each direction, the same at both ends.
        shelf: this rank's, None where it has none.
        their_shelf: descriptor of the peer's; still the caller's to close.
        place_bytes: of the peer's.
    """

    transport = "shared memory"

    def __init__(
        self,
        sock: socket.socket,
        peer: int,
        descriptor: int,
        *,
        is_first: bool,
        slot_bytes: int = SLOT_BYTES,
        slots: int = SLOTS,
        shelf: Shelf | None = None,
        their_shelf: int | None = None,
        place_bytes: int = PLACE_BYTES,
    ) -> None:
        super().__init__(sock, peer, slot_bytes)
        assert slot_bytes % 8 == 0, "elements must not lie across the end of a ring"
        self._memory = _mapped(descriptor, memory_bytes(slot_bytes, slots))
        first = int(np.frombuffer(self._memory, np.uint8).ctypes.data)
        rings = first, first + _half(slots * slot_bytes)
        self.state.ring_bytes = slots * slot_bytes
        self.state.out, self.state.in_ = rings if is_first else rings[::-1]
        self._shelf, self._their_shelf = shelf, memoryview(b"")
        if shelf is not None:
            self.state.shelf = ctypes.addressof(shelf.state)
        if their_shelf is not None:
            self._their_shelf = _mapped(their_shelf, shelf_bytes(place_bytes))
            self.state.their_shelf = np.frombuffer(self._their_shelf, np.uint8).ctypes.data
            self.state.place_bytes = place_bytes

    def drop_memory(self) -> None:
        """See `SocketChannel.drop_memory`."""
        self.state.out = self.state.in_ = self.state.shelf = self.state.their_shelf = None
        self._memory = self._their_shelf = memoryview(b"")
        self._shelf = None

    def _unfinished(self, *, is_failure: bool) -> bytes:
        """Nothing: it goes through the ring, if at all."""
        if is_failure:
            at_once.channel_release(self.address)
        return b""

    def _has_unsent(self) -> bool:
        """Whether openings still wait for room in the ring."""
        state = self.state
        return bool(
            state.outbox_bytes and not state.gone and at_once.channel_look(self.address) == 0
        ) and bool(state.outbox_bytes)


def _mapped(descriptor: int, length: int) -> memoryview:
    """The memory of a descriptor, mapped as long as a view of it lives.

    Python's own `mmap` would keep a copy of the descriptor as long.
    """
    path = f"/proc/self/fd/{descriptor}"
    return torch.from_file(path, shared=True, size=length, dtype=torch.uint8).numpy().data

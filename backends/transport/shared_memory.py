"""A channel through memory that both ranks see: a ring of bytes in each direction, and a socket that wakes.

The memory is anonymous (memfd) and reaches the peer as a descriptor, so that nothing remains of it whoever is
killed. The writer moves the head of its ring and the reader the tail; who finds nothing to do says so in the
ring and sleeps, and the other one then wakes it by a byte over the socket. While both are busy nobody calls
the kernel.
"""

from __future__ import annotations

import fcntl
import os
import socket

import numpy as np
import torch

from arborcast.backends.native.library import RING_AT, at_once
from arborcast.backends.transport.socket_channel import SocketChannel

SLOT_BYTES = 1024 << 10
SLOTS = 2
"""A ring is so many times the longest part long."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def memory_bytes(slot_bytes: int, slots: int) -> int:
    """Of both directions."""
    return 2 * _half(slot_bytes * slots)


def _half(ring_bytes: int) -> int:
    return RING_AT + (ring_bytes + RING_AT - 1) // RING_AT * RING_AT


def create_memory(slot_bytes: int, slots: int) -> int:
    """Descriptor of anonymous memory for both directions; touched only as it is used.

    It is sealed: neither end can shrink it, at which the other would be killed (SIGBUS).
    """
    descriptor = os.memfd_create("arborcast", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.truncate(descriptor, memory_bytes(slot_bytes, slots))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_sealed(descriptor: int) -> bool:
    """Whether the length of memory that somebody sent can change no more."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:  # no such memory, but a file
        return False


class SharedMemoryChannel(SocketChannel):
    """A channel between two ranks on one host.

    Args:
        sock: a connected Unix stream socket; the channel owns it from now on.
        peer: the rank at the other end.
        descriptor: what `create_memory` gave at one of the ends; still the caller's to close.
        is_first: whether this end sends through the first half of the memory; the other end must not.
        slot_bytes: the longest part, the same at both ends; a multiple of 8.
        slots: of each direction, the same at both ends.
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
    ) -> None:
        super().__init__(sock, peer, slot_bytes)
        assert slot_bytes % 8 == 0, "elements must not lie across the end of a ring"
        self._memory = _mapped(descriptor, memory_bytes(slot_bytes, slots))
        first = int(np.frombuffer(self._memory, np.uint8).ctypes.data)
        rings = first, first + _half(slots * slot_bytes)
        self.state.ring_bytes = slots * slot_bytes
        self.state.out_ring, self.state.in_ring = rings if is_first else rings[::-1]

    def drop_memory(self) -> None:
        """See `SocketChannel.drop_memory`."""
        self.state.out_ring = self.state.in_ring = None
        self._memory = memoryview(b"")

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

"""What passes the channels of a rank, and when: seen by channels put around the engine's own.

The engine is not changed and does not know.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from arborcast.backends.dataflow.engine import Connections
from arborcast.backends.errors import ChannelClosedError
from arborcast.backends.transport.channel import Channel


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes that went to a peer, or came from it.

    Attributes:
        at: by `time.perf_counter`.
        peer: the other end.
        count: bytes.
    """

    at: float
    peer: int
    count: int


class Recorder:
    """Takes the place of a network, with recording channels around its own."""

    def __init__(self) -> None:
        self.sent: list[Moment] = []
        self.received: list[Moment] = []
        self._networks: list[Connections] = []
        self._channels: dict[int, Channel] = {}  # as far as they have been asked for

    def __call__(self, network: Connections) -> Connections:
        """Stand before a network."""
        self._networks = [network]
        self._channels = {}
        return self

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self._networks[0].size

    @size.setter
    def size(self, size: int) -> None:
        raise AttributeError(f"a recorder has the size of its network, got {size}")

    @property
    def channels(self) -> Mapping[int, Channel]:
        """By peer."""
        for peer, channel in self._networks[0].channels.items():
            if peer not in self._channels:
                self._channels[peer] = _Recording(channel, self)
        return self._channels

    def abort(self, reason: str) -> None:
        """Tell all peers, and close."""
        self._networks[0].abort(reason)

    def forget(self) -> None:
        """Begin anew."""
        self.sent.clear()
        self.received.clear()


class _Recording(Channel):
    """A channel that notes when how many bytes went, and does nothing else itself."""

    def __init__(self, inner: Channel, recorder: Recorder) -> None:
        self._inner = inner
        self._sent, self._received = recorder.sent, recorder.received
        self.peer = inner.peer
        self.transport = inner.transport
        self.part_bytes = inner.part_bytes

    @property
    def wants_read(self) -> bool:
        return self._inner.wants_read

    @property
    def wants_write(self) -> bool:
        return self._inner.wants_write

    @property
    def has_unread(self) -> bool:
        return self._inner.has_unread

    def send(self, data: memoryview) -> int:
        return self._noted(self._sent, self._inner.send(data))

    def send_all(self, messages: Sequence[memoryview]) -> int:
        return self._noted(self._sent, self._inner.send_all(messages))

    def receive(self, into: memoryview, *, look: bool = True) -> int:
        return self._noted(self._received, self._inner.receive(into, look=look))

    def take(self, length: int, *, look: bool = True) -> memoryview | None:
        part = self._inner.take(length, look=look)
        self._noted(self._received, 0 if part is None else length)
        return part

    def _noted(self, moments: list[Moment], count: int) -> int:
        if count:
            moments.append(Moment(time.perf_counter(), self.peer, count))
        return count

    def fileno(self) -> int:
        return self._inner.fileno()

    def on_ready(self) -> None:
        self._inner.on_ready()

    def open(self, opening: bytes) -> None:
        self._inner.open(opening)

    def opening(self) -> bytes | None:
        return self._inner.opening()

    def last_words(self) -> ChannelClosedError:
        return self._inner.last_words()

    def abort(self, reason: str) -> None:
        self._inner.abort(reason)

    def close(self) -> None:
        self._inner.close()

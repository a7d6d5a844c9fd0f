"""What passes the channels of a rank, and when: as its channels note it.

The engine does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from arborcast.backends.dataflow.engine import Connections
from arborcast.backends.transport.socket_channel import SocketChannel


@dataclass(frozen=True, slots=True)
class RecordedBytes:
    """Bytes that went to a peer, or came from it.

    Attributes:
        at: by `time.perf_counter`.
        peer: the other end.
        count: bytes.
    """

    at: float
    peer: int
    count: int


MOMENTS = 1 << 16
"""Of each channel in one run, at most."""


class Recorder:
    """Takes the place of a network, and has its channels note what passes."""

    def __init__(self) -> None:
        self._sent: list[RecordedBytes] = []
        self._received: list[RecordedBytes] = []
        self._networks: list[Connections] = []
        self._watched: dict[int, SocketChannel] = {}

    def __call__(self, network: Connections) -> Connections:
        """Stand before a network."""
        self._networks = [network]
        self._watched = {}
        return self

    @property
    def sent(self) -> list[RecordedBytes]:
        """What went since the last `forget`, in its order for each peer."""
        self._take_over()
        return self._sent

    @property
    def received(self) -> list[RecordedBytes]:
        """What came, likewise."""
        self._take_over()
        return self._received

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self._networks[0].size

    @size.setter
    def size(self, size: int) -> None:
        raise AttributeError(f"a recorder has the size of its network, got {size}")

    @property
    def channels(self) -> Mapping[int, SocketChannel]:
        """By peer."""
        channels = self._networks[0].channels
        for peer in channels.keys() - self._watched.keys():
            self._watched[peer] = channels[peer]
            channels[peer].record(MOMENTS)
        return channels

    def abort(self, reason: str) -> None:
        """Tell all peers, and close."""
        self._networks[0].abort(reason)

    def forget(self) -> None:
        """Begin anew."""
        self._take_over()
        self._sent, self._received = [], []

    def _take_over(self) -> None:
        for peer, channel in self._watched.items():
            for at, count in channel.recorded():
                (self._sent if count > 0 else self._received).append(RecordedBytes(at, peer, abs(count)))

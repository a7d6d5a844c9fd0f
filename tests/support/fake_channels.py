"""Channels between threads of one process: real ones, but narrow, and whimsical.

Some go through sockets, some through memory. Rings hold `capacity` bytes, a place on a shelf 16, and every
look at a socket or a ring moves at most so many bytes as a seed has decided.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from arborcast.backends.dataflow.engine import Engine
from arborcast.backends.transport.shared_memory import SharedMemoryChannel, Shelf, create_memory
from arborcast.backends.transport.socket_channel import FAREWELL_S, SocketChannel
from arborcast.backends.transport.stream import StreamChannel

PLACE_BYTES = 16


class ThreadNetwork:
    """The channels of one rank; see `backends.transport.network.Network`."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.channels: dict[int, SocketChannel] = {}
        self.reason: str | None = None

    def abort(self, reason: str) -> None:
        self.reason = reason
        self._end(reason)

    def close(self) -> None:
        self._end(None)

    def _end(self, reason: str | None) -> None:
        for channel in self.channels.values():
            channel.begin_close(reason)
        deadline = time.monotonic() + FAREWELL_S
        for channel in self.channels.values():
            channel.finish_close(deadline)

    def vanish(self) -> None:
        """Go without a word, as a process does that is killed."""
        for channel in self.channels.values():
            channel.release()


def fake_networks(
    size: int, *, capacity: int = 64, part_bytes: int = 32, seed: int = 0
) -> tuple[ThreadNetwork, ...]:
    """One for every rank, each connected to all others."""
    networks = tuple(ThreadNetwork(rank, size) for rank in range(size))
    chance = random.Random(seed)
    shelves = [Shelf(PLACE_BYTES, least_bytes=1) for _ in networks]
    for low in range(size):
        for high in range(low + 1, size):
            socks = socket.socketpair()
            in_memory = chance.random() < 0.5
            memory = create_memory(capacity // 8 * 8 + 8, 1)
            for sock, (rank, peer) in zip(socks, ((low, high), (high, low)), strict=True):
                channel: SocketChannel
                if in_memory:
                    channel = SharedMemoryChannel(
                        sock,
                        peer,
                        memory,
                        is_first=rank == low,
                        slot_bytes=capacity // 8 * 8 + 8,
                        slots=1,
                        shelf=shelves[rank],
                        their_shelf=shelves[peer].descriptor,
                        place_bytes=PLACE_BYTES,
                    )
                else:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
                    channel = StreamChannel(sock, peer)
                channel.state.part_bytes = part_bytes
                channel.state.most = chance.choice([0, 1, 7, 16, 33, 200])
                networks[rank].channels[peer] = channel
            os.close(memory)
    for shelf in shelves:
        shelf.close()
    return networks


def in_threads(functions: Sequence[Callable[[], Any]], *, timeout_s: float = 60) -> list[Any]:
    """What each function returned or raised, each in a thread of its own."""
    results: list[Any] = [TimeoutError("still running")] * len(functions)

    def call(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=call, args=(index,), daemon=True) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    return results


def engines_of(networks: tuple[ThreadNetwork, ...], timeout_s: float = 30) -> list[Engine]:
    return [Engine(network.rank, network, timeout_s=timeout_s, search_s=0.05) for network in networks]


def each(engines: list[Engine], function: Callable[[Engine], Any], timeout_s: float = 60) -> list[Any]:
    """What a function of each rank's engine returned or raised, all at the same time."""
    return in_threads([lambda engine=engine: function(engine) for engine in engines], timeout_s=timeout_s)  # type: ignore[misc]


def close(engines: list[Engine], networks: tuple[ThreadNetwork, ...]) -> None:
    for engine, network in zip(engines, networks, strict=True):
        engine.close()
        network.close()

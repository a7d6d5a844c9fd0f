"""Channels between threads of one process: small, whimsical, and polled through real sockets.

A pipe holds `capacity` bytes of parts, however few. Every call may move fewer bytes than it could, or none;
a seed decides. Like shared memory they tell each other of news by a byte over a socket, so that a thread
sleeps as a real engine does, and sending may read that byte away.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from arborcast.backends.dataflow.engine import Engine
from arborcast.backends.errors import ChannelClosedError, PeerLeftError
from arborcast.backends.transport.channel import Channel


class Pipe:
    """One direction: frames in order, each a kind and its bytes."""

    def __init__(self) -> None:
        self.frames: deque[tuple[str, bytearray]] = deque()
        self.held = 0


class FakeChannel(Channel):
    """One end."""

    transport = "memory of one process"

    def __init__(
        self,
        peer: int,
        sock: socket.socket,
        outward: Pipe,
        inward: Pipe,
        lock: threading.Lock,
        *,
        capacity: int,
        part_bytes: int,
        chance: random.Random,
    ) -> None:
        sock.setblocking(False)
        self.peer = peer
        self.part_bytes = part_bytes
        self.sock = sock
        self._out, self._in, self._lock = outward, inward, lock
        self._capacity = capacity
        self._chance = chance
        self._starved = self._refused = False
        self._landing = bytearray()
        self._gone: ChannelClosedError | None = None
        self._closed = False

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def wants_read(self) -> bool:
        return self._starved

    @property
    def wants_write(self) -> bool:
        return self._refused

    @property
    def has_unread(self) -> bool:
        with self._lock:
            return self._next() in {"bytes", "opening"}

    def on_ready(self) -> None:
        self._starved = self._refused = False
        self._hear()
        self._raise_if_ended()

    def _hear(self) -> None:
        """Read the bytes that tell of news; at the end of them the peer has gone."""
        try:
            while self.sock.recv(64):
                pass
        except BlockingIOError:
            return
        except ConnectionResetError:  # it left what we have sent unread
            pass
        self._gone = self._gone or self.last_words()

    def _tell(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            self.sock.send(b".")

    def open(self, opening: bytes) -> None:
        if self._gone is not None:
            raise self._gone
        with self._lock:
            self._out.frames.append(("opening", bytearray(opening)))
        self._tell()

    def send(self, data: memoryview) -> int:
        if self._chance.random() < 0.2:
            self._hear()
        if self._gone is not None:
            raise self._gone
        if self._chance.random() < 0.2:
            self._refused = True
            return 0
        with self._lock:
            room = self._capacity - self._out.held
            count = min(room, len(data))
            self._starved = room == 0
            if count > 1 and self._chance.random() < 0.3:
                count = self._chance.randint(1, count)
            if count:
                self._out.held += count
                self._out.frames.append(("bytes", bytearray(data[:count])))
        if count:
            self._tell()
        return count

    def opening(self) -> bytes | None:
        with self._lock:
            found = bytes(self._in.frames.popleft()[1]) if self._next() == "opening" else None
        if found is None:
            self._raise_if_ended()
        return found

    def receive(self, into: memoryview, *, look: bool = True) -> int:
        data = self._read(len(into))
        into[: len(data)] = data
        return len(data)

    def take(self, length: int, *, look: bool = True) -> memoryview | None:
        assert length <= self.part_bytes
        self._landing += self._read(length - len(self._landing))
        if len(self._landing) < length:
            return None
        part, self._landing = self._landing, bytearray()
        return memoryview(part)

    def _read(self, most: int) -> bytearray:
        found = bytearray()
        if self._chance.random() < 0.3:  # as where the same bytes tell of data and of room
            self._hear()
            self._starved = False
        if self._chance.random() < 0.8:
            with self._lock:
                while len(found) < most and self._next() == "bytes":
                    frame = self._in.frames[0][1]
                    piece = frame[: most - len(found)]
                    found += piece
                    del frame[: len(piece)]
                    if not frame:
                        self._in.frames.popleft()
                    if self._chance.random() < 0.2:
                        break
                self._in.held -= len(found)
        if found:
            self._tell()
        else:
            self._raise_if_ended()
        return found

    def _next(self) -> str:
        return self._in.frames[0][0] if self._in.frames else ""

    def _raise_if_ended(self) -> None:
        with self._lock:
            kind, data = self._in.frames[0] if self._in.frames else ("", bytearray())
        if kind == "abort":
            self._gone = ChannelClosedError(self.peer, data.decode())
        elif kind == "bye":
            self._gone = PeerLeftError(self.peer)
        elif kind or self._gone is None:
            return
        raise self._gone

    def last_words(self) -> ChannelClosedError:
        with self._lock:
            for kind, data in self._in.frames:
                if kind == "abort":
                    return ChannelClosedError(self.peer, data.decode())
        return ChannelClosedError(self.peer)

    def abort(self, reason: str) -> None:
        self._end(("abort", bytearray(reason.encode())))

    def close(self) -> None:
        self._end(("bye", bytearray()))

    def vanish(self) -> None:
        """Go without a word, as a process does that is killed."""
        self._end(None)

    def _end(self, frame: tuple[str, bytearray] | None) -> None:
        if self._closed:
            return
        self._closed = True
        if frame is not None:
            with self._lock:
                self._out.frames.append(frame)
        self.sock.close()


class FakeNetwork:
    """The channels of one rank; see `backends.transport.network.Network`."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.channels: dict[int, FakeChannel] = {}
        self.reason: str | None = None

    def abort(self, reason: str) -> None:
        self.reason = reason
        for channel in self.channels.values():
            channel.abort(reason)

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()

    def vanish(self) -> None:
        for channel in self.channels.values():
            channel.vanish()


def fake_networks(
    size: int, *, capacity: int = 64, part_bytes: int = 32, seed: int = 0
) -> tuple[FakeNetwork, ...]:
    """One for every rank, each connected to all others."""
    networks = tuple(FakeNetwork(rank, size) for rank in range(size))
    for low in range(size):
        for high in range(low + 1, size):
            socks = socket.socketpair()
            pipes, lock = (Pipe(), Pipe()), threading.Lock()
            for end, (rank, peer) in enumerate(((low, high), (high, low))):
                networks[rank].channels[peer] = FakeChannel(
                    peer,
                    socks[end],
                    pipes[end],
                    pipes[1 - end],
                    lock,
                    capacity=capacity,
                    part_bytes=part_bytes,
                    chance=random.Random(seed * 10007 + rank * 101 + peer),
                )
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


def engines_of(networks: tuple[FakeNetwork, ...], timeout_s: float = 30) -> list[Engine]:
    return [Engine(network.rank, network, timeout_s=timeout_s, search_s=0.05) for network in networks]


def each(engines: list[Engine], function: Callable[[Engine], Any], timeout_s: float = 60) -> list[Any]:
    """What a function of each rank's engine returned or raised, all at the same time."""
    return in_threads([lambda engine=engine: function(engine) for engine in engines], timeout_s=timeout_s)  # type: ignore[misc]


def close(engines: list[Engine], networks: tuple[FakeNetwork, ...]) -> None:
    for engine, network in zip(engines, networks, strict=True):
        engine.close()
        network.close()

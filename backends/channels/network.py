"""The connections of one rank to the others of its group: made on demand, by shared memory within a host.

Ranks find each other through the group's store alone. Of two ranks that connect, the higher dials; it first
tries the lower one's Unix socket where both run under one kernel, and its TCP address otherwise.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from types import MappingProxyType

import torch.distributed as dist

from backends.channels.addresses import boot_id, listener, listening_address
from backends.channels.greeting import (
    ANSWER_BYTES,
    GREETING_BYTES,
    TOKEN_BYTES,
    Greeting,
    answer,
    refusal_length,
)
from backends.channels.shared_memory import SLOT_BYTES, SLOTS, SharedMemoryChannel, create_memory
from backends.channels.socket_channel import FAREWELL_S, SocketChannel
from backends.channels.stream import StreamChannel
from backends.errors import ExecutionError

TRANSPORTS = ("auto", "sockets", "shared memory")
_PREFIX = "arborcast/channels"


class _Guest:
    """A connection that somebody made to this rank and that is not yet a channel."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.said = b""
        self.descriptors: list[int] = []
        self.greeting: Greeting | None = None

    def listen(self) -> bool:
        """Read on; False where it is gone or says something else than a greeting."""
        try:
            if self.sock.family == socket.AF_UNIX:
                said, descriptors, _, _ = socket.recv_fds(self.sock, GREETING_BYTES - len(self.said), 1)
                self.descriptors += descriptors
            else:
                said = self.sock.recv(GREETING_BYTES - len(self.said))
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.said += said
        if len(self.said) == GREETING_BYTES:
            self.greeting = Greeting.from_bytes(self.said)
            return self.greeting is not None
        return bool(said)

    def close(self) -> None:
        self.sock.close()
        self.close_descriptors()

    def close_descriptors(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


class Network:
    """The channels of one rank.

    Args:
        store: of the group: every rank the same, and no other group under the same prefix.
        rank: of this process in the group.
        size: ranks in the group.
        timeout_s: how long `connect` may take.
        transport: "auto" (shared memory inside a host, sockets otherwise), "sockets" or "shared memory".
        address: to listen at; found as `listening_address` says where None.
        slot_bytes: of shared memory, the same on all ranks.
        slots: of shared memory in each direction of each pair, the same on all ranks.

    Raises:
        ExecutionError: no such transport, no such address, or no shared memory where nothing else is wanted.

    Attributes:
        why_no_shared_memory: what this host lacks for it, None where it has all.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        transport: str = "auto",
        address: str | None = None,
        slot_bytes: int = SLOT_BYTES,
        slots: int = SLOTS,
    ) -> None:
        if transport not in TRANSPORTS:
            raise ExecutionError(f"transport {transport!r}: there are {', '.join(map(repr, TRANSPORTS))}")
        self.rank = rank
        self.size = size
        self._store = store
        self._timeout_s = timeout_s
        self._transport = transport
        self._slot_bytes = slot_bytes
        self._slots = slots
        self._boot_id = boot_id()
        self.why_no_shared_memory = self._missing()
        if transport == "shared memory" and self.why_no_shared_memory:
            raise ExecutionError(f"rank {rank} cannot use shared memory: {self.why_no_shared_memory}")
        self._channels: dict[int, SocketChannel] = {}
        self._guests: list[_Guest] = []
        self._listeners: list[socket.socket] = []
        self._token: bytes | None = None
        try:
            self._publish(address)
        except BaseException:
            self.close()
            raise

    @property
    def channels(self) -> Mapping[int, SocketChannel]:
        """The channel to each rank that `connect` has connected."""
        return MappingProxyType(self._channels)

    def connect(self, peers: Iterable[int]) -> None:
        """Connect to ranks; those that are connected stay so.

        Every rank calls it at the same point of its program, `b` among the peers of `a` where `a` is among those
        of `b`.

        Raises:
            ExecutionError: a rank did not come in time, refused or cannot be reached as asked; the message names
                it. The network is closed then.
        """
        deadline = time.monotonic() + self._timeout_s
        missing = sorted(set(peers) - self._channels.keys() - {self.rank})
        if not missing:
            return
        called: dict[int, tuple[socket.socket, int | None]] = {}
        try:
            self._learn_token(deadline)
            below = [peer for peer in missing if peer < self.rank]
            entries = self._entries(below, deadline)
            for peer in below:
                called[peer] = self._dial(peer, entries[peer], deadline)
            self._welcome({peer for peer in missing if peer > self.rank}, deadline)
            for peer in below:
                self._hear(peer, called[peer][0], deadline)
                self._adopt(peer, *called.pop(peer), is_first=True)
        except BaseException as error:
            for sock, descriptor in called.values():
                sock.close()
                if descriptor is not None:
                    os.close(descriptor)
            self.abort(f"could not connect: {error}")
            raise

    def abort(self, reason: str) -> None:
        """Tell all peers why this rank gives up, as far as that is possible within a moment, and close."""
        self._end(reason)

    def close(self) -> None:
        """Leave in good order: what was handed over still arrives. May be called twice."""
        self._end(None)

    def _end(self, reason: str | None) -> None:
        for sock in self._listeners:
            sock.close()
        for guest in self._guests:
            guest.close()
        self._listeners.clear()
        self._guests.clear()
        for channel in self._channels.values():
            channel.hang_up(reason)
        deadline = time.monotonic() + FAREWELL_S
        for channel in self._channels.values():
            channel.finish(deadline)

    def _missing(self) -> str | None:
        if not hasattr(os, "memfd_create"):
            return "this system has no anonymous shared memory (memfd_create)"
        return None if self._boot_id else "this system does not tell which processes share a kernel (boot_id)"

    def _publish(self, address: str | None) -> None:
        """Listen, and say in the store where."""
        if self.rank == 0:
            self._store.set(f"{_PREFIX}/token", secrets.token_hex(TOKEN_BYTES))
        here = listening_address(self._store, address)
        try:
            self._listeners.append(listener(here))
        except OSError as error:
            raise ExecutionError(f"rank {self.rank} cannot listen at {here}: {error}") from error
        entry = {"address": self._listeners[0].getsockname()[:2]}
        if self._transport != "sockets" and self.why_no_shared_memory is None:
            name = f"arborcast-{secrets.token_hex(TOKEN_BYTES)}"
            local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listeners.append(local)
            local.bind(f"\0{name}")
            local.listen(socket.SOMAXCONN)
            entry |= {"boot_id": self._boot_id, "name": name}
        for sock in self._listeners:
            sock.setblocking(False)
        self._store.set(f"{_PREFIX}/{self.rank}", json.dumps(entry))

    def _learn_token(self, deadline: float) -> None:
        if self._token is None:
            self._await_keys({f"{_PREFIX}/token": 0}, deadline)
            self._token = bytes.fromhex(self._store.get(f"{_PREFIX}/token").decode())

    def _entries(self, peers: list[int], deadline: float) -> dict[int, dict[str, object]]:
        """What ranks have published."""
        self._await_keys({f"{_PREFIX}/{peer}": peer for peer in peers}, deadline)
        return {peer: json.loads(self._store.get(f"{_PREFIX}/{peer}")) for peer in peers}

    def _await_keys(self, owners: dict[str, int], deadline: float) -> None:
        try:
            if owners:
                left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
                self._store.wait(list(owners), left)
        except RuntimeError as error:
            absent = [owner for key, owner in owners.items() if not self._store.check([key])]
            raise self._late(absent) from error

    def _late(self, absent: Iterable[int]) -> ExecutionError:
        who = ", ".join(map(str, sorted(absent)))
        return ExecutionError(
            f"rank {self.rank} waited {self._timeout_s:g} s for a connection with rank {who}, which did not come"
        )

    def _dial(self, peer: int, entry: dict[str, object], deadline: float) -> tuple[socket.socket, int | None]:
        """A connection to a rank, greeting sent, and the memory that goes with it."""
        greeting = self._greeting(peer).to_bytes()
        name = entry.get("name")
        if self._transport != "sockets" and name is not None and entry.get("boot_id") == self._boot_id:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                _connect_unix(sock, f"\0{name}", deadline)
            except OSError:  # another network namespace, which has its own abstract names
                sock.close()
            else:
                descriptor = create_memory(self._slot_bytes, self._slots)
                socket.send_fds(sock, [greeting], [descriptor])
                return sock, descriptor
        if self._transport == "shared memory":
            raise ExecutionError(f"ranks {peer} and {self.rank} cannot share memory: they see no common host")
        host, port = entry["address"]  # type: ignore[misc]
        try:
            sock = socket.create_connection((host, port), max(0.001, deadline - time.monotonic()))
            sock.sendall(greeting)
        except TimeoutError as error:
            raise self._late([peer]) from error
        except OSError as error:
            raise ExecutionError(f"rank {self.rank} cannot reach rank {peer} at {host}: {error}") from error
        return sock, None

    def _greeting(self, to: int) -> Greeting:
        assert self._token is not None
        return Greeting(self._token, self.rank, to, self._slot_bytes, self._slots)

    def _hear(self, peer: int, sock: socket.socket, deadline: float) -> None:
        """Wait for the answer to a greeting."""
        data = b""
        length = ANSWER_BYTES
        try:
            while len(data) < length:
                sock.settimeout(max(0.001, deadline - time.monotonic()))
                got = sock.recv(length - len(data))
                if not got:
                    raise ExecutionError(f"rank {peer} ended while rank {self.rank} connected to it")
                data += got
                if len(data) == ANSWER_BYTES:
                    length += refusal_length(data, peer)
        except TimeoutError as error:
            raise self._late([peer]) from error
        except OSError as error:
            raise ExecutionError(f"rank {peer} ended while rank {self.rank} connected to it") from error
        if length > ANSWER_BYTES:
            raise ExecutionError(data[ANSWER_BYTES:].decode(errors="replace"))

    def _welcome(self, expected: set[int], deadline: float) -> None:
        """Accept the connections of ranks; those of others are kept for their time, strangers are dropped."""
        with selectors.DefaultSelector() as selector:
            for source in (*self._listeners, *(guest.sock for guest in self._guests if not guest.greeting)):
                selector.register(source, selectors.EVENT_READ)
            guests = {guest.sock: guest for guest in self._guests}
            while expected := self._seat(expected):
                left = deadline - time.monotonic()
                events = selector.select(max(0, left))
                if not events and left <= 0:
                    raise self._late(expected)
                for key, _ in events:
                    sock = key.fileobj
                    assert isinstance(sock, socket.socket)
                    if sock in self._listeners:
                        with contextlib.suppress(OSError):
                            guest = _Guest(sock.accept()[0])
                            self._guests.append(guest)
                            guests[guest.sock] = guest
                            selector.register(guest.sock, selectors.EVENT_READ)
                        continue
                    guest = guests[sock]
                    stays = guest.listen()
                    if guest.greeting or not stays:
                        selector.unregister(sock)
                    if not stays:
                        self._guests.remove(guest)
                        guest.close()

    def _seat(self, expected: set[int]) -> set[int]:
        """Make channels of the guests that are expected; returns who is still to come."""
        for guest in list(self._guests):
            greeting = guest.greeting
            if greeting is None:
                continue
            if greeting.token != self._token or greeting.to != self.rank:
                self._guests.remove(guest)
                guest.close()
            elif greeting.rank in expected:
                self._guests.remove(guest)
                self._receive(guest, greeting)
                expected = expected - {greeting.rank}
        return expected

    def _receive(self, guest: _Guest, greeting: Greeting) -> None:
        """Answer a rank's greeting; a channel is made unless it is refused."""
        peer = greeting.rank
        refusal = ""
        if (greeting.slot_bytes, greeting.slots) != (self._slot_bytes, self._slots):
            refusal = (
                f"rank {peer} has {greeting.slots} slots of {greeting.slot_bytes} bytes, "
                f"rank {self.rank} has {self._slots} of {self._slot_bytes}: all ranks need the same"
            )
        elif self._transport == "shared memory" and not guest.descriptors:
            refusal = f"ranks {self.rank} and {peer} cannot share memory: rank {peer} connected without any"
        elif (
            guest.descriptors and os.fstat(guest.descriptors[0]).st_size < 2 * self._slots * self._slot_bytes
        ):
            refusal = f"rank {peer} sent memory of {os.fstat(guest.descriptors[0]).st_size} bytes to rank {self.rank}"
        try:
            guest.sock.sendall(answer(refusal))
        except OSError as error:
            guest.close()
            raise ExecutionError(f"rank {peer} ended while rank {self.rank} connected to it") from error
        if refusal:
            guest.close()
            raise ExecutionError(refusal)
        descriptor = guest.descriptors.pop() if guest.descriptors else None
        self._adopt(peer, guest.sock, descriptor, is_first=False)

    def _adopt(self, peer: int, sock: socket.socket, descriptor: int | None, *, is_first: bool) -> None:
        """Make a channel of an answered connection."""
        if descriptor is None:
            self._channels[peer] = StreamChannel(sock, peer)
            return
        try:
            self._channels[peer] = SharedMemoryChannel(
                sock,
                peer,
                descriptor,
                is_first=is_first,
                slot_bytes=self._slot_bytes,
                slots=self._slots,
            )
        finally:
            os.close(descriptor)


def _connect_unix(sock: socket.socket, name: str, deadline: float) -> None:
    """Connect to an abstract name; where its queue is full, the kernel says so at once instead of waiting."""
    while True:
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.connect(name)
        except (BlockingIOError, TimeoutError):
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.01)
        else:
            return

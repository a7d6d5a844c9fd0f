"""The connections of one rank to the others of its group: made on demand, by shared memory within a host.

Ranks find each other through the group's store alone. Of two ranks that connect, the higher dials; it first
tries the lower one's Unix socket where both run under one kernel, and its TCP address otherwise. Each rank
accepts all higher ranks before it awaits replies, so that no circle of waiting ranks can arise.

    publish own address -> dial and greet all lower ranks -> answer all higher ranks -> await the replies

On a fabric of cables a rank is reached by another address along each of them, and not at all where there is
none: the higher rank dials from its own end of their cable to the other one, and nobody else. Several cables
of two ranks are lanes (`transport.lanes`), each with a channel of its own, and a number that its handshake
says.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import TypedDict

from arborcast.backends.errors import ExecutionError
from arborcast.backends.options import TRANSPORTS
from arborcast.backends.tensors.torch_compat import Store
from arborcast.backends.transport.addresses import Ends, boot_id, listening_addresses
from arborcast.backends.transport.alarm import Alarm, door, is_closed
from arborcast.backends.transport.handshake import (
    TOKEN_BYTES,
    Handshake,
    UnansweredCall,
    answer,
    dial_tcp,
    dial_unix,
    read_reply,
)
from arborcast.backends.transport.listener import PendingConnection
from arborcast.backends.transport.reception import Reception
from arborcast.backends.transport.shared_memory import (
    SLOT_BYTES,
    SLOTS,
    SharedMemoryChannel,
    Shelf,
    is_sealed,
    memory_bytes,
    shelf_bytes,
    why_no_memory,
)
from arborcast.backends.transport.silence import LOST_AFTER_S, keep_asking
from arborcast.backends.transport.socket_channel import FAREWELL_S, SocketChannel
from arborcast.backends.transport.stream import StreamChannel

log = logging.getLogger(__name__)

_said: set[str] = set()
"""Reasons for sockets that this process has told."""

_PREFIX = "arborcast/channels"
LOOK_S = 0.1
"""How often who waits for others asks whether this rank has been told to end."""

END_S = 2.0
"""How long who ends the network waits for a thread that is connecting, which then closes it."""

DIAL_S = 4.0
"""How long one attempt to reach a rank takes at most, before this one looks whether there is hope."""

REDIAL_S = 30.0
"""How long a rank dials again that was dropped without an answer: the other may have had too many guests."""

_PAUSES_S = 0.001, 0.05  # the shortest and the longest between two looks into the store


class _PublishedAddress(TypedDict):
    """What a rank publishes: TCP listeners and its door; for shared memory its kernel and Unix socket, too.

    The door is at the host of the first, which is on no cable. Who connects says the token, and so has read
    it in the store.
    """

    listeners: list[tuple[str, int]]
    door: int
    token: str
    boot_id: str | None
    name: str | None


class Network:
    """The channels of one rank.

    Args:
        store: of the group: every rank the same, and no other group under the same prefix.
        rank: of this process in the group.
        size: ranks in the group.
        timeout_s: how long `connect` may take; may be set at any time.
        transport: "auto" (shared memory inside a host, sockets otherwise), "sockets" or "shared memory".
        address: to listen at, or several with commas between; found as `listening_addresses` says where None.
        slot_bytes: of shared memory, the same on all ranks.
        slots: of shared memory in each direction of each pair, the same on all ranks.
        lost_after_s: after how long without an answer of its kernel another host counts as lost; 0 for never.
        has_ended: whether the process of a rank that has published nothing here is known to have ended.
        cables: with whom alone this rank connects, by number of the lane (`transport.lanes`), and the
            addresses of their cable, its own first; None of a rank of the same host. None where all ranks
            reach each other. May be replaced before `connect`.

    Raises:
        ExecutionError: no such transport, no such address, or no shared memory where nothing else is wanted.

    Attributes:
        why_no_shared_memory: what this host lacks for it, None where it has all.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        transport: str = "auto",
        address: str | None = None,
        slot_bytes: int = SLOT_BYTES,
        slots: int = SLOTS,
        lost_after_s: float = LOST_AFTER_S,
        has_ended: Callable[[int], bool] = lambda _: False,
        cables: Mapping[int, Ends | None] | None = None,
    ) -> None:
        if transport not in TRANSPORTS:
            raise ExecutionError(f"transport {transport!r}: there are {', '.join(map(repr, TRANSPORTS))}")
        self.rank = rank
        self.size = size
        self._store = store
        self.timeout_s = timeout_s
        self._transport = transport
        self._slot_bytes = slot_bytes
        self._slots = slots
        self._lost_after_s = lost_after_s
        self._had_ended = has_ended
        self.cables = cables
        self._alarm = Alarm(store, self.has_ended)
        self._published: dict[int, _PublishedAddress] = {}
        self._boot_id = boot_id()
        self.why_no_shared_memory = self._missing()
        if transport == "shared memory" and self.why_no_shared_memory:
            raise ExecutionError(f"rank {rank} cannot use shared memory: {self.why_no_shared_memory}")
        self._channels: dict[int, SocketChannel] = {}
        self._early: dict[int, PendingConnection] = {}  # of lanes that nobody here waits for yet
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._shelf: Shelf | None = None
        self._is_closed = False
        self._reason: str | None = None
        self._at_work = threading.RLock()  # held by who connects or ends
        own = [ends[0] for ends in (cables or {}).values() if ends is not None]
        here = tuple(dict.fromkeys([*listening_addresses(store, address), *own]))
        try:
            self._reception = Reception(
                here,
                self._token,
                is_local=self.why_no_shared_memory is None,
                size=size,
            )
            own_door = door(here[0])
        except OSError as error:
            raise ExecutionError(f"rank {rank} cannot listen at {', '.join(here)}: {error}") from error
        entry = _PublishedAddress(
            listeners=self._reception.doors,
            door=own_door,
            token=self._token.hex(),
            boot_id=self._boot_id,
            name=self._reception.name,
        )
        try:
            store.set(f"{_PREFIX}/{rank}", json.dumps(entry))
        except BaseException:
            self.close()
            raise

    @property
    def channels(self) -> Mapping[int, SocketChannel]:
        """The channel to each rank, or along each lane, that `connect` has connected."""
        return MappingProxyType(self._channels)

    def has_ended(self, rank: int) -> bool:
        """Whether the process of a rank is known to have ended; from any thread."""
        key = f"{_PREFIX}/{rank}"
        if rank not in self._published:
            if not self._store.check([key]):
                return self._had_ended(rank)
            self._published[rank] = json.loads(self._store.get(key))
        host, _ = self._published[rank]["listeners"][0]
        return is_closed(host, self._published[rank]["door"])

    def silent_cables(self, seconds: float) -> list[int]:
        """The lanes to ranks below whose other end does not answer within so long; all ranks call it.

        Raises:
            ExecutionError: a rank did not come in time.
        """
        lower = [lane for lane, ends in (self.cables or {}).items() if ends and self._peer(lane) < self.rank]
        entries = self._entries(lower, time.monotonic() + self.timeout_s)

        def is_silent(lane: int) -> bool:
            (door,), own = self._doors(lane, entries[lane])
            try:
                socket.create_connection(door, seconds, None if own is None else (own, 0)).close()
            except OSError as error:
                peer = self._peer(lane)
                log.info("cable %s of ranks %d and %d does not answer: %s", own, peer, self.rank, error)
                return True
            return False

        if not lower:
            return []
        with ThreadPoolExecutor(len(lower)) as pool:  # several that are silent take no longer than one
            return [lane for lane, silent in zip(lower, pool.map(is_silent, lower), strict=True) if silent]

    def _peer(self, lane: int) -> int:
        """The rank at the other end of a lane."""
        return lane % self.size

    def connect(self, peers: Iterable[int]) -> None:
        """Connect to ranks, or along further lanes to them; those that are connected stay so.

        Every rank calls it at the same point of its program, `b` among the peers of `a` where `a` is among
        those of `b`.

        Raises:
            ExecutionError: a rank did not come in time, ended, refused or cannot be reached as asked, or
                another one failed at that; the message names it. The network is closed then.
        """
        missing = sorted(set(peers) - self._channels.keys() - {self.rank})
        if not missing:
            return
        if self._is_closed:
            raise ExecutionError(f"rank {self.rank} connects to ranks {missing} after it left the group")
        if self.cables is not None and (apart := [peer for peer in missing if peer not in self.cables]):
            raise ExecutionError(
                f"rank {self.rank} has no link to rank {self._peer(apart[0])}, and connects along links alone"
            )
        with self._at_work:
            self._connect(missing, time.monotonic() + self.timeout_s)
            if self._shelf is not None and self._channels.keys() >= set(range(self.size)) - {self.rank}:
                self._shelf.close()  # there is nobody left to have it

    def _connect(self, missing: list[int], deadline: float) -> None:
        calls: dict[int, UnansweredCall] = {}
        try:
            lower = [lane for lane in missing if self._peer(lane) < self.rank]
            entries = self._entries(lower, deadline)
            for lane, entry in entries.items():
                calls[lane] = self._dial(lane, entry, deadline)
            self._welcome(set(missing) - set(lower), deadline)
            for lane in lower:
                self._await_reply(lane, entries[lane], calls, deadline)
                call = calls.pop(lane)
                theirs = [] if call.memory is None else [call.memory, *call.came]
                self._adopt(lane, call.sock, theirs, is_first=True)
        except BaseException as error:
            for call in calls.values():
                call.close()
            self.abort(f"could not connect: {error}")
            raise

    def abort(self, reason: str) -> None:
        """Tell all peers why this rank gives up, as far as that is possible within a moment, and close.

        From any thread; one that is connecting ends with an error.
        """
        self._end(reason)

    def close(self) -> None:
        """Leave in good order: what was handed over still arrives. May be called twice."""
        self._end(None)

    def _end(self, reason: str | None) -> None:
        was_closed, self._reason, self._is_closed = self._is_closed, self._reason or reason, True
        if reason is not None and not was_closed:  # who connects here has its own word before it hears this
            self._alarm.sound(f"rank {self.rank} {reason}")
        if self._at_work.acquire(timeout=END_S):  # else who connects comes here at its next look
            try:
                self._hang_up(self._reason)
            finally:
                self._at_work.release()

    def _hang_up(self, reason: str | None) -> None:
        self._reception.close()
        if self._shelf is not None:
            self._shelf.close()
        for connection in self._early.values():
            connection.close()
        self._early.clear()
        for channel in self._channels.values():
            channel.begin_close(reason)
        deadline = time.monotonic() + FAREWELL_S
        for channel in self._channels.values():
            channel.finish_close(deadline)
        if self._shelf is not None:
            self._shelf.release()

    def _missing(self) -> str | None:
        """What keeps this rank from sharing memory, found out by doing so; None where nothing does."""
        if self._transport == "sockets":
            return "sockets were asked for"
        if not self._boot_id:
            return "this system does not tell which processes share a kernel (boot_id)"
        why = why_no_memory()
        if why is not None and self._transport == "auto" and why not in _said:
            _said.add(why)
            log.warning("ranks of one host are connected by sockets, which are slower: %s", why)
        return why

    def _entries(self, lanes: list[int], deadline: float) -> dict[int, _PublishedAddress]:
        """What the ranks at the other ends of lanes have published."""
        peers = {self._peer(lane) for lane in lanes}
        keys = {f"{_PREFIX}/{peer}": peer for peer in sorted(peers)}
        pause, longest = _PAUSES_S
        try:
            while keys and not self._store.check(list(keys)):
                self._look(peer for key, peer in keys.items() if not self._store.check([key]))
                if time.monotonic() > deadline:
                    raise self._late(peer for key, peer in keys.items() if not self._store.check([key]))
                time.sleep(pause)
                pause = min(2 * pause, longest)
            found: dict[int, _PublishedAddress]
            found = {peer: json.loads(self._store.get(key)) for key, peer in keys.items()}
            self._published.update(found)
            return {lane: found[self._peer(lane)] for lane in lanes}
        except ExecutionError:
            raise
        except RuntimeError as error:
            raise ExecutionError(f"rank {self.rank} lost the group's store: {error}") from error

    def _look(self, awaited: Iterable[int]) -> None:
        """Go on only where nobody has ended this meanwhile, and others may still come."""
        try:
            self._alarm.look(map(self._peer, awaited))
        finally:
            if self._is_closed:
                why = self._reason or "left the group"
                raise ExecutionError(f"rank {self.rank} was connecting when it {why}")

    def _late(self, absent: Iterable[int], because: str = "") -> ExecutionError:
        first, *others = sorted({*map(self._peer, absent)})
        who = ", ".join([f"rank {first}", *map(str, others)])
        return ExecutionError(
            f"rank {self.rank} waited {self.timeout_s:g} s to connect with {who}, which did not come{because}"
        )

    def _dial(self, lane: int, entry: _PublishedAddress, deadline: float) -> UnansweredCall:
        """Connect to a rank and greet it; again where it drops the call at once, as one with many guests may.

        Raises:
            ExecutionError: nobody is there, or none came through until `deadline`.
        """
        pause, longest = _PAUSES_S
        last = min(deadline, time.monotonic() + REDIAL_S)
        for attempt in count(self.rank + lane):  # pairs share the interfaces, and each finds another one
            try:
                return self._dial_once(lane, entry, min(deadline, time.monotonic() + DIAL_S), attempt)
            except TimeoutError as error:
                self._look([lane])
                if time.monotonic() > deadline:
                    raise self._late([lane]) from error
            except (ConnectionResetError, BrokenPipeError) as error:
                self._look([lane])
                if time.monotonic() > last:
                    raise self._lost(lane) from error
                time.sleep(pause)
                pause = min(2 * pause, longest)
        raise AssertionError("attempts go on until one of these")

    def _dial_once(
        self, lane: int, entry: _PublishedAddress, deadline: float, attempt: int
    ) -> UnansweredCall:
        wants_memory = self._transport == "shared memory"
        token, peer = bytes.fromhex(entry["token"]), self._peer(lane)
        own = self.rank + lane - peer
        handshake = Handshake(token, own, peer, self._slot_bytes, self._slots, wants_memory)
        name, (listeners, source) = entry["name"], self._doors(lane, entry)
        first, failures = attempt % len(listeners), []
        is_near = self.why_no_shared_memory is None and entry["boot_id"] == self._boot_id and source is None
        for host, port in (*listeners[first:], *listeners[:first]):
            try:
                if is_near and name is not None:
                    call = dial_unix(name, handshake, self._own_shelf().descriptor, deadline)
                    if call is not None:
                        return call
                # Where nothing but memory will do, this is for both to learn that there is none.
                return dial_tcp(host, port, handshake, deadline, source=source)
            except (TimeoutError, ConnectionResetError, BrokenPipeError):
                raise
            except OSError as error:
                failures.append(f"at {host}{f' from {source}' if source else ''}: {error}")
        raise ExecutionError(f"rank {self.rank} cannot reach rank {peer} {'; '.join(failures)}")

    def _doors(self, lane: int, entry: _PublishedAddress) -> tuple[list[tuple[str, int]], str | None]:
        """Where to dial a rank; and from which own address, None where that does not matter."""
        listeners = entry["listeners"]
        if self.cables is None:
            return listeners, None
        ends, peer = self.cables[lane], self._peer(lane)
        if ends is None:
            if entry["boot_id"] != self._boot_id:
                raise ExecutionError(
                    f"the link of ranks {peer} and {self.rank} must have addresses, as others of the fabric "
                    "have some, and the two are on two hosts"
                )
            return listeners[:1], None  # the others are on cables
        own, theirs = ends
        found = [(host, port) for host, port in listeners if host == theirs]
        if not found:
            raise ExecutionError(
                f"rank {peer} does not listen at {theirs}, its end of the cable to {self.rank}"
            )
        return found, own

    def _await_reply(
        self, lane: int, entry: _PublishedAddress, calls: dict[int, UnansweredCall], deadline: float
    ) -> None:
        """Wait for the answer to a handshake; dial again where the call was dropped by one who is there."""
        last = min(deadline, time.monotonic() + REDIAL_S)
        while True:
            try:
                return self._read_reply(lane, calls[lane], deadline)
            except OSError as error:
                if time.monotonic() > last:
                    raise self._lost(lane) from error
            calls.pop(lane).close()
            time.sleep(_PAUSES_S[1])
            calls[lane] = self._dial(lane, entry, deadline)

    def _read_reply(self, lane: int, call: UnansweredCall, deadline: float) -> None:
        """Wait for the answer to a handshake; an OSError says that there is none."""
        peer = self._peer(lane)
        try:
            refusal = read_reply(call, peer, deadline, partial(self._look, [lane]))
        except TimeoutError as error:
            raise self._late([lane]) from error
        if not refusal and call.memory is not None:
            refusal = self._refusal_of_memory(peer, call.came, (shelf_bytes(),))
        if refusal:
            raise ExecutionError(refusal)

    def _lost(self, lane: int) -> ExecutionError:
        return ExecutionError(f"rank {self._peer(lane)} ended while rank {self.rank} was connecting with it")

    def _welcome(self, expected: set[int], deadline: float) -> None:
        """Seat these ranks as they come; others are kept for their time, strangers are dropped."""
        while expected := self._seat(expected):
            self._look(expected)
            left = deadline - time.monotonic()
            self._reception.wait(min(max(0, left), LOOK_S))
            # Whoever keeps this rank busy with connections of no use must not keep it for ever.
            if left <= 0 and (expected := self._seat(expected)):
                trouble = self._reception.trouble
                raise self._late(expected, f" in: {trouble} (see ulimit -n)" if trouble else "")

    def _seat(self, expected: set[int]) -> set[int]:
        """Make channels of the connections that are expected; returns who is still to come."""
        for connection, handshake in self._reception.take():
            if handshake.to != self.rank or handshake.rank in self._early:
                connection.close()
            else:
                self._early[handshake.rank] = connection
        for lane in sorted(expected & self._early.keys()):
            connection = self._early.pop(lane)
            assert connection.handshake is not None, "the listener waits for it"
            self._receive(connection, connection.handshake)
            expected = expected - {lane}
        return expected

    def _receive(self, connection: PendingConnection, handshake: Handshake) -> None:
        """Answer a rank's handshake and make its channel."""
        refusal = self._refusal(connection, handshake)
        try:
            if connection.descriptors and not refusal:
                socket.send_fds(connection.sock, [answer()], [self._own_shelf().descriptor])
            else:
                connection.sock.sendall(answer(refusal))
        except OSError as error:
            connection.close()
            raise self._lost(handshake.rank) from error
        if refusal:
            connection.close()
            raise ExecutionError(refusal)
        theirs, connection.descriptors = connection.descriptors, []
        self._adopt(handshake.rank, connection.sock, theirs, is_first=False)

    def _refusal(self, connection: PendingConnection, handshake: Handshake) -> str:
        """Why a rank cannot be let in, empty where it can."""
        peer = self._peer(handshake.rank)
        if (handshake.slot_bytes, handshake.slots) != (self._slot_bytes, self._slots):
            return (
                f"rank {peer} has {handshake.slots} slots of {handshake.slot_bytes} bytes, "
                f"but rank {self.rank} has {self._slots} of {self._slot_bytes}: all ranks need the same"
            )
        if connection.descriptors:
            needed = memory_bytes(self._slot_bytes, self._slots), shelf_bytes()
            return self._refusal_of_memory(peer, connection.descriptors, needed)
        if handshake.wants_memory or self._transport == "shared memory":
            return (
                f"ranks {self.rank} and {peer} cannot share memory as asked: "
                "they are on two hosts or in two network namespaces, or one of them takes sockets only"
            )
        return ""

    def _refusal_of_memory(self, peer: int, came: list[int], needed: tuple[int, ...]) -> str:
        """Why memory that a rank sent is of no use, empty where it is."""
        if len(came) != len(needed):
            return f"rank {peer} sent rank {self.rank} {len(came)} pieces of memory, not {len(needed)}"
        for descriptor, ours in zip(came, needed, strict=True):
            if not is_sealed(descriptor):  # else its size may change
                return f"rank {peer} sent rank {self.rank} memory that is not sealed: it could take it away"
            if (theirs := os.fstat(descriptor).st_size) < ours:
                return f"rank {peer} sent {theirs} bytes of memory to rank {self.rank}, which needs {ours}"
        return ""

    def _own_shelf(self) -> Shelf:
        """What this rank lays for all others of its host; made when the first of them comes."""
        if self._shelf is None:
            try:
                self._shelf = Shelf()
            except OSError as error:
                raise ExecutionError(f"rank {self.rank} has no room for shared memory: {error}") from error
        return self._shelf

    def _adopt(self, lane: int, sock: socket.socket, memories: list[int], *, is_first: bool) -> None:
        """Make a channel of an answered connection."""
        keep_asking(sock, self._lost_after_s)
        if not memories:
            self._channels[lane] = StreamChannel(sock, self._peer(lane))
            return
        try:
            self._channels[lane] = SharedMemoryChannel(
                sock,
                self._peer(lane),
                memories[0],
                is_first=is_first,
                slot_bytes=self._slot_bytes,
                slots=self._slots,
                shelf=self._shelf,
                their_shelf=memories[1],
            )
        finally:
            for descriptor in memories:
                os.close(descriptor)

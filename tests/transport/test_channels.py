"""Both kinds of channel, end to end in one process over a socket pair, and with a peer process that ends."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import random
import select
import signal
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.backends.errors import ChannelClosedError, DisagreementError, PeerLeftError
from arborcast.backends.native.library import FrameCode, at_once, combiner
from arborcast.backends.transport.fingerprint import OPENING_BYTES
from arborcast.backends.transport.frames import HEADER
from arborcast.backends.transport.shared_memory import SharedMemoryChannel, create_memory
from arborcast.backends.transport.socket_channel import SocketChannel
from arborcast.backends.transport.stream import StreamChannel
from tests.support.ranks import Failure, run_ranks, store_path
from tests.support.waiting import PATIENCE_S, until, wait_for_end

PART = 16384  # of every channel here; shared memory has 3 slots of it
TRANSPORTS = ("sockets", "shared memory")


def connected(transport: str, sock: socket.socket, peer: int, memory: int) -> SocketChannel:
    if transport == "sockets":
        return StreamChannel(sock, peer, PART)
    return SharedMemoryChannel(sock, peer, memory, is_first=peer == 1, slot_bytes=PART, slots=3)


@contextlib.contextmanager
def pair(transport: str) -> Iterator[tuple[SocketChannel, SocketChannel]]:
    """The channel of rank 0 to rank 1 and that of rank 1 to rank 0."""
    ours, theirs = socket.socketpair()
    memory = create_memory(PART, 3)
    for sock in (ours, theirs):  # little room, so that sends stop in the middle of parts
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
    channels = connected(transport, ours, 1, memory), connected(transport, theirs, 0, memory)
    os.close(memory)
    try:
        yield channels
    finally:
        for channel in channels:
            channel.close()


def some_bytes(length: int, seed: int = 0) -> memoryview:
    return memoryview(bytearray(random.Random(seed).randbytes(length)))


def room_for(length: int) -> memoryview:
    return memoryview(bytearray(length))


@dataclass
class End:
    """One end with what it is to send and to receive, in order: openings as bytes, messages as tensors."""

    channel: SocketChannel
    out: deque[memoryview | bytes]
    due: deque[memoryview | bytes]
    got: list[memoryview] = field(default_factory=list)
    done: int = 0

    def send(self) -> bool:
        if not self.out:
            return False
        first = self.out[0]
        if isinstance(first, bytes):
            self.channel.open(first)
            self.out.popleft()
            return True
        count = self.channel.send(first) if len(first) else 0
        if count == len(first):
            self.out.popleft()
        else:
            # What was handed over may be overwritten.
            self.out[0] = memoryview(bytearray(first[count:]))
            first[:] = bytes(len(first))
        return count > 0 or not len(first)

    def receive(self) -> bool:
        if not self.due:
            return False
        first = self.due[0]
        if isinstance(first, bytes):
            opening = self.channel.opening()
            if opening is None:
                return False
            assert opening == first
            self.due.popleft()
            return True
        if not self.done:
            self.got.append(room_for(len(first)))
        count = self.channel.receive(self.got[-1][self.done :])
        self.done += count
        if self.done < len(first):
            return count > 0
        assert self.got[-1] == first
        self.due.popleft()
        self.done = 0
        return True


def run(*ends: End) -> None:
    """Until all is received; polls as the engine does, so that what `wanted` does not name would hang."""
    while any(end.due or end.out for end in ends):
        moved = [end.send() | end.receive() for end in ends]
        if any(moved):
            continue
        poll = select.poll()
        by_descriptor = {end.channel.fileno(): end for end in ends}
        is_ready = False
        for descriptor, end in by_descriptor.items():
            wanted = end.channel.wanted(reads=bool(end.due))
            poll.register(descriptor, wanted or 0)
            is_ready |= wanted is None
        if is_ready:
            for end in ends:
                end.channel.on_ready()
            continue
        events = poll.poll(60_000)
        assert events, "nobody waits for what would move"
        for descriptor, _ in events:
            by_descriptor[descriptor].channel.on_ready()


def send_all(channel: SocketChannel, data: memoryview) -> None:
    assert channel.send(data) == len(data)


def received(channel: SocketChannel, length: int) -> memoryview | None:
    """A message of which all is here, or none."""
    into = room_for(length)
    count = channel.receive(into)
    assert count in (0, length)
    return into if count else None


SIZES = st.lists(
    st.one_of(st.none(), st.integers(0, 12_000), st.sampled_from([PART, PART + 1, 2 * PART, 5 * PART - 7])),
    max_size=8,
)


@pytest.mark.parametrize("transport", TRANSPORTS)
@given(there=SIZES, back=SIZES, most=st.tuples(*[st.sampled_from([0, 0, 100, 3001])] * 2))
@settings(deadline=None, max_examples=40)
def test_whatever_is_sent_arrives_in_order(
    transport: str, there: list[int | None], back: list[int | None], most: tuple[int, int]
) -> None:
    """Messages of all lengths both ways at once, moved in steps of any length; None is an opening."""

    def stream(sizes: list[int | None], seed: int) -> list[memoryview | bytes]:
        return [
            bytes([at]) * OPENING_BYTES if size is None else some_bytes(size, seed + at)
            for at, size in enumerate(sizes)
        ]

    with pair(transport) as (a, b):
        a.state.most, b.state.most = most
        run(
            End(a, deque(stream(there, 0)), deque(stream(back, 50))),
            End(b, deque(stream(back, 50)), deque(stream(there, 0))),
        )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_next_collective_may_begin_before_this_one_is_read(transport: str) -> None:
    with pair(transport) as (a, b):
        a.open(b"a" * OPENING_BYTES)
        send_all(a, some_bytes(100, 1))
        a.open(b"b" * OPENING_BYTES)
        send_all(a, some_bytes(200, 2))
        assert b.opening() == b"a" * OPENING_BYTES
        assert received(b, 100) == some_bytes(100, 1)
        assert b.opening() == b"b" * OPENING_BYTES
        into = room_for(200)
        assert b.receive(into) == 200
        assert into == some_bytes(200, 2)
        assert b.opening() is None
        assert b.receive(into) == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("does", "takes", "message"),
    [
        (
            lambda a: a.send(some_bytes(100)),
            lambda b: b.receive(room_for(64)),
            "rank 0 sends a part of 100 bytes where a part of 64 bytes is due",
        ),
        (
            lambda a: a.send(some_bytes(10_000)),
            lambda b: b.receive(room_for(PART)),
            "a part of 10000 bytes where a part of 16384 bytes is due",
        ),
        (
            lambda a: a.open(bytes(OPENING_BYTES)),
            lambda b: b.receive(room_for(64)),
            "the begin of a collective where a part of 64 bytes is due",
        ),
        (
            lambda a: a.send(some_bytes(100)),
            lambda b: b.opening(),
            "rank 0 sends a part of 100 bytes where a collective should begin",
        ),
    ],
)
def test_ends_that_are_out_of_step_are_refused_with_what_both_mean(
    does: Callable[[SocketChannel], object],
    takes: Callable[[SocketChannel], object],
    message: str,
    transport: str,
) -> None:
    with pair(transport) as (a, b):
        does(a)
        with pytest.raises(DisagreementError, match=message):
            takes(b)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_reason_comes_after_what_was_sent_before(transport: str) -> None:
    with pair(transport) as (a, b):
        send_all(a, some_bytes(100))
        a.abort("gave up: the café burns")
        b.on_ready()
        assert received(b, 100) is not None
        for _ in range(2):
            with pytest.raises(ChannelClosedError, match=r"^rank 0 gave up: the café burns$") as caught:
                b.receive(room_for(100))
        assert caught.value.reason == "gave up: the café burns"
        with pytest.raises(ChannelClosedError, match="the café burns"):
            b.send(some_bytes(1))
        with pytest.raises(ChannelClosedError, match="the café burns"):
            b.open(bytes(OPENING_BYTES))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_reason_is_known_to_who_can_only_send(transport: str) -> None:
    """It lies behind an unread message; the error of the socket alone would not tell it."""
    with pair(transport) as (a, b):
        send_all(a, some_bytes(100))
        a.abort("gave up")
        with pytest.raises(ChannelClosedError, match="rank 0 gave up"):
            for _ in range(100):
                b.on_ready()
                b.send(some_bytes(50))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_who_leaves_in_order_is_told_from_who_dies(transport: str) -> None:
    with pair(transport) as (a, b):
        send_all(a, some_bytes(100))
        a.close()
        a.close()
        assert a.fileno() == -1
        assert b.receive(room_for(100)) == 100
        with pytest.raises(PeerLeftError, match=r"^rank 0 has left the group$") as caught:
            b.on_ready()
        assert caught.value.reason is None
        with pytest.raises(PeerLeftError):
            b.opening()
        with pytest.raises(ChannelClosedError, match="rank 1 cannot be reached: this rank has closed"):
            a.send(some_bytes(1))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_socket_that_ends_without_a_word(transport: str) -> None:
    ours, theirs = socket.socketpair()
    memory = create_memory(PART, 3)
    channel = connected(transport, ours, 1, memory)
    os.close(memory)
    theirs.close()
    for call in (
        lambda: channel.receive(room_for(8)),
        channel.on_ready,
        lambda: channel.open(bytes(OPENING_BYTES)),
    ):
        with pytest.raises(ChannelClosedError, match="rank 1 closed its connection: it died") as caught:
            call()
        assert caught.value.reason is None
    assert "it died" in str(channel.last_words())
    channel.close()


@pytest.mark.parametrize("part", [12_000, 200_000])
def test_abort_within_a_part_never_completes_it(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the part is filled up, so that the reason can follow; its last byte is never counted."""
    monkeypatch.setattr("arborcast.backends.transport.socket_channel.FAREWELL_S", PATIENCE_S)
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
    a, b = StreamChannel(ours, 1, part), StreamChannel(theirs, 0, part)
    data = some_bytes(part)
    handed_over = a.send(data)
    assert 0 < handed_over < part, "the socket should fill within the part"
    into, got = room_for(part), 0

    def receive() -> None:
        nonlocal got
        got += b.receive(into[got:])
        assert got < part, "a message was completed with bytes that nobody sent"

    receive()  # makes room for the rest
    aborting = threading.Thread(target=a.abort, args=("gave up: rank 7 died",))
    aborting.start()
    with pytest.raises(ChannelClosedError, match="rank 7 died"):
        while True:
            receive()
    aborting.join()
    assert handed_over <= got
    assert into[:handed_over] == data[:handed_over]
    b.close()


@pytest.mark.parametrize("limit", range(1, 24))
def test_socket_may_take_any_number_of_bytes(limit: int) -> None:
    """Wherever a send stops: in a header, in the bytes, or before the trailer."""
    ours, theirs = socket.socketpair()
    a, b = StreamChannel(ours, 1, part_bytes=4), StreamChannel(theirs, 0, part_bytes=4)
    a.state.most = limit
    data, opening = some_bytes(10), bytes(range(OPENING_BYTES))
    sent = 0
    while sent < len(data):
        sent += a.send(data[sent:])
    a.open(opening)
    while a.wants_write:
        a.on_ready()
    into = room_for(10)
    assert b.receive(into) == 10
    assert into == data
    assert b.opening() == opening
    a.close()
    b.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("limit", [*range(1, 40), 1000])
def test_messages_that_go_together_may_stop_anywhere(limit: int, transport: str) -> None:
    """What was handed over is a prefix of them, and the next call goes on behind it."""
    lengths = [3, 0, 40, 1, 0, 29, 40]
    with pair(transport) as (a, b):
        a._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        a.state.most = limit
        a.state.part_bytes = b.state.part_bytes = 16
        data = [some_bytes(length, at) for at, length in enumerate(lengths)]
        addresses = [np.frombuffer(each, np.uint8).ctypes.data if len(each) else 0 for each in data]
        first = skipped = 0
        while first < len(data):
            left = list(zip(addresses[first:], lengths[first:], strict=True))
            messages = (ctypes.c_int64 * (2 * len(left)))(*itertools.chain.from_iterable(left))
            count = at_once.channel_send_all(a.address, ctypes.addressof(messages), len(left), skipped)
            assert 0 <= count <= sum(lengths[first:]) - skipped
            skipped += count
            while first < len(data) and skipped >= lengths[first]:
                skipped -= lengths[first]
                first += 1
        a.open(bytes(OPENING_BYTES))
        while a.wants_write:
            a.on_ready()
        for each in data:
            assert not len(each) or received(b, len(each)) == each
        assert b.opening() == bytes(OPENING_BYTES)


def stream_of(*parts: bytes) -> bytes:
    """As it goes over the wire: a part's trailer makes its frame a multiple of 8 bytes long."""
    return b"".join(
        struct.pack("<BxxxI", 1, len(part)) + part + b"\x01" * (8 - len(part) % 8) for part in parts
    )


def test_bytes_may_come_one_by_one() -> None:
    """A part is complete with its trailer, and not a byte before."""
    ours, theirs = socket.socketpair()
    channel = StreamChannel(ours, 1, part_bytes=4)
    # Of the six bytes of the message, how many are received after each byte of the stream:
    #        header     part          trailer           header     part     trailer
    counts = [0] * 8 + [1, 2, 3, 3] + [3, 3, 3, 4] + [4] * 8 + [5, 5] + [5, 5, 5, 5, 5, 6]
    into = room_for(6)
    done = 0
    for byte, count in zip(stream_of(b"abcd", b"ef"), counts, strict=True):
        theirs.sendall(bytes([byte]))
        done += channel.receive(into[done:])
        assert done == count
    assert bytes(into) == b"abcdef"
    channel.close()
    theirs.close()


@given(st.lists(st.integers(1, 90_000), min_size=1, max_size=40), st.randoms())
@settings(max_examples=25, deadline=None)
def test_parts_that_land_together(lengths: list[int], random_: random.Random) -> None:
    """Short or long, the stream cut anywhere."""
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 21)
    part_bytes = random_.choice([5000, 80_000])
    channel = StreamChannel(ours, 1, part_bytes)
    out = [bytes(some_bytes(length, at)) for at, length in enumerate(lengths)]
    stream = b"".join(
        stream_of(*(data[at : at + part_bytes] for at in range(0, len(data), part_bytes))) for data in out
    )
    sent = 0
    for data in out:
        into, done = room_for(len(data)), 0
        while done < len(data):
            if count := channel.receive(into[done:]):
                done += count
            else:
                assert sent < len(stream), "all that is due was sent"
                sent += theirs.send(stream[sent : sent + random_.choice([7, 1000, 150_000])])
        assert into == data
    channel.close()
    theirs.close()


def test_abort_never_waits_for_who_does_not_read() -> None:
    with pair("sockets") as (a, b):
        a.send(some_bytes(30 * PART))
        aborting = threading.Thread(target=a.abort, args=("gave up",), daemon=True)
        aborting.start()
        aborting.join(PATIENCE_S)
        assert not aborting.is_alive()  # `b` does not read meanwhile
        with pytest.raises(ChannelClosedError, match="it died or was ended"):
            while True:
                b.receive(room_for(30 * PART))


def test_reasons_may_be_long() -> None:
    for transport in TRANSPORTS:
        with pair(transport) as (a, b):
            a.abort("é" * 5000)
            with pytest.raises(ChannelClosedError, match=r"^rank 0 é{1000}"):
                b.on_ready()


def test_sender_waits_for_room_in_the_ring() -> None:
    with pair("shared memory") as (a, b):
        data = some_bytes(7 * PART)
        sent = a.send(data)
        assert 2 * PART < sent < 3 * PART, "headers need some room, too"
        assert a.wanted(reads=False) == select.POLLIN, "a byte comes when there is room"
        assert a.send(data[sent:]) == 0
        assert b.receive(room_for(7 * PART)) > 0
        poll = select.poll()
        poll.register(a.fileno(), select.POLLIN)
        assert poll.poll(60_000)
        a.on_ready()
        assert a.send(data[sent:]) > 0


@pytest.mark.parametrize("head", [3 * PART + 8, 1 << 63, (1 << 64) - 8])
def test_impossible_head_of_a_ring_is_refused(head: int) -> None:
    """Whoever shares the memory may write anything there; it is neither believed nor waited out."""
    with pair("shared memory") as (a, b):
        assert b.wanted() == select.POLLIN
        ctypes.c_uint64.from_address(a.state.out).value = head
        assert b.wanted() is None
        with pytest.raises(DisagreementError, match=f"rank 0 says .* more .* than its {3 * PART}"):
            b.opening()
        with pytest.raises(DisagreementError):
            b.receive(room_for(8))


def test_nobody_is_told_who_does_not_sleep() -> None:
    with pair("shared memory") as (a, b):
        poll = select.poll()
        poll.register(b.fileno(), select.POLLIN)
        for sleeps in (False, True, False):
            assert b.wanted() == select.POLLIN if sleeps else True
            send_all(a, some_bytes(1000))
            assert bool(poll.poll(0)) == sleeps
            b.on_ready()
            assert received(b, 1000) is not None


def test_socket_without_room_is_said() -> None:
    with pair("sockets") as (a, b):
        data = some_bytes(100 * PART)
        count = a.send(data)
        assert 0 < count < 100 * PART
        assert a.wants_write
        assert a.wanted(reads=False) == select.POLLOUT
        assert b.receive(room_for(100 * PART))
        assert a.send(data[count:])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_openings_without_room_are_kept(transport: str) -> None:
    with pair(transport) as (a, b):
        number = 1000
        for at in range(number):
            a.open(at.to_bytes(8, "little") * (OPENING_BYTES // 8) + bytes(OPENING_BYTES % 8))
        assert a.wants_write
        seen = 0
        while seen < number:
            opening = b.opening()
            if opening is None:
                a.on_ready()
            else:
                assert int.from_bytes(opening[:8], "little") == seen
                seen += 1
        assert not a.wants_write


def test_close_waits_for_what_is_kept() -> None:
    """Openings that found no room go out while the peer reads; here nobody does, and close still ends."""
    with pair("shared memory") as (a, _):
        for _ in range(1000):
            a.open(bytes(OPENING_BYTES))
        assert a.wants_write
        a.close()
        assert a.fileno() == -1


def test_nothing_holds_back_what_stays_within_the_host() -> None:
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
        caller = sockets.enter_context(socket.create_connection(listener.getsockname()))
        StreamChannel(caller, 1)
        named = caller.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert named.rstrip(b"\0") == b"reno"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_is_left_open(transport: str) -> None:
    def mappings() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("memfd:arborcast")

    held = mappings()
    before = len(list(Path("/proc/self/fd").iterdir())), held
    for _ in range(5):
        with pair(transport) as (a, b):
            assert a.send(some_bytes(2 * PART))
            b.receive(room_for(PART))
    held = mappings()
    assert (len(list(Path("/proc/self/fd").iterdir())), held) == before


def test_frames_of_somebody_else() -> None:
    for transport in TRANSPORTS:
        ours, theirs = socket.socketpair()
        memory = create_memory(PART, 3)
        channel = connected(transport, ours, 1, memory)
        os.close(memory)
        theirs.sendall(b"\x63" * 64)
        with pytest.raises(DisagreementError, match="rank 1 sent 6363636363636363 where a frame begins"):
            channel.on_ready()
        channel.close()
        theirs.close()


# With a peer process that ends


def meet(rank: int, transport: str, part_bytes: int) -> SocketChannel:
    """A channel between ranks 0 and 1 through a socket whose path both know; rank 0 brings the memory."""
    path = str(store_path())
    sock = socket.socket(socket.AF_UNIX)
    if rank == 0:
        sock.bind(path)
        sock.listen()
        sock, listener = sock.accept()[0], sock
        listener.close()
        memory = create_memory(part_bytes, 4)
        socket.send_fds(sock, [b"m"], [memory])
    else:
        until(lambda: sock.connect_ex(path) == 0)
        memory = socket.recv_fds(sock, 1, 1)[1][0]
    if transport == "sockets":
        os.close(memory)
        return StreamChannel(sock, 1 - rank, part_bytes)
    channel = SharedMemoryChannel(sock, 1 - rank, memory, is_first=rank == 0, slot_bytes=part_bytes, slots=4)
    os.close(memory)
    return channel


def dies_while_sending(rank: int, size: int, transport: str) -> str:
    channel = meet(rank, transport, 1 << 20)
    data = some_bytes(1 << 25)
    if rank == 0:
        sent = 0
        while sent < len(data) // 4:
            # To the end of a part: one call could go on for as long as the peer makes room.
            end = (sent // channel.part_bytes + 1) * channel.part_bytes
            sent += channel.send(data[sent:end])
        os.kill(os.getpid(), signal.SIGKILL)
    into = room_for(1 << 25)
    received = 0
    try:
        while received < len(into):
            received += channel.receive(into[received:])
    except ChannelClosedError as error:
        assert into[:received] == data[:received]
        assert received >= len(data) // 4 - (1 << 20)
        return str(error)
    return "all of it arrived"


def dies_while_receiving(rank: int, size: int, transport: str) -> str:
    channel = meet(rank, transport, 1 << 20)
    if rank == 0:
        into = room_for(1 << 20)
        until(lambda: channel.receive(into) > 0)
        os.kill(os.getpid(), signal.SIGKILL)
    data = some_bytes(1 << 25)
    sent = 0
    try:
        while sent < len(data):
            count = channel.send(data[sent:])
            sent += count
            if not count:
                poll = select.poll()
                wanted = channel.wanted(reads=False)
                poll.register(channel.fileno(), wanted or 0)
                assert wanted is None or poll.poll(90_000), "not told that the peer is gone"
                channel.on_ready()
    except ChannelClosedError as error:
        return str(error)
    return "all of it was sent"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("body", [dies_while_sending, dies_while_receiving])
def test_killed_peer(body: Callable[..., str], transport: str) -> None:
    killed, other = run_ranks(2, body, transport, backend=None, may_fail=True)
    assert killed == Failure("killed", "ended without an answer")
    assert other == "rank 0 closed its connection: it died or was ended"
    assert not list(Path("/dev/shm").glob("*arborcast*"))


def leaves_at_once(rank: int, size: int, transport: str) -> int:
    sender = store_path().with_name("sender")
    if rank == 0:
        sender.write_text(str(os.getpid()))
    channel = meet(rank, transport, 1 << 16)
    data = some_bytes(150_000)
    if rank == 0:
        sent = 0
        while sent < len(data):
            sent += channel.send(data[sent:])
        channel.close()
        os._exit(0)
    into = room_for(150_000)
    received = 0
    wait_for_end(int(sender.read_text()))
    while received < len(into):
        received += channel.receive(into[received:])
    assert into == data
    with pytest.raises(PeerLeftError):
        channel.on_ready()
    return received


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_was_handed_over_arrives_though_the_sender_exits(transport: str) -> None:
    assert run_ranks(2, leaves_at_once, transport, backend=None, may_fail=True)[1] == 150_000


@pytest.mark.parametrize("more", range(4))
def test_the_rest_of_an_element_wakes_who_has_its_begin(more: int) -> None:
    """What has landed of an element does not come again: who waits for so many bytes more sleeps for ever."""
    values = np.arange(100, dtype=np.float32)
    frame = HEADER.pack(FrameCode.PART, values.nbytes) + values.tobytes() + bytes(7) + b"\1"
    cut = HEADER.size + 4 * 40 + more
    with socket.create_server(("127.0.0.1", 0)) as door:
        sender, (receiver, _) = socket.create_connection(door.getsockname()), door.accept()
    with sender, contextlib.closing(StreamChannel(receiver, 0, PART)) as channel:
        total = np.ones(100, np.float32)
        add = combiner("sum", torch.float32)

        def take(done: int) -> int:
            at, left = total.ctypes.data + done, values.nbytes - done
            return int(at_once.channel_combine(channel.address, at, at, left, add, 4))

        sender.sendall(frame[:cut])
        select.select([receiver], [], [], PATIENCE_S)
        until(lambda: at_once.channel_look(channel.address) == 0 and take(0) == 4 * 40)
        assert take(4 * 40) == 0
        channel.wanted()
        sender.sendall(frame[cut:])
        assert select.select([channel.fileno()], [], [], PATIENCE_S)[0]
        assert at_once.channel_look(channel.address) == 0 and take(4 * 40) == 4 * 60
        assert (total == values + 1).all()

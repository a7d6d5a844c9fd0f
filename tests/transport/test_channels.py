"""Both kinds of channel, end to end in one process over a socket pair, and with a peer process that ends."""

from __future__ import annotations

import contextlib
import gc
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
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.backends.errors import ChannelClosedError, DisagreementError, PeerLeftError
from arborcast.backends.transport.channel import Channel
from arborcast.backends.transport.fingerprint import OPENING_BYTES
from arborcast.backends.transport.shared_memory import SharedMemoryChannel, create_memory
from arborcast.backends.transport.stream import StreamChannel
from tests.support.ranks import Failure, run_ranks, store_path
from tests.support.waiting import PATIENCE_S, until, wait_for_end

PART = 16384  # of every channel here; shared memory has 3 slots of it
TRANSPORTS = ("sockets", "shared memory")
HOW = ("take", "receive short", "receive long")  # what a stream does with a part


def connected(transport: str, sock: socket.socket, peer: int, memory: int) -> Channel:
    if transport == "sockets":
        return StreamChannel(sock, peer, PART)
    return SharedMemoryChannel(sock, peer, memory, is_first=peer == 1, slot_bytes=PART, slots=3)


@contextlib.contextmanager
def pair(transport: str) -> Iterator[tuple[Channel, Channel]]:
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

    channel: Channel
    out: deque[memoryview | bytes]
    due: deque[memoryview | bytes]
    takes: bool
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
        into = self.got[-1][self.done :]
        if self.takes and len(into):
            part = self.channel.take(min(PART, len(into)))
            count = 0 if part is None else len(part)
            if part is not None:
                into[:count] = part
        else:
            count = self.channel.receive(into)
        self.done += count
        if self.done < len(first):
            return count > 0
        assert self.got[-1] == first
        self.due.popleft()
        self.done = 0
        return True


def run(*ends: End) -> None:
    """Until all is received; polls as the engine does, so that missing `wants_...` would hang."""
    while any(end.due or end.out for end in ends):
        moved = [end.send() | end.receive() for end in ends]
        if any(moved):
            continue
        poll = select.poll()
        by_descriptor = {end.channel.fileno(): end for end in ends}
        for descriptor, end in by_descriptor.items():
            reads = select.POLLIN if end.due or end.channel.wants_read else 0
            poll.register(descriptor, reads | (select.POLLOUT if end.channel.wants_write else 0))
        events = poll.poll(5000)
        assert events, "nobody waits for what would move"
        for descriptor, _ in events:
            by_descriptor[descriptor].channel.on_ready()


def send_all(channel: Channel, data: memoryview) -> None:
    assert channel.send(data) == len(data)


SIZES = st.lists(
    st.one_of(st.none(), st.integers(0, 12_000), st.sampled_from([PART, PART + 1, 2 * PART, 5 * PART - 7])),
    max_size=8,
)


@pytest.mark.parametrize("transport", TRANSPORTS)
@given(there=SIZES, back=SIZES, takes=st.tuples(st.booleans(), st.booleans()))
def test_whatever_is_sent_arrives_in_order(
    transport: str, there: list[int | None], back: list[int | None], takes: tuple[bool, bool]
) -> None:
    """Messages of all lengths both ways at once; None is an opening between them."""

    def stream(sizes: list[int | None], seed: int) -> list[memoryview | bytes]:
        return [
            bytes([at]) * OPENING_BYTES if size is None else some_bytes(size, seed + at)
            for at, size in enumerate(sizes)
        ]

    with pair(transport) as (a, b):
        run(
            End(a, deque(stream(there, 0)), deque(stream(back, 50)), takes[0]),
            End(b, deque(stream(back, 50)), deque(stream(there, 0)), takes[1]),
        )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_next_collective_may_begin_before_this_one_is_read(transport: str) -> None:
    with pair(transport) as (a, b):
        a.open(b"a" * OPENING_BYTES)
        send_all(a, some_bytes(100, 1))
        a.open(b"b" * OPENING_BYTES)
        send_all(a, some_bytes(200, 2))
        assert b.opening() == b"a" * OPENING_BYTES
        first = b.take(100)
        assert first is not None
        assert first == some_bytes(100, 1)
        assert b.opening() == b"b" * OPENING_BYTES
        into = room_for(200)
        assert b.receive(into) == 200
        assert into == some_bytes(200, 2)
        assert b.opening() is None
        assert b.receive(into) == 0
        assert b.take(1) is None


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_lengths_that_differ_are_refused_with_both(transport: str) -> None:
    with pair(transport) as (a, b):
        send_all(a, some_bytes(100))
        with pytest.raises(
            DisagreementError, match="rank 0 sends a part of 100 bytes where a part of 64 bytes is due"
        ):
            b.receive(room_for(64))
    with pair(transport) as (a, b):
        assert a.send(some_bytes(10_000))
        with pytest.raises(
            DisagreementError, match="a part of 10000 bytes where a part of 16384 bytes is due"
        ):
            b.take(PART)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_collectives_that_are_out_of_step_are_refused(transport: str) -> None:
    with pair(transport) as (a, b):
        a.open(bytes(OPENING_BYTES))
        with pytest.raises(
            DisagreementError, match="the begin of a collective where a part of 64 bytes is due"
        ):
            b.take(64)
    with pair(transport) as (a, b):
        send_all(a, some_bytes(100))
        with pytest.raises(
            DisagreementError, match="rank 0 sends a part of 100 bytes where a collective should begin"
        ):
            b.opening()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_reason_comes_after_what_was_sent_before(transport: str) -> None:
    with pair(transport) as (a, b):
        send_all(a, some_bytes(100))
        a.abort("gave up: the café burns")
        b.on_ready()
        assert b.take(100) is not None
        for _ in range(2):
            with pytest.raises(ChannelClosedError, match=r"^rank 0 gave up: the café burns$") as caught:
                b.take(100)
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
    for call in (lambda: channel.take(8), channel.on_ready, lambda: channel.open(bytes(OPENING_BYTES))):
        with pytest.raises(ChannelClosedError, match="rank 1 closed its connection: it died") as caught:
            call()
        assert caught.value.reason is None
    assert "it died" in str(channel.last_words())
    channel.close()


@pytest.mark.parametrize("how", HOW)
def test_abort_within_a_part_never_completes_it(how: str) -> None:
    """The rest of the part is filled up, so that the reason can follow; its last byte is never counted."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
    long = 12_000  # more than the socket takes at once
    a = StreamChannel(ours, 1, long)
    b = StreamChannel(theirs, 0, long, long_bytes=1 if how == "receive long" else 100_000)
    data = some_bytes(long)
    handed_over = a.send(data)
    assert 0 < handed_over < long, "the socket should fill within the part"
    into, received = room_for(long), 0

    def receive() -> None:
        nonlocal received
        if how == "take":
            assert b.take(long) is None
        else:
            received += b.receive(into[received:])
        assert received < long, "a message was completed with bytes that nobody sent"

    receive()  # makes room for the rest
    a.abort("gave up: rank 7 died")
    with pytest.raises(ChannelClosedError, match="rank 7 died"):
        while True:
            receive()
    if how == "receive long":
        assert handed_over <= received
        assert into[:handed_over] == data[:handed_over]
    b.close()


class Narrow:
    """A socket that takes at most so many bytes at once."""

    def __init__(self, sock: socket.socket, limit: int) -> None:
        self._sock = sock
        self._limit = limit

    def sendmsg(self, buffers: list[bytes]) -> int:
        return self._sock.send(b"".join(buffers)[: self._limit])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


@pytest.mark.parametrize("limit", range(1, 24))
def test_socket_may_take_any_number_of_bytes(limit: int) -> None:
    """Wherever a send stops: in a header, in the bytes, or before the trailer."""
    ours, theirs = socket.socketpair()
    a, b = StreamChannel(ours, 1, part_bytes=4), StreamChannel(theirs, 0, part_bytes=4)
    a._socket = Narrow(ours, limit)  # type: ignore[assignment]
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


@pytest.mark.parametrize("limit", [*range(1, 40), 1000])
@pytest.mark.parametrize("lengths", [[4], [3, 0, 4, 1], [0], [2, 9, 4]], ids=str)
def test_messages_that_go_together_may_stop_anywhere(limit: int, lengths: list[int]) -> None:
    """What was handed over is a prefix of them, and the next call goes on behind it."""
    ours, theirs = socket.socketpair()
    a, b = StreamChannel(ours, 1, part_bytes=4), StreamChannel(theirs, 0, part_bytes=4)
    a._socket = Narrow(ours, limit)  # type: ignore[assignment]
    messages = [some_bytes(length, at) for at, length in enumerate(lengths)]
    left = list(messages)
    while left:
        count = a.send_all(left)
        assert (count < sum(map(len, left))) <= a.wants_write
        assert a.wants_write <= bool(limit < 1000)
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]
    a.open(bytes(OPENING_BYTES))
    while a.wants_write:
        a.on_ready()
    for data in messages:
        into = room_for(len(data))
        assert b.receive(into) == len(data)
        assert into == data
    assert b.opening() == bytes(OPENING_BYTES)
    a.close()
    b.close()


def stream_of(*parts: bytes) -> bytes:
    """As it goes over the wire: a part's trailer makes its frame a multiple of 8 bytes long."""
    return b"".join(
        struct.pack("<BxxxI", 1, len(part)) + part + b"\x01" * (8 - len(part) % 8) for part in parts
    )


@pytest.mark.parametrize("how", HOW)
def test_bytes_may_come_one_by_one(how: str) -> None:
    """A part is complete with its trailer, and not a byte before."""
    ours, theirs = socket.socketpair()
    channel = StreamChannel(ours, 1, part_bytes=4, long_bytes=1 if how == "receive long" else 100)
    # Of the six bytes of the message, how many are received after each byte of the stream:
    #        header     part          trailer           header     part     trailer
    counts = [0] * 8 + [1, 2, 3, 3] + [3, 3, 3, 4] + [4] * 8 + [5, 5] + [5, 5, 5, 5, 5, 6]
    into = room_for(6)
    done = 0
    for byte, count in zip(stream_of(b"abcd", b"ef"), counts, strict=True):
        theirs.sendall(bytes([byte]))
        if how == "take":
            part = channel.take(4 if done < 4 else 2)
            if part is not None:
                into[done : done + len(part)] = part
                done += len(part)
        else:
            done += channel.receive(into[done:])
        assert done == (count if how == "receive long" else 6 if count == 6 else count // 4 * 4)
    assert bytes(into) == b"abcdef"
    channel.close()
    theirs.close()


def test_part_that_was_not_all_there_to_be_taken_may_be_received() -> None:
    for long_bytes in (1, 100):
        ours, theirs = socket.socketpair()
        channel = StreamChannel(ours, 1, part_bytes=4, long_bytes=long_bytes)
        stream = stream_of(b"abcd", b"ef")
        theirs.sendall(stream[:11])
        assert channel.take(4) is None
        theirs.sendall(stream[11:])
        into = room_for(6)
        assert channel.receive(into) == 6
        assert bytes(into) == b"abcdef"
        channel.close()
        theirs.close()


@pytest.mark.parametrize("there", range(4))
def test_part_is_aligned_behind_a_trailer_that_came_late(there: int) -> None:
    """Five bytes have a trailer of three, of which `there` come with the part, received without a copy."""
    ours, theirs = socket.socketpair()
    channel = StreamChannel(ours, 1, long_bytes=5)
    stream = stream_of(b"abcde", b"wxyz")
    first, second = 8 + 5 + there, 16 + 10
    into = room_for(5)
    done = 0
    theirs.sendall(stream[:13])
    done += channel.receive(into)
    theirs.sendall(stream[13:first])
    done += channel.receive(into[done:])
    theirs.sendall(stream[first:second])
    if done < 5:
        done += channel.receive(into[done:])
    assert (done, bytes(into)) == (5, b"abcde")
    assert channel.take(4) is None
    theirs.sendall(stream[second:])
    part = channel.take(4)
    assert part is not None
    assert bytes(part) == b"wxyz"
    assert np.frombuffer(part, np.uint8).ctypes.data % 8 == 0
    channel.close()
    theirs.close()


def test_who_polls_need_not_look_again() -> None:
    """A call that found the end of what had come asks no more, until `on_ready` or somebody insists."""
    ours, theirs = socket.socketpair()
    channel = StreamChannel(ours, 1)
    into = room_for(2)
    for see in (channel.on_ready, lambda: channel.take(4), lambda: channel.receive(into)):
        assert channel.take(2) is None
        theirs.sendall(stream_of(b"ab", b"cd"))
        if see is channel.on_ready:
            assert channel.take(2, look=False) is None
            assert channel.receive(into, look=False) == 0
            see()
            assert channel.take(2, look=False) == b"ab"
            assert channel.receive(into, look=False) == 2
            assert into == b"cd"
        else:
            assert channel.take(2) == b"ab"
            assert channel.take(2, look=False) == b"cd"
    channel.close()
    theirs.close()


@given(st.lists(st.tuples(st.integers(1, 90_000), st.booleans()), min_size=1, max_size=40), st.randoms())
@settings(max_examples=25, deadline=None)
def test_parts_that_land_together(messages: list[tuple[int, bool]], random_: random.Random) -> None:
    """Taken or received, short or long, the stream cut anywhere; a part lies where it can be computed on."""
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 21)
    part_bytes, long_bytes = 80_000, random_.choice([1, 5000, 65536])
    channel = StreamChannel(ours, 1, part_bytes, long_bytes)
    out = [bytes(some_bytes(length, at)) for at, (length, _) in enumerate(messages)]
    stream = b"".join(
        stream_of(*(data[at : at + part_bytes] for at in range(0, len(data), part_bytes))) for data in out
    )
    sent = 0
    for data, (_, takes) in zip(out, messages, strict=True):
        into, done = room_for(len(data)), 0
        while done < len(data):
            part = channel.take(min(part_bytes, len(data) - done)) if takes else None
            if part is not None:
                assert np.frombuffer(part, np.uint8).ctypes.data % 8 == 0
                into[done : done + len(part)] = part
                done += len(part)
            elif not takes and (count := channel.receive(into[done:])):
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


def test_sender_waits_for_slots_and_reuses_them() -> None:
    with pair("shared memory") as (a, b):
        data = some_bytes(7 * PART)
        assert a.send(data) == 3 * PART
        assert a.wants_read
        assert not a.wants_write
        first = b.take(PART)
        assert first is not None
        assert a.send(data[3 * PART :]) == 0
        assert first == data[:PART]  # still there: it may be read until the next call
        assert b.take(PART) is not None
        assert b.take(PART) is not None  # two slots are free now, and given back
        a.on_ready()
        assert not a.wants_read
        assert a.send(data[3 * PART :]) == 2 * PART


def test_short_parts_need_no_slot() -> None:
    with pair("shared memory") as (a, b):
        for at in range(5):
            send_all(a, some_bytes(24, at))
        for at in range(5):
            part = b.take(24)
            assert part is not None
            assert part.cast("d").tolist() == some_bytes(24, at).cast("d").tolist()


def test_socket_without_room_is_said() -> None:
    with pair("sockets") as (a, b):
        data = some_bytes(100 * PART)
        count = a.send(data)
        assert 0 < count < 100 * PART
        assert a.wants_write
        assert not a.wants_read
        assert b.receive(room_for(100 * PART)) == 0  # the begin of a part lands, which makes room
        assert a.send(data[count:])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_openings_without_room_are_kept(transport: str) -> None:
    with pair(transport) as (a, b):
        number = 300
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
        for _ in range(500):
            a.open(bytes(OPENING_BYTES))
        assert a.wants_write
        a.close()
        assert a.fileno() == -1


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
            b.take(PART)
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
            channel.take(8)
        channel.close()
        theirs.close()


# With a peer process that ends


def meet(rank: int, transport: str, part_bytes: int) -> Channel:
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
    data = some_bytes(1 << 26)
    if rank == 0:
        sent = 0
        while sent < len(data) // 4:
            # To the end of a part: one call could go on for as long as the peer makes room.
            end = (sent // channel.part_bytes + 1) * channel.part_bytes
            sent += channel.send(data[sent:end])
        os.kill(os.getpid(), signal.SIGKILL)
    into = room_for(1 << 26)
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
        until(lambda: channel.take(1 << 20) is not None)
        os.kill(os.getpid(), signal.SIGKILL)
    data = some_bytes(1 << 26)
    sent = 0
    try:
        while sent < len(data):
            count = channel.send(data[sent:])
            sent += count
            if not count:
                poll = select.poll()
                poll.register(
                    channel.fileno(),
                    select.POLLIN * channel.wants_read | select.POLLOUT * channel.wants_write,
                )
                assert poll.poll(90_000), "not told that the peer is gone"
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

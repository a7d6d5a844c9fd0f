"""What goes to several readers is laid on the writer's shelf once; what they read is what was laid."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from arborcast.backends.errors import DisagreementError
from arborcast.backends.native.library import SHELF_PLACES, FrameCode, at_once, combiner
from arborcast.backends.transport.frames import HEADER
from arborcast.backends.transport.shared_memory import SharedMemoryChannel, Shelf, create_memory

PLACE = 1024
Ends = tuple[Shelf, list[SharedMemoryChannel], list[SharedMemoryChannel]]


@contextlib.contextmanager
def one_writer(readers: int, ring_bytes: int = 4096) -> Iterator[Ends]:
    """A shelf, the writer's channels, and the readers' ends of them."""
    shelf = Shelf(PLACE, least_bytes=1)
    writing, reading = [], []
    for peer in range(1, readers + 1):
        memory, socks = create_memory(ring_bytes, 1), socket.socketpair()
        for sock, other, ends in ((socks[0], peer, writing), (socks[1], 0, reading)):
            channel = SharedMemoryChannel(
                sock,
                other,
                memory,
                is_first=other > 0,
                slot_bytes=ring_bytes,
                slots=1,
                shelf=shelf if other else None,
                their_shelf=None if other else shelf.descriptor,
                place_bytes=PLACE,
            )
            ends.append(channel)
        os.close(memory)
    shelf.close()  # who has it keeps it
    try:
        yield shelf, writing, reading
    finally:
        for channel in writing + reading:
            channel.close()


def some(count: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def send(channel: SharedMemoryChannel, data: NDArray[np.float32], share: int, done: int) -> int:
    """Bytes that went."""
    left = data.nbytes - done
    return int(at_once.channel_send_laid(channel.address, share, done, data.ctypes.data + done, left))


def receive(channel: SharedMemoryChannel, into: NDArray[np.float32], done: int) -> int:
    return int(at_once.channel_receive(channel.address, into.ctypes.data + done, into.nbytes - done))


@pytest.mark.parametrize("most", [0, 1, 13, 300])
def test_what_three_read_is_laid_once(most: int) -> None:
    data, seed = some(3000), random.Random(most)
    with one_writer(3) as (shelf, writing, reading):
        for channel in writing + reading:
            channel.state.most = most
        into = [np.zeros_like(data) for _ in reading]
        sent, got = [0] * 3, [0] * 3
        while min(got) < data.nbytes:
            at = seed.randrange(3)
            if seed.random() < 0.5 and sent[at] < data.nbytes:
                sent[at] += send(writing[at], data, 0, sent[at])
            elif got[at] < data.nbytes:
                got[at] += receive(reading[at], into[at], got[at])
        assert all((each == data).all() for each in into)
        assert shelf.state.next == -(-data.nbytes // PLACE), "each place once, not three times"
        assert not any(np.frombuffer(shelf._memory, np.uint32)[::16][:SHELF_PLACES]), "nobody reads any more"


def test_other_bytes_of_the_same_place_in_a_message_are_laid_anew() -> None:
    """Of another share, or of another run."""
    with one_writer(2) as (shelf, writing, reading):
        for run, share in ((0, 0), (0, 1), (1, 1)):
            shelf.state.run = run
            data = some(100, seed=10 * run + share)
            for channel, end in zip(writing, reading, strict=True):
                assert send(channel, data, share, 0) == data.nbytes
                into = np.zeros_like(data)
                assert receive(end, into, 0) == data.nbytes
                assert (into == data).all()
        assert shelf.state.next == 3


def test_a_slow_reader_holds_nobody_up_for_ever() -> None:
    """The shelf is full of what it has not read: who has read all is sent a copy, who has not waits."""
    data = some(2 * SHELF_PLACES * PLACE // 4)
    with one_writer(2) as (shelf, (to_quick, to_slow), (quick, slow)):
        into = [np.zeros_like(data) for _ in range(2)]
        sent = [0, 0]
        while more := sum(counts := [send(c, data, 0, sent[at]) for at, c in enumerate((to_quick, to_slow))]):
            sent = [before + count for before, count in zip(sent, counts, strict=True)]
        assert more == 0 and sent == [SHELF_PLACES * PLACE] * 2
        assert to_quick.wanted(reads=False) is not None, "it sleeps until somebody has read"
        got = [0, 0]
        while got[0] < data.nbytes:
            got[0] += receive(quick, into[0], got[0])
            if sent[0] < data.nbytes:
                sent[0] += send(to_quick, data, 0, sent[0])
        assert shelf.state.next == SHELF_PLACES and sent[1] == SHELF_PLACES * PLACE
        while got[1] < data.nbytes:
            got[1] += receive(slow, into[1], got[1])
            if sent[1] < data.nbytes:
                sent[1] += send(to_slow, data, 0, sent[1])
        assert all((each == data).all() for each in into)


def test_who_sleeps_for_room_is_woken_by_a_reader() -> None:
    data = some(2 * SHELF_PLACES * PLACE // 4)
    with one_writer(1) as (_, (to_one,), (one,)):
        sent = 0
        while count := send(to_one, data, 0, sent):
            sent += count
        assert to_one.wanted(reads=False)
        assert receive(one, np.zeros_like(data), 0)
        assert to_one._socket.recv(1) == b"\0"


def test_what_lies_there_is_added_where_it_lies() -> None:
    data, total = some(1000), some(1000, seed=1)
    wanted = total + data
    with one_writer(1) as (_, (to_one,), (one,)):
        one.state.most = 100
        assert send(to_one, data, 0, 0) == data.nbytes
        add, done = combiner("sum", torch.float32), 0
        while done < data.nbytes:
            at, left = total.ctypes.data + done, data.nbytes - done
            done += at_once.channel_combine(one.address, at, at, left, add, 4)
    assert (total == wanted).all()


@pytest.mark.parametrize(
    ("length", "place", "message"),
    [
        (100, SHELF_PLACES, "sent 0200"),
        (PLACE + 8, 0, "sent 0200"),
        (104, 0, "a part of 104 bytes where a part of 100"),
    ],
)
def test_places_that_there_are_not(length: int, place: int, message: str) -> None:
    with one_writer(1) as (_, (to_one,), (one,)):
        frame = HEADER.pack(FrameCode.LAID, length) + HEADER.pack(0, place) + bytes(7) + b"\1"
        ring = np.frombuffer(to_one._memory, np.uint8)
        ring[4096 : 4096 + len(frame)] = np.frombuffer(frame, np.uint8)
        ring[:8].view(np.uint64)[0] = len(frame)
        with pytest.raises(DisagreementError, match=message):
            one.receive(memoryview(bytearray(100)))


def test_who_has_no_shelf_takes_nothing_from_one() -> None:
    socks, memory = socket.socketpair(), create_memory(4096, 1)
    ends = [
        SharedMemoryChannel(s, 1 - at, memory, is_first=not at, slot_bytes=4096, slots=1)
        for at, s in enumerate(socks)
    ]
    os.close(memory)
    ring = np.frombuffer(ends[0]._memory, np.uint8)
    frame = HEADER.pack(FrameCode.LAID, 100) + HEADER.pack(0, 0) + bytes(7) + b"\1"
    ring[4096 : 4096 + len(frame)] = np.frombuffer(frame, np.uint8)
    ring[:8].view(np.uint64)[0] = len(frame)
    with pytest.raises(DisagreementError, match="where a frame begins"):
        ends[1].receive(memoryview(bytearray(100)))
    for channel in ends:
        channel.close()

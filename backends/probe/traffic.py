"""What one rank does in one experiment: messages there and back, or as much as goes through for a while.

It runs over the channels of the process group, in one thread that polls, so that what is measured is what
schedules will get.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from arborcast.backends.errors import ExecutionError
from arborcast.backends.transport.socket_channel import SocketChannel

PING_BYTES = 8
PIECE_BYTES = 64 << 10
"""Of the messages that show what a piece costs its ends beside what any message does."""
_LAST = 1  # first byte of the message after which a sender stops


@dataclass(frozen=True, slots=True)
class Period:
    """When the bytes of an experiment count.

    A sender sends for `warmup_s`, `window_s` and half of `warmup_s` again; a receiver counts what comes in
    the window, by its own clock. Clocks start at a barrier, which ends for all within less than that half.
    """

    window_s: float
    warmup_s: float

    @property
    def sending_s(self) -> float:
        """How long a sender begins new messages."""
        return self.window_s + 1.5 * self.warmup_s


@dataclass(frozen=True, slots=True)
class Pings:
    """Round trips between two ranks, as one of them saw them.

    Attributes:
        one_way_us: half of each.
        work_us: for how long each message, sent or received, kept this end's thread at work, without the time
            that it slept; the mean.
    """

    one_way_us: list[float]
    work_us: float


def ping_pong(
    channel: SocketChannel, *, begins: bool, repeats: int, timeout_s: float, length: int = PING_BYTES
) -> Pings:
    """Messages to and fro, after one round trip that does not count; the same at both ends.

    Args:
        channel: between the two ranks.
        begins: whether this rank sends first.
        repeats: of the round trip.
        timeout_s: for one message.
        length: of a message, in bytes.
    """
    message, times, worked = memoryview(bytearray(length)), [], 0.0
    for turn in range(repeats + 1):
        if turn == 1:
            worked = time.thread_time()
        start = time.perf_counter()
        if begins:
            _send_all(channel, message, timeout_s)
        _receive_all(channel, message, timeout_s)
        if not begins:
            _send_all(channel, message, timeout_s)
        times.append((time.perf_counter() - start) / 2 * 1e6)
    return Pings(times[1:], (time.thread_time() - worked) / (2 * repeats) * 1e6)


def flood(
    channels: Mapping[int, SocketChannel],
    *,
    to: Collection[int],
    of: Collection[int],
    period: Period,
    timeout_s: float,
) -> dict[int, float]:
    """Send to some ranks as fast as it goes, receive of others at the same time; GB/s received of each.

    Args:
        channels: to all these ranks.
        to: who is sent to.
        of: who sends.
        period: how long, and what counts.
        timeout_s: without any byte in any direction.

    Raises:
        ExecutionError: a peer is gone, or nothing moved for so long.
    """
    senders = {peer: _Sender(channels[peer]) for peer in to}
    receivers = {peer: _Receiver(channels[peer]) for peer in of}
    waiting = _Waiting([channels[peer] for peer in {*to, *of}])
    start = moved = time.perf_counter()
    while True:
        now = time.perf_counter()
        stop = now - start >= period.sending_s
        sent = [sender.push(stop=stop) for sender in senders.values() if not sender.is_done]
        counts = 0 <= now - start - period.warmup_s < period.window_s
        came = [receiver.pull(counts=counts) for receiver in receivers.values() if not receiver.is_done]
        if not sent and not came:
            return {peer: receiver.rate(period.window_s, now - start) for peer, receiver in receivers.items()}
        if any(sent) or any(came):
            moved = now
        elif now - moved > timeout_s:
            raise ExecutionError(
                f"probe: nothing moved for {timeout_s:g} s between this rank and {sorted({*to, *of})}"
            )
        else:
            waiting.wait(min(timeout_s, 1))


class _Sender:
    """Messages of one part each, of which the last one says that it is."""

    def __init__(self, channel: SocketChannel) -> None:
        self._channel = channel
        self._message = memoryview(bytearray(channel.part_bytes))
        self._end = memoryview(bytearray(channel.part_bytes))
        self._end[0] = _LAST
        self._left = self._message[:0]
        self._is_last = False

    @property
    def is_done(self) -> bool:
        return self._is_last and not self._left and not self._channel.wants_write

    def push(self, *, stop: bool) -> bool:
        """Hand over at most the rest of a message, whether anything went."""
        if not self._left:
            if self._is_last:  # the channel still holds the end of it
                return False
            self._is_last = stop
            self._left = self._end if stop else self._message
        sent = self._channel.send(self._left)
        self._left = self._left[sent:]
        return sent > 0


class _Receiver:
    """Counts the bytes of messages until the last one is whole."""

    def __init__(self, channel: SocketChannel) -> None:
        self._channel = channel
        self._message = memoryview(bytearray(channel.part_bytes))
        self._have = 0
        self._total = 0
        self._counted = 0
        self.is_done = False

    def rate(self, window_s: float, elapsed_s: float) -> float:
        """GB/s in the window; of all bytes over the time of the whole experiment where none came in it."""
        return (self._counted / window_s or self._total / elapsed_s) / 1e9

    def pull(self, *, counts: bool) -> bool:
        """Take in at most the rest of a message, whether anything came."""
        got = self._channel.receive(self._message[self._have :])
        self._have += got
        self._total += got
        self._counted += got if counts else 0
        if self._have == len(self._message):
            self._have = 0
            self.is_done = self._message[0] == _LAST
        return got > 0


class _Waiting:
    """Sleeps until a channel can move something."""

    def __init__(self, channels: Collection[SocketChannel]) -> None:
        self._poll = select.poll()
        self._channels = {channel.fileno(): channel for channel in channels}

    def wait(self, timeout_s: float) -> None:
        is_ready = False
        for descriptor, channel in self._channels.items():
            events = channel.wanted()
            is_ready |= events is None
            self._poll.register(descriptor, events or 0)
        self._poll.poll(0 if is_ready else timeout_s * 1000)
        for channel in self._channels.values():
            channel.on_ready()


def _send_all(channel: SocketChannel, message: memoryview, timeout_s: float) -> None:
    _move_all(channel, channel.send, message, timeout_s)
    waiting = _Waiting([channel])
    while channel.wants_write:
        waiting.wait(timeout_s)


def _receive_all(channel: SocketChannel, message: memoryview, timeout_s: float) -> None:
    _move_all(channel, channel.receive, message, timeout_s)


def _move_all(
    channel: SocketChannel, move: Callable[[memoryview], int], left: memoryview, timeout_s: float
) -> None:
    waiting = _Waiting([channel])
    deadline = time.perf_counter() + timeout_s
    while left:
        moved = move(left)
        left = left[moved:]
        if not moved:
            if time.perf_counter() > deadline:
                raise ExecutionError(f"probe: rank {channel.peer} did not answer for {timeout_s:g} s")
            waiting.wait(min(timeout_s, 1))

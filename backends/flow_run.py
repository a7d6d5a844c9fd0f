"""One collective on one rank: a flow, the rank's memory, and the channels that join it to the others.

Nothing here blocks but the one sleep. What can be sent is sent as soon as it is complete; what has come is
used at once, while it is in the cache. A line is the state of one channel in this run: its next send, its
next receive, how far both are, and whether the peer's opening has been seen.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.channels.channel import Channel
from backends.channels.opening import Opening
from backends.errors import ChannelClosedError, ExecutionError
from backends.flow import Act, Action, Flow
from backends.layout import Buffer, Slice
from backends.lookout import GONE, LEAVING, READ, WRITE, Lookout
from backends.program import Program
from backends.torch_reduction import Operator

NOTHING = Flow(Program(0, (), 0, 0, 0, False, 1), (), {}, {}, 0)
"""The flow of a rank that only compares openings."""


class LineError(ExecutionError):
    """A peer went in the middle of something; `closed` is the error of its channel.

    The message says what was awaited from which peer, but neither the rank nor the collective.
    """

    def __init__(self, what: str, closed: ChannelClosedError) -> None:
        super().__init__(f"{what}: {closed}")
        self.closed = closed


class Line:
    """One channel in one run.

    Attributes:
        channel: to the peer.
        sends: numbers of the actions that send to the peer, in order; `sent` of them are complete.
        receives: the same of those that receive from it.
        awaits_opening: whether the peer's opening has not been seen and must be.
        outgoing: what is left of a send that has begun.
        incoming: what is left of a plain receive that has begun.
        offset: bytes of a combine that are done.
        is_gone: whether the peer will send no more than is on its way.
    """

    __slots__ = (
        "awaits_opening",
        "channel",
        "incoming",
        "is_gone",
        "offset",
        "outgoing",
        "received",
        "receives",
        "sends",
        "sent",
    )

    def __init__(
        self,
        channel: Channel,
        *,
        sends: tuple[int, ...] = (),
        receives: tuple[int, ...] = (),
        awaits_opening: bool = False,
    ) -> None:
        self.channel = channel
        self.sends = sends
        self.receives = receives
        self.awaits_opening = awaits_opening
        self.sent = 0
        self.received = 0
        self.outgoing: Tensor | None = None
        self.incoming: Tensor | None = None
        self.offset = 0
        self.is_gone = False


class FlowRun:
    """A run of a flow; `run` once."""

    def __init__(
        self,
        flow: Flow,
        memory: Mapping[Buffer, Tensor],
        operator: Operator | None,
        opening: Opening,
        lines: Mapping[int, Line],
        lookout: Lookout,
        *,
        rank: int,
        timeout_s: float,
    ) -> None:
        """Nothing is sent yet.

        Args:
            flow: what to do.
            memory: flat tensors of one type for every buffer that the flow uses, scratch included.
            operator: how contributions are combined; None where none are.
            opening: what every line that awaits one must bring.
            lines: by peer, for all channels there are, so that a peer that gives up is noticed.
            lookout: to sleep with.
            rank: this one.
            timeout_s: how long nothing may happen.
        """
        self._actions = flow.actions
        self._left = [action.waits for action in flow.actions]
        self._memory = memory
        self._bytes = {buffer: tensor.view(torch.uint8) for buffer, tensor in memory.items()}
        self._operator = operator
        self._opening = opening
        self._opening_bytes = opening.to_bytes()
        self._lines = lines
        self._lookout = lookout
        self._rank = rank
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        # Actions, and openings to be seen, that keep the run from ending.
        self._missing = len(flow.actions) + sum(line.awaits_opening for line in lines.values())
        self._local: deque[int] = deque(
            number for number, action in enumerate(flow.actions) if action.peer < 0 and not action.waits
        )
        self._to_push: deque[Line] = deque(line for line in lines.values() if line.sends)
        self._to_pull: deque[Line] = deque(
            line for line in lines.values() if line.receives or line.awaits_opening
        )

    def run(self, *, until: Callable[[], bool] | None = None, bell: Bell | None = None) -> None:
        """Return when everything is complete here and handed over to the channels.

        Args:
            until: what else must hold; asked whenever something moves, and as often as the bell says.
            bell: rung when `until` may have changed.

        Raises:
            LineError: a peer that is still needed is gone, or gave up.
            DisagreementError: a peer means another collective.
            ExecutionError: nothing happened for too long.
        """
        lines = self._lines.values()
        while True:
            self._work()
            is_over = not self._missing and not any(
                line.channel.wants_write and not line.is_gone for line in lines
            )
            if is_over and (until is None or until()):
                return
            self._sleep(is_over, bell)

    def _work(self) -> None:
        """Do all that can be done now; sends first, so that others need not wait for our reading."""
        local, to_push, to_pull = self._local, self._to_push, self._to_pull
        while True:
            if local:
                self._compute(local.popleft())
            elif to_push:
                self._push(to_push.popleft())
            elif to_pull:
                self._pull(to_pull.popleft())
            else:
                return

    def _compute(self, number: int) -> None:
        """Carry out a local action."""
        action = self._actions[number]
        into, source = self._view(action.into), self._view(action.source)
        if action.act is Act.COPY:
            into.copy_(source)
        else:
            assert self._operator is not None, "a flow with reductions comes with an operator"
            self._operator.combine(into, source, into)
        self._complete(number)

    def _push(self, line: Line) -> None:
        """Send what may be sent, until the channel has no room."""
        channel, sends, left = line.channel, line.sends, self._left
        while line.sent < len(sends):
            number = sends[line.sent]
            if left[number]:
                return
            data = line.outgoing
            if data is None:
                data = self._bytes_of(self._actions[number].into)
            try:
                count = channel.send(data)
                while count < len(data):
                    if not count:
                        line.outgoing = data
                        return
                    data = data[count:]
                    count = channel.send(data)
            except ChannelClosedError as error:
                raise LineError(str(self._actions[number].operation), error) from error
            line.outgoing = None
            line.sent += 1
            self._complete(number)

    def _pull(self, line: Line) -> None:
        """Use what has come, up to the end of one message."""
        try:
            if line.awaits_opening and not self._see_opening(line):
                return
            if line.received == len(line.receives):
                return
            number = line.receives[line.received]
            if self._left[number]:
                return
            action = self._actions[number]
            whole = self._combine(line, action) if action.act is Act.COMBINE else self._fill(line, action)
        except ChannelClosedError as error:
            raise LineError(self._awaited(line), error) from error
        if not whole:
            return
        line.received += 1
        self._complete(number)
        if self._may_receive(line):
            self._to_pull.append(line)

    def _see_opening(self, line: Line) -> bool:
        """Whether the peer's opening is there; it must be ours."""
        data = line.channel.opening()
        if data is None:
            return False
        if data != self._opening_bytes:
            self._opening.check(self._rank, Opening.from_bytes(data), line.channel.peer)
        line.awaits_opening = False
        self._missing -= 1
        return True

    def _fill(self, line: Line, action: Action) -> bool:
        """Receive into place; whether all of the message is there."""
        rest = line.incoming
        if rest is None:
            rest = self._bytes_of(action.into)
        channel = line.channel
        while len(rest):
            count = channel.receive(rest)
            if not count:
                line.incoming = rest
                return False
            rest = rest[count:]
        line.incoming = None
        return True

    def _combine(self, line: Line, action: Action) -> bool:
        """Combine the parts that are there where they lie; whether that was the last."""
        assert self._operator is not None, "a flow with reductions comes with an operator"
        channel, combine = line.channel, self._operator.combine
        into, other = action.into, action.source
        written, read = self._memory[into.buffer], self._memory[other.buffer]
        dtype = written.dtype
        most = channel.part_bytes // dtype.itemsize
        offset, total = line.offset, into.length
        while offset < total:
            length = min(most, total - offset)
            part = channel.take(length * dtype.itemsize)
            if part is None:
                line.offset = offset
                return False
            out = written.narrow(0, into.start + offset, length)
            mine = out if other is into else read.narrow(0, other.start + offset, length)
            combine(mine, part.view(dtype), out)
            offset += length
        line.offset = 0
        return True

    def _complete(self, number: int) -> None:
        """Note what may start now that an action is complete."""
        self._missing -= 1
        left = self._left
        for waiter in self._actions[number].waiters:
            left[waiter] -= 1
            if left[waiter]:
                continue
            action = self._actions[waiter]
            if action.peer < 0:
                self._local.append(waiter)
                continue
            line = self._lines[action.peer]
            if action.act is not Act.SEND:
                if line.receives[line.received] == waiter:
                    self._to_pull.append(line)
            elif line.sends[line.sent] == waiter:
                self._to_push.append(line)

    def _sleep(self, is_over: bool, bell: Bell | None) -> None:
        """Wait until a channel moves or somebody rings."""
        by_descriptor = {}
        for line in self._lines.values():
            channel = line.channel
            # Sending may have read what is to be received, and receiving may have found room to send.
            if self._may_send(line) and not (channel.wants_read or channel.wants_write):
                self._to_push.append(line)
            if channel.has_unread and (line.awaits_opening or self._may_receive(line)):
                self._to_pull.append(line)
            descriptor = channel.fileno()
            by_descriptor[descriptor] = line
            self._lookout.want(descriptor, self._wanted(line))
        if self._to_push or self._to_pull:
            return
        now = time.monotonic()
        left = self._deadline - now
        if is_over:  # what is awaited now has a deadline of its own
            left = self._timeout_s
        elif left <= 0:
            raise ExecutionError(f"{self._waits_for()}: nothing happened for {self._timeout_s:g} s")
        events = self._lookout.sleep(left if bell is None else min(left, bell.look_every_s))
        for descriptor, happened in events:
            if bell is not None and descriptor == bell.descriptor:
                bell.silence()
            else:
                self._wake(by_descriptor[descriptor], happened)
                self._deadline = now + self._timeout_s

    def _wanted(self, line: Line) -> int:
        """What to look for; nothing that would wake us without there being anything to do."""
        channel = line.channel
        events = READ if line.awaits_opening or self._may_receive(line) else 0
        if not line.is_gone:
            events |= LEAVING
            if channel.wants_read:
                events |= READ
            if channel.wants_write:
                events |= WRITE
        return events

    def _wake(self, line: Line, happened: int) -> None:
        if happened & GONE:
            line.is_gone = True
            if line.sent < len(line.sends):  # whoever leaves in peace has got everything before
                operation = self._actions[line.sends[line.sent]].operation
                raise LineError(str(operation), line.channel.last_words())
        try:
            line.channel.on_ready()
        except ChannelClosedError as error:
            line.is_gone = True
            if self._needs(line) or error.reason is not None:
                raise LineError(self._awaited(line), error) from error
            return
        if line.sent < len(line.sends):
            self._to_push.append(line)
        if line.received < len(line.receives) or line.awaits_opening:
            self._to_pull.append(line)

    def _may_send(self, line: Line) -> bool:
        return line.sent < len(line.sends) and not self._left[line.sends[line.sent]]

    def _may_receive(self, line: Line) -> bool:
        return line.received < len(line.receives) and not self._left[line.receives[line.received]]

    def _needs(self, line: Line) -> bool:
        return line.awaits_opening or line.sent < len(line.sends) or line.received < len(line.receives)

    def _awaited(self, line: Line) -> str:
        """What is next from or to a peer, for messages."""
        if line.awaits_opening:
            return f"begin together with rank {line.channel.peer}"
        if line.received < len(line.receives):
            return str(self._actions[line.receives[line.received]].operation)
        if line.sent < len(line.sends):
            return str(self._actions[line.sends[line.sent]].operation)
        return f"beside rank {line.channel.peer}"

    def _waits_for(self) -> str:
        """All that could happen next if the others did something."""
        found = [
            f"begin together with rank {line.channel.peer}"
            for line in self._lines.values()
            if line.awaits_opening
        ]
        for line in self._lines.values():
            for order, done in ((line.receives, line.received), (line.sends, line.sent)):
                if done < len(order) and not self._left[order[done]] and not line.awaits_opening:
                    found.append(str(self._actions[order[done]].operation))
        return "; ".join(found) or "hand over what is left"

    def _view(self, part: Slice) -> Tensor:
        return self._memory[part.buffer].narrow(0, part.start, part.length)

    def _bytes_of(self, part: Slice) -> Tensor:
        size = self._memory[part.buffer].itemsize
        return self._bytes[part.buffer].narrow(0, part.start * size, part.length * size)

    def find_reason(self, peer: int, seconds: float) -> ChannelClosedError | None:
        """After a peer went without a word: what another one says within that time about why.

        The run has failed; what still comes is lost.
        """
        others = {line.channel.fileno(): line for line in self._lines.values() if line.channel.peer != peer}
        end = time.monotonic() + seconds
        self._lookout.clear()
        for descriptor in others:
            self._lookout.want(descriptor, LEAVING)
        while others and (left := end - time.monotonic()) > 0:
            for descriptor, _ in self._lookout.sleep(left):
                self._lookout.want(descriptor, 0)
                told = others.pop(descriptor).channel.last_words()
                if told.reason is not None:
                    return told
        return None


@dataclass(frozen=True, slots=True)
class Bell:
    """How a thread tells a sleeping run to ask again: a descriptor, and how often to ask without it."""

    descriptor: int
    look_every_s: float

    def silence(self) -> None:
        """Forget how often it was rung."""
        os.eventfd_read(self.descriptor)

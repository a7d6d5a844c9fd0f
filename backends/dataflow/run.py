"""One collective on one rank: a flow, the rank's memory, and the channels that join it to the others.

Nothing here blocks but the one sleep. What can be sent is sent as soon as it is complete; what has come is
used at once, while it is in the cache. A line is the state of one channel in this run: its next send, its
next receive, how far both are, and whether the peer's opening has been seen.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from arborcast.backends.dataflow.arithmetic import arithmetic
from arborcast.backends.dataflow.peer_progress import Line, LineError
from arborcast.backends.dataflow.poller import GONE, LEAVING, READ, WRITE, Bell, Lookout
from arborcast.backends.dataflow.task_graph import Act, Action, Flow
from arborcast.backends.errors import ChannelClosedError, ExecutionError, PeerLeftError
from arborcast.backends.lowering.layout import Buffer
from arborcast.backends.tensors.torch_reduction import Operator
from arborcast.backends.transport.fingerprint import Opening

BATCH_BYTES = 256 << 10
BATCH_MESSAGES = 64


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
        self._left = list(flow.waits)
        self._item_bytes = next((tensor.itemsize for tensor in memory.values()), 1)
        self._raw = _raw_views(flow, memory, self._item_bytes)
        self._arithmetic = arithmetic(flow, memory, operator) if flow.computes else None
        self._opening = opening
        self._opening_bytes = opening.to_bytes()
        self._lines = lines
        self._lookout = lookout
        self._rank = rank
        self._timeout_s = timeout_s
        self._lost: LineError | None = None  # that a peer died which must stay
        self._deadline: float | None = None  # set when sleep begins, forgotten when something happens
        # Actions, and openings to be seen, that keep the run from ending.
        self._missing = len(flow.actions) + sum(line.awaits_opening for line in lines.values())
        self._local: deque[int] = deque(flow.at_once)
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
            with np.errstate(all="ignore"):  # numbers overflow as they do in torch
                self._work()
            is_over = not self._missing and not any(
                line.channel.wants_write and not line.is_gone for line in lines
            )
            if is_over and (until is None or until()):
                return
            if self._lost is not None:  # what it said before it died has been looked for
                raise self._lost
            self._sleep(is_over, bell)

    def _work(self) -> None:
        """Do what can be done now; sends first, so that others need not wait for our reading.

        Where sends wait for room, return after a message from each peer to see whether there is some.
        """
        local, to_push, to_pull = self._local, self._to_push, self._to_pull
        pulls = len(self._lines)
        while True:
            if local:
                self._compute(local.popleft())
            elif to_push:
                self._push(to_push.popleft())
            elif to_pull:
                if not pulls and any(line.outgoing is not None for line in self._lines.values()):
                    return
                pulls = (pulls or len(self._lines)) - 1
                self._pull(to_pull.popleft())
            else:
                return

    def _compute(self, number: int) -> None:
        """Carry out a local action."""
        action = self._actions[number]
        assert self._arithmetic is not None, "a flow that computes"
        if action.act is Act.COPY:
            self._arithmetic.copy(action.into_number, action.source_number)
        else:
            self._arithmetic.reduce(action.into_number, action.source_number)
        self._complete(number)

    def _push(self, line: Line) -> None:
        """Send what may be sent, until the channel has no room; what is ready together goes together."""
        channel, sends = line.channel, line.sends
        while batch := self._ready(line):
            try:
                count = channel.send_all(batch)
            except ChannelClosedError as error:
                raise self._line_error(str(self._actions[sends[line.sent]].operation), error) from error
            is_stuck = not count
            for data in batch:
                if count < len(data):
                    line.outgoing = data[count:]
                    if is_stuck:
                        return
                    break
                count -= len(data)
                is_stuck = False
                line.outgoing = None
                line.sent += 1
                self._complete(sends[line.sent - 1])

    def _ready(self, line: Line) -> list[memoryview]:
        """The next messages to the peer that may be sent: some, and not many bytes."""
        sends, left, actions, raw = line.sends, self._left, self._actions, self._raw
        batch: list[memoryview] = []
        size = 0
        for at in range(line.sent, min(line.sent + BATCH_MESSAGES, len(sends))):
            number = sends[at]
            if left[number] or size >= BATCH_BYTES:
                break
            data = raw[actions[number].into_number]
            batch.append(data)
            size += len(data)
        if line.outgoing is not None:
            batch[0] = line.outgoing
        return batch

    def _pull(self, line: Line) -> None:
        """Use what has come: short messages as long as there are some, else up to the end of one."""
        size = 0
        try:
            if line.awaits_opening and not self._see_opening(line):
                return
            while self._may_receive(line):
                if size >= BATCH_BYTES:
                    self._to_pull.append(line)
                    return
                number = line.receives[line.received]
                action = self._actions[number]
                size += len(self._raw[action.into_number])
                if not (self._combine if action.act is Act.COMBINE else self._fill)(line, action):
                    return
                line.received += 1
                self._complete(number)
        except ChannelClosedError as error:
            raise self._line_error(self._awaited(line), error) from error

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
            rest = self._raw[action.into_number]
        channel = line.channel
        while size := len(rest):
            count = channel.receive(rest, look=False)
            if count == size:
                break
            if not count:
                line.incoming = rest
                return False
            rest = rest[count:]
        line.incoming = None
        return True

    def _combine(self, line: Line, action: Action) -> bool:
        """Combine the parts that are there where they lie; whether that was the last."""
        assert self._arithmetic is not None, "a flow that computes"
        take, combine = line.channel.take, self._arithmetic.combine
        into, source, item_bytes = action.into_number, action.source_number, self._item_bytes
        most = line.channel.part_bytes // item_bytes * item_bytes
        done, total = line.combined, len(self._raw[into])
        while done < total:
            length = min(most, total - done)
            part = take(length, look=False)
            if part is None:
                line.combined = done
                return False
            combine(into, source, done // item_bytes, part)
            done += length
        line.combined = 0
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
        events = self._lookout.sleep(0 if self._to_push or self._to_pull else self._patience(is_over, bell))
        for descriptor, happened in events:
            if bell is not None and descriptor == bell.descriptor:
                bell.silence()
            else:
                self._wake(by_descriptor[descriptor], happened)
                self._deadline = None

    def _patience(self, is_over: bool, bell: Bell | None) -> float:
        """How long to sleep at most.

        Raises:
            ExecutionError: nothing has happened for too long.
        """
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._timeout_s
        left = self._timeout_s if is_over else self._deadline - now  # `until` has a deadline of its own
        if left <= 0:
            raise ExecutionError(f"{self._waits_for()}: nothing happened for {self._timeout_s:g} s")
        return left if bell is None else min(left, bell.look_every_s)

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
                raise self._line_error(str(operation), line.channel.last_words())
        try:
            line.channel.on_ready()
        except ChannelClosedError as error:
            line.is_gone = True
            if error.reason is not None or self._needs(line):
                raise self._line_error(self._awaited(line), error) from error
            if line.must_stay and not isinstance(error, PeerLeftError):
                self._lost = LineError(self._awaited(line), error)
            return
        if line.sent < len(line.sends):
            self._to_push.append(line)
        if line.received < len(line.receives) or line.awaits_opening:
            self._to_pull.append(line)

    def _line_error(self, what: str, error: ChannelClosedError) -> LineError:
        """For a peer that went in the middle of `what`."""
        if error.reason is not None:
            # What this rank waits for may say more than what the one waits for that gave up first.
            what = self._waits_for(what)
        return LineError(what, error)

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

    def _waits_for(self, otherwise: str = "hand over what is left") -> str:
        """All that could happen next if the others did something; where there is nothing, `otherwise`."""
        found = [
            f"begin together with rank {line.channel.peer}"
            for line in self._lines.values()
            if line.awaits_opening
        ]
        for line in self._lines.values():
            for order, done in ((line.receives, line.received), (line.sends, line.sent)):
                if done < len(order) and not self._left[order[done]] and not line.awaits_opening:
                    found.append(str(self._actions[order[done]].operation))
        return "; ".join(found) or otherwise

    def find_reason(self, peer: int | None, seconds: float) -> ChannelClosedError | None:
        """After a peer went without a word: what another one says within that time about why.

        Where none of them says anything, the first one that went. The run has failed; what still comes is
        lost.
        """
        silent: ChannelClosedError | None = None
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
                silent = silent or told
        return silent


def _raw_views(flow: Flow, memory: Mapping[Buffer, Tensor], item_bytes: int) -> list[memoryview]:
    """Of each slice of a flow, its bytes."""
    whole = {
        buffer: memoryview(cast(Any, tensor.view(torch.uint8).numpy())) for buffer, tensor in memory.items()
    }
    return [
        whole[part.buffer][part.start * item_bytes : (part.start + part.length) * item_bytes]
        for part in flow.slices
    ]

"""One collective on one rank: a graph, the rank's memory, and the channels that join it to the others.

Nothing here blocks but the one sleep. What can be sent is sent as soon as it is complete; what has come is
used at once, while it is in the cache.
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
from arborcast.backends.dataflow.peer_progress import PeerGoneError, PeerProgress
from arborcast.backends.dataflow.poller import GONE, LEAVING, READ, WRITE, Poller, Wakeup
from arborcast.backends.dataflow.staged_copies import StagedCopies
from arborcast.backends.dataflow.task_graph import Act, Action, TaskGraph
from arborcast.backends.errors import ChannelClosedError, ExecutionError, PeerLeftError
from arborcast.backends.lowering.layout import Buffer
from arborcast.backends.tensors.torch_reduction import Operator
from arborcast.backends.transport.fingerprint import CollectiveFingerprint

BATCH_BYTES = 256 << 10
BATCH_MESSAGES = 64
_NO_BYTES = memoryview(b"")


class GraphRun:
    """A run of a graph; `run` once."""

    def __init__(
        self,
        graph: TaskGraph,
        memory: Mapping[Buffer, Tensor],
        operator: Operator | None,
        opening: CollectiveFingerprint,
        peers: Mapping[int, PeerProgress],
        poller: Poller,
        *,
        rank: int,
        timeout_s: float,
        copies: StagedCopies | None = None,
    ) -> None:
        """Nothing is sent yet; arguments as for `Engine.run`.

        Args:
            graph: what to do.
            memory: in host memory, with scratch.
            operator: None where nothing is combined.
            opening: what every peer that awaits one must bring.
            peers: for all channels there are, so that a peer that gives up is noticed.
            poller: to sleep with.
            rank: this one.
            timeout_s: how long nothing may happen.
            copies: to and from the device where the graph has some; they ring the wakeup.
        """
        self._actions = graph.actions
        self._left = list(graph.waits)
        self._item_bytes = next((tensor.itemsize for tensor in memory.values()), 1)
        self._raw = _raw_views(graph, memory, self._item_bytes)
        self._arithmetic = arithmetic(graph, memory, operator) if graph.computes else None
        self._opening = opening
        self._opening_bytes = opening.to_bytes()
        self._peers = peers
        self._poller = poller
        self._rank = rank
        self._timeout_s = timeout_s
        self._copies = copies
        self._lost: PeerGoneError | None = None  # that a peer died which must stay
        self._deadline: float | None = None  # set when sleep begins, forgotten when something happens
        # Actions, and openings to be seen, that keep the run from ending.
        self._missing = len(graph.actions) + sum(peer.awaits_opening for peer in peers.values())
        self._local: deque[int] = deque(graph.at_once)
        self._to_push: deque[PeerProgress] = deque(peer for peer in peers.values() if peer.sends)
        self._to_pull: deque[PeerProgress] = deque(
            peer for peer in peers.values() if peer.receives or peer.awaits_opening
        )

    def run(self, *, until: Callable[[], bool] | None = None, wakeup: Wakeup | None = None) -> None:
        """Return when everything is complete here and handed over to the channels.

        Args:
            until: what else must hold; asked whenever something moves, and as often as the wakeup says.
            wakeup: rung when `until` may have changed.

        Raises:
            PeerGoneError: a peer that is still needed is gone, or gave up.
            DisagreementError: a peer means another collective.
            ExecutionError: nothing happened for too long.
        """
        peers = self._peers.values()
        while True:
            with np.errstate(all="ignore"):  # numbers overflow as they do in torch
                self._work()
            is_over = not self._missing and not any(
                peer.channel.wants_write and not peer.is_gone for peer in peers
            )
            if is_over and (until is None or until()):
                return
            if self._lost is not None:  # what it said before it died has been looked for
                raise self._lost
            self._sleep(is_over, wakeup)

    def _work(self) -> None:
        """Do what can be done now; sends first, so that others need not wait for our reading.

        Where sends wait for room, return after a message from each peer to see whether there is some.
        """
        local, to_push, to_pull = self._local, self._to_push, self._to_pull
        pulls = len(self._peers)
        while True:
            if self._copies is not None:
                self._take_copies(self._copies)
            if local:
                self._compute(local.popleft())
            elif to_push:
                self._push(to_push.popleft())
            elif to_pull:
                if not pulls and any(peer.outgoing is not None for peer in self._peers.values()):
                    return
                pulls = (pulls or len(self._peers)) - 1
                self._pull(to_pull.popleft())
            else:
                return

    def _compute(self, number: int) -> None:
        """Carry out a local action."""
        action = self._actions[number]
        if action.act is Act.TRANSFER:
            assert self._copies is not None, "a graph with transfers comes with who makes them"
            self._copies.begin(number, action)
            return
        assert self._arithmetic is not None, "a graph that computes"
        if action.act is Act.COPY:
            self._arithmetic.copy(action.into_number, action.source_number)
        else:
            self._arithmetic.reduce(action.into_number, action.source_number)
        self._complete(number)

    def _take_copies(self, copies: StagedCopies) -> None:
        """Go on with what copies have brought."""
        for number in copies.take_ended():
            self._complete(number)
            self._deadline = None

    def _push(self, peer: PeerProgress) -> None:
        """Send what may be sent, until the channel has no room; what is ready together goes together."""
        channel, sends = peer.channel, peer.sends
        while batch := self._ready(peer):
            try:
                count = channel.send_all(batch)
            except ChannelClosedError as error:
                raise self._peer_gone(str(self._actions[sends[peer.sent]].operation), error) from error
            is_stuck = not count
            for data in batch:
                if count < len(data):
                    peer.outgoing = data[count:]
                    if is_stuck:
                        return
                    break
                count -= len(data)
                is_stuck = False
                peer.outgoing = None
                peer.sent += 1
                self._complete(sends[peer.sent - 1])

    def _ready(self, peer: PeerProgress) -> list[memoryview]:
        """The next messages to the peer that may be sent: some, and not many bytes."""
        sends, left, actions, raw = peer.sends, self._left, self._actions, self._raw
        batch: list[memoryview] = []
        size = 0
        for at in range(peer.sent, min(peer.sent + BATCH_MESSAGES, len(sends))):
            number = sends[at]
            if left[number] or size >= BATCH_BYTES:
                break
            data = raw[actions[number].into_number]
            batch.append(data)
            size += len(data)
        if peer.outgoing is not None:
            batch[0] = peer.outgoing
        return batch

    def _pull(self, peer: PeerProgress) -> None:
        """Use what has come: short messages as long as there are some, else up to the end of one."""
        size = 0
        try:
            if peer.awaits_opening and not self._see_opening(peer):
                return
            while self._may_receive(peer):
                if size >= BATCH_BYTES:
                    self._to_pull.append(peer)
                    return
                number = peer.receives[peer.received]
                action = self._actions[number]
                size += len(self._raw[action.into_number])
                if not (self._combine if action.act is Act.COMBINE else self._fill)(peer, action):
                    return
                peer.received += 1
                self._complete(number)
        except ChannelClosedError as error:
            raise self._peer_gone(self._awaited(peer), error) from error

    def _see_opening(self, peer: PeerProgress) -> bool:
        """Whether the peer's opening is there; it must be ours."""
        data = peer.channel.opening()
        if data is None:
            return False
        if data != self._opening_bytes:
            self._opening.check(self._rank, CollectiveFingerprint.from_bytes(data), peer.channel.peer)
        peer.awaits_opening = False
        self._missing -= 1
        return True

    def _fill(self, peer: PeerProgress, action: Action) -> bool:
        """Receive into place; whether all of the message is there."""
        rest = peer.incoming
        if rest is None:
            rest = self._raw[action.into_number]
        channel = peer.channel
        while size := len(rest):
            count = channel.receive(rest, look=False)
            if count == size:
                break
            if not count:
                peer.incoming = rest
                return False
            rest = rest[count:]
        peer.incoming = None
        return True

    def _combine(self, peer: PeerProgress, action: Action) -> bool:
        """Combine the parts that are there where they lie; whether that was the last."""
        assert self._arithmetic is not None, "a graph that computes"
        take, combine = peer.channel.take, self._arithmetic.combine
        into, source, item_bytes = action.into_number, action.source_number, self._item_bytes
        most = peer.channel.part_bytes // item_bytes * item_bytes
        done, total = peer.combined, len(self._raw[into])
        while done < total:
            length = min(most, total - done)
            part = take(length, look=False)
            if part is None:
                peer.combined = done
                return False
            combine(into, source, done // item_bytes, part)
            done += length
        peer.combined = 0
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
            peer = self._peers[action.peer]
            if action.act is not Act.SEND:
                if peer.receives[peer.received] == waiter:
                    self._to_pull.append(peer)
            elif peer.sends[peer.sent] == waiter:
                self._to_push.append(peer)

    def _sleep(self, is_over: bool, wakeup: Wakeup | None) -> None:
        """Wait until a channel moves or somebody rings."""
        by_descriptor = {}
        for peer in self._peers.values():
            channel = peer.channel
            # Sending may have read what is to be received, and receiving may have found room to send.
            if self._may_send(peer) and not (channel.wants_read or channel.wants_write):
                self._to_push.append(peer)
            if channel.has_unread and (peer.awaits_opening or self._may_receive(peer)):
                self._to_pull.append(peer)
            descriptor = channel.fileno()
            by_descriptor[descriptor] = peer
            self._poller.want(descriptor, self._wanted(peer))
        events = self._poller.sleep(0 if self._to_push or self._to_pull else self._patience(is_over, wakeup))
        if wakeup is not None and not events:
            self._ask(wakeup)
        for descriptor, happened in events:
            if wakeup is not None and descriptor == wakeup.descriptor:
                wakeup.silence()
                self._ask(wakeup)
            else:
                self._wake(by_descriptor[descriptor], happened)
                if (
                    not happened & GONE
                ):  # what a peer's end lets nobody do is waited for no longer than before
                    self._deadline = None

    def _ask(self, wakeup: Wakeup) -> None:
        """Whether to go on."""
        try:
            wakeup.check()
        except ChannelClosedError as error:
            raise self._peer_gone(f"waiting for rank {error.peer}", error) from error

    def _patience(self, is_over: bool, wakeup: Wakeup | None) -> float:
        """How long to sleep at most.

        Raises:
            ExecutionError: nothing has happened for too long.
        """
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._timeout_s
        left = self._timeout_s if is_over else self._deadline - now  # `until` has a deadline of its own
        if left <= 0:
            raise ExecutionError(
                f"{self._waits_for()}: nothing happened for {self._timeout_s:g} s, the timeout of the call"
            )
        return left if wakeup is None else min(left, wakeup.look_every_s)

    def _wanted(self, peer: PeerProgress) -> int:
        """What to look for; nothing that would wake us without there being anything to do."""
        channel = peer.channel
        events = READ if peer.awaits_opening or self._may_receive(peer) else 0
        if not peer.is_gone:
            events |= LEAVING
            if channel.wants_read:
                events |= READ
            if channel.wants_write:
                events |= WRITE
        return events

    def _wake(self, peer: PeerProgress, happened: int) -> None:
        if happened & GONE:
            peer.is_gone = True
            if peer.sent < len(peer.sends):  # whoever leaves in peace has got everything before
                operation = self._actions[peer.sends[peer.sent]].operation
                raise self._peer_gone(str(operation), peer.channel.last_words())
        try:
            peer.channel.on_ready()
        except ChannelClosedError as error:
            peer.is_gone = True
            if error.reason is not None or self._needs(peer):
                raise self._peer_gone(self._awaited(peer), error) from error
            if peer.is_required and not isinstance(error, PeerLeftError):
                self._lost = PeerGoneError(self._awaited(peer), error)
            return
        if peer.sent < len(peer.sends):
            self._to_push.append(peer)
        if peer.received < len(peer.receives) or peer.awaits_opening:
            self._to_pull.append(peer)

    def _peer_gone(self, what: str, error: ChannelClosedError) -> PeerGoneError:
        """For a peer that went in the middle of `what`."""
        if error.reason is not None:
            # What this rank waits for may say more than what the one waits for that gave up first.
            what = self._waits_for(what)
        return PeerGoneError(what, error)

    def _may_send(self, peer: PeerProgress) -> bool:
        return peer.sent < len(peer.sends) and not self._left[peer.sends[peer.sent]]

    def _may_receive(self, peer: PeerProgress) -> bool:
        return peer.received < len(peer.receives) and not self._left[peer.receives[peer.received]]

    def _needs(self, peer: PeerProgress) -> bool:
        return peer.awaits_opening or peer.sent < len(peer.sends) or peer.received < len(peer.receives)

    def _awaited(self, peer: PeerProgress) -> str:
        """What is next from or to a peer, for messages."""
        if peer.awaits_opening:
            return f"begin together with rank {peer.channel.peer}"
        if peer.received < len(peer.receives):
            return str(self._actions[peer.receives[peer.received]].operation)
        if peer.sent < len(peer.sends):
            return str(self._actions[peer.sends[peer.sent]].operation)
        return f"waiting for rank {peer.channel.peer}"

    def _waits_for(self, otherwise: str = "hand over what is left") -> str:
        """All that could happen next if the others did something; where there is nothing, `otherwise`."""
        found = [
            f"begin together with rank {peer.channel.peer}"
            for peer in self._peers.values()
            if peer.awaits_opening
        ]
        for peer in self._peers.values():
            for order, done in ((peer.receives, peer.received), (peer.sends, peer.sent)):
                if done < len(order) and not self._left[order[done]] and not peer.awaits_opening:
                    found.append(str(self._actions[order[done]].operation))
        if self._copies is not None:
            found += self._copies.waits_for()
        return "; ".join(found) or otherwise

    def find_reason(self, gone: int | None, seconds: float) -> ChannelClosedError | None:
        """After a peer went without a word: what another one says within that time about why.

        Where none of them says anything, the first one that went. The run has failed; what still comes is
        lost.
        """
        silent: ChannelClosedError | None = None
        others = {peer.channel.fileno(): peer for peer in self._peers.values() if peer.channel.peer != gone}
        end = time.monotonic() + seconds
        self._poller.clear()
        for descriptor in others:
            self._poller.want(descriptor, LEAVING)
        while others and (left := end - time.monotonic()) > 0:
            for descriptor, _ in self._poller.sleep(left):
                self._poller.want(descriptor, 0)
                closed = others.pop(descriptor).channel.last_words()
                if closed.reason is not None:
                    return closed
                silent = silent or closed
        return silent


def _raw_views(graph: TaskGraph, memory: Mapping[Buffer, Tensor], item_bytes: int) -> list[memoryview]:
    """Of each slice of a graph, its bytes; none where its buffer is not given."""
    whole = {
        buffer: memoryview(cast(Any, tensor.view(torch.uint8).numpy())) for buffer, tensor in memory.items()
    }
    return [
        whole.get(part.buffer, _NO_BYTES)[part.start * item_bytes : (part.start + part.length) * item_bytes]
        for part in graph.slices
    ]

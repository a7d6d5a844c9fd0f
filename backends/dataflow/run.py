"""One collective on one rank: a graph, the rank's memory, and the channels that join it to the others.

The library's loop (`native/loop.c`) moves the bytes, combines them, and sleeps. Here is what it is told, and
what is made of its events: who went, who means another call, that nothing happens.
"""

from __future__ import annotations

import ctypes
import select
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from arborcast.backends.dataflow.task_graph import TaskGraph
from arborcast.backends.errors import ChannelClosedError, ExecutionError, PeerLeftError
from arborcast.backends.lowering.layout import Buffer
from arborcast.backends.native.library import (
    POLL_BYTES,
    ActionState,
    GraphState,
    PeerState,
    RunEvent,
    RunState,
    at_once,
    combiner,
    in_peace,
)
from arborcast.backends.tensors.torch_reduction import ReductionOperator
from arborcast.backends.transport.fingerprint import (
    OPENING_BYTES,
    CollectiveFingerprint,
    ExchangeFingerprint,
)
from arborcast.backends.transport.socket_channel import SocketChannel

LOOK_S = 0.5
"""Signals, and the time, are seen within so long."""

_BUFFERS = {buffer: at for at, buffer in enumerate(Buffer)}


class PeerGoneError(ExecutionError):
    """A peer went in the middle of something; `closed` is the error of its channel.

    The message says what was awaited from which peer, but neither the rank nor the collective.
    """

    def __init__(self, what: str, closed: ChannelClosedError) -> None:
        super().__init__(f"{what}: {closed}")
        self.closed = closed


@dataclass(frozen=True, slots=True)
class Parties:
    """Who takes part besides those that the graph names.

    Attributes:
        told: who is sent the opening.
        telling: whose opening is awaited.
        apart: whether each two ranks compare openings of their own.
        required: peers whose death makes the run vain, though nothing of them is awaited here.
    """

    told: frozenset[int] = frozenset()
    telling: frozenset[int] = frozenset()
    apart: bool = False
    required: frozenset[int] = frozenset()


class GraphRun:
    """What runs a graph over these channels, any number of times, one after another.

    Args:
        graph: what to do.
        channels: all there are, by peer or lane, so that a peer that gives up is noticed.
        bell: a descriptor that wakes a run (an eventfd).
        rank: this one.
        parties: see there.
    """

    def __init__(
        self,
        graph: TaskGraph,
        channels: Mapping[int, SocketChannel],
        bell: int,
        rank: int,
        parties: Parties,
    ) -> None:
        self._rank = rank
        self._required = parties.required
        named = sorted({*graph.sends, *graph.receives})
        numbers = [*named, *sorted(channels.keys() - set(named))]
        self._channels = [channels[number] for number in numbers]
        self._place = {number: at for at, number in enumerate(numbers)}
        # Whatever the library is given the address of is kept here.
        self._actions, self._waiters = _actions_of(graph, self._place)
        fields = np.frombuffer(memoryview(self._actions).cast("B"), np.dtype(ActionState))
        self._fields = fields[: len(graph.actions)]
        self._take(graph)
        self._waits = np.array(graph.waits, np.int32)
        self._orders = np.array(
            [at for orders in (graph.sends, graph.receives) for order in orders.values() for at in order],
            np.int32,
        )
        self._state_of_graph = GraphState(
            len(graph.actions),
            len(named),
            *(_start(array) for array in (self._actions, self._waits, self._waiters, self._orders)),
        )
        self._peers = (PeerState * max(1, len(self._channels)))()
        self._set_peers(parties)
        self._left, self._local = np.zeros((2, max(1, len(graph.actions))), np.int32)
        self._polls = np.zeros((len(self._channels) + 1) * POLL_BYTES, np.uint8)
        self._openings = ctypes.create_string_buffer(
            OPENING_BYTES * (2 * len(self._channels) if parties.apart else 1)
        )
        self._state = RunState(
            graph=ctypes.addressof(self._state_of_graph),
            peers=ctypes.addressof(self._peers),
            peer_count=len(self._channels),
            left=_start(self._left),
            local=_start(self._local),
            openings=ctypes.addressof(self._openings),
            polls=_start(self._polls),
            bell=bell,
        )
        self._address = ctypes.addressof(self._state)
        self._lost: PeerGoneError | None = None

    def _set_peers(self, parties: Parties) -> None:
        at = 0
        for orders, first, count in (
            (self._graph.sends, "first_send", "sends"),
            (self._graph.receives, "first_receive", "receives"),
        ):
            for peer, order in orders.items():
                setattr(self._peers[self._place[peer]], first, at)
                setattr(self._peers[self._place[peer]], count, len(order))
                at += len(order)
        opening = 1
        for (number, at), channel in zip(self._place.items(), self._channels, strict=True):
            state = self._peers[at]
            state.channel = channel.address
            state.told = opening if number in parties.told else 0
            state.awaited = opening + parties.apart if number in parties.telling else 0
            opening += 2 * parties.apart

    def run(
        self,
        memory: Mapping[Buffer, Tensor],
        operator: ReductionOperator | None,
        opening: CollectiveFingerprint | ExchangeFingerprint,
        *,
        timeout_s: float,
        graph: TaskGraph | None = None,
        until: Callable[[], bool] | None = None,
        look_every_s: float = LOOK_S,
        check: Callable[[], None] = lambda: None,
        when_begun: Callable[[], None] = lambda: None,
    ) -> None:
        """Return when everything is complete here and handed over to the channels.

        Args:
            memory: in host memory, with scratch; flat, contiguous and of one type.
            operator: None where nothing is combined.
            opening: what every peer that awaits one gets, and every peer that tells its own must bring; of an
                exchange where each two have their own.
            timeout_s: how long nothing may happen while something is to be done here.
            graph: of the same actions, where buffers have another length; as before where None.
            until: what else must hold, however long it takes; asked whenever something moves, and as often as
                `look_every_s` says.
            look_every_s: how long to sleep at most.
            check: called whenever somebody rings, and as often, whatever moves; raises where the run is to
                end, ChannelClosedError for a peer.
            when_begun: called before this thread leaves the interpreter, to work and to sleep.

        Raises:
            PeerGoneError: a peer that is still needed is gone, or gave up.
            DisagreementError: a peer means another collective.
            ExecutionError: nothing happened for too long.
        """
        state = self._state
        if graph is not None and graph is not self._graph:
            assert graph.actions is self._graph.actions
            self._take(graph)
        self._begin(memory, operator, opening)
        when_begun()
        since, is_over = time.monotonic(), False
        while True:
            now = time.monotonic()
            if state.moved:
                state.moved, since = 0, now
            left = timeout_s if is_over else timeout_s - (now - since)
            if left <= 0:
                raise ExecutionError(
                    f"{self.waits_for()}: nothing happened for {timeout_s:g} s, the timeout of the call"
                )
            patience = min(left, LOOK_S, look_every_s) if self._lost is None else 0.0
            event = self._advance(patience, is_over)
            if is_over:  # `until` has a deadline of its own
                since = time.monotonic()
            is_over = event == RunEvent.OVER
            if is_over and (until is None or until()):
                return
            if self._lost is not None and event in (RunEvent.OVER, RunEvent.TIMED):
                raise self._lost  # what it said before it died has been looked for
            if event in (RunEvent.RUNG, RunEvent.TIMED, RunEvent.WOKE):
                try:
                    check()
                except ChannelClosedError as error:
                    raise self._peer_gone(f"waiting for rank {error.peer}", error) from error
            self._answer(event)

    def _take(self, graph: TaskGraph) -> None:
        """Have the actions work on the slices of this graph."""
        self._graph = graph
        if graph.spans is not None:
            for field, spans in zip(("into", "source", "length"), graph.spans, strict=True):
                self._fields[field] = spans

    def _advance(self, patience_s: float, lingers: bool) -> int:
        """Work and sleep until there is an event, without the interpreter's lock."""
        # Rounded up: a sleep that ends too early would be repeated without rest.
        patience_ms = int(patience_s * 1000) + 1 if patience_s else 0
        event: int = in_peace.run_advance(self._address, patience_ms, lingers)
        return event

    def _begin(
        self,
        memory: Mapping[Buffer, Tensor],
        operator: ReductionOperator | None,
        opening: CollectiveFingerprint | ExchangeFingerprint,
    ) -> None:
        state = self._state
        for buffer, tensor in memory.items():
            state.memory[_BUFFERS[buffer]] = tensor.data_ptr()
            state.item_bytes = tensor.itemsize
        if self._graph.reduces:
            assert operator is not None, "a graph with reductions comes with an operator"
            state.combine = combiner(operator.name, next(iter(memory.values())).dtype)
        if isinstance(opening, ExchangeFingerprint):
            self._openings.raw = opening.to_bytes([channel.peer for channel in self._channels])
        else:
            self._openings.raw = opening.to_bytes()
        self._lost = None
        self._answer(at_once.run_begin(self._address))

    def _answer(self, event: int) -> None:
        """Do what the library has left to Python."""
        state = self._state
        match event:
            case RunEvent.ENDED:
                self._note_end(state.asked_peer)
            case RunEvent.FAILED:
                self._fail(state.asked_peer, state.trouble)
            case RunEvent.DIFFERS:
                channel, awaited = self._channels[state.asked_peer], self._peers[state.asked_peer].awaited
                ours = self._openings.raw[OPENING_BYTES * (awaited - 1) :][:OPENING_BYTES]
                other = CollectiveFingerprint.from_bytes(bytes(channel.state.opening))
                CollectiveFingerprint.from_bytes(ours).check(self._rank, other, channel.peer)

    def _note_end(self, at: int) -> None:
        """A peer will send no more than is on its way; what it said last is looked for."""
        peer, channel = self._peers[at], self._channels[at]
        if peer.sent < peer.sends:  # whoever leaves in peace has got everything before
            raise self._peer_gone(self._next(peer.first_send + peer.sent), channel.last_words())
        try:
            channel.on_ready()
        except ChannelClosedError as error:
            self._take_leave(at, error)

    def _fail(self, at: int, trouble: int) -> None:
        peer, channel = self._peers[at], self._channels[at]
        is_gone, peer.is_gone = peer.is_gone, True
        try:
            channel.fail(trouble)
        except ChannelClosedError as error:
            if not is_gone or self._needs(at):
                self._take_leave(at, error)

    def _take_leave(self, at: int, error: ChannelClosedError) -> None:
        """A peer is gone: that is an error for who needs it, and where it gave up."""
        channel = self._channels[at]
        if error.reason is not None or self._needs(at):
            raise self._peer_gone(self._awaited(at), error) from error
        if channel.peer in self._required and not isinstance(error, PeerLeftError):
            self._lost = PeerGoneError(self._awaited(at), error)

    def _peer_gone(self, what: str, error: ChannelClosedError) -> PeerGoneError:
        """For a peer that went in the middle of `what`."""
        if error.reason is not None:
            # What this rank waits for may say more than what the one waits for that gave up first.
            what = self.waits_for(what)
        return PeerGoneError(what, error)

    def _next(self, order: int) -> str:
        """A message as errors show it, by its place in the orders of all peers."""
        return str(self._graph.action(self._orders[order]).operation)

    def _needs(self, at: int) -> bool:
        peer = self._peers[at]
        return bool(peer.awaits_opening or peer.sent < peer.sends or peer.received < peer.receives)

    def _awaited(self, at: int) -> str:
        """What is next from or to a peer, for messages."""
        peer = self._peers[at]
        if peer.awaits_opening:
            return f"begin together with rank {self._channels[at].peer}"
        if peer.received < peer.receives:
            return self._next(peer.first_receive + peer.received)
        if peer.sent < peer.sends:
            return self._next(peer.first_send + peer.sent)
        return f"waiting for rank {self._channels[at].peer}"

    def waits_for(self, otherwise: str = "hand over what is left") -> str:
        """All that could happen next if the others did something; where there is nothing, `otherwise`.

        Another thread may ask while this runs: every count is read once.
        """
        found = [
            f"begin together with rank {self._channels[at].peer}"
            for at in range(len(self._channels))
            if self._peers[at].awaits_opening
        ]
        for at in range(len(self._channels)):
            peer = self._peers[at]
            if peer.awaits_opening:
                continue
            for first, done, count in (
                (peer.first_receive, peer.received, peer.receives),
                (peer.first_send, peer.sent, peer.sends),
            ):
                if done < count and not self._left[self._orders[first + done]]:
                    found.append(self._next(first + done))
        return "; ".join(found) or otherwise


def find_reason(
    channels: Collection[SocketChannel], gone: int | None, seconds: float
) -> ChannelClosedError | None:
    """After a peer went without a word: what another one says within that time about why.

    Where none of them says anything, the first one that went. The run has failed; what still comes is lost.
    """
    silent: ChannelClosedError | None = None
    others = {channel.fileno(): channel for channel in channels if channel.peer != gone}
    end = time.monotonic() + seconds
    poll = select.poll()
    for descriptor in others:
        poll.register(descriptor, select.POLLRDHUP)
    while others and (left := end - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(int(1000 * left) + 1):
            poll.unregister(descriptor)
            closed = others.pop(descriptor).last_words()
            if closed.reason is not None:
                return closed
            silent = silent or closed
    return silent


def _actions_of(
    graph: TaskGraph, place: Mapping[int, int]
) -> tuple[ctypes.Array[ctypes.Structure], NDArray[np.int32]]:
    """The library's view of the actions, and all their waiters one after another."""
    waiters: list[int] = []
    found = (ActionState * max(1, len(graph.actions)))()
    for at, action in enumerate(graph.actions):
        found[at] = ActionState(
            action.act,
            place[action.peer] if action.peer >= 0 else -1,
            _BUFFERS[action.into.buffer],
            _BUFFERS[action.source.buffer],
            action.into.start,
            action.source.start,
            action.into.length,
            len(waiters),
            len(action.waiters),
            action.share,
        )
        waiters += action.waiters
    return found, np.array(waiters, np.int32)


def _start(array: NDArray[Any] | ctypes.Array[Any]) -> int:
    return ctypes.addressof(array) if isinstance(array, ctypes.Array) else int(array.ctypes.data)

"""Runs collectives of one group on this rank, one after the other, over the channels of its network.

Each call begins with its opening, which goes to all peers that get data and to the next rank of the group,
and is compared with those of all peers that send data and of the rank before: so that a call which is not the
same everywhere is noticed somewhere, before its bytes are used. (Where not every two ranks can be connected,
neighbours in a tree of links tell each other instead.) Where there is a root the circle is left out: of each
other rank and the one that it gets data of, or sends data to, on the way from or to the root, one sees the
other's opening, and who only sends waits for nobody. In an exchange every two compare what goes between them.
The first failure ends the engine. Its reason goes to all peers, which pass it on; everybody fails at once and
knows the first cause.

Calls that something else serves, as gloo does small ones, are accompanied instead: `agree`, then begin it,
and `wait_external` until it is done, which raises at once where a peer gives up.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from arborcast.backends.dataflow.run import GraphRun, Parties, PeerGoneError, find_reason
from arborcast.backends.dataflow.task_graph import TaskGraph, compile_graph
from arborcast.backends.errors import (
    ChannelClosedError,
    DisagreementError,
    ExecutionError,
)
from arborcast.backends.lowering.layout import Buffer
from arborcast.backends.lowering.program import Program
from arborcast.backends.tensors.torch_reduction import ReductionOperator
from arborcast.backends.transport.fingerprint import CollectiveFingerprint, ExchangeFingerprint
from arborcast.backends.transport.silence import LOST_AFTER_S, SilenceWatch
from arborcast.backends.transport.socket_channel import SocketChannel

GIVE_UP_S = 2.0
"""How long who ends the engine waits for a call in another thread, which ends at its next look."""

RUNS_KEPT = 64
"""Of graphs that ran."""

_GAVE_UP = "gave up: "
_NOTHING = compile_graph(Program(0, (), 0, 0, 0, False, 1))  # of a rank that only compares openings


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
"""Those of this process."""


def _close_in_child() -> None:
    """After a fork: the child has no use for the descriptors of its parent's engines."""
    for engine in list(_engines):
        engine.release()


os.register_at_fork(after_in_child=_close_in_child)


class Connections(Protocol):
    """What the engine needs of a network; see `backends.transport.network`.

    Attributes:
        size: ranks of the group.
        channels: by peer, or number of a further lane to it (`transport.lanes`); those to all with whom calls
            are compared are there whenever something runs.
    """

    size: int

    @property
    def channels(self) -> Mapping[int, SocketChannel]:
        """By peer."""

    def abort(self, reason: str) -> None:
        """Tell all peers, and close."""


class Engine:
    """Everything that a rank of one group runs; used by one thread at a time, but for `ring` and `give_up`.

    Args:
        rank: of this process in the group.
        network: its channels; the engine aborts it at the first failure.
        timeout_s: after how long without any progress a run fails.
        search_s: how long a rank whose peer went without a word asks the others for the cause.
        lost_after_s: how long the kernel of a peer's host may answer nothing; 0 for ever.
        beside: with whom each call is compared, both ways; the next rank and the one before where None.

    Attributes:
        timeout_s: as given; what is set between two calls holds from the next one on.
        while_waiting: called again and again in a run that sleeps; it must be quick, and raise nothing.
        when_begun: called in each run before its thread leaves the interpreter; likewise.
    """

    def __init__(
        self,
        rank: int,
        network: Connections,
        *,
        timeout_s: float,
        search_s: float = 0.2,
        lost_after_s: float = LOST_AFTER_S,
        beside: Collection[int] | None = None,
    ) -> None:
        self.rank = rank
        self._network = network
        self.timeout_s = timeout_s
        self._search_s = search_s
        self._watch = SilenceWatch(lost_after_s)
        self.while_waiting: Callable[[], None] = lambda: None
        self.when_begun: Callable[[], None] = lambda: None
        self._runs: dict[tuple[int, bool, int], GraphRun] = {}
        self.compare_with(beside)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wakeup_lock = threading.Lock()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._running: GraphRun | None = None
        self._begun: CollectiveFingerprint | None = None
        self._unseen: set[int] = set()  # who is still to agree to what has begun
        self._failure: str | None = None
        self._at_work = threading.RLock()  # held by a call
        self._has_told = False  # all peers why
        _engines.add(self)

    def compare_with(self, beside: Collection[int] | None) -> None:
        """Compare openings with these ranks from the next call on; see the class."""
        size = self._network.size
        circle = frozenset({(self.rank + 1) % size}), frozenset({(self.rank - 1) % size})
        after, before = circle if beside is None else (frozenset(beside), frozenset(beside))
        self._after, self._before = after - {self.rank}, before - {self.rank}
        self._runs.clear()

    @property
    def failure(self) -> str | None:
        """Why the engine refuses every further call; None while it does not."""
        return self._failure

    def run(
        self,
        graph: TaskGraph,
        memory: Mapping[Buffer, Tensor],
        opening: CollectiveFingerprint | ExchangeFingerprint,
        operator: ReductionOperator | None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Do this rank's part of one collective; return when its own buffers are final.

        Args:
            graph: compiled for this rank and this number of elements.
            memory: the input and the output where the graph has them: flat, contiguous, of one type, without
                gradient, in host memory.
            opening: the same on all ranks that make the same call; of an exchange, which joins every two.
            operator: how contributions are combined; None where the graph has no reductions.
            dtype: of the elements; needed only where this rank has neither input nor output.

        Raises:
            DisagreementError: a peer means another call; both are in the message.
            ExecutionError: a peer died or gave up, or nothing happened for `timeout_s`. The engine is of
                no more use.
        """
        with self._at_work:
            self._refuse_after_failure()
            try:
                if dtype is None:
                    dtype = next((tensor.dtype for tensor in memory.values()), torch.uint8)
                self._running = self._run_of(graph, opening)
                self._running.run(
                    {**self._scratch_of(graph, dtype), **memory},
                    operator,
                    opening,
                    timeout_s=self.timeout_s,
                    graph=graph,
                    look_every_s=self._watch.look_every_s,
                    check=self._look,
                    when_begun=self.when_begun,
                )
            except BaseException as error:
                self._fail(error, opening)
            finally:
                self._running = None

    def waits_for(self) -> str:
        """What the run under way waits for, as messages show it, empty where none is; from any thread."""
        running = self._running
        return "" if running is None else running.waits_for("")

    def agree(self, opening: CollectiveFingerprint) -> None:
        """Compare openings with the next rank and the one before, or those beside; nothing else is sent.

        Raises:
            DisagreementError: the rank before means another call.
            ExecutionError: a peer died or gave up, or the rank before did not come for `timeout_s`.
        """
        self.begin(opening)
        self.wait_external()

    def begin(self, opening: CollectiveFingerprint, *, has_agreed: bool = False) -> None:
        """The first half of `agree`, without waiting; `wait_external` must follow before the next call.

        Args:
            opening: as for `run`.
            has_agreed: whether all ranks are known to make this call, so that nothing is compared.
        """
        with self._at_work:
            self._refuse_after_failure()
            self._begun = opening
            self._unseen = set() if has_agreed else set(self._before)
            try:
                self._open(opening, frozenset() if has_agreed else self._after)
            except BaseException as error:
                self._fail(error, opening)

    def wait_external(
        self,
        is_done: Callable[[], bool] = lambda: True,
        *,
        look_every_s: float = 0.1,
        needed: Iterable[int] = (),
    ) -> None:
        """The second half: return when the rank before agrees and `is_done`, fail if a peer gives up before.

        It may be called again for the same call, with another `is_done`.

        Args:
            is_done: whether what serves the call, by its own deadline, has ended; call `ring` when it has.
            look_every_s: how often to ask without having been rung for.
            needed: ranks without which it never ends; their death is then a failure.

        Raises:
            ExecutionError: as for `agree`; another peer that goes after it has agreed is no failure.
        """
        with self._at_work:
            self._refuse_after_failure()
            opening = self._begun
            assert opening is not None, "wait_external follows begin"
            try:
                self._see(opening)
                if not (self._unseen or self._is_full()) and is_done():
                    return
                parties = Parties(telling=frozenset(self._unseen), required=frozenset(needed))
                GraphRun(_NOTHING, self._network.channels, self._wakeup, self.rank, parties).run(
                    {},
                    None,
                    opening,
                    timeout_s=self.timeout_s,
                    until=is_done,
                    look_every_s=min(look_every_s, self._watch.look_every_s),
                    check=self._look,
                    when_begun=self.when_begun,
                )
                self._unseen.clear()
            except BaseException as error:
                self._fail(error, opening)

    def _look(self) -> None:
        """Raise where a run is to end for what no descriptor tells of."""
        self._refuse_after_failure()
        self._watch.look(self._network.channels)
        self.while_waiting()

    def ring(self) -> None:
        """Make `wait_external` ask again whether all is done; from any thread."""
        with self._wakeup_lock:
            if self._wakeup >= 0:
                os.eventfd_write(self._wakeup, 1)

    def give_up(self, reason: str) -> None:
        """End the engine because of a failure elsewhere, and tell all peers; from any thread, once is enough.

        A call that another thread is in ends, too: only that thread touches the channels meanwhile.
        """
        if self._failure is None:
            self._failure = reason.splitlines()[0] if reason else "no reason given"
        self.ring()
        if self._at_work.acquire(timeout=GIVE_UP_S):
            try:
                self._tell_peers(self._failure)
            finally:
                self._at_work.release()

    def _tell_peers(self, reason: str) -> None:
        if not self._has_told:
            self._has_told = True
            self._network.abort(_GAVE_UP + reason)

    def blame(self, opening: CollectiveFingerprint, error: str) -> NoReturn:
        """End the engine because what served a call in its place failed with an error that names no rank.

        Raises:
            ExecutionError: with the peer that went or gave up, where one did or does so within a moment.
        """
        with self._at_work:
            self._refuse_after_failure()
            closed = find_reason(self._network.channels.values(), None, self._search_s)
            blamed = "" if closed is None else f" ({closed})"
            self._end(f"rank {self.rank}: {opening}: {error}{blamed}", closed)

    def close(self) -> None:
        """Free what the engine holds besides the network; it must not be used any more."""
        with self._wakeup_lock:  # who rings late must not find another file under this number
            self.release()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def release(self) -> None:
        """Close the descriptor, without the lock: in a forked child a thread that is not here may hold it."""
        if self._wakeup >= 0:
            os.close(self._wakeup)
            self._wakeup = -1

    def _run_of(self, graph: TaskGraph, opening: CollectiveFingerprint | ExchangeFingerprint) -> GraphRun:
        """What runs a graph over the channels that there are now; kept for the next call."""
        channels = self._network.channels
        apart = isinstance(opening, ExchangeFingerprint)
        call = opening.call if isinstance(opening, ExchangeFingerprint) else opening
        has_circle = not apart and not (call.kind.has_root and call.count > 0)
        key = id(graph.actions), has_circle, len(channels)  # all lengths of a template share them
        run = self._runs.get(key)
        if run is None:
            if apart:
                told = telling = frozenset(range(self._network.size))
            else:
                nobody: frozenset[int] = frozenset()
                after, before = (self._after, self._before) if has_circle else (nobody, nobody)
                told, telling = after | {*graph.sends}, before | {*graph.receives}
            parties = Parties(told - {self.rank}, telling - {self.rank}, apart=apart)
            while len(self._runs) >= RUNS_KEPT:
                del self._runs[next(iter(self._runs))]
            run = self._runs[key] = GraphRun(graph, channels, self._wakeup, self.rank, parties)
        return run

    def _open(self, opening: CollectiveFingerprint, peers: frozenset[int]) -> None:
        data = opening.to_bytes()
        for peer in sorted(peers):
            try:
                self._network.channels[peer].open(data)
            except ChannelClosedError as error:
                raise PeerGoneError(f"begin together with rank {peer}", error) from error

    def _see(self, opening: CollectiveFingerprint) -> None:
        """Take in which ranks are known to make the same call."""
        for peer in sorted(self._unseen):
            try:
                data = self._network.channels[peer].opening()
            except ChannelClosedError as error:
                raise PeerGoneError(f"begin together with rank {peer}", error) from error
            if data is not None:
                opening.check(self.rank, CollectiveFingerprint.from_bytes(data), peer)
                self._unseen.discard(peer)

    def _is_full(self) -> bool:
        """Whether the opening is still on this side."""
        return any(self._network.channels[peer].wants_write for peer in self._after)

    def _scratch_of(self, graph: TaskGraph, dtype: torch.dtype) -> dict[Buffer, Tensor]:
        """Working space where the graph has some; all lengths and types share it: one call runs."""
        needed = graph.scratch_elements * dtype.itemsize
        if not needed:
            return {}
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        return {Buffer.SCRATCH: self._scratch[:needed].view(dtype)}

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise ExecutionError(f"rank {self.rank}: an earlier call failed: {self._failure}")

    def _fail(self, error: BaseException, opening: CollectiveFingerprint | ExchangeFingerprint) -> NoReturn:
        """Tell the peers why, and raise an error that says on which rank and in which collective.

        What a peer gave as its reason is passed on as it is, so that the first cause is what everybody knows.
        Where another thread has ended the engine, what it pulled from under this run is not the reason.
        """
        if self._failure is not None:
            self._tell_peers(self._failure)
            raise ExecutionError(f"rank {self.rank}: {opening}: {self._failure}") from error
        if isinstance(error, DisagreementError):
            message = str(error)
            if not message.startswith(f"rank {self.rank},"):  # a channel's, which does not know the call
                message = f"rank {self.rank}: {opening}: {message}"
            self.give_up(message)
            raise DisagreementError(message) from error
        if not isinstance(error, ExecutionError):
            self.give_up(f"rank {self.rank}: {opening}: {type(error).__name__}: {error}")
            raise error
        closed: ChannelClosedError | None = None
        if isinstance(error, PeerGoneError):
            closed = error.closed
            if closed.reason is None:
                closed = find_reason(self._network.channels.values(), closed.peer, self._search_s)
        self._end(f"rank {self.rank}: {opening}: {error}", closed, error)

    def _end(
        self, message: str, closed: ChannelClosedError | None, error: BaseException | None = None
    ) -> NoReturn:
        """Give up for the reason that a peer has told, where it did, and raise."""
        cause = None
        if closed is not None and closed.reason is not None and closed.reason.startswith(_GAVE_UP):
            cause = closed.reason.removeprefix(_GAVE_UP)
            if cause not in message:
                message += f" ({closed})"
        self.give_up(cause or message)
        raise ExecutionError(message) from error

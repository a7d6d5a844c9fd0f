"""The part of one group that a switch plays: it executes its programs, call by call, on a thread of its own.

Which call is next the ranks say: each begins every call with its opening, which names schedule, length, type
and reduction. The program is that of the switch in the schedule, run by the same engine as those of ranks:
every piece goes on as soon as all its inputs are there, memory is that of the pieces under way, and what
does not fit there waits in the sockets of those who sent it.

Sums are made as ranks make them: two contributions at a time in the order of the program, in their own
type; of bfloat16 and float16 each is computed in float32 and rounded once. So a result does not depend
on whether a rank or a switch has added, and is torch's in the same order.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from types import MappingProxyType

import torch

from arborcast.backends.dataflow.engine import Engine
from arborcast.backends.dataflow.poller import LEAVING, READ, Poller
from arborcast.backends.dataflow.task_graph import TaskGraph, compile_graph
from arborcast.backends.errors import ChannelClosedError, ExecutionError, PeerLeftError
from arborcast.backends.lowering.lower import lower_rank
from arborcast.backends.lowering.rank_view import images_of, partners_of, transfers_of
from arborcast.backends.schedules.enlistment import Enlistment
from arborcast.backends.tensors.torch_reduction import Operator, operator_named
from arborcast.backends.transport.fingerprint import CollectiveFingerprint
from arborcast.backends.transport.handshake import Handshake, answer, dial_tcp, read_reply
from arborcast.backends.transport.listener import PendingConnection
from arborcast.backends.transport.silence import LOST_AFTER_S, keep_asking
from arborcast.backends.transport.socket_channel import FAREWELL_S
from arborcast.backends.transport.stream import StreamChannel
from arborcast.synth.errors import InputError
from arborcast.synth.formats.sizes import format_size
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.simulation.pieces import PieceRule
from arborcast.synth.verification.verifier import verify

log = logging.getLogger(__name__)

GRAPHS_KEPT = 64
_TOLD_TO_END = "its process was told to end"


@dataclass(frozen=True, slots=True)
class Abilities:
    """What the process of a switch can do at most; schedules and calls that ask for more are refused.

    Attributes:
        trees: chunks of one schedule that it adds or multicasts; None for any number.
        adder: GB/s of sums; None for no limit.
        types: of the elements that it adds, as torch names them; empty for all that schedules serve.
        memory_bytes: for the pieces of one call that are under way.
        jobs: groups at a time.
    """

    trees: int | None = None
    adder: Fraction | None = None
    types: tuple[str, ...] = ()
    memory_bytes: int = 1 << 30
    jobs: int = 64


@dataclass
class _Channels:
    """The engine's view of the connections of one job; see `backends.dataflow.engine.Connections`."""

    size: int
    open: dict[int, StreamChannel] = field(default_factory=dict)

    @property
    def channels(self) -> Mapping[int, StreamChannel]:
        return MappingProxyType(self.open)

    def abort(self, reason: str) -> None:
        self.end(reason)

    def end(self, reason: str | None) -> None:
        for channel in self.open.values():
            channel.begin_close(reason)
        deadline = time.monotonic() + FAREWELL_S
        for channel in self.open.values():
            channel.finish_close(deadline)


class Job:
    """A group that a switch serves, from its first enlistment until its ranks have left or something failed.

    Args:
        vertex: the switch, in the group's topology.
        first: what rank 0 said; checked.
        abilities: of the process.
        on_end: called when the job is over, from its own thread.
    """

    def __init__(
        self, vertex: int, first: Enlistment, abilities: Abilities, on_end: Callable[[Job], None]
    ) -> None:
        topology = first.table.topology
        self.token = first.token
        self.name = str(topology.label(vertex))
        self.failure: str | None = None
        self._vertex = vertex
        self._topology = topology
        self._timeout_s = first.timeout_s
        self._abilities = abilities
        self._on_end = on_end
        self._channels = _Channels(topology.ranks)
        names = {
            other: f"switch {topology.label(other)}" for other in range(topology.ranks, topology.holders)
        }
        self._engine = Engine(vertex, self._channels, timeout_s=first.timeout_s, names=names)
        self._lock = threading.Lock()
        self._enlistments = [first]
        self._arrivals: list[PendingConnection] = []
        self._is_over = False
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._plans: dict[bytes, tuple[AnySchedule, PieceRule]] = {}
        self._left: set[int] = set()
        self._poller = Poller()
        self._graph = lru_cache(GRAPHS_KEPT)(self._compile)
        self._thread = threading.Thread(target=self._run, name=f"switch {self.name}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ from other threads

    def extend(self, vertex: int, more: Enlistment) -> None:
        """Take further schedules of the same group, which has been checked.

        Raises:
            InputError: they are of another fabric or switch, or the job has just ended.
        """
        if vertex != self._vertex or more.table.topology.holders != self._topology.holders:
            raise InputError(f"a group must keep to one switch, got vertex {vertex} after {self._vertex}")
        self._put(self._enlistments, more)

    def admit(self, connection: PendingConnection) -> None:
        """Take a connection that brought the group's token."""
        try:
            self._put(self._arrivals, connection)
        except InputError:
            connection.close()

    def stop(self) -> None:
        """End the job; its ranks are told."""
        with self._lock:
            self._is_over = True
            self._ring()
        self._thread.join(FAREWELL_S)
        if self._thread.is_alive():  # in a call
            self._engine.give_up(f"rank {self._vertex}: {_TOLD_TO_END}")

    def _put(self, box: list, thing: object) -> None:  # type: ignore[type-arg]
        with self._lock:
            if self._is_over:
                raise InputError("the job of this group has ended")
            box.append(thing)
            self._ring()

    def _ring(self) -> None:
        if self._wakeup >= 0:
            os.eventfd_write(self._wakeup, 1)

    # ------------------------------------------------------------------ the job's own thread

    def _run(self) -> None:
        try:
            self._serve()
        except ExecutionError as error:
            self.failure = str(error)
        except Exception as error:  # the next job must not suffer from it, nor these ranks wait in vain
            log.exception("switch %s", self.name)
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            with self._lock:
                self._is_over = True
                for connection in self._arrivals:
                    connection.close()
                os.close(self._wakeup)
                self._wakeup = -1
            if self.failure is not None:
                self._engine.give_up(self.failure)
                self.failure = self._engine.failure
            self._channels.end(None)
            self._engine.close()
            self._on_end(self)

    def _serve(self) -> None:
        self._poller.want(self._wakeup, READ)
        since = time.monotonic()
        while (begun := self._next_call(since)) is not None:
            peer, opening = begun
            self._execute(peer, opening)
            since = time.monotonic()

    def _next_call(self, since: float) -> tuple[int, CollectiveFingerprint] | None:
        """The opening that a rank has sent, once all peers of the call are here; None when all have left.

        Raises:
            ExecutionError: a peer died or gave up, or ranks did not come.
        """
        begun: tuple[int, CollectiveFingerprint] | None = None
        while True:
            self._take_in()
            if begun is None:
                begun = self._look()
            if begun is not None and not self._missing(begun[1]):
                return begun
            ranks = set(range(self._channels.size))
            if begun is None and ranks <= self._left:
                return None
            # Between calls a group may pause for as long as it likes. Where all who came have left, others
            # may still be on their way.
            awaits = begun is not None or ranks & self._channels.open.keys() <= self._left
            left = since + self._timeout_s - time.monotonic() if awaits else self._timeout_s
            if awaits and left <= 0:
                raise self._late(begun)
            self._sleep(left, looks=begun is None)

    def _sleep(self, seconds: float, *, looks: bool) -> None:
        peers = {}
        for peer, channel in self._channels.open.items():
            wanted = 0
            if looks and peer not in self._left:  # what switches send is for the engine
                wanted = channel.wanted() or READ if peer < self._channels.size else LEAVING
            self._poller.want(channel.fileno(), wanted)
            peers[channel.fileno()] = peer
        for descriptor, _ in self._poller.sleep(min(seconds, 3600)):
            if descriptor == self._wakeup:
                os.eventfd_read(self._wakeup)
            elif (peer := peers[descriptor]) >= self._channels.size:
                self._left.add(peer)
                error = self._channels.open[peer].last_words()
                if not isinstance(error, PeerLeftError):
                    raise self._lost(error)

    def _look(self) -> tuple[int, CollectiveFingerprint] | None:
        """The next opening of the first rank that has sent one.

        All ranks send all of theirs in one order, and a call ends with those of all: so there is one next.
        """
        for peer, channel in self._channels.open.items():
            if peer in self._left or peer >= self._channels.size:
                continue
            try:
                data = channel.opening()
            except PeerLeftError:
                self._left.add(peer)
            except ChannelClosedError as error:
                raise self._lost(error) from error
            else:
                if data is not None:
                    return peer, CollectiveFingerprint.from_bytes(data)
        return None

    def _lost(self, error: ChannelClosedError) -> ExecutionError:
        """Of a peer that went between two calls, with what it said."""
        if error.reason is None:
            return ExecutionError(f"rank {self._vertex}: {error}")
        return ExecutionError(error.reason.removeprefix("gave up: "))

    def _late(self, begun: tuple[int, CollectiveFingerprint] | None) -> ExecutionError:
        absent = set(range(self._channels.size)) - self._channels.open.keys()
        missing = sorted(self._missing(begun[1]) if begun is not None else absent)
        return ExecutionError(
            f"rank {self._vertex} waited {self._timeout_s:g} s for {missing} to connect, in vain"
        )

    def _missing(self, opening: CollectiveFingerprint) -> set[int]:
        """Who takes part in the call, or must see it, and has not connected."""
        if opening.schedule not in self._plans:
            return set()
        everyone = {*range(self._channels.size), *partners_of(self._plans[opening.schedule][0], self._vertex)}
        return everyone - self._channels.open.keys()

    def _take_in(self) -> None:
        """Learn schedules, dial switches with lower numbers, and answer whoever has called."""
        with self._lock:
            if self._is_over:
                raise ExecutionError(f"rank {self._vertex}: {_TOLD_TO_END}")
            enlistments, arrivals = self._enlistments[:], self._arrivals[:]
            self._enlistments.clear()  # the same lists: who waits for the lock holds one of them
            self._arrivals.clear()
        for enlistment in enlistments:
            for digest, entry in zip(enlistment.digests, enlistment.table.entries, strict=True):
                self._plans[digest] = entry.schedule, enlistment.cut
                for peer in partners_of(entry.schedule, self._vertex):
                    if self._channels.size <= peer < self._vertex and peer not in self._channels.open:
                        self._dial(peer, enlistment)
        for connection in arrivals:
            self._receive(connection)

    def _dial(self, peer: int, enlistment: Enlistment) -> None:
        host, port = enlistment.addresses[peer]
        deadline = time.monotonic() + self._timeout_s
        handshake = Handshake(self.token, self._vertex, peer, 0, 0, wants_memory=False)
        try:
            call = dial_tcp(host, port, handshake, deadline)
            refusal = read_reply(call.sock, peer, deadline)
        except OSError as error:
            raise ExecutionError(
                f"rank {self._vertex} cannot reach rank {peer} at {host}: {error}"
            ) from error
        if refusal:
            raise ExecutionError(refusal)
        self._adopt(peer, call.sock)

    def _receive(self, connection: PendingConnection) -> None:
        """Answer a rank, or a switch with a higher number; others are of no use and are dropped."""
        handshake = connection.handshake
        assert handshake is not None, "a connection is passed on when its handshake is here"
        peer = handshake.rank
        expected = 0 <= peer < self._channels.size or self._vertex < peer < self._topology.holders
        if not expected or peer in self._channels.open or handshake.to != self._vertex:
            connection.close()
            return
        try:
            connection.sock.sendall(answer())  # some bytes, which a new connection has room for
        except OSError as error:
            connection.close()
            raise ExecutionError(
                f"rank {peer} ended while rank {self._vertex} was connecting with it"
            ) from error
        self._adopt(peer, connection.sock)

    def _adopt(self, peer: int, sock: socket.socket) -> None:
        # A host that is gone without a word is noticed, though nothing is sent to it between calls.
        keep_asking(sock, LOST_AFTER_S)
        self._channels.open[peer] = StreamChannel(sock, peer)

    # ------------------------------------------------------------------ one call

    def _execute(self, peer: int, opening: CollectiveFingerprint) -> None:
        elements, _, reduction = opening.elements.partition(" ")
        if opening.schedule not in self._plans:
            raise ExecutionError(f"rank {self._vertex}: nobody has told it of the schedule of {opening}")
        dtype, operator = self._arithmetic_of(opening, elements, reduction)
        graph = self._graph(opening.schedule, opening.count, dtype.itemsize)
        needed = graph.scratch_elements * dtype.itemsize
        if needed > self._abilities.memory_bytes:
            raise ExecutionError(
                f"rank {self._vertex}: {opening} needs {format_size(needed)} for what is under way, "
                f"and there are {format_size(self._abilities.memory_bytes)}"
            )
        self._engine.run(graph, {}, opening, operator, dtype=dtype, seen=peer)

    def _arithmetic_of(
        self, opening: CollectiveFingerprint, elements: str, reduction: str
    ) -> tuple[torch.dtype, Operator | None]:
        dtype = getattr(torch, elements, None)
        if not isinstance(dtype, torch.dtype):
            raise ExecutionError(f"rank {self._vertex}: {opening}: there are no elements of type {elements}")
        if not reduction:
            return dtype, None
        operator = operator_named(reduction, dtype)
        known = self._abilities.types
        if operator is None or (known and elements not in known):
            raise ExecutionError(
                f"rank {self._vertex}: {opening}: it does not add that; it adds "
                f"{', '.join(known) or 'what schedules serve'}"
            )
        return dtype, operator

    def _compile(self, digest: bytes, count: int, item_bytes: int) -> TaskGraph:
        schedule, cut = self._plans[digest]
        pieces = cut.pieces(schedule, count * item_bytes)
        # A whole message is longer than sockets hold: all inputs of a sum must have room here.
        stores = schedule.topology.switches[self._vertex - schedule.topology.ranks].stores
        program = lower_rank(schedule, self._vertex, count, pieces=pieces)
        return compile_graph(program, joins=not stores)


def check_enlistment(enlistment: Enlistment, vertex: int, abilities: Abilities) -> None:
    """Refuse schedules that are wrong, or that ask more of a switch than its process can.

    Raises:
        InputError: in one line, which schedule and why.
    """
    topology = enlistment.table.topology
    if not topology.ranks <= vertex < topology.holders:
        raise InputError(f"vertex {vertex} of {topology.name} is no switch that holds chunks")
    for index, entry in enumerate(enlistment.table.entries):
        schedule = entry.schedule
        verdict = verify(schedule)
        if not verdict.correct:
            raise InputError(f"schedule {index} is not correct: {verdict.errors[0]}")
        added, copied = _work_of(schedule, vertex)
        if abilities.trees is not None and len(added | copied) > abilities.trees:
            raise InputError(
                f"schedule {index} adds or multicasts {len(added | copied)} chunks here, at most "
                f"{abilities.trees} can be held"
            )
        shares = (image.chunk.share for _, image in images_of(schedule, sorted(added)))
        needed = sum(shares, Fraction(0)) * schedule.rate
        if abilities.adder is not None and needed > abilities.adder:
            raise InputError(
                f"schedule {index} adds {float(needed):.4g} GB/s here, the adder makes at most "
                f"{float(abilities.adder):.4g} GB/s"
            )


def _work_of(schedule: AnySchedule, vertex: int) -> tuple[set[int], set[int]]:
    """The chunks of which a switch adds several inputs, and those that it passes to several outputs."""
    inputs: dict[int, set[int]] = {}
    outputs: dict[int, set[int]] = {}
    for _, transfer in transfers_of(schedule, vertex):
        if transfer.dst == vertex and transfer.reduce:
            inputs.setdefault(transfer.chunk, set()).add(transfer.src)
        elif transfer.src == vertex:
            outputs.setdefault(transfer.chunk, set()).add(transfer.dst)
    return (
        {chunk for chunk, ends in inputs.items() if len(ends) > 1},
        {chunk for chunk, ends in outputs.items() if len(ends) > 1},
    )

"""A link fails during a collective: the ranks finish the call on what is left, and go on without it.

Who sees a channel break rings all ranks through the store. Each lets happen what still can, and says what
lies where; rank 0 plans the rest from that, all check the plan, connect anew and carry it out. A call ends on
no rank before all have finished (`lowering.ending`), so that whoever is needed is there:

    rank with the broken channel     every rank                               rank 0
    bell/EPOCH/RANK, for all    ->   here/EPOCH/RANK: calls completed
                                     state/EPOCH/CALL/RANK: what it holds ->  plan/EPOCH/CALL

A rank that has ended the call says so instead of what it holds: then all have finished, and end it, too. One
that is not in a call answers from a thread of its own; one that does not answer, and to which nobody has a
channel any more, has died, which is a failure, as is a second link that fails before the call is finished.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import select
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from arborcast.backends.dataflow.engine import BrokenOffError, Engine
from arborcast.backends.dataflow.progress import (
    Holding,
    Progress,
    holdings_at_start,
    holdings_of,
    merged,
)
from arborcast.backends.dataflow.task_graph import TaskGraph, compile_graph
from arborcast.backends.errors import ExecutionError, PeerLeftError
from arborcast.backends.lowering.finish import lower_finish
from arborcast.backends.lowering.layout import Buffer, Layout, Slice, lay_out
from arborcast.backends.tensors.shared_store import own_connection
from arborcast.backends.tensors.torch_compat import PrefixStore, Store
from arborcast.backends.tensors.torch_reduction import Operator
from arborcast.backends.transport.fingerprint import CollectiveFingerprint
from arborcast.backends.transport.network import Network
from arborcast.backends.transport.silence import SilenceWatch
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.faults.finishing import plan_finish, without_pairs
from arborcast.synth.schedule import Schedule, Transfer
from arborcast.synth.topology import Hop, Topology
from arborcast.synth.unfinished import Finish, Lot, Mask, Part, Unfinished
from arborcast.synth.verification.finish import verify_finish

log = logging.getLogger(__name__)

ANSWER_S = 3.0
"""Who has not answered the bell for so long is dead where no rank has a channel to it any more."""

IDLE_S = 0.003
"""Of a run that was broken off: where nothing has moved for so long, little will."""

DRAIN_S = 1.0
"""How long what still moves is let move."""

PLAN_S = 60.0
"""How long the others wait for the plan."""

WATCH_S = 86400.0
"""How long one wait for the bell lasts, after which comes the next."""

_PAUSES_S = 0.0002, 0.005  # the shortest and the longest between two looks into the store


@dataclass(frozen=True)
class Resumed:
    """A call in which a link failed.

    Attributes:
        call: which.
        lost: the pairs of ranks whose channels broke.
        lost_ms: from the failure, as this rank saw it, until the finish began to run.
        plan_ms: of that, on rank 0, planning and checking.
        sent_bytes: that all ranks had handed over by then.
        finish_bytes: that all ranks sent after that.
        whole_bytes: that all ranks send in a call in which nothing fails.
        busy_us: how long the busiest link is busy with the finish, by the fabric's rates.
    """

    call: str
    lost: tuple[Hop, ...]
    lost_ms: float
    plan_ms: float
    sent_bytes: int
    finish_bytes: int
    whole_bytes: int
    busy_us: float

    @property
    def sent_again_bytes(self) -> int:
        """More than a call sends in which nothing fails; from scratch it would be `sent_bytes`."""
        return self.sent_bytes + self.finish_bytes - self.whole_bytes


class Resumption:
    """What one rank does to finish calls in which a link fails.

    Args:
        store: of the group, for this alone; many threads use it.
        prefix: of its keys in the store under it.
        rank: of this process in the group.
        size: ranks of the group.
        engine: that runs the calls.
        network: its channels.
        make_network: makes those that follow them when some broke, by the number of the epoch.
        lost_after_s: how long the kernel of a peer's host may answer nothing; 0 for ever.

    Attributes:
        network: the channels of now.
        resumed: the calls that were finished in this way.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        rank: int,
        size: int,
        engine: Engine,
        network: Network,
        make_network: Callable[[int], Network],
        lost_after_s: float,
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._engine = engine
        self._make_network = make_network
        self._lost_after_s = lost_after_s
        self.network = network
        self.resumed: list[Resumed] = []
        self._waiting = PrefixStore(prefix, own_connection(store))
        self._lock = threading.Lock()
        self._epoch = 0
        self._completed = -1  # the number of the last call that has ended
        self._is_rung = False
        self._is_closed = False
        self._closed: set[Hop] = set()  # pairs of ranks, in all epochs
        self._lost: set[int] = set()  # peers, in this one
        self._renewed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="arborcast-resumption", daemon=True)
        self._watcher.start()

    # ------------------------------------------------------------------ the bell

    def _watch(self) -> None:
        """Answer the bell, whatever the other threads do."""
        while True:
            self._renewed.clear()
            epoch = self._epoch
            key = f"bell/{epoch}/{self._rank}"
            try:
                self._wait_for_bell(key)
                with self._lock:
                    if self._is_closed:
                        return
                    if epoch != self._epoch:  # this rank has rung itself, and all is over
                        continue
                    self._is_rung = True
                    self._say_here()
            except RuntimeError:  # the store is gone, and with it whoever could ring
                return
            self._engine.ring()
            self._renewed.wait()

    def _wait_for_bell(self, key: str) -> None:
        """However long that takes.

        Raises:
            RuntimeError: the store is gone.
        """
        while not self._waiting.check([key]):
            with contextlib.suppress(RuntimeError):  # too late, or gone: the next look tells
                self._waiting.wait([key], timedelta(seconds=WATCH_S))

    def _say_here(self) -> None:
        self._store.set(f"here/{self._epoch}/{self._rank}", str(self._completed))

    def _ring_all(self) -> None:
        for rank in range(self._size):
            self._store.set(f"bell/{self._epoch}/{rank}", "")

    def _has_completed(self, call: int) -> None:
        with self._lock:
            self._completed = call
            if self._is_rung:
                self._say_here()

    def close(self) -> None:
        """Leave, so that nobody waits for this rank."""
        with self._lock:
            self._is_closed = True
        with contextlib.suppress(RuntimeError):
            self._store.set(f"here/{self._epoch}/{self._rank}", str(self._completed))
            self._store.set(f"bell/{self._epoch}/{self._rank}", "")
        self._renewed.set()
        self._watcher.join(1.0)

    # ------------------------------------------------------------------ a call

    def run(
        self,
        graph: TaskGraph,
        memory: Mapping[Buffer, Tensor],
        opening: CollectiveFingerprint,
        operator: Operator | None,
        served: Callable[[], tuple[Schedule, int]],
        count: int,
        topology: Topology,
    ) -> frozenset[Hop]:
        """Run a graph that ends on all ranks together; finish it in another way where a link fails.

        Args:
            graph: as for the engine.
            memory: likewise.
            opening: likewise.
            operator: likewise.
            served: the schedule of the call, and into how many pieces it is cut.
            count: elements of the whole buffer.
            topology: the fabric before the failure.

        Returns:
            the pairs of ranks that have lost each other in this call.

        Raises:
            ExecutionError: as the engine; a rank died, or the call cannot be finished.
        """
        broken: BrokenOffError | None = None
        began = time.monotonic()
        if not self._is_rung:
            try:
                self._engine.run(graph, memory, opening, operator, is_called_off=lambda: self._is_rung)
            except BrokenOffError as error:
                broken, began = error, time.monotonic()
            else:
                self._has_completed(opening.sequence)
                return frozenset()
        call = _Call(graph, memory, opening, operator, *served(), count, topology)
        try:
            lost = self._finish(call, broken, began)
        except BaseException as error:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"failed/{self._epoch}", f"rank {self._rank}: {error}")
            self._engine.fail(error, opening)
        self._has_completed(opening.sequence)
        if lost:
            with self._lock:
                self._epoch += 1
                self._is_rung = False
                self._lost.clear()
            self._renewed.set()
        return lost

    def _finish(self, call: _Call, broken: BrokenOffError | None, began: float) -> frozenset[Hop]:
        """What `run` returns; nothing where all have ended the call without this."""
        if broken is not None:
            if broken.lost is not None:
                self._lost.add(broken.lost)
                self._ring_all()
                broken.run.lose(broken.lost)
            is_over, others = broken.run.drain(IDLE_S, DRAIN_S)
            if others - self._lost:
                self._ring_all()
            self._lost |= others
            if is_over:  # so all have finished, and who waits for a word of that will hear it
                return frozenset()
        holdings, sent_bytes = call.holdings(None if broken is None else broken.run.progress())
        self._find_lost()
        name = f"{self._epoch}/{call.opening.sequence}"
        held = [(it.chunk, it.start, it.stop, it.mask) for it in holdings]
        said = {"lost": sorted(self._lost), "sent": sent_bytes, "held": held}
        living = sorted(self.network.channels.keys() - self._lost)
        self._store.set(f"peers/{name}/{self._rank}", json.dumps(living))
        self._store.set(f"state/{name}/{self._rank}", _packed(said))  # type: ignore[arg-type]  # takes both
        if not self._all_have_said(name, call.opening.sequence, broken):
            return frozenset()
        self.network.drop()  # nobody reads what still is on its way
        plan_ms = 0.0
        if self._rank == 0:
            at = time.monotonic()
            answer = self._planned(name, call)
            plan_ms = 1000 * (time.monotonic() - at)
            self._refuse_after_failure()
            self._store.set(f"plan/{name}", _packed(answer))  # type: ignore[arg-type]  # takes both
        self._wait_for_plan(f"plan/{name}")
        data = self._store.get(f"plan/{name}")
        answer = _unpacked(data)
        if "error" in answer:
            raise ExecutionError(f"cannot be finished without the link that failed: {answer['error']}")
        finish = call.agreed(answer)
        program = lower_finish(finish, call.layout, self._rank, _locator(holdings))
        # Sends may run ahead as far as they can: there is no order of trees to keep.
        graph = compile_graph(program, ahead=1 << 20)
        pairs = frozenset((a, b) for a, b in answer["pairs"])
        self._closed |= pairs
        before, after = neighbours(self._rank, self._size, self._closed)
        self.network = self._make_network(self._epoch + 1)
        self.network.connect({*graph.sends, *graph.receives, before, after} - {self._rank})
        scratch = self._engine.renew(self.network, before, after)
        lost_ms = 1000 * (time.monotonic() - began)
        memory = {**call.memory, Buffer.RING: _as_type(scratch, call.dtype)}
        opening = replace(call.opening, schedule=hashlib.sha256(data).digest()[:8])
        self._engine.run(graph, memory, opening, call.operator)
        self._note(call, finish, pairs, lost_ms, plan_ms, answer["sent"])
        return pairs

    def _note(
        self,
        call: _Call,
        finish: Finish,
        pairs: frozenset[Hop],
        lost_ms: float,
        plan_ms: float,
        sent_bytes: int,
    ) -> None:
        item_bytes = call.dtype.itemsize
        resumed = Resumed(
            str(call.opening),
            tuple(sorted(pairs)),
            lost_ms,
            plan_ms,
            sent_bytes,
            finish.elements_sent * item_bytes,
            call.whole_bytes,
            float(finish.busy_us(item_bytes)),
        )
        self.resumed.append(resumed)
        if self._rank == 0:
            log.warning(
                "%s: no way between ranks %s any more: finished without it, %d of %d bytes sent again",
                call.opening,
                ", ".join(f"{a}-{b}" for a, b in resumed.lost),
                resumed.sent_again_bytes,
                resumed.whole_bytes,
            )

    def _all_have_said(self, call: str, number: int, broken: BrokenOffError | None) -> bool:
        """Wait until all ranks have said what they hold; False where one has ended the call instead.

        Raises:
            ExecutionError: a rank does not answer.
        """
        silent, unsaid = set(range(self._size)), set(range(self._size))
        missed_s: dict[int, float] = {}  # since when a channel has ended, whose peer may yet come
        why = "" if broken is None else f"{broken}: "
        watch, channels = SilenceWatch(self._lost_after_s), self.network.channels
        for waited in self._looks():
            unsaid -= {rank for rank in unsaid if self._store.check([f"state/{call}/{rank}"])}
            if not unsaid:
                return True
            for rank in unsaid:
                key = f"here/{self._epoch}/{rank}"
                if self._store.check([key]):
                    silent.discard(rank)
                    if int(self._store.get(key)) >= number:
                        return False
            ended = (self._ended() - self._lost) & unsaid
            missed_s = {rank: missed_s.get(rank, waited) for rank in ended}
            if any(waited - since > ANSWER_S for since in missed_s.values()):
                raise ExecutionError(f"{why}rank {_shown(ended)} died before the call was finished")
            silent &= unsaid
            if silent and waited > ANSWER_S:
                # Who holds the interpreter answers nothing, either; but its kernel does.
                dead = silent - self._with_channels(call, set(range(self._size)) - unsaid)
                if unsaid <= dead:
                    raise ExecutionError(f"{why}rank {_shown(dead)} does not answer: it died, or its host")
                watch.look({peer: channels[peer] for peer in channels.keys() & unsaid - self._lost})
            if waited > self._engine.timeout_s:
                raise ExecutionError(
                    f"{why}rank {_shown(unsaid)} did not come to finish the call for "
                    f"{self._engine.timeout_s:g} s, the timeout of the call"
                )
        raise AssertionError("there is always another look")

    def _with_channels(self, call: str, ranks: Collection[int]) -> set[int]:
        """The ranks with which others, who have said what they hold, had unbroken channels."""
        return {peer for rank in ranks for peer in json.loads(self._store.get(f"peers/{call}/{rank}"))}

    def _wait_for_plan(self, key: str) -> None:
        for waited in self._looks():
            if self._store.check([key]):
                return
            if waited > PLAN_S:
                raise ExecutionError(f"rank 0 did not say within {PLAN_S:g} s how to finish the call")

    def _looks(self) -> Iterator[float]:
        """When to look into the store: how many seconds have passed.

        Raises:
            ExecutionError: another rank has given up, or this one.
        """
        began, (pause, longest) = time.monotonic(), _PAUSES_S
        while True:
            self._refuse_after_failure()
            if self._store.check([f"failed/{self._epoch}"]):
                raise ExecutionError(self._store.get(f"failed/{self._epoch}").decode(errors="replace"))
            yield time.monotonic() - began
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _refuse_after_failure(self) -> None:
        """Raise where another thread has ended the engine, and with it the channels of before."""
        if self._engine.failure is not None:
            raise ExecutionError(self._engine.failure)

    def _ended(self) -> set[int]:
        """The peers whose channels have."""
        self._refuse_after_failure()
        poll = select.poll()
        peers = {channel.fileno(): peer for peer, channel in self.network.channels.items()}
        for descriptor in peers:
            poll.register(descriptor, select.POLLRDHUP)
        return {peers[descriptor] for descriptor, _ in poll.poll(0)}

    def _find_lost(self) -> None:
        """Note the channels that have broken, though nothing was awaited of them.

        Raises:
            ChannelClosedError: a peer has given up.
        """
        for peer in self._ended() - self._lost:
            closed = self.network.channels[peer].last_words()
            if closed.reason is not None:
                raise closed
            if not isinstance(closed, PeerLeftError):
                self._lost.add(peer)

    def _planned(self, name: str, call: _Call) -> dict[str, Any]:
        """On rank 0: the plan for what all have said."""
        said = [_unpacked(self._store.get(f"state/{name}/{rank}")) for rank in range(self._size)]
        pairs = {(min(a, b), max(a, b)) for a, it in enumerate(said) for b in it["lost"]}
        held = {rank: [tuple(sums) for sums in it["held"]] for rank, it in enumerate(said)}
        schedule = call.schedule
        state = Unfinished.drawn(schedule.collective, schedule.chunks, call.lengths, held)
        try:
            finish = plan_finish(
                state,
                without_pairs(call.topology, pairs),
                closed={*self._closed, *pairs},
                item_bytes=call.dtype.itemsize,
            )
        except InfeasibleError as error:
            return {"error": str(error)}
        return {
            "pairs": sorted(pairs),
            "sent": sum(it["sent"] for it in said),
            "closed": sorted(finish.closed),
            "lots": [(it.chunk, it.start, it.stop, sorted(it.held.items())) for it in state.lots],
            "parts": [(it.lot, it.start, it.stop, sorted(it.used.items())) for it in finish.parts],
            "transfers": [(it.chunk, it.src, it.dst, it.step, it.reduce, it.via) for it in finish.transfers],
        }


@dataclass(frozen=True)
class _Call:
    """One call, as it was begun on this rank; see `Resumption.run`."""

    graph: TaskGraph
    memory: Mapping[Buffer, Tensor]
    opening: CollectiveFingerprint
    operator: Operator | None
    schedule: Schedule
    pieces: int
    count: int
    topology: Topology

    @cached_property
    def layout(self) -> Layout:
        return lay_out(self.schedule, self.count)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return tuple(place.stop - place.start for place in self.layout.places.values())

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.memory.values())).dtype

    @property
    def whole_bytes(self) -> int:
        return sum(self.lengths[it.chunk] for it in self.schedule.transfers) * self.dtype.itemsize

    def holdings(self, progress: Progress | None) -> tuple[list[Holding], int]:
        """What this rank holds, and the bytes that it has handed over."""
        if progress is None:
            found = holdings_at_start(self.layout, self.graph.program.rank, self.pieces)
            return merged(found), 0
        found = holdings_of(
            self.schedule, self.layout, self.graph, self.pieces, progress, self.dtype.itemsize
        )
        return merged(found), progress.sent_bytes

    def agreed(self, answer: Mapping[str, Any]) -> Finish:
        """The plan of rank 0, once this rank has checked it.

        Raises:
            ExecutionError: it is wrong.
        """
        lots = tuple(Lot(chunk, a, b, _by_rank(held)) for chunk, a, b, held in answer["lots"])
        finish = Finish(
            Unfinished(self.schedule.collective, self.schedule.chunks, self.lengths, lots),
            without_pairs(self.topology, [(a, b) for a, b in answer["pairs"]]),
            frozenset((a, b) for a, b in answer["closed"]),
            tuple(Part(lot, a, b, _by_rank(used)) for lot, a, b, used in answer["parts"]),
            tuple(
                Transfer(part, src, dst, step, adds, tuple(via))
                for part, src, dst, step, adds, via in answer["transfers"]
            ),
        )
        if errors := verify_finish(finish):
            raise ExecutionError(f"the plan to finish the call is wrong: {errors[0]}")
        return finish


def _as_type(scratch: Tensor, dtype: torch.dtype) -> Tensor:
    """As much of it as elements fill."""
    return scratch[: scratch.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def _shown(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _by_rank(pairs: list[Any]) -> dict[int, tuple[Mask, ...]]:
    return {rank: tuple(masks) for rank, masks in pairs}


def _locator(holdings: list[Holding]) -> Callable[[int, int, int, Mask], tuple[Slice, ...]]:
    found: dict[tuple[int, Mask], list[Holding]] = {}
    for it in holdings:
        found.setdefault((it.chunk, it.mask), []).append(it)

    def locate(chunk: int, start: int, stop: int, mask: Mask) -> tuple[Slice, ...]:
        return tuple(
            _kept(it.cut(start, stop)) for it in found[chunk, mask] if it.start <= start and stop <= it.stop
        )

    return locate


def _kept(where: Slice) -> Slice:
    """What was scratch, under the name that it has in a finish."""
    return replace(where, buffer=Buffer.RING) if where.buffer is Buffer.SCRATCH else where


def neighbours(rank: int, size: int, closed: Collection[Hop]) -> tuple[int, int]:
    """The ranks before and after one in a circle that needs no closed pair; in a line where there is none.

    At the ends of a line the rank itself stands for who is missing. Small groups may have neither.

    Raises:
        InfeasibleError: there is neither, or none is found soon.
    """
    shut = {frozenset(pair) for pair in closed}
    tries = 0

    def extend(way: list[int], is_circle: bool) -> list[int] | None:
        nonlocal tries
        tries += 1
        if tries > 10_000:
            return None
        if len(way) == size:
            return way if not is_circle or frozenset((way[-1], way[0])) not in shut else None
        for step in range(1, size):
            other = (way[-1] + step) % size
            if other not in way and frozenset((way[-1], other)) not in shut:
                found = extend([*way, other], is_circle)
                if found is not None:
                    return found
        return None

    circle = extend([0], True)
    if circle is not None:
        at = circle.index(rank)
        return circle[at - 1], circle[(at + 1) % size]
    tries = 0
    for first in range(size):
        line = extend([first], False)
        if line is not None:
            at = line.index(rank)
            return (line[at - 1] if at else rank), (line[at + 1] if at + 1 < size else rank)
    raise InfeasibleError(f"the {size} ranks must be joined by a line without {sorted(closed)}")


def _packed(value: object) -> bytes:
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)


def _unpacked(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(zlib.decompress(data))
    return found

"""The schedules of a group on its present fabric: found when first needed, compiled once for all lengths.

All ranks ask for the same things in the same order. Before a table is made they agree on the call that needs
it and on the fabric, so that whoever means something else is found out at once and not when a wait has ended.

Where the cache has no table, a simple one serves (`schedules.simple`) while rank 0 has the table found behind
the calls. At some calls, which all ranks count alike, rank 0 says whether it is there; then all change:

    call 0: agree, take the simple table     call 4, 8, 16, 32, ...: agree, "not yet"     48: agree, the table
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from arborcast.backends.dataflow.engine import Engine
from arborcast.backends.dataflow.graph_template import GraphTemplate
from arborcast.backends.dataflow.task_graph import TaskGraph, compile_graph
from arborcast.backends.errors import ExecutionError
from arborcast.backends.lowering.groups import MessageGroup, groups_of
from arborcast.backends.lowering.lower import lower_rank
from arborcast.backends.lowering.program import Program
from arborcast.backends.options import Options
from arborcast.backends.schedules.combined import JointPart
from arborcast.backends.schedules.rendezvous import share_table
from arborcast.backends.schedules.schedule_table import ScheduleTable, TableEntry
from arborcast.backends.schedules.simple import is_simple, simple_table
from arborcast.backends.schedules.synthesis import (
    KERNELS_S,
    behind,
    given_table,
    kept_table,
    synthesize_table,
)
from arborcast.backends.tensors.torch_compat import Store
from arborcast.backends.transport.fingerprint import CollectiveFingerprint
from arborcast.backends.transport.lanes import CableLanes
from arborcast.backends.transport.network import Network
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InfeasibleError, InputError, TimedOutError
from arborcast.synth.faults.faulty import Faulty, left_of
from arborcast.synth.formats.documents import topology_to_document
from arborcast.synth.simulation.pieces import PieceRule
from arborcast.synth.topology import Topology

log = logging.getLogger(__name__)

GRAPHS_KEPT = 256
"""Of all collectives and lengths; each takes 24 bytes for every action."""

TEMPLATES_KEPT = 32
"""A schedule is made ready once for each number of pieces; a length then costs a few dozen microseconds."""

LOOK_EVERY_S = 0.001
"""After which ranks first ask whether rank 0 has said something; then ever less often, until `SELDOM_S`."""

SELDOM_S = 0.05

ASK_EVERY, ASK_FIRST = 16, (4, 8)
"""Calls of a collective by a simple schedule at which ranks ask whether there is another."""


@dataclass
class _Change:
    """A simple table that is to be followed by another.

    Attributes:
        found: on rank 0: the other one, when it is there.
        calls: of the collective since the simple table serves.
        asked: how often ranks have asked for the other one.
    """

    found: Future[ScheduleTable] | None = None
    calls: int = 0
    asked: int = 0

    def is_due(self) -> bool:
        """Count a call; whether ranks ask at this one."""
        self.calls += 1
        return self.calls % ASK_EVERY == 0 or self.calls in ASK_FIRST


@dataclass(eq=False)
class Schedules:
    """What one rank knows of the group's schedules.

    Args:
        fabric: of the group: its rank i is rank i of the group.
        options: for the synthesis.
        store: of the group, for these schedules alone.
        network: to be connected as they need it.
        engine: over which ranks agree.
        cut: into how many pieces chunks are cut.
        joint: gives the part in what several groups run at once; None for what this group does by itself.
        spare: gives the table that was made before links failed, alike on all ranks; None where none was.
        cores: of the one host that all ranks share, where nothing is known of its links; None elsewhere.
        lanes: where several cables lead to one rank; None where nowhere.
    """

    fabric: Topology | Faulty
    options: Options
    store: Store
    network: Network
    engine: Engine
    cut: PieceRule
    joint: Callable[[Kind, int | None], JointPart | None] | None = None
    spare: Callable[[Kind, int | None], ScheduleTable | None] | None = None
    cores: int | None = None
    lanes: CableLanes | None = None

    def __post_init__(self) -> None:
        """Nothing is known yet; what is made is kept."""
        self.topology = left_of(self.fabric)
        self._digest = hashlib.sha256(fabric_name(self.topology).encode()).digest()[:8]
        self._tables: dict[tuple[Kind, int], ScheduleTable | str] = {}
        self._changes: dict[tuple[Kind, int], _Change] = {}  # of simple tables, which serve for a time
        self._template = lru_cache(TEMPLATES_KEPT)(self._made_ready)
        self.graph = lru_cache(GRAPHS_KEPT)(self._compile)
        self.groups = lru_cache(GRAPHS_KEPT)(self._grouped)

    def known(self, kind: Kind, root: int) -> ScheduleTable | str | None:
        """The table of a collective, or why it has none; None where nobody has asked yet."""
        return self._tables.get((kind, root))

    def is_to_change(self, table: ScheduleTable) -> bool:
        """Whether a table serves only until there is another."""
        return any(self._tables.get(key) is table for key in list(self._changes))

    def table(
        self, call: CollectiveFingerprint, sequence: Callable[[], int], *, waits: bool = False
    ) -> ScheduleTable | str:
        """The table for a call, or why there is none, so that gloo serves it; all ranks make this call.

        Args:
            call: what is to be done; its root is -1 where there is none.
            sequence: gives the number of the agreement where one is needed.
            waits: whether a simple table will not do.

        Raises:
            DisagreementError: the ranks mean different calls, or have different fabrics.
            ExecutionError: a rank died or did not come in time.
        """
        key = call.kind, call.root
        table, change = self._tables.get(key), self._changes.get(key)
        if table is not None and (change is None or not (change.is_due() or waits)):
            return table
        if self.network.size > 1:
            self.engine.agree(replace(call, sequence=sequence(), schedule=self._digest))
        if table is None:
            table = self._tables[key] = self._make(*key, waits=waits)
        elif change is not None:
            table = self._changed(*key, change, waits=waits)
            while waits and key in self._changes:  # asked anew, as rank 0 must answer within a time
                table = self._changed(*key, change, waits=waits)
        return table

    def close(self) -> None:
        """Look for nothing more that has not begun; what has is kept for the next time."""
        for change in self._changes.values():
            if change.found is not None:
                change.found.cancel()

    def _compile(self, kind: Kind, root: int, nbytes: int, count: int) -> tuple[bytes, TaskGraph]:
        """What `graph` gives and keeps: the schedule's digest, and what this rank does in a call.

        Args:
            kind: of a collective that has a table.
            root: likewise.
            nbytes: of the whole buffer.
            count: its elements.
        """
        digest, entry, pieces = self._cutting(kind, root, nbytes)
        graph = None
        if self.lanes is None:  # which split messages by their length
            graph = self._template(kind, root, entry.from_bytes, pieces).at(count)
        if graph is None:
            program = lower_rank(entry.schedule, self.network.rank, count, pieces=pieces)
            graph = compile_graph(program, lanes=self.lanes)
        return digest, graph

    def _grouped(
        self, kind: Kind, root: int, nbytes: int, count: int
    ) -> tuple[bytes, tuple[Program, tuple[MessageGroup, ...]]]:
        """What `groups` gives and keeps: the same as a program whose messages go in groups."""
        digest, entry, pieces = self._cutting(kind, root, nbytes)
        program = lower_rank(entry.schedule, self.network.rank, count, pieces=pieces, grouped=True)
        return digest, (program, groups_of(program))

    def _cutting(self, kind: Kind, root: int, nbytes: int) -> tuple[bytes, TableEntry, int]:
        """What serves a length, the digest of its schedule, and into how many pieces chunks are cut."""
        table = self._tables[kind, root]
        assert isinstance(table, ScheduleTable), "the caller has looked"
        entry = table.at(nbytes)
        return _digest(table, entry), entry, self.cut.pieces(entry.schedule, nbytes)

    def _made_ready(self, kind: Kind, root: int, from_bytes: int, pieces: int) -> GraphTemplate:
        """What `_template` keeps for all lengths that an entry of a table serves with so many pieces."""
        table = self._tables[kind, root]
        assert isinstance(table, ScheduleTable), "the caller has looked"
        return GraphTemplate.of(table.at(from_bytes).schedule, self.network.rank, pieces)

    def _make(self, kind: Kind, root: int, *, waits: bool) -> ScheduleTable | str:
        if self.network.size == 1:
            return "a group of one rank"
        if (spare := self._spare_table(kind, root, waits)) is not None:
            return spare
        try:
            table = self._shared(f"table/{kind}/{root}", lambda: self._first(kind, root, waits))
        except (InfeasibleError, TimedOutError, InputError) as error:
            if isinstance(error, InputError) and self.options.method == "auto":
                raise
            # A method that was asked for need not be one for every collective.
            if self.network.rank == 0:
                log.warning("%s on %s: gloo serves it: %s", kind, self.topology.name, error)
            return str(error)
        assert table is not None, "rank 0 gives a table or an error"
        if is_simple(table):
            self._changes.setdefault((kind, root), _Change())
        elif self.network.rank == 0:
            log.info("%s", table.summary())
        return table

    def _spare_table(self, kind: Kind, root: int, waits: bool) -> ScheduleTable | None:
        """The table made before links failed, which every rank has; others are looked for behind it."""
        if self.spare is None or waits or not self._is_at_once:
            return None
        of = root if root >= 0 else None
        table = self.spare(kind, of)
        if table is not None:
            with self._giving_up(f"table/{kind}/{root}"):
                self.network.connect(table.peers(self.network.rank))
            found = self._begin(kind, of) if self.network.rank == 0 else None
            self._changes[kind, root] = _Change(found=found)
        return table

    @property
    def _is_at_once(self) -> bool:
        """Whether another table may serve while one is looked for."""
        options = self.options
        return options.method == "auto" and options.start == "at once"

    def _changed(self, kind: Kind, root: int, change: _Change, *, waits: bool) -> ScheduleTable:
        """The table that is to serve from now on: the simple one still, where there is no other yet."""
        key, asked = (kind, root), change.asked
        change.asked += 1
        table = self._shared(f"change/{kind}/{root}/{asked}", lambda: self._later(key, waits))
        if table is None:
            simple = self._tables[key]
            assert isinstance(simple, ScheduleTable), "it serves"
            return simple
        del self._changes[key]
        self._tables[key] = table
        for kept in (self.graph, self.groups, self._template):
            kept.cache_clear()
        if self.network.rank == 0 and not is_simple(table):
            log.info("%s, from this call on", table.summary())
        return table

    def _shared(self, key: str, make: Callable[[], ScheduleTable | None]) -> ScheduleTable | None:
        """What rank 0 makes, and the connections that it needs."""
        rank = self.network.rank
        wait_s = self.options.deadline_s + KERNELS_S + 60
        if rank:
            self._wait_for(key, wait_s)
        with self._giving_up(key):
            alike = self.options.bits == "alike"
            table = share_table(self.store, key, rank, make, timeout_s=wait_s, alike=alike)
            if table is not None:
                self.network.connect(table.peers(rank))
        return table

    @contextlib.contextmanager
    def _giving_up(self, key: str) -> Iterator[None]:
        """Who cannot have a table, or connect as it needs it, gives up."""
        try:
            yield
        except ExecutionError as error:
            self.engine.give_up(f"rank {self.network.rank}: schedules ({key}): {error}")
            raise

    def _first(self, kind: Kind, root: int, waits: bool) -> ScheduleTable:
        """On rank 0: the table; a simple one where it has to be looked for, which begins."""
        of = root if root >= 0 else None
        part = None if self.joint is None else self.joint(kind, of)
        if part is not None:
            return given_table(part, self.options)
        if self._is_at_once and not waits:
            table = kept_table(self.fabric, kind, of, self.options, self.cores)
            if table is not None:
                return table
            table = simple_table(self.topology, Collective.on(self.topology, kind, root=of or 0))
            if table is not None:
                _say_once(
                    f"{kind} on {self.topology.name}: no schedules are kept; a simple one serves while they "
                    f"are found (up to {self.options.deadline_s:g} s)"
                )
                self._changes[kind, root] = _Change(found=self._begin(kind, of))
                return table
        return synthesize_table(self.fabric, kind, of, self.options, self.cores)

    def _begin(self, kind: Kind, of: int | None) -> Future[ScheduleTable]:
        """On rank 0: the table, looked for behind the calls."""
        return behind(lambda: synthesize_table(self.fabric, kind, of, self.options, self.cores))

    def _later(self, key: tuple[Kind, int], waits: bool) -> ScheduleTable | None:
        """On rank 0: the table found behind the calls, the simple one where none was; None for not yet."""
        found, table = self._changes[key].found, self._tables[key]
        assert found is not None and isinstance(table, ScheduleTable), "rank 0 looks for it"
        # No longer than the others wait for an answer: much may stand before it in the line.
        wait([found], self.options.deadline_s + KERNELS_S if waits else 0)
        if not found.done():
            return None
        try:
            return found.result()
        except Exception as error:
            log.warning("%s on %s: the simple schedule stays: %s", key[0], self.topology.name, error)
            return table

    def _wait_for(self, key: str, wait_s: float) -> None:
        """Until rank 0 has said something, or it is too late; a peer that dies meanwhile is noticed."""
        end, pause_s, is_said = time.monotonic() + wait_s, LOOK_EVERY_S, False

        def is_over() -> bool:
            nonlocal is_said
            with contextlib.suppress(RuntimeError):  # the store went with its rank; the channels know more
                is_said = is_said or bool(self.store.check([key]))
            return is_said or time.monotonic() >= until

        while not is_said and time.monotonic() < end:
            until = time.monotonic() + pause_s
            self.engine.wait_external(is_over, look_every_s=pause_s, needed=(0,))
            pause_s = min(2 * pause_s, SELDOM_S)


@cache
def _say_once(line: str) -> None:
    """A warning that many groups of one fabric would repeat."""
    log.warning("%s", line)


def _digest(table: ScheduleTable, entry: TableEntry) -> bytes:
    """What calls name a schedule of a table by."""
    return hashlib.sha256(f"{table.digest}/{entry.from_bytes}".encode()).digest()[:8]


@lru_cache(maxsize=16)  # for all groups on one fabric
def fabric_name(topology: Topology) -> str:
    """Its name and a digest of everything that schedules depend on."""
    text = json.dumps(topology_to_document(topology), sort_keys=True)
    return f"{topology.name} ({hashlib.sha256(text.encode()).hexdigest()[:12]})"

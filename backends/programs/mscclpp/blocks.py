"""Thread blocks of plans: their operations one after another, pipelines gone through."""

from __future__ import annotations

from collections.abc import Iterator

from arborcast.backends.programs.mscclpp import limits
from arborcast.backends.programs.mscclpp.entries import (
    MAX_CELLS,
    MAX_NUMBER,
    MAX_OPERATIONS,
    Entry,
    Reading,
    a_list,
    a_number,
    an_object,
    numbers_of,
)
from arborcast.backends.programs.mscclpp.lists import BlockLists, RankLists
from arborcast.backends.programs.mscclpp.moves import MOVES, Moves
from arborcast.backends.programs.program import (
    Acquire,
    Barrier,
    Operation,
    ProgramError,
    Release,
    Signal,
    Synchronize,
    ThreadBlock,
    Wait,
)
from arborcast.synth.formats.numerals import shorten

_BLOCK = {"id", "ops", "channels", "remote_buffer_refs"}
_OPERATION = {
    "name", "channel_type", "channel_ids", "src_buff", "dst_buff", "barrier_id", "num_threadblocks",
    "semaphore_ids", "tbg_info", "iter_context", "ops", "reduce_op",
}  # fmt: skip

_SIGNALS = {"signal", "rlxsignal"}
_WAITS = {"wait", "rlxwait"}
_NAMES = MOVES | _SIGNALS | _WAITS | {"nop", "barrier", "flush", "sem_acquire", "sem_release", "pipeline"}


class BlockReader:
    """One thread block: its lists of connections and buffers, and its operations."""

    def __init__(self, reading: Reading, rank: RankLists, place: int, entry: Entry) -> None:
        self._reading = reading
        self._entry = entry
        self._where = f"rank {rank.rank} block {place}"
        number = a_number(entry, "id", self._where, 0, MAX_NUMBER)
        if number != place:
            raise ProgramError(f"{self._where}: ids must be 0, 1, 2 in the order of the list, got {number}")
        reading.ignored(entry, _BLOCK, self._where)
        self._lists = BlockLists(reading, rank, entry, self._where)
        self._moves = Moves(reading, self._lists)

    def block(self) -> ThreadBlock:
        """All operations."""
        operations: list[Operation] = []
        entries = a_list(self._entry, "ops", self._where, MAX_OPERATIONS)
        count = 0
        for place, one in enumerate(entries):
            entry = an_object(one, self._where)
            where = f"{self._where} op {place}"
            count += 1
            if entry.get("name") == "pipeline":
                inner = [an_object(each, where) for each in a_list(entry, "ops", where, MAX_OPERATIONS)]
                count += len(inner)
                context = an_object(entry.get("iter_context"), f"{where}: iter_context")
                chunks = a_number(context, "num_chunks", where, 1, MAX_CELLS)
                a_number(context, "unit_size", where, 1, MAX_NUMBER)
                for iteration in range(self._reading.iterations):
                    for at, each in enumerate(inner):
                        operations += self._operations(each, f"{where}.{at}", (iteration, chunks))
            else:
                operations += self._operations(entry, where, None)
            if len(operations) > MAX_OPERATIONS:
                raise ProgramError(f"{self._where}: at most {MAX_OPERATIONS} operations are read")
        if count > limits.OPERATIONS:
            self._reading.fault(f"{self._where}: {count} operations, the executor takes {limits.OPERATIONS}")
        return ThreadBlock(tuple(operations), connections=self._lists.ends)

    def _operations(self, entry: Entry, where: str, part: tuple[int, int] | None) -> Iterator[Operation]:
        name = entry.get("name")
        if not isinstance(name, str) or name not in _NAMES or name == "pipeline":
            raise ProgramError(
                f"{where}: there is no operation {shorten(name)}" + (" here" if name == "pipeline" else "")
            )
        where = f"{where} ({name})"
        self._reading.ignored(entry, _OPERATION, where)
        kind = entry.get("channel_type", "none")
        if not isinstance(kind, str) or kind not in {"memory", "port", "switch", "none"}:
            raise ProgramError(f"{where}: channel_type must be memory, port or switch, got {shorten(kind)}")
        self._check_entry(entry, where)
        if name == "nop":
            yield Synchronize()
        elif name == "barrier":
            number = a_number(entry, "barrier_id", where, 0, MAX_NUMBER)
            if number >= limits.BARRIERS:
                self._reading.fault(f"{where}: barrier {number}, the executor has {limits.BARRIERS}")
            yield Barrier(number, a_number(entry, "num_threadblocks", where, 1, MAX_NUMBER))
        elif name in {"sem_acquire", "sem_release"}:
            semaphores = numbers_of(entry, "semaphore_ids", where, MAX_NUMBER)
            yield Acquire(semaphores) if name == "sem_acquire" else Release(semaphores)
        elif name == "flush":
            self._reading.note(f"{where}: the runtime takes its count from dst_buff, and flushes nothing")
        elif name in _SIGNALS | _WAITS:
            yield from self._signals(str(name), kind, entry, where)
        else:
            yield from self._moves.of(str(name), kind, entry, where, part)

    def _check_entry(self, entry: Entry, where: str) -> None:
        if entry.get("reduce_op", "sum") != "sum":
            self._reading.note(
                f"{where}: reduce_op {shorten(entry['reduce_op'])} is passed over; the runtime adds"
            )
        if len(a_list(entry, "channel_ids", where, 256, default=True)) > limits.CHANNELS_OF_OPERATION:
            self._reading.fault(
                f"{where}: more than {limits.CHANNELS_OF_OPERATION} channels write past their array"
            )
        for name in ("src_buff", "dst_buff"):
            if len(a_list(entry, name, where, 256, default=True)) > limits.BUFFERS_OF_OPERATION:
                self._reading.fault(
                    f"{where}: more than {limits.BUFFERS_OF_OPERATION} buffers write past their array"
                )
        if len(a_list(entry, "semaphore_ids", where, 256, default=True)) > limits.SEMAPHORES_OF_OPERATION:
            self._reading.fault(
                f"{where}: more than {limits.SEMAPHORES_OF_OPERATION} semaphores write past their array"
            )

    def _signals(self, name: str, kind: str, entry: Entry, where: str) -> Iterator[Operation]:
        if kind not in {"memory", "port"}:
            self._reading.note(f"{where}: does nothing with channel_type {kind}")
            return
        channels = self._lists.connections(kind, entry, where)
        relaxed = name.startswith("rlx") and kind == "memory"
        yield Signal(channels, relaxed) if name in _SIGNALS else Wait(channels, relaxed)

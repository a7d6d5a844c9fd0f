"""Buffers that operations name, as spans of chunks, cut to the part of a block's group or an iteration."""

from __future__ import annotations

from arborcast.backends.programs.mscclpp.entries import (
    MAX_CELLS,
    MAX_NUMBER,
    Entry,
    Reading,
    a_memory,
    a_number,
)
from arborcast.backends.programs.mscclpp.lists import BlockLists
from arborcast.backends.programs.program import Memory, ProgramError, Span


class Cut:
    """Entries of src_buff and dst_buff to spans, cut to the part of a block of a group or of an iteration."""

    def __init__(
        self,
        reading: Reading,
        lists: BlockLists,
        kind: str,
        where: str,
        group: tuple[int, int] | None,
        part: tuple[int, int] | None,
    ) -> None:
        self._reading = reading
        self._lists = lists
        self._kind = kind
        self._where = where
        self._group = group
        self._part = part
        self._finer = reading.finer
        self._counts: set[int] = set()

    def count(self, entry: Entry) -> int:
        """How many chunks the operation handles, by the entry that the runtime looks at."""
        size = a_number(entry, "size", self._where, 0, MAX_CELLS)
        if not size:
            raise ProgramError(f"{self._where}: size must be at least 1, got {size}")
        self._check_part(size)
        return self._cut(size)[1]

    def local(self, entry: Entry, count: int, *, packets: bool = False, always: Memory | None = None) -> Span:
        """Of the rank itself."""
        if "type" not in entry:
            raise ProgramError(f"{self._where}: must be a buffer of the rank itself, with type")
        memory = a_memory(entry["type"], f"{self._where}: type")
        if always is not None and memory is not always:
            self._reading.note(f"{self._where}: packets are read from scratch, whatever type says")
            memory = always
        return Span(memory, self.start(entry), count, None, packets)

    def remote(self, entry: Entry, count: int, *, packets: bool = False) -> Span:
        """Of another rank."""
        if "buffer_id" not in entry:
            raise ProgramError(f"{self._where}: must be a buffer of another rank, with buffer_id")
        number = a_number(entry, "buffer_id", self._where, 0, MAX_NUMBER)
        rank, memory = self._lists.buffer(self._kind, number, self._where)
        return Span(memory, self.start(entry), count, rank, packets)

    def start(self, entry: Entry) -> int:
        """The first chunk of the part."""
        index = a_number(entry, "index", self._where, 0, MAX_CELLS)
        size = a_number(entry, "size", self._where, 0, MAX_CELLS)
        self._counts.add(size)
        if len(self._counts - {0}) > 1:
            self._reading.note(f"{self._where}: sizes differ; the runtime takes one of them for all")
        return index * self._finer + self._cut(size)[0]

    def _cut(self, size: int) -> tuple[int, int]:
        """Where the part begins, and how long it is."""
        whole = size * self._finer
        if self._group is not None:
            number, of = self._group
            return whole * number // of, whole * (number + 1) // of - whole * number // of
        if self._part is not None:
            iteration, chunks = self._part
            unit = chunks * self._finer // self._reading.iterations
            return iteration * unit, min(unit, whole - iteration * unit) if whole > iteration * unit else unit
        return 0, whole

    def _check_part(self, size: int) -> None:
        if self._part is None:
            return
        chunks = self._part[1]
        if size < chunks:
            self._reading.fault(
                f"{self._where}: {size} of the {chunks} chunks of its pipeline; later iterations "
                "run beyond its end"
            )
        elif size > chunks:
            self._reading.note(f"{self._where}: {size} chunks, of which the pipeline handles {chunks}")

    def group(self, entry: Entry, count: int, *, packets: bool = False) -> tuple[Span, ...]:
        """Of all ranks of a switch channel."""
        memory, ranks = self._lists.group(entry, self._where)
        start = self.start(entry)
        return tuple(Span(memory, start, count, rank, packets) for rank in ranks)

"""A graph for buffers of any length: made once for a schedule and a number of pieces, then stretched.

    made for 24 elements, exact            stretched to 1,000
    send output[0:4] to rank 1             send output[0:166] to rank 1
    receive output[4:8] from rank 2        receive output[166:333] from rank 2

Who waits for whom depends on no length, as long as no piece is empty. So a graph is compiled for a length at
which nothing is rounded; there a slice tells which piece of which chunk it is. For another length the cuts of
`lowering.layout` are worked out anew for all actions at once, and the graph's actions stay what they are.
Slots of scratch stay, too: `Scratch` hands them out by lengths, which can differ by their rounding only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from arborcast.backends.dataflow.task_graph import Act, GraphTask, TaskGraph, compile_graph
from arborcast.backends.lowering.layout import Buffer, BufferSlice, Layout, blocks_in, exact_count
from arborcast.backends.lowering.lower import lower_part, part_of
from arborcast.synth.implicit_schedule import AnySchedule

_Ints: TypeAlias = NDArray[np.int64]
_Cell: TypeAlias = tuple[int, int]
"""A chunk, by its place among those of the rank, and a piece of it."""

LONGEST = 1 << 62
"""Beyond which a product of two numbers of elements does not fit into 64 bits."""


@dataclass(frozen=True)
class GraphTemplate:
    """What one rank does, for any length of the buffer.

    Attributes:
        graph: for the length at which nothing is rounded.
        blocks: in the whole buffer.
        cuts: (2, chunks): where each begins in its block and how long it is; the last is a whole block.
        block: the length of a block that these are counted for.
        pieces: (chunks,): into how many each is cut.
        cells: (2, actions): of each the chunk, by its place in `cuts`, and the piece.
        bases: (2, actions): of `into` and `source` the blocks before; of a slot of scratch -1 - its number.
        slots: (slots,): the chunk that each serves.
    """

    graph: TaskGraph
    blocks: int
    cuts: _Ints
    block: int
    pieces: _Ints
    cells: _Ints
    bases: _Ints
    slots: _Ints

    @classmethod
    def of(cls, schedule: AnySchedule, rank: int, pieces: int) -> GraphTemplate:
        """For a schedule whose blocks are equal; errors as for `lowering.lower`."""
        count = exact_count(schedule, pieces)
        layout, part = part_of(schedule, rank, count)
        graph, transfers = compile_graph(lower_part(layout, rank, part, pieces, grouped=False)), dict(part)
        spans = [(it.start, it.stop - it.start) for it in layout.places.values()]
        found = _Finder(layout, rank, pieces)
        rows = [
            found.row(it, None if it.peer < 0 else transfers[it.tag // pieces].chunk) for it in graph.actions
        ]
        cells, bases = np.array(rows, np.int64).reshape(-1, 2, 2).transpose(1, 2, 0)
        return cls(
            graph,
            blocks_in(schedule.collective),
            np.array([*spans, (0, layout.block)], np.int64).T,
            layout.block,
            np.array([pieces] * len(spans) + [1], np.int64),
            cells,
            bases,
            np.array(found.slots, np.int64),
        )

    def at(self, count: int) -> TaskGraph | None:
        """The graph for a buffer of so many elements; None where a piece would be empty.

        Args:
            count: as for `lowering.lower`, which says what is wrong with one that does not fit.
        """
        block, rest = divmod(count, self.blocks)
        if rest or self.block * max(block, 1) >= LONGEST:
            return None
        first = self.cuts[0] * block // self.block
        length = self.cuts.sum(0) * block // self.block - first
        if (length < self.pieces).any():
            return None
        (chunk, piece), pieces = self.cells, self.pieces[self.cells[0]]
        before = length[chunk] * piece // pieces
        slot = -(-length[self.slots] // self.pieces[self.slots])
        starts = np.concatenate([np.cumsum(slot) - slot, [0]])[-1 - np.minimum(self.bases, -1)]
        spans = np.empty((3, len(piece)), np.int64)
        spans[:2] = np.where(self.bases < 0, starts, self.bases * block + first[chunk] + before)
        spans[2] = length[chunk] * (piece + 1) // pieces - before
        ends = np.where(self.bases < 0, starts + spans[2], 0)
        return replace(self.graph, spans=spans, scratch_elements=int(ends.max(initial=0)))


class _Finder:
    """Says of exact actions, in their order, which piece of which chunk their slices are."""

    def __init__(self, layout: Layout, rank: int, pieces: int) -> None:
        self.chunks = {chunk: at for at, chunk in enumerate(layout.places)}
        self.slots: list[int] = []  # of scratch: the place of the chunk that each serves
        self._numbers: dict[int, int] = {}  # of slots, by where they begin
        self._pieces = pieces
        self._held: dict[int, _Cell] = {}  # what is there now
        self._known = dict(self._placed(layout, rank))

    def _placed(self, layout: Layout, rank: int) -> Iterator[tuple[BufferSlice, tuple[_Cell, int]]]:
        """What has its place in the input or the output: its cell, and the blocks before."""
        for block in layout.kept(rank) or ():
            yield block, ((len(self.chunks), 0), block.start // layout.block)
        for chunk, place in layout.places.items():
            for whole in (layout.initial(rank, chunk), layout.final(rank, chunk)):
                if whole is None:
                    continue
                base = (whole.start - place.start) // layout.block
                for piece in range(self._pieces):
                    yield whole.part(piece, self._pieces), ((self.chunks[chunk], piece), base)

    def row(self, action: GraphTask, chunk: int | None) -> tuple[int, int, int, int]:
        """A column of `cells` and one of `bases`; of a message with its chunk."""
        cell = self._cell(action) if chunk is None else (self.chunks[chunk], action.tag % self._pieces)
        if action.act is not Act.SEND and action.into.buffer is Buffer.SCRATCH:
            self._held[action.into.start] = cell
        return *cell, self._base(action.into, cell), self._base(action.source, cell)

    def _cell(self, action: GraphTask) -> _Cell:
        """Of a local action, whose sides are of one."""
        placed = next((it for it in (action.into, action.source) if it in self._known), None)
        return self._held[action.source.start] if placed is None else self._known[placed][0]

    def _base(self, part: BufferSlice, cell: _Cell) -> int:
        if part.buffer is not Buffer.SCRATCH:
            return self._known[part][1]
        if part.start not in self._numbers:
            self._numbers[part.start] = len(self.slots)
            self.slots.append(cell[0])
        return -1 - self._numbers[part.start]

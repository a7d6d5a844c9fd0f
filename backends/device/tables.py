"""The tables that the kernel, the checker and the model go through, and what each column means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[np.int64]

INPUT, OUTPUT, FIRST_STAGING = range(3)
"""Buffers of an item: this rank's input and output, then the staging of rank 0, 1, ..."""

TIME, LENGTH, WAITS, SOURCES, TARGETS, SIGNALS = 0, 1, 2, 4, 6, 8
"""Columns of a row: its time, elements of its chunk, then the begin and end of four lists of items."""

ROW, ITEM = 10, 3
"""Numbers of a row and of an item."""

ABORT = 0
"""The flag that no peer writes: the host raises it to make the kernel of its rank leave."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the tables of all ranks and lengths of a plan have in common.

    Attributes:
        lanes: programs that share each chunk of a group.
        ring: slots of a message, a power of two.
        depth: the largest time of a row.
        vector: elements of 16 bytes, by which all ranks cut pieces.
        flags: of each rank; each takes `lanes` words of 32 bits.
        staging: elements of each rank's slots.
    """

    lanes: int
    ring: int
    depth: int
    vector: int
    flags: tuple[int, ...]
    staging: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tables:
    """What one rank does for buffers of one length.

    A row makes one value of a chunk. It waits until its flags have come to their goals, writes the sum of its
    sources to all its targets, and raises flags. Piece `p` of a row is done at the row's time plus `p`.

    Attributes:
        rows: `ROW` numbers each, in order of time within a group.
        items: `ITEM` numbers each. A wait: the flag, the pieces by which it may lag, 0. A source or target:
            the buffer, the first element, and 0 or the elements of a slot. A signal: the rank, the flag, 0.
        groups: where the rows of each group begin, and the end of the last. A group is the work of one
            program in each lane, which talks to the same program of other ranks alone.
        pieces: of every chunk in every lane; the same on all ranks.
        aligned: whether every place in input and output begins at a multiple of the vector.
    """

    rows: Numbers
    items: Numbers
    groups: Numbers
    pieces: int
    aligned: bool

    def reach(self, buffer: int) -> int:
        """Elements that the rank's input or output must have at least."""
        lists = (
            (row[LENGTH], row[at], row[at + 1]) for row in self.rows.tolist() for at in (SOURCES, TARGETS)
        )
        ends = (
            start + length
            for length, first, end in lists
            for place, start, _ in self.items[first:end].tolist()
            if place == buffer
        )
        return max(ends, default=0)

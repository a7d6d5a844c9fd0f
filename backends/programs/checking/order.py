"""What happens before what in every execution: vector clocks over the steps of a program.

Of each step there are two moments: its *start*, after which it touches memory, and its *end*. What makes the
end of one step come before the start or the end of another:

    its block            the step before has ended
    flags                whoever is waited for has ended
    messages             a receive starts after its send has started, and ends after it has ended: they are
                         passed on piece by piece, in order
    room in the FIFO     a send ends after the receive `FIFO.messages` before it has ended, and starts after
                         the one before that has (with one part a message: after that one)

Long messages give the least order; shorter ones of fewer chunks only add to it. With LL and LL128 a step that
adds reads its source before the message is there, so that messages do not delay its start; and one that
passes on what it writes sends it first, so that its message does not tell that it has ended.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from arborcast.backends.programs.checking.structure import Flat

MOST_BYTES = 1 << 29
"""Of all clocks held at a time; longer programs are gone through several times, for some ranks each."""


class Order:
    """Happens-before among the steps of some ranks; for programs that come to their end."""

    def __init__(self, flat: Flat, order: Iterable[int], ranks: range) -> None:
        """Work out the clocks of the steps in `order`, for the blocks of `ranks`."""
        blocks = [block for block, (rank, _) in enumerate(flat.blocks) if rank in ranks]
        self._flat = flat
        self._column = {block: column for column, block in enumerate(blocks)}
        self._starts = np.zeros((len(flat.steps), max(1, len(blocks))), dtype=np.int32)
        self._ends = np.zeros_like(self._starts)
        self._chain, self._place = _chains(flat)
        sender, frees_end, frees_start = _partners(flat)
        early = flat.fifo.parts == 1  # what LL and LL128 do before others would
        first = set(flat.first)
        for step in order:
            start, end = self._starts[step], self._ends[step]
            if step not in first:
                start[:] = self._ends[step - 1]
            for before in flat.waits[step]:
                self._follow(start, before)
            send = sender.get(step)
            if send is not None and not (early and flat.steps[step].code.reads):
                np.maximum(start, self._starts[send], out=start)
            if step in frees_start:
                self._follow(start, frees_start[step])
            end[:] = start
            if send is not None:
                self._follow(end, send, unfinished=early and flat.steps[send].code.writes)
            if step in frees_end:
                self._follow(end, frees_end[step])
            column = self._column.get(flat.block[step])
            if column is not None:
                end[column] = step + 1

    def _follow(self, clock: npt.NDArray[np.int32], step: int, *, unfinished: bool = False) -> None:
        """Let a moment come after what comes before the end of a step; `unfinished`: not after that end."""
        column = self._column.get(self._flat.block[step])
        known = None if column is None or not unfinished else max(clock[column], self._starts[step, column])
        np.maximum(clock, self._ends[step], out=clock)
        if known is not None:
            clock[column] = known

    def clock(self, step: int) -> npt.NDArray[np.int32]:
        """For each block of these ranks, one more than the last step that has ended before this starts."""
        return self._starts[step]  # type: ignore[no-any-return]

    def passes(self, first: int, second: int) -> bool:
        """Whether one message passes a step and later another, piece by piece."""
        return self._chain[first] == self._chain[second] != -1 and self._place[first] < self._place[second]

    def column(self, block: int) -> int:
        """The column of a block in the clocks."""
        return self._column[block]


def _partners(flat: Flat) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """The send of each receive; the receive that makes room for a send to end, and for one to start."""
    sender: dict[int, int] = {}
    freed: dict[int, int] = {}
    long_freed: dict[int, int] = {}
    room = flat.fifo.messages
    more = 0 if flat.fifo.parts == 1 else 1
    for link, sends in flat.sends.items():
        receives = flat.receives.get(link, [])
        sender.update(zip(receives, sends, strict=False))
        freed.update(zip(sends[room:], receives, strict=False))
        long_freed.update(zip(sends[room + more :], receives, strict=False))
    return sender, freed, long_freed


def _chains(flat: Flat) -> tuple[list[int], list[int]]:
    """For each step its message, by the send that began it (-1: none), and how many steps it has passed."""
    sender, _, _ = _partners(flat)
    chain, place = [-1] * len(flat.steps), [0] * len(flat.steps)
    for index, step in enumerate(flat.steps):
        if not step.code.receives and not step.code.sends:
            continue
        way: list[int] = []
        at: int | None = index
        while at is not None and chain[at] < 0:
            way.append(at)
            at = sender.get(at) if flat.steps[at].code.receives else None
            if at is not None and at in way:
                break  # a circle of messages, which never begins
        number, before = (way[-1], -1) if at is None or chain[at] < 0 else (chain[at], place[at])
        for distance, member in enumerate(reversed(way), 1):
            chain[member], place[member] = number, before + distance
    return chain, place


def ranks_at_a_time(flat: Flat) -> int:
    """For how many ranks the clocks fit into memory at once, at least one."""
    ranks = 1 + max((rank for rank, _ in flat.blocks), default=0)
    width = max(1, len(flat.blocks) // ranks)
    return max(1, MOST_BYTES // (8 * max(1, len(flat.steps)) * width))

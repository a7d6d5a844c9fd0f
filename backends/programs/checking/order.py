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
adds reads its source before the message is there, so that messages do not delay its start.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from arborcast.backends.programs.checking.structure import Flat

MOST_BYTES = 1 << 29
"""Of all clocks held at a time; longer programs are gone through several times, for some ranks each."""


class Order:
    """Happens-before among the steps of one rank; for programs that come to their end.

    Attributes:
        chain: of each step, the message that it passes on: the number of the send that began it, -1 for none.
        place: how many ranks the message has passed before.
    """

    def __init__(self, flat: Flat, order: Iterable[int], ranks: range, *, by_messages: bool = True) -> None:
        """Work out the clocks of the steps in `order`, for the blocks of `ranks`."""
        self._flat = flat
        blocks = [block for block, (rank, _) in enumerate(flat.blocks) if rank in ranks]
        self._column = {block: column for column, block in enumerate(blocks)}
        width = max(1, len(blocks))
        self._starts = np.zeros((len(flat.steps), width), dtype=np.int32)
        ends = np.zeros((len(flat.steps), width), dtype=np.int32)
        self.chain, self.place = _chains(flat)
        sender, freed, long_freed = _partners(flat) if by_messages else ({}, {}, {})
        maximum = np.maximum
        first = set(flat.first)
        late = flat.fifo.parts == 1
        for step in order:
            start, end = self._starts[step], ends[step]
            if step not in first:
                start[:] = ends[step - 1]
            for before in flat.waits[step]:
                maximum(start, ends[before], out=start)
            send = sender.get(step)
            if send is not None and not (late and flat.steps[step].code.reads):
                maximum(start, self._starts[send], out=start)
            receive = long_freed.get(step)
            if receive is not None:
                maximum(start, ends[receive], out=start)
            end[:] = start
            if send is not None:
                maximum(end, ends[send], out=end)
            receive = freed.get(step)
            if receive is not None:
                maximum(end, ends[receive], out=end)
            column = self._column.get(flat.block[step])
            if column is not None:
                end[column] = step + 1

    def before(self, first: int, second: int) -> bool:
        """Whether a step of these ranks has always ended before another of the same rank starts."""
        column = self._column[self._flat.block[first]]
        return bool(self._starts[second, column] > first)

    def clock(self, step: int) -> npt.NDArray[np.int32]:
        """For each block of these ranks, one more than the last step that has ended before this starts."""
        return self._starts[step]  # type: ignore[no-any-return]

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
    """For each step the message that it takes part in, and at which place of its way."""
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

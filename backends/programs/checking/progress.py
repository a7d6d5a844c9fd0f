"""Whether a program comes to its end, whatever the timing, and in which order its steps may then end.

Blocks run in order; they wait for messages, for room in FIFOs and for flags. Nothing that a block does can
take away what another waits for: whoever can go on still can later. So one run in which everybody goes on as
far as possible decides it for all timings, and for all further loops of the program, too: what one loop
leaves behind is nothing.

A step of several chunks is cut into messages at run time, of as many chunks as fit a slot; small ones at
large sizes. Those of the least chunks need the most room: whatever ends so ends with longer ones, too, as
these take less slots and each may move when the last of its chunks did.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from arborcast.backends.programs.checking.structure import Flat, Link


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a block does not go on: at which step, for what, and for which block that is to do."""

    block: int
    step: int
    reason: str
    on: int | None


@dataclass(frozen=True)
class Progress:
    """How far all blocks come.

    Attributes:
        order: the steps that end, in an order in which they may.
        stuck: the blocks that do not come to their end.
    """

    order: tuple[int, ...]
    stuck: tuple[Waiting, ...]

    def trace(self) -> tuple[Waiting, ...]:
        """The shortest circle of blocks that wait for each other, or a block that nobody can help."""
        of_block = {waiting.block: waiting for waiting in self.stuck}
        best: list[Waiting] = []
        for waiting in self.stuck:
            path, places = [waiting], {waiting.block: 0}
            while (on := path[-1].on) is not None and on in of_block and on not in places:
                places[on] = len(path)
                path.append(of_block[on])
            found = path[places[on] :] if on is not None and on in places else path[-1:]
            if not best or len(found) < len(best):
                best = found
        return tuple(best)


def run(flat: Flat, together: int) -> Progress:
    """Let everybody go on as far as possible, with messages of so many chunks; time grows with the steps."""
    return _Run(flat, together).run()


class _Run:
    def __init__(self, flat: Flat, together: int) -> None:
        self._flat = flat
        self._together = together
        blocks = len(flat.blocks)
        self._place = flat.first[:blocks]
        self._left = [0] * blocks  # parts of messages of the step that a block is in
        self._done = bytearray(len(flat.steps))
        self._out: list[Link | None] = [None] * blocks
        self._in: list[Link | None] = [None] * blocks
        self._ends: dict[Link, list[int | None]] = {}
        for side, steps_of in ((0, flat.sends), (1, flat.receives)):
            for link, steps in steps_of.items():
                self._ends.setdefault(link, [None, None])[side] = flat.block[steps[0]]
                for step in steps:
                    (self._out if side == 0 else self._in)[flat.block[step]] = link
        self._sent = dict.fromkeys(self._ends, 0)
        self._taken = dict.fromkeys(self._ends, 0)
        self._waiters: dict[int, list[int]] = {}
        self._order: list[int] = []
        self._queue = deque(range(blocks))
        self._queued = bytearray(b"\1" * blocks)

    def run(self) -> Progress:
        while self._queue:
            block = self._queue.popleft()
            self._queued[block] = 0
            while self._place[block] < self._flat.first[block + 1] and self._advance(block):
                pass
        stuck = [
            self._why(block)
            for block in range(len(self._flat.blocks))
            if self._place[block] < self._flat.first[block + 1]
        ]
        return Progress(tuple(self._order), tuple(stuck))

    def _advance(self, block: int) -> bool:
        """Whether the step that the block is in has ended."""
        flat, index = self._flat, self._place[block]
        step = flat.steps[index]
        left = self._left[block]
        if not left:  # not begun
            if index in flat.never:
                return False
            for before in flat.waits[index]:
                if not self._done[before]:
                    self._waiters.setdefault(before, []).append(block)
                    return False
            left = -(-step.count // self._together) * flat.fifo.parts
        source = self._in[block] if step.code.receives else None
        target = self._out[block] if step.code.sends else None
        if (step.code.receives and source is None) or (step.code.sends and target is None):
            return False
        parts = left
        if source is not None:
            parts = min(parts, self._sent[source] - self._taken[source])
        if target is not None:
            parts = min(parts, flat.fifo.depth - self._sent[target] + self._taken[target])
        if parts:
            if source is not None:
                self._taken[source] += parts
                self._wake(self._ends[source][0])
            if target is not None:
                self._sent[target] += parts
                self._wake(self._ends[target][1])
        self._left[block] = left - parts
        if left > parts:
            return False
        self._left[block] = 0
        self._done[index] = 1
        self._order.append(index)
        self._place[block] += 1
        for waiter in self._waiters.pop(index, ()):
            self._wake(waiter)
        return True

    def _wake(self, block: int | None) -> None:
        if block is not None and not self._queued[block]:
            self._queued[block] = 1
            self._queue.append(block)

    def _why(self, block: int) -> Waiting:
        flat, index = self._flat, self._place[block]
        step = flat.steps[index]
        if index in flat.never:
            return Waiting(block, index, flat.never[index], None)
        for before in flat.waits[index]:
            if not self._done[before]:
                return Waiting(block, index, f"waits for {flat.name(before)}", flat.block[before])
        source, target = self._in[block], self._out[block]
        if step.code.receives and (source is None or self._sent[source] == self._taken[source]):
            if source is None:
                return Waiting(
                    block, index, "waits for a message, and the block has no one to receive from", None
                )
            return Waiting(
                block,
                index,
                f"waits for a message of rank {source[0]} on channel {source[2]}",
                self._ends[source][0],
            )
        if target is None:
            return Waiting(block, index, "has no one to send to", None)
        return Waiting(
            block,
            index,
            f"waits for room in the FIFO to rank {target[1]} on channel {target[2]}, which holds "
            f"{flat.fifo.messages} messages",
            self._ends[target][1],
        )

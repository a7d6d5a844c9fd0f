"""Two-sided programs run once: steps through FIFOs, and what happens before what in every execution.

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

A step of several chunks is cut into messages at run time, of as many chunks as fit a slot; small ones at
large sizes. Those of the least chunks need the most room: whatever ends so ends with longer ones, too, as
these take less slots and each may move when the last of its chunks did. What one loop of the program leaves
behind is nothing, so that one loop is enough.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from arborcast.backends.programs.checking.execution import Access, Clock, Execution, Waiting
from arborcast.backends.programs.checking.memory import Values
from arborcast.backends.programs.checking.structure import Flat, Link
from arborcast.backends.programs.limits import chunks_together, largest_bytes
from arborcast.backends.programs.program import Code, GlobalProgram, Step

_READS, _WRITES = "reads", "writes"


@dataclass(slots=True)
class _MessageInFlight:
    """One on its way: the clocks of its send, which send began it and how many steps it has passed since."""

    start: Clock
    end: Clock
    writes: bool
    begun_by: int
    passed: int
    values: list[int]


@dataclass(slots=True)
class _ConnectionState:
    """A connection: the block at each end, parts sent and taken, messages in it, ends of its receives."""

    sender: int = -1
    receiver: int = -1
    sent: int = 0
    taken: int = 0
    messages: deque[_MessageInFlight] = field(default_factory=deque)
    ends: dict[int, Clock] = field(default_factory=dict)
    sends: int = 0
    receives: int = 0


class TwoSidedExecution(Execution):
    """One loop of a program of steps."""

    def __init__(
        self,
        program: GlobalProgram,
        flat: Flat,
        *,
        in_place: bool,
        together: int | None = None,
        moves: bool = True,
        values: Values | None = None,
    ) -> None:
        """Messages have `together` chunks, by default as at the largest size; `moves`: whether data move."""
        super().__init__(program, in_place, 1, values)
        self._flat = flat
        self._together = chunks_together(program) if together is None else together
        self._moves = moves
        fifos: dict[Link, _ConnectionState] = {}
        self._out: list[_ConnectionState | None] = [None] * len(self._blocks)
        self._in: list[_ConnectionState | None] = [None] * len(self._blocks)
        self._link: dict[int, Link] = {}
        for link, steps in flat.sends.items():
            fifo = fifos[link] = _ConnectionState(sender=flat.block[steps[0]])
            for step in steps:
                self._out[flat.block[step]] = fifo
        for link, steps in flat.receives.items():
            fifo = fifos.setdefault(link, _ConnectionState())
            fifo.receiver = flat.block[steps[0]]
            for step in steps:
                self._in[flat.block[step]] = fifo
        self._left = [0] * len(self._blocks)  # parts of messages of the step that a block is in
        self._ended = bytearray(len(flat.steps))
        self._end_of: list[Clock | None] = [None] * len(self._blocks)
        self._posted: dict[int, Clock] = {}
        self._awaited = Counter(step for waits in flat.waits for step in waits)
        self._message: dict[int, tuple[int, int]] = {}  # by which send it began, how many steps it passed

    def _execute(self, stream: int) -> object | None:
        flat, index = self._flat, self._index(stream)
        step = flat.steps[index]
        if not self._left[stream]:  # not begun
            if index in flat.never:
                return "never"
            for before in flat.waits[index]:
                if not self._ended[before]:
                    return before
            self._left[stream] = -(-step.count // self._together) * flat.fifo.parts
        come = self._in[stream] if step.code.receives else None
        go = self._out[stream] if step.code.sends else None
        if (step.code.receives and come is None) or (step.code.sends and go is None):
            return "never"
        parts = self._left[stream]
        if come is not None:
            parts = min(parts, come.sent - come.taken)
        if go is not None:
            parts = min(parts, flat.fifo.depth - go.sent + go.taken)
        self._left[stream] -= parts
        if come is not None and parts:
            come.taken += parts
            self._wake(id(come))
        if go is not None and parts:
            go.sent += parts
            self._wake(id(go))
        if self._left[stream]:
            return id(come) if come is not None and come.sent == come.taken else id(go)
        self._ended[index] = 1
        self._wake(index)
        if self._moves:
            self._do(stream, index, step, come, go)
        return None

    def _index(self, stream: int) -> int:
        return self._flat.first[stream] + self._place[stream]

    def _do(
        self, stream: int, index: int, step: Step, come: _ConnectionState | None, go: _ConnectionState | None
    ) -> None:
        """The clocks of a step, its accesses and its values."""
        fifo = self._flat.fifo
        early = fifo.parts == 1  # what LL and LL128 do before others would
        before = self._end_of[stream]
        start = np.zeros(len(self._blocks), dtype=np.int32) if before is None else before.copy()
        for other in self._flat.waits[index]:
            np.maximum(start, self._posted[other], out=start)
            self._awaited[other] -= 1
            if not self._awaited[other]:
                del self._posted[other]
        message = None if come is None else come.messages.popleft()
        if message is not None and not (early and step.code.reads):
            np.maximum(start, message.start, out=start)
        freed = None
        if go is not None:
            number, go.sends = go.sends - fifo.messages, go.sends + 1
            long_freed = go.ends.pop(number if early else number - 1, None)
            freed = long_freed if early else go.ends.get(number)
            if long_freed is not None:
                np.maximum(start, long_freed, out=start)
        self._message[index] = (index, 0) if message is None else (message.begun_by, message.passed + 1)
        moved = self._access(stream, step, start, message)
        end = start.copy()
        if message is not None and come is not None:
            known = max(end[come.sender], message.start[come.sender])
            np.maximum(end, message.end, out=end)
            if early and message.writes:  # its sender has not ended
                end[come.sender] = known
        if freed is not None:
            np.maximum(end, freed, out=end)
        end[stream] = self._place[stream] + 1
        self._end_of[stream] = end
        if self._awaited[index]:
            self._posted[index] = end
        if come is not None:
            come.ends[come.receives] = end
            come.receives += 1
        if go is not None:
            sent = self._values.sent(self._blocks[stream][0], moved)
            go.messages.append(_MessageInFlight(start, end, step.code.writes, *self._message[index], sent))

    def _access(self, stream: int, step: Step, start: Clock, message: _MessageInFlight | None) -> list[int]:
        """Touch what a step reads and writes; what it writes or sends."""
        rank, place = self._blocks[stream][0], self._place[stream]
        clock: Sequence[int] | Clock = start if step.count < 8 else start.tolist()  # the faster to look at
        cells, add = self._cells[rank], self._values.sum
        moved = None if message is None else message.values
        source = None if step.source is None else self._place_of(stream, step.source)[1]
        target = None if step.target is None else self._place_of(stream, step.target)[1]
        if source is not None:
            for offset, cell in enumerate(source):
                self._touch(rank, cell, Access(stream, place, offset, _READS), clock, writes=False)
            read = cells[source.start : source.stop]
            moved = read if moved is None else list(map(add, read, moved))
        assert moved is not None, "a step reads or receives"
        if target is not None:
            if source is not None:
                self._overlap(stream, [source], [target])
            for offset, cell in enumerate(target):
                self._touch(rank, cell, Access(stream, place, offset, _WRITES), clock, writes=True)
            if step.code is Code.REDUCE:
                moved = list(map(add, moved, cells[target.start : target.stop]))
            cells[target.start : target.stop] = moved
        return moved

    def _apart(
        self,
        rank: int,
        cell: int,
        first: Access,
        second: Access,
        clock: Sequence[int] | Clock,
        made_of: frozenset[int],
    ) -> bool:
        """Whether they are of one block, or one message passes both, piece by piece, the earlier first."""
        if first.stream == second.stream:
            return True
        if first.offset > second.offset or (first.manner == _WRITES and self._flat.fifo.parts == 1):
            return False
        one, other = (self._message[self._flat.first[it.stream] + it.number] for it in (first, second))
        return one[0] == other[0] and one[1] < other[1]

    def _why(self, stream: int) -> Waiting:
        flat, index, place = self._flat, self._index(stream), self._place[stream]
        step, block = flat.steps[index], self._block[stream]
        if index in flat.never:
            return Waiting(stream, place, flat.never[index], None)
        for before in flat.waits[index]:
            if not self._ended[before]:
                return Waiting(stream, place, f"waits for {flat.name(before)}", flat.block[before])
        come, go = self._in[stream], self._out[stream]
        if step.code.receives and come is None:
            reason = "waits for a message, and the block has no one to receive from"
            return Waiting(stream, place, reason, None)
        if step.code.receives and come is not None and come.sent == come.taken:
            what = f"a message of rank {block.receive} on channel {block.channel}"
            return Waiting(stream, place, f"waits for {what}", come.sender if come.sender >= 0 else None)
        if go is None:
            return Waiting(stream, place, "has no one to send to", None)
        what = f"room in the FIFO to rank {block.send} on channel {block.channel}"
        reason = f"waits for {what}, which holds {flat.fifo.messages} messages"
        return Waiting(stream, place, reason, go.receiver if go.receiver >= 0 else None)

    def _when(self) -> str:
        """From which size on, where smaller ones end: messages of more chunks need less room."""
        most = max((step.count for step in self._flat.steps), default=1)
        for chunks in range(self._together + 1, most + 1):
            tried = TwoSidedExecution(
                self._program, self._flat, in_place=self._in_place, together=chunks, moves=False
            )
            if not tried._go():
                size = largest_bytes(self._program, chunks)
                return f" above {size} bytes, where less than {chunks} chunks fit a message"
        return ""

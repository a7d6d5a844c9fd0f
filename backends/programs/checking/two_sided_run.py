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

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from arborcast.backends.programs.checking.execution import Access, AnyClock, Clash, Clock, Execution, Waiting
from arborcast.backends.programs.checking.memory import Values
from arborcast.backends.programs.checking.structure import Link
from arborcast.backends.programs.limits import chunks_together, fifo_of, largest_bytes
from arborcast.backends.programs.program import Code, GlobalProgram, Step

_READS, _WRITES = "reads", "writes"

_At: TypeAlias = tuple[int, int]
"""A stream, and the place of a step in it."""


@dataclass(slots=True)
class _MessageInFlight:
    """One on its way: the clocks of its send, which send began it and how many steps it has passed since."""

    start: Clock
    end: Clock
    writes: bool
    begun_by: _At
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
        *,
        in_place: bool,
        together: int | None = None,
        moves: bool = True,
        values: Values | None = None,
    ) -> None:
        """Messages have `together` chunks, by default as at the largest size; `moves`: whether data move."""
        super().__init__(program, in_place, 1, values)
        self._fifo = fifo_of(program.protocol)
        self._together = chunks_together(program) if together is None else together
        self._moves = moves
        self._steps = [[step for step in row if isinstance(step, Step)] for row in self._operations]
        links: dict[Link, _ConnectionState] = defaultdict(_ConnectionState)
        self._out: list[_ConnectionState | None] = [None] * len(self._blocks)
        self._in: list[_ConnectionState | None] = [None] * len(self._blocks)
        for stream, ((rank, _), block) in enumerate(zip(self._blocks, self._block, strict=True)):
            if block.send is not None and any(step.code.sends for step in self._steps[stream]):
                self._out[stream] = link = links[rank, block.send, block.channel]
                link.sender = stream
            if block.receive is not None and any(step.code.receives for step in self._steps[stream]):
                self._in[stream] = link = links[block.receive, rank, block.channel]
                link.receiver = stream
        self._never: dict[_At, str] = {}
        self._waits = [
            [tuple(self._posting((stream, place), step)) for place, step in enumerate(row)]
            for stream, row in enumerate(self._steps)
        ]
        self._left = [0] * len(self._blocks)  # parts of messages of the step that a block is in
        self._end_of: list[Clock | None] = [None] * len(self._blocks)
        self._posted: dict[_At, Clock] = {}
        self._awaited = Counter(at for row in self._waits for waits in row for at in waits)
        self._message: dict[_At, tuple[_At, int]] = {}  # by which send it began, how many steps it passed

    def _posting(self, at: _At, step: Step) -> Iterator[_At]:
        """Steps whose flags a step waits for: of each block the first that posts, from the named one on."""
        rank, number = self._blocks[at[0]]
        for after in step.after:
            if after.block >= len(self._program.parts[rank].blocks):
                self._never[at] = f"waits for block {after.block}, which does not exist"
                continue
            other = at[0] - number + after.block
            row = enumerate(self._steps[other])
            later = next((place for place, it in row if it.posts and place >= after.step), None)
            if later is None:
                named = f"step {after.step} of block {after.block}"
                self._never[at] = f"waits for {named}, and none from there on posts (hasdep)"
            else:
                yield other, later

    def _has_ended(self, at: _At) -> bool:
        return self._place[at[0]] > at[1]

    def _execute(self, stream: int) -> object | None:
        at = stream, self._place[stream]
        step = self._steps[stream][at[1]]
        if not self._left[stream]:  # not begun
            if at in self._never:
                return "never"
            for before in self._waits[stream][at[1]]:
                if not self._has_ended(before):
                    return before
            self._left[stream] = -(-step.count // self._together) * self._fifo.parts
        come = self._in[stream] if step.code.receives else None
        go = self._out[stream] if step.code.sends else None
        if (step.code.receives and come is None) or (step.code.sends and go is None):
            return "never"
        parts = self._left[stream]
        if come is not None:
            parts = min(parts, come.sent - come.taken)
        if go is not None:
            parts = min(parts, self._fifo.depth - go.sent + go.taken)
        self._left[stream] -= parts
        if come is not None and parts:
            come.taken += parts
            self._wake(id(come))
        if go is not None and parts:
            go.sent += parts
            self._wake(id(go))
        if self._left[stream]:
            return id(come) if come is not None and come.sent == come.taken else id(go)
        self._wake(at)
        if self._moves:
            self._do(at, step, come, go)
        return None

    def _do(self, at: _At, step: Step, come: _ConnectionState | None, go: _ConnectionState | None) -> None:
        """The clocks of a step, its accesses and its values."""
        stream, fifo = at[0], self._fifo
        early = fifo.parts == 1  # what LL and LL128 do before others would
        before = self._end_of[stream]
        start = np.zeros(len(self._blocks), dtype=np.int32) if before is None else before.copy()
        for other in self._waits[stream][at[1]]:
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
        self._message[at] = (at, 0) if message is None else (message.begun_by, message.passed + 1)
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
        if self._awaited[at]:
            self._posted[at] = end
        if come is not None:
            come.ends[come.receives] = end
            come.receives += 1
        if go is not None:
            sent = self._values.sent(self._blocks[stream][0], moved)
            go.messages.append(_MessageInFlight(start, end, step.code.writes, *self._message[at], sent))

    def _access(self, stream: int, step: Step, start: Clock, message: _MessageInFlight | None) -> list[int]:
        """Touch what a step reads and writes; what it writes or sends."""
        rank, place = self._blocks[stream][0], self._place[stream]
        clock: AnyClock = start if step.count < 8 else start.tolist()  # the faster to look at
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

    def _apart(self, met: Clash) -> bool:
        """Whether they are of one block, or one message passes both, piece by piece, the earlier first."""
        first, second = met.first, met.second
        if first.stream == second.stream:
            return True
        if first.offset > second.offset or (first.manner == _WRITES and self._fifo.parts == 1):
            return False
        one, other = (self._message[it.stream, it.number] for it in (first, second))
        return one[0] == other[0] and one[1] < other[1]

    def _why(self, stream: int) -> Waiting:
        place, block = self._place[stream], self._block[stream]
        step = self._steps[stream][place]
        if (stream, place) in self._never:
            return Waiting(stream, place, self._never[stream, place], None)
        for before in self._waits[stream][place]:
            if not self._has_ended(before):
                return Waiting(stream, place, f"waits for {self._named(*before)}", before[0])
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
        reason = f"waits for {what}, which holds {self._fifo.messages} messages"
        return Waiting(stream, place, reason, go.receiver if go.receiver >= 0 else None)

    def _when(self) -> str:
        """From which size on, where smaller ones end: messages of more chunks need less room."""
        most = max((step.count for row in self._steps for step in row), default=1)
        for chunks in range(self._together + 1, most + 1):
            tried = TwoSidedExecution(self._program, in_place=self._in_place, together=chunks, moves=False)
            if not tried._go():
                size = largest_bytes(self._program, chunks)
                return f" above {size} bytes, where less than {chunks} chunks fit a message"
        return ""

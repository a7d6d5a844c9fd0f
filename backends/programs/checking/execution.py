"""A program run once with contributor sets, and every pair of accesses of one cell that nothing orders.

Nothing that a block does can take away what another waits for: whoever can go on still can later. So one run
in which everybody goes on as far as possible decides for all timings whether a program ends. Clocks say for
all of them what comes before what, and without races all move the same values. A clock has a column for each
*stream*: a thread block first of all. What operations are, and what their clocks know, is for `two_sided_run`
and `one_sided_run` to say.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from arborcast.backends.programs.checking.memory import UNDEFINED, Values, buffers, given, wanted
from arborcast.backends.programs.checking.verdict import TraceLine
from arborcast.backends.programs.program import GlobalProgram, Memory, Operation, Span, Step

Clock: TypeAlias = npt.NDArray[np.int32]
"""For each stream, how many of its operations have ended before."""


class Access(NamedTuple):
    """Who touched a cell: stream, number of its operation, place in the span, and in which manner."""

    stream: int
    number: int
    offset: int
    manner: str | None


AnyClock: TypeAlias = Sequence[int] | Clock


class Clash(NamedTuple):
    """Two accesses of a cell that the clock of the second does not order, and the reads that it tells of."""

    rank: int
    cell: int
    first: Access
    second: Access
    clock: AnyClock
    made_of: frozenset[int]


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a block does not go on: at which operation, for what, and for which block that is to do."""

    block: int
    place: int
    reason: str
    on: int | None


@dataclass
class Outcome:
    """What was found: one line each, and a trace of the first, which may be a circle."""

    stuck: list[str] = field(default_factory=list)
    races: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    trace: tuple[TraceLine, ...] = ()
    circle: bool = False


class Execution:
    """All calls of a program, in place or not."""

    def __init__(self, program: GlobalProgram, in_place: bool, calls: int, values: Values | None) -> None:
        """Lay out memory for so many calls; what stands in it are contributions, or other values."""
        self._program = program
        self._in_place = in_place
        self._calls = calls
        self._call = 0
        self._blocks = [
            (rank, number) for rank, part in enumerate(program.parts) for number in range(len(part.blocks))
        ]
        self._block = [program.parts[rank].blocks[number] for rank, number in self._blocks]
        self._operations: list[tuple[Operation, ...]] = [block.operations for block in self._block]
        self._callers = len(self._blocks)
        self._outcome = Outcome()
        self._values = values or Values(program.ranks)
        self._layout = [buffers(program, rank, in_place=in_place) for rank in range(program.ranks)]
        self._cells = [[UNDEFINED] * layout.cells for layout in self._layout]
        self._written: list[dict[int, Access]] = [{} for _ in program.parts]
        self._read: list[dict[int, list[Access]]] = [{} for _ in program.parts]
        self._seen: set[tuple[int, int, int, int]] = set()

    def run(self) -> Outcome:
        """All calls, then what callers do after the last one."""
        collects = gc.isenabled()
        gc.disable()  # of millions of values none is in a cycle; looking for one takes a third of the time
        try:
            self._run()
        finally:
            if collects:
                gc.enable()
        return self._outcome

    def _run(self) -> None:
        for call in range(self._calls + 1):
            self._call = call
            for rank in range(self._program.ranks):
                self._begin(rank)
            if call == self._calls:
                return
            stuck = self._go()
            if stuck:
                self._tell_stuck(stuck)
                return
            for rank in range(self._program.ranks):
                self._end(rank)
            if self._outcome.wrong:
                return

    def _begin(self, rank: int) -> None:
        """New inputs, and outputs that mean nothing."""
        cells, start = self._cells[rank], self._layout[rank].start
        cells[: start[Memory.SCRATCH]] = [UNDEFINED] * start[Memory.SCRATCH]
        for chunk, value in enumerate(given(self._program, rank)):
            cells[start[Memory.INPUT] + chunk] = self._values.given(rank, value)

    def _end(self, rank: int) -> None:
        """What should stand in the output now, and who wrote the caller's input where that is another."""
        start = self._layout[rank].start
        for chunk, value in enumerate(wanted(self._program, rank)):
            wrong = self._values.unlike(rank, value, self._cells[rank][start[Memory.OUTPUT] + chunk])
            if wrong:
                self._outcome.wrong.append(f"{self._in_call()}rank {rank}: o{chunk} {wrong}")
        if not self._in_place and self._call == 0:
            first = start[Memory.INPUT]
            for cell in range(first, first + self._layout[rank].size[Memory.INPUT]):
                access = self._written[rank].get(cell)
                if access is not None and access.stream < self._callers:
                    name = self._name(access)
                    self._outcome.wrong.append(f"{name} writes the caller's input on rank {rank}")

    def _go(self) -> list[Waiting]:
        """Everybody as far as possible; who did not come to the end of the call."""
        self._place = [0] * len(self._blocks)
        self._waiters: dict[object, list[int]] = {}
        self._queue = deque(range(len(self._blocks)))
        while self._queue:
            stream = self._queue.popleft()
            while self._place[stream] < len(self._operations[stream]):
                reason = self._execute(stream)
                if reason is not None:
                    self._waiters.setdefault(reason, []).append(stream)
                    break
                self._place[stream] += 1
        return [
            self._why(stream)
            for stream in range(len(self._blocks))
            if self._place[stream] < len(self._operations[stream])
        ]

    def _execute(self, stream: int) -> object | None:
        """Do the operation that a block is at; what it waits for where it cannot."""
        raise NotImplementedError

    def _why(self, stream: int) -> Waiting:
        """For what a block waits, and which block is to do it."""
        raise NotImplementedError

    def _when(self) -> str:
        """In which cases a program hangs, where not in all."""
        return ""

    def _wake(self, what: object) -> None:
        self._queue.extend(self._waiters.pop(what, ()))

    def _tell_stuck(self, stuck: Sequence[Waiting]) -> None:
        trace = _circle(stuck)
        texts = [f"{self._named(waiting.block, waiting.place)} {waiting.reason}" for waiting in trace]
        last = trace[-1].on
        if last is not None and all(waiting.block != last for waiting in stuck):
            rank, block = self._blocks[last]
            texts[-1] += f", and rank {rank} block {block} is at its end"
        self._outcome.circle = last == trace[0].block
        self._outcome.stuck.append(
            f"{self._in_call()}hangs{self._when()}, {len(stuck)} blocks wait: {'; '.join(texts)}"
        )
        self._outcome.trace = tuple(
            TraceLine(*self._blocks[waiting.block], waiting.place, text)
            for waiting, text in zip(trace, texts, strict=True)
        )

    def _touch(
        self,
        rank: int,
        cell: int,
        access: Access,
        clock: AnyClock,
        *,
        writes: bool,
        flagged: bool = False,
        made_of: frozenset[int] = frozenset(),
    ) -> None:
        """One access against the last write of its cell and, of a write, the reads since then.

        `flagged`: packets said that what is read was written; `made_of`: reads that what is written tells of.
        """
        written, read = self._written[rank], self._read[rank]
        last = written.get(cell)
        if last is not None and not flagged and clock[last.stream] <= last.number:
            self._race(Clash(rank, cell, last, access, clock, made_of))
        if writes:
            for other in read.pop(cell, ()):
                if clock[other.stream] <= other.number:
                    self._race(Clash(rank, cell, other, access, clock, made_of))
            written[cell] = access
        else:
            read.setdefault(cell, []).append(access)

    def _race(self, met: Clash) -> None:
        """Tell, once for two operations, of accesses that nothing orders: no clock does."""
        if self._apart(met):
            return
        first, second = met.first, met.second
        one, other = self._given_by(first), self._given_by(second)
        key = *one[:2], *other[:2]
        if key in self._seen:
            return
        self._seen.add(key)
        of_callers = max(first.stream, second.stream) >= self._callers
        named = self._name(first, "before its call"), self._name(second, "after its call")
        text = f"nothing orders {named[0]} and {named[1]}"
        if one[2] != other[2] and not of_callers:
            text += ", of the next call" if other[2] == one[2] + 1 else ", of the call after the next"
        text += f": both touch {self._cell(met.rank, met.cell)}"
        (self._outcome.early if of_callers or one[2] != other[2] else self._outcome.races).append(text)
        if not self._outcome.trace:
            self._outcome.trace = tuple(
                TraceLine(*self._blocks[stream], place, self._name(access))
                for access, (stream, place, _) in ((first, one), (second, other))
                if access.stream < self._callers
            )

    def _apart(self, met: Clash) -> bool:
        """Whether something besides the clocks orders two accesses."""
        raise NotImplementedError

    def _overlap(self, stream: int, read: Iterable[range], written: Iterable[range]) -> None:
        """Tell where an operation reads what it writes at another place, of the cells of one rank."""
        written = list(written)
        for cells in read:
            for others in written:
                if cells.start != others.start and max(cells.start, others.start) < min(
                    cells.stop, others.stop
                ):
                    named = self._named(stream, self._place[stream])
                    self._outcome.races.append(f"{named} reads what it writes elsewhere")

    def _given_by(self, access: Access) -> tuple[int, int, int]:
        """The block, the place in it, and the call of the operation that did an access."""
        call, place = divmod(access.number, len(self._operations[access.stream]))
        return access.stream, place, call

    def _place_of(self, stream: int, span: Span) -> tuple[int, range]:
        """The rank and the cells of a span."""
        rank = self._blocks[stream][0] if span.rank is None else span.rank
        start = self._layout[rank].start[span.memory] + span.start
        return rank, range(start, start + span.count)

    def _cell(self, rank: int, cell: int) -> str:
        layout, scratch = self._layout[rank], self._program.parts[rank].scratch_chunks
        if cell >= layout.start[Memory.SCRATCH]:
            return f"s{(cell - layout.start[Memory.SCRATCH]) % scratch} of rank {rank}"
        names = [
            f"{memory}{cell - layout.start[memory]}"
            for memory in (Memory.INPUT, Memory.OUTPUT)
            if 0 <= cell - layout.start[memory] < layout.size[memory]
        ]
        return f"{' = '.join(names)} of rank {rank}"

    def _name(self, access: Access, when: str = "") -> str:
        if access.stream >= self._callers:
            return f"the caller of rank {access.stream - self._callers} {when}"
        stream, place, _ = self._given_by(access)
        return self._named(stream, place) + (" by its proxy" if access.stream >= len(self._blocks) else "")

    def _named(self, stream: int, place: int) -> str:
        rank, block = self._blocks[stream]
        operation = self._operations[stream][place]
        what = "step" if isinstance(operation, Step) else "operation"
        text = str(operation) if "__str__" in type(operation).__dict__ else type(operation).__name__.lower()
        return f"rank {rank} block {block} {what} {place} ({text})"

    def _in_call(self) -> str:
        return f"call {self._call + 1}: " if self._call else ""


def _circle(stuck: Sequence[Waiting]) -> list[Waiting]:
    """The shortest circle of blocks that wait for each other, or a block that nobody can help."""
    of_block = {waiting.block: waiting for waiting in stuck}
    best: list[Waiting] = []
    for waiting in stuck:
        path, places = [waiting], {waiting.block: 0}
        while (on := path[-1].on) is not None and on in of_block and on not in places:
            places[on] = len(path)
            path.append(of_block[on])
        found = path[places[on] :] if on is not None and on in places else path[-1:]
        if not best or len(found) < len(best):
            best = found
    return best

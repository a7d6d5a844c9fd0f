"""A program run once with contributor sets, chunk by chunk, and every pair of accesses that nothing orders.

Without races every execution moves the same values, so that one is enough. A race is two accesses of one
cell, one of them a write, such that neither always comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from arborcast.backends.programs.checking.memory import Value, buffers, given, wanted
from arborcast.backends.programs.checking.order import Order
from arborcast.backends.programs.checking.structure import Flat
from arborcast.backends.programs.program import GlobalProgram, Memory, Span

UNDEFINED = 0
"""The number of the value that means nothing."""


class Values:
    """Values by number; sums of two are worked out once."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._values: list[Value | str] = ["nothing defined"]
        self._numbers: dict[Value | str, int] = {"nothing defined": UNDEFINED}
        self._sums: dict[tuple[int, int], int] = {}

    def number(self, value: Value | str | None) -> int:
        """The number of a value."""
        if value is None:
            return UNDEFINED
        found = self._numbers.get(value)
        if found is None:
            found = self._numbers[value] = len(self._values)
            self._values.append(value)
        return found

    def sum(self, first: int, second: int) -> int:
        """The number of what adding two values gives; a text where that makes no sense."""
        found = self._sums.get((first, second))
        if found is None:
            one, other = self._values[first], self._values[second]
            result: Value | str | None
            if UNDEFINED in {first, second}:
                result = None
            elif isinstance(one, str) or isinstance(other, str):
                result = one if isinstance(one, str) else other
            elif one[0] != other[0]:
                result = f"a sum of {self.text(first)} and {self.text(second)}"
            elif one[1] & other[1]:
                result = f"a sum of {self.text(first)} and {self.text(second)}, which overlap"
            else:
                result = (one[0], one[1] | other[1])
            found = self._sums[first, second] = self.number(result)
        return found

    def text(self, number: int) -> str:
        """A value in words."""
        value = self._values[number]
        if isinstance(value, str):
            return value
        chunk, mask = value
        members = [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
        if len(members) == self._ranks and self._ranks > 1:
            return f"chunk {chunk} of all ranks"
        named = ", ".join(map(str, members[:8])) + (", ..." if len(members) > 8 else "")
        return f"chunk {chunk} of {'rank' if len(members) == 1 else 'ranks'} {named}"


@dataclass(frozen=True, slots=True)
class Race:
    """Two steps that touch one cell, one writing, and nothing orders them."""

    first: int
    second: int
    cell: str


@dataclass
class Replay:
    """What came out.

    Attributes:
        wrong: outputs that are not what the collective asks, one line each.
        races: what nothing orders, the first pair of each two steps.
        clobbered: steps that write the caller's input where the call is not in place.
    """

    wrong: list[str]
    races: list[Race]
    clobbered: list[int]


def replay(
    program: GlobalProgram,
    flat: Flat,
    order: Sequence[int],
    orders: Callable[[int], Order],
    *,
    in_place: bool,
) -> Replay:
    """Run the steps that end, in order; `orders` gives happens-before for the cells of a rank."""
    return _Replay(program, flat, order, orders, in_place).run()


class _Replay:
    def __init__(
        self,
        program: GlobalProgram,
        flat: Flat,
        order: Sequence[int],
        orders: Callable[[int], Order],
        in_place: bool,
    ) -> None:
        self._program = program
        self._flat = flat
        self._order = order
        self._orders = orders
        self._in_place = in_place
        self._values = Values(program.ranks)
        self._buffers = [buffers(program, rank, in_place=in_place) for rank in range(program.ranks)]
        self._cells: list[list[int]] = []
        for rank, layout in enumerate(self._buffers):
            cells = [UNDEFINED] * layout.cells
            for chunk, value in enumerate(given(program, rank)):
                cells[layout.start[Memory.INPUT] + chunk] = self._values.number(value)
            self._cells.append(cells)

    def run(self) -> Replay:
        self._move()
        races: list[Race] = []
        clobbered: list[int] = []
        of_rank: list[list[int]] = [[] for _ in range(self._program.ranks)]
        for step in self._order:
            of_rank[self._flat.rank[step]].append(step)
        for rank, steps in enumerate(of_rank):
            races.extend(self._races(rank, steps))
            if not self._in_place:
                clobbered.extend(step for step in steps if self._writes_input(step))
        return Replay(list(self._wrong()), races, clobbered)

    def _move(self) -> None:
        """All values to where they go."""
        flat, values = self._flat, self._values
        sender: dict[int, int] = {}
        for link, sends in flat.sends.items():
            sender.update(zip(flat.receives.get(link, []), sends, strict=False))
        messages: dict[int, list[int]] = {}
        for index in self._order:
            step, rank = flat.steps[index], flat.rank[index]
            cells, start = self._cells[rank], self._buffers[rank].start
            moved: list[int] | None = messages.pop(sender[index]) if step.code.receives else None
            if step.source is not None:
                first = start[step.source.memory] + step.source.start
                read = cells[first : first + step.count]
                moved = read if moved is None else list(map(values.sum, read, moved))
            assert moved is not None, "a step reads or receives"
            if step.target is not None:
                first = start[step.target.memory] + step.target.start
                if step.code.value == "re":
                    moved = list(map(values.sum, cells[first : first + step.count], moved))
                cells[first : first + step.count] = moved
            if step.code.sends:
                messages[index] = moved

    def _wrong(self) -> Iterator[str]:
        for rank, layout in enumerate(self._buffers):
            start = layout.start[Memory.OUTPUT]
            for chunk, value in enumerate(wanted(self._program, rank)):
                number = self._values.number(value)
                found = self._cells[rank][start + chunk]
                if value is not None and found != number:
                    yield (
                        f"rank {rank}: o{chunk} must be {self._values.text(number)}, "
                        f"is {self._values.text(found)}"
                    )

    def _writes_input(self, index: int) -> bool:
        target = self._flat.steps[index].target
        return target is not None and target.memory is Memory.INPUT

    def _races(self, rank: int, steps: Sequence[int]) -> Iterator[Race]:
        """Each access against the last write of its cell and the reads since then."""
        flat, order = self._flat, self._orders(rank)
        start = self._buffers[rank].start
        block = flat.block
        passes_on = flat.fifo.parts > 1  # whether what a step writes is there before the message goes on
        written: dict[int, tuple[int, int]] = {}
        read: dict[int, list[tuple[int, int]]] = {}
        seen: set[tuple[int, int]] = set()

        for index in steps:
            step = flat.steps[index]
            clock = order.clock(index).tolist()
            touched = [(span, False) for span in (step.source,) if span is not None]
            if step.target is not None:
                touched.append((step.target, True))
            if (
                step.source is not None
                and step.target is not None
                and self._overlap(rank, step.source, step.target)
            ):
                yield Race(index, index, f"rank {rank} {step.source} and {step.target}")
            for span, writes in touched:
                first = start[span.memory] + span.start
                for offset in range(span.count):
                    cell = first + offset
                    earlier = [(*written[cell], passes_on)] if cell in written else []
                    if writes:
                        earlier += ((*access, True) for access in read.get(cell, ()))
                    for other, at, before_sending in earlier:
                        if (
                            block[other] == block[index]
                            or clock[order.column(block[other])] > other
                            or (before_sending and at <= offset and order.passes(other, index))
                            or (other, index) in seen
                        ):
                            continue
                        seen.add((other, index))
                        yield Race(other, index, f"rank {rank} {Span(span.memory, span.start + offset)}")
                    if writes:
                        written[cell] = index, offset
                        read[cell] = []
                    else:
                        read.setdefault(cell, []).append((index, offset))

    def _overlap(self, rank: int, source: Span, target: Span) -> bool:
        """Whether a step reads cells that it writes at another place of its row."""
        start = self._buffers[rank].start
        one, other = start[source.memory] + source.start, start[target.memory] + target.start
        return one != other and max(one, other) < min(one, other) + source.count

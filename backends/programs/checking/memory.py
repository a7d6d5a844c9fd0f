"""What a collective demands of the buffers of its ranks, in chunks, stated for the checker alone.

A *cell* is a chunk of memory of one rank. Where a call is in place, input and output share cells, as NCCL has
it: a rank's block of an allgather lies in its output, and so on.

A value is (chunk, contributors): which part of the data, and whose contributions are added up in it. Parts of
different ranks that are to be added up have the same number; all other data of all ranks is numbered through.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

from arborcast.backends.programs.program import GlobalProgram, Memory, Move, ProgramError, Span
from arborcast.synth.collective import Kind

Value: TypeAlias = tuple[int, int]
"""The number of a part of the data, and a bit for each rank whose contribution is in it."""


UNDEFINED = 0
"""The number of the value that means nothing."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """Where the chunks of one rank's buffers lie among its cells.

    Attributes:
        start: of the buffers' first cells.
        size: of the buffers, in chunks, as a call gives them.
        cells: of the rank.
    """

    start: dict[Memory, int]
    size: dict[Memory, int]
    cells: int


def sizes(program: GlobalProgram, rank: int) -> dict[Memory, int]:
    """Chunks of the buffers that a call gives a rank, and of scratch."""
    whole, block = program.chunks, program.chunks // program.ranks
    of_root = rank == program.root
    match program.kind:
        case Kind.ALLREDUCE | Kind.ALLTOALL | Kind.BROADCAST | Kind.REDUCE:
            given, wanted = whole, whole
        case Kind.ALLGATHER:
            given, wanted = block, whole
        case Kind.REDUCE_SCATTER:
            given, wanted = whole, block
        case Kind.GATHER:
            given, wanted = block, whole if of_root else 0
        case Kind.SCATTER:
            given, wanted = whole if of_root else 0, block
        case _:
            raise ProgramError(f"{program.kind}: programs are checked for collectives that have a name")
    scratch = program.parts[rank].scratch_chunks
    return {Memory.INPUT: given, Memory.OUTPUT: wanted, Memory.SCRATCH: scratch}


def undivided(program: GlobalProgram) -> str | None:
    """What is wrong where ranks have blocks and chunks do not divide into these."""
    if not program.chunks % program.ranks or program.kind in {Kind.ALLREDUCE, Kind.BROADCAST, Kind.REDUCE}:
        return None
    return f"{program.kind}: {program.chunks} chunks are no multiple of {program.ranks} ranks"


def beyond(span: Span, size: int) -> str | None:
    """What is wrong where a span reaches beyond its buffer of that size."""
    fits = 0 <= span.start <= size - span.count
    return None if fits else f"{span.memory} has {size} chunks in a call"


def buffers(program: GlobalProgram, rank: int, *, in_place: bool) -> Buffers:
    """The cells of a rank in a call that is in place, or in one that is not."""
    size = sizes(program, rank)
    given, wanted = size[Memory.INPUT], size[Memory.OUTPUT]
    start = {Memory.INPUT: 0, Memory.OUTPUT: given}
    if in_place:
        # The smaller of the two is the rank's block in the larger one.
        block = rank * (program.chunks // program.ranks)
        start[Memory.OUTPUT] = block if 0 < wanted < given else 0
        start[Memory.INPUT] = block if 0 < given < wanted else 0
        scratch = max(given, wanted)
    else:
        scratch = given + wanted
    start[Memory.SCRATCH] = scratch
    return Buffers(start, size, scratch + size[Memory.SCRATCH])


def given(program: GlobalProgram, rank: int) -> list[Value | None]:
    """What stands in the input of a rank at the start, chunk by chunk; None where it means nothing."""
    size = sizes(program, rank)[Memory.INPUT]
    bit = 1 << rank
    match program.kind:
        case Kind.ALLREDUCE | Kind.REDUCE | Kind.REDUCE_SCATTER:
            return [(chunk, bit) for chunk in range(size)]
        case Kind.BROADCAST | Kind.SCATTER:
            return [(chunk, bit) if rank == program.root else None for chunk in range(size)]
        case _:
            return [(rank * size + chunk, bit) for chunk in range(size)]


def wanted(program: GlobalProgram, rank: int) -> list[Value | None]:  # noqa: PLR0911  (one of each kind)
    """What must stand in the output of a rank at the end; None where it does not matter."""
    ranks, whole = program.ranks, program.chunks
    block = whole // ranks
    everyone = (1 << ranks) - 1
    size = sizes(program, rank)[Memory.OUTPUT]
    root = program.root or 0
    match program.kind:
        case Kind.ALLREDUCE:
            return [(chunk, everyone) for chunk in range(size)]
        case Kind.REDUCE:
            return [(chunk, everyone) if rank == root else None for chunk in range(size)]
        case Kind.REDUCE_SCATTER:
            return [(rank * block + chunk, everyone) for chunk in range(size)]
        case Kind.BROADCAST:
            return [(chunk, 1 << root) for chunk in range(size)]
        case Kind.SCATTER:
            return [(rank * block + chunk, 1 << root) for chunk in range(size)]
        case Kind.ALLTOALL:
            # Rank s gave whole chunks, numbered from s * whole; its block for this rank is the rank's own.
            return [
                (source * whole + rank * block + chunk, 1 << source)
                for source in range(ranks)
                for chunk in range(block)
            ]
        case _:  # allgather, gather: numbered through in the order in which they are to stand
            return [(chunk, 1 << (chunk // block)) for chunk in range(size)]


def is_far(span: Span, rank: int, move: Move) -> bool:
    """Whether a span of a move is of another rank than the one that does it, or reached by a switch."""
    return span.rank is not None and (move.switch or span.rank != rank)


class Values:
    """Values by number, and what operations make of them; sums of two are worked out once.

    Whoever follows other values than contributions through a program says anew what is given, added, sent to
    others and wanted.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._values: list[Any] = ["nothing defined"]
        self._numbers: dict[Any, int] = {"nothing defined": UNDEFINED}
        self._sums: dict[tuple[int, int], int] = {}

    def number(self, value: Any) -> int:
        """The number of a value."""
        if value is None:
            return UNDEFINED
        found = self._numbers.get(value)
        if found is None:
            found = self._numbers[value] = len(self._values)
            self._values.append(value)
        return found

    def given(self, rank: int, value: Value | None) -> int:
        """What stands at the start where this is given."""
        return self.number(value)

    def unlike(self, rank: int, value: Value | None, found: int) -> str:
        """What is wrong with what a rank has at the end where this is wanted; nothing: an empty text."""
        if value is None or found == self.number(value):
            return ""
        return f"must be {self.text(self.number(value))}, is {self.text(found)}"

    def sent(self, rank: int, sums: list[int]) -> list[int]:
        """What others receive of what a step made."""
        return sums

    def moved(self, rank: int, move: Move, read: list[int]) -> tuple[int, int]:
        """What a move makes of what it reads, in the rank's own memory and in that of others."""
        found = reduce(self.sum, read)
        return found, found

    def sum(self, first: int, second: int) -> int:
        """The number of what adding two values gives."""
        found = self._sums.get((first, second))
        if found is None:
            result = None if UNDEFINED in {first, second} else self.added(first, second)
            found = self._sums[first, second] = self.number(result)
        return found

    def added(self, first: int, second: int) -> Any:
        """The sum of two values by their numbers; a text where that makes no sense."""
        one, other = self._values[first], self._values[second]
        if isinstance(one, str) or isinstance(other, str):
            return one if isinstance(one, str) else other
        if one[0] != other[0]:
            return f"a sum of {self.text(first)} and {self.text(second)}"
        if one[1] & other[1]:
            return f"a sum of {self.text(first)} and {self.text(second)}, which overlap"
        return one[0], one[1] | other[1]

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

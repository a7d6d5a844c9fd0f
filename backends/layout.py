"""Where the chunks of a schedule lie in the buffers of each rank, in elements.

A collective is given tensors of any length; shares are fractions. Here the two meet, once: chunks cut their
block at the floor of their cumulative shares, so that every element belongs to exactly one chunk, whatever
divides what, and some chunks may be empty. Nothing here knows about steps or messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from synth.collective import Block, Collective, Kind
from synth.errors import CollectiveError, ScheduleError
from synth.schedule import Schedule


class Buffer(StrEnum):
    """The memory of one rank: what it is given, what it must fill, and working space.

    Where a collective works in place (broadcast, allreduce, custom, the root of a reduce) there is only the
    output, and it holds the data at the start. Inputs are never written to.
    """

    INPUT = "input"
    OUTPUT = "output"
    SCRATCH = "scratch"


@dataclass(frozen=True, slots=True)
class Slice:
    """The elements `start..stop-1` of a buffer."""

    buffer: Buffer
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def __str__(self) -> str:
        """As messages show it."""
        return f"{self.buffer}[{self.start}:{self.stop}]"

    def part(self, index: int, parts: int) -> Slice:
        """One of `parts` nearly equal parts, in order; some are empty where there are few elements."""
        return Slice(
            self.buffer,
            self.start + self.length * index // parts,
            self.start + self.length * (index + 1) // parts,
        )


IN_PLACE_KINDS = frozenset({Kind.BROADCAST, Kind.ALLREDUCE, Kind.CUSTOM})
"""The kinds in which every rank of the collective has one tensor, read and written.

That of a custom collective has room for all its blocks; a rank fills those that it must get and leaves alone
what it neither holds nor gets.
"""


@dataclass(frozen=True)
class Layout:
    """Elements of each chunk in each buffer.

    Attributes:
        collective: what the buffers are for.
        count: elements of the whole buffer (algbw's).
        block: elements of one rank's block; the whole buffer for kinds that have no blocks.
        spans: of each chunk, its first element and the one after its last, inside its block.
        of_chunk: the block of the collective that each chunk is a part of.
        owners: the position in `collective.ranks` of each chunk's owner.
        targets: the same of its target, None where it has none.
    """

    collective: Collective
    count: int
    block: int
    spans: tuple[tuple[int, int], ...]
    of_chunk: tuple[Block, ...]
    owners: tuple[int, ...]
    targets: tuple[int | None, ...]

    @property
    def blocks(self) -> int:
        """Number of blocks in the whole buffer."""
        return blocks_in(self.collective)

    def in_place(self, rank: int) -> bool:
        """Whether the rank's output holds its data at the start."""
        if self.collective.kind is Kind.REDUCE:
            return rank == self.collective.root
        return rank in self.collective.ranks and self.collective.kind in IN_PLACE_KINDS

    def input_elements(self, rank: int) -> int:
        """Elements of the rank's input; 0 for relays and for ranks that work in place."""
        if rank not in self.collective.ranks or self.in_place(rank):
            return 0
        match self.collective.kind:
            case Kind.ALLGATHER | Kind.GATHER:
                return self.block
            case Kind.SCATTER if rank != self.collective.root:
                return 0
            case _:
                return self.block * self.blocks

    def output_elements(self, rank: int) -> int:
        """Elements of the rank's output; 0 for relays and for ranks that only give."""
        if rank not in self.collective.ranks:
            return 0
        match self.collective.kind:
            case Kind.REDUCE | Kind.GATHER if rank != self.collective.root:
                return 0
            case Kind.REDUCE_SCATTER | Kind.SCATTER:
                return self.block
            case _:
                return self.block * self.blocks

    def initial(self, rank: int, chunk: int) -> Slice | None:
        """Where the rank holds the chunk, or its contribution to it, at the start; None where it does not."""
        owner = self.owners[chunk]
        if not self.collective.before(rank, self.of_chunk[chunk]):
            return None
        if self.in_place(rank):
            return self._slice(Buffer.OUTPUT, chunk, self.of_chunk[chunk].demand or 0)
        match self.collective.kind:
            case Kind.REDUCE_SCATTER:
                return self._slice(Buffer.INPUT, chunk, owner)
            case Kind.SCATTER | Kind.ALLTOALL:
                return self._slice(Buffer.INPUT, chunk, self.targets[chunk] or 0)
            case _:
                return self._slice(Buffer.INPUT, chunk, 0)

    def final(self, rank: int, chunk: int) -> Slice | None:
        """Where the chunk must be in the end on this rank; None where it does not matter."""
        block = self.of_chunk[chunk]
        if self.collective.after(rank, block) is None:
            return None
        match self.collective.kind:
            case Kind.ALLGATHER | Kind.GATHER | Kind.ALLTOALL:
                return self._slice(Buffer.OUTPUT, chunk, self.owners[chunk])
            case Kind.CUSTOM:
                return self._slice(Buffer.OUTPUT, chunk, block.demand or 0)
            case _:
                return self._slice(Buffer.OUTPUT, chunk, 0)

    def kept(self, rank: int) -> tuple[Slice, Slice] | None:
        """The rank's own block where it goes from input to output without a message: from, to."""
        collective = self.collective
        if rank not in collective.ranks or (collective.root is not None and rank != collective.root):
            return None
        position = collective.ranks.index(rank)
        match collective.kind:
            case Kind.ALLGATHER | Kind.GATHER:
                return self._block(Buffer.INPUT, 0), self._block(Buffer.OUTPUT, position)
            case Kind.SCATTER:
                return self._block(Buffer.INPUT, position), self._block(Buffer.OUTPUT, 0)
            case Kind.ALLTOALL:
                return self._block(Buffer.INPUT, position), self._block(Buffer.OUTPUT, position)
            case _:
                return None

    def _slice(self, buffer: Buffer, chunk: int, block: int) -> Slice:
        start, stop = self.spans[chunk]
        return Slice(buffer, block * self.block + start, block * self.block + stop)

    def _block(self, buffer: Buffer, block: int) -> Slice:
        return Slice(buffer, block * self.block, (block + 1) * self.block)


def blocks_in(collective: Collective) -> int:
    """Of how many blocks of one size the whole buffer is made, which its count must divide into."""
    match collective.kind:
        case Kind.BROADCAST | Kind.REDUCE | Kind.ALLREDUCE:
            return 1
        case Kind.CUSTOM:
            return len(collective.demands)
        case _:
            return len(collective.ranks)


def lay_out(schedule: Schedule, count: int) -> Layout:
    """Cut buffers of `count` elements (the whole buffer, as algbw counts it) into the schedule's chunks.

    Raises:
        CollectiveError: the count is negative, or not a multiple of the blocks (`blocks_in`).
        ScheduleError: a chunk belongs to no block, or the shares of a block do not add up to it.
    """
    collective = schedule.collective
    blocks = blocks_in(collective)
    if count < 0 or count % blocks:
        rule = f"a multiple of its {blocks} blocks" if count >= 0 else "at least 0"
        raise CollectiveError(f"{collective.kind}: elements of the whole buffer must be {rule}, got {count}")
    position = {rank: index for index, rank in enumerate(collective.ranks)}
    of_chunk = tuple(collective.block_of(c.owner, c.target, c.demand) for c in schedule.chunks)
    return Layout(
        collective,
        count,
        count // blocks,
        _spans(schedule, of_chunk, count // blocks),
        of_chunk,
        tuple(position[chunk.owner] for chunk in schedule.chunks),
        tuple(None if chunk.target is None else position[chunk.target] for chunk in schedule.chunks),
    )


def _spans(schedule: Schedule, of_chunk: Sequence[Block], length: int) -> tuple[tuple[int, int], ...]:
    """The elements of each chunk in its block of that length."""
    collective = schedule.collective
    shares = collective.blocks()
    filled: dict[Block, Fraction] = defaultdict(Fraction)
    spans = []
    for index, (chunk, block) in enumerate(zip(schedule.chunks, of_chunk, strict=True)):
        if block not in shares or chunk.owner not in collective.ranks:
            raise ScheduleError(f"chunk {index}: {collective.kind} moves no block with {block}")
        before = filled[block] / shares[block]
        filled[block] += chunk.share
        spans.append((int(before * length), int(filled[block] / shares[block] * length)))
    for block, share in shares.items():
        if filled[block] != share:
            raise ScheduleError(f"block with {block}: shares must add up to {share}, got {filled[block]}")
    return tuple(spans)

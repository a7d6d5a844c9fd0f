"""Where the chunks of a schedule lie in the buffers of each rank, in elements.

A collective is given tensors of any length; shares are fractions. Here the two meet, once: chunks cut their
block at the floor of their cumulative shares, so that every element belongs to exactly one chunk, whatever
divides what, and some chunks may be empty. Nothing here knows about steps or messages.

Where a chunk lies can be said of one chunk alone, so that a rank need not lay out what it never touches: the
images of a representative chunk lie alike in their blocks, or one behind the other in the block of an
allreduce.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from arborcast.backends.lowering.rank_view import Image, images_of
from arborcast.synth.collective import Block, Collective, Kind
from arborcast.synth.errors import CollectiveError, ScheduleError
from arborcast.synth.features import check_features
from arborcast.synth.implicit_schedule import AnySchedule, ImplicitSchedule
from arborcast.synth.schedule import Chunk


class Buffer(StrEnum):
    """The memory of one rank: what it is given, what it must fill, and working space.

    Where a collective works in place (broadcast, allreduce, custom, the root of a reduce) there is only the
    output, and it holds the data at the start. Inputs are never written to.
    """

    INPUT = "input"
    OUTPUT = "output"
    SCRATCH = "scratch"


@dataclass(frozen=True, slots=True)
class BufferSlice:
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

    def part(self, index: int, parts: int) -> BufferSlice:
        """One of `parts` nearly equal parts, in order; some are empty where there are few elements."""
        return BufferSlice(
            self.buffer,
            self.start + self.length * index // parts,
            self.start + self.length * (index + 1) // parts,
        )


IN_PLACE_KINDS = frozenset({Kind.BROADCAST, Kind.ALLREDUCE, Kind.CUSTOM})
"""The kinds in which every rank of the collective has one tensor, read and written.

That of a custom collective has room for all its blocks; a rank fills those that it must get and leaves alone
what it neither holds nor gets.
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one chunk lies.

    Attributes:
        block: the block of the collective that it is a part of.
        start: its first element in the block.
        stop: the one after its last.
        owner: the position of its owner in `collective.ranks`.
        target: the same of its target, None where it has none.
    """

    block: Block
    start: int
    stop: int
    owner: int
    target: int | None


@dataclass(frozen=True)
class Layout:
    """Elements of chunks in each buffer.

    Attributes:
        collective: what the buffers are for.
        count: elements of the whole buffer (algbw's).
        block: elements of one rank's block; the whole buffer for kinds that have no blocks; elements for each
            byte of its sizes for an alltoall whose blocks differ.
        places: of the chunks that were asked for, by their number.
    """

    collective: Collective
    count: int
    block: int
    places: Mapping[int, Place]

    @property
    def blocks(self) -> int:
        """Number of blocks in the whole buffer."""
        return blocks_in(self.collective)

    def in_place(self, rank: int) -> bool:
        """Whether the rank's output holds its data at the start."""
        if self.collective.kind is Kind.REDUCE:
            return rank == self.collective.root
        return rank in self.collective.members and self.collective.kind in IN_PLACE_KINDS

    def input_elements(self, rank: int) -> int:
        """Elements of the rank's input; 0 for relays and for ranks that work in place."""
        if rank not in self.collective.members or self.in_place(rank):
            return 0
        if self.collective.sizes:
            return self._before(Buffer.INPUT, rank, self.blocks)
        match self.collective.kind:
            case Kind.ALLGATHER | Kind.GATHER:
                return self.block
            case Kind.SCATTER if rank != self.collective.root:
                return 0
            case _:
                return self.block * self.blocks

    def output_elements(self, rank: int) -> int:
        """Elements of the rank's output; 0 for relays and for ranks that only give."""
        if rank not in self.collective.members:
            return 0
        if self.collective.sizes:
            return self._before(Buffer.OUTPUT, rank, self.blocks)
        match self.collective.kind:
            case Kind.REDUCE | Kind.GATHER if rank != self.collective.root:
                return 0
            case Kind.REDUCE_SCATTER | Kind.SCATTER:
                return self.block
            case _:
                return self.block * self.blocks

    def initial(self, rank: int, chunk: int) -> BufferSlice | None:
        """Where the rank holds the chunk, or its contribution to it, at the start; None where it does not."""
        place = self.places[chunk]
        if not self.collective.before(rank, place.block):
            return None
        if self.in_place(rank):
            return self._slice(Buffer.OUTPUT, rank, place, place.block.demand or 0)
        match self.collective.kind:
            case Kind.REDUCE_SCATTER:
                return self._slice(Buffer.INPUT, rank, place, place.owner)
            case Kind.SCATTER | Kind.ALLTOALL:
                return self._slice(Buffer.INPUT, rank, place, place.target or 0)
            case _:
                return self._slice(Buffer.INPUT, rank, place, 0)

    def final(self, rank: int, chunk: int) -> BufferSlice | None:
        """Where the chunk must be in the end on this rank; None where it does not matter."""
        place = self.places[chunk]
        if self.collective.after(rank, place.block) is None:
            return None
        match self.collective.kind:
            case Kind.ALLGATHER | Kind.GATHER | Kind.ALLTOALL:
                return self._slice(Buffer.OUTPUT, rank, place, place.owner)
            case Kind.CUSTOM:
                return self._slice(Buffer.OUTPUT, rank, place, place.block.demand or 0)
            case _:
                return self._slice(Buffer.OUTPUT, rank, place, 0)

    def kept(self, rank: int) -> tuple[BufferSlice, BufferSlice] | None:
        """The rank's own block where it goes from input to output without a message: from, to."""
        collective = self.collective
        if rank not in collective.members or (collective.root is not None and rank != collective.root):
            return None
        position = collective.ranks.index(rank)
        match collective.kind:
            case Kind.ALLGATHER | Kind.GATHER:
                return self._block(Buffer.INPUT, rank, 0), self._block(Buffer.OUTPUT, rank, position)
            case Kind.SCATTER:
                return self._block(Buffer.INPUT, rank, position), self._block(Buffer.OUTPUT, rank, 0)
            case Kind.ALLTOALL:
                return self._block(Buffer.INPUT, rank, position), self._block(Buffer.OUTPUT, rank, position)
            case _:
                return None

    def _slice(self, buffer: Buffer, rank: int, place: Place, block: int) -> BufferSlice:
        first = self._before(buffer, rank, block)
        return BufferSlice(buffer, first + place.start, first + place.stop)

    def _block(self, buffer: Buffer, rank: int, block: int) -> BufferSlice:
        return BufferSlice(buffer, self._before(buffer, rank, block), self._before(buffer, rank, block + 1))

    def _before(self, buffer: Buffer, rank: int, block: int) -> int:
        """Elements before a block in a buffer of a rank."""
        sizes = self.collective.sizes
        if not sizes:
            return block * self.block
        position = self.collective.ranks.index(rank)
        if buffer is Buffer.INPUT:
            return self.block * sum(sizes[position][:block])
        return self.block * sum(row[position] for row in sizes[:block])


def blocks_in(collective: Collective) -> int:
    """Of how many blocks of one size the whole buffer is made, which its count must divide into."""
    match collective.kind:
        case Kind.BROADCAST | Kind.REDUCE | Kind.ALLREDUCE:
            return 1
        case Kind.CUSTOM:
            return len(collective.demands)
        case _:
            return len(collective.ranks)


def lay_out(schedule: AnySchedule, count: int, chunks: Iterable[int] | None = None) -> Layout:
    """Cut buffers of `count` elements (the whole buffer, as algbw counts it) into the schedule's chunks.

    Takes time and memory that grow with the chunks that stand in the schedule and those that are asked for.

    Args:
        schedule: in either form.
        count: elements of the whole buffer.
        chunks: the numbers of those to be placed, in the whole schedule; all of them where None.

    Raises:
        CollectiveError: the count is negative, or not a multiple of the blocks (`blocks_in`).
        ScheduleError: a chunk belongs to no block, or the shares of a block do not add up to it.
    """
    check_features(schedule.topology, "lowering")
    collective = schedule.collective
    length = _block_length(collective, count)
    cuts = _cuts(schedule)
    position = {rank: index for index, rank in enumerate(collective.ranks)}

    def place(image: Image) -> Place:
        chunk = image.chunk
        return Place(
            collective.block_of(chunk.owner, chunk.target, chunk.demand),
            *cuts[image.representative].span(image.element, length * _bytes_of(collective, chunk, position)),
            position[chunk.owner],
            None if chunk.target is None else position[chunk.target],
        )

    places = {number: place(image) for number, image in images_of(schedule, chunks)}
    return Layout(collective, count, length, places)


def exact_count(schedule: AnySchedule, pieces: int) -> int:
    """A length of the whole buffer at which nothing is rounded: each piece of each chunk has its share."""
    cuts = _cuts(schedule)
    return blocks_in(schedule.collective) * math.lcm(*(cut.whole for cut in cuts)) * pieces


def _block_length(collective: Collective, count: int) -> int:
    """`Layout.block` for buffers of so many elements."""
    blocks = blocks_in(collective)
    if collective.sizes:
        length = count * blocks // collective.total
        if length < 0 or -(-length * collective.total // blocks) != count:
            mean = collective.mean_bytes
            raise CollectiveError(
                f"alltoall: elements of the whole buffer must be {mean}, the mean of its sizes, or that of a "
                f"multiple of them, got {count}"
            )
        return length
    if count < 0 or count % blocks:
        rule = f"a multiple of its {blocks} blocks" if count >= 0 else "at least 0"
        raise CollectiveError(f"{collective.kind}: elements of the whole buffer must be {rule}, got {count}")
    return count // blocks


def _bytes_of(collective: Collective, chunk: Chunk, position: Mapping[int, int]) -> int:
    """What the length of a block is counted in: bytes where blocks differ, else the block itself."""
    if not collective.sizes:
        return 1
    assert chunk.target is not None, "the chunks of an alltoall have targets"
    return collective.sizes[position[chunk.owner]][position[chunk.target]]


@dataclass(frozen=True, slots=True)
class _ChunkCut:
    """Where the images of a representative chunk lie in their blocks, each of which is `whole` parts long.

    Image number 0 begins at part `first`, each further one `stride` parts behind the one before: 0 where
    each lies in a block of its own. All are `parts` long. In a schedule without images all are number 0.
    """

    first: int
    stride: int
    parts: int
    whole: int

    def span(self, element: int, length: int) -> tuple[int, int]:
        """The first element of an image, and the one after its last, in its block of that length."""
        first = self.first + element * self.stride
        return first * length // self.whole, (first + self.parts) * length // self.whole


def _cuts(schedule: AnySchedule) -> list[_ChunkCut]:
    """Of the chunks that stand in a schedule, in their order."""
    collective, images, owners = schedule.collective, 1, None
    if isinstance(schedule, ImplicitSchedule):
        images, owners = schedule.translations.order, frozenset(schedule.translations.representatives)
    shares = collective.blocks(owners)
    filled: dict[Block, Fraction] = defaultdict(Fraction)
    cuts = []
    for index, chunk in enumerate(schedule.chunks):
        block = collective.block_of(chunk.owner, chunk.target, chunk.demand)
        if block not in shares or chunk.owner not in collective.members:
            raise ScheduleError(f"chunk {index}: {collective.kind} moves no block with {block}")
        first, part = filled[block] / shares[block], chunk.share / shares[block]
        whole = math.lcm(first.denominator, part.denominator)
        together = block.owner is None  # all images in the one block that there is
        parts = int(part * whole)
        cuts.append(_ChunkCut(int(first * whole), parts if together else 0, parts, whole))
        filled[block] += chunk.share * (images if together else 1)
    for block, share in shares.items():
        if filled[block] != share:
            raise ScheduleError(f"block with {block}: shares must add up to {share}, got {filled[block]}")
    return cuts

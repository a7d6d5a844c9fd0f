"""A collective as other runtimes execute it: the program of all ranks, in chunks, by thread blocks.

    rank 0  block 0  send to 1       s  i0          rank 1  block 0  receive from 0  rrc  i0 -> i0
            block 1  receive from 1  r  i0                  block 1  send to 0       s    i0, after block 0

Exporters make these values, readers of foreign files make them, and the checker and the interpreter work on
them. Two families of operations fit: the two-sided steps of MSCCL, where a message passes a FIFO between two
thread blocks, and the one-sided ones of MSCCL++, where a block reads and writes memory of other ranks and
signals tell when. Nothing here says whether a program is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from typing import Any, TypeAlias

from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError
from arborcast.synth.nccl_protocol import Protocol


class ProgramError(InputError):
    """A program, or a file that should hold one, breaks a rule of its runtime."""


class WrongProgramError(ProgramError):
    """A file holds a program, which does not do what it is for."""


class Memory(StrEnum):
    """The buffers of one rank. Where a call is in place, input and output share memory (`layout.cells`)."""

    INPUT = "i"
    OUTPUT = "o"
    SCRATCH = "s"


def plain_name(kind: Kind) -> str:
    """What files of runtimes call a kind: reducescatter, and the others as we do."""
    return kind.value.replace("-", "")


def kind_of_file(name: str, asked: Kind | None, *, key: str, unknown: str) -> Kind:
    """What a file does: as it says itself, or what is asked where its name for it is none that we know.

    Args:
        name: in the file.
        asked: by the caller.
        key: what errors call the entry of the file.
        unknown: the error where neither says it.

    Raises:
        ProgramError: neither says it, or the two say different things.
    """
    found = Kind.named(name)
    if found is None or found is Kind.CUSTOM:
        if asked is None:
            raise ProgramError(unknown)
        return asked
    if asked not in {None, found}:
        raise ProgramError(f"{key} is {found}, --collective says {asked}")
    return found


def root_of_file(kind: Kind, asked: int | None, ranks: int) -> int | None:
    """The root of a kind, which files of runtimes do not say; 0 where nobody does, None where it has none.

    Raises:
        ProgramError: a root is asked for that there is not.
    """
    if not kind.has_root:
        if asked is not None:
            raise ProgramError(f"root {asked}: {kind} has no root")
        return None
    root = asked or 0
    if not 0 <= root < ranks:
        raise ProgramError(f"root must be in 0..{ranks - 1}, got {root}")
    return root


@dataclass(frozen=True, slots=True)
class Span:
    """The chunks `start .. start + count - 1` of a buffer, of another rank where `rank` says so.

    With `packets` the data stand there with flags beside them, in twice the room: who reads them waits for
    them.
    """

    memory: Memory
    start: int
    count: int = 1
    rank: int | None = None
    packets: bool = False

    def __str__(self) -> str:
        """As messages show it."""
        last = "" if self.count == 1 else f"..{self.start + self.count - 1}"
        return f"{self.memory}{self.start}{last}" + ("" if self.rank is None else f" of rank {self.rank}")


@dataclass(frozen=True, slots=True)
class After:
    """An operation of another thread block of the same rank that must be done before."""

    block: int
    step: int


class Code(StrEnum):
    """The two-sided steps, under the names that MSCCL's files use."""

    SEND = "s"
    RECEIVE = "r"
    RECEIVE_COPY_SEND = "rcs"
    RECEIVE_REDUCE_COPY = "rrc"
    RECEIVE_REDUCE_SEND = "rrs"
    RECEIVE_REDUCE_COPY_SEND = "rrcs"
    COPY = "cpy"
    REDUCE = "re"

    @cached_property
    def receives(self) -> bool:
        """Whether it takes a message."""
        return self.value.startswith("r") and self is not Code.REDUCE

    @cached_property
    def sends(self) -> bool:
        """Whether it makes a message."""
        return self.value.endswith("s")

    @cached_property
    def reads(self) -> bool:
        """Whether it reads its source; what it receives is added to that."""
        return self not in {Code.RECEIVE, Code.RECEIVE_COPY_SEND}

    @cached_property
    def writes(self) -> bool:
        """Whether it writes its target."""
        return self not in {Code.SEND, Code.RECEIVE_REDUCE_SEND}

    @cached_property
    def reduces(self) -> bool:
        """Whether it adds two values."""
        return self.value.startswith(("rr", "re"))


@dataclass(frozen=True, slots=True)
class Step:
    """A two-sided operation of a thread block: receive, add, write, send, as far as its code says.

    What is written or sent is the message (where it receives) plus the source (where it reads); `re` writes
    target plus source.

    Attributes:
        code: which parts it has.
        source: what it reads; None where it reads nothing.
        target: what it writes, of the same count; None where it writes nothing.
        after: what must be done before, besides the step before it. Where the step named posts nothing, the
            next one of its block that does is meant, as MSCCL's flags have it.
        posts: whether others may wait for it.
        chunk: of the schedule that it was made of, if it was.
    """

    code: Code
    source: Span | None = None
    target: Span | None = None
    after: tuple[After, ...] = ()
    posts: bool = False
    chunk: int | None = field(default=None, compare=False)

    @property
    def count(self) -> int:
        """Chunks that it handles."""
        span = self.source or self.target
        assert span is not None, "every code reads or writes"
        return span.count

    def __str__(self) -> str:
        """As messages show it."""
        ends = [str(span) for span in (self.source, self.target) if span is not None]
        return f"{self.code} {' -> '.join(ends)}"


@dataclass(frozen=True, slots=True)
class Move:
    """A one-sided operation: every target becomes the sum of all sources (of the one, where there is one).

    Local spans and those of other ranks may mix: put, get, copy, reduce and the fused forms are this, and
    what a switch adds and multicasts, where the spans of all ranks of its group stand.

    Attributes:
        sources: all of one count.
        targets: all of that count.
        channel: the connection whose proxy does it, by its place in the block's `connections`; None where the
            threads of the block do it.
        thread: of the block, which hands it to the proxy.
        switch: whether a switch adds the sources or multicasts to the targets.
    """

    sources: tuple[Span, ...]
    targets: tuple[Span, ...]
    channel: int | None = None
    thread: int = 0
    switch: bool = False

    @property
    def packets(self) -> bool:
        """Whether packets are read or written."""
        return any(span.packets for span in (*self.sources, *self.targets))

    @property
    def count(self) -> int:
        """Chunks that it handles."""
        return self.sources[0].count

    def between(self, rank: int) -> Iterator[tuple[int, int]]:
        """From which rank to which its chunks pass where this one does it; of what a switch does nothing."""
        for spans, reads in ((self.sources, True), (self.targets, False)):
            for span in () if self.switch else spans:
                if span.rank is not None and span.rank != rank:
                    yield (span.rank, rank) if reads else (rank, span.rank)

    def __str__(self) -> str:
        """As messages show it."""
        return f"{' + '.join(map(str, self.sources))} -> {', '.join(map(str, self.targets))}"


@dataclass(frozen=True, slots=True)
class Signal:
    """Tell the other ends of connections of the block that all before is done; each counts its signals.

    The first thread signals on the first connection and so on: what other threads of the block did before
    counts where they have synchronized since. A relaxed signal says that the call has begun, and nothing of
    memory.
    """

    channels: tuple[int, ...]
    relaxed: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the next signal on each of these connections, the first thread for the first one and so on."""

    channels: tuple[int, ...]
    relaxed: bool = False


@dataclass(frozen=True, slots=True)
class Flush:
    """Wait until proxies did all they were told on these connections, the first thread for the first."""

    channels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Acquire:
    """Take one from each of these semaphores of the rank as soon as there is one."""

    semaphores: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Add one to each of these semaphores of the rank."""

    semaphores: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Barrier:
    """Wait until as many thread blocks of this rank are at the barrier of this number."""

    number: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Synchronize:
    """The threads of the block wait for each other; without it one-sided operations do not order memory."""


@dataclass(frozen=True, slots=True)
class Loop:
    """Operations that a block goes through again and again, each time for the next piece of their chunks.

    Moves of packets know nothing of pieces: each time they handle all.

    Attributes:
        operations: one-sided ones, none of them a loop.
        chunks: that each of its moves handles in all.
        piece_bytes: of a piece; the last one may be smaller.
    """

    operations: tuple[OneTime, ...]
    chunks: int
    piece_bytes: int

    def parts_of_piece(self, finer: int, part_bytes: Fraction | None) -> int:
        """How many parts of so many bytes a piece has, of which a chunk has `finer`; all where None."""
        return self.chunks * finer if part_bytes is None else max(1, int(self.piece_bytes / part_bytes))


OneTime: TypeAlias = Step | Move | Signal | Wait | Flush | Acquire | Release | Barrier | Synchronize
Operation: TypeAlias = OneTime | Loop


@dataclass(frozen=True, slots=True)
class Connection:
    """One end of a connection of a one-sided block: with whom, how, its number among those of the pair."""

    peer: int
    kind: str
    number: int = 0


Counted: TypeAlias = tuple[Any, ...]
"""Signals of a connection, by who sends, who waits, kind and number; or a semaphore, by rank and number."""


@dataclass(frozen=True, slots=True)
class ThreadBlock:
    """Operations that one rank executes in this order, beside those of its other blocks.

    Attributes:
        operations: in order.
        send: to whom its steps send, None for nobody.
        receive: from whom they receive, None for nobody.
        channel: of the connections to both; a connection is (sender, receiver, channel).
        connections: of one-sided operations, which name them by their place here.
    """

    operations: tuple[Operation, ...]
    send: int | None = None
    receive: int | None = None
    channel: int = 0
    connections: tuple[Connection, ...] = ()

    def posts(self, rank: int, operation: Operation) -> list[Counted]:
        """What an operation of the block adds to, in the order of its threads; see `Counted`."""
        if isinstance(operation, Signal):
            ends = [self.connections[channel] for channel in operation.channels]
            return [(rank, end.peer, end.kind, end.number) for end in ends]
        return [(rank, at) for at in operation.semaphores] if isinstance(operation, Release) else []

    def takes(self, rank: int, operation: Operation) -> list[Counted]:
        """What an operation of the block waits for and takes one from, likewise."""
        if isinstance(operation, Wait):
            ends = [self.connections[channel] for channel in operation.channels]
            return [(end.peer, rank, end.kind, end.number) for end in ends]
        return [(rank, at) for at in operation.semaphores] if isinstance(operation, Acquire) else []


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank executes, the chunks of its buffers by the program, its semaphores' first values."""

    blocks: tuple[ThreadBlock, ...]
    input_chunks: int
    output_chunks: int
    scratch_chunks: int = 0
    semaphores: tuple[int, ...] = ()


@dataclass(frozen=True)
class GlobalProgram:
    """The program of all ranks of a collective.

    Attributes:
        name: what files call it.
        kind: of the collective; all ranks take part.
        root: where the kind has one.
        chunks: of the whole buffer, as algbw counts it; a rank's block is an equal part of them.
        parts: of each rank.
        protocol: how messages travel.
        in_place: whether it may be called with output over input.
        out_of_place: whether it may be called with separate buffers.
        least_bytes: the smallest whole buffer that it is for.
        most_bytes: the largest, None for no limit.
        channels: how many are set up.
        double_scratch: whether every other call has another half of the scratch.
        faults: why its runtime would refuse or break on the file that it was read from, one line each.
        notes: what the runtime passes over in silence in that file, one line each.
    """

    name: str
    kind: Kind
    root: int | None
    chunks: int
    parts: tuple[RankPart, ...]
    protocol: Protocol = Protocol.SIMPLE
    in_place: bool = True
    out_of_place: bool = True
    least_bytes: int = 0
    most_bytes: int | None = None
    channels: int = 1
    double_scratch: bool = False
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """How many take part."""
        return len(self.parts)

    @property
    def blocks(self) -> Iterator[tuple[int, int, ThreadBlock]]:
        """Every thread block with its rank and its number there."""
        for rank, part in enumerate(self.parts):
            yield from ((rank, number, block) for number, block in enumerate(part.blocks))

    @property
    def operations(self) -> Iterator[tuple[int, int, int, Operation]]:
        """Every operation with its rank, block and place there."""
        for rank, number, block in self.blocks:
            yield from ((rank, number, place, each) for place, each in enumerate(block.operations))

    @cached_property
    def one_sided(self) -> bool:
        """Whether blocks write memory of other ranks instead of sending messages."""
        return any(not isinstance(operation, Step) for *_, operation in self.operations)

    @cached_property
    def operation_count(self) -> int:
        """Operations of all blocks of all ranks, those within loops included."""
        return sum(
            1 + (len(each.operations) if isinstance(each, Loop) else 0) for *_, each in self.operations
        )

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """All of them."""
        return tuple(each for *_, each in self.operations if isinstance(each, Loop))

    def unrolled(self, finer: int = 1, part_bytes: Fraction | None = None) -> GlobalProgram:
        """The same without loops.

        Args:
            finer: into how many parts each chunk is cut.
            part_bytes: of such a part, of which a piece has as many whole ones as fit; None where all loops
                are gone through once.
        """
        if not self.loops and finer == 1:
            return self
        parts = []
        for part in self.parts:
            blocks = [
                replace(block, operations=tuple(_unrolled(block.operations, finer, part_bytes)))
                for block in part.blocks
            ]
            parts.append(
                RankPart(
                    tuple(blocks),
                    finer * part.input_chunks,
                    finer * part.output_chunks,
                    finer * part.scratch_chunks,
                    part.semaphores,
                )
            )
        return replace(self, chunks=self.chunks * finer, parts=tuple(parts))


def _unrolled(
    operations: Iterable[Operation], finer: int, part_bytes: Fraction | None
) -> Iterator[Operation]:
    for each in operations:
        if isinstance(each, Loop):
            whole = each.chunks * finer
            size = each.parts_of_piece(finer, part_bytes)
            for first in range(0, whole, size):
                count = min(size, whole - first)
                yield from (_cut(inner, finer, first, count) for inner in each.operations)
        else:
            yield _cut(each, finer, 0, None)


def _cut(operation: OneTime, finer: int, first: int, count: int | None) -> OneTime:
    """The same for so many of the finer chunks; None for all."""
    if not isinstance(operation, Move):
        return operation

    whole = count is None or operation.packets

    def cut(span: Span) -> Span:
        at = span.start * finer + (0 if whole else first)
        return Span(span.memory, at, span.count * finer if whole else count or 0, span.rank, span.packets)

    return replace(
        operation,
        sources=tuple(map(cut, operation.sources)),
        targets=tuple(map(cut, operation.targets)),
    )

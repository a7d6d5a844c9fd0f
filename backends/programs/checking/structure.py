"""What can be said of a program without running it: limits, ends of buffers, ends of connections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from arborcast.backends.programs.checking.memory import beyond, sizes, undivided
from arborcast.backends.programs.limits import MSCCL, Fifo, fifo_of
from arborcast.backends.programs.program import GlobalProgram, ProgramError, Step, ThreadBlock

Link: TypeAlias = tuple[int, int, int]
"""A connection: sender, receiver, channel."""


@dataclass
class Flat:
    """All steps of a two-sided program in one row, block after block, rank after rank.

    Attributes:
        steps: the row.
        block: of each step, blocks of all ranks numbered through.
        first: the first step of each block, and the end of the row.
        blocks: rank and number of each block.
        waits: for each step, the steps that must have posted before.
        sends: for each connection, the steps that send on it in order.
        receives: for each connection, those that receive from it.
        fifo: of every connection.
    """

    steps: list[Step]
    block: list[int]
    first: list[int]
    blocks: list[tuple[int, int]]
    waits: list[tuple[int, ...]]
    sends: dict[Link, list[int]]
    receives: dict[Link, list[int]]
    fifo: Fifo
    never: dict[int, str] = field(default_factory=dict)

    def name(self, step: int) -> str:
        """A step as messages name it."""
        rank, block = self.blocks[self.block[step]]
        return f"rank {rank} block {block} step {step - self.first[self.block[step]]} ({self.steps[step]})"


def flatten(program: GlobalProgram) -> Flat:
    """The row of a program.

    Raises:
        ProgramError: an operation is one-sided.
    """
    flat = Flat([], [], [], [], [], {}, {}, fifo_of(program.protocol))
    for rank, part in enumerate(program.parts):
        base = [len(flat.steps)]
        for number, block in enumerate(part.blocks):
            flat.first.append(len(flat.steps))
            flat.blocks.append((rank, number))
            for operation in block.operations:
                if not isinstance(operation, Step):
                    raise ProgramError(f"rank {rank}: {type(operation).__name__} is one-sided")
                index = len(flat.steps)
                flat.steps.append(operation)
                flat.block.append(len(flat.blocks) - 1)
                if operation.code.sends and block.send is not None:
                    flat.sends.setdefault((rank, block.send, block.channel), []).append(index)
                if operation.code.receives and block.receive is not None:
                    flat.receives.setdefault((block.receive, rank, block.channel), []).append(index)
            base.append(len(flat.steps))
        posts = [
            [
                base[number] + place
                for place, step in enumerate(block.operations)
                if isinstance(step, Step) and step.posts
            ]
            for number, block in enumerate(part.blocks)
        ]
        for number, block in enumerate(part.blocks):
            for place, operation in enumerate(block.operations):
                assert isinstance(operation, Step)
                flat.waits.append(tuple(_posting(flat, base, posts, operation, base[number] + place)))
    flat.first.append(len(flat.steps))
    return flat


def _posting(flat: Flat, base: list[int], posts: list[list[int]], step: Step, index: int) -> Iterator[int]:
    """The steps whose flags a step waits for: of each block the first that posts, from the named one on."""
    for after in step.after:
        if after.block >= len(posts):
            flat.never[index] = f"waits for block {after.block}, which does not exist"
            continue
        named = base[after.block] + after.step
        later = next((post for post in posts[after.block] if post >= named), None)
        if later is None:
            flat.never[index] = (
                f"waits for step {after.step} of block {after.block}, and none from there on posts (hasdep)"
            )
        else:
            yield later


def objections(program: GlobalProgram) -> list[tuple[str, str]]:
    """What is wrong, each with its kind: limit, buffer, shared or message."""
    found = [
        *(("limit", line) for line in check_limits(program)),
        *(("buffer", line) for line in check_buffers(program)),
        *(("shared", line) for line in check_shared(program)),
    ]
    if all(kind != "shared" for kind, _ in found):
        found += (("message", line) for line in check_messages(flatten(program)))
    return found


def check_limits(program: GlobalProgram) -> Iterator[str]:
    """What the runtime cannot hold, one line each."""
    if program.channels > MSCCL.channels:
        yield f"nchannels is {program.channels}, at most {MSCCL.channels}"
    for rank, part in enumerate(program.parts):
        if len(part.blocks) > MSCCL.blocks:
            yield f"rank {rank}: {len(part.blocks)} thread blocks, at most {MSCCL.blocks} in RCCL"
        ends: Counter[tuple[str, int]] = Counter()
        for number, block in enumerate(part.blocks):
            where = f"rank {rank} block {number}"
            talks = block.send is not None or block.receive is not None
            channels = min(MSCCL.channels, program.channels) if talks else MSCCL.channels
            if not 0 <= block.channel < channels:
                yield f"{where}: channel {block.channel}, there are 0 to {channels - 1} (nchannels)"
            for end, peer in (("send", block.send), ("receive", block.receive)):
                if peer is None:
                    continue
                if peer >= program.ranks:
                    yield f"{where}: {end} peer {peer}, there are {program.ranks} ranks"
                ends[end, block.channel] += 1
            yield from _without_peer(block, where)
        for (end, channel), count in ends.items():
            if count > MSCCL.peers:
                yield f"rank {rank}: {count} blocks {end} on channel {channel}, at most {MSCCL.peers}"


def _without_peer(block: ThreadBlock, where: str) -> Iterator[str]:
    for place, step in enumerate(block.operations):
        assert isinstance(step, Step), "flattened before"
        if step.code.sends and block.send is None:
            yield f"{where} step {place} ({step}): the block has no send peer"
        if step.code.receives and block.receive is None:
            yield f"{where} step {place} ({step}): the block has no receive peer"


def check_buffers(program: GlobalProgram) -> Iterator[str]:
    """Steps that reach beyond a buffer: of the call, or of what the file says."""
    if wrong := undivided(program):
        yield wrong
        return
    size_of = [sizes(program, rank) for rank in range(program.ranks)]
    for rank, number, place, step in program.operations:
        assert isinstance(step, Step), "flattened before"
        where, part = f"rank {rank} block {number} step {place} ({step})", program.parts[rank]
        said = {"i": part.input_chunks, "o": part.output_chunks, "s": part.scratch_chunks}
        for span in (step.source, step.target):
            if span is None:
                continue
            if span.count < 1:
                yield f"{where}: moves nothing"
            elif wrong := beyond(span, size_of[rank][span.memory]):
                yield f"{where}: {wrong}"
            elif span.start >= said[span.memory]:
                yield f"{where}: {span.memory}_chunks is {said[span.memory]}, the parser refuses"


def check_shared(program: GlobalProgram) -> Iterator[str]:
    """Connections that two blocks of one rank use at the same end: each counts its own messages."""
    for rank, part in enumerate(program.parts):
        ends = Counter(
            (end, peer, block.channel)
            for block in part.blocks
            for end, peer in (("send to", block.send), ("receive from", block.receive))
            if peer is not None
        )
        for (end, peer, channel), count in ends.items():
            if count > 1:
                yield f"rank {rank}: {count} blocks {end} rank {peer} on channel {channel}, by one FIFO"


def check_messages(flat: Flat) -> Iterator[str]:
    """Messages whose two ends do not fit: sent and never received, or of another length."""
    for link in sorted(flat.sends.keys() | flat.receives.keys()):
        sends, receives = flat.sends.get(link, []), flat.receives.get(link, [])
        named = f"rank {link[0]} to rank {link[1]} on channel {link[2]}"
        for number, (send, receive) in enumerate(zip(sends, receives, strict=False)):
            if flat.steps[send].count != flat.steps[receive].count:
                yield (
                    f"{named}: message {number} is sent as {flat.steps[send].count} chunks by "
                    f"{flat.name(send)} and received as {flat.steps[receive].count} by {flat.name(receive)}"
                )
                break
        if len(sends) != len(receives):
            extra = flat.name(sends[len(receives)] if len(sends) > len(receives) else receives[len(sends)])
            yield f"{named}: {len(sends)} messages sent, {len(receives)} received; unmatched from {extra} on"

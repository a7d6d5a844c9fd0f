"""What can be said of a program without running it: limits, ends of buffers, ends of connections."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TypeAlias

from arborcast.backends.programs.checking.memory import beyond, sizes, undivided
from arborcast.backends.programs.limits import MSCCL
from arborcast.backends.programs.program import GlobalProgram, Step, ThreadBlock

Link: TypeAlias = tuple[int, int, int]
"""A connection: sender, receiver, channel."""

_Named: TypeAlias = tuple[str, int]
"""A step, and its chunks."""


def objections(program: GlobalProgram) -> list[tuple[str, str]]:
    """What is wrong, each with its kind: limit, buffer, shared or message."""
    found = [
        *(("limit", line) for line in check_limits(program)),
        *(("buffer", line) for line in check_buffers(program)),
        *(("shared", line) for line in check_shared(program)),
    ]
    if all(kind != "shared" for kind, _ in found):
        found += (("message", line) for line in check_messages(program))
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
        assert isinstance(step, Step), "two-sided"
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
        assert isinstance(step, Step), "two-sided"
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


def check_messages(program: GlobalProgram) -> Iterator[str]:
    """Messages whose two ends do not fit: sent and never received, or of another length."""
    ends: dict[Link, tuple[list[_Named], list[_Named]]] = defaultdict(lambda: ([], []))
    for rank, number, place, step in program.operations:
        assert isinstance(step, Step), "looked at before"
        block = program.parts[rank].blocks[number]
        named = f"rank {rank} block {number} step {place} ({step})", step.count
        if step.code.sends and block.send is not None:
            ends[rank, block.send, block.channel][0].append(named)
        if step.code.receives and block.receive is not None:
            ends[block.receive, rank, block.channel][1].append(named)
    for link, (sends, receives) in sorted(ends.items()):
        over = f"rank {link[0]} to rank {link[1]} on channel {link[2]}"
        for number, ((send, count), (receive, other)) in enumerate(zip(sends, receives, strict=False)):
            if count != other:
                yield (
                    f"{over}: message {number} is sent as {count} chunks by {send} and received as {other} "
                    f"by {receive}"
                )
                break
        if len(sends) != len(receives):
            extra = (sends[len(receives) :] or receives[len(sends) :])[0][0]
            yield f"{over}: {len(sends)} messages sent, {len(receives)} received; unmatched from {extra} on"

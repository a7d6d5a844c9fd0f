"""One-sided programs drawn as text, a line for each thread block, in order of ranks.

    0: cpy i0 -> o0; nop; put i0 -> o0@1; nop; sig 1; wait 1; nop
    1: rwait 0; nop; add i0 + s0 -> o0, s1@0; nop; sig 0

`@1` is memory of rank 1, `p` behind a chunk means packets, `:2` two chunks. `rsig` and `rwait` are relaxed;
`proxy` moves through the port channel to the first target's rank, `psig`, `pwait` and `flush` are on that
channel.
"""

from __future__ import annotations

import re
from collections import defaultdict

from arborcast.backends.programs.program import (
    Acquire,
    Barrier,
    Connection,
    Flush,
    GlobalProgram,
    Memory,
    Move,
    Operation,
    RankPart,
    Release,
    Signal,
    Span,
    Synchronize,
    ThreadBlock,
    Wait,
)
from arborcast.synth.collective import Kind
from arborcast.synth.nccl_protocol import Protocol

_SPAN = re.compile(r"([ios])(\d+)(p?)(?::(\d+))?(?:@(\d+))?$")


def drawn(
    text: str,
    kind: Kind = Kind.ALLGATHER,
    *,
    chunks: int = 2,
    root: int | None = None,
    in_place: bool = False,
    protocol: Protocol = Protocol.SIMPLE,
    scratch: int = 0,
    double_scratch: bool = False,
    semaphores: tuple[int, ...] = (),
) -> GlobalProgram:
    """The program of a drawing."""
    blocks: dict[int, list[ThreadBlock]] = defaultdict(list)
    for line in filter(None, map(str.strip, text.splitlines())):
        rank, _, row = line.partition(":")
        ends: list[Connection] = []
        operations = [_operation(entry.strip(), ends) for entry in row.split(";") if entry.strip()]
        blocks[int(rank)].append(ThreadBlock(tuple(operations), connections=tuple(ends)))
    ranks = max(blocks) + 1
    block = chunks // ranks
    given = block if kind is Kind.ALLGATHER else chunks
    wanted = block if kind is Kind.REDUCE_SCATTER else chunks
    parts = tuple(RankPart(tuple(blocks[rank]), given, wanted, scratch, semaphores) for rank in range(ranks))
    return GlobalProgram(
        "drawn", kind, root, chunks, parts, protocol, in_place, not in_place, double_scratch=double_scratch
    )


def _operation(text: str, ends: list[Connection]) -> Operation:  # noqa: PLR0911  (a table)
    name, _, rest = text.partition(" ")

    def channel(peer: str, kind: str = "memory") -> int:
        end = Connection(int(peer), kind)
        if end not in ends:
            ends.append(end)
        return ends.index(end)

    match name:
        case "nop":
            return Synchronize()
        case "sig" | "rsig":
            return Signal(tuple(map(channel, rest.split())), name == "rsig")
        case "wait" | "rwait":
            return Wait(tuple(map(channel, rest.split())), name == "rwait")
        case "psig":
            return Signal((channel(rest, "port"),))
        case "pwait":
            return Wait((channel(rest, "port"),))
        case "flush":
            return Flush((channel(rest, "port"),))
        case "take":
            return Acquire(tuple(map(int, rest.split())))
        case "give":
            return Release(tuple(map(int, rest.split())))
        case "barrier":
            number, blocks = rest.split("/")
            return Barrier(int(number), int(blocks))
        case _:
            read, write = rest.split("->")
            sources = tuple(_span(entry.strip()) for entry in read.split("+"))
            targets = tuple(_span(entry.strip()) for entry in write.split(","))
            if name != "proxy":
                return Move(sources, targets)
            return Move(sources, targets, channel(str(targets[0].rank), "port"))


def _span(text: str) -> Span:
    match = _SPAN.match(text)
    assert match is not None, text
    memory, start, packets, count, rank = match.groups()
    return Span(
        Memory(memory), int(start), int(count or 1), None if rank is None else int(rank), bool(packets)
    )

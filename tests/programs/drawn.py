"""Programs drawn as text, a line for each thread block, so that tests show what they check.

Two-sided ones in the letters of MSCCL:

    0>1: s i0              rank 0 sends to rank 1, on channel 0
    1<0: rrc i0 o0 !       rank 1 receives from rank 0; ! posts
    1>2<0#3: rcs o0        rank 1 receives from rank 0 and sends to rank 2, on channel 3
    1: cpy i0 o0 @0.1      no peers; waits for step 1 of block 0

One-sided ones, in which all moves have an arrow:

    0: cpy i0 -> o0; nop; put i0 -> o0@1; nop; sig 1; wait 1; nop
    1: rwait 0; nop; add i0 + s0 -> o0, s1@0; nop; sig 0

Spans are memory, start and, after a colon, how many chunks; `@1` is memory of rank 1, `p` behind a chunk
means packets. `rsig` and `rwait` are relaxed; `proxy` moves through the port channel to the first target's
rank, `psig`, `pwait` and `flush` are on that channel.
"""

from __future__ import annotations

import re
from collections import defaultdict

from arborcast.backends.programs.program import (
    Acquire,
    After,
    Barrier,
    Code,
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
    Step,
    Synchronize,
    ThreadBlock,
    Wait,
)
from arborcast.synth.collective import Kind
from arborcast.synth.nccl_protocol import Protocol

_HEAD = re.compile(r"(\d+)(?:>(\d+))?(?:<(\d+))?(?:#(\d+))?$")
_SPAN = re.compile(r"([ios])(\d+)(p?)(?::(\d+))?(?:@(\d+))?$")


def drawn(
    text: str,
    kind: Kind = Kind.ALLREDUCE,
    *,
    chunks: int = 1,
    root: int | None = None,
    in_place: bool = True,
    out_of_place: bool | None = None,
    protocol: Protocol = Protocol.SIMPLE,
    scratch: int = 0,
    most_bytes: int | None = None,
    double_scratch: bool = False,
    semaphores: tuple[int, ...] = (),
) -> GlobalProgram:
    """The program of a drawing; out of place where it is not in place, unless that is said."""
    blocks: dict[int, list[ThreadBlock]] = defaultdict(list)
    for line in filter(None, map(str.strip, text.splitlines())):
        head, _, row = line.partition(":")
        match = _HEAD.match(head)
        assert match is not None, head
        rank, send, receive, channel = (None if part is None else int(part) for part in match.groups())
        ends: list[Connection] = []
        operations = tuple(_operation(entry.strip(), ends) for entry in row.split(";") if entry.strip())
        blocks[rank or 0].append(ThreadBlock(operations, send, receive, channel or 0, tuple(ends)))
    ranks = max(blocks) + 1
    given = chunks // ranks if kind is Kind.ALLGATHER else chunks
    wanted = chunks // ranks if kind is Kind.REDUCE_SCATTER else chunks
    parts = tuple(RankPart(tuple(blocks[rank]), given, wanted, scratch, semaphores) for rank in range(ranks))
    return GlobalProgram(
        "drawn",
        kind,
        root,
        chunks,
        parts,
        protocol,
        in_place,
        not in_place if out_of_place is None else out_of_place,
        most_bytes=most_bytes,
        channels=1 + max(block.channel for part in parts for block in part.blocks),
        double_scratch=double_scratch,
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
    if "->" not in rest:
        return _step(Code(name), rest.split())
    sources, targets = (
        tuple(_span(entry.strip()) for entry in re.split("[+,]", side)) for side in rest.split("->")
    )
    return Move(sources, targets, channel(str(targets[0].rank), "port") if name == "proxy" else None)


def _step(code: Code, words: list[str]) -> Step:
    spans = [_span(word) for word in words if word[0] in "ios"]
    after = tuple(After(*map(int, word[1:].split("."))) for word in words if word[0] == "@")
    return Step(
        code, spans[0] if code.reads else None, spans[-1] if code.writes else None, after, "!" in words
    )


def _span(text: str) -> Span:
    match = _SPAN.match(text)
    assert match is not None, text
    memory, start, packets, count, rank = match.groups()
    return Span(
        Memory(memory), int(start), int(count or 1), None if rank is None else int(rank), bool(packets)
    )

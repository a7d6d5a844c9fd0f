"""Programs drawn as text, a line for each thread block, so that tests show what they check.

    0>1: s i0              rank 0 sends to rank 1, on channel 0
    1<0: rrc i0 o0 !       rank 1 receives from rank 0; ! posts
    1>2<0#3: rcs o0        rank 1 receives from rank 0 and sends to rank 2, on channel 3
    1: cpy i0 o0 @0.1      no peers; waits for step 1 of block 0

Spans are memory, start and, after a colon, how many chunks.
"""

from __future__ import annotations

import re
from collections import defaultdict

from arborcast.backends.programs.program import (
    After,
    Code,
    GlobalProgram,
    Memory,
    RankPart,
    Span,
    Step,
    ThreadBlock,
)
from arborcast.synth.collective import Kind
from arborcast.synth.nccl_protocol import Protocol

_HEAD = re.compile(r"(\d+)(?:>(\d+))?(?:<(\d+))?(?:#(\d+))?$")


def drawn(
    text: str,
    kind: Kind = Kind.ALLREDUCE,
    *,
    chunks: int = 1,
    root: int | None = None,
    in_place: bool = True,
    out_of_place: bool = False,
    protocol: Protocol = Protocol.SIMPLE,
    scratch: int = 0,
    most_bytes: int | None = None,
) -> GlobalProgram:
    """The program of a drawing; its buffers are said to be as large as the whole."""
    blocks: dict[int, list[ThreadBlock]] = defaultdict(list)
    for line in filter(None, map(str.strip, text.splitlines())):
        head, _, steps = line.partition(":")
        match = _HEAD.match(head)
        assert match is not None, head
        rank, send, receive, channel = match.groups()
        operations = tuple(_step(step.strip()) for step in steps.split(";") if step.strip())
        blocks[int(rank)].append(
            ThreadBlock(
                operations,
                None if send is None else int(send),
                None if receive is None else int(receive),
                int(channel or 0),
            )
        )
    parts = tuple(RankPart(tuple(blocks[rank]), chunks, chunks, scratch) for rank in range(max(blocks) + 1))
    channels = 1 + max((block.channel for part in parts for block in part.blocks), default=0)
    return GlobalProgram(
        "drawn", kind, root, chunks, parts, protocol, in_place, out_of_place, 0, most_bytes, channels
    )


def _step(text: str) -> Step:
    words = text.split()
    code = Code(words[0])
    spans = [_span(word) for word in words[1:] if word[0] in "ios"]
    after = tuple(After(*map(int, word[1:].split("."))) for word in words if word[0] == "@")
    source = spans[0] if code.reads else None
    target = spans[-1] if code.writes else None
    return Step(code, source, target, after, "!" in words)


def _span(word: str) -> Span:
    start, _, count = word[1:].partition(":")
    return Span(Memory(word[0]), int(start), int(count or 1))

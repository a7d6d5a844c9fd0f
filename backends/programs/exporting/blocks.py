"""Actions in thread blocks: one per connection, or one for a receive and a send peer where messages pass on.

A block may receive from one rank and send to one other. Where what comes from one rank mostly goes on to one
other, both connections share a block, and receiving and sending on become one step:

    r o4; s o4  ->  rcs o4        rrc i4 + i4; s i4  ->  rrcs i4, or rrs i4 where nobody else reads the sum

The messages of each connection are in the order of step and piece at both ends.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from arborcast.backends.programs.exporting.logical import ChunkAction
from arborcast.backends.programs.program import After, Code, Memory, Span, Step, ThreadBlock


@dataclass(slots=True)
class _Fused:
    """What becomes one step: a receive, a send, both, or a copy."""

    receive: ChunkAction | None
    send: ChunkAction | None

    @property
    def actions(self) -> list[ChunkAction]:
        return [action for action in (self.receive, self.send) if action is not None]

    @property
    def forwards_only(self) -> bool:
        """Whether nobody but its own send reads the sum that it makes, which then need not be kept."""
        receive, send = self.receive, self.send
        return (
            receive is not None
            and send is not None
            and receive.source is not None
            and receive.used == [send]
            and receive.target is not None
            and (receive.target.memory is Memory.SCRATCH or receive.replaced == receive.target.count)
        )


@dataclass(slots=True)
class _DraftBlock:
    send: int | None
    receive: int | None
    channel: int
    row: list[_Fused] = field(default_factory=list)


def thread_blocks(
    actions: Sequence[ChunkAction],
    channel_of: Callable[[ChunkAction], int],
    *,
    pair: bool,
    by_chunk: bool = False,
) -> tuple[tuple[ThreadBlock, ...], int]:
    """The blocks of one rank and the chunks of scratch that they need.

    Args:
        actions: of the rank.
        channel_of: over which connection each goes.
        pair: whether to fuse.
        by_chunk: whether a block ends one chunk of the schedule before it begins the next.
    """
    blocks = _blocks(actions, channel_of, pair, by_chunk)
    place = {
        id(action): (number, at)
        for number, block in enumerate(blocks)
        for at, fused in enumerate(block.row)
        for action in fused.actions
    }
    waits = [[_after(fused, number, place) for fused in block.row] for number, block in enumerate(blocks)]
    for number, row in enumerate(waits):
        _prune(row, number)
    posting = {(after.block, after.step) for row in waits for afters in row for after in afters}
    scratch = _Scratch()
    made = []
    for number, block in enumerate(blocks):
        steps = tuple(
            _step(fused, tuple(waits[number][at]), (number, at) in posting, scratch)
            for at, fused in enumerate(block.row)
        )
        made.append(ThreadBlock(steps, block.send, block.receive, block.channel))
    return tuple(made), scratch.size


def _blocks(
    actions: Sequence[ChunkAction], channel_of: Callable[[ChunkAction], int], pair: bool, by_chunk: bool
) -> list[_DraftBlock]:
    def turn(action: ChunkAction) -> tuple[int, int]:
        return action.piece.chunk if by_chunk else 0, action.step

    streams: dict[tuple[int, bool, int], list[ChunkAction]] = defaultdict(list)
    copies = [action for action in actions if action.peer is None]
    passed: Counter[tuple[int, int, int]] = Counter()
    for action in actions:
        if action.peer is None:
            continue
        channel = channel_of(action)
        streams[channel, action.sends, action.peer].append(action)
        origin = action.origin
        if action.sends and origin is not None and origin.peer is not None:
            passed[channel, origin.peer, action.peer] += 1
    for stream in streams.values():
        stream.sort(key=lambda action: (turn(action), action.piece.number))
    blocks = []
    for channel, receive, send in sorted(passed, key=lambda key: (-passed[key], key)) if pair else ():
        if (channel, False, receive) in streams and (channel, True, send) in streams:
            row = _merge(streams.pop((channel, False, receive)), streams.pop((channel, True, send)), turn)
            blocks.append(_DraftBlock(send, receive, channel, row))
    for (channel, sends, peer), stream in streams.items():
        row = [_Fused(None, action) if sends else _Fused(action, None) for action in stream]
        blocks.append(_DraftBlock(peer if sends else None, None if sends else peer, channel, row))
    blocks.sort(key=lambda block: (block.channel, block.receive is None, block.receive or 0, block.send or 0))
    if copies:
        blocks.append(_DraftBlock(None, None, 0, [_Fused(copy, None) for copy in copies]))
    return blocks


def _merge(
    receives: list[ChunkAction], sends: list[ChunkAction], turn: Callable[[ChunkAction], tuple[int, int]]
) -> list[_Fused]:
    """Two streams as one row, each in its order; a send that only waits for the next receive joins it."""
    row: list[_Fused] = []
    at, to = 0, 0
    while at < len(receives) or to < len(sends):
        receive = receives[at] if at < len(receives) else None
        send = sends[to] if to < len(sends) else None
        if receive is not None and send is not None and send.origin is receive:
            row.append(_Fused(receive, send))
            at, to = at + 1, to + 1
        elif receive is None or (send is not None and turn(send) <= turn(receive)):
            row.append(_Fused(None, send))
            to += 1
        else:
            row.append(_Fused(receive, None))
            at += 1
    return row


def _after(fused: _Fused, number: int, place: dict[int, tuple[int, int]]) -> list[After]:
    """The last step of each other block that must be done before."""
    last: dict[int, int] = {}
    for action in fused.actions:
        for before in action.after:
            block, at = place[id(before)]
            if block != number:
                last[block] = max(last.get(block, -1), at)
    return [After(block, at) for block, at in sorted(last.items())]


def _prune(row: list[list[After]], number: int) -> None:
    """Leave out what an earlier step of the block has waited for already."""
    seen: dict[int, int] = {}
    for afters in row:
        afters[:] = [after for after in afters if seen.get(after.block, -1) < after.step]
        for after in afters:
            seen[after.block] = after.step


class _Scratch:
    """Scratch of those pieces that need some, one behind the other."""

    def __init__(self) -> None:
        self.size = 0
        self._starts: dict[int, int] = {}

    def span(self, span: Span | None) -> Span | None:
        if span is None or span.memory is not Memory.SCRATCH:
            return span
        if span.start not in self._starts:
            self._starts[span.start] = self.size
            self.size += span.count
        return Span(Memory.SCRATCH, self._starts[span.start], span.count)


def _step(fused: _Fused, after: tuple[After, ...], posts: bool, scratch: _Scratch) -> Step:
    receive, send = fused.receive, fused.send
    chunk = fused.actions[0].piece.chunk
    if receive is None:
        assert send is not None, "a step does something"
        return Step(Code.SEND, scratch.span(send.source), None, after, posts, chunk)
    if receive.peer is None:
        return Step(Code.COPY, scratch.span(receive.source), receive.target, after, posts, chunk)
    source = scratch.span(receive.source)
    if fused.forwards_only:
        return Step(Code.RECEIVE_REDUCE_SEND, source, None, after, posts, chunk)
    target = scratch.span(receive.target)
    if source is None:
        code = Code.RECEIVE if send is None else Code.RECEIVE_COPY_SEND
    else:
        code = Code.RECEIVE_REDUCE_COPY if send is None else Code.RECEIVE_REDUCE_COPY_SEND
    return Step(code, source, target, after, posts, chunk)

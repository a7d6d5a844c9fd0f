"""From a program to what a data-flow run of it needs: who waits for whom, and the order of each peer's bytes.

A `TaskGraph` is a plain value without torch in it. A receive into scratch whose data is only reduced into
something else becomes one action with that reduction, so that arriving bytes are combined where they land
and the scratch is not needed. `backends.dataflow.engine` runs graphs over channels.

    program of a tree's root                       its graph
    0  receive scratch[0:4] from rank 1            0  output[0:4] += what comes from rank 1
    1  receive scratch[4:8] from rank 2            1  output[0:4] += what comes from rank 2, after 0
    2  reduce scratch[0:4] into output[0:4]
    3  reduce scratch[4:8] into output[0:4]
    4  send output[0:4] to rank 1                  2  send output[0:4] to rank 1, after 1

Reductions keep the order of the program, so that results do not depend on who is fast.

Why graphs cannot deadlock, even with channels that hold no more than one part of a message: all ranks have
their messages in one global order, and each channel carries its messages in that order. Every action waits
only for actions that stand before it (`compile_graph` fuses nothing that would wait for more). Take the first
message in the global order that is not complete. All that its two ends wait for is earlier: messages, which
are complete, and local actions, which are done as soon as what they wait for is. So the sender may send and
the receiver may receive. No message before it is left in its channel, and none after it has entered. So the
channel is empty, or holds a part of this message that the receiver can take at once; either way it moves on.
A shelf changes nothing of that: where it has no room, a peer whose channel is empty is sent a copy.

Where several cables lead to a peer (`transport.lanes`) each message is split: one action for each lane, whose
parts stand in the global order in the place of their message, in the order of lanes. Each part waits for all
parts of what the message waited for, which are earlier, and each lane carries its parts in that order. So a
lane is one more peer, and the proof holds of parts as it does of messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arborcast.backends.lowering.layout import Buffer, BufferSlice
from arborcast.backends.lowering.program import Copy, Operation, Program, Receive, Reduce, Send
from arborcast.backends.transport.lanes import CableLanes
from arborcast.synth.simulation.service import AHEAD


class Act(IntEnum):
    """What an action does; `COMBINE` receives and reduces at once."""

    SEND = 0
    RECEIVE = 1
    COMBINE = 2
    REDUCE = 3
    COPY = 4


@dataclass(frozen=True, slots=True)
class GraphTask:
    """One operation of a program, or two that have become one.

    Attributes:
        act: what to do.
        operation: as messages show it; of a combine the receive, into where its data is combined.
        into: what is written; what is sent, for a send.
        source: of a reduction or copy what is read besides; of a combine what the arriving data is combined
            with (often `into` itself); `into` for the others.
        peer: of a message the rank, or the number of a further lane to it; -1 for what is local.
        waiters: the actions that wait for this one.
        share: the same for all sends of the same bytes to several peers; -1 for all else.
    """

    act: Act
    operation: Operation
    into: BufferSlice
    source: BufferSlice
    peer: int
    waiters: tuple[int, ...]
    share: int

    @property
    def tag(self) -> int:
        """Of a message."""
        assert isinstance(self.operation, Send | Receive)
        return self.operation.tag


@dataclass(frozen=True)
class TaskGraph:
    """What one rank does in a collective on buffers of one length, as a graph.

    Attributes:
        program: what it was made of.
        actions: in the order of the program.
        sends: the actions that send to each peer, or lane, in the order in which their bytes must go.
        receives: the actions that receive from each of them, in the order in which their bytes come.
        waits: of every action, how many others must be complete before.
        reduces: whether anything is combined here.
        scratch_elements: length of the working space that is still needed; of gaps in it no page is touched.
        spans: where buffers have another length than the program's (`graph_template`), (3, actions): the
            start of each action's `into` and of its `source`, and their length. None where they are its own.
    """

    program: Program
    actions: tuple[GraphTask, ...]
    sends: Mapping[int, tuple[int, ...]]
    receives: Mapping[int, tuple[int, ...]]
    waits: tuple[int, ...]
    reduces: bool
    scratch_elements: int
    spans: NDArray[np.int64] | None = None

    def action(self, number: int) -> GraphTask:
        """One of `actions` with the slices that it has in buffers of this length."""
        action = self.actions[number]
        if self.spans is None:
            return action
        into, source, length = (int(it) for it in self.spans[:, number])
        parts: dict[str, Any] = {
            "into": BufferSlice(action.into.buffer, into, into + length),
            "source": BufferSlice(action.source.buffer, source, source + length),
        }
        named = {key: it for key, it in parts.items() if hasattr(action.operation, key)}
        return replace(action, operation=replace(action.operation, **named), **parts)


def compile_graph(program: Program, *, ahead: int = AHEAD, lanes: CableLanes | None = None) -> TaskGraph:
    """The graph of a program of `backends.lowering.lower`; linear in the number of its operations.

    Slices that are in use at the same time must be equal or disjoint, which those of lowered programs are.

    Args:
        program: of one rank.
        ahead: by how much logical time sends may run ahead of what comes in; at least 1. What is waited
            for is earlier in the global order, so that the proof above holds.
        lanes: where several cables lead to one rank; None where nowhere.
    """
    if ahead < 1:
        raise ValueError(f"ahead must be at least 1, got {ahead}")
    drafts = _fuse(program.operations, _find_joins(program.operations))
    _share(drafts)
    if lanes is not None:
        drafts = _split(drafts, lanes)
    _pace(drafts, ahead)
    numbers = {draft.index: number for number, draft in enumerate(drafts)}
    waiters: list[list[int]] = [[] for _ in drafts]
    orders: dict[bool, dict[int, list[int]]] = {True: defaultdict(list), False: defaultdict(list)}
    for number, draft in enumerate(drafts):
        for before in draft.after:
            waiters[numbers[before]].append(number)
        if draft.peer >= 0:
            orders[draft.act is Act.SEND][draft.peer].append(number)
    actions = [
        GraphTask(
            draft.act,
            _shown(draft),
            draft.into,
            draft.source,
            draft.peer,
            tuple(waiters[number]),
            draft.share,
        )
        for number, draft in enumerate(drafts)
    ]
    parts = (part for draft in drafts for part in (draft.into, draft.source))
    return TaskGraph(
        program,
        tuple(actions),
        {peer: tuple(order) for peer, order in sorted(orders[True].items())},
        {peer: tuple(order) for peer, order in sorted(orders[False].items())},
        tuple(len(draft.after) for draft in drafts),
        any(draft.act in {Act.COMBINE, Act.REDUCE} for draft in drafts),
        max((part.stop for part in parts if part.buffer is Buffer.SCRATCH), default=0),
    )


def _share(drafts: list[_Draft]) -> None:
    """Give the sends of bytes that several peers are sent a number of those bytes.

    Whatever writes to a slice waits for the sends before it, and those behind it wait for it: sends of one
    slice between two writes to it are of the same bytes. Where slices overlap in part there are none.
    """
    parts = sorted({draft.into for draft in drafts}, key=lambda part: (part.buffer, part.start))
    if any(a.buffer == b.buffer and b.start < a.stop for a, b in pairwise(parts)):
        return
    current: dict[BufferSlice, list[_Draft]] = defaultdict(list)
    closed: list[list[_Draft]] = []
    for draft in drafts:
        if draft.act is Act.SEND:
            current[draft.into].append(draft)
        elif draft.into in current:
            closed.append(current.pop(draft.into))
    for share, sends in enumerate([*closed, *current.values()]):
        if len({send.peer for send in sends}) > 1:
            for send in sends:
                send.share = share


def _split(drafts: list[_Draft], lanes: CableLanes) -> list[_Draft]:
    """Each message as its parts along the lanes to its peer; indices are new."""
    parts_of: dict[int, range] = {}
    found: list[_Draft] = []
    for draft in drafts:
        after = {part for before in draft.after for part in parts_of[before]}
        parts = [(draft.peer, 0, draft.into.length)]
        if draft.peer >= 0:
            parts = lanes.parts(draft.peer, draft.into.length, is_sent=draft.act is Act.SEND)
        parts_of[draft.index] = range(len(found), len(found) + len(parts))
        if len(parts) == 1:
            found.append(replace(draft, index=len(found), after=after))
            continue
        for number, start, stop in parts:
            into, source = _cut(draft.into, start, stop), _cut(draft.source, start, stop)
            part: dict[str, Any] = {"source" if draft.act is Act.SEND else "into": into}
            operation = replace(draft.operation, **part)
            found.append(_Draft(len(found), draft.act, operation, into, source, number, {*after}))
    return found


def _cut(whole: BufferSlice, start: int, stop: int) -> BufferSlice:
    return BufferSlice(whole.buffer, whole.start + start, whole.start + stop)


def _pace(drafts: list[_Draft], ahead: int) -> None:
    """Let each send wait for what is due `ahead` before it."""
    receives = [draft for draft in drafts if draft.peer >= 0 and draft.act is not Act.SEND]
    following = _next_of_same_peer(receives)
    due = 0
    # Messages of one peer come in order, and go in order: of what comes from a peer the last is waited for,
    # and what the send before to the same peer waits for is waited for.
    done: dict[int, int] = defaultdict(int)
    for draft in drafts:
        if draft.act is not Act.SEND:
            continue
        while due < len(receives) and receives[due].operation.time <= draft.operation.time - ahead:
            due += 1
        before, done[draft.peer] = done[draft.peer], due
        draft.after.update(receives[at].index for at in range(before, due) if following[at] >= due)


def _next_of_same_peer(receives: list[_Draft]) -> list[int]:
    """For each receive, the place of the next from its peer; behind the end where there is none."""
    following = [len(receives)] * len(receives)
    latest: dict[int, int] = {}
    for at, draft in enumerate(receives):
        if draft.peer in latest:
            following[latest[draft.peer]] = at
        latest[draft.peer] = at
    return following


@dataclass(slots=True)
class _Draft:
    """An action while operations are known by their index in the program."""

    index: int
    act: Act
    operation: Operation
    into: BufferSlice
    source: BufferSlice
    peer: int
    after: set[int]
    share: int = -1


def _fuse(operations: tuple[Operation, ...], joins: Mapping[int, int]) -> list[_Draft]:
    """One draft for every operation but the reductions that have joined a receive."""
    partner = {receive: reduce for reduce, receive in joins.items()}
    # What a joined receive would have waited for before it wrote to its slot, left to who writes there next.
    postponed: dict[int, set[int]] = defaultdict(set)
    drafts = []
    for index, operation in enumerate(operations):
        if index in joins:
            continue
        after = {joins.get(before, before) for before in operation.after}
        reduce = operations[partner[index]] if index in partner else None
        if reduce is not None:
            assert isinstance(operation, Receive) and isinstance(reduce, Reduce)
            if reduce.into != operation.into:  # it does not write to its slot any more
                postponed[operation.into.start] |= after
                after = set()
            after |= {joins.get(before, before) for before in reduce.after} - {index}
            source = reduce.source if reduce.into == operation.into else reduce.into
            draft = _Draft(index, Act.COMBINE, operation, reduce.into, source, operation.peer, after)
        else:
            draft = _draft_of(index, operation, after)
        if draft.act is not Act.SEND and draft.into.buffer is Buffer.SCRATCH:
            draft.after |= postponed.pop(draft.into.start, set())
        assert all(before < index for before in draft.after), "an operation waits only for those before it"
        drafts.append(draft)
    return drafts


def _draft_of(index: int, operation: Operation, after: set[int]) -> _Draft:
    match operation:
        case Send(peer=peer, source=source):
            return _Draft(index, Act.SEND, operation, source, source, peer, after)
        case Receive(peer=peer, into=into):
            return _Draft(index, Act.RECEIVE, operation, into, into, peer, after)
        case Reduce(source=source, into=into):
            return _Draft(index, Act.REDUCE, operation, into, source, -1, after)
        case Copy(source=source, into=into):
            return _Draft(index, Act.COPY, operation, into, source, -1, after)


def _find_joins(operations: tuple[Operation, ...]) -> dict[int, int]:
    """The reductions that happen as their data comes, each with the receive that it joins.

    Either the data comes into scratch and the reduction is all that reads it; or it comes to where it stays,
    and the reduction is the first to touch it, with the rank's own input. Nothing else that the reduction
    waits for may stand after the receive: it would have to wait for messages that come later in the global
    order, as in an exchange, where a rank must send its old value before it may add what it got.
    """
    candidates: dict[int, list[int]] = defaultdict(list)
    for receive, touches in _next_touches(operations):
        operation = operations[receive]
        assert isinstance(operation, Receive)
        first, _, writes = touches[0]
        reduce = operations[first]
        if not isinstance(reduce, Reduce):
            continue
        passes = (
            operation.into.buffer is Buffer.SCRATCH
            and reduce.source == operation.into
            and not writes
            and (len(touches) == 1 or not touches[1][1])
        )
        if passes:
            candidates[first].insert(0, receive)  # better than the other way: it saves the scratch
        elif reduce.into == operation.into:
            candidates[first].append(receive)
    joins: dict[int, int] = {}
    for reduce_index in sorted(candidates):
        before = [joins.get(index, index) for index in operations[reduce_index].after]
        for receive in candidates[reduce_index]:
            if all(index <= receive for index in before):
                joins[reduce_index] = receive
                break
    return joins


def _next_touches(operations: tuple[Operation, ...]) -> Iterator[tuple[int, list[tuple[int, bool, bool]]]]:
    """Receives, last first, each with the next one or two operations on its slice: index, reads, writes."""
    later: dict[tuple[Buffer, int], list[tuple[int, bool, bool]]] = {}
    for index in range(len(operations) - 1, -1, -1):
        operation = operations[index]
        if isinstance(operation, Receive):
            touches = later.get((operation.into.buffer, operation.into.start))
            if touches:
                yield index, touches
        for part, reads, writes in _uses(operation):
            key = (part.buffer, part.start)
            later[key] = [(index, reads, writes), *later.get(key, [])[:1]]


def _uses(operation: Operation) -> list[tuple[BufferSlice, bool, bool]]:
    """The slices that an operation touches; whether it reads, whether it writes them."""
    match operation:
        case Send(source=source):
            return [(source, True, False)]
        case Receive(into=into):
            return [(into, False, True)]
        case Reduce(source=source, into=into):
            return [(source, True, False), (into, True, True)]
        case Copy(source=source, into=into):
            return [(source, True, False), (into, False, True)]


def _shown(draft: _Draft) -> Operation:
    """The operation as messages show it: what has joined a reduction says where its data ends up."""
    if draft.act is Act.COMBINE:
        assert isinstance(draft.operation, Receive)
        return replace(draft.operation, into=draft.into)
    return draft.operation

"""Task graphs of all ranks run in one process, over channels that hold one part of a message.

A seed decides which of all possible moves is made next: a part enters a channel, a part leaves one and is
combined, or a local action happens. Data is read and written at that moment, as the engine does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np

from arborcast.backends.dataflow.task_graph import Act, GraphTask, TaskGraph
from arborcast.backends.lowering.layout import Buffer, BufferSlice
from arborcast.backends.lowering.program import Program, Receive, Send
from arborcast.backends.measure.job import Array, Reduction
from tests.support.definition import combine, finish


class StuckError(RuntimeError):
    """No rank can move, and not all is done."""


class _Rank:
    def __init__(self, graph: TaskGraph, given: Array | None, dtype: str) -> None:
        poison = np.nan if dtype.startswith("float") else -(2**30) + 7
        elements = {buffer: graph.program.elements(buffer) for buffer in Buffer}
        elements[Buffer.SCRATCH] = graph.scratch_elements
        self.graph = graph
        self.memory = {buffer: np.full(count, poison, dtype) for buffer, count in elements.items()}
        if given is not None:
            self.memory[Buffer.OUTPUT if graph.program.in_place else Buffer.INPUT][:] = given
        self.left = list(graph.waits)
        self.done = [False] * len(graph.actions)
        self.sent = dict.fromkeys(graph.sends, 0)  # actions that are complete, of each peer
        self.received = dict.fromkeys(graph.receives, 0)
        self.offsets: dict[tuple[bool, int], int] = {}  # elements of the next one that have moved

    def __getitem__(self, part: BufferSlice) -> Array:
        array = self.memory[part.buffer]
        assert 0 <= part.start <= part.stop <= len(array), f"{part} lies outside its buffer"
        return array[part.start : part.stop]

    def complete(self, number: int) -> None:
        assert not self.done[number] and not self.left[number]
        self.done[number] = True
        for waiter in self.graph.actions[number].waiters:
            self.left[waiter] -= 1


Move = tuple[int, str, int]  # rank, "send" or "receive" or "local", peer or action


class Simulation:
    """One run; parts are of `part` elements, and `seed` decides what happens next."""

    def __init__(
        self,
        graphs: Sequence[TaskGraph],
        inputs: Sequence[Array | None],
        *,
        reduction: Reduction = Reduction.SUM,
        dtype: str = "int64",
        part: int = 3,
        seed: int = 0,
    ) -> None:
        self.ranks = [_Rank(graph, given, dtype) for graph, given in zip(graphs, inputs, strict=True)]
        self._channels: dict[tuple[int, int, int], Array] = {}  # from rank to rank, by which lane
        self._reduction = reduction
        self._part = part
        self._chance = random.Random(seed)

    def run(self) -> tuple[Array, ...]:
        """The outputs of all ranks."""
        while moves := list(self._moves()):
            rank, what, which = self._chance.choice(moves)
            if what == "local":
                self._compute(self.ranks[rank], which)
            elif what == "send":
                self._send(rank, which)
            else:
                self._receive(rank, which)
        if not all(all(rank.done) for rank in self.ranks):
            raise StuckError(f"{sum(not all(rank.done) for rank in self.ranks)} ranks wait for ever")
        assert not self._channels, "nothing is left over"
        for each in self.ranks:
            finish(self._reduction, each.memory[Buffer.OUTPUT], each.graph.program.contributors)
        return tuple(rank.memory[Buffer.OUTPUT] for rank in self.ranks)

    def _way(self, src: int, dst: int) -> tuple[int, int, int]:
        """The channel between two ranks, of which the other one may be given as a lane to it."""
        count = len(self.ranks)
        return src % count, dst % count, max(src, dst) // count

    def _is_free(self, src: int, dst: int) -> bool:
        return self._way(src, dst) not in self._channels

    def _moves(self) -> Iterator[Move]:
        for index, rank in enumerate(self.ranks):
            for peer, order in rank.graph.sends.items():
                place = rank.sent[peer]
                if place < len(order) and not rank.left[order[place]] and self._is_free(index, peer):
                    yield index, "send", peer
            for peer, order in rank.graph.receives.items():
                place = rank.received[peer]
                if place < len(order) and not rank.left[order[place]] and not self._is_free(peer, index):
                    yield index, "receive", peer
            for number, action in enumerate(rank.graph.actions):
                if action.peer < 0 and not rank.done[number] and not rank.left[number]:
                    yield index, "local", number

    def _compute(self, rank: _Rank, number: int) -> None:
        action = rank.graph.action(number)
        if action.act is Act.COPY:
            rank[action.into][:] = rank[action.source]
        else:
            combine(self._reduction, rank[action.into], rank[action.source])
        rank.complete(number)

    def _send(self, index: int, peer: int) -> None:
        rank = self.ranks[index]
        number = rank.graph.sends[peer][rank.sent[peer]]
        whole = rank[rank.graph.action(number).into]
        offset = rank.offsets.get((True, peer), 0)
        self._channels[self._way(index, peer)] = whole[offset : offset + self._part].copy()
        rank.offsets[True, peer] = offset + self._part
        if offset + self._part >= len(whole):
            rank.offsets[True, peer] = 0
            rank.sent[peer] += 1
            rank.complete(number)

    def _receive(self, index: int, peer: int) -> None:
        rank = self.ranks[index]
        number = rank.graph.receives[peer][rank.received[peer]]
        action = rank.graph.action(number)
        offset = rank.offsets.get((False, peer), 0)
        data = self._channels.pop(self._way(peer, index))
        self._use(rank, action, offset, data)
        rank.offsets[False, peer] = offset + len(data)
        if offset + len(data) == action.into.length:
            rank.offsets[False, peer] = 0
            rank.received[peer] += 1
            rank.complete(number)

    def _use(self, rank: _Rank, action: GraphTask, offset: int, data: Array) -> None:
        into = rank[action.into][offset : offset + len(data)]
        assert len(into) == len(data), "a part ends where its message does"
        if action.act is Act.RECEIVE:
            into[:] = data
            return
        assert action.act is Act.COMBINE
        combined = rank[action.source][offset : offset + len(data)].copy()
        combine(self._reduction, combined, data)
        into[:] = combined


def check_shape(program: Program, graph: TaskGraph) -> None:
    """Every message once and in its order, no more scratch than before, views that fit."""
    assert graph.program is program
    assert graph.scratch_elements <= program.scratch_elements
    for sort, orders in ((Send, graph.sends), (Receive, graph.receives)):
        for peer in {op.peer for op in program.operations if isinstance(op, sort)} | set(orders):
            tags = [op.tag for op in program.operations if isinstance(op, sort) and op.peer == peer]
            assert [graph.actions[number].operation.tag for number in orders[peer]] == tags
    assert list(graph.sends) == sorted(graph.sends) and list(graph.receives) == sorted(graph.receives)
    used = 0
    for action in graph.actions:
        assert not (action.act is not Act.SEND and action.into.buffer is Buffer.INPUT)
        for part in (action.into, action.source):
            used = max(used, part.stop if part.buffer is Buffer.SCRATCH else 0)
    assert used == graph.scratch_elements

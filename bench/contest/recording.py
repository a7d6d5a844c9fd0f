"""A trace of what passes the channels of a rank.

A message is known by its place: those between two ranks come in
the order that their graphs give, so that bytes counted tell where one ends and the next begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from arborcast.backends.dataflow.recording import RecordedBytes, Recorder
from arborcast.backends.dataflow.task_graph import TaskGraph
from arborcast.backends.lowering.program import Receive, Send
from arborcast.bench.contest.ranks import ITEM_BYTES, Order, Participant, pieces_of
from arborcast.synth.schedule import Schedule


@dataclass(frozen=True)
class Part:
    """Bytes of one message that were handed over at once.

    Attributes:
        src: the rank that sends.
        dst: the rank that receives.
        chunk: of the schedule.
        piece: of the chunk.
        reduces: whether the receiver combines it with its own.
        size_bytes: of this part.
        at_s: after the begin of the run, by the clock that all ranks share.
        is_last: whether the message is complete with it.
    """

    src: int
    dst: int
    chunk: int
    piece: int
    reduces: bool
    size_bytes: int
    at_s: float = 0.0
    is_last: bool = True


@dataclass(frozen=True)
class Trace:
    """What one rank saw of one run.

    Attributes:
        seconds: from the common begin to its own end.
        cpu_seconds: of all its threads.
        sent: in the order in which it was handed to the channels.
        received: in the order in which it was used.
    """

    seconds: float
    cpu_seconds: float
    sent: tuple[Part, ...]
    received: tuple[Part, ...]


def trace_order(rank: int, address: str, store_path: str, order: Order) -> list[Trace]:
    """The traces of this rank, one for each run of the order's only contender, which has a schedule."""
    (contender,) = order.contenders
    schedule = contender.schedule
    assert schedule is not None, "gloo's messages cannot be seen"
    recorder = Recorder()
    participant = Participant(rank, address, store_path, order, watch=recorder)
    graph, call = participant.graph(schedule), participant.call(contender)
    out = {peer: _messages(graph, numbers, schedule, order) for peer, numbers in graph.sends.items()}
    into = {peer: _messages(graph, numbers, schedule, order) for peer, numbers in graph.receives.items()}
    traces = []
    for turn in range(1 + order.runs):
        recorder.forget()
        seen = participant.timed(call, contender.name)
        if turn:
            parts = (
                _cut(moments, known, participant.begun_at)
                for moments, known in ((recorder.sent, out), (recorder.received, into))
            )
            traces.append(Trace(seen.seconds, seen.cpu_seconds, *parts))
    return traces


def _messages(graph: TaskGraph, numbers: Iterable[int], schedule: Schedule, order: Order) -> list[Part]:
    """The whole messages of a line, in their order."""
    pieces, found = pieces_of(schedule, order), []
    for number in numbers:
        action = graph.actions[number]
        assert isinstance(action.operation, Send | Receive), "what has a peer is a message"
        index, piece = divmod(action.operation.tag, pieces)
        transfer = schedule.transfers[index]
        size = (action.into.stop - action.into.start) * ITEM_BYTES
        found.append(Part(transfer.src, transfer.dst, transfer.chunk, piece, transfer.reduce, size))
    return found


def _cut(
    moments: Iterable[RecordedBytes], messages: Mapping[int, list[Part]], begun_at: float
) -> tuple[Part, ...]:
    """Bytes that passed, by the messages that they belong to."""
    left = {
        peer: [(message, message.size_bytes) for message in reversed(known)]
        for peer, known in messages.items()
    }
    found = []
    for moment in moments:
        count = moment.count
        while count:
            message, rest = left[moment.peer].pop()
            taken = min(count, rest)
            count -= taken
            if taken < rest:
                left[moment.peer].append((message, rest - taken))
            found.append(replace(message, size_bytes=taken, at_s=moment.at - begun_at, is_last=taken == rest))
    return tuple(found)

"""Programs of all ranks in one process over a stand-in for NCCL: groups of messages, without tags.

A group is started as a whole and blocks its rank until all of its messages are over. The first send of a rank
to another meets the first receive there of it, whatever they are meant for. Data move at any moment between
the start of both ends and the end of both groups: a seed decides. What gloo forgives shows here: groups that
wait for each other in a circle, and slices that messages of one group touch twice.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import DTypeLike

from arborcast.backends.lowering.groups import MessageGroup, groups_of
from arborcast.backends.lowering.layout import Buffer, BufferSlice
from arborcast.backends.lowering.program import Program, Receive, Send
from arborcast.backends.measure.job import Array, Reduction
from tests.support.deadlock import DeadlockError, describe
from tests.support.definition import finish
from tests.support.interpreter import Machine, RankMemory


class HazardError(RuntimeError):
    """Messages of one group touch the same elements, and one of them writes."""


@dataclass
class _Rank:
    """Where a rank is.

    Attributes:
        groups: that are left, the next first.
        running: indices of the messages of the group that is started, which are not over.
    """

    program: Program
    groups: list[MessageGroup]
    running: set[int] = field(default_factory=set)


def run_grouped(
    programs: Sequence[Program],
    inputs: Sequence[Array | None],
    *,
    groups: Sequence[Sequence[MessageGroup]] | None = None,
    reduction: Reduction = Reduction.SUM,
    dtype: DTypeLike = np.int64,
    seed: int = 0,
) -> tuple[Array, ...]:
    """The output buffers after all programs have run; empty for ranks that get nothing.

    Args:
        programs: of ranks 0, 1, 2, ... in this order.
        inputs: of each rank its data, None for a rank that gives none.
        groups: of each rank; None for those of `groups_of`.
        reduction: how contributions are combined.
        dtype: of all buffers.
        seed: decides among all that may happen next.

    Raises:
        DeadlockError: groups wait for one another for ever, or ends of different lengths meet.
        HazardError: see there.
    """
    chance = random.Random(seed)
    every = groups if groups is not None else [groups_of(program) for program in programs]
    memories = [
        RankMemory(program, one, np.dtype(dtype)) for program, one in zip(programs, inputs, strict=True)
    ]
    machine = Machine(memories, reduction)
    ranks = [_Rank(*each) for each in zip(programs, map(list, every), strict=True)]
    sends: dict[tuple[int, int], list[int]] = defaultdict(list)  # started and not met, by rank and peer
    receives: dict[tuple[int, int], list[int]] = defaultdict(list)
    met: list[tuple[int, int, int, int]] = []  # rank and operation of both ends: data may move

    def start(number: int) -> None:
        rank = ranks[number]
        group = rank.groups.pop(0)
        for index in group.before:
            operation = rank.program.operations[index]
            assert not isinstance(operation, Send | Receive)
            machine.local(number, operation)
        refuse_hazards(rank.program, group)
        rank.running = set(group.messages)
        for index in group.messages:
            operation = rank.program.operations[index]
            if isinstance(operation, Send):
                sends[number, operation.peer].append(index)
                pair = number, operation.peer
            else:
                assert isinstance(operation, Receive)
                receives[operation.peer, number].append(index)
                pair = operation.peer, number
            while sends[pair] and receives[pair]:
                met.append((pair[0], sends[pair].pop(0), pair[1], receives[pair].pop(0)))

    def move(src: int, sent: int, dst: int, received: int) -> None:
        send, receive = ranks[src].program.operations[sent], ranks[dst].program.operations[received]
        assert isinstance(send, Send) and isinstance(receive, Receive)
        if send.source.length != receive.into.length:
            raise DeadlockError(f"rank {src}'s {send} meets rank {dst}'s {receive}")
        machine.deliver(src, send, receive)
        ranks[src].running.discard(sent)
        ranks[dst].running.discard(received)

    while True:
        free = [number for number, rank in enumerate(ranks) if rank.groups and not rank.running]
        if free and (not met or chance.random() < 0.5):
            start(chance.choice(free))
        elif met:
            move(*met.pop(chance.randrange(len(met))))
        else:
            break
    stuck = {n: rank.program.operations[min(rank.running)] for n, rank in enumerate(ranks) if rank.running}
    if stuck:
        raise DeadlockError(describe(stuck))
    for program, memory in zip(programs, memories, strict=True):
        finish(reduction, memory.buffers[Buffer.OUTPUT], program.contributors)
    return tuple(memory.buffers[Buffer.OUTPUT] for memory in memories)


def refuse_hazards(program: Program, group: MessageGroup) -> None:
    """Raise HazardError where a message of the group writes what another one reads or writes."""
    touched: list[tuple[BufferSlice, bool]] = []
    for index in group.messages:
        operation = program.operations[index]
        assert isinstance(operation, Send | Receive)
        writes = isinstance(operation, Receive)
        part = operation.into if isinstance(operation, Receive) else operation.source
        for other, written in touched:
            overlaps = part.buffer is other.buffer and part.start < other.stop and other.start < part.stop
            if overlaps and (writes or written):
                raise HazardError(f"rank {program.rank}, time {group.time}: {part} and {other} in one group")
        touched.append((part, writes))

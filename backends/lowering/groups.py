"""The groups of a program: which messages a rank starts together, and what it adds up and copies between.

Groups are in the order of their times on every rank, and both ends of a message have it in the group of the
same time: the first group that is not over anywhere has all its ends, so that none can wait for ever. Between
two ranks messages have one order, that of the schedule, which NCCL matches them by.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from arborcast.backends.lowering.program import Program, Receive, Send
from arborcast.synth.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class MessageGroup:
    """Messages that are started together.

    Attributes:
        time: of all of them.
        before: indices of the program's sums and copies that must be done first, in their order.
        messages: indices of its sends and receives, in the order that both ends share.
    """

    time: int
    before: tuple[int, ...]
    messages: tuple[int, ...]


def groups_of(program: Program) -> tuple[MessageGroup, ...]:
    """The groups of a program in their order; the last has no messages, if sums or copies are left.

    Raises:
        ScheduleError: a message needs another one of its own time: the program was not lowered for groups.
    """
    operations = program.operations
    messages = [index for index, it in enumerate(operations) if isinstance(it, Send | Receive)]
    done: set[int] = set()
    groups: list[MessageGroup] = []
    for time, together in groupby(messages, key=lambda index: operations[index].time):
        members = tuple(together)
        before: list[int] = []
        for index in members:
            for needed in _needed(program, index, done):
                if isinstance(operations[needed], Send | Receive):
                    raise ScheduleError(
                        f"rank {program.rank}: {operations[index]} at time {time} needs "
                        f"{operations[needed]}, which must be of an earlier time in programs for groups"
                    )
                before.append(needed)
                done.add(needed)
        done.update(members)
        groups.append(MessageGroup(time, tuple(before), members))
    left = tuple(index for index in range(len(operations)) if index not in done)
    return (*groups, MessageGroup(operations[left[-1]].time, left, ())) if left else tuple(groups)


def _needed(program: Program, index: int, done: set[int]) -> Iterator[int]:
    """What must be complete before an operation and is not, each after what it needs itself."""
    for before in program.operations[index].after:
        if before not in done:
            if not isinstance(program.operations[before], Send | Receive):
                yield from _needed(program, before, done)
            yield before

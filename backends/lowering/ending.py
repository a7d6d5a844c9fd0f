"""Programs at whose end all ranks know that all have finished: nobody leaves whom others may still need.

A word of one element goes up a tree of ranks that exchange messages anyway, when all is complete at a rank
and below it, and comes back down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from arborcast.backends.lowering.layout import Buffer, Slice
from arborcast.backends.lowering.program import Operation, Program, Receive, Send
from arborcast.synth.schedule import Schedule


def tree_of(schedule: Schedule) -> dict[int, int]:
    """For each rank but 0 the one before it, along ranks that exchange messages of the schedule."""
    after: dict[int, set[int]] = {rank: set() for rank in schedule.collective.ranks}
    for transfer in schedule.transfers:
        after[transfer.src].add(transfer.dst)
        after[transfer.dst].add(transfer.src)
    first = min(after)
    before: dict[int, int] = {}
    reached = [first]
    for rank in reached:  # grows meanwhile
        for other in sorted(after[rank]):
            if other != first and other not in before:
                before[other] = rank
                reached.append(other)
    return before


def with_end(program: Program, before: Mapping[int, int], last_time: int, last_tag: int) -> Program:
    """The program with the words that go up and down at its end.

    Args:
        program: of one rank, without a ring.
        before: as `tree_of` says.
        last_time: no message of any rank is later.
        last_tag: no message has a higher one.
    """
    rank = program.rank
    height = max((_depth(it, before) for it in before), default=0)
    depth = _depth(rank, before)
    operations: list[Operation] = list(program.operations)
    slot = program.scratch_elements

    def word() -> Slice:
        nonlocal slot
        slot += 1
        return Slice(Buffer.SCRATCH, slot - 1, slot)

    waited = {before for operation in operations for before in operation.after}
    ready = [number for number in range(len(operations)) if number not in waited]
    children = sorted(child for child, parent in before.items() if parent == rank)
    up = last_time + 1 + height - depth
    for child in children:
        ready.append(len(operations))
        operations.append(Receive(up - 1, child, word(), last_tag + 1 + child))
    if rank in before:
        own = word()
        operations.append(Send(up, before[rank], own, last_tag + 1 + rank, tuple(ready)))
        ready = [len(operations)]
        down = last_time + 1 + height + depth - 1
        tag = last_tag + 1 + max(before) + 1 + rank
        operations.append(Receive(down, before[rank], own, tag, (len(operations) - 1,)))
    own = word()
    for child in children:
        tag = last_tag + 1 + max(before) + 1 + child
        operations.append(Send(last_time + 1 + height + depth, child, own, tag, tuple(ready)))
    return replace(program, operations=tuple(operations), scratch_elements=slot)


def _depth(rank: int, before: Mapping[int, int]) -> int:
    depth = 0
    while rank in before:
        rank = before[rank]
        depth += 1
    return depth

"""Whether programs can all finish where a send blocks until its receive has started, and the other way.

This is the strictest transport there is: what finishes here finishes on any. It looks at the operations
only and knows nothing of how they were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from arborcast.backends.lowering.program import Copy, Operation, Program, Receive, Reduce, Send


class DeadlockError(RuntimeError):
    """Programs wait for one another for ever; the message names ranks and operations."""


class Handler(Protocol):
    """What carries out operations on data."""

    def local(self, rank: int, operation: Reduce | Copy) -> None:
        """An operation of one rank alone."""

    def deliver(self, src: int, send: Send, receive: Receive) -> None:
        """A message."""


def check_deadlock(programs: Sequence[Program], handler: Handler | None = None) -> None:
    """Run the programs with blocking sends and receives, by default without data.

    Each rank does its operations strictly in order, so which pairs meet does not depend on who is fast, and
    one run decides. Time is linear in the number of operations.

    Args:
        programs: of ranks 0, 1, 2, ... in this order.
        handler: is handed each operation when its turn comes.

    Raises:
        DeadlockError: some ranks wait for ever, or a send meets a receive of another length.
    """
    position = [0] * len(programs)
    awake = list(range(len(programs)))
    while awake:
        rank = awake.pop()
        head = _next_message(programs[rank], position, rank, handler)
        if head is None or not 0 <= head.peer < len(programs):
            continue
        other = _next_message(programs[head.peer], position, head.peer, handler)
        if meet(rank, head, head.peer, other):
            for src, one, two in ((rank, head, other), (head.peer, other, head)):
                if handler is not None and isinstance(one, Send) and isinstance(two, Receive):
                    handler.deliver(src, one, two)
            position[rank] += 1
            position[head.peer] += 1
            awake += [rank, head.peer]
    stuck = {
        program.rank: program.operations[index]
        for program, index in zip(programs, position, strict=True)
        if index < len(program.operations)
    }
    if stuck:
        raise DeadlockError(describe(stuck))


def meet(rank: int, mine: Operation, peer: int, theirs: Operation | None) -> bool:
    """Whether two operations are the two ends of one message.

    Raises:
        DeadlockError: they are, but of different lengths.
    """
    if isinstance(mine, Receive) and isinstance(theirs, Send):
        return meet(peer, theirs, rank, mine)
    if not (isinstance(mine, Send) and isinstance(theirs, Receive)):
        return False
    if mine.peer != peer or theirs.peer != rank or mine.tag != theirs.tag:
        return False
    if mine.source.length != theirs.into.length:
        raise DeadlockError(
            f"rank {rank}: {mine}, but rank {peer}: {theirs}; lengths must be equal, "
            f"got {mine.source.length} and {theirs.into.length}"
        )
    return True


def describe(stuck: dict[int, Operation]) -> str:
    """One line that follows who waits for whom, round the circle where there is one."""
    chain = [min(stuck)]
    while True:
        operation = stuck[chain[-1]]
        waits_for = operation.peer if isinstance(operation, Send | Receive) else None
        if waits_for is None or waits_for not in stuck:
            end = "which takes no further part" if waits_for is not None else ""
            break
        if waits_for in chain:
            chain = chain[chain.index(waits_for) :]
            end = "a circle"
            break
        chain.append(waits_for)
    steps = "; ".join(f"rank {rank} waits to {stuck[rank]}" for rank in chain)
    return f"{len(stuck)} ranks wait for ever: {steps}" + (f", {end}" if end else "")


def _next_message(
    program: Program, position: list[int], rank: int, handler: Handler | None
) -> Send | Receive | None:
    """Pass what is local; the message at which the rank is blocked, None at the end."""
    operations = program.operations
    while position[rank] < len(operations):
        operation = operations[position[rank]]
        if isinstance(operation, Send | Receive):
            return operation
        if handler is not None:
            handler.local(rank, operation)
        position[rank] += 1
    return None

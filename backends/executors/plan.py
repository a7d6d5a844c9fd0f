"""In which order one thread issues the operations of a program where sends and receives do not block.

A program's own order would do, but slowly: a receive that is posted late costs a round trip, and a wait that
comes early keeps data at home. A plan posts receives a few logical times ahead, issues the sends of a
logical time before it waits for what arrives in it, and waits for a message only where its completion
matters to the next operation.

It cannot deadlock where the program cannot: all that is waited for at logical time t is either of an earlier
time, or of time t and earlier in the program, while all sends of time t have been issued.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from arborcast.backends.lowering.program import Program, Receive, Reduce, Send


class Act(IntEnum):
    """What to do with an operation; `WAIT` is until a send or receive is complete."""

    POST = 0
    SEND = 1
    WAIT = 2
    REDUCE = 3
    COPY = 4


@dataclass(frozen=True, slots=True)
class Instruction:
    """Do this with the operation of that index."""

    act: Act
    operation: int


def plan(program: Program, *, lookahead: int = 4) -> tuple[Instruction, ...]:
    """The order of issue; every message is complete at the end.

    Args:
        program: of one rank.
        lookahead: how many logical times ahead a receive is posted, where what it must come after allows.
    """
    operations = program.operations
    order = sorted(
        range(len(operations)),
        key=lambda index: (operations[index].time, not isinstance(operations[index], Send)),
    )
    posts = _Posts(program, lookahead)
    complete: set[int] = set()
    instructions: list[Instruction] = []

    def await_all(indices: tuple[int, ...]) -> None:
        for index in indices:
            if index not in complete and isinstance(operations[index], Send | Receive):
                instructions.append(Instruction(Act.WAIT, index))
                complete.add(index)

    def post(indices: Iterator[int]) -> None:
        for index in indices:
            await_all(operations[index].after)
            instructions.append(Instruction(Act.POST, index))

    for index in order:
        operation = operations[index]
        sends = isinstance(operation, Send)
        post(posts.due(operation.time, sends))
        if isinstance(operation, Receive):
            post(posts.due_now(index))
            continue
        await_all(operation.after)
        if isinstance(operation, Send):
            instructions.append(Instruction(Act.SEND, index))
        else:
            act = Act.REDUCE if isinstance(operation, Reduce) else Act.COPY
            instructions.append(Instruction(act, index))
            complete.add(index)
            post(posts.due_after(index))
    await_all(tuple(order))
    return tuple(instructions)


class _Posts:
    """When each receive is posted: at a logical time, right after a local operation, or in its own place."""

    def __init__(self, program: Program, lookahead: int) -> None:
        operations = program.operations
        self._at_time: dict[int, list[int]] = defaultdict(list)
        self._after: dict[int, list[int]] = defaultdict(list)
        self._in_place: set[int] = set()
        for index, operation in enumerate(operations):
            if not isinstance(operation, Receive):
                continue
            local = [i for i in operation.after if not isinstance(operations[i], Send | Receive)]
            messages = [operations[i].time for i in operation.after if i not in local]
            early = max(operation.time - lookahead, 0) if operation.time else -1
            # A message of an earlier time may be waited for; one of this time only where the program does.
            allowed = max(early, 1 + max(messages, default=-2))
            last = max(local, default=None)
            if allowed > operation.time:
                self._in_place.add(index)
            elif last is not None and operations[last].time >= allowed:
                self._after[last].append(index)
            else:
                self._at_time[allowed].append(index)
        self._times = sorted(self._at_time, reverse=True)

    def due(self, time: int, sends: bool) -> Iterator[int]:
        """Receives due before an operation of this time; the sends of a time come before its posts."""
        first_later = time if sends else time + 1
        while self._times and self._times[-1] < first_later:
            yield from self._at_time[self._times.pop()]

    def due_after(self, operation: int) -> Iterator[int]:
        """Receives due right after a local operation."""
        yield from self._after.get(operation, ())

    def due_now(self, receive: int) -> Iterator[int]:
        """The receive itself where it has not been posted before its place."""
        if receive in self._in_place:
            yield receive

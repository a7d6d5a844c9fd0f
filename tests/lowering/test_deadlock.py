"""The check that programs can all finish where every send blocks, beside a slow search of its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.backends.lowering.layout import Buffer, BufferSlice
from arborcast.backends.lowering.program import Copy, Operation, Program, Receive, Send
from tests.support.deadlock import DeadlockError, check_deadlock, describe

HERE = BufferSlice(Buffer.OUTPUT, 0, 1)


def program(rank: int, *operations: Operation) -> Program:
    return Program(rank, operations, 0, 1, 0, True, 1)


def send(peer: int, tag: int) -> Send:
    return Send(0, peer, HERE, tag)


def receive(peer: int, tag: int) -> Receive:
    return Receive(0, peer, HERE, tag)


def finishes(programs: Sequence[Sequence[Operation]]) -> bool:
    """Whether everything can be done: whatever pair can meet does, until none can."""
    left = [list(operations) for operations in programs]
    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(left):
            if mine and isinstance(mine[0], Copy):
                mine.pop(0)
                moved = True
            for other, theirs in enumerate(left):
                tag = _tag(mine[0]) if mine else -1
                if mine and theirs and (mine[0], theirs[0]) == (send(other, tag), receive(rank, tag)):
                    mine.pop(0)
                    theirs.pop(0)
                    moved = True
    return not any(left)


def _tag(operation: Operation) -> int:
    return operation.tag if isinstance(operation, Send | Receive) else -1


@st.composite
def programs_in_some_order(draw: st.DrawFn) -> list[list[Operation]]:
    """Messages in one order that all ranks keep, or with some operations exchanged, changed or left out."""
    ranks = draw(st.integers(2, 5))
    pairs = st.tuples(st.integers(0, ranks - 1), st.integers(0, ranks - 1)).filter(
        lambda pair: pair[0] != pair[1]
    )
    programs: list[list[Operation]] = [[] for _ in range(ranks)]
    for tag, (source, target) in enumerate(draw(st.lists(pairs, max_size=12))):
        programs[source].append(send(target, tag))
        programs[target].append(receive(source, tag))
        if draw(st.booleans()):
            programs[target].append(Copy(0, HERE, HERE))
    for _ in range(draw(st.integers(0, 2))):
        operations = programs[draw(st.integers(0, ranks - 1))]
        if not operations:
            continue
        at = draw(st.integers(0, len(operations) - 1))
        match draw(st.sampled_from(["exchange", "leave out", "peer", "tag", "direction"])):
            case "exchange":
                operations[at], operations[at - 1] = operations[at - 1], operations[at]
            case "leave out":
                operations.pop(at)
            case "peer":
                peer = draw(st.integers(-1, ranks))
                changed = operations[at]
                if isinstance(changed, Send | Receive):
                    operations[at] = type(changed)(0, peer, HERE, changed.tag)
            case "tag":
                changed = operations[at]
                if isinstance(changed, Send | Receive):
                    operations[at] = type(changed)(0, changed.peer, HERE, changed.tag + 1)
            case _:
                changed = operations[at]
                if isinstance(changed, Send | Receive):
                    other = Receive if isinstance(changed, Send) else Send
                    operations[at] = other(0, changed.peer, HERE, changed.tag)
    return programs


@given(programs_in_some_order())
@settings(max_examples=400)
def test_as_a_slow_search_says(operations: list[list[Operation]]) -> None:
    programs = [program(rank, *mine) for rank, mine in enumerate(operations)]
    if finishes(operations):
        check_deadlock(programs)
    else:
        with pytest.raises(DeadlockError, match="ranks wait for ever"):
            check_deadlock(programs)


def test_a_rank_that_was_looked_at_too_early_is_looked_at_again() -> None:
    check_deadlock(
        [
            program(0, receive(3, 0), send(1, 2)),
            program(1, receive(3, 1), receive(0, 2)),
            program(2),
            program(3, send(0, 0), send(1, 1)),
        ]
    )


@pytest.mark.parametrize("peer", [-1, 2, 7])
def test_a_rank_that_does_not_exist_never_answers(peer: int) -> None:
    with pytest.raises(DeadlockError, match=f"1 ranks wait for ever: .*rank {peer}.*takes no further part"):
        check_deadlock([program(0, send(peer, 0)), program(1)])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (send(1, 0), send(0, 0)),  # both send
        (receive(1, 0), receive(0, 0)),  # both receive
        (send(1, 0), receive(0, 1)),  # two messages
        (send(1, 0), receive(2, 0)),  # from another rank
        (receive(1, 0), send(2, 0)),  # to another rank
    ],
)
def test_what_is_not_one_message_never_meets(first: Operation, second: Operation) -> None:
    with pytest.raises(DeadlockError, match="wait for ever"):
        check_deadlock([program(0, first), program(1, second), program(2)])


def test_who_waits_for_whom_is_followed_into_the_circle() -> None:
    programs = [
        program(0, receive(1, 0)),
        program(1, receive(2, 1)),
        program(2, receive(3, 2)),
        program(3, receive(1, 3)),
        program(4, receive(0, 4)),
    ]
    with pytest.raises(DeadlockError) as caught:
        check_deadlock(programs)
    said = str(caught.value)
    assert said.startswith("5 ranks wait for ever: rank 1 waits to ") and said.endswith(", a circle")
    assert [part.split()[1] for part in said.split(": ", 1)[1].split("; ")] == ["1", "2", "3"]


def test_who_waits_for_itself_waits_for_nobody() -> None:
    """The interpreter also names operations that no other rank takes part in."""
    assert (
        describe({2: Copy(0, HERE, HERE)}) == f"1 ranks wait for ever: rank 2 waits to {Copy(0, HERE, HERE)}"
    )


def test_two_ends_of_different_lengths_are_named() -> None:
    shorter = Receive(0, 0, BufferSlice(Buffer.OUTPUT, 0, 0), 7)
    with pytest.raises(DeadlockError, match="lengths must be equal, got 1 and 0"):
        check_deadlock([program(0, send(1, 7)), program(1, shorter)])

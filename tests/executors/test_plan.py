"""Plans issue every operation once, in time, and cannot deadlock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.backends.executors.plan import Act, Instruction, plan
from arborcast.backends.lowering.layout import lay_out
from arborcast.backends.lowering.lower import lower, lower_rank
from arborcast.backends.lowering.program import Program, Receive, Send
from arborcast.synth.schedule import Schedule
from tests.support.drawn_schedules import recursive_doubling, ring_allreduce, schedules


@given(
    schedules(), st.integers(0, 20), st.integers(1, 4), st.integers(1, 3), st.sampled_from([0, 1, 2, 4, 100])
)
@settings(max_examples=200)
def test_plans_are_complete_and_finish(
    schedule: Schedule, size: int, pieces: int, window: int, lookahead: int
) -> None:
    programs = lower(schedule, size * lay_out(schedule, 0).blocks, pieces=pieces, window=window)
    plans = [plan(program, lookahead=lookahead) for program in programs]
    for program, instructions in zip(programs, plans, strict=True):
        _check_order(program, instructions)
    _check_progress(programs, plans)


def _check_order(program: Program, instructions: Sequence[Instruction]) -> None:
    """Nothing starts before what it names in `after` is complete; messages are issued and awaited once."""
    started: list[int] = []
    complete: list[int] = []
    for instruction in instructions:
        operation = program.operations[instruction.operation]
        if instruction.act is Act.WAIT:
            assert instruction.operation in started
            complete.append(instruction.operation)
            continue
        assert set(operation.after) <= set(complete)
        started.append(instruction.operation)
        if not isinstance(operation, Send | Receive):
            complete.append(instruction.operation)
    everything = list(range(len(program.operations)))
    assert sorted(started) == sorted(complete) == everything


def _check_progress(programs: Sequence[Program], plans: Sequence[Sequence[Instruction]]) -> None:
    """A message is complete once both ends are posted; every rank gets through its plan."""
    position = [0] * len(plans)
    posted: set[tuple[int, int, int]] = set()
    moved = True
    while moved:
        moved = False
        for rank, instructions in enumerate(plans):
            while position[rank] < len(instructions):
                instruction = instructions[position[rank]]
                operation = programs[rank].operations[instruction.operation]
                if isinstance(operation, Send | Receive):
                    if instruction.act is not Act.WAIT:
                        posted.add((rank, operation.peer, operation.tag))
                    elif (operation.peer, rank, operation.tag) not in posted:
                        break
                position[rank] += 1
                moved = True
    assert position == [len(instructions) for instructions in plans]


@pytest.mark.parametrize("lookahead", [1, 4])
def test_receives_are_posted_ahead(lookahead: int) -> None:
    program = lower_rank(ring_allreduce(4), 0, 1000, pieces=8)
    at = {(i.act, i.operation): position for position, i in enumerate(plan(program, lookahead=lookahead))}
    for index, operation in enumerate(program.operations):
        if isinstance(operation, Receive) and operation.time >= lookahead and not operation.after:
            sends = [
                position
                for (act, other), position in at.items()
                if act is Act.SEND and program.operations[other].time > operation.time - lookahead
            ]
            assert at[Act.POST, index] < min(sends)


def test_an_exchange_as_drawn() -> None:
    acts = plan(lower_rank(recursive_doubling(), 1, 6, window=1))
    # Operations: 0 receive, 1 send, 2 reduce, 3 send, 4 receive into the same scratch, 5 reduce.
    assert [(i.act.name, i.operation) for i in acts] == [
        ("POST", 0),
        ("SEND", 1),
        ("WAIT", 0),
        ("WAIT", 1),
        ("REDUCE", 2),
        ("POST", 4),
        ("SEND", 3),
        ("WAIT", 3),
        ("WAIT", 4),
        ("REDUCE", 5),
    ]

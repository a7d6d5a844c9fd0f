"""Group calls finish, whatever the transport does, and give what the collective is defined to give.

The transport is simulated as NCCL promises it: a rank's calls follow one another; within a call everything
progresses at once; messages of a pair have no names and match in their order.
"""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict, deque
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.backends.executors.grouped_plan import ALIGNMENT, GroupedPlan, Phase, PhaseError, plan_groups
from arborcast.backends.lowering.layout import Buffer, Slice, lay_out
from arborcast.backends.lowering.lower import lower, lower_rank
from arborcast.backends.lowering.program import Copy, Operation, Program, Receive, Reduce, Send
from arborcast.backends.measure.job import Array, Reduction
from arborcast.backends.measure.samples import sample_data
from arborcast.synth.collective import Kind
from arborcast.synth.schedule import Chunk, Schedule, Transfer
from tests.support.deadlock import DeadlockError
from tests.support.definition import combine, define, finish
from tests.support.drawn_schedules import (
    DRAWN,
    direct,
    make,
    recursive_doubling,
    ring_allreduce,
    schedules,
    uneven_allreduce,
)

Pair = tuple[int, int]


class Simulation:
    """All ranks at once; a seed decides what happens next among all that may.

    With `eager` a send may leave before its receive is there, as small messages do; without it, a message
    passes when the calls of both its ends have begun. Either way data is read and written at any moment of
    the calls, so that whatever else is touched meanwhile shows.
    """

    def __init__(
        self,
        plans: Sequence[GroupedPlan],
        inputs: Sequence[Array | None],
        reduction: Reduction,
        seed: int,
        eager: bool,
    ) -> None:
        self._plans = plans
        self._chance = random.Random(seed)
        self._reduction = reduction
        self._eager = eager
        self._memory = [_memory(plan, array) for plan, array in zip(plans, inputs, strict=True)]
        self._phase = [0] * len(plans)
        self._during = [0] * len(plans)
        self._sends: dict[Pair, deque[Send]] = defaultdict(deque)
        self._receives: dict[Pair, deque[Receive]] = defaultdict(deque)
        self._flying: dict[Pair, deque[Array]] = defaultdict(deque)
        self._open: list[int] = [0] * len(plans)  # messages of the current call that are not complete

    def run(self) -> list[Array]:
        for rank in range(len(self._plans)):
            self._begin(rank)
        while actions := self._possible():
            name, rank, peer = self._chance.choice(actions)
            getattr(self, name)(rank, peer)
        left = [rank for rank, plan in enumerate(self._plans) if self._phase[rank] < len(plan.phases)]
        if left:
            raise DeadlockError(f"ranks {left} wait for ever")
        for plan, memory in zip(self._plans, self._memory, strict=True):
            finish(self._reduction, memory[Buffer.OUTPUT], plan.program.contributors)
        return [memory[Buffer.OUTPUT] for memory in self._memory]

    def _current(self, rank: int) -> Phase | None:
        phases = self._plans[rank].phases
        return phases[self._phase[rank]] if self._phase[rank] < len(phases) else None

    def _begin(self, rank: int) -> None:
        phase = self._current(rank)
        if phase is None:
            return
        for message in phase.messages:
            if isinstance(message, Send):
                self._sends[rank, message.peer].append(message)
            else:
                self._receives[message.peer, rank].append(message)
        self._open[rank] = len(phase.messages)
        self._during[rank] = 0

    def _possible(self) -> list[tuple[str, int, int]]:
        actions = []
        for pair, sends in self._sends.items():
            if sends and (self._eager or len(self._receives[pair]) > len(self._flying[pair])):
                actions.append(("_depart", *pair))
        for pair, flying in self._flying.items():
            if flying and self._receives[pair]:
                actions.append(("_arrive", *pair))
        for rank in range(len(self._plans)):
            phase = self._current(rank)
            if phase is None:
                continue
            if self._during[rank] < len(phase.during):
                actions.append(("_work", rank, rank))
            elif not self._open[rank]:
                actions.append(("_end", rank, rank))
        return actions

    def _depart(self, rank: int, peer: int) -> None:
        send = self._sends[rank, peer].popleft()
        self._flying[rank, peer].append(self._at(rank, send.source).copy())
        self._open[rank] -= 1

    def _arrive(self, rank: int, peer: int) -> None:
        data = self._flying[rank, peer].popleft()
        receive = self._receives[rank, peer].popleft()
        assert len(data) == receive.into.length, "the ends of a message disagree"
        self._at(peer, receive.into)[:] = data
        self._open[peer] -= 1

    def _work(self, rank: int, _: int) -> None:
        phase = self._current(rank)
        assert phase is not None
        self._do(rank, phase.during[self._during[rank]])
        self._during[rank] += 1

    def _end(self, rank: int, _: int) -> None:
        phase = self._current(rank)
        assert phase is not None
        for operation in phase.after:
            self._do(rank, operation)
        self._phase[rank] += 1
        self._begin(rank)

    def _do(self, rank: int, operation: Reduce | Copy) -> None:
        into, source = self._at(rank, operation.into), self._at(rank, operation.source)
        if isinstance(operation, Reduce):
            combine(self._reduction, into, source)
        else:
            into[:] = source

    def _at(self, rank: int, part: Slice) -> Array:
        return self._memory[rank][part.buffer][part.start : part.stop]


def _memory(plan: GroupedPlan, given: Array | None) -> dict[Buffer, Array]:
    program = plan.program
    sizes = {Buffer.INPUT: program.input_elements, Buffer.OUTPUT: program.output_elements}
    sizes[Buffer.SCRATCH] = plan.scratch_elements
    memory = {buffer: np.full(size, -(2**30) + 7) for buffer, size in sizes.items()}
    if given is not None:
        memory[Buffer.OUTPUT if program.in_place else Buffer.INPUT][:] = given
    return memory


def _data(schedule: Schedule, program: Program, reduction: Reduction) -> Array | None:
    collective = schedule.collective
    if collective.kind in {Kind.BROADCAST, Kind.SCATTER}:
        gives = program.rank == collective.root
    else:
        gives = program.rank in collective.ranks
    if not gives:
        return None
    elements = program.output_elements if program.in_place else program.input_elements
    data = np.zeros(elements, dtype=np.int64)
    for start, part in sample_data(
        collective, program.rank, elements, dtype="int64", reduction=reduction, seed=0
    ):
        data[start : start + len(part)] = part
    return data


def simulate(
    schedule: Schedule,
    size: int,
    *,
    pieces: int = 1,
    window: int = 8,
    reduction: Reduction = Reduction.SUM,
    seed: int = 0,
    eager: bool = False,
) -> list[GroupedPlan]:
    programs = lower(schedule, size * lay_out(schedule, 0).blocks, pieces=pieces, window=window)
    plans = [plan_groups(program) for program in programs]
    inputs = [_data(schedule, program, reduction) for program in programs]
    expected = define(schedule.collective, inputs, reduction)
    for rank, (wanted, got) in enumerate(
        zip(expected, Simulation(plans, inputs, reduction, seed, eager).run(), strict=True)
    ):
        if wanted is None:
            assert not len(got), f"rank {rank} gets nothing"
        else:
            np.testing.assert_array_equal(got, wanted, f"rank {rank}")
    return plans


def check_plan(plan: GroupedPlan) -> None:
    """Everything once, at its time, in order; nothing written in a call that is touched elsewhere in it."""
    messages = [m for m in plan.program.operations if isinstance(m, Send | Receive)]
    done = [m for phase in plan.phases for m in phase.messages]
    assert sorted(_name(m) for m in messages) == sorted(_name(m) for m in done)
    times = [phase.time for phase in plan.phases]
    assert times == sorted(set(times))
    for phase in plan.phases:
        assert all(message.time == phase.time for message in phase.messages)
        tags = [message.tag for message in phase.messages]
        assert tags == sorted(tags)
        for one, other in combinations((*phase.messages, *phase.during), 2):
            if isinstance(one, Reduce | Copy) and isinstance(other, Reduce | Copy):
                continue
            assert not _clash(one, other), f"{one} / {other}"
    touched = [
        part
        for phase in plan.phases
        for o in (*phase.messages, *phase.during, *phase.after)
        for part in _touched(o)
    ]
    assert all(part.stop <= plan.scratch_elements for part in touched if part.buffer is Buffer.SCRATCH)


def _name(message: Send | Receive) -> tuple[Any, ...]:
    length = (message.source if isinstance(message, Send) else message.into).length
    return (message.time, message.tag, isinstance(message, Send), message.peer, length)


def _touched(operation: Operation) -> list[Slice]:
    return [getattr(operation, name) for name in ("source", "into") if hasattr(operation, name)]


def _clash(one: Operation, other: Operation) -> bool:
    return any(
        hasattr(a, "into")
        and a.into.buffer is part.buffer
        and a.into.start < part.stop
        and part.start < a.into.stop
        for a, b in ((one, other), (other, one))
        for part in _touched(b)
    )


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_schedules(name: str) -> None:
    for size in (0, 1, 2, 23):
        for pieces in (1, 3):
            for window in (1, 8):
                for plan in simulate(DRAWN[name], size, pieces=pieces, window=window, seed=size):
                    check_plan(plan)


@given(
    schedules(),
    st.integers(0, 50),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 2**16),
    st.booleans(),
)
@settings(max_examples=300)
def test_random_schedules(
    schedule: Schedule, size: int, pieces: int, window: int, seed: int, eager: bool
) -> None:
    for plan in simulate(schedule, size, pieces=pieces, window=window, seed=seed, eager=eager):
        check_plan(plan)


@given(schedules([kind for kind in Kind if kind.reduces]), st.sampled_from(Reduction), st.integers(0, 2**16))
@settings(max_examples=60)
def test_every_reduction(schedule: Schedule, reduction: Reduction, seed: int) -> None:
    simulate(schedule, 12, pieces=2, reduction=reduction, seed=seed, eager=True)


def lines(plan: GroupedPlan) -> list[str]:
    """A line per phase: time | messages | during | after."""
    return [
        " | ".join(
            [
                str(phase.time),
                *(", ".join(map(_short, part)) for part in (phase.messages, phase.during, phase.after)),
            ]
        )
        for phase in plan.phases
    ]


def _short(operation: Operation) -> str:
    match operation:
        case Send():
            return f"{_place(operation.source)}>{operation.peer}"
        case Receive():
            return f"{operation.peer}>{_place(operation.into)}"
        case Reduce():
            return f"{_place(operation.into)}+={_place(operation.source)}"
        case Copy():
            return f"{_place(operation.into)}={_place(operation.source)}"


def _place(part: Slice) -> str:
    return f"{part.buffer.value[0]}{part.start}:{part.stop}"


def test_a_pipeline() -> None:
    """A chain 0 > 1 > 2 with three pieces of two elements."""
    chain = [Transfer(0, 0, 1, 0), Transfer(0, 1, 2, 1)]
    programs = lower(make("broadcast", [Chunk(Fraction(1), 0)], chain, total=3), 6, pieces=3)
    assert lines(plan_groups(programs[1])) == [
        "0 | 0>o0:2 |  | ",
        "1 | 0>o2:4, o0:2>2 |  | ",
        "2 | 0>o4:6, o2:4>2 |  | ",
        "3 | o4:6>2 |  | ",
    ]


def test_what_the_next_call_needs_not_is_done_while_it_runs() -> None:
    """Rank 0 exchanges with 1, then with 2; its first piece is complete one call before the second."""
    assert lines(plan_groups(lower(recursive_doubling(), 32, pieces=2)[0])) == [
        "0 | o0:16>1, 1>s0:16 |  | o0:16+=s0:16",
        "1 | o16:32>1, 1>s0:16, o0:16>2, 2>s16:32 |  | o16:32+=s0:16",
        "2 | o16:32>2, 2>s0:16 | o0:16+=s16:32 | o16:32+=s0:16",
    ]


def test_the_own_block_is_copied_while_messages_pass() -> None:
    programs = lower(direct("alltoall", 2), 8)
    assert lines(plan_groups(programs[0])) == ["0 | i4:8>1, 1>o4:8 | o0:4=i0:4 | "]
    assert plan_groups(lower(direct("alltoall", 2), 0)[0]).phases == ()


def replaced_while_sent() -> Schedule:
    """Rank 1 adds all up; while it sends the sum to 0, rank 0 sends its own value, for nothing, to 2."""
    transfers = [
        Transfer(0, 0, 1, 0, True),
        Transfer(0, 2, 1, 0, True),
        Transfer(0, 0, 2, 1),
        Transfer(0, 1, 0, 1),
        Transfer(0, 1, 2, 2),
    ]
    return make("allreduce", [Chunk(Fraction(1), 1)], transfers, total=3)


def test_what_would_overwrite_a_slice_that_is_being_sent_is_staged() -> None:
    for seed in range(20):
        plans = simulate(replaced_while_sent(), 4, seed=seed)
    assert lines(plans[0]) == ["0 | o0:4>1 |  | ", "1 | o0:4>2, 1>s0:4 |  | o0:4=s0:4"]
    check_plan(plans[0])
    with pytest.raises(AssertionError, match=r"send output\[0:4\].* / receive output\[0:4\]"):
        check_plan(naive(plans[0].program))


def naive(program: Program) -> GroupedPlan:
    """Operations by their times, where the program has them."""
    times = sorted({operation.time for operation in program.operations})
    phases = []
    for time in times:
        now = [operation for operation in program.operations if operation.time == time]
        messages = [o for o in now if isinstance(o, Send | Receive)]
        local = [o for o in now if isinstance(o, Reduce | Copy)]
        phases.append(Phase(time, tuple(sorted(messages, key=lambda m: m.tag)), (), tuple(local)))
    return GroupedPlan(program, tuple(phases), program.scratch_elements)


def star(leaves: int) -> Schedule:
    transfers = [Transfer(0, leaf, 0, 0, True) for leaf in range(1, leaves + 1)]
    return make("reduce", [Chunk(Fraction(1), 0)], transfers, total=leaves + 1)


def test_the_simulation_finds_the_races_that_plans_avoid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three leaves and two slots: the third message would overwrite the first before it is added."""
    programs = lower(star(3), 16, window=2)
    with pytest.raises(AssertionError, match=r"receive scratch\[0:16\].* / receive scratch\[0:16\]"):
        check_plan(naive(programs[0]))
    monkeypatch.setitem(globals(), "plan_groups", naive)
    with pytest.raises(AssertionError, match="rank 0"):
        simulate(star(3), 16, window=2)


def test_the_simulation_finds_calls_in_another_order() -> None:
    schedule = ring_allreduce(3)
    plans = [plan_groups(program) for program in lower(schedule, 9)]
    inputs = [_data(schedule, plan.program, Reduction.SUM) for plan in plans]
    swapped = dataclasses.replace(
        plans[0], phases=(plans[0].phases[1], plans[0].phases[0], *plans[0].phases[2:])
    )
    with pytest.raises(DeadlockError, match=r"ranks \[0, 1, 2\] wait for ever"):
        crossed = [
            dataclasses.replace(plan, phases=_split(plan.phases[0]) + plan.phases[1:]) for plan in plans
        ]
        Simulation(crossed, inputs, Reduction.SUM, 0, eager=False).run()
    found = Simulation([swapped, *plans[1:]], inputs, Reduction.SUM, 0, eager=True).run()
    expected = define(schedule.collective, inputs, Reduction.SUM)
    assert any(not np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def _split(phase: Phase) -> tuple[Phase, ...]:
    """Receives and sends in two calls: a circle of ranks that all receive first."""
    receives = tuple(m for m in phase.messages if isinstance(m, Receive))
    sends = tuple(m for m in phase.messages if isinstance(m, Send))
    return (
        dataclasses.replace(phase, messages=receives, after=()),
        dataclasses.replace(phase, messages=sends, during=()),
    )


def test_a_program_whose_messages_need_one_another_at_one_time_is_refused() -> None:
    part = Slice(Buffer.OUTPUT, 0, 4)
    relay = (Receive(2, 1, part, 0), Send(2, 2, part, 1, (0,)))
    with pytest.raises(PhaseError, match=r"rank 0, time 2: send output.* \(tag 1\) belongs to a group"):
        plan_groups(Program(0, relay, 0, 4, 0, True, 1))
    doubled = (Reduce(2, part, part), Send(2, 2, part, 1, (0,)))
    with pytest.raises(PhaseError, match=r"rank 0, time 2: reduce .* belongs to a group call"):
        plan_groups(Program(0, doubled, 0, 4, 0, True, 1))


def test_scratch_is_used_again_from_phase_to_phase() -> None:
    """A ring of four in 16 pieces has at most three of its reductions in flight on a rank."""
    plan = plan_groups(lower_rank(ring_allreduce(4), 0, 1 << 12, pieces=16))
    assert plan.scratch_elements == 3 * (1 << 12) // 4 // 16
    ragged = plan_groups(lower_rank(uneven_allreduce(), 0, 10_000, pieces=3))
    starts = {
        message.into.start
        for phase in ragged.phases
        for message in phase.messages
        if isinstance(message, Receive) and message.into.buffer is Buffer.SCRATCH
    }
    assert all(start % ALIGNMENT == 0 for start in starts)
    assert ragged.scratch_elements < 10_000

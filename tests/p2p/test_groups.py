"""Groups of messages: of every way to make schedules, and what the stand-in for NCCL finds wrong."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from arborcast import synth, topologies
from arborcast.backends import Executor, Program, lower
from arborcast.backends.lowering.groups import MessageGroup, groups_of
from arborcast.backends.lowering.layout import Buffer, BufferSlice, lay_out
from arborcast.backends.lowering.program import Receive, Send
from arborcast.backends.measure.job import Array, Reduction
from arborcast.synth.collective import NAMED_KINDS, Collective, Demand, Kind
from arborcast.synth.errors import InputError, ScheduleError
from arborcast.synth.implicit_schedule import AnySchedule
from tests.support.deadlock import DeadlockError
from tests.support.definition import define, inputs_of
from tests.support.drawn_implicit import KINDS as IMPLICIT_KINDS
from tests.support.drawn_implicit import grid, implicit
from tests.support.drawn_schedules import DRAWN
from tests.support.grouped_messages import HazardError, run_grouped
from tests.support.ranks import StandingRanks


def right(
    schedule: AnySchedule,
    programs: Sequence[Program],
    groups: Sequence[Sequence[MessageGroup]] | None,
    seed: int,
) -> bool:
    """Whether a run gives what the collective is defined to give."""
    count = 5 * lay_out(schedule, 0).blocks
    inputs = [
        None if it is None else it.astype(np.int64)
        for it in inputs_of(schedule, count, "int64", Reduction.SUM)
    ]
    found = run_grouped(programs, inputs, groups=groups, seed=seed)
    wanted: list[Array | None] = define(schedule.collective, inputs, Reduction.SUM)
    pairs = zip(wanted, found, strict=True)
    return all(want is None or not len(want) or np.array_equal(want, got) for want, got in pairs)


def lowered(schedule: AnySchedule, pieces: int, window: int = 8) -> tuple[Program, ...]:
    count = 5 * lay_out(schedule, 0).blocks
    return lower(schedule, count, pieces=pieces, window=window, grouped=True)


@pytest.mark.parametrize("kind", NAMED_KINDS)
@pytest.mark.parametrize("spec", ["dgx1", "mesh:2x3", "star:4"])
def test_schedules_of_every_kind(spec: str, kind: Kind) -> None:
    schedule = synth.solve(topologies.load(spec), kind.value)
    for pieces, window in ((1, 1), (3, 1), (4, 8)):
        assert right(schedule, lowered(schedule, pieces, window), None, seed=pieces)


@pytest.mark.parametrize("kind", IMPLICIT_KINDS)
def test_implicit_forms_are_grouped_as_when_written_out(kind: Kind) -> None:
    schedule = implicit(grid(2, 2, hubs=True), kind)
    programs = lowered(schedule, 3, 1)
    assert programs == lowered(schedule.expand(), 3, 1)
    assert right(schedule, programs, None, seed=0)


def test_relays_and_blocks_of_ones_own() -> None:
    fabric = topologies.load("ring:4", ranks=[0, 2], relays=True)
    some = synth.solve(fabric, "allreduce", ranks=(0, 1))
    asked = [Demand(frozenset({0}), frozenset({2, 3})), Demand(frozenset({1, 3}), frozenset({0}))]
    for schedule in (some, synth.solve(fabric, Collective.custom(fabric, asked))):
        assert right(schedule, lowered(schedule, 2), None, seed=1)


@pytest.mark.parametrize("pattern", ["ring", "halving-doubling", "swing", "bine", "multiring", "levels"])
def test_patterns(pattern: str) -> None:
    schedule = synth.solve(topologies.load("full:8"), "allreduce", method=pattern)
    assert right(schedule, lowered(schedule, 2), None, seed=2)


def test_both_ends_of_a_message_are_in_the_groups_of_one_time() -> None:
    programs = lowered(synth.solve(topologies.load("dgx1"), "allreduce"), 4)
    found = [groups_of(program) for program in programs]
    for program, groups in zip(programs, found, strict=True):
        assert [group.time for group in groups] == sorted(group.time for group in groups)
        named = [index for group in groups for index in (*group.before, *group.messages)]
        assert sorted(named) == list(range(len(program.operations)))
        for group in groups:
            for index in group.messages:
                operation = program.operations[index]
                assert isinstance(operation, Send | Receive) and operation.time == group.time
                (other,) = (
                    it
                    for it in programs[operation.peer].operations
                    if isinstance(it, Send | Receive) and it.tag == operation.tag
                )
                assert other.time == group.time


# --- what is wrong is found ------------------------------------------------------------------------------


def test_programs_that_were_not_lowered_for_groups_are_refused() -> None:
    """Ranks exchange halves in pieces: a slot that a first one frees would take a second of the same time."""
    schedule = DRAWN["exchange"]
    plain = lower(schedule, 5 * lay_out(schedule, 0).blocks, pieces=2, window=1)
    with pytest.raises(ScheduleError, match=r"rank 0: receive .* at time 1 needs send .* of an earlier time"):
        groups_of(plain[0])
    assert right(schedule, lowered(schedule, 2, 1), None, seed=0)


def crossed(groups: Sequence[MessageGroup], at: int) -> list[MessageGroup]:
    return [*groups[:at], groups[at + 1], groups[at], *groups[at + 2 :]]


@pytest.mark.parametrize("seed", range(5))
def test_groups_that_wait_for_each_other_in_a_circle(seed: int) -> None:
    """Around a ring, one rank starts its second group first: its neighbours wait for it, and it for them."""
    schedule = DRAWN["ring"]
    programs = lowered(schedule, 1)
    groups = [groups_of(program) for program in programs]
    groups[1] = tuple(crossed(groups[1], 0))
    with pytest.raises((DeadlockError, AssertionError)):
        assert right(schedule, programs, groups, seed)


def test_a_send_and_its_receive_in_groups_that_wait_on_each_other() -> None:
    """Tags forgive this: each rank sends in its first group what the other receives in its second."""
    place = [BufferSlice(Buffer.OUTPUT, it, it + 1) for it in range(4)]
    programs = [
        Program(
            rank,
            (Send(0, 1 - rank, place[0], rank), Receive(1, 1 - rank, place[1], 1 - rank)),
            0,
            2,
            0,
            True,
            1,
        )
        for rank in range(2)
    ]
    data: list[Array | None] = [np.array([rank, 0]) for rank in range(2)]
    with pytest.raises(DeadlockError):
        run_grouped(programs, data)
    together = [replace(it, operations=tuple(replace(op, time=0) for op in it.operations)) for it in programs]
    assert [list(found) for found in run_grouped(together, data)] == [[0, 1], [1, 0]]


def test_slices_that_one_group_touches_twice() -> None:
    place = BufferSlice(Buffer.OUTPUT, 0, 2)
    for other in (Send(0, 1, BufferSlice(Buffer.OUTPUT, 1, 3), 1), Receive(0, 1, place, 1)):
        program = Program(0, (Receive(0, 1, place, 0), other), 0, 3, 0, True, 1)
        with pytest.raises(HazardError, match="rank 0, time 0"):
            run_grouped([program, Program(1, (), 0, 0, 0, True, 1)], [np.zeros(3), None])
    twice = Program(0, (Send(0, 1, place, 0), Send(0, 2, place, 1)), 0, 3, 0, True, 1)
    assert len(groups_of(twice)) == 1  # what is only read may be read twice


@pytest.mark.parametrize("name", ["ring", "exchange"])
def test_changes_of_order_are_found_or_do_no_harm(name: str) -> None:
    """Neighbouring groups of one rank exchanged, at every place: whatever harms a result does not pass."""
    schedule = DRAWN[name]
    programs = lowered(schedule, 2)
    found = tried = 0
    for rank in range(len(programs)):
        for at in range(len(groups_of(programs[rank])) - 1):
            groups = [groups_of(program) for program in programs]
            groups[rank] = tuple(crossed(groups[rank], at))
            tried += 1
            for seed in range(3):
                try:
                    passed = right(schedule, programs, groups, seed)
                except (DeadlockError, HazardError):
                    passed = False
                if not passed:
                    found += 1
                    break
    assert tried > 4 and found >= tried // 2


ranks = StandingRanks(DRAWN["ring"].topology.ranks, backend="gloo")


@ranks.check
def test_the_example_gives_the_sums_of_the_library(rank: int, size: int) -> None:
    """What `torchrun examples/grouped_messages.py` does on each rank."""
    file = Path(__file__).resolve().parents[2] / "examples" / "grouped_messages.py"
    equal, *_ = runpy.run_path(str(file))["main"](f"full:{size}", 1003, repeats=1)
    assert equal


@ranks.check
def test_other_devices_and_backends_are_refused(rank: int, size: int) -> None:
    for device, message in (
        ("cuda:0", "needs nccl for tensors on cuda, the process group has gloo"),
        ("meta", "device must be one of cpu, cuda, got meta"),
    ):
        with pytest.raises(InputError, match=message):
            Executor(DRAWN["ring"], device=device)

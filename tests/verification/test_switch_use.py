"""Schedules that add and multicast in switches: right ones pass, and every rule is broken once."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.certificate import Scope
from arborcast.synth.collective import Kind
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.schedule import Chunk, Schedule
from arborcast.synth.topology import Switch
from arborcast.synth.verification.verifier import verify
from tests.support.drawn_in_network import (
    BOTH,
    NVLS,
    TURNS,
    drawn,
    implicit_star,
    implicit_two_stars,
    star,
    two_stars,
)
from tests.verification.drawn import (
    CASES,
    SWITCHES,
    SlowReplay,
    check_objections,
    right,
    with_abilities,
    without,
)
from tests.verification.test_implicit_verifier import (
    BREAK,
    check_judged_as_when_written_out,
    judged,
    unlinked,
)

RIGHT = {name: right(name, "right in switches") for name in CASES["right in switches"]}


@pytest.mark.parametrize("name", RIGHT)
def test_right_schedules_pass_with_the_drawn_rate(name: str) -> None:
    schedule, rate = RIGHT[name]
    verdict = verify(schedule)
    assert verdict.errors == ()
    assert verdict.rate == schedule.rate == rate
    assert verdict.loads == schedule.load


@pytest.mark.parametrize("name", RIGHT)
def test_no_transfer_can_be_dropped_and_no_ability_either(name: str) -> None:
    schedule, _ = RIGHT[name]
    for position in range(len(schedule.transfers)):
        assert not verify(without(schedule, position)).correct
    if name != "broadcast by a switch that forwards":
        less = [
            with_abilities(schedule, **{**NOTHING, ability: True}) for ability in ("reduces", "multicasts")
        ]
        assert any("that does not" in line for fewer in less for line in verify(fewer).errors)


NOTHING = {"reduces": False, "multicasts": False, "turns": False, "loopback": False}


def broken(schedule: Schedule, *messages: str) -> None:
    assert verify(schedule).errors == messages


@pytest.mark.parametrize("name", CASES["broken in switches"])
def test_each_rule_broken_once(name: str) -> None:
    check_objections(name, "broken in switches")


def test_the_adder_limits_the_rate() -> None:
    for name, sums in (("allreduce that turns", 1), ("allreduce without turning", 1), ("broadcast", 0)):
        schedule, rate = RIGHT[name]
        slow = with_abilities(schedule, reduces=True, adder=Fraction(1, 3)) if sums else schedule
        again = Schedule.build(
            slow.topology, slow.collective, slow.method, slow.bound, slow.chunks, slow.transfers
        )
        assert again.rate == (Fraction(1, 3) if sums else rate)
        assert verify(again).correct and verify(again).rate == again.rate


def test_each_adder_is_looked_at() -> None:
    """The first of two switches has an adder without limit, the second one is too slow."""
    schedule, _ = RIGHT["two levels"]
    left, right = schedule.topology.switches
    slow = replace(right, adder=Fraction(3, 4))
    broken(
        replace(schedule, topology=replace(schedule.topology, symmetries=(), switches=(left, slow))),
        "switch right: adds 1 GB/s at the declared rate of 1 GB/s, its adder makes 3/4 GB/s",
    )


def test_two_sums_of_one_chunk_are_added_twice() -> None:
    """Pairs 1+2 and 3+4 are added one after the other; a sum of whatever many inputs counts once."""
    steps = ["1>5:0+ 2>5:0+", "5>0:0+", "3>5:0", "4>5:0+", "5>0:0+"]
    schedule = drawn(
        star(5, replace(SWITCHES["adds"], adder=Fraction(1))), Kind.REDUCE, [Chunk(Fraction(1), 0)], steps
    )
    assert schedule.rate == Fraction(1, 2)  # the link to rank 0 carries two sums as well
    quick = with_abilities(schedule, adder=Fraction(1, 2))
    assert Schedule.build(
        quick.topology, quick.collective, quick.method, quick.bound, quick.chunks, quick.transfers
    ).rate == Fraction(1, 4)
    broken(quick, "switch hub: adds 1 GB/s at the declared rate of 1/2 GB/s, its adder makes 1/2 GB/s")


def test_a_bound_of_trees_holds_for_trees_that_turn_at_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arborcast.synth.certification.certified_rate", lambda *_: Fraction(1, 9))
    monkeypatch.setattr("arborcast.synth.certification.certified_scope", lambda *_: Scope.TREES)
    for schedule, rate in RIGHT.values():
        if schedule.collective.kind is Kind.ALLREDUCE:
            low = replace(schedule.bound, rate=Fraction(1, 9), scope=Scope.TREES)
            broken(
                replace(schedule, bound=low),
                "bound: 1/9 GB/s declared for schedules that reduce and broadcast along trees, "
                f"this one reaches {rate} GB/s",
            )


# --- implicit forms -------------------------------------------------------------------------------------

IMPLICIT: dict[str, tuple[ImplicitSchedule, str]] = {
    **{
        f"{kind} {name}": (implicit_star(star(5, switch), kind), rate)
        for name, switch, rates in (
            ("turns", TURNS, ("1", "5/4", "5/4")),
            ("both", BOTH, ("1", "5/4", "5/4")),
            ("loops back", NVLS, ("5/6", "1", "1")),
        )
        for kind, rate in zip((Kind.ALLREDUCE, Kind.REDUCE_SCATTER, Kind.ALLGATHER), rates, strict=True)
    },
    "two stars": (implicit_two_stars(two_stars(TURNS)), "1"),
    "two stars, a slow link": (implicit_two_stars(two_stars(TURNS, "1/2")), "1/2"),
    "more ranks than fit a word": (implicit_star(star(70, NVLS), Kind.ALLREDUCE), "70/71"),
}


@pytest.mark.parametrize("name", IMPLICIT)
def test_implicit_schedules_are_judged_as_when_written_out(name: str) -> None:
    schedule, rate = IMPLICIT[name]
    whole = verify(schedule.expand())
    assert whole.errors == ()
    assert judged(schedule) == (whole, whole)
    assert whole.rate == schedule.rate == Fraction(rate)


def on_other_switches(schedule: ImplicitSchedule, **fields: Any) -> ImplicitSchedule:
    return replace(schedule, topology=with_abilities(schedule.representative, **fields).topology)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("allreduce turns", {"turns": False}),
        ("allreduce turns", {"turns": False, "reduces": False}),
        ("allreduce turns", {"turns": False, "multicasts": False}),
        ("allreduce both", {"loopback": True}),
        ("reduce-scatter both", {"loopback": True}),
        ("allgather both", {"loopback": True}),
        ("two stars", {"turns": False}),
        ("two stars", {"turns": False, "loopback": True}),
        ("two stars", {"adder": Fraction(1, 2)}),
        ("two stars", {"trees": 7}),
        ("more ranks than fit a word", {"adder": Fraction(1, 2), "trees": 69}),
    ],
)
def test_every_rule_is_known_to_every_checker(name: str, fields: dict[str, Any]) -> None:
    schedule = on_other_switches(IMPLICIT[name][0], **fields)
    whole = verify(schedule.expand(), max_errors=10**6)
    alone, moved = judged(schedule)
    assert whole.errors and unlinked(moved) == unlinked(whole)
    assert not alone.correct
    assert (alone.rate, alone.loads) == (moved.rate, moved.loads) == (whole.rate, whole.loads)
    limits = [line for line in whole.errors if line.startswith("switch ")]
    assert [line for line in alone.errors if line.startswith("switch ")] == limits


def test_adders_of_implicit_schedules_limit_the_declared_rate() -> None:
    slow = two_stars(replace(TURNS, adder=Fraction(1, 2)))
    schedule = implicit_two_stars(slow)  # each switch makes two sums of half of the chunks: 1 in all
    assert schedule.rate == schedule.expand().rate == Fraction(1, 2)
    assert verify(schedule).correct and verify(schedule, every_translate=True).correct


@st.composite
def switches(draw: st.DrawFn) -> Switch:
    reduces, multicasts = draw(st.sampled_from([(True, True), (True, False), (False, True), (True, True)]))
    turns = reduces and multicasts and draw(st.booleans())
    return Switch(
        "hub",
        reduces,
        multicasts,
        turns,
        loopback=not turns and draw(st.booleans()),
        adder=draw(st.sampled_from([None, Fraction(1, 3), Fraction(2)])) if reduces else None,
        trees=draw(st.sampled_from([None, 1, 4, 8])),
    )


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_what_is_broken_is_judged_as_when_written_out(data: st.DataObject) -> None:
    """Right schedules of one switch, broken at will, on a switch that can do anything else."""
    name = data.draw(st.sampled_from([name for name in IMPLICIT if "word" not in name]))
    schedule = IMPLICIT[name][0]
    if data.draw(st.booleans()):
        other = data.draw(switches())
        fields = {field: getattr(other, field) for field in Switch.__dataclass_fields__ if field != "name"}
        schedule = on_other_switches(schedule, **fields)
    for change in data.draw(st.lists(st.sampled_from(BREAK), max_size=2)):
        if schedule.transfers:
            schedule = replace(schedule, **change(schedule, data))
    check_judged_as_when_written_out(schedule)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(RIGHT)), st.data())
def test_any_mutation_is_judged_as_by_counting_copies(name: str, data: st.DataObject) -> None:
    """Steps, ends, the reduce flag and abilities changed at will: agree with a replay of single messages."""
    schedule = RIGHT[name][0]
    topology = schedule.topology
    transfers = list(schedule.transfers)
    for _ in range(data.draw(st.integers(0, 2))):
        index = data.draw(st.integers(0, len(transfers) - 1))
        transfers[index] = replace(
            transfers[index],
            step=data.draw(st.integers(0, schedule.steps - 1)),
            reduce=data.draw(st.booleans()),
        )
    other = data.draw(switches())
    able = tuple(replace(other, name=switch.name) for switch in topology.switches)
    mutant = Schedule.build(
        replace(topology, switches=able),
        schedule.collective,
        schedule.method,
        schedule.bound,
        schedule.chunks,
        transfers,
    )
    assert verify(mutant).correct == SlowReplay(mutant).is_right()

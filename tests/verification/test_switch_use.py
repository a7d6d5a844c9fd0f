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
from arborcast.synth.schedule import Chunk, Schedule, Transfer
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
from tests.verification.test_implicit_verifier import (
    BREAK,
    check_judged_as_when_written_out,
    judged,
    unlinked,
)

WHOLE = [Chunk(Fraction(1), 0)]
HALVES = [Chunk(Fraction(1, 2), 0), Chunk(Fraction(1, 2), 1)]
ADDS = Switch("hub", reduces=True)
COPIES = Switch("hub", multicasts=True)

#                     vertex 3 is the switch of a star of three, vertex 4 that of a star of four
UP, DOWN = "0>3:0+ 1>3:0+ 2>3:0+", "3>0:0 3>1:0 3>2:0"

RIGHT: dict[str, tuple[Schedule, str]] = {
    "allreduce that turns": (drawn(star(3, TURNS), Kind.ALLREDUCE, WHOLE, [UP, DOWN]), "1"),
    "allreduce that turns, its first input a copy": (
        drawn(star(3, TURNS), Kind.ALLREDUCE, WHOLE, ["0>3:0", "1>3:0+ 2>3:0+", DOWN]),
        "1",
    ),
    # Each root sends its sum up beside its own part for the other one: links of 3/2 of the buffer.
    "allreduce without turning": (
        drawn(
            star(3, BOTH),
            Kind.ALLREDUCE,
            HALVES,
            ["1>3:0+ 2>3:0+ 0>3:1+ 2>3:1+", "3>0:0+ 3>1:1+", "0>3:0 1>3:1", "3>1:0 3>2:0 3>0:1 3>2:1"],
        ),
        "1",
    ),
    "allreduce that loops back": (
        drawn(star(3, NVLS), Kind.ALLREDUCE, WHOLE, [UP, "3>0:0", "0>3:0", DOWN]),
        "1/2",
    ),
    "allreduce that adds only": (
        drawn(star(3, ADDS), Kind.ALLREDUCE, WHOLE, ["1>3:0+ 2>3:0+", "3>0:0+", "0>3>1:0", "1>3>2:0"]),
        "1/2",
    ),
    "allreduce that multicasts only": (
        drawn(star(3, COPIES), Kind.ALLREDUCE, WHOLE, ["1>3>2:0+", "2>3>0:0+", "0>3:0", "3>1:0 3>2:0"]),
        "1/2",
    ),
    "broadcast": (drawn(star(3, COPIES), Kind.BROADCAST, WHOLE, ["0>3:0", "3>1:0 3>2:0"]), "1"),
    "broadcast to one after the other": (
        drawn(star(3, COPIES), Kind.BROADCAST, WHOLE, ["0>3:0", "3>1:0", "3>2:0"]),
        "1",
    ),
    "broadcast that loops back": (
        drawn(star(3, NVLS), Kind.BROADCAST, WHOLE, ["0>3:0", DOWN]),
        "1",
    ),
    "reduce": (drawn(star(3, ADDS), Kind.REDUCE, WHOLE, ["1>3:0+ 2>3:0+", "3>0:0+"]), "1"),
    "reduce, one after the other": (
        drawn(star(3, ADDS), Kind.REDUCE, WHOLE, ["1>3:0+", "2>3:0+", "3>0:0+"]),
        "1",
    ),
    # Passing one input to one output is forwarding, and a copy replaces what was forwarded before.
    "broadcast by a switch that forwards": (
        drawn(star(3, ADDS), Kind.BROADCAST, WHOLE, ["0>3:0", "3>1:0", "1>3:0", "3>2:0"]),
        "1",
    ),
    "two levels": (
        drawn(
            two_stars(TURNS),
            Kind.ALLREDUCE,
            WHOLE,
            [
                "0>8:0+ 1>8:0+ 2>8:0+ 3>8:0+ 4>9:0+ 5>9:0+ 6>9:0+ 7>9:0+",
                "9>8:0+",
                "8>9:0 8>0:0 8>1:0 8>2:0 8>3:0",
                "9>4:0 9>5:0 9>6:0 9>7:0",
            ],
        ),
        "1",
    ),
    # The lower switches do not turn: the upper sum goes to rank 0, which spreads it through both.
    "two levels, loop back": (
        drawn(
            two_stars(NVLS),
            Kind.ALLREDUCE,
            WHOLE,
            [
                "0>8:0+ 1>8:0+ 2>8:0+ 3>8:0+ 4>9:0+ 5>9:0+ 6>9:0+ 7>9:0+",
                "9>8:0+",
                "8>0:0",
                "0>8:0",
                "8>9:0 8>0:0 8>1:0 8>2:0 8>3:0",
                "9>4:0 9>5:0 9>6:0 9>7:0",
            ],
        ),
        "1/2",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_schedules_pass_with_the_drawn_rate(name: str) -> None:
    schedule, rate = RIGHT[name]
    verdict = verify(schedule)
    assert verdict.errors == ()
    assert verdict.rate == schedule.rate == Fraction(rate)
    assert verdict.loads == schedule.load


@pytest.mark.parametrize("name", RIGHT)
def test_no_transfer_can_be_dropped_and_no_ability_either(name: str) -> None:
    schedule, _ = RIGHT[name]
    for position in range(len(schedule.transfers)):
        kept = tuple(t for index, t in enumerate(schedule.transfers) if index != position)
        assert not verify(replace(schedule, transfers=kept)).correct
    if name != "broadcast by a switch that forwards":
        less = [
            with_abilities(schedule, **{**NOTHING, ability: True}) for ability in ("reduces", "multicasts")
        ]
        assert any("that does not" in line for fewer in less for line in verify(fewer).errors)


NOTHING = {"reduces": False, "multicasts": False, "turns": False, "loopback": False}


def with_abilities(schedule: Schedule, **fields: Any) -> Schedule:
    topology = schedule.topology
    able = tuple(replace(switch, **fields) for switch in topology.switches)
    return replace(schedule, topology=replace(topology, switches=able))


def broken(schedule: Schedule, *messages: str) -> None:
    assert verify(schedule).errors == messages


# --- each rule broken once ------------------------------------------------------------------------------


def test_a_switch_that_does_not_reduce() -> None:
    broken(
        with_abilities(RIGHT["reduce"][0], reduces=False, multicasts=True),
        "step 0: switch hub adds chunk 0 from 2 inputs, one that does not reduce takes 1",
    )
    # The step is the one in which there is more to add than one input.
    broken(
        with_abilities(RIGHT["reduce, one after the other"][0], reduces=False, multicasts=True),
        "step 1: switch hub adds chunk 0 from 2 inputs, one that does not reduce takes 1",
    )


def test_a_switch_that_does_not_multicast() -> None:
    broken(
        with_abilities(RIGHT["broadcast"][0], reduces=True, multicasts=False),
        "step 1: switch hub passes chunk 0 on to 2 outputs, one that does not multicast serves 1",
    )
    broken(
        with_abilities(RIGHT["broadcast to one after the other"][0], reduces=True, multicasts=False),
        "step 2: switch hub passes chunk 0 on to 2 outputs, one that does not multicast serves 1",
    )


def test_a_switch_that_does_not_turn() -> None:
    line = (
        "step 1: switch hub passes its sum of chunk 0 from 3 inputs on to 3 outputs, "
        "one that does not turn serves 1"
    )
    broken(with_abilities(RIGHT["allreduce that turns"][0], turns=False), line)
    broken(
        with_abilities(RIGHT["allreduce that turns"][0], turns=False, multicasts=False),
        "step 1: switch hub passes chunk 0 on to 3 outputs, one that does not multicast serves 1",
    )
    broken(
        with_abilities(RIGHT["allreduce that turns"][0], turns=False, reduces=False),
        "step 0: switch hub adds chunk 0 from 3 inputs, one that does not reduce takes 1",
    )


def test_what_leaves_before_the_sum_is_complete_is_an_output_of_it() -> None:
    """Rank 1's part goes to rank 2, then into a sum for rank 0: one input leaves twice."""
    steps = ["1>3:0", "3>2:0+ 0>3:0+", "3>0:0", "2>3>0:0"]
    schedule = drawn(star(3, BOTH), Kind.ALLREDUCE, WHOLE, steps)
    assert (
        "step 2: switch hub passes its sum of chunk 0 from 2 inputs on to 2 outputs, "
        "one that does not turn serves 1"
    ) in verify(schedule).errors


def test_a_sum_that_loops_back_to_a_rank_that_has_given_nothing() -> None:
    broken(
        with_abilities(RIGHT["reduce"][0], multicasts=True, loopback=True),
        "step 1: switch hub, which loops back, gives its sum of chunk 0 to rank 0, which must be among its "
        "inputs, got rank 1, rank 2",
    )


def test_a_multicast_that_does_not_come_back() -> None:
    broken(
        with_abilities(RIGHT["broadcast"][0], loopback=True),
        "step 1: switch hub, which loops back, multicasts chunk 0 of rank 0, which must be among its "
        "outputs, got rank 1, rank 2",
    )


def test_a_sum_of_many_that_is_passed_on_need_not_come_back_to_the_first() -> None:
    """It is refused for turning alone."""
    steps = ["1>4:0+ 2>4:0+ 3>4:0+", "4>2:0 4>3:0", "0>4>3:0+", "3>4>0:0", "0>4>1:0", "1>4>2:0"]
    broken(
        drawn(star(4, NVLS), Kind.ALLREDUCE, WHOLE, steps),
        "step 1: switch hub passes its sum of chunk 0 from 3 inputs on to 2 outputs, one that does not turn "
        "serves 1",
    )


def test_many_inputs_are_named_in_few_words() -> None:
    ups = " ".join(f"{rank}>6:0+" for rank in range(1, 6))
    schedule = drawn(star(6, NVLS), Kind.REDUCE, WHOLE, [ups, "6>0:0+"])
    line = (
        "step 1: switch hub, which loops back, gives its sum of chunk 0 to rank 0, which must be among its "
        "inputs, got rank 1, rank 2, rank 3, rank 4"
    )
    broken(schedule, f"{line}, ... (5 in all)")
    ups = " ".join(f"{rank}>5:0+" for rank in range(1, 5))
    broken(drawn(star(5, NVLS), Kind.REDUCE, WHOLE, [ups, "5>0:0+"]), line)


def test_a_sum_that_loops_back_is_no_addition_to_what_it_contains() -> None:
    steps = [UP, "3>0:0+", "0>3:0", DOWN]
    schedule = drawn(star(3, NVLS), Kind.ALLREDUCE, WHOLE, steps)
    broken(schedule, "chunk 0: rank 0 would count rank 0's contribution twice in step 1")


def test_switches_hold_nothing_at_the_start_and_one_thing_at_a_time() -> None:
    steps = ["3>1:0 0>3:0", "3>2:0"]
    broken(
        drawn(star(3, COPIES), Kind.BROADCAST, WHOLE, steps),
        "step 0: switch hub sends chunk 0 before it holds any of it",
    )
    twice = ["0>3:0", "3>1:0", "0>3:0 1>3:0", "3>2:0"]
    broken(
        drawn(star(3, COPIES), Kind.BROADCAST, WHOLE, twice),
        "step 2: switch hub receives chunk 0 twice, last from rank 1; only reductions may meet in one step",
    )


def test_a_switch_counts_a_contribution_once() -> None:
    broken(
        drawn(star(3, TURNS), Kind.ALLREDUCE, WHOLE, [UP, "0>3:0+", DOWN]),
        "chunk 0: switch hub would count rank 0's contribution twice in step 1",
    )


def test_the_adder_limits_the_rate() -> None:
    for name, sums in (("allreduce that turns", 1), ("allreduce without turning", 1), ("broadcast", 0)):
        schedule, rate = RIGHT[name]
        slow = with_abilities(schedule, reduces=True, adder=Fraction(1, 3)) if sums else schedule
        again = Schedule.build(
            slow.topology, slow.collective, slow.method, slow.bound, slow.chunks, slow.transfers
        )
        assert again.rate == (Fraction(1, 3) if sums else Fraction(rate))
        assert verify(again).correct and verify(again).rate == again.rate
        if sums:
            broken(
                slow,
                "switch hub: adds 1 GB/s at the declared rate of 1 GB/s, its adder makes 1/3 GB/s",
            )


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
    schedule = drawn(star(5, replace(ADDS, adder=Fraction(1))), Kind.REDUCE, WHOLE, steps)
    assert schedule.rate == Fraction(1, 2)  # the link to rank 0 carries two sums as well
    quick = with_abilities(schedule, adder=Fraction(1, 2))
    assert Schedule.build(
        quick.topology, quick.collective, quick.method, quick.bound, quick.chunks, quick.transfers
    ).rate == Fraction(1, 4)
    broken(quick, "switch hub: adds 1 GB/s at the declared rate of 1/2 GB/s, its adder makes 1/2 GB/s")


def test_the_adder_limits_each_step_of_rounds() -> None:
    """Two chunks of 1/2 that are added in one step: an adder of 1/2 a round needs four rounds for them."""
    steps = ["1>3:0+ 2>3:0+ 1>3:1+ 2>3:1+", "3>0:0+ 3>0:1+"]
    halves = [Chunk(Fraction(1, 2), 0), Chunk(Fraction(1, 2), 0)]
    plain = drawn(star(3, ADDS), Kind.REDUCE, halves, steps)
    schedule = replace(plain, rounds=(2, 2), rate=Fraction(1, 2))
    assert verify(schedule).correct
    slow = with_abilities(schedule, adder=Fraction(1, 2))
    broken(slow, "step 0: switch hub adds 2 chunks, 2 rounds of 1/2 allow 1")
    assert verify(replace(slow, rounds=(4, 2), rate=Fraction(1, 3))).correct
    # At 1/2 GB/s the adder of 1/4 would be too slow at any time: the step alone says so.
    broken(
        with_abilities(schedule, adder=Fraction(1, 4)),
        "step 0: switch hub adds 2 chunks, 2 rounds of 1/4 allow 0",
    )
    # Rounds of half the unit, in which a link moves two chunks: an adder of 1/4 adds one in two of them.
    fine = with_abilities(replace(schedule, unit=Fraction(1, 2), rate=Fraction(1, 4)), adder=Fraction(1, 4))
    broken(fine, "step 0: switch hub adds 2 chunks, 2 rounds of 1/2 allow 1")


def test_the_number_of_trees() -> None:
    schedule, _ = RIGHT["allreduce without turning"]
    assert verify(with_abilities(schedule, trees=2)).correct
    broken(with_abilities(schedule, trees=1), "switch hub: adds or multicasts 2 chunks, of which it can 1")
    both = [Chunk(Fraction(1, 2), 0), Chunk(Fraction(1, 2), 0)]
    for switch, kind, steps in (
        (ADDS, Kind.REDUCE, ["1>3:0+ 2>3:0+ 1>3:1+ 2>3:1+", "3>0:0+ 3>0:1+"]),
        (COPIES, Kind.BROADCAST, ["0>3:0 0>3:1", "3>1:0 3>2:0 3>1:1 3>2:1"]),
    ):
        line = "switch hub: adds or multicasts 2 chunks, of which it can 1"
        broken(drawn(star(3, replace(switch, trees=1)), kind, both, steps), line)
    # What is only forwarded is no tree.
    steps = ["0>3:0 0>3:1", "3>1:0 3>1:1", "1>3:0 1>3:1", "3>2:0 3>2:1"]
    assert verify(drawn(star(3, replace(ADDS, trees=1)), Kind.BROADCAST, both, steps)).correct


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


class SlowReplay:
    """Plain sets, and the transfers into and out of each switch in groups between two replacements."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.topology = schedule.topology

    def is_right(self) -> bool:
        sums: dict[int, Fraction] = {}
        trees: dict[int, int] = {}
        for index in range(len(self.schedule.chunks)):
            groups = self._groups(index)
            if groups is None:
                return False
            busy = set()
            for vertex, inputs, outputs in groups:
                if not self._may(vertex, inputs, outputs):
                    return False
                if len(inputs) > 1 or len(outputs) > 1:
                    busy.add(vertex)
                if len(inputs) > 1:
                    sums[vertex] = sums.get(vertex, Fraction(0)) + self.schedule.chunks[index].share
            for vertex in busy:
                trees[vertex] = trees.get(vertex, 0) + 1
        for vertex, switch in self._able():
            if switch.trees is not None and trees.get(vertex, 0) > switch.trees:
                return False
            if switch.adder is not None and sums.get(vertex, 0) * self.schedule.rate > switch.adder:
                return False
        return True

    def _able(self) -> list[tuple[int, Switch]]:
        return [(self.topology.ranks + place, switch) for place, switch in enumerate(self.topology.switches)]

    def _may(self, vertex: int, inputs: list[Transfer], outputs: list[Transfer]) -> bool:
        switch = dict(self._able())[vertex]
        adds, copies = len(inputs) > 1, len(outputs) > 1
        senders, receivers = {t.src for t in inputs}, {t.dst for t in outputs}
        ranks = set(range(self.topology.ranks))
        if (adds and not switch.reduces) or (copies and not switch.multicasts):
            return False
        if adds and copies:
            return switch.turns
        if switch.loopback and adds:
            return all(self._gave_before(out, inputs) for out in outputs if out.dst in ranks)
        return not (switch.loopback and copies) or (senders & ranks) <= receivers

    def _gave_before(self, out: Transfer, inputs: list[Transfer]) -> bool:
        earlier = [t.src for t in inputs if t.step < out.step]
        return len(earlier) < 2 or out.dst in earlier

    def _groups(self, index: int) -> list[tuple[int, list[Transfer], list[Transfer]]] | None:
        """Inputs and outputs of each switch between two replacements; None where the replay is wrong."""
        collective = self.schedule.collective
        chunk = self.schedule.chunks[index]
        block = collective.block_of(chunk.owner, chunk.target, chunk.demand)
        held = {rank: set(collective.before(rank, block)) for rank in range(self.topology.ranks)}
        held |= {vertex: set() for vertex, _ in self._able()}
        open_groups: dict[int, tuple[int, list[Transfer], list[Transfer]]] = {}
        groups: list[tuple[int, list[Transfer], list[Transfer]]] = []
        for step in range(self.schedule.steps):
            of_step = [t for t in self.schedule.transfers if t.step == step and t.chunk == index]
            now = {vertex: set(ranks) for vertex, ranks in held.items()}
            kinds: dict[int, list[bool]] = {}
            for t in of_step:
                if not held[t.src] or (t.reduce and held[t.src] & now[t.dst]):
                    return None
                now[t.dst] = now[t.dst] | held[t.src] if t.reduce else set(held[t.src])
                kinds.setdefault(t.dst, []).append(t.reduce)
                if t.src in open_groups:
                    open_groups[t.src][2].append(t)
            if any(len(these) > 1 and not all(these) for these in kinds.values()):
                return None
            for t in (t for t in of_step if self.topology.is_switch(t.dst)):
                if t.dst not in open_groups or not t.reduce:
                    open_groups[t.dst] = (t.dst, [], [])
                    groups.append(open_groups[t.dst])
                open_groups[t.dst][1].append(t)
            held = now
        wanted = ((rank, collective.after(rank, block)) for rank in range(self.topology.ranks))
        return groups if all(want is None or held[rank] == want for rank, want in wanted) else None

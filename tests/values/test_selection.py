"""Which schedule serves which size: what is compared, where the choice changes, what a deadline leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast.synth import candidates, selection
from arborcast.synth.api import approach
from arborcast.synth.bounds import bound
from arborcast.synth.bounds.time_limits import time_limit
from arborcast.synth.candidates import Candidates
from arborcast.synth.chunks import frontier
from arborcast.synth.chunks.problem.instance import TooManyRoutesError
from arborcast.synth.collective import Collective, Demand, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InfeasibleError, TimedOutError
from arborcast.synth.implicit_schedule import AnySchedule, ImplicitSchedule
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.selection import Choice, Selection
from arborcast.synth.simulation.pieces import PieceRule
from arborcast.synth.simulation.prices import CALL_US, effective
from arborcast.synth.simulation.simulator import Runs, simulate
from arborcast.synth.solve_options import SolveOptions
from arborcast.synth.topology import Link, Topology
from arborcast.topologies import load
from tests.support.able_fabrics import star
from tests.support.strategies import topologies

QUIET = SolveOptions(cache=False)
SIZES = tuple(1 << power for power in range(10, 31))


def select(fabric: Topology, collective: Collective, options: SolveOptions) -> Selection:
    return approach(fabric, collective, options=options).selection()


def shift(fabric: Topology) -> Collective:
    count = fabric.ranks
    return Collective.custom(
        fabric, [Demand(frozenset({rank}), frozenset({(rank + 1) % count})) for rank in range(count)]
    )


COMPARED = [
    ("ring:3", "broadcast", {}, "trees/2 ring/2 multiring/2 binary-tree/2 bine/2 trees/1 "
     "pareto/1 pareto/2 pareto/3 levels/1"),
    ("ring:3", "allgather", {}, "trees/1 ring/2 multiring/2 bruck/2 pat/2 trees/1 pareto/1 "
     "exchange/1 exchange/2"),
    ("ring:3", "alltoall", {}, "routes/1 pareto/1"),
    ("ring:4", "alltoall", {}, "routes/2 pareto/2"),
    ("ring:4", "allgather", {}, "trees/3 ring/3 multiring/3 two-way-rings/2 halving-doubling/2 multiport/2 "
     "swing/2 trees/3 trees/3 trees/2 pareto/2"),
    ("ring:4", "allgather", {"ranks": (0, 1, 2)}, "trees/3 trees/3 pareto/2 pareto/3 pareto/4"),
    ("ring:4", "broadcast", {"max_height": 2}, "trees/2 trees/2 trees/2"),
    ("ring:4", "broadcast", {"max_trees": 2}, "trees/3 trees/2"),
    ("ring:4", "broadcast", {"tolerance": Fraction(1, 20)}, "trees/3"),
    ("full:2", "broadcast", {}, "trees/1 ring/1 binary-tree/1 pareto/1 levels/1"),
    (
        "ring:17",
        "broadcast",
        {},
        "trees/16 ring/16 multiring/16 trees/8 trees/16 placed/41 placed/24 placed/41 placed/41 levels/8",
    ),
    ("able", "allreduce", {}, "trees/2 trees/2 ring/4 binary-tree/4 halving-doubling/4 recursive-doubling/3 "
     "bruck/4 pat/4 bine/4 trees/2 pareto/1 pareto/2 exchange/2 exchange/4 exchange/1 exchange/1 "
     "levels/2 levels/2"),
    ("able", "alltoall", {}, "routes/1 pareto/1"),
    ("able", "broadcast", {"max_height": 2, "max_trees": 2}, "trees/2 trees/2"),
    ("ring:4", "allgather", {"form": "implicit"}, "symmetric/2 symmetric/2 symmetric/2"),
    ("ring:4", "alltoall", {"form": "implicit"}, "routes/2"),
    ("ring:4", "allgather", {"form": "implicit", "max_height": 2}, "symmetric/2"),
]  # fmt: skip
"""Fabric, collective, wishes, and of each candidate the method with the number of steps."""


@pytest.mark.parametrize(("spec", "kind", "wishes", "wanted"), COMPARED)
def test_what_is_compared(spec: str, kind: str, wishes: dict[str, Any], wanted: str) -> None:
    found = list(asked(spec, kind, **wishes))
    assert " ".join(f"{each.method.name}/{each.steps}" for each in found) == wanted
    assert found[0].rate == max(each.rate for each in found)
    assert {isinstance(each, ImplicitSchedule) for each in found} == {"form" in wishes}
    for each in found:  # also what only asks switches to forward is of the whole fabric
        assert each.topology == fabric_of(spec) and synth.verify(each).correct


def fabric_of(spec: str) -> Topology:
    return star(3, reduces=True, multicasts=True, turns=True) if spec == "able" else load(spec)


def asked(
    spec: str, kind: str, form: str = "auto", ranks: tuple[int, ...] | None = None, **wishes: Any
) -> Iterator[AnySchedule]:
    options = replace(QUIET, **wishes)
    return approach(fabric_of(spec), kind, options=options, form=form, ranks=ranks).candidates()


class Clock:
    """Stands still until a test lets it pass the deadline."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.mark.parametrize(
    ("spec", "kind", "form", "checked"),
    [
        ("ring:3", "broadcast", "auto", 6),
        ("able", "broadcast", "auto", 5),
        ("ring:4", "allgather", "implicit", 1),
    ],
)
def test_nothing_more_is_built_after_the_deadline(spec: str, kind: str, form: str, checked: int) -> None:
    for count in range(1, checked + 1):
        found = asked(spec, kind, form, deadline_s=Deadline.after(1.0, clock := Clock()))
        assert len(list(islice(found, count))) == count
        clock.seconds = 2.0
        with pytest.raises(TimedOutError, match=r"^the comparison of methods did not end"):
            next(found)
    collective = Collective.on(fabric_of(spec), "allgather")
    late = Deadline(1.0, 1.0, clock)
    with pytest.raises(TimedOutError, match=r"^the comparison of methods did not end"):
        list(Candidates(fabric_of(spec), collective, QUIET, late).shallow_by_symmetry())


def test_a_late_frontier_ends_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the best that it had, on the whole fabric."""
    best = synth.solve(fabric_of("able").forwarding, "broadcast", method="ring")
    late = TimedOutError("late")

    def pareto(*_: object, **__: object) -> frontier.Frontier:
        raise late

    real = frontier.pareto
    monkeypatch.setattr(frontier, "pareto", pareto)
    for late in (TimedOutError("late"), TimedOutError("late", best)):
        with pytest.raises(TimedOutError, match=r"^late$") as raised:
            list(asked("able", "broadcast"))
        assert raised.value.best == (late.best and replace(best, topology=fabric_of("able")))
    monkeypatch.setattr(
        frontier, "pareto", lambda *asked, **knobs: replace(real(*asked, **knobs), timed_out=True)
    )
    with pytest.raises(TimedOutError, match="the comparison of methods did not end within"):
        list(asked("ring:3", "broadcast", deadline_s=100.0))


def exchange(again: Fraction = Fraction(0), rounds: Sequence[int] | None = None, back: int = 0) -> Schedule:
    """Two ranks add up a buffer along a link each way, 1 us for 2000 bytes; rank 0 sends a part once more."""
    fabric = Topology.build("pair", 2, [Link(0, 1, Fraction(2)), Link(1, 0, Fraction(2))])
    collective = Collective.on(fabric, "allreduce")
    moves = [Transfer(0, 0, 1, 0, reduce=True), Transfer(0, 1, 0, back, reduce=not back)]
    chunks = [Chunk(Fraction(1), 0)]
    if again:
        chunks.append(Chunk(again, 0))
        moves.append(Transfer(1, 0, 1, 0, reduce=True))
    limit = bound(fabric, collective)
    return Schedule.build(fabric, collective, Method("drawn"), limit, chunks, moves, rounds)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[AnySchedule]:
    """What was simulated to see what it takes."""
    found = []
    choice = Runs.choice

    def noted(runs: Runs, size: int) -> tuple[int, float]:
        found.append(runs.schedule)
        return choice(runs, size)

    monkeypatch.setattr(Runs, "choice", noted)
    return found


@pytest.mark.parametrize(
    ("first", "simulated", "enough"),
    [
        (exchange(), True, True),
        (exchange(Fraction(1, 500)), True, True),  # 501 us, 500 at least
        (exchange(Fraction(1, 499)), False, False),  # its bytes alone take longer
        (exchange(back=1), False, False),  # its chain takes twice as long, though no link is busy for longer
        (exchange(rounds=(2,)), True, True),  # rounds count for the rate alone
        (exchange(Fraction(1), rounds=(2,)), False, False),
        (replace(exchange(), chunks=(), transfers=(), rate=Fraction(0)), True, True),
        (replace(exchange(rounds=(1,)), transfers=()), True, True),
        (synth.solve(load("full:2"), "allreduce", form="implicit"), True, True),
    ],
)
def test_a_schedule_that_takes_nearly_the_least_time_is_enough(
    first: AnySchedule, simulated: bool, enough: bool, ran: list[AnySchedule]
) -> None:
    found = selection.compared(iter([first, exchange()]), Kind.ALLREDUCE, size_bytes=1_000_000)
    assert (first in ran, len(found.schedules)) == (simulated, 1 if enough else 2)
    assert not found.enough or found.enough.endswith(" takes the least time of every schedule, within 0.2 %")
    of_all = selection.compared(iter([first, exchange()]), Kind.ALLREDUCE)
    assert of_all.left_out == {}
    assert (bool(found.enough), of_all.enough, len(of_all.schedules)) == (True, "", 2)


def test_what_takes_the_least_time_of_all_has_no_rivals(ran: list[AnySchedule]) -> None:
    best, near, far = exchange(), exchange(Fraction(1, 1000)), exchange(back=1)
    for schedules, is_run in (((best, near), False), ((far, near), True)):
        ran.clear()
        chosen = Selection(schedules).choices()
        assert (near in ran) is is_run
        assert [it.schedule for it in chosen] == [near if is_run else best]  # of short buffers, too


def test_late_simulations_leave_the_first_schedule() -> None:
    passed = Deadline(1.0, 0.0)
    for earlier, said in (
        (None, "the comparison of schedules did not end"),
        (TimedOutError("earlier"), "earlier"),
    ):
        found = Selection((exchange(), exchange(back=1)), earlier, passed)
        with pytest.raises(TimedOutError, match=said) as raised:
            found.fastest(1000)
        assert raised.value.best is found.schedules[0]


def test_up_to_some_ranks_lower_trees_and_the_frontier_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    for most in (3, 4):
        monkeypatch.setattr(candidates, "LARGEST_SHALLOW", most)
        monkeypatch.setattr(candidates, "LARGEST_FRONTIER", most)
        names = {each.method.name for each in asked("ring:4", "allgather")}
        assert ("pareto" in names, "symmetric" in names) == (most == 4, most == 3)
        fabric = load("ring:4")
        assert select(fabric, shift(fabric), QUIET).schedules  # of a custom collective there is nothing else


LEFT_OUT: list[tuple[str, str, dict[str, Any], dict[str, str]]] = [
    ("ring:4", "broadcast", {"max_trees": 2}, {"all but trees": "something is asked of trees"}),
    ("star:4", "broadcast", {}, {"multiring": "the same schedule as by ring"}),
    ("mesh:17", "broadcast", {}, {
        "ring, multiring": "no ring", "binary-tree, bine": "its pattern does not fit",
        "pareto": "more than 16 ranks"}),
    ("mesh:17", "allgather", {}, {"swing": "needs a power of two of ranks, got 17",
        "lower trees": "no symmetry leaves few of them"}),
    ("ring:4", "allgather", {"form": "implicit"}, {"others without symmetry": "for 4 ranks"}),
]  # fmt: skip
"""Fabric, collective, wishes, and what is left out with a part of the reason."""


@pytest.mark.parametrize(("spec", "kind", "wishes", "wanted"), LEFT_OUT)
def test_what_is_not_compared_is_said_with_the_reason(
    spec: str, kind: str, wishes: dict[str, Any], wanted: dict[str, str]
) -> None:
    form = wishes.pop("form", "auto")
    found = approach(fabric_of(spec), kind, options=replace(QUIET, **wishes), form=form).selection()
    assert not found.left_out.keys() & {schedule.method.name for schedule in found.schedules}
    for names, reason in wanted.items():
        for name in names.split(", "):
            assert reason in found.left_out[name], found.left_out
    assert not found.enough


def test_a_comparison_that_ends_early_says_why() -> None:
    found = approach(load("ring:5"), "allgather", options=replace(QUIET, size_bytes=1 << 30)).selection()
    assert "takes the least time of every" in found.enough


def test_every_second_size_is_looked_at_unless_another_stride_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_at = []

    def crossings(prices: object, sizes: list[int]) -> list[tuple[int, int]]:
        looked_at.append(sizes)
        return []

    monkeypatch.setattr(selection, "crossings", crossings)
    found = Selection((exchange(),))
    assert found.choices() == found.choices(range(1, 7)) == found.choices(range(1, 7), stride=3) == ()
    assert looked_at == [[1 << power for power in range(10, 31, 2)], [1, 3, 5, 6], [1, 4, 6]]


def test_what_is_known_without_a_run_is_less_than_the_time() -> None:
    """Also of messages that cost each end 3 us."""
    costly = exchange()
    costly = replace(costly, topology=replace(costly.topology, message_us=Fraction(3)))
    for each in (exchange(), exchange(back=1), costly):
        for size in (1_000, 100_000, 1_000_000):
            prices = Selection((each,)).prices
            assert 0 < prices.least_us(0, size) <= prices.time_us(0, size)


@pytest.fixture(scope="module")
def of_ring() -> Selection:
    fabric = load("ring:4")
    return select(fabric, Collective.on(fabric, "allgather"), QUIET)


def test_choices_ascend_and_each_is_the_fastest_where_it_begins(of_ring: Selection) -> None:
    choices = of_ring.choices(SIZES)
    starts = [choice.from_bytes for choice in choices]
    assert starts == sorted(set(starts)) and starts[0] == SIZES[0]
    for before, after in pairwise(choices):
        assert before.schedule is not after.schedule
    for choice in choices:
        times = [simulate(schedule, choice.from_bytes).time_us for schedule in of_ring.schedules]
        assert simulate(choice.schedule, choice.from_bytes).time_us <= 1.005 * min(times)


def test_a_change_between_two_sizes_that_are_looked_at_is_found() -> None:
    """The second gets pieces, which hide its steps, from 128 KiB on."""
    #        step   0        1        2          one long step or three short ones: 10 us of latency each
    few, many = ["0>1 0>2 0>3"], ["0>1", "1>2", "2>3"]
    schedules = [_broadcast(Fraction(1), few), _broadcast(Fraction(2), many)]
    found = Selection(tuple(schedules), None)
    fastest = {size: found.schedules.index(found.fastest(size)) for size in (10_000, 400_000, 4_000_000)}
    assert fastest == {10_000: 0, 400_000: 1, 4_000_000: 1}
    assert [choice.from_bytes for choice in found.choices(tuple(fastest))] == [10_000, 1 << 17]


def test_rounds_that_overlap_in_a_simulation_are_compared_by_their_time() -> None:
    """Thirds of a buffer along 0 > 1 > 2, 1/9 of a unit each: 4/9, as one goes on while others come.

    Their rate counts both steps to their ends, 6/9; the whole buffer along a link of 2 takes 1/2.
    """
    links = [Link(a, b, Fraction(rate), Fraction(1)) for a, b, rate in ((0, 1, 3), (1, 2, 3), (0, 2, 2))]
    fabric = Topology.build("drawn", 3, links)
    collective = Collective.on(fabric, "broadcast")
    limit, method = bound(fabric, collective), Method("drawn")
    whole, thirds = [Chunk(Fraction(1), 0)], [Chunk(Fraction(1, 3), 0)] * 3
    at_once = [Transfer(0, 0, 1, 0), Transfer(0, 0, 2, 0)]
    moves = [Transfer(chunk, step, step + 1, step) for step in (0, 1) for chunk in range(3)]
    schedules = (
        Schedule.build(fabric, collective, method, limit, whole, at_once),
        Schedule.build(fabric, collective, method, limit, thirds, moves, rounds=(1, 1)),
    )
    assert [each.rate for each in schedules] == [2, Fraction(3, 2)]
    size = 64 << 20
    times = [simulate(each, size).time_us for each in schedules]
    assert times[1] < times[0] and Selection(schedules).fastest(size) is schedules[1]


kinds = st.sampled_from(["allgather", "allreduce", "alltoall"])
latencies = st.sampled_from([Fraction(0), Fraction(7, 10), Fraction(3), Fraction(20)])


@pytest.mark.few(3)
@settings(max_examples=20)
@given(
    topologies(min_ranks=3, max_ranks=4),
    latencies,
    st.sampled_from(["allgather", "allreduce", "alltoall"]),
    st.data(),
)
def test_nothing_is_faster_between_the_sizes_of_the_table(
    drawn: Topology, latency_us: Fraction, kind: str, data: st.DataObject
) -> None:
    fabric = replace(drawn, links=tuple(replace(link, latency_us=latency_us) for link in drawn.links))
    try:
        found = select(fabric, Collective.on(fabric, kind), QUIET)
    except InfeasibleError:
        return
    for chosen in (found, Selection(found.schedules[::-1])):
        check_table(chosen.choices(), found.schedules, data)


@pytest.mark.parametrize(("spec", "kind"), [("torus:2x3", "allgather"), ("star:4", "broadcast")])
@pytest.mark.few(1)
@settings(max_examples=3)
@given(data=st.data())
def test_tables_of_machines_hold_between_their_sizes(spec: str, kind: str, data: st.DataObject) -> None:
    found = of_machine(spec, kind)
    check_table(found.choices(), found.schedules, data)


@cache
def of_machine(spec: str, kind: str) -> Selection:
    fabric = load(spec)
    return select(fabric, Collective.on(fabric, kind), QUIET)


def check_table(choices: Sequence[Choice], schedules: Sequence[AnySchedule], data: st.DataObject) -> None:
    """At sizes about those where something changes, and at any other, the one that serves is as fast."""
    about = [choice.from_bytes + less for choice in choices[1:] for less in (-1, 0)]
    anywhere = st.floats(10, 30).map(lambda power: int(2**power))
    for size in (*about, *data.draw(st.lists(anywhere, min_size=6, max_size=6))):
        serves = [choice.schedule for choice in choices if choice.from_bytes <= size][-1]
        least_us = min(simulate(each, size).time_us for each in schedules)
        assert simulate(serves, size).time_us <= 1.01 * least_us, size


def _broadcast(bandwidth: Fraction, steps: list[str]) -> Schedule:
    """Of one chunk on a full mesh of four with a latency of 10 us."""
    links = [Link(a, b, bandwidth, Fraction(10)) for a in range(4) for b in range(4) if a != b]
    fabric = Topology.build("mesh", 4, links)
    collective = Collective.on(fabric, "broadcast")
    transfers = [
        Transfer(0, int(word[0]), int(word[2]), step)
        for step, words in enumerate(steps)
        for word in words.split()
    ]
    return Schedule.build(
        fabric, collective, Method("drawn"), bound(fabric, collective), [Chunk(Fraction(1), 0)], transfers
    )


def test_without_a_cache_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARBORCAST_CACHE", str(tmp_path))
    fabric = load("ring:4")
    select(fabric, Collective.on(fabric, "allgather"), QUIET)
    assert not list(tmp_path.rglob("*.json"))


def test_a_custom_collective_has_the_frontier_alone() -> None:
    fabric = load("ring:4")
    found = select(fabric, shift(fabric), QUIET)
    assert {schedule.method.name for schedule in found.schedules} == {"pareto"}
    rates = [schedule.rate for schedule in found.schedules]
    assert rates == sorted(rates)
    assert found.fastest(1 << 30) is found.schedules[-1]


def test_the_deadline_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = load("ring:4")
    collective = Collective.on(fabric, "allgather")
    ring, tree = (synth.solve(fabric, collective, method=method) for method in ("ring", "trees"))

    def two_and_late(*_: object, **__: object) -> Iterator[Schedule]:
        yield tree
        raise TimedOutError("the comparison of methods did not end within 1 s", ring)

    monkeypatch.setattr(Candidates, "explicit", two_and_late)
    found = select(fabric, collective, QUIET)
    assert found.schedules == (tree, ring) and found.out_of_time is not None
    with pytest.raises(TimedOutError, match="within 1 s") as raised:
        synth.solve(fabric, collective, size_bytes=1024, cache=False)
    assert raised.value.best in found.schedules


def test_late_before_anything_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object, **__: object) -> Iterator[Schedule]:
        raise TimedOutError("late")
        yield

    monkeypatch.setattr(Candidates, "explicit", late)
    fabric = load("ring:4")
    with pytest.raises(TimedOutError, match="late"):
        select(fabric, shift(fabric), QUIET)


def test_nothing_found_without_a_deadline_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # As with a large custom collective, about which no solver is asked.
    fabric = load("ring:4")
    real = frontier.pareto

    def empty(*asked: object, **knobs: object) -> frontier.Frontier:
        return replace(real(*asked, **knobs), points=(), timed_out=False)  # type: ignore[arg-type]

    monkeypatch.setattr(frontier, "pareto", empty)
    with pytest.raises(TimedOutError, match="custom: no schedule was found with the effort of a comparison"):
        select(fabric, shift(fabric), QUIET)
    with pytest.raises(TimedOutError, match="custom: no schedule was found with the effort of a frontier"):
        synth.solve(fabric, shift(fabric), cache=False)


def test_too_many_routes_leave_trees_but_end_a_custom_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arborcast.synth.chunks.problem.instance.MOST_ROUTES", 3)
    fabric = load("ring:4")
    names = {s.method.name for s in approach(fabric, "broadcast", options=QUIET).candidates()}
    assert "trees" in names and "pareto" not in names
    with pytest.raises(TooManyRoutesError, match="more than 3 ways"):
        select(fabric, shift(fabric), QUIET)


def test_a_rank_cut_off_is_the_answer_of_the_first_method() -> None:
    half = Topology.build("half", 3, [Link(0, 1, Fraction(1)), Link(1, 0, Fraction(1))])
    with pytest.raises(InfeasibleError):
        select(half, Collective.on(half, "broadcast"), QUIET)
    with pytest.raises(InfeasibleError):
        select(half, Collective.custom(half, [Demand(frozenset({0}), frozenset({2}))]), QUIET)


@pytest.mark.parametrize("kind", ["broadcast", "allgather", "allreduce"])
@pytest.mark.parametrize(
    "wishes", [{"max_trees": 1}, {"max_trees": 2}, {"max_height": 2}, {"max_height": 2, "max_trees": 2}]
)
def test_what_is_asked_of_trees_holds_for_all_that_is_compared(kind: str, wishes: dict[str, int]) -> None:
    fabric = load("dgx1", ranks=(0, 1, 2, 3, 4))
    options = replace(QUIET, **wishes)  # type: ignore[arg-type]
    found = select(fabric, Collective.on(fabric, kind), options).schedules
    directions = 2 if kind == "allreduce" else 1
    for schedule in found:
        assert schedule.method.name == "trees"
        trees = Counter(0 if kind == "allreduce" else chunk.owner for chunk in schedule.chunks)
        assert max(trees.values()) <= wishes.get("max_trees", 99)
        assert schedule.height <= directions * wishes.get("max_height", 99)
    if "max_trees" in wishes:  # so many, and each number below
        assert len(found) == wishes["max_trees"]


def test_a_tolerance_is_of_trees_too() -> None:
    fabric = load("dgx1", ranks=(0, 1, 2, 3, 4))
    (only,) = select(
        fabric, Collective.on(fabric, "broadcast"), replace(QUIET, tolerance=Fraction(1, 20))
    ).schedules
    assert only.rate >= only.bound.rate * Fraction(19, 20)


def test_one_tree_at_a_small_size_is_one_tree() -> None:
    """It was a chunk schedule, of which the number of trees says nothing."""
    schedule = synth.solve(load("dgx1"), "allreduce", size_bytes=65536, max_trees=1, cache=False)
    assert schedule.method.name == "trees" and len(schedule.chunks) == 1


def test_above_16_ranks_low_trees_are_compared_too() -> None:
    """On a torus of 3 x 6 the lowest trees take 1 + 3 hops each way, what packs the best rate takes more."""
    fabric = load("torus:3x6")
    collective = Collective.on(fabric, "allreduce")
    found = list(Candidates(fabric, collective, QUIET).shallow_by_symmetry())
    assert all(synth.verify(schedule).correct for schedule in found)
    assert (found[0].steps, found[-1].is_optimal) == (8, True)
    assert [schedule.rate for schedule in found] == sorted(schedule.rate for schedule in found)
    assert not list(Candidates(fabric, collective, SolveOptions(max_height=3)).shallow_by_symmetry())
    (low,) = Candidates(fabric, Collective.on(fabric, "broadcast"), QUIET).by_levels()
    assert (low.method.name, low.steps) == ("levels", 4)


def test_few_trees_that_are_alike_need_a_symmetry_of_few_orbits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that change places are one orbit, with a tree of height 1; a line has no translation."""

    def heights(fabric: Topology, kind: str = "allgather", **wishes: int) -> list[int]:
        options = SolveOptions(cache=False, **wishes)  # type: ignore[arg-type]
        asked = Candidates(fabric, Collective.on(fabric, kind), options)
        return [found.height for found in asked.shallow_by_symmetry()]

    pair = load("full:2")
    line = Topology.build("line", 3, [Link(a, b, Fraction(1)) for a, b in ((0, 1), (1, 0), (1, 2), (2, 1))])
    assert heights(pair) == heights(pair, max_height=1) == [1]
    assert heights(line) == heights(pair, "broadcast") == []
    monkeypatch.setattr(candidates, "MOST_ORBITS", 1)
    assert heights(pair) == [1]
    monkeypatch.setattr(candidates, "MOST_ORBITS", 0)
    assert heights(pair) == []


def test_on_many_ranks_trees_by_levels_are_written_out() -> None:
    asked = approach(load("dgx-a100:boxes=3"), "allreduce", form="implicit")
    assert all(isinstance(schedule, ImplicitSchedule) for schedule in asked.candidates())
    explicit = [
        schedule
        for schedule in replace(asked, only_implicit=False).candidates()
        if isinstance(schedule, Schedule)
    ]
    assert explicit and {schedule.method.name for schedule in explicit} == {"exchange", "levels"}


@pytest.mark.parametrize("priced", [True, False])
def test_what_is_compared_is_priced_like_what_limits_it(priced: bool) -> None:
    """With what a call costs, on links as fast as they were measured; or neither."""
    schedule = synth.solve(load("dgx1"), "allgather")
    fabric = effective(schedule.topology) if priced else schedule.topology
    limit = time_limit(fabric, schedule.collective, schedule.bound)
    prices = Selection((schedule,), priced=priced, least_piece=4096).prices
    for size in (1 << 10, 1 << 20, 1 << 28):
        ran = simulate(schedule, size, priced=priced, min_piece_bytes=4096).time_us
        assert prices.time_us(0, size) == pytest.approx(ran, rel=0.01)
        least = selection.PricedLimit.of(schedule, priced).at(size)
        assert least == pytest.approx(float(limit.at(size)) + float(CALL_US) * priced)
        assert selection.PricedLimit.of(schedule).at(size, more=Fraction(1)) > 1.5 * float(limit.at(size))
        assert least <= ran * (1 + 1e-9)
    ruled = Selection((schedule,), priced=priced, least_piece=PieceRule(1 << 20, 1, 1)).prices
    assert ruled.pieces(0, 1 << 22) < prices.pieces(0, 1 << 22)
    if priced:  # which is what is meant where nothing is said
        told = Selection((schedule,), least_piece=4096).prices.time_us(0, 1 << 20)
        assert told == prices.time_us(0, 1 << 20)
        assert selection.PricedLimit.of(schedule) == selection.PricedLimit.of(schedule, priced)

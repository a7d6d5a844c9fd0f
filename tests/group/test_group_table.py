"""Tables: which schedule serves which size, as bytes and back, and what is no table."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast.backends.schedules.schedule_table import ScheduleTable, TableEntry
from arborcast.backends.schedules.selection import ORDERS, GroupSelection, most_messages, with_messages  # type: ignore[attr-defined]
from arborcast.backends.schedules.synthesis import tables
from arborcast.bench.contest.cases import CASES, Case
from arborcast.bench.emulation.plan import at_rates
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InfeasibleError, InputError
from arborcast.synth.implicit_schedule import ImplicitSchedule
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.selection import Choice
from arborcast.synth.simulation.pieces import SEVERAL_HOSTS, messages_of, shares_of
from arborcast.synth.simulation.simulator import simulate
from arborcast.synth.solve_options import SolveOptions
from arborcast.topologies import load
from tests.support.refusals import refuses

RING = load("full:4,latency=3")


@cache
def by(method: str, kind: str = "allreduce", spec: str = "full:4,latency=3") -> Schedule:
    return synth.solve(load(spec), kind, method=method)


def table(*starts: int) -> ScheduleTable:
    methods = ("binary-tree", "ring", "trees")[: len(starts)]
    entries = tuple(TableEntry(start, by(method)) for start, method in zip(starts, methods, strict=True))
    return ScheduleTable(entries[0].schedule.collective, entries)


@given(
    st.sets(st.integers(1, 1 << 40), max_size=2).map(lambda rest: (0, *sorted(rest))), st.integers(0, 1 << 41)
)
def test_the_last_start_not_above_the_size_counts(starts: tuple[int, ...], size: int) -> None:
    assert table(*starts).at(size).from_bytes == max(start for start in starts if start <= size)


def test_the_first_choice_serves_smaller_buffers_too() -> None:
    found = ScheduleTable.of((Choice(1024, by("ring")), Choice(4096, by("trees"))))
    assert [entry.from_bytes for entry in found.entries] == [0, 4096]
    assert found.topology == RING
    with pytest.raises(InputError, match="must have at least one schedule, got none"):
        ScheduleTable.of(())


def test_entries_must_belong_together() -> None:
    ring, tree = by("ring"), by("binary-tree")
    with pytest.raises(InputError, match=r"entries\[0\].from_bytes: must be 0, got 5"):
        ScheduleTable(ring.collective, (TableEntry(5, ring),))
    with pytest.raises(InputError, match=r"entries\[1\].from_bytes: must be above the one before it, got 0"):
        ScheduleTable(ring.collective, (TableEntry(0, ring), TableEntry(0, tree)))
    with pytest.raises(InputError, match=r"entries\[1\].schedule: must be of the collective of the table"):
        ScheduleTable(ring.collective, (TableEntry(0, ring), TableEntry(1, by("ring", "broadcast"))))
    with pytest.raises(InputError, match=r"entries\[1\].schedule: must be of the topology of the table"):
        ScheduleTable(ring.collective, (TableEntry(0, ring), TableEntry(1, by("ring", spec="full:4"))))
    with pytest.raises(InputError, match="entries: must have at least one schedule"):
        ScheduleTable(ring.collective, ())


def test_peers_are_those_of_all_its_schedules() -> None:
    drawn = Schedule.build(
        load("full:4"),
        Collective(Kind.BROADCAST, (0, 1, 2, 3), 0),
        Method("drawn"),
        by("trees", "broadcast", "full:4").bound,
        [Chunk(Fraction(1), 0)],
        [Transfer(0, 0, 1, 0), Transfer(0, 1, 2, 1), Transfer(0, 1, 3, 1)],
    )
    star = replace(drawn, transfers=tuple(Transfer(0, 0, rank, 0) for rank in (1, 2)))
    found = ScheduleTable(drawn.collective, (TableEntry(0, drawn), TableEntry(9, star)))
    assert [found.peers(rank) for rank in range(4)] == [{1, 2}, {0, 2, 3}, {0, 1}, {1}]
    assert found.peers(17) == frozenset()


def test_bytes_come_back() -> None:
    found = replace(table(0, 77, 78), is_cut_short=True)
    data = found.to_bytes()
    again = ScheduleTable.from_bytes(data, "a file")
    assert again == found
    assert again.to_bytes() == data
    assert again.digest == found.digest != table(0, 77, 78).digest
    settings = [entry.schedule.method.settings for entry in again.entries]
    assert settings == [entry.schedule.method.settings for entry in found.entries]  # in this order
    document = json.loads(data)
    assert list(document) == ["format", "topology", "collective", "cut_short", "entries"]
    assert data.count(b'"links"') == 1


def test_another_name_changes_nothing_else() -> None:
    found = table(0, 9)
    assert found.renamed(RING.name) is found
    other = found.renamed("elsewhere")
    assert {entry.schedule.topology.name for entry in other.entries} == {"elsewhere"}
    assert other.renamed(RING.name) == found


def test_one_line_says_what_serves_what() -> None:
    assert table(0, 64 << 10, 1 << 20).summary() == (
        "allreduce on full:4,latency=3: binary-tree (2 chunks, 4 steps, 1 GB/s, 50% of 2), "
        "ring (4 chunks, 6 steps, 0.6667 GB/s, 33% of 2) from 64 KiB, "
        f"trees ({len(by('trees').chunks)} trees, height {by('trees').height}, 2 GB/s, optimal) "
        "from 1 MiB"
    )
    broadcast = ScheduleTable.of([Choice(0, by("trees", "broadcast"))], is_cut_short=True)
    assert broadcast.summary().startswith("broadcast from 0 on full:4,latency=3: trees (3 trees, height 2, ")
    assert broadcast.summary().endswith("; cut short by the deadline")


@refuses("path", "value", "message")
def test_what_is_no_table(path: list[Any], value: object, message: str) -> None:
    """A value that is wrong at one place of the document, or "(none)"."""
    changed = document = json.loads(table(0, 9).to_bytes())
    *above, key = path
    for step in above:
        changed = changed[step]
    changed[key] = value
    if value == "(none)":
        del changed[key]
    with pytest.raises(InputError, match=message) as caught:
        ScheduleTable.from_bytes(json.dumps(document).encode(), "x")
    assert "\n" not in str(caught.value)


def test_what_is_no_document() -> None:
    for data, message in (
        (b"\xff", "x: must be UTF-8 text, got byte 0xff at 0"),
        (b"[1", "x: line 1, column 3: must be JSON"),
        (b"[]", "x: format: must be arborcast.table/1, got nothing"),
        (b"[" * 100_000, "x: must not be nested this deep"),
    ):
        with pytest.raises(InputError, match=message):
            ScheduleTable.from_bytes(data, "x")


def chunky(chunks: int) -> Schedule:
    """A broadcast from 0 to 1 of so many chunks, all at once."""
    topology = load("ring:2,bandwidth=1000")
    return Schedule.build(
        topology,
        Collective(Kind.BROADCAST, (0, 1), 0),
        Method(f"{chunks} chunks"),
        by("trees", "broadcast", "ring:2,bandwidth=1000").bound,
        [Chunk(Fraction(1, chunks), 0)] * chunks,
        [Transfer(chunk, 0, 1, 0) for chunk in range(chunks)],
    )


def test_messages_cost_besides_their_bytes() -> None:
    # Links alone have nothing against 64 chunks; the thread that sends 64 messages of 10 us has.
    few, many = chunky(1), chunky(64)
    assert GroupSelection((many, few)).fastest(1 << 10) is few
    assert most_messages(many) == 64
    # A buffer of 1 GiB keeps the link longer than 64 messages the thread: the first of equals.
    assert GroupSelection((many, few)).fastest(1 << 30) is many
    assert GroupSelection((few, many)).fastest(1 << 30) is few


def test_streams_are_compared_in_the_planned_order() -> None:
    """The engine's random orders are not those of streams, behind switches either."""
    box = load("rtx5090:gpus=4,between=24,streams=1")
    both = tuple(synth.solve(box, "allreduce", form="explicit", method=name) for name in ("ring", "trees"))
    assert GroupSelection(both).fastest(1 << 26) in both


def test_on_one_host_the_cores_decide() -> None:
    """A star of 8 has few messages and a busy root; trees share its work, which takes cores to gain."""
    mesh = load("full:8")
    trees = synth.solve(mesh, "broadcast", method="trees", max_height=2)
    star = synth.solve(mesh, "broadcast", method="trees", max_trees=1)
    ends = dict(shares_of(star))
    assert ends == {0: 7, **dict.fromkeys(range(1, 8), 1)}
    assert sum(shares_of(trees).values()) == sum(ends.values()) == 14
    assert max(shares_of(trees).values()) < 2
    summed = shares_of(synth.solve(mesh, "allreduce", method="trees", max_trees=1), sums=2)
    assert sorted(summed.values()) == [*[2] * 7, 21]  # 7 buffers come to be added, and go

    def chosen(cores: int, mebibytes: int) -> list[bool]:
        return [
            GroupSelection(both, cores=cores).fastest(mebibytes << 20) is star for both in (pair, pair[::-1])
        ]

    pair = (star, trees)
    assert [chosen(2, size) for size in (2, 64)] == [[True, True], [False, False]]
    assert [chosen(64, size) for size in (2, 64)] == [[False, False], [False, False]]
    # The links say what they say where there are several hosts.
    assert GroupSelection(pair).fastest(1 << 20) is trees


@pytest.mark.parametrize("spec", ["full:6", "torus:4x4"])
def test_ends_are_the_same_in_implicit_form(spec: str) -> None:
    found = synth.solve(load(spec), "allgather", form="implicit")
    assert isinstance(found, ImplicitSchedule)
    for count in (messages_of, shares_of):
        short, whole = count(found), count(found.expand())
        assert set(whole.values()) == set(short.values())


def test_of_nearly_equals_the_one_that_random_orders_slow_down_the_least() -> None:
    """Two trees meet at every port of the switch; of a chain each port carries one stream."""
    star = load("star:4,bandwidth=0.025")
    pair = synth.solve(star, "broadcast", method="trees", max_height=2)
    chain = synth.solve(star, "broadcast", method="ring")

    def times_us(schedule: Schedule, size: int, service: str) -> float:
        slowed = replace(schedule, topology=with_messages(star))
        return simulate(slowed, size, pieces=SEVERAL_HOSTS.pieces(schedule, size), service=service).time_us

    # At 1 MiB the testbed measured 42.7 ms for the chain and 50.2 ms for the pair, in these pieces.
    for size, chosen in ((8 << 20, chain), (1 << 20, chain), (128 << 10, pair)):
        planned = times_us(chain, size, "priority") / times_us(pair, size, "priority")
        assert (planned < 1.02) is (chosen is chain)  # further apart, what is planned counts
        assert times_us(chain, size, ORDERS) < 0.99 * times_us(pair, size, ORDERS)
        assert GroupSelection((pair, chain)).fastest(size) is chosen
        assert GroupSelection((chain, pair)).fastest(size) is chosen


@pytest.mark.parametrize("spec", ["torus:2x3,bandwidth=0.2", "star:4,bandwidth=0.05"])
@pytest.mark.parametrize("cores", [None, 4])
@pytest.mark.few(1)
@settings(max_examples=3)
@given(data=st.data())
def test_no_other_is_faster_between_the_sizes_of_a_table(
    spec: str, cores: int | None, data: st.DataObject
) -> None:
    """As the engine cuts, at sizes about those where the table changes and at any others."""
    found = candidates_of(spec, 3 + data.draw(st.integers(0, 3)))
    choices = GroupSelection(found, cores=cores).choices()
    model = GroupSelection(found, cores=cores).prices
    about = [choice.from_bytes + less for choice in choices[1:] for less in (-1, 0)]
    anywhere = st.floats(10, 28).map(lambda power: int(2**power))
    for size in (*about, *data.draw(st.lists(anywhere, min_size=6, max_size=6))):
        serves = [choice.schedule for choice in choices if choice.from_bytes <= size][-1]
        times = [model.time_us(at, size) for at in range(len(found))]
        allowed = 1.01 + model.tolerated  # on shared ports those that random orders slow down less
        assert times[found.index(serves)] <= allowed * min(times), size


def candidates_of(spec: str, methods: int) -> tuple[Schedule, ...]:
    """Of the first so many methods, those that the fabric has."""
    found = []
    for method in ("trees", "ring", "binary-tree", "halving-doubling", "multiport", "swing")[:methods]:
        with suppress(InputError, InfeasibleError):
            found.append(by(method, spec=spec))
    return tuple(found)


SHARED_PORTS = [
    pytest.param(case, kind, marks=() if is_quick else pytest.mark.long, id=f"{case.topology.name}-{kind}")
    for case in CASES
    if case.topology.switches
    for kind in ("broadcast", "allreduce", "allgather")
    for is_quick in [kind == "broadcast" and case.topology.ranks <= 4]
]


@pytest.mark.parametrize(("case", "kind"), SHARED_PORTS)
def test_random_orders_on_shared_ports_cost_less_than_15_percent(case: Case, kind: str) -> None:
    """What the engine hands over, at the size and in the pieces of the testbed."""
    fabric, size = at_rates(case.topology, case.slowest_mbit), 8 << 20
    *_, found = tables(fabric, Collective.on(fabric, kind), "auto", SolveOptions(cache=False))
    schedule = found.at(size).schedule
    pieces = SEVERAL_HOSTS.pieces(schedule, size)
    least_us = float(size / schedule.bound.rate / 1000)
    assert simulate(schedule, size, pieces=pieces, service="engine-worst:25").time_us < 1.15 * least_us


def test_a_message_costs_once_however_many_switches_it_passes() -> None:
    star = load("star:3,latency=5")
    slowed = with_messages(star)
    assert {(src < 3, dst < 3): str(late) for (src, dst), late in slowed.latency_us.items()} == {
        (True, False): "5",
        (False, True): "25",
    }

"""Tables of the device: the checker passes what is made and finds mutants, the model adds up exactly."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast import synth, topologies
from arborcast.backends.device.plan import DevicePlan
from arborcast.backends.device.tables import LENGTH, SIGNALS, SOURCES, TARGETS, WAITS, Shape, Tables
from arborcast.synth.collective import NAMED_KINDS
from arborcast.synth.errors import InputError
from arborcast.synth.implicit_schedule import AnySchedule
from tests.device.table_model import Memory, run_model
from tests.support.definition import whole_call
from tests.support.device_check import TableError, check_tables
from tests.support.drawn_schedules import (
    allgather_over_relay,
    custom_exchange,
    recursive_doubling,
    reductions_before_sends,
    schedules,
    tree_broadcast,
    uneven_allreduce,
)

SOLVED = [
    ("dgx1", "allreduce", {}),
    ("dgx1", "allgather", {}),
    ("dgx1", "reduce-scatter", {}),
    ("dgx1", "alltoall", {}),
    ("dgx1", "gather", {"root": 2}),
    ("dgx1", "scatter", {"root": 5}),
    ("dgx1", "broadcast", {"root": 1}),
    ("dgx1", "reduce", {"root": 7}),
    ("dgx-a100", "allreduce", {}),
    ("full:8", "allreduce", {"method": "recursive-doubling"}),
    ("ring:6", "allreduce", {"method": "ring"}),
    ("ring:3", "allgather", {}),
]


def solved(fabric: str, kind: str, options: dict[str, Any]) -> AnySchedule:
    return synth.solve(topologies.load(fabric), kind, **options)


def made(schedule: AnySchedule, count: int, **options: Any) -> tuple[DevicePlan, list[Tables]]:
    plan = DevicePlan(schedule, **options)
    return plan, [plan.tables(rank, count) for rank in range(plan.ranks)]


def run_calls(schedule: AnySchedule, counts: list[int], **options: Any) -> None:
    """Calls of several lengths one after another, each exact, in orders that are drawn."""
    plan = DevicePlan(schedule, **options)
    memory = Memory(plan.shape)
    for seed, count in enumerate(counts):
        tables = [plan.tables(rank, count) for rank in range(plan.ranks)]
        inputs, outputs, wanted = whole_call(schedule.collective, plan.ranks, count, seed)
        run_model(memory, tables, inputs, outputs, seed)
        for output, want in zip(outputs, wanted, strict=True):
            assert (output[: len(want)] == want).all()


@pytest.mark.parametrize("push", [True, False])
@pytest.mark.parametrize(("fabric", "kind", "options"), SOLVED)
def test_solved_schedules_are_right(fabric: str, kind: str, options: dict[str, Any], push: bool) -> None:
    schedule = solved(fabric, kind, options)
    ranks = len(schedule.collective.ranks)
    plan, tables = made(schedule, 29 * ranks, groups=2, lanes=2, piece=16, push=push)
    check_tables(plan.shape, tables, schedule.collective, 29 * ranks)
    run_calls(schedule, [29 * ranks, 0, ranks, 64 * ranks], groups=2, lanes=2, piece=16, push=push)


@pytest.mark.few(12)
@given(schedules(NAMED_KINDS), st.integers(0, 40), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_any_schedule_is_right(
    schedule: AnySchedule, blocks: int, groups: int, lanes: int, push: bool
) -> None:
    count = blocks * len(schedule.collective.ranks)
    options: dict[str, Any] = {"groups": groups, "lanes": lanes, "piece": 5, "push": push}
    plan, tables = made(schedule, count, **options)
    check_tables(plan.shape, tables, schedule.collective, count)
    run_calls(schedule, [count, count], **options)


@pytest.mark.parametrize(
    "draw",
    [tree_broadcast, recursive_doubling, uneven_allreduce, allgather_over_relay, reductions_before_sends],
)
def test_drawn_schedules_are_right(draw: Callable[[], AnySchedule]) -> None:
    schedule = draw()
    count = 12 * len(schedule.collective.ranks)
    plan, tables = made(schedule, count, piece=4)
    check_tables(plan.shape, tables, schedule.collective, count)
    run_calls(schedule, [count, count], piece=4)


def test_a_tree_is_pipelined_with_short_rings() -> None:
    """Whatever the height of trees, a message lags by one time: four slots."""
    for fabric in ("ring:4", "ring:8"):
        plan = DevicePlan(solved(fabric, "broadcast", {}))
        assert plan.shape.ring == 4
        assert plan.shape.depth >= topologies.load(fabric).ranks // 2


def test_what_is_not_served_is_refused() -> None:
    with pytest.raises(InputError, match="device: must be a collective with blocks of one size, got custom"):
        DevicePlan(custom_exchange())
    with pytest.raises(InputError, match="device: lanes must be at least 1, got 0"):
        DevicePlan(tree_broadcast(), lanes=0)


Mutation = tuple[str, Shape, list[Tables]]


def mutant(shape: Shape, tables: list[Tables], draw: random.Random) -> Mutation:
    """One wrong number in the tables of one rank."""
    rank = draw.randrange(len(tables))
    table = tables[rank]
    rows, items = table.rows.copy(), table.items.copy()
    row = rows[draw.randrange(len(rows))]
    columns = [it for it in (WAITS, SOURCES, TARGETS, SIGNALS) if row[it] < row[it + 1]]
    column = draw.choice(columns)
    item = items[draw.randrange(row[column], row[column + 1])]
    what = draw.choice(["cut", "drop", "copy"] + ["item"] * 6)
    if what == "cut":
        row[LENGTH] += draw.choice([-1, 1])
    elif what == "drop":
        if draw.random() < 0.5:
            row[column] += 1
        else:
            row[column + 1] -= 1
    elif what == "copy":
        at = draw.choice([SOURCES, TARGETS])
        row[at + 1] += 1 if row[at + 1] < len(items) and draw.random() < 0.5 else -1
    elif column == WAITS:
        what = "credit" if item[1] else "wait"
        if draw.random() < 0.3:
            item[0] += draw.choice([-1, 1])
        else:
            item[1] += draw.choice([1, shape.ring, 1 << 20])
    elif column == SIGNALS:
        what = "signal"
        item[draw.randrange(2)] += draw.choice([-1, 1])
    elif item[2]:
        what = "slot"
        item[draw.randrange(3)] += draw.choice([-1, 1]) * draw.choice([1, shape.vector])
    else:
        what = "place"
        item[1] += draw.choice([-1, 1, shape.vector])
    changed = list(tables)
    changed[rank] = replace(table, rows=rows, items=items)
    return what, shape, changed


def found_among(draws: int, seed: int) -> Counter[str]:
    """Mutants of each sort, all of which the checker refuses."""
    draw = random.Random(seed)
    found: Counter[str] = Counter()
    cases = []
    for fabric, kind, options in SOLVED:
        schedule = solved(fabric, kind, options)
        count = 40 * len(schedule.collective.ranks)
        cases.append((schedule, count, *made(schedule, count, groups=2, piece=16)))
    while sum(found.values()) < draws:
        schedule, count, plan, tables = draw.choice(cases)
        what, shape, changed = mutant(plan.shape, tables, draw)
        with pytest.raises(TableError):
            check_tables(shape, changed, schedule.collective, count)
        found[what] += 1
    return found


def test_mutants_are_found() -> None:
    assert set(found_among(60, seed=1)) >= {"cut", "drop", "copy", "wait", "slot", "place", "signal"}


@pytest.mark.long
def test_two_thousand_mutants_are_found() -> None:
    found = found_among(2000, seed=2)
    assert min(found.values()) > 20, found

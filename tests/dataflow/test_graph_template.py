"""A stretched graph does what one compiled for that length does, whatever the length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast import synth, topologies
from arborcast.backends.dataflow.graph_template import GraphTemplate
from arborcast.backends.dataflow.task_graph import TaskGraph, compile_graph
from arborcast.backends.lowering.layout import Buffer, blocks_in, exact_count, lay_out
from arborcast.backends.lowering.lower import lower_rank
from arborcast.backends.lowering.program import Program
from arborcast.backends.measure.job import Reduction
from arborcast.synth.implicit_schedule import AnySchedule
from arborcast.synth.schedule import Schedule
from tests.support.definition import inputs_of
from tests.support.drawn_schedules import schedules
from tests.support.graph_simulation import Simulation
from tests.support.interpreter import interpret


def direct(schedule: AnySchedule, count: int, pieces: int) -> list[Program]:
    return [lower_rank(schedule, rank, count, pieces=pieces) for rank in range(schedule.topology.ranks)]


def stretched(schedule: AnySchedule, count: int, pieces: int) -> list[TaskGraph | None]:
    ranks = range(schedule.topology.ranks)
    return [GraphTemplate.of(schedule, rank, pieces).at(count) for rank in ranks]


def check(schedule: AnySchedule, count: int, pieces: int, seed: int) -> bool:
    """Whether a piece is empty; where none is, all ranks get what the programs of this length give."""
    programs = direct(schedule, count, pieces)
    places = lay_out(schedule, count).places.values() if isinstance(schedule, Schedule) else ()
    found = stretched(schedule, count, pieces)
    for rank, (program, graph) in enumerate(zip(programs, found, strict=True)):
        exact = lower_rank(schedule, rank, exact_count(schedule, pieces), pieces=pieces)
        sent, most = (sum(hasattr(it, "tag") for it in each.operations) for each in (program, exact))
        assert (graph is None) == (sent < most) or not most  # a rank without messages has either
    if None in found:
        assert not places or any(it.stop - it.start < pieces for it in places)
        return True
    graphs = [
        replace(graph, program=program) for graph, program in zip(found, programs, strict=True) if graph
    ]
    inputs = inputs_of(schedule, count, "int64", Reduction.SUM)
    got = Simulation(graphs, inputs, seed=seed, part=1 + seed % 7 + count // 40).run()
    for mine, wanted in zip(got, interpret(programs, inputs), strict=True):
        np.testing.assert_array_equal(mine, wanted)
    return False


@given(schedules(), st.integers(0, 60), st.integers(1, 4), st.integers(0, 2**16))
def test_any_schedule_at_any_length(schedule: Schedule, size: int, pieces: int, seed: int) -> None:
    check(schedule, size * blocks_in(schedule.collective), pieces, seed)


@pytest.mark.parametrize("kind", ["allreduce", "allgather", "reduce-scatter", "broadcast", "alltoall"])
def test_machines_in_both_forms(kind: str) -> None:
    given: dict[str, Any] = {"form": "auto" if kind == "broadcast" else "implicit"}
    for spec, options in {"dgx1": {"form": "explicit"}, "torus:3x3": given}.items():
        schedule = synth.solve(topologies.load(spec), kind, **options)
        for count in (601,):
            assert not check(schedule, count * blocks_in(schedule.collective), 3, count)


@given(schedules(), st.integers(1, 3), st.integers(1, 3))
def test_at_lengths_that_divide_it_is_the_same_graph(schedule: Schedule, pieces: int, times: int) -> None:
    count = times * exact_count(schedule, pieces)
    for program, graph in zip(
        direct(schedule, count, pieces), stretched(schedule, count, pieces), strict=True
    ):
        own = compile_graph(program)
        assert graph is not None
        assert (graph.sends, graph.receives, graph.waits) == (own.sends, own.receives, own.waits)
        assert graph.scratch_elements <= own.scratch_elements
        for number, action in enumerate(own.actions):
            mine = graph.action(number)
            assert (mine.act, mine.peer, mine.waiters, mine.share) == (
                action.act,
                action.peer,
                action.waiters,
                action.share,
            )
            for part, wanted in ((mine.into, action.into), (mine.source, action.source)):
                assert (part.buffer, part.length) == (wanted.buffer, wanted.length)
                assert part == wanted or part.buffer is Buffer.SCRATCH


def test_lengths_that_do_not_divide_into_blocks_or_beyond_64_bits_are_left_to_the_compiler() -> None:
    schedule = synth.solve(topologies.load("ring:3"), "allgather")
    template = GraphTemplate.of(schedule, 0, 2)
    assert template.at(3 * 10**6) is not None
    assert template.at(3 * 10**6 + 1) is None
    assert template.at(3 << 62) is None

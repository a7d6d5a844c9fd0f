"""Task graphs fuse what they can, never deadlock over the smallest channels, and give what programs give."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from arborcast import synth, topologies
from arborcast.backends.dataflow.task_graph import Act, TaskGraph, compile_graph
from arborcast.backends.lowering.layout import Buffer, BufferSlice
from arborcast.backends.lowering.lower import lower, lower_rank
from arborcast.backends.lowering.program import Copy, Program, Receive, Reduce, Send
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError
from arborcast.synth.schedule import Chunk, Schedule, Transfer
from arborcast.synth.simulation.service import AHEAD
from tests.executors.test_conformance import check, simulated
from tests.support.definition import inputs_of
from tests.support.drawn_schedules import (
    make,
    recursive_doubling,
    ring_allreduce,
)
from tests.support.graph_simulation import Simulation, StuckError
from tests.support.interpreter import interpret


def out(start: int, stop: int) -> BufferSlice:
    return BufferSlice(Buffer.OUTPUT, start, stop)


def held(start: int, stop: int) -> BufferSlice:
    return BufferSlice(Buffer.SCRATCH, start, stop)


def drawn(graph: TaskGraph) -> list[str]:
    """One line for each action, with the numbers of those that it waits for."""
    before: dict[int, list[int]] = {number: [] for number in range(len(graph.actions))}
    for number, action in enumerate(graph.actions):
        for waiter in action.waiters:
            before[waiter].append(number)
    assert [len(found) for found in before.values()] == list(graph.waits)
    forms = {
        Act.SEND: "{into} > {peer}",
        Act.RECEIVE: "{into} = {peer} >",
        Act.COMBINE: "{into} = {source} + {peer} >",
        Act.REDUCE: "{into} = {into} + {source}",
        Act.COPY: "{into} = {source}",
    }
    return [
        forms[action.act].format(into=action.into, source=action.source, peer=action.peer)
        + (f" after {before[number]}" if before[number] else "")
        for number, action in enumerate(graph.actions)
    ]


@pytest.mark.parametrize("method", ["trees", "ring", "binary-tree", "halving-doubling"])
@pytest.mark.parametrize("kind", ["allreduce", "reduce-scatter", "allgather", "broadcast", "reduce"])
def test_methods(method: str, kind: str) -> None:
    try:
        schedule = synth.solve(topologies.load("full:4"), kind, method=method)
    except InputError:
        pytest.skip(f"{method} does not do {kind}")
    for seed in range(3):
        check(simulated, schedule, 24, 3, seed=seed)


def test_usual_trees_need_no_scratch() -> None:
    schedule = synth.solve(topologies.load("dgx1"), "allreduce", method="trees")
    for program in lower(schedule, 4096, pieces=4):
        graph = compile_graph(program)
        assert graph.scratch_elements == 0
        assert all(action.act in {Act.SEND, Act.RECEIVE, Act.COMBINE} for action in graph.actions)


def test_the_root_of_a_tree_as_drawn() -> None:
    edges = [(1, 0, 0), (2, 0, 0), (0, 1, 1), (0, 2, 1)]
    transfers = [Transfer(0, src, dst, step, step == 0) for src, dst, step in edges]
    star = make("allreduce", [Chunk(Fraction(1), 0)], transfers, total=3)
    assert drawn(compile_graph(lower_rank(star, 0, 4))) == [
        "output[0:4] = output[0:4] + 1 >",
        "output[0:4] = output[0:4] + 2 > after [0]",
        "output[0:4] > 1 after [1]",
        "output[0:4] > 2 after [1]",
    ]


def test_an_exchange_is_fused_only_where_the_send_comes_first() -> None:
    # Rank 0 sends before it receives, in the global order, and may add to what it has sent. Rank 1 receives
    # first: were it to add at once, it would wait for its own send, which rank 0 may not yet be able to take.
    graphs = [compile_graph(program) for program in lower(recursive_doubling(), 6)]
    assert drawn(graphs[0])[:2] == ["output[0:6] > 1", "output[0:6] = output[0:6] + 1 > after [0]"]
    assert drawn(graphs[1])[:3] == [
        "scratch[0:6] = 0 >",
        "output[0:6] > 0",
        "output[0:6] = output[0:6] + scratch[0:6] after [0, 1]",
    ]
    # Rank 2 sends first in step 0 and receives first in step 1; rank 3 receives first in both (in one slot).
    assert [graph.scratch_elements for graph in graphs] == [0, 6, 6, 6]


def test_what_an_input_is_combined_with() -> None:
    # Rank 0 gets its own block of a reduce-scatter: its input stays as it is.
    graph = compile_graph(lower_rank(direct_reduce_scatter(3), 0, 12))
    assert drawn(graph)[:4] == [
        "output[0:4] = input[0:4] + 1 >",
        "output[0:4] = output[0:4] + 2 > after [0]",
        "input[4:8] > 1",
        "input[8:12] > 2",
    ]
    assert graph.scratch_elements == 0


def direct_reduce_scatter(ranks: int) -> Schedule:
    pairs = [(block, rank) for block in range(ranks) for rank in range(ranks) if rank != block]
    chunks = [Chunk(Fraction(1, ranks), block) for block in range(ranks)]
    transfers = [Transfer(block, rank, block, 0, True) for block, rank in pairs]
    return make(Kind.REDUCE_SCATTER, chunks, transfers, total=ranks)


def program_of(*operations: Send | Receive | Reduce | Copy, scratch: int) -> Program:
    return Program(0, operations, 8, 8, scratch, True, 2)


def test_a_slot_that_others_use_keeps_their_order() -> None:
    # Slot 0:4 is used three times; the middle use is fused away, but the last must still wait for the first.
    program = program_of(
        Receive(0, 1, held(0, 4), 0),
        Send(0, 1, held(0, 4), 1, (0,)),
        Receive(1, 1, held(0, 4), 2, (1,)),
        Reduce(1, held(0, 4), out(0, 4), (2,)),
        Receive(2, 1, held(0, 4), 3, (3,)),
        Send(2, 1, held(0, 4), 4, (4,)),
        scratch=4,
    )
    assert drawn(compile_graph(program)) == [
        "scratch[0:4] = 1 >",
        "scratch[0:4] > 1 after [0]",
        "output[0:4] = output[0:4] + 1 >",
        "scratch[0:4] = 1 > after [1, 2]",
        "scratch[0:4] > 1 after [3]",
    ]


def test_data_that_is_read_twice_stays() -> None:
    program = program_of(
        Receive(0, 1, held(0, 4), 0),
        Reduce(0, held(0, 4), out(0, 4), (0,)),
        Send(1, 2, held(0, 4), 1, (0,)),
        scratch=4,
    )
    assert drawn(compile_graph(program)) == [
        "scratch[0:4] = 1 >",
        "output[0:4] = output[0:4] + scratch[0:4] after [0]",
        "scratch[0:4] > 2 after [0]",
    ]


def test_scratch_ends_with_the_last_slice_that_is_used() -> None:
    program = program_of(
        Receive(0, 1, held(4, 7), 1),
        Send(1, 2, held(4, 7), 2, (0,)),
        Receive(1, 1, held(8, 12), 3),
        Reduce(1, held(8, 12), out(0, 4), (2,)),
        scratch=12,
    )
    graph = compile_graph(program)
    assert drawn(graph) == [
        "scratch[4:7] = 1 >",
        "scratch[4:7] > 2 after [0]",
        "output[0:4] = output[0:4] + 1 >",
    ]
    assert graph.scratch_elements == 7


def test_sends_do_not_run_ahead_of_what_comes_in() -> None:
    """A leaf has all pieces from the start, and gets another tree's in return."""
    program = program_of(
        *(
            operation
            for time in range(4)
            for operation in (
                Send(time, 1, out(time, time + 1), time),
                Receive(time, 2, out(4 + time, 5 + time), time),
            )
        ),
        Send(3 + AHEAD, 1, out(0, 1), 9),
        scratch=0,
    )
    assert [line for line in drawn(compile_graph(program, ahead=2)) if ">" in line and "=" not in line] == [
        "output[0:1] > 1",
        "output[1:2] > 1",
        "output[2:3] > 1 after [1]",
        "output[3:4] > 1 after [3]",
        "output[0:1] > 1 after [7]",
    ]
    sends = [number for number, action in enumerate(compile_graph(program).actions) if action.act is Act.SEND]
    assert [compile_graph(program).waits[number] for number in sends] == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_pacing_loses_nothing_and_waits_for_ever_nowhere(ahead: int) -> None:
    for schedule, size in ((ring_allreduce(4), 24), (recursive_doubling(), 24)):
        programs = lower(schedule, size, pieces=5)
        graphs = [compile_graph(program, ahead=ahead) for program in programs]
        inputs = inputs_of(schedule, size, "int64")
        for seed in range(5):
            found = Simulation(graphs, inputs, part=1, seed=seed).run()
            for got, meant in zip(found, interpret(programs, inputs), strict=True):
                np.testing.assert_array_equal(got, meant)


def test_sends_may_run_ahead_by_one_at_least() -> None:
    with pytest.raises(ValueError, match="ahead must be at least 1, got 0"):
        compile_graph(program_of(scratch=0), ahead=0)


def test_an_empty_program() -> None:
    graph = compile_graph(Program(0, (), 0, 0, 0, False, 1))
    assert graph.actions == () and not graph.receives and not graph.sends


def test_the_simulation_finds_what_would_deadlock() -> None:
    """Two ranks that both send first have no common order, and may not add while they send."""
    programs = [
        Program(
            rank,
            (
                Send(0, 1 - rank, out(0, 8), rank),
                Receive(0, 1 - rank, held(0, 8), 1 - rank),
                Reduce(0, held(0, 8), out(0, 8), (0, 1)),
            ),
            0,
            8,
            8,
            True,
            2,
        )
        for rank in range(2)
    ]
    graphs = [compile_graph(program) for program in programs]
    inputs = [np.arange(8), 10 * np.arange(8)]
    assert (Simulation(graphs, inputs, part=8).run()[0] == 11 * np.arange(8)).all()
    with pytest.raises(StuckError, match="2 ranks wait for ever"):
        Simulation(graphs, inputs, part=4).run()


def test_operations_that_wait_for_later_ones_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="only for those before it"):
        compile_graph(program_of(Send(0, 1, out(0, 4), 0, (1,)), Send(0, 1, out(4, 8), 1), scratch=0))

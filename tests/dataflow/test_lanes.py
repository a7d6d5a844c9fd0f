"""Messages split over several cables: parts tile them, both ends agree, results stay, nothing deadlocks."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborcast import synth, topologies
from arborcast.backends.dataflow.task_graph import Act, TaskGraph, compile_graph
from arborcast.backends.lowering.lower import lower
from arborcast.backends.transport import lanes
from arborcast.backends.transport.lanes import CableLanes, split
from tests.support.definition import inputs_of
from tests.support.drawn_schedules import recursive_doubling, ring_allreduce
from tests.support.graph_simulation import Simulation
from tests.support.interpreter import interpret

RATES = st.lists(st.fractions(Fraction(1, 100), 100), min_size=1, max_size=5)


@given(st.integers(0, 10**9), RATES)
def test_parts_tile_a_message_in_proportion_to_the_rates(length: int, rates: list[Fraction]) -> None:
    parts = split(length, rates)
    assert [start for _, start, _ in parts] == [0, *(stop for *_, stop in parts[:-1])]
    assert parts[-1][2] == length
    if length < lanes.WHOLE_BELOW:
        assert parts == [(0, 0, length)]
        return
    assert [lane for lane, *_ in parts] == sorted({lane for lane, *_ in parts})
    lengths = {lane: stop - start for lane, start, stop in parts}
    for lane, rate in enumerate(rates):
        assert abs(lengths.get(lane, 0) - length * rate / sum(rates)) < 1


def of_all(ranks: int, rates: dict[tuple[int, int], list[Fraction]]) -> list[CableLanes]:
    """What each rank knows of lanes between some ranks, by sender and receiver."""
    return [
        CableLanes(
            ranks,
            {dst: each for (src, dst), each in rates.items() if src == rank},
            {src: each for (src, dst), each in rates.items() if dst == rank},
        )
        for rank in range(ranks)
    ]


def sent_along(graph: TaskGraph, rank: int, ranks: int) -> dict[tuple[int, int, int], list[int]]:
    """By sender, receiver and lane what this rank sends, in order; by receiver likewise what it expects."""
    found = {}
    for orders, is_send in ((graph.sends, True), (graph.receives, False)):
        for number, order in orders.items():
            lane, peer = divmod(number, ranks)
            ends = (rank, peer) if is_send else (peer, rank)
            found[(*ends, lane)] = [graph.actions[at].into.length for at in order]
    return found


@pytest.mark.parametrize("kind", ["allreduce", "alltoall", "reduce-scatter", "broadcast"])
@given(data=st.data())
def test_both_ends_split_alike_and_results_are_those_of_the_program(kind: str, data: st.DataObject) -> None:
    ranks = 3
    schedule = synth.solve(topologies.load("full:3"), kind, method="trees" if kind != "alltoall" else "auto")
    elements = data.draw(st.integers(1, 60), "elements") * ranks
    pairs = [(src, dst) for src in range(ranks) for dst in range(ranks) if src != dst]
    of_pairs = data.draw(st.dictionaries(st.sampled_from(pairs), RATES), "rates")
    whole_below, lanes.WHOLE_BELOW = lanes.WHOLE_BELOW, data.draw(st.integers(0, 10), "whole below")
    try:
        programs = lower(schedule, elements, pieces=data.draw(st.integers(1, 4), "pieces"))
        known = of_all(ranks, of_pairs)
        graphs = [compile_graph(program, lanes=known[program.rank]) for program in programs]
    finally:
        lanes.WHOLE_BELOW = whole_below
    sides: dict[tuple[int, int, int], list[list[int]]] = {}
    for rank, graph in enumerate(graphs):
        for way, lengths in sent_along(graph, rank, ranks).items():
            sides.setdefault(way, []).append(lengths)
    assert all(len(each) == 2 and each[0] == each[1] for each in sides.values())
    inputs = inputs_of(schedule, elements, "int64")
    found = Simulation(graphs, inputs, part=2, seed=data.draw(st.integers(0, 9), "seed")).run()
    for got, meant in zip(found, interpret(programs, inputs), strict=True):
        np.testing.assert_array_equal(got, meant)


@pytest.mark.parametrize("ahead", [1, 2])
def test_parts_are_paced_and_wait_for_ever_nowhere(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "WHOLE_BELOW", 2)
    for schedule, size in ((ring_allreduce(4), 40), (recursive_doubling(), 40)):
        programs = lower(schedule, size, pieces=5)
        pairs = [(src, dst) for src in range(4) for dst in range(4) if src != dst and (src + dst) % 3]
        known = of_all(4, {pair: [Fraction(3), Fraction(1), Fraction(1)] for pair in pairs})
        graphs = [compile_graph(it, ahead=ahead, lanes=known[it.rank]) for it in programs]
        assert any(number >= 4 for graph in graphs for number in graph.sends)
        inputs = inputs_of(schedule, size, "int64")
        for seed in range(3):
            found = Simulation(graphs, inputs, part=1, seed=seed).run()
            for got, meant in zip(found, interpret(programs, inputs), strict=True):
                np.testing.assert_array_equal(got, meant)


def test_parts_wait_for_all_parts_of_what_their_message_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "WHOLE_BELOW", 2)
    programs = lower(synth.solve(topologies.load("full:2"), "allreduce", method="trees"), 8)
    known = of_all(2, {(0, 1): [Fraction(3), Fraction(1)], (1, 0): [Fraction(1), Fraction(1)]})
    root = next(
        it for it in programs if not any(action.act is Act.SEND for action in compile_graph(it).actions[:1])
    )
    graph = compile_graph(root, lanes=known[root.rank])
    shown = [(it.act, it.into.start, it.into.stop, it.peer // 2, str(it.operation)) for it in graph.actions]
    assert [it[0] for it in shown] == [Act.COMBINE] * 2 + [Act.SEND] * 2
    assert [it[3] for it in shown] == [0, 1, 0, 1]
    assert list(graph.waits) == [0, 0, 2, 2]
    assert all(f"[{start}:{stop}]" in said for _, start, stop, _, said in shown)

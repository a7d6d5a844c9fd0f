"""The window of what can matter: no send from where nothing can be, no schedule lost."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import custom_collectives, topologies

from synth.chunks.boolean import BooleanSearch
from synth.chunks.ilp import ArrivalSearch, IlpSearch
from synth.chunks.lift import prune
from synth.chunks.orbits import Orbits
from synth.chunks.outcome import Found, Instance, Search
from synth.chunks.problem import Problem
from synth.chunks.smt import SmtSearch
from synth.chunks.window import Window
from synth.collective import Collective, Demand
from synth.topology import Link, Topology

PATH = Topology.build(
    "path", 4, [Link(a, b, Fraction(1)) for low in range(3) for a, b in ((low, low + 1), (low + 1, low))]
)


def problem_of(*demands: tuple[int, int]) -> Problem:
    wanted = [Demand(frozenset({source}), frozenset({target})) for source, target in demands]
    return Problem.of(PATH, Collective.custom(PATH, wanted))


def test_nothing_comes_back_from_beyond_the_last_target() -> None:
    problem = problem_of((1, 3))
    window = Window.of(Orbits.trivial(problem, 1), 4)
    ways = {(problem.routes[route].src, problem.routes[route].dst) for route, _ in window.sends[0]}
    assert ways == {(1, 0), (1, 2), (2, 3)}  # 0 -> 1 leads to a source, 3 -> 2 from the only target


def test_no_send_starts_where_nothing_can_have_come() -> None:
    problem = problem_of((3, 1))
    window = Window.of(Orbits.trivial(problem, 1), 4)
    ways = {(problem.routes[route].src, problem.routes[route].dst) for route, _ in window.sends[0]}
    assert ways == {(3, 2), (2, 1)}  # not 0 -> 1: what is at 0 was at its target before
    assert {rank for rank, _ in window.holds[0]} == {1, 2, 3}


@pytest.mark.parametrize("encoding", [SmtSearch, IlpSearch, ArrivalSearch, BooleanSearch])
@pytest.mark.parametrize("rounds", [4, 5])
def test_models_bring_chunks_from_their_sources(encoding: type[Search], rounds: int) -> None:
    problem = problem_of((1, 3), (3, 1))
    found = encoding(Instance(Orbits.trivial(problem, 1), 4, rounds)).run(None)  # type: ignore[call-arg]
    assert isinstance(found, Found)
    prune(problem, 1, found.rounds, Orbits.trivial(problem, 1).unfold(found.sends))  # or it raises


@settings(max_examples=60)
@given(st.data())
def test_every_simple_way_from_a_source_to_a_target_stays(
    data: st.DataObject,
) -> None:
    topology = data.draw(topologies(max_ranks=4, switches=1, symmetric=False))
    problem = Problem.of(topology, data.draw(custom_collectives(topology, max_blocks=1)))
    steps = (problem.latency or 0) + data.draw(st.integers(0, 1))
    kept = set(Window.of(Orbits.trivial(problem, 1), steps).sends[0])
    demand = problem.demands[0]
    starts = {(rank, time) for rank, time in product(demand.sources, range(steps))}
    for start in sorted(starts):
        for way in _ways(problem, demand, start, steps, seen=frozenset()):
            assert set(way) <= kept


def _ways(
    problem: Problem, demand: Demand, place: tuple[int, int], steps: int, seen: frozenset[int]
) -> list[list[tuple[int, int]]]:
    """Ways of sends without a stop from a place to a target, through no rank twice."""
    rank, time = place
    found: list[list[tuple[int, int]]] = [[]] if rank in demand.targets else []
    if time < steps:
        for index in problem.leaving[rank]:
            after = problem.routes[index].dst
            if after not in seen | demand.sources:
                onward = _ways(problem, demand, (after, time + 1), steps, seen | {rank})
                found += [[(index, time), *way] for way in onward]
    return found

"""Integer programs for HiGHS beyond `test_encodings`: one target each, rotations, checks of a solution."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arborcast.synth.chunks.encodings.ilp import IlpSearch
from arborcast.synth.chunks.encodings.sat import sat_search
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkOrbits, Group
from arborcast.synth.chunks.problem.outcome import Feasible, Infeasible, Instance, Search, Unknown
from arborcast.synth.chunks.trees.column_generation import tree_bound
from arborcast.synth.collective import Collective, Demand, Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.lp.integer_program import IntegerProgram
from arborcast.synth.topology import Topology
from arborcast.topologies import load
from tests.support.chunk_problems import ROUTED, problem_of, rotations
from tests.support.chunk_replay import replay
from tests.support.strategies import collectives, topologies

EFFORT = 100  # of the frontier's; a search for copies may take hours where there is no schedule


def is_found(search: Search, instance: Instance, effort: int | None = None) -> bool:
    """Whether there is a schedule, which is replayed; examples of which effort does not tell are left out."""
    outcome = search.run(effort)
    if isinstance(outcome, Feasible):
        replay(instance, outcome)
        return True
    assume(effort is None or not isinstance(outcome, Unknown))
    assert isinstance(outcome, Infeasible)
    return False


@st.composite
def one_target_each(draw: st.DrawFn, topology: Topology) -> Collective:
    """Blocks of one target and any sources; some are alike."""
    demands = []
    for _ in range(draw(st.integers(1, 5))):
        order = draw(st.permutations(range(topology.ranks)))
        sources = draw(st.integers(1, min(3, topology.ranks - 1)))
        demands += [Demand(frozenset(order[:sources]), frozenset(order[-1:]))] * draw(st.integers(1, 2))
    return Collective.custom(topology, demands)


@st.composite
def routing_instances(draw: st.DrawFn) -> Instance:
    """Instances of one target per demand about as often possible as not."""
    topology: Topology = draw(topologies(max_ranks=6, max_bandwidth=3, symmetric=draw(st.booleans())))
    collective = draw(st.one_of(collectives(topology, ROUTED, relays=True), one_target_each(topology)))
    problem = ChunkProblem.of(topology, collective)
    chunks = draw(st.integers(1, 3))
    assert problem.latency is not None
    steps = problem.latency + draw(st.integers(0, 2))
    least = math.ceil(tree_bound(problem, steps, deadline=Deadline()).bound.ratio * chunks)
    rounds = max(steps, least + draw(st.integers(-1, 0)))
    return Instance(ChunkOrbits.trivial(problem, chunks), steps, rounds)


@settings(max_examples=120)
@given(routing_instances())
def test_blocks_of_one_target_each(instance: Instance) -> None:
    of_ilp, of_sat = (is_found(make(instance), instance, EFFORT) for make in (IlpSearch, sat_search))
    assert of_ilp == of_sat


def test_any_source_may_supply_each_chunk() -> None:
    """Rank 2 of a chain 0 - 1 - 2 - 3 - 4 gets two of four chunks from each side."""
    topology = load("mesh:1x5")
    collective = Collective.custom(topology, [Demand(frozenset({0, 4}), frozenset({2}))])
    orbits = ChunkOrbits.trivial(ChunkProblem.of(topology, collective), 4)
    for steps, rounds, expected in ((2, 3, False), (2, 4, True), (3, 3, True)):
        instance = Instance(orbits, steps, rounds)
        assert is_found(IlpSearch(instance), instance) is expected


def translations(rows: int, columns: int) -> Group:
    """Of a torus whose ranks are numbered row by row."""
    return tuple(
        tuple(
            (row + down) % rows * columns + (column + right) % columns
            for row, column in places(rows, columns)
        )
        for down, right in places(rows, columns)
    )


def places(rows: int, columns: int) -> list[tuple[int, int]]:
    return list(product(range(rows), range(columns)))


@pytest.mark.parametrize(
    ("spec", "group", "kind", "size", "expected"),
    [
        ("ring:8", rotations(8), Kind.ALLGATHER, (2, 4, 7), True),
        ("ring:8", rotations(8), Kind.ALLGATHER, (2, 4, 6), False),
        # 7 blocks enter a rank over two links.
        ("ring:8", rotations(8), Kind.ALLGATHER, (2, 7, 7), True),
        # Each way a rank sends to those 1, 2, 3 away, and half of what goes 4 away: 8 links for 1 chunk.
        ("ring:8", rotations(8), Kind.ALLTOALL, (1, 4, 8), False),
        ("ring:8", rotations(8), Kind.ALLTOALL, (2, 4, 16), True),
        ("ring:8", rotations(8), Kind.ALLTOALL, (2, 4, 15), False),
        ("torus:3x3", translations(3, 3), Kind.ALLGATHER, (2, 2, 4), True),
        ("torus:3x3", translations(3, 3), Kind.ALLGATHER, (2, 3, 3), False),
        # 12 hops from each rank over 4 links.
        ("torus:3x3", translations(3, 3), Kind.ALLTOALL, (1, 2, 3), True),
        ("torus:3x4", translations(3, 4), Kind.ALLGATHER, (4, 3, 11), True),
        ("torus:4x4", translations(4, 4), Kind.ALLGATHER, (4, 4, 15), True),
    ],
)
def test_under_rotations(
    spec: str, group: Group, kind: Kind, size: tuple[int, int, int], expected: bool
) -> None:
    chunks, steps, rounds = size
    orbits = ChunkOrbits(problem_of(spec, kind), chunks, group)
    instance = Instance(orbits, steps, rounds)
    assert is_found(IlpSearch(instance), instance) is expected


def test_a_slice_ends_by_count_and_the_next_has_another_seed() -> None:
    """A broadcast of 22 chunks on a DGX-1 takes seconds."""
    instance = Instance(ChunkOrbits.trivial(problem_of("dgx1", "broadcast"), 22), 3, 9)
    assert [IlpSearch(instance).run(1) for _ in range(2)] == [Unknown()] * 2


def program_of_two() -> IntegerProgram:
    """Whole numbers x and y from 0 to 4 with 2x + 2y from 3 to 5; fewer x are looked for first."""
    program = IntegerProgram()
    columns = [program.add_column(4, cost=1), program.add_column(4)]
    program.add_row(columns, [2, 2], least=3, most=5)
    return program


def test_an_integer_program() -> None:
    program = program_of_two()
    assert program.best(50, Deadline()) == [0, 2]  # the least cost
    program.add_row([0, 1], [1, 2], most=1)
    assert program.best(50, Deadline()) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([2, 1], r"row 0 must be from 3 to 5, its solution in whole numbers gives 6"),
        ([5, -3], r"column 0 must be from 0 to 4, its solution in whole numbers gives 5"),
    ],
)
def test_a_solution_that_is_none_is_not_believed(
    values: list[int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HiGHS works in floating point; here it is made to be wrong."""
    import highspy

    wrong = SimpleNamespace(col_value=[value + 1e-7 for value in values])
    monkeypatch.setattr(highspy.Highs, "getSolution", lambda _: wrong)
    with pytest.raises(ArithmeticError, match=message):
        program_of_two().solution_of(highspy.Highs())
    assert program_of_two().best(50, Deadline()) is None

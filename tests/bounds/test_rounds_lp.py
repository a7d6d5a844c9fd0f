"""The guess of rounds: known values, never more than a schedule has, never less than the limit by cuts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.synth.chunks.bounds.flow_bounds import cut_bound
from arborcast.synth.chunks.encodings.ilp import IlpSearch
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkOrbits
from arborcast.synth.chunks.problem.outcome import Feasible, Instance
from arborcast.synth.collective import Kind
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InfeasibleError, TimedOutError
from tests.support.chunk_replay import instance_of
from tests.support.rounds_lp import least_rounds
from tests.support.strategies import collectives, custom_collectives, topologies

COPIES = [Kind.BROADCAST, Kind.ALLGATHER, Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL]


def guess(spec: str, kind: str, chunks: int, steps: int) -> int:
    return least_rounds(
        instance_of(spec, kind, chunks, steps, steps).orbits.problem, chunks, steps, deadline=Deadline()
    )


@pytest.mark.parametrize(
    ("spec", "kind", "size"),
    [
        ("dgx1", "allgather", (2, 2, 3)),
        ("dgx1", "allgather", (6, 3, 7)),
        ("dgx1", "gather", (6, 2, 7)),
        ("dgx1", "gather", (7, 2, 9)),
        ("dgx1", "scatter", (6, 2, 7)),
        ("dgx1", "alltoall", (3, 2, 8)),
        ("dgx1", "broadcast", (22, 3, 9)),
        ("ring:8", "allgather", (2, 4, 7)),
        ("dgx-a100", "allgather", (1, 1, 7)),  # 7 blocks come through one link from the switches
        # Three links leave the root and three reach the far corner: each three of the first and of the last
        # two steps must last for 7 chunks.
        ("hypercube:3", "broadcast", (7, 4, 6)),
    ],
)
def test_known_values(spec: str, kind: str, size: tuple[int, int, int]) -> None:
    chunks, steps, rounds = size
    assert guess(spec, kind, chunks, steps) == rounds


def test_a_guess_may_be_too_low() -> None:
    """Trees of three steps in a cube share links that the flows to single corners do not see."""
    assert guess("hypercube:3", "broadcast", 6, 3) == 6 - 1


@settings(max_examples=80)
@given(st.data())
def test_no_schedule_has_fewer_rounds(data: st.DataObject) -> None:
    topology = data.draw(topologies(max_ranks=5, max_bandwidth=2, symmetric=data.draw(st.booleans())))
    drawn = st.one_of(collectives(topology, COPIES, relays=True), custom_collectives(topology))
    collective = data.draw(drawn)
    problem = ChunkProblem.of(topology, collective)
    chunks = data.draw(st.integers(1, 3))
    assert problem.latency is not None
    steps = problem.latency + data.draw(st.integers(0, 1))
    guessed = least_rounds(problem, chunks, steps, deadline=Deadline())
    assert guessed >= steps
    if collective.kind is not Kind.CUSTOM:
        limit = cut_bound(problem, steps, deadline=Deadline()).ratio
        assert guessed >= math.ceil(limit * chunks)
    if guessed > steps:
        fewer = Instance(ChunkOrbits.trivial(problem, chunks), steps, guessed - 1)
        assert not isinstance(IlpSearch(fewer).run(None), Feasible)


def test_out_of_reach() -> None:
    with pytest.raises(InfeasibleError, match="some target cannot be reached in 1 steps"):
        guess("dgx1", "broadcast", 1, 1)


def test_out_of_time() -> None:
    problem = instance_of("dgx1", "allgather", 6, 3, 7).orbits.problem
    with pytest.raises(TimedOutError, match="the guess of rounds did not end within the deadline of 0"):
        least_rounds(problem, 6, 3, deadline=Deadline.after(0))

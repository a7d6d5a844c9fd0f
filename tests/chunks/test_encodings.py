"""All encodings of an instance give the answer that brute force gives; every model is replayed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arborcast.synth.chunks.encodings.ilp import ArrivalSearch, IlpSearch
from arborcast.synth.chunks.encodings.sat import BooleanSearch
from arborcast.synth.chunks.encodings.smt import SmtSearch
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkOrbits
from arborcast.synth.chunks.problem.outcome import Feasible, Infeasible, Instance
from arborcast.synth.chunks.problem.symmetry import useful_groups
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.topology import Topology
from arborcast.topologies import load
from tests.support.chunk_replay import brute_force, instance_of, replay
from tests.support.strategies import collectives, custom_collectives, topologies

ENCODINGS: list[Any] = [SmtSearch, IlpSearch, BooleanSearch]
COPIES = [Kind.BROADCAST, Kind.ALLGATHER, Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL]


def verdict(encoding: Any, instance: Instance, seed: int = 0) -> bool:
    """Whether there is a schedule, which is replayed."""
    outcome = encoding(instance, seed=seed).run(None)
    if isinstance(outcome, Feasible):
        replay(instance, outcome)
        return True
    assert isinstance(outcome, Infeasible)
    return False


def verdicts(instance: Instance) -> set[bool]:
    return {verdict(encoding, instance) for encoding in [*ENCODINGS, ArrivalSearch]}


@st.composite
def instances(draw: st.DrawFn, most_arrivals: int, max_ranks: int, chunks: int) -> Instance:
    """An instance in which at most so many chunks can arrive anywhere."""
    symmetric = draw(st.booleans())
    topology: Topology = draw(
        topologies(max_ranks=max_ranks, switches=1, max_bandwidth=2, symmetric=symmetric)
    )
    collective: Collective = draw(
        st.one_of(collectives(topology, COPIES, relays=True), custom_collectives(topology, max_blocks=2))
    )
    problem = ChunkProblem.of(topology, collective)
    count = draw(st.integers(1, chunks))
    arrivals = sum(problem.ranks - len(demand.sources) for demand in problem.demands)
    assume(count * arrivals <= most_arrivals)
    latency = problem.latency
    assert latency is not None
    steps = latency + draw(st.integers(0, 2))
    return Instance(ChunkOrbits.trivial(problem, count), steps, steps + draw(st.integers(0, 2)))


@settings(max_examples=150, deadline=None)
@given(instances(most_arrivals=8, max_ranks=5, chunks=3))
def test_all_encodings_agree_with_brute_force(instance: Instance) -> None:
    orbits = instance.orbits
    expected = brute_force(orbits.problem, orbits.chunks, instance.steps, instance.rounds)
    assert verdicts(instance) == {expected}


@settings(max_examples=60, deadline=None)
@given(instances(most_arrivals=40, max_ranks=5, chunks=4))
def test_all_encodings_agree(instance: Instance) -> None:
    assert len(verdicts(instance)) == 1


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("spec", ["ring:4", "star:4", "torus:2x3", "fat-tree:2x2", "hypercube:2"])
def test_all_encodings_agree_under_every_group(spec: str, kind: Kind) -> None:
    """They search the same schedules: those that the group maps to themselves."""
    topology = load(spec)
    problem = ChunkProblem.of(topology, Collective.on(topology, kind))
    latency = problem.latency
    assert latency is not None
    for chunks in (1, 2):
        for group in useful_groups(problem, chunks)[:2]:
            for steps, rounds in ((latency, latency), (latency + 1, latency + 2)):
                small = Instance(ChunkOrbits(problem, chunks, group), steps, rounds)
                (symmetric,) = verdicts(small)
                if symmetric:
                    assert verdict(
                        BooleanSearch, Instance(ChunkOrbits.trivial(problem, chunks), steps, rounds)
                    )


KNOWN = [
    ("ring:4", "broadcast", (1, 2, 2), True),
    # Both neighbours get one chunk each way, pass it on, and get the other from the root meanwhile.
    ("ring:4", "broadcast", (2, 2, 2), True),
    # With a long first step the far rank hears two chunks in the second, with a short one two are sent on.
    ("ring:4", "broadcast", (3, 2, 3), False),
    ("ring:4", "broadcast", (3, 3, 3), True),
    # Three blocks of a star enter a rank over one link.
    ("star:4", "allgather", (1, 1, 2), False),
    ("star:4", "allgather", (1, 1, 3), True),
    ("full:4", "alltoall", (1, 1, 1), True),
    ("full:4", "alltoall", (2, 1, 1), False),
    # SCCL (PPoPP 2021) and the frontiers that were proved since.
    ("hypercube:3", "broadcast", (6, 4, 4), True),
    ("hypercube:3", "broadcast", (7, 4, 4), False),
    ("ring:8", "allgather", (2, 4, 7), True),
    ("ring:8", "allgather", (2, 4, 6), False),
    ("dgx1", "allgather", (2, 2, 3), True),
    ("dgx1", "allgather", (5, 2, 7), False),
    ("dgx1", "gather", (6, 2, 7), True),
    ("dgx1", "alltoall", (3, 2, 8), True),
]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("spec", "kind", "size", "expected"), KNOWN)
def test_known_values(
    encoding: Any, spec: str, kind: str, size: tuple[int, int, int], expected: bool
) -> None:
    assert verdict(encoding, instance_of(spec, kind, *size)) is expected


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_same_seed_gives_the_same_model_whatever_ran_before(encoding: Any) -> None:
    instance = instance_of("dgx1", "allgather", 2, 2, 3)
    first = encoding(instance, seed=3).run(None)
    encoding(instance_of("ring:6", "broadcast", 3, 5, 6), seed=1).run(None)
    assert encoding(instance, seed=3).run(None) == first


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_effort_grows_to_an_answer(encoding: Any) -> None:
    instance = instance_of("dgx1", "broadcast", 13, 4, 4)
    outcomes = []
    for _ in range(2):
        search = encoding(instance)
        efforts = 1
        while not isinstance(outcome := search.run(efforts), Feasible):
            efforts *= 4
        outcomes.append((efforts, outcome))
        replay(instance, outcome)
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("encoding", [SmtSearch, BooleanSearch])
@pytest.mark.parametrize("kind", COPIES)
def test_fewer_steps_than_the_latency_are_impossible(encoding: Any, kind: Kind) -> None:
    assert isinstance(encoding(instance_of("ring:6", kind, 1, 2, 9)).run(None), Infeasible)
    assert isinstance(encoding(instance_of("ring:6", kind, 1, 3, 9)).run(None), Feasible)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_rounds_that_nobody_needs_make_a_step_longer(encoding: Any) -> None:
    assert verdict(encoding, instance_of("ring:4", "allgather", 1, 2, 1000))

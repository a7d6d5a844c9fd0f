"""z3, HiGHS and CaDiCaL agree on a grid of small instances, and the verifier passes every model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast.synth import bounds
from arborcast.synth.chunks.encodings.ilp import IlpSearch
from arborcast.synth.chunks.encodings.sat import BooleanSearch
from arborcast.synth.chunks.encodings.smt import SmtSearch
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkOrbits
from arborcast.synth.chunks.problem.outcome import Feasible, Infeasible, Instance, Outcome, Search
from arborcast.synth.chunks.problem.prune import prune
from arborcast.synth.chunks.problem.symmetry import useful_groups
from arborcast.synth.chunks.problem.time_reversal import schedule_of
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.schedule import Method
from arborcast.synth.topology import Topology
from arborcast.topologies import load
from tests.support.strategies import custom_collectives, topologies

COPIES = [Kind.BROADCAST, Kind.ALLGATHER, Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL]


def searches(instance: Instance, seed: int) -> dict[str, Search]:
    return {
        "smt": SmtSearch(instance, seed=seed),
        "ilp": IlpSearch(instance, seed=seed),
        "sat": BooleanSearch(instance, seed=seed),
    }


def check(topology: Topology, collective: Collective, instance: Instance, outcome: Outcome) -> bool:
    """Whether there is a schedule; one that is found is correct and has the shape that was asked for."""
    if isinstance(outcome, Infeasible):
        return False
    assert isinstance(outcome, Feasible)
    problem, chunks = instance.orbits.problem, instance.orbits.chunks
    plan = prune(problem, chunks, outcome.rounds, instance.orbits.unfold(outcome.sends))
    assert (len(plan.rounds), sum(plan.rounds)) == (instance.steps, instance.rounds)
    limit = bounds.bound(topology, collective)
    schedule = schedule_of(topology, collective, problem, chunks, plan, method=Method("drawn"), bound=limit)
    verdict = synth.verify(schedule)
    assert verdict.correct, verdict.errors
    return True


@settings(max_examples=30)
@given(st.data())
def test_all_agree_on_random_fabrics(data: st.DataObject) -> None:
    topology = data.draw(topologies(max_ranks=4, switches=1, max_bandwidth=2, symmetric=False))
    if data.draw(st.integers(0, 3)) == 0:
        collective = data.draw(custom_collectives(topology))
    else:
        collective = Collective.on(topology, data.draw(st.sampled_from(COPIES)))
    problem = ChunkProblem.of(topology, collective)
    if problem.latency is None:
        return
    steps = problem.latency + data.draw(st.integers(0, 1))
    rounds = steps + data.draw(st.integers(0, 2))
    instance = Instance(ChunkOrbits.trivial(problem, data.draw(st.integers(1, 2))), steps, rounds)
    answers = {
        name: check(topology, collective, instance, search.run(None))
        for name, search in searches(instance, seed=1).items()
    }
    assert len(set(answers.values())) == 1, answers


@pytest.mark.parametrize(
    ("spec", "kind", "chunks", "steps", "rounds"),
    [
        ("ring:4", "allgather", 1, 2, 2),
        ("ring:6", "allgather", 2, 3, 5),
        ("hypercube:3", "allgather", 3, 3, 7),
        ("torus:3x3", "allgather", 1, 2, 2),
        ("dgx1", "allgather", 2, 2, 3),
        ("dgx1", "alltoall", 3, 2, 8),
        ("dgx-a100", "allgather", 1, 1, 7),
        ("hypercube:3", "broadcast", 6, 4, 4),
    ],
)
def test_all_agree_under_symmetries(spec: str, kind: str, chunks: int, steps: int, rounds: int) -> None:
    topology = load(spec)
    collective = Collective.on(topology, kind)
    problem = ChunkProblem.of(topology, collective)
    for group in useful_groups(problem, chunks)[:2]:
        instance = Instance(ChunkOrbits(problem, chunks, group), steps, rounds)
        answers = {
            name: check(topology, collective, instance, search.run(None))
            for name, search in searches(instance, seed=0).items()
        }
        assert len(set(answers.values())) == 1, (len(group), answers)


def test_effort_ends_a_search_and_more_of_it_goes_on() -> None:
    topology = load("hypercube:3")
    problem = ChunkProblem.of(topology, Collective.on(topology, "broadcast"))
    instance = Instance(ChunkOrbits.trivial(problem, 7), 4, 4)
    for name, search in searches(instance, seed=0).items():
        outcomes = [search.run(1)]
        while not isinstance(outcomes[-1], Infeasible):
            assert not isinstance(outcomes[-1], Feasible), name
            outcomes.append(search.run(4 ** len(outcomes)))
        assert isinstance(outcomes[-1], Infeasible), name

"""All encodings of an instance give the answer of a formula of our own; models are replayed and verified.

One suite for all of them: a further encoding is a line of `ENCODINGS`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast.synth import bounds
from arborcast.synth.chunks.encodings import ilp, smt
from arborcast.synth.chunks.encodings.ilp import IlpSearch
from arborcast.synth.chunks.encodings.sat import sat_search
from arborcast.synth.chunks.encodings.smt import SmtSearch
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkOrbits
from arborcast.synth.chunks.problem.outcome import Feasible, Infeasible, Instance, Unknown
from arborcast.synth.chunks.problem.prune import prune
from arborcast.synth.chunks.problem.symmetry import useful_groups
from arborcast.synth.chunks.problem.time_reversal import schedule_of
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.schedule import Method
from arborcast.synth.topology import Topology
from tests.support.chunk_problems import COPIES, exists
from tests.support.chunk_replay import instance_of, replay
from tests.support.strategies import collectives, custom_collectives, topologies

ENCODINGS: dict[str, Any] = {"smt": SmtSearch, "ilp": IlpSearch, "sat": sat_search}

each_encoding = pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS)


def verdict(encoding: Any, instance: Instance, seed: int = 0) -> bool:
    """Whether there is a schedule, which is replayed; what is made of it is verified, too."""
    outcome = encoding(instance, seed=seed).run(None)
    if isinstance(outcome, Feasible):
        replay(instance, outcome)
        verify_plan(instance, outcome)
        return True
    assert isinstance(outcome, Infeasible)
    return False


def verify_plan(instance: Instance, found: Feasible) -> None:
    """The pruned plan as a schedule of the custom collective that the problem is."""
    problem, chunks = instance.orbits.problem, instance.orbits.chunks
    plan = prune(problem, chunks, found.rounds, instance.orbits.unfold(found.sends))
    assert (len(plan.rounds), sum(plan.rounds)) == (instance.steps, instance.rounds)
    topology = problem.topology
    collective = Collective.custom(topology, problem.demands)
    limit = bounds.bound(topology, collective)
    schedule = schedule_of(topology, collective, problem, chunks, plan, method=Method("drawn"), bound=limit)
    verdict = synth.verify(schedule)
    assert verdict.correct, verdict.errors


def verdicts(instance: Instance) -> set[bool]:
    return {verdict(encoding, instance) for encoding in ENCODINGS.values()}


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
def test_all_encodings_agree_with_a_formula_of_another(instance: Instance) -> None:
    orbits = instance.orbits
    expected = exists(orbits.problem, orbits.chunks, instance.steps, instance.rounds)
    assert verdicts(instance) == {expected}


@settings(max_examples=60, deadline=None)
@given(instances(most_arrivals=40, max_ranks=5, chunks=4))
def test_every_chunk_comes_to_a_rank_at_most_once(instance: Instance) -> None:
    """Of models of Boolean logic, as they are: nothing else would see what is sent for nothing."""
    found = sat_search(instance).run(100)  # there may be none, of which a proof may take hours
    if isinstance(found, Feasible):
        problem = instance.orbits.problem
        arrivals = [
            (send.demand, send.chunk, problem.routes[send.route].dst)
            for send in instance.orbits.unfold(found.sends)
        ]
        assert len(set(arrivals)) == len(arrivals)
        assert all(rank not in problem.demands[demand].sources for demand, _, rank in arrivals)


@settings(max_examples=60, deadline=None)
@given(instances(most_arrivals=40, max_ranks=5, chunks=4))
def test_all_encodings_agree(instance: Instance) -> None:
    assert len(verdicts(instance)) == 1


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize(
    "spec", ["ring:4", "star:4", "fat-tree:2x2", pytest.param("torus:2x3", marks=pytest.mark.long)]
)
def test_all_encodings_agree_under_every_group(spec: str, kind: Kind) -> None:
    """They search the same schedules: those that the group maps to themselves."""
    problem = instance_of(spec, kind, 1, 1, 1).orbits.problem
    latency = problem.latency
    assert latency is not None
    for chunks in (1, 2):
        for steps, rounds in ((latency, latency), (latency + 1, latency + 2)):
            for small in under_groups(instance_of(spec, kind, chunks, steps, rounds)):
                (symmetric,) = verdicts(small)
                if symmetric:
                    assert verdict(sat_search, instance_of(spec, kind, chunks, steps, rounds))


def under_groups(whole: Instance, most: int = 2) -> list[Instance]:
    problem, chunks = whole.orbits.problem, whole.orbits.chunks
    return [
        replace(whole, orbits=ChunkOrbits(problem, chunks, group))
        for group in useful_groups(problem, chunks)[:most]
    ]


@pytest.mark.parametrize(
    ("spec", "kind", "size", "encodings"),
    [
        ("ring:6", "allgather", (2, 3, 5), "smt ilp sat"),
        ("hypercube:3", "allgather", (3, 3, 7), "smt ilp sat"),
        ("torus:3x3", "allgather", (1, 2, 2), "smt ilp sat"),
        ("dgx1", "allgather", (2, 2, 3), "smt ilp sat"),
        pytest.param("dgx1", "alltoall", (3, 2, 8), "smt ilp sat", marks=pytest.mark.long),
        ("dgx-a100", "allgather", (1, 1, 7), "smt ilp sat"),
        ("hypercube:3", "broadcast", (6, 4, 4), "smt ilp sat"),
        ("torus:4x4", "allgather", (4, 4, 15), "sat"),
        ("hypercube:4", "allgather", (4, 4, 15), "sat"),
        ("dgx1", "allgather", (6, 3, 7), "sat"),
    ],
)
def test_large_instances_under_a_group(
    spec: str, kind: str, size: tuple[int, int, int], encodings: str
) -> None:
    names = encodings.split()
    for small in under_groups(instance_of(spec, kind, *size), most=2 if len(names) == 3 else 1):
        assert len({verdict(ENCODINGS[name], small) for name in names}) == 1
        assert len(names) == 3 or verdict(ENCODINGS[names[0]], small)


KNOWN = [
    ("ring:4", "broadcast", (1, 2, 2), True, "smt ilp sat"),
    # Both neighbours get one chunk each way, pass it on, and get the other from the root meanwhile.
    ("ring:4", "broadcast", (2, 2, 2), True, "smt ilp sat"),
    # With a long first step the far rank hears two chunks in the second, with a short one two are sent on.
    ("ring:4", "broadcast", (3, 2, 3), False, "smt ilp sat"),
    ("ring:4", "broadcast", (3, 3, 3), True, "smt ilp sat"),
    # Rounds that nobody needs make a step longer.
    ("ring:4", "allgather", (1, 2, 1000), True, "smt ilp sat"),
    # Three blocks of a star enter a rank over one link.
    ("star:4", "allgather", (1, 1, 2), False, "smt ilp sat"),
    ("star:4", "allgather", (1, 1, 3), True, "smt ilp sat"),
    ("full:4", "alltoall", (1, 1, 1), True, "smt ilp sat"),
    ("full:4", "alltoall", (2, 1, 1), False, "smt ilp sat"),
    # SCCL (PPoPP 2021) and the frontiers that were proved since; by those who need no minutes.
    ("hypercube:3", "broadcast", (6, 4, 4), True, "smt ilp sat"),
    ("hypercube:3", "broadcast", (7, 4, 4), False, "smt ilp sat"),
    ("hypercube:3", "broadcast", (11, 4, 7), False, "sat"),
    ("ring:8", "allgather", (2, 4, 7), True, "ilp"),
    ("ring:8", "allgather", (2, 4, 6), False, "sat"),
    ("dgx1", "allgather", (2, 2, 3), True, "ilp sat"),
    ("dgx1", "allgather", (5, 2, 7), False, "sat"),
    ("dgx1", "allgather", (6, 3, 7), True, "ilp"),
    ("dgx1", "gather", (4, 2, 5), True, "ilp"),
    ("dgx1", "gather", (6, 2, 7), True, "ilp sat"),
    ("dgx1", "gather", (6, 3, 7), True, "ilp"),
    ("dgx1", "gather", (7, 2, 8), False, "ilp"),
    ("dgx1", "scatter", (6, 2, 7), True, "ilp"),
    ("dgx1", "alltoall", (3, 2, 8), True, "ilp sat"),
    ("dgx1", "broadcast", (8, 3, 3), False, "ilp sat"),
    ("dgx1", "broadcast", (13, 4, 4), True, "sat"),
    ("dgx1", "broadcast", (20, 5, 5), False, "sat"),
    ("dgx1", "broadcast", (22, 3, 9), True, "sat"),
    ("dgx1", "broadcast", (26, 6, 6), False, "sat"),
    ("dgx1", "broadcast", (37, 8, 8), True, "sat"),
]
LONG = [
    ("dgx1", "allgather", (6, 3, 7), True, "sat"),
    ("dgx1", "alltoall", (3, 2, 8), True, "smt"),
    ("dgx1", "broadcast", (13, 4, 4), True, "smt ilp"),
    ("dgx1", "broadcast", (19, 5, 5), True, "ilp"),
    ("dgx1", "broadcast", (22, 3, 9), True, "ilp"),
    ("dgx1", "broadcast", (25, 6, 6), True, "ilp"),
    ("dgx1", "broadcast", (31, 7, 7), True, "ilp"),
    ("torus:4x4", "allgather", (4, 4, 15), True, "ilp"),
    ("torus:4x8", "allgather", (4, 6, 31), True, "ilp"),
]


@pytest.mark.parametrize(
    ("spec", "kind", "size", "expected", "encoding"),
    [
        pytest.param(*case, name, marks=marks)
        for cases, marks in ((KNOWN, []), (LONG, [pytest.mark.long]))
        for *case, names in cases
        for name in names.split()
    ],
)
def test_known_values(
    spec: str, kind: str, size: tuple[int, int, int], expected: bool, encoding: str
) -> None:
    assert verdict(ENCODINGS[encoding], instance_of(spec, kind, *size)) is expected


@each_encoding
def test_the_same_seed_gives_the_same_model_whatever_ran_before(encoding: Any) -> None:
    instance = instance_of("ring:6", "allgather", 2, 3, 5)
    first = encoding(instance, seed=3).run(None)
    encoding(instance_of("ring:4", "broadcast", 3, 3, 3), seed=1).run(None)
    assert encoding(instance, seed=3).run(None) == first


@each_encoding
def test_effort_grows_to_an_answer(encoding: Any) -> None:
    for instance, answer in (
        (instance_of("hypercube:3", "broadcast", 6, 4, 4), Feasible),
        (instance_of("hypercube:3", "broadcast", 7, 4, 4), Infeasible),
    ):
        outcomes = []
        for _ in range(2):
            search = encoding(instance)
            efforts = 1
            while isinstance(outcome := search.run(efforts), Unknown):
                efforts *= 4
            assert isinstance(outcome, answer)
            outcomes.append((efforts, outcome))
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("encoding", "instance", "effort"),
    [
        (sat_search, instance_of("hypercube:3", "allgather", 3, 3, 6), 10),
        (SmtSearch, instance_of("hypercube:3", "broadcast", 7, 4, 4), 5),
    ],
)
def test_effort_adds_up(encoding: Any, instance: Instance, effort: int) -> None:
    """Small efforts would never prove what takes many of them if every one began anew; also in turns."""
    search = encoding(instance)
    runs = 1
    while isinstance(outcome := search.run(effort), Unknown):
        runs += 1
    assert isinstance(outcome, Infeasible)
    assert runs > 3
    two = [encoding(instance), encoding(instance)]
    for _ in range(runs - 1):
        assert all(isinstance(again.run(effort), Unknown) for again in two)
    assert all(isinstance(again.run(effort), Infeasible) for again in two)


def test_z3_giving_up_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smt, "_OUT_OF_CONFLICTS", "another reason")
    search = SmtSearch(instance_of("hypercube:3", "broadcast", 7, 4, 4))
    with pytest.raises(ArithmeticError, match=r"z3 gave up: sat\.max\.conflicts"):
        search.run(1)


@pytest.mark.parametrize(
    ("encoding", "kinds"),
    [(SmtSearch, COPIES), (sat_search, COPIES), (IlpSearch, COPIES)],
)
def test_fewer_steps_than_the_latency_are_impossible(encoding: Any, kinds: list[Kind]) -> None:
    for kind in kinds:
        assert isinstance(encoding(instance_of("ring:6", kind, 1, 2, 9)).run(None), Infeasible)
        assert isinstance(encoding(instance_of("ring:6", kind, 1, 3, 9)).run(None), Feasible)


@pytest.mark.parametrize("size", [(3, 3, 3), (6, 4, 4), (7, 4, 4)])
def test_an_order_of_chunks_excludes_nothing(
    size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of formulas for CaDiCaL `test_refutation` says so."""
    instance = instance_of("hypercube:3", "broadcast", *size)
    answers = set()
    for ordered in (False, True):
        monkeypatch.setattr(smt, "is_ordered", lambda orbits, ordered=ordered: ordered)
        answers.add(verdict(SmtSearch, instance))
    for most in (0, 1, 10):
        monkeypatch.setattr(ilp, "MOST_ORDERED", most)
        answers.add(verdict(IlpSearch, instance))
    assert len(answers) == 1

"""The encoding for z3: larger known values, effort that goes on, contexts that know nothing of each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from arborcast.synth.chunks.encodings import smt
from arborcast.synth.chunks.encodings.smt import SmtSearch
from arborcast.synth.chunks.problem.orbits import ChunkOrbits
from arborcast.synth.chunks.problem.outcome import Feasible, Infeasible, Instance, Unknown
from arborcast.synth.chunks.problem.symmetry import useful_groups
from tests.support.chunk_replay import instance_of, replay


def test_a_broadcast_that_is_known() -> None:
    instance = instance_of("dgx1", "broadcast", 13, 4, 4)
    outcome = SmtSearch(instance).run(None)
    assert isinstance(outcome, Feasible)
    replay(instance, outcome)
    assert outcome.rounds == (1, 1, 1, 1)


def test_a_broadcast_that_there_is_not() -> None:
    assert isinstance(SmtSearch(instance_of("dgx1", "broadcast", 8, 3, 3)).run(None), Infeasible)


def test_an_allgather_under_a_group() -> None:
    whole = instance_of("torus:4x4", "allgather", 4, 4, 15)
    group = useful_groups(whole.orbits.problem, 4)[0]
    instance = replace(whole, orbits=ChunkOrbits(whole.orbits.problem, 4, group))
    outcome = SmtSearch(instance).run(None)
    assert isinstance(outcome, Feasible)
    replay(instance, outcome)


def test_effort_adds_up() -> None:
    """Small efforts would never prove what takes many of them if every one began anew."""
    instance = instance_of("hypercube:3", "broadcast", 7, 4, 4)
    search = SmtSearch(instance)
    runs = 1
    while isinstance(outcome := search.run(5), Unknown):
        runs += 1
    assert isinstance(outcome, Infeasible)
    assert runs > 3


def test_searches_take_turns() -> None:
    """Two searches that go on in turns do what each would do alone."""
    instance = instance_of("dgx1", "broadcast", 13, 4, 4)

    def answers(searches: list[SmtSearch]) -> list[Feasible]:
        found: dict[int, Feasible] = {}
        while len(found) < len(searches):
            for number, search in enumerate(searches):
                if number not in found and isinstance(outcome := search.run(20), Feasible):
                    found[number] = outcome
        return [found[number] for number in range(len(searches))]

    (alone,) = answers([SmtSearch(instance, seed=1)])
    assert answers([SmtSearch(instance, seed=1), SmtSearch(instance, seed=1)]) == [alone, alone]


def test_giving_up_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smt, "_OUT_OF_CONFLICTS", "another reason")
    search = SmtSearch(instance_of("hypercube:3", "broadcast", 7, 4, 4))
    with pytest.raises(ArithmeticError, match=r"z3 gave up: sat\.max\.conflicts"):
        search.run(1)


@pytest.mark.parametrize(("chunks", "steps", "rounds"), [(3, 3, 3), (4, 3, 4), (6, 4, 4), (7, 4, 4)])
def test_an_order_of_chunks_excludes_nothing(
    chunks: int, steps: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance: Instance = instance_of("hypercube:3", "broadcast", chunks, steps, rounds)
    answers = []
    for ordered in (False, True):
        monkeypatch.setattr(smt, "is_ordered", lambda orbits, ordered=ordered: ordered)
        outcome = SmtSearch(instance).run(None)
        answers.append(type(outcome))
        if isinstance(outcome, Feasible):
            replay(instance, outcome)
    assert answers[0] is answers[1]

"""The Boolean encoding: larger known values, effort that goes on, the order of chunks that are alike."""

from __future__ import annotations

import pytest

from arborcast.synth.chunks.encodings import sat as boolean
from arborcast.synth.chunks.encodings.sat import BooleanSearch
from arborcast.synth.chunks.problem.orbits import ChunkOrbits
from arborcast.synth.chunks.problem.outcome import Feasible, Infeasible, Instance, Unknown
from arborcast.synth.chunks.problem.symmetry import useful_groups
from tests.support.chunk_replay import instance_of, replay


@pytest.mark.parametrize(
    ("spec", "kind", "size"),
    [
        ("dgx1", "allgather", (6, 3, 7)),
        ("dgx1", "broadcast", (22, 3, 9)),
        ("dgx1", "broadcast", (13, 4, 4)),
        ("dgx1", "broadcast", (37, 8, 8)),
    ],
)
def test_schedules_that_are_known(spec: str, kind: str, size: tuple[int, int, int]) -> None:
    instance = instance_of(spec, kind, *size)
    outcome = BooleanSearch(instance).run(None)
    assert isinstance(outcome, Feasible)
    replay(instance, outcome)


@pytest.mark.parametrize(
    ("spec", "size"), [("torus:4x4", (4, 4, 15)), ("dgx1", (6, 3, 7)), ("hypercube:4", (4, 4, 15))]
)
def test_allgathers_under_a_group(spec: str, size: tuple[int, int, int]) -> None:
    whole = instance_of(spec, "allgather", *size)
    group = useful_groups(whole.orbits.problem, size[0])[0]
    instance = Instance(ChunkOrbits(whole.orbits.problem, size[0], group), *size[1:])
    outcome = BooleanSearch(instance).run(None)
    assert isinstance(outcome, Feasible)
    replay(instance, outcome)


@pytest.mark.parametrize(
    ("spec", "size"),
    [("dgx1", (8, 3, 3)), ("dgx1", (20, 5, 5)), ("dgx1", (26, 6, 6)), ("hypercube:3", (11, 4, 7))],
)
def test_broadcasts_that_there_are_not(spec: str, size: tuple[int, int, int]) -> None:
    assert isinstance(BooleanSearch(instance_of(spec, "broadcast", *size)).run(None), Infeasible)


def test_effort_adds_up() -> None:
    """Small efforts would never prove what takes many of them if every one began anew."""
    instance = instance_of("hypercube:3", "allgather", 3, 3, 6)
    search = BooleanSearch(instance)
    runs = 1
    while isinstance(outcome := search.run(10), Unknown):
        runs += 1
    assert isinstance(outcome, Infeasible)
    assert runs > 3
    again = BooleanSearch(instance)
    assert all(isinstance(again.run(10), Unknown) for _ in range(runs - 1))
    assert isinstance(again.run(10), Infeasible)


@pytest.mark.parametrize(
    ("chunks", "steps", "rounds"), [(3, 3, 3), (4, 3, 4), (5, 4, 4), (6, 4, 4), (7, 4, 4)]
)
def test_an_order_of_chunks_excludes_nothing(
    chunks: int, steps: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = instance_of("hypercube:3", "broadcast", chunks, steps, rounds)
    answers = []
    for ordered in (False, True):
        monkeypatch.setattr(boolean, "is_ordered", lambda orbits, ordered=ordered: ordered)
        outcome = BooleanSearch(instance).run(None)
        answers.append(type(outcome))
        if isinstance(outcome, Feasible):
            replay(instance, outcome)
    assert answers[0] is answers[1]

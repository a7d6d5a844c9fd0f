"""The encoding for z3 beyond `test_encodings`: searches that know nothing of each other, and giving up."""

from __future__ import annotations

import pytest

from arborcast.synth.chunks.encodings import smt
from arborcast.synth.chunks.encodings.smt import SmtSearch
from arborcast.synth.chunks.problem.outcome import Feasible
from tests.support.chunk_replay import instance_of


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

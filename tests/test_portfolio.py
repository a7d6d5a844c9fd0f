"""Races of searches whose answers and times are scripted, in real processes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.chunks.orbits import Orbits, Send
from synth.chunks.outcome import Found, Impossible, Unfinished
from synth.chunks.portfolio import Entrant, NoneSymmetric, Verdict, effort_of, race
from synth.chunks.problem import Problem
from synth.chunks.workers import WorkerDiedError, Workers
from synth.collective import Collective
from synth.deadline import Deadline
from synth.errors import TimedOutError
from synth.progress import listening
from topologies import load

RING = load("ring:4")
PROBLEM = Problem.of(RING, Collective.on(RING, "allgather"))
IDENTITY, QUARTER, HALF = (0, 1, 2, 3), (1, 2, 3, 0), (2, 3, 0, 1)
WHOLE = Orbits.trivial(PROBLEM, 4)
ROTATED = Orbits(PROBLEM, 4, (IDENTITY, QUARTER, HALF, (3, 0, 1, 2)))
HALVED = Orbits(PROBLEM, 4, (IDENTITY, HALF))


@pytest.fixture(scope="module")
def pair() -> Iterator[Workers]:
    with Workers(2) as workers:
        yield workers


def run(
    workers: Workers,
    *scripts: tuple[str, Orbits],
    seed: int = 0,
    slices: int | None = None,
    seconds: float = 60,
) -> Verdict:
    entrants = [Entrant(f"{place}:{script}", orbits) for place, (script, orbits) in enumerate(scripts)]
    return race(
        entrants,
        steps=2,
        rounds=3,
        seed=seed,
        deadline=Deadline.after(seconds),
        workers=workers,
        slices=slices,
        encodings={f"{i}:{script}": f"fake_searches:{script}" for i, (script, _) in enumerate(scripts)},
    )


def found(slices: int, seed: int = 0) -> Found:
    """What a scripted search finds in its last slice."""
    return Found(tuple(map(effort_of, range(slices))), (Send(0, 0, 0, seed),))


def test_slices_grow_and_the_search_goes_on(pair: Workers) -> None:
    verdict = run(pair, ("found_3", WHOLE), seed=7)
    assert verdict == Verdict(found(4, seed=7), Entrant("0:found_3", WHOLE), 4)
    assert found(4).rounds == (250, 1000, 4000, 16000)


@pytest.mark.parametrize(
    "scripts, winner, slices",
    [
        # The first is slow and preferred: the second, who answers long before, has to wait.
        (["found_0_300", "found_0"], 0, 1),
        # The first does not answer in its first slice, which the second waits for and wins.
        (["found_1_200", "found_0"], 1, 1),
        # The first is through all its slices while the second is still in its first.
        (["found_1", "found_0_300"], 1, 1),
        # The third waits in the queue behind two slow ones that do not answer.
        (["found_1_100", "found_1_100", "found_0"], 2, 1),
        # Equal slices: preference decides, whoever is slow.
        (["found_2_0_0_200", "found_2", "found_2"], 0, 3),
    ],
)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_first_in_order_wins(scripts: Sequence[str], winner: int, slices: int, count: int) -> None:
    with Workers(count) as workers:
        verdict = run(workers, *((script, WHOLE) for script in scripts))
    assert verdict.entrant is not None
    assert (verdict.entrant.encoding, verdict.slices) == (f"{winner}:{scripts[winner]}", slices)
    assert verdict.outcome == found(slices)

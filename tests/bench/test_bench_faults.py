"""The bench of random faults: what it draws and counts, and two rounds on real ranks."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("torch")


from arborcast.bench import faults
from arborcast.bench.faults import Outcome, Round
from tests.support.ranks import run_ranks


def test_rounds_are_drawn_by_their_seed_and_every_fault_has_its_turn() -> None:
    drawn = list(faults.rounds(16, faults.FAULTS, 3.0, 7))
    assert drawn == list(faults.rounds(16, faults.FAULTS, 3.0, 7))
    assert drawn != list(faults.rounds(16, faults.FAULTS, 3.0, 8))
    assert [one.fault for one in drawn[:5]] == ["kill", "stop", "abort", "cut", "kill"]
    ways = {(one.fault, one.transport) for one in drawn}
    assert len(ways) == 7 and ("cut", "shared memory") not in ways
    assert all(0 <= one.victim < one.ranks for one in drawn)


def test_who_is_late_hangs_or_leaves_something_is_counted() -> None:
    def outcome(number: int, **found: object) -> Outcome:
        return Outcome(Round(number, "stop", "sockets", 3, 0, 0.1, 3.0), **found)  # type: ignore[arg-type]

    outcomes = [
        outcome(0, seconds=[3.1, 3.2, 0.5]),
        outcome(1, seconds=[5.1, 3.0], hangs=1, wrong=2, left=["file a", "socket b"]),
    ]
    (row,) = faults.rows_of(outcomes)
    assert row == {
        "fault": "stop",
        "transport": "sockets",
        "rounds": 2,
        "left_ranks": 6,
        "raised_in_time": 4,
        "hangs": 1,
        "wrong": 2,
        "left_over": 2,
        "timeout_s": 3.0,
        "median_s": 3.1,
        "slowest_s": 5.1,
    }
    assert "5.10" in faults.format_table([row])


def _trains(rank: int, size: int, falsifies: bool) -> list[bool]:
    if falsifies and rank == 1:
        batch = faults._batch
        faults._batch = lambda rank, step: batch(rank, step) + (step == 2)
    return list(itertools.islice(faults.training(rank, size, 5), 4))


RANKS_IMPORT = ("torch._dynamo",)


@pytest.mark.parametrize("falsifies", [False, True])
def test_a_wrong_gradient_is_noticed(falsifies: bool) -> None:
    found = run_ranks(2, _trains, falsifies)
    right = [True, True, not falsifies, True]
    assert found == [right, right]  # on both: each has the sum of both


@pytest.mark.long
def test_two_rounds() -> None:
    for fault in ("kill", "abort"):
        outcome = faults.run(Round(0, fault, "sockets", 3, 1, 0.1, 30.0))
        assert (outcome.hangs, outcome.wrong, outcome.left) == (0, 0, [])
        assert len(outcome.seconds) == (2 if fault == "kill" else 3)
        assert all("rank 1" in said for said in outcome.said)

"""`bench/scale.py`: what counts as kept, exponents, faults by seed."""

from __future__ import annotations

from typing import Any

import pytest

from arborcast import topologies
from arborcast.bench import scale
from arborcast.bench.scaling import cases, children
from arborcast.bench.scaling.cases import Case

ASKED = Case("4x4 torus", "torus:4x4", "allgather", every_translate=True, target_s=2, target_MB=500)
GOOD = {"optimal": True, "correct": True, "timed_out": False}


@pytest.mark.parametrize(
    ("seconds", "megabytes", "answer", "kept"),
    [
        (2.0, 500.0, GOOD, True),
        (2.1, 500.0, GOOD, False),
        (2.0, 501.0, GOOD, False),
        (1.0, 100.0, {**GOOD, "optimal": False}, False),
        (1.0, 100.0, {**GOOD, "correct": False}, False),
        (1.0, 100.0, {"timed_out": True}, False),
    ],
)
def test_a_promise_is_kept_in_time_in_memory_optimal_and_correct(
    seconds: float, megabytes: float, answer: dict[str, Any], kept: bool
) -> None:
    assert scale.within(ASKED, seconds, megabytes, answer) is kept
    assert scale.within(Case("t", "torus:4x4", "allgather"), seconds, megabytes, answer) is None


def test_exponents_are_slopes_from_64_ranks_on() -> None:
    rows = [
        {
            "family": "square",
            "ranks": ranks,
            "seconds": ranks**2 / 1e6,
            "peak_MB": 3.0 * ranks,
            "timed_out": False,
        }
        for ranks in (64, 256, 1024)
    ]
    # What a small fabric takes is the start of a process, and a time limit is no time.
    rows.append({"family": "square", "ranks": 4, "seconds": 1.0, "peak_MB": 100.0, "timed_out": False})
    late = scale._row(
        Case("t", "torus:64x64", "allgather", family="square"),
        [
            {"seconds": 3.0, "peak_MB": 1.0, "ranks": 4096},
            {"timed_out": True, "seconds": 900.0, "peak_MB": 1.0},
        ],
    )
    assert late["timed_out"]
    rows.append(late)
    rows.append({"family": "alone", "ranks": 128, "seconds": 1.0, "peak_MB": 1.0, "timed_out": False})
    found = scale.exponents(rows)
    assert list(found) == ["square"]
    assert found["square"] == {"seconds": pytest.approx(2), "peak_MB": pytest.approx(1)}


def test_faults_are_drawn_by_their_seed() -> None:
    healthy = topologies.load("dgx-a100:boxes=4")
    first, again, other = (children.faulty(healthy, f"both:5:3:{seed}") for seed in (1, 1, 2))
    assert first.kept == again.kept != other.kept
    assert first.topology == again.topology
    assert first.topology.ranks == 32 - 5
    left = children.faulty(healthy, "ranks:5:1").topology
    assert len(left.links) - len(first.topology.links) == 2 * 3  # three cables, both ways
    assert len(children.faulty(healthy, "link:0-fabric0").topology.links) == len(healthy.links) - 2


@pytest.mark.parametrize(
    "method", [cases.SYMMETRIC, cases.WRITTEN_OUT, cases.REPAIR, cases.PARTLY, cases.SEARCHED]
)
def test_a_child_answers_every_method(method: str) -> None:
    faults = "link:0-1" if method in {cases.REPAIR, cases.PARTLY} else ""
    answer = children._answer(Case("torus 4x4", "torus:4x4", "allgather", method, faults))
    assert (answer["ranks"], answer["correct"], answer["optimal"]) == (16, True, True)
    if not faults:  # 4 links in, 15 blocks to get
        assert answer["rate"] == "64/15"
    assert answer["seconds"] == pytest.approx(
        sum(value for name, value in answer.items() if name.endswith("_seconds"))
    )


def test_a_child_shares_a_fabric_among_groups() -> None:
    case = Case("torus 4x4", "torus:4x4", "allreduce", cases.GROUPS, mesh="4x4:0")
    answer = children._shared(case)
    assert (answer["groups"], answer["written"], answer["correct"], answer["optimal"]) == (4, 1, True, True)
    assert answer["rate"] == answer["bound"]

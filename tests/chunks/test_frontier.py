"""The frontier: the promised values, no point better than it, and every way it may end."""

from __future__ import annotations

import json
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast.synth.chunks.bounds.step_certificate import StaticLimit
from arborcast.synth.chunks.bounds.step_check import certified_ratio, static_ratio
from arborcast.synth.chunks.encodings.sat import sat_search
from arborcast.synth.chunks.frontier import Frontier, latency_of, pareto
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkOrbits
from arborcast.synth.chunks.problem.outcome import Feasible, Instance
from arborcast.synth.chunks.problem.time_reversal import mirrored
from arborcast.synth.cli.frontier_folder import write_frontier
from arborcast.synth.collective import Collective, Demand, Kind
from arborcast.synth.errors import InfeasibleError, InputError
from arborcast.synth.topology import Link, Topology
from arborcast.topologies import load
from tests.support.chunk_replay import no_time_from
from tests.support.strategies import topologies


@cache
def frontier(spec: str, kind: str, **knobs: Any) -> Frontier:
    fabric = load(spec)
    return pareto(fabric, Collective.on(fabric, kind), cache=False, **knobs)


def triples(found: Frontier) -> list[tuple[int, int, int]]:
    return [(point.chunks, point.steps, point.rounds) for point in found.points]


def check(found: Frontier) -> None:
    """Every schedule verifies and has the shape that its point says; every limit holds."""
    for point in found.points:
        verdict = synth.verify(point.schedule)
        assert verdict.correct, verdict.errors
        assert point.schedule.rounds is not None
        assert (len(point.schedule.rounds), sum(point.schedule.rounds)) == (point.steps, point.rounds)
        assert point.least <= point.ratio
        assert (point.least == point.ratio) or not point.is_proved
        for limit in point.bounds:
            if isinstance(limit.certificate, StaticLimit):
                proved = static_ratio(found.topology, found.collective, limit.certificate.bound)
            else:
                problem = ChunkProblem.of(*mirrored(found.topology, found.collective))
                proved = certified_ratio(problem, limit.steps, limit.certificate)
            assert proved == point.least == limit.ratio


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("allgather", [(2, 2, 3), (6, 3, 7)]),
        ("reduce-scatter", [(2, 2, 3), (6, 3, 7)]),
        ("gather", [(6, 2, 7)]),
        ("scatter", [(6, 2, 7)]),
        ("alltoall", [(3, 2, 8)]),
    ],
)
def test_the_complete_frontiers_of_dgx1(kind: str, expected: list[tuple[int, int, int]]) -> None:
    found = frontier("dgx1", kind)
    assert triples(found) == expected
    assert found.complete and found.why_stopped == "the limit of any number of steps is attained"
    assert all(point.is_proved for point in found.points)
    check(found)


BROADCAST = [(2, 2, 2), (22, 3, 9), (13, 4, 4), (19, 5, 5), (25, 6, 6), (31, 7, 7), (37, 8, 8)]


@pytest.mark.parametrize("kind", ["broadcast", "reduce"])
def test_the_first_points_of_the_endless_frontier_of_a_dgx1_broadcast(kind: str) -> None:
    found = frontier("dgx1", kind, max_steps=4)
    assert triples(found) == BROADCAST[:3]
    assert not found.complete and not found.open_steps
    assert found.why_stopped == "no more than 4 steps were looked at"
    check(found)


@pytest.mark.long
def test_a_dgx1_broadcast_to_eight_steps() -> None:
    found = frontier("dgx1", "broadcast", max_steps=8)
    assert triples(found) == BROADCAST
    assert not found.open_steps
    # From 4 steps on R/C is S / (6 S - 11), towards the static limit of 1/6.
    assert [point.ratio for point in found.points[2:]] == [Fraction(s, 6 * s - 11) for s in range(4, 9)]
    check(found)


def test_a_tolerance_ends_it_earlier() -> None:
    found = frontier("dgx1", "broadcast", tolerance=Fraction(9, 10))
    assert triples(found) == BROADCAST[:3]  # 4/13 is within 9/10 of 1/6, and 9/22 is not
    assert found.why_stopped == "within 9/10 of the limit of any number of steps"


def test_blocks_that_are_alike_on_a_symmetric_fabric() -> None:
    fabric = load("ring:4")
    twice = Demand(frozenset({0}), frozenset({1, 2, 3}))
    found = pareto(fabric, Collective.custom(fabric, [twice, twice]), max_steps=4, cache=False)
    assert triples(found) == [(1, 2, 2), (2, 3, 3), (3, 4, 4)]
    assert all(point.is_proved for point in found.points)
    check(found)


def test_the_tree_limit_decides_where_flows_are_loose() -> None:
    # 3-cube broadcast in 3 steps: flows allow R/C = 5/6, trees need 1 (ALGORITHMS: the truth).
    found = frontier("hypercube:3", "broadcast", max_steps=4)
    assert [(point.steps, point.ratio) for point in found.points] == [
        (3, Fraction(1)),
        (4, Fraction(2, 3)),
    ]
    assert all(point.is_proved for point in found.points)
    check(found)


@settings(max_examples=12)
@given(st.data())
def test_no_small_instance_beats_a_proved_point(data: st.DataObject) -> None:
    topology = data.draw(topologies(max_ranks=4, switches=1, max_bandwidth=2, min_ranks=3))
    kind = data.draw(st.sampled_from([Kind.BROADCAST, Kind.ALLGATHER, Kind.GATHER, Kind.ALLTOALL]))
    collective = Collective.on(topology, kind)
    found = pareto(topology, collective, max_steps=latency_of(topology, collective) + 1, cache=False)
    check(found)
    problem = ChunkProblem.of(topology, collective)
    for point in found.points:
        for chunks in range(1, 4):
            for rounds in range(point.steps, 8):
                if Fraction(rounds, chunks) >= point.least:
                    break
                instance = Instance(ChunkOrbits.trivial(problem, chunks), point.steps, rounds)
                assert not isinstance(sat_search(instance).run(200), Feasible), (point, chunks, rounds)


@pytest.mark.parametrize("jobs", [2, pytest.param(3, marks=pytest.mark.long)])
def test_any_number_of_jobs_gives_the_same_frontier(jobs: int) -> None:
    alone = frontier("ring:6", "broadcast", max_steps=5)
    together = frontier("ring:6", "broadcast", max_steps=5, jobs=jobs)
    assert triples(together) == triples(alone)
    assert [p.schedule for p in together.points] == [p.schedule for p in alone.points]


@pytest.mark.long
def test_a_dask_cluster_takes_the_jobs() -> None:
    distributed = pytest.importorskip("distributed", reason="an optional extra: arborcast[dask]")
    from arborcast.synth.chunks.solvers.jobs import running_on

    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None, processes=True
    ) as cluster:
        with running_on(cluster.scheduler_address):
            found = frontier.__wrapped__("ring:6", "broadcast", max_steps=5, jobs=2)  # not another test's
        with distributed.Client(cluster) as client:
            ran = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.transition_counter)
        assert ran > 0  # the scheduler had tasks: they did not run here
    assert triples(found) == triples(frontier("ring:6", "broadcast", max_steps=5))


def test_what_was_found_by_the_deadline_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    no_time_from(monkeypatch, 4)
    found = frontier("dgx1", "broadcast", max_steps=30, deadline_s=1000.0)
    assert found.timed_out and not found.complete
    assert found.why_stopped == "the deadline of 1000 s passed at 4 steps"
    assert {point.steps for point in found.points} == {2, 3}
    check(found)


def test_the_cache_gives_the_same_answer_and_forgets_no_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARBORCAST_CACHE", str(tmp_path))
    fabric = load("dgx1")
    collective = Collective.on(fabric, "allgather")
    cold, warm = (pareto(fabric, collective) for _ in range(2))
    assert list(tmp_path.rglob("*.json"))
    assert [p.schedule for p in warm.points] == [p.schedule for p in cold.points]
    assert [(p.proof, p.bounds) for p in warm.points] == [(p.proof, p.bounds) for p in cold.points]
    for file in tmp_path.rglob("*.json"):
        file.write_text(file.read_text()[: len(file.read_text()) // 2])
    assert [p.schedule for p in pareto(fabric, collective).points] == [p.schedule for p in cold.points]


def test_a_folder_holds_points_certificates_schedules_and_a_picture(tmp_path: Path) -> None:
    found = frontier("dgx1", "reduce-scatter")
    document = write_frontier(found, tmp_path / "out")
    assert [entry["ratio"] for entry in document["frontier"]] == ["3/2", "7/6"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "c2-s2-r3.json",
        "c2-s2-r3.svg",
        "c6-s3-r7.json",
        "c6-s3-r7.svg",
        "frontier.json",
        "frontier.svg",
    ]
    full = json.loads((tmp_path / "out" / "frontier.json").read_text())
    assert full["format"] == "arborcast.frontier/1"
    assert [len(entry["certificates"]) for entry in full["frontier"]] == [1, 1]
    for point, entry in zip(found.points, full["frontier"], strict=True):
        assert synth.read_schedule(tmp_path / "out" / entry["file"]) == point.schedule


def test_a_rank_cut_off_is_an_answer_with_its_proof() -> None:
    one_way = Topology.build("half", 3, [Link(0, 1, Fraction(1)), Link(1, 0, Fraction(1))])
    with pytest.raises(InfeasibleError, match="rank 2") as raised:
        pareto(one_way, Collective.on(one_way, "broadcast"))
    assert raised.value.proof is not None and raised.value.proof.rate == 0  # type: ignore[union-attr]


def test_knobs_out_of_range_are_refused() -> None:
    fabric = load("ring:4")
    collective = Collective.on(fabric, "broadcast")
    for knobs, message in (
        ({"max_steps": 0}, "max-steps: must be at least 1, got 0"),
        ({"jobs": 0}, "jobs must be a number of processes, or -1 for all cores, got 0"),
        ({"tolerance": Fraction(-1)}, "tolerance must not be negative, got -1"),
        ({"deadline_s": 0.0}, "deadline must be positive, got 0.0 s"),
    ):
        with pytest.raises(InputError, match=message):
            pareto(fabric, collective, **knobs)  # type: ignore[arg-type]
    with pytest.raises(InfeasibleError, match="broadcast: needs at least 2 steps, got a maximum of 1"):
        pareto(fabric, collective, max_steps=1)

"""Allreduces searched as they are: drawn ones, brute force, and every limit recomputed."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast import synth
from arborcast.backends import lower
from arborcast.backends.measure import launch
from arborcast.backends.measure.job import Reduction, Sweep, count_for
from arborcast.synth import bounds
from arborcast.synth.chunks.allreduce.allreduce_solver import THOROUGH, sum_optimum
from arborcast.synth.chunks.allreduce.meeting_on_links import met_on_links
from arborcast.synth.chunks.allreduce.partial_sums import SumOrbits, pruned, sum_problem
from arborcast.synth.chunks.allreduce.points import EVERY_SCHEDULE, MEETINGS_ON_LINKS
from arborcast.synth.chunks.allreduce.searcher import SumSearcher
from arborcast.synth.chunks.allreduce.sum_formulas import (
    fewest_search,
    fewest_sum_search,
    spread_search,
    sum_search,
)
from arborcast.synth.chunks.bounds.flow_bound import flow_bound
from arborcast.synth.chunks.bounds.step_certificate import PairDual, StaticLimit
from arborcast.synth.chunks.bounds.step_check import certified_ratio
from arborcast.synth.chunks.curve import FrontierOptions
from arborcast.synth.chunks.frontier import Frontier, pareto
from arborcast.synth.chunks.limit_documents import limit_to_document
from arborcast.synth.chunks.problem.outcome import Feasible, Infeasible, Instance, Unknown
from arborcast.synth.chunks.problem.symmetry import subgroups
from arborcast.synth.chunks.solvers.solver_child import SolverProcess
from arborcast.synth.cli.frontier_folder import write_frontier
from arborcast.synth.collective import Collective
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import InfeasibleError
from arborcast.synth.schedule import Chunk, Method, Schedule, Transfer
from arborcast.synth.symmetry.permutations import identity
from arborcast.synth.topology import Topology
from arborcast.topologies import load
from tests.fuzzing.chunk_search import exists
from tests.support.allreduce_search import can_spread
from tests.support.chunk_problems import sums_on
from tests.support.deadlock import check_deadlock
from tests.support.interpreter import Freedom, interpret
from tests.support.refusals import refuses
from tests.support.strategies import topologies

Triples = list[tuple[int, int, int]]


def frontier(spec: str, **knobs: Any) -> Frontier:
    fabric = load(spec)
    return pareto(fabric, Collective.on(fabric, "allreduce"), cache=False, **knobs)


def triples(found: Frontier) -> Triples:
    return [(point.chunks, point.steps, point.rounds) for point in found.points]


def exchange_in_quads() -> Schedule:
    """(1, 2, 2) on DGX-1: everybody with everybody in each quad, then 0-4, 1-5, 2-6, 3-7."""
    fabric = load("dgx1")
    quads = [
        (src + quad, dst + quad, 0) for quad in (0, 4) for src in range(4) for dst in range(4) if src != dst
    ]
    across = [(rank, (rank + 4) % 8, 1) for rank in range(8)]
    collective = Collective.on(fabric, "allreduce")
    return Schedule.build(
        fabric,
        collective,
        Method("drawn"),
        bounds.bound(fabric, collective),
        [Chunk(Fraction(1), 0)],
        [Transfer(0, src, dst, step, reduce=True) for src, dst, step in (*quads, *across)],
        (1, 1),
    )


def test_the_drawn_exchange_is_an_allreduce_of_two_steps() -> None:
    assert synth.verify(exchange_in_quads()).correct


# full:2, full:4: everybody sends to everybody. ring:4 in 2 steps: exchanges 0-1, 2-3 and then 0-3, 1-2, and
# the other way round for the other chunk; in 3: to the middle of a path, exchange there, and back, for each
# of 4 paths. star:4: each port takes in 3 chunks of 1, or of 1/4 twice. hypercube:3: the three dimensions in
# each order; in 4 steps 16 of 24 links a chunk, in 5 the 14 that any allreduce of 8 ranks needs.
WHOLE: dict[str, Triples] = {
    "full:2": [(1, 1, 1)],
    "full:4": [(1, 1, 1), (4, 2, 2)],
    "ring:4": [(2, 2, 2), (4, 3, 3)],
    "star:4": [(1, 1, 3), (4, 2, 6)],
    "hypercube:3": [(3, 3, 3), (6, 4, 4), (12, 5, 7)],
}


@pytest.mark.parametrize(
    "spec", [pytest.param(it, marks=[pytest.mark.long] if it == "hypercube:3" else []) for it in WHOLE]
)
def test_whole_frontiers_proved_over_every_schedule(spec: str) -> None:
    found = frontier(spec)
    assert triples(found) == WHOLE[spec]
    assert found.complete and found.open_steps == ()
    problem = sum_problem(found.topology, found.collective)
    for point in found.points:
        assert point.is_proved and point.scope == EVERY_SCHEDULE and point.least == point.ratio
        verdict = synth.verify(point.schedule)
        assert verdict.correct, verdict.errors
        runs_everywhere(point.schedule)
        (limit,) = point.bounds
        if not isinstance(limit.certificate, StaticLimit):
            assert certified_ratio(problem, point.steps, limit.certificate) == point.least


@pytest.mark.long
def test_the_frontier_of_dgx1_begins_in_two_steps() -> None:
    found = frontier("dgx1", max_steps=4)
    assert triples(found) == [(2, 2, 2), (6, 3, 3), (12, 4, 4)]
    assert all(point.is_proved and point.scope == EVERY_SCHEDULE for point in found.points)
    for point in found.points:
        assert synth.verify(point.schedule).correct
        runs_everywhere(point.schedule, seeds=1)


def test_what_one_partial_sum_cannot_do_stays_open_with_its_limit() -> None:
    # In 2 steps every rank of a ring of 5 must pass on what came from either side, but not their sum.
    found = frontier("ring:5", max_steps=4)
    assert triples(found)[-1] == (5, 4, 4) and found.points[-1].is_proved
    assert found.open_steps == (2, 3) and not found.complete
    assert found.limits[2].ratio > 0 and found.limits[3].ratio == Fraction(11, 10)
    (open_point,) = found.points[:-1]
    assert open_point.steps == 3 and not open_point.is_proved
    # 11 messages of a chunk over 10 links are the fewest of any schedule, 12 those of one partial sum.
    assert open_point.least == Fraction(11, 10) and open_point.ratio >= Fraction(12, 10)
    assert "not proved: at least 11/10" in open_point.proof


def runs_everywhere(schedule: Schedule, seeds: int = 3) -> None:
    """Lowered in pieces or not, it cannot deadlock, and whatever a transport may do, the sums are right."""
    ranks = schedule.topology.ranks
    count = 3 * len(schedule.chunks) + 1
    inputs = [np.arange(count, dtype=np.int64) * (rank + 1) + 7**rank for rank in range(ranks)]
    total = np.sum(inputs, axis=0)
    for pieces, window in ((1, 8), (2, 1)):
        programs = lower(schedule, count, pieces=pieces, window=window)
        check_deadlock(programs)
        for freedom in Freedom:
            for seed in range(seeds):
                for output in interpret(programs, inputs, freedom=freedom, seed=seed):
                    assert (output == total).all()


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("spec", ["star:4", pytest.param("dgx1", marks=pytest.mark.long)])
def test_they_run_on_real_processes(spec: str, tmp_path: Any) -> None:
    found = frontier(spec, max_steps=2)
    write_frontier(found, tmp_path / "out")
    full = json.loads((tmp_path / "out" / "frontier.json").read_text())
    sweeps = []
    for point, entry in zip(found.points, full["frontier"], strict=True):
        read = synth.read_schedule(tmp_path / "out" / entry["file"])
        assert isinstance(read, Schedule) and read == point.schedule
        assert entry["scope"] == EVERY_SCHEDULE and entry["limit"] is None and entry["proved"]
        size = count_for(read, 10_007, "float32")
        sweeps.append(Sweep(read, (10_007,), (size,), "float32", Reduction.SUM, iterations=1, warmup=0))
    assert [row.wrong for (row,) in launch.run_sweeps(sweeps, timeout_s=200)] == [0] * len(found.points)


INSTANCES = st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(0, 2))
"""C, S and the rounds beyond S."""


def searched(fabric: Topology, chunks: int, steps: int, rounds: int) -> tuple[bool, bool]:
    """Whether one partial sum per rank and chunk finds one, and whether that there is none is proved."""
    problem = sums_on(fabric)
    instance = Instance(SumOrbits.trivial(problem, chunks), steps, rounds)
    found = sum_search(instance).run(None)
    if isinstance(found, Feasible):
        plan = pruned(problem, chunks, found.rounds, instance.orbits.unfold(found.sends))
        assert sum(plan.rounds) == rounds and len(plan.rounds) == steps
    return isinstance(found, Feasible), isinstance(spread_search(instance).run(None), Infeasible)


def agrees(fabric: Topology, size: tuple[int, int, int]) -> None:
    chunks, steps, spare = size
    problem = sums_on(fabric)
    found, excluded = searched(fabric, chunks, steps, steps + spare)
    assert found == exists(fabric, Collective.on(fabric, "allreduce"), chunks, steps, steps + spare)
    assert excluded != can_spread(problem, chunks, steps, steps + spare)


@settings(max_examples=10)
@given(topologies(max_ranks=3, switches=0, max_bandwidth=2), INSTANCES)
def test_searches_agree_with_references(fabric: Topology, size: tuple[int, int, int]) -> None:
    agrees(fabric, size)


@pytest.mark.long
@settings(max_examples=60)
@given(topologies(max_ranks=3, switches=1, symmetric=False, max_bandwidth=2), INSTANCES)
def test_searches_agree_with_references_where_links_differ(
    fabric: Topology, size: tuple[int, int, int]
) -> None:
    agrees(fabric, size)


@settings(max_examples=25)
@given(topologies(max_ranks=3, switches=0, symmetric=False, max_bandwidth=1), INSTANCES)
def test_what_is_proved_holds_for_several_partial_sums(fabric: Topology, size: tuple[int, int, int]) -> None:
    _, steps, spare = size
    problem = sums_on(fabric)
    rounds = steps + min(spare, 1)
    found, excluded = searched(fabric, 1, steps, rounds)
    several = exists(fabric, Collective.on(fabric, "allreduce"), 1, steps, rounds, several=True)
    assert several or not found
    assert not (several and excluded)
    if problem.latency is not None and problem.latency <= steps:
        limit = flow_bound(problem, steps, deadline=Deadline(), sums=True)
        assert limit is not None and (not several or limit.ratio <= rounds)


@pytest.mark.long
@settings(max_examples=60)
@given(
    topologies(max_ranks=4, switches=0, max_bandwidth=1, min_ranks=4), st.integers(1, 3), st.integers(0, 1)
)
def test_searches_agree_with_references_on_four_ranks(fabric: Topology, steps: int, spare: int) -> None:
    agrees(fabric, (1, steps, spare))


@settings(max_examples=20)
@given(topologies(max_ranks=4, switches=1, max_bandwidth=2, min_ranks=3), st.integers(0, 1))
def test_limits_hold_for_what_brute_force_and_searches_find(fabric: Topology, more: int) -> None:
    problem = sums_on(fabric)
    assert problem.latency is not None
    steps = problem.latency + more
    limit = flow_bound(problem, steps, deadline=Deadline(), sums=True)
    assert limit is not None and certified_ratio(problem, steps, limit.certificate) == limit.ratio > 0
    alone = flow_bound(problem, steps, symmetries=(), deadline=Deadline(), sums=True)
    assert alone is not None and abs(alone.ratio - limit.ratio) < Fraction(1, 10**6)
    for chunks in (1, 2, 3):
        rounds = -(-limit.ratio * chunks // 1) - 1
        if rounds >= steps:
            instance = Instance(SumOrbits.trivial(problem, chunks), steps, int(rounds))
            assert not isinstance(sum_search(instance).run(300), Feasible)


@pytest.mark.long
def test_few_chunks_are_looked_for_where_what_is_known_attains_the_limit() -> None:
    """Six GPUs of a DGX-1: allreduces that meet in cores reach R/C 1/2 in five steps with 60 chunks."""
    problem = sums_on(load("dgx1").subset(range(6)))
    with SolverProcess() as child:
        child.start()
        searcher = SumSearcher(problem, 0, Deadline(), child, None)
        found = sum_optimum(searcher, 5, None, Fraction(5, 9), lambda: Fraction(1, 2), THOROUGH)
    assert (found.chunks, found.ratio, found.least) == (10, Fraction(1, 2), Fraction(1, 2))


@pytest.mark.parametrize(("spec", "steps", "any_kind", "sums"), [("ring:4", 2, 8, 8), ("ring:5", 3, 11, 12)])
def test_the_fewest_messages(spec: str, steps: int, any_kind: int, sums: int) -> None:
    orbits = SumOrbits.trivial(sums_on(spec), 1)
    for search, fewest in ((fewest_search, any_kind), (fewest_sum_search, sums)):
        assert isinstance(search(Instance(orbits, steps, fewest - 1)).run(None), Infeasible)
        assert not isinstance(search(Instance(orbits, steps, fewest)).run(None), Infeasible)


def test_schedules_of_a_group_are_those_of_all_chunks() -> None:
    problem = sums_on("hypercube:3")
    alone = (identity(8),)
    found = 0
    for group in [group for group in subgroups(problem) if len(group) in (3, 6, 24)]:
        for kept in (alone, *subgroups(problem, 2)[:2]):
            if set(kept) <= set(group) and 12 % (len(group) // len(kept)) == 0:
                orbits = SumOrbits(problem, 12, group, kept)
                model = sum_search(Instance(orbits, 5, 7)).run(200)
                if isinstance(model, Feasible):
                    found += 1
                    loads = np.zeros((5, 24), dtype=int)
                    sends = list(orbits.unfold(model.sends))
                    for send in sends:
                        for link in problem.routes[send.route].links:
                            loads[send.step, link] += 1
                    assert (loads.max(axis=1) <= model.rounds).all()
                    pruned(problem, 12, model.rounds, sends)  # which checks every chunk
    assert found >= 2
    with pytest.raises(ValueError, match="5 chunks: must be a multiple of"):
        SumOrbits(problem, 5, max(subgroups(problem), key=len), alone)


def test_a_limit_is_written_with_all_that_proves_it() -> None:
    fabric = load("ring:4")
    problem = sums_on(fabric)
    limit = flow_bound(problem, 3, deadline=Deadline(), sums=True)
    assert limit is not None and isinstance(limit.certificate, PairDual)
    document = json.loads(json.dumps(limit_to_document(limit, fabric)))
    assert (document["steps"], Fraction(document["ratio"])) == (3, limit.ratio)
    written = document["certificate"]
    index = {(route.src, *route.via, route.dst): number for number, route in enumerate(problem.routes)}
    hops = [(link.src, link.dst) for link in fabric.links]
    rows = [{(src, dst): Fraction(length) for src, dst, length in row} for row in written["links"]]
    flows = (
        (
            tuple(map(tuple, flow["pairs"])),
            tuple((step, index[tuple(way)], Fraction(length)) for step, way, length in flow["lengths"]),
        )
        for flow in written["flows"]
    )
    links = tuple(tuple(row.get(hop, Fraction(0)) for hop in hops) for row in rows)
    read = PairDual(links, tuple(flows), tuple(map(tuple, written["symmetries"])))
    assert read == limit.certificate
    assert certified_ratio(problem, 3, replace(read, symmetries=())) < limit.ratio  # of fewer pairs


def solve(spec: str, size: tuple[int, int, int], method: str = "sat") -> Schedule:
    chunks, steps, rounds = size
    return synth.solve(
        load(spec), "allreduce", method=method, chunks=chunks, steps=steps, rounds=rounds, cache=False
    )


@pytest.mark.parametrize(
    ("spec", "size"),
    [("full:2", (1, 1, 1)), ("dgx1", (1, 2, 2)), ("ring:4", (6, 4, 6)), ("star:4", (2, 2, 4))],
)
def test_one_size_searched_as_it_is(spec: str, size: tuple[int, int, int]) -> None:
    schedule = solve(spec, size)
    assert synth.verify(schedule).correct
    assert schedule.rounds is not None and (len(schedule.rounds), sum(schedule.rounds)) == size[1:]
    runs_everywhere(schedule)


@refuses("spec", "size", "method", "message")
def test_none_says_over_which_schedules(
    spec: str, size: tuple[int, int, int], method: str, message: str
) -> None:
    with pytest.raises(InfeasibleError, match=message):
        solve(spec, size, method)


@pytest.mark.parametrize("spec", ["ring:4", pytest.param("dgx1", marks=pytest.mark.long)])
def test_a_small_message_gets_few_steps(spec: str) -> None:
    fabric = load(spec)
    few = exchange_in_quads() if spec == "dgx1" else frontier(spec, max_steps=2).points[0].schedule
    assert few.steps == 2
    chosen = synth.solve(fabric, "allreduce", size_bytes=1024, cache=False)
    assert synth.simulate(chosen, 1024).time_us <= synth.simulate(few, 1024).time_us


def test_a_limit_by_flows_is_not_rounded_up_to_a_number_of_messages() -> None:
    # Flows prove R/C 5/9, which is 15 5/9 links passed a chunk, and 10 messages a chunk are enough: nothing
    # proves 16. A reduction by 4 -> 0, 5 -> 1 and then to rank 2 or 3, and back, attains 5/9.
    problem = sums_on(load("dgx1").subset(range(6)))
    only_limits = replace(THOROUGH, sizes=0, largest_guess=0, largest_orbit=0)
    with SolverProcess() as child:
        child.start()
        searcher = SumSearcher(problem, 0, Deadline(), child, None)
        found = sum_optimum(searcher, 4, None, Fraction(3, 4), lambda: None, only_limits)
    assert found.limit is not None and found.least == Fraction(5, 9)
    assert certified_ratio(problem, 4, found.limit.certificate) == Fraction(5, 9)


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        ("ring:4", (4, 3, 3)),
        ("hypercube:3", (12, 5, 7)),
        pytest.param("dgx1", (48, 5, 14), marks=pytest.mark.long),
    ],
)
def test_chunks_that_meet_on_links_load_them_least(spec: str, size: tuple[int, int, int]) -> None:
    # 2 (n - 1) messages a chunk, the fewest there are, in one or two steps fewer than by way of a rank.
    fabric = load(spec)
    collective = Collective.on(fabric, "allreduce")
    limit = bounds.bound(fabric, collective)
    found = met_on_links(fabric, collective, limit, size[1], FrontierOptions(cache=False), Deadline())
    best = found[-1].schedule
    assert (len(best.chunks), best.steps, sum(best.rounds or ())) == size
    assert len(best.transfers) == size[0] * 2 * (fabric.ranks - 1)
    assert synth.verify(best).correct and best.is_optimal
    runs_everywhere(best, seeds=1)


def test_where_links_differ_both_ways_nothing_meets_on_them() -> None:
    for fabric in (load("star:4"), load("full:2")):
        collective = Collective.on(fabric, "allreduce")
        limit = bounds.bound(fabric, collective)
        assert met_on_links(fabric, collective, limit, 9, FrontierOptions(cache=False), Deadline()) == []


def test_what_meets_says_so_and_stands_beside_the_limit_of_every_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "arborcast.synth.chunks.allreduce.searcher.SumSearcher.search", lambda *_, **__: Unknown()
    )
    found = frontier("ring:4", max_steps=6)
    assert [point.restriction for point in found.points] == [MEETINGS_ON_LINKS]
    assert all(point.scope == EVERY_SCHEDULE and not point.is_proved for point in found.points)
    assert not found.complete and found.open_steps[:2] == (2, 3)
    assert all(point.proof.startswith("found among allreduces that meet on links") for point in found.points)

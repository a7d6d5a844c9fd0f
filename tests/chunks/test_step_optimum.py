"""One number of steps: limits, what is searched, and what may be called proved of scripted answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from arborcast import synth
from arborcast.synth.certificate import Bound
from arborcast.synth.chunks import step_solver as module
from arborcast.synth.chunks.bounds.step_certificate import FlowDual, StaticLimit, StepBound, TreeDual
from arborcast.synth.chunks.frontier import Frontier, pareto
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkSend
from arborcast.synth.chunks.problem.outcome import Infeasible, Unknown
from arborcast.synth.chunks.problem.prune import ChunkPlan
from arborcast.synth.chunks.solvers.cache import ChunkCache
from arborcast.synth.chunks.solvers.search import Answer, Searcher
from arborcast.synth.chunks.solvers.solver_child import SolverProcess, WorkerDiedError
from arborcast.synth.chunks.step_result import StepOptimum, explain, kept_optimum
from arborcast.synth.chunks.step_solver import QUICK, THOROUGH, step_optimum
from arborcast.synth.collective import Collective, Demand
from arborcast.synth.deadline import Deadline
from arborcast.synth.errors import Prover, TimedOutError
from arborcast.synth.topology import Link, Topology
from tests.support.chunk_problems import problem_of

Asked = tuple[int, int, int]  # C, R and how many slices


class Scripted(Searcher):
    """Answers by a rule of C and the slices, and remembers what it was asked.

    It has one second, of a clock that moves where a test sets `now_s`.
    """

    def __init__(self, problem: ChunkProblem, answer: Callable[[int, int], Answer]) -> None:
        self.now_s = 0.0
        deadline = Deadline.after(1, lambda: self.now_s)
        super().__init__(problem, 0, deadline, SolverProcess(), None, "sat")
        self.answer = answer
        self.asked: list[Asked] = []

    def search(self, chunks: int, steps: int, rounds: int, *, slices: int | None = None) -> Answer:
        assert slices is not None
        self.asked.append((chunks, rounds, slices))
        answer = self.answer(chunks, slices)
        return plan(steps, rounds) if isinstance(answer, ChunkPlan) else answer


FOUND = ChunkPlan((), ())
REFUTED, CLAIMED = Infeasible(Prover.CADICAL), Infeasible(Prover.HIGHS)


def plan(steps: int, rounds: int) -> ChunkPlan:
    return ChunkPlan((*[1] * (steps - 1), rounds - steps + 1), ())


def loose(steps: int) -> StepBound:
    """A static limit that is never attained."""
    return StepBound(steps, Fraction(1, 100), StaticLimit(Bound.__new__(Bound)))


def optimum_of(
    answer: Callable[[int, int], Answer], *, below: Fraction | None = None, quick: bool = False
) -> tuple[StepOptimum, list[Asked]]:
    """Gather on a ring of 4: 3 blocks over 2 links to the root, so that R/C is 3/2 and C even.

    As where trees have too many targets, flows limit it, so that the scripted answers decide.
    """
    searcher = Scripted(problem_of("ring:4", "gather"), answer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("arborcast.synth.chunks.step_solver.can_check_trees", lambda problem: False)
        found = step_optimum(searcher, 2, loose(2), below, QUICK if quick else THOROUGH)
    return found, searcher.asked


def test_attained_in_lowest_terms_nothing_is_left_to_refute() -> None:
    optimum, asked = optimum_of(lambda chunks, slices: FOUND)
    assert (optimum.ratio, optimum.chunks, optimum.is_settled) == (Fraction(3, 2), 2, True)
    assert optimum.minimality_proof == "3/2 is in lowest terms"
    assert isinstance(optimum.limit.certificate, FlowDual)
    assert explain(optimum.limit) == "flows in 2 steps (dual, exact)"
    assert asked == [(2, 3, THOROUGH.first_slices)]


def test_a_larger_c_is_the_smallest_once_every_smaller_one_is_refuted() -> None:
    optimum, _ = optimum_of(lambda chunks, slices: FOUND if chunks == 6 else REFUTED)
    assert (optimum.ratio, optimum.chunks, optimum.is_settled) == (Fraction(3, 2), 6, True)
    assert optimum.minimality_proof == "(2, 2, 3), (4, 2, 6) refuted by CaDiCaL"
    assert optimum.proved_by == (Prover.LIMIT, Prover.CADICAL)


def test_a_smaller_c_refuted_in_floating_point_is_said_and_proves_nothing() -> None:
    optimum, asked = optimum_of(
        lambda chunks, slices: FOUND if chunks == 6 else CLAIMED if chunks == 2 else REFUTED
    )
    assert (optimum.ratio, optimum.chunks, optimum.is_settled) == (Fraction(3, 2), 6, False)
    words = "(2, 2, 3) refuted by HiGHS, floating point, which is no proof; (4, 2, 6) refuted by CaDiCaL"
    assert optimum.minimality_proof == words
    assert optimum.proved_by == (Prover.LIMIT, Prover.HIGHS, Prover.CADICAL)
    # What is not proved is asked again with more effort.
    assert [slices for chunks, _, slices in asked if chunks == 2] == [3, 6]


def test_what_was_worked_out_to_its_end_is_kept_with_a_limit_that_is_checked_again(tmp_path: Path) -> None:
    optimum, _ = optimum_of(lambda chunks, slices: FOUND if chunks == 6 else REFUTED)
    gather = problem_of("ring:4", "gather")
    limit = optimum.limit
    assert limit is not None and isinstance(limit.certificate, FlowDual)
    static, worked_out = loose(2), 0

    def asked(question: int, changed: StepOptimum[ChunkPlan]) -> StepOptimum[ChunkPlan]:
        def find() -> StepOptimum[ChunkPlan]:
            nonlocal worked_out
            worked_out += 1
            return changed

        kinds = (ChunkPlan, ChunkSend)
        return kept_optimum(ChunkCache(tmp_path), str(question), gather, 2, static, find, kinds)

    for number, (changed, is_kept) in enumerate(
        [
            (optimum, True),
            (replace(optimum, limit=static), True),
            (replace(optimum, limit=replace(limit, ratio=2 * limit.ratio)), False),
            (replace(optimum, out_of_time=True), False),
            (replace(optimum, lost_solvers=True), False),
        ]
    ):
        worked_out = 0
        assert [asked(number, changed) for _ in range(2)] == [changed] * 2, number
        assert worked_out == (1 if is_kept else 2)


def test_a_smaller_c_left_open_leaves_the_smallest_unproved() -> None:
    def answer(chunks: int, slices: int) -> Answer:
        return FOUND if chunks == 6 else Unknown() if chunks == 4 else REFUTED

    optimum, asked = optimum_of(answer)
    assert (optimum.ratio, optimum.chunks, optimum.minimality_proof) == (Fraction(3, 2), 6, None)
    assert not optimum.is_settled
    assert len(asked) == len(set(asked))  # what was refuted is not asked again


@pytest.mark.parametrize("quick", [False, True])
def test_more_effort_may_still_find_the_smallest(quick: bool) -> None:
    optimum, asked = optimum_of(lambda chunks, slices: FOUND if slices == 6 else Unknown(), quick=quick)
    if quick:  # never asked twice with the same effort
        assert optimum.plan is None and len(asked) == len(set(asked))
    else:
        assert optimum.is_settled and optimum.minimality_proof == "3/2 is in lowest terms"
        assert asked == [(2, 3, 3), (2, 3, 6)]


def test_nothing_is_searched_where_the_limit_is_no_gain() -> None:
    optimum, asked = optimum_of(lambda chunks, slices: FOUND, below=Fraction(3, 2))
    assert (optimum.limit.ratio, optimum.plan, asked) == (Fraction(3, 2), None, [])


def test_only_what_beats_the_given_ratio_is_guessed() -> None:
    def answer(chunks: int, slices: int) -> Answer:
        return FOUND if chunks == 1 else REFUTED  # 2 rounds for one chunk

    assert optimum_of(answer, below=Fraction(2))[0].plan is None
    optimum, _ = optimum_of(answer, below=Fraction(5, 2))
    assert (optimum.ratio, optimum.is_settled) == (Fraction(2), False)


def test_the_deadline_keeps_the_limit() -> None:
    def answer(chunks: int, slices: int) -> Answer:
        raise TimedOutError("late")

    optimum, _ = optimum_of(answer)
    assert optimum.out_of_time and optimum.plan is None and optimum.limit.ratio == Fraction(3, 2)


def test_a_solver_that_dies_leaves_its_instance_open_and_the_rest_goes_on() -> None:
    def answer(chunks: int, slices: int) -> Answer:
        if chunks == 2:
            raise WorkerDiedError("CaDiCaL: needed more than 4 GB of memory")
        return FOUND

    optimum, _ = optimum_of(answer)
    assert optimum.lost_solvers
    assert (optimum.chunks, optimum.minimality_proof, optimum.is_settled) == (4, None, False)


@pytest.mark.parametrize(("smaller", "settled"), [(REFUTED, True), (Unknown(), False)])
def test_a_packing_of_trees_is_a_plan_whose_c_is_the_smallest_only_if_refuted(
    smaller: Answer, settled: bool
) -> None:
    # 3-cube broadcast in 4 steps: R/C = 2/3, so that C is a multiple of 3 and at least 6 for 4 rounds.
    searcher = Scripted(problem_of("hypercube:3", "broadcast"), lambda chunks, slices: smaller)
    optimum = step_optimum(searcher, 4, loose(4), None)
    assert isinstance(optimum.limit.certificate, TreeDual)
    assert optimum.ratio == Fraction(2, 3)
    if optimum.chunks == 6:
        assert optimum.is_settled and optimum.minimality_proof == "smaller C at 2/3 would give R < S"
    else:
        assert optimum.is_settled == settled


def test_a_real_search_attains_the_limit() -> None:
    with SolverProcess() as child:
        searcher = Searcher(problem_of("ring:4", "gather"), 0, Deadline(), child, None, "ilp")
        optimum = step_optimum(searcher, 2, loose(2), None)
    assert (optimum.ratio, optimum.chunks, optimum.is_settled) == (Fraction(3, 2), 2, True)


def drawn(ranks: int, *links: tuple[int, int, int]) -> Topology:
    return Topology.build("drawn", ranks, [Link(src, dst, Fraction(rate)) for src, dst, rate in links])


def proved(found: Frontier) -> list[tuple[int, int, int]]:
    assert not found.open_steps
    for point in found.points:
        assert synth.verify(point.schedule).correct and point.is_proved
    return [(point.chunks, point.steps, point.rounds) for point in found.points]


def test_chunks_on_a_one_way_ring_that_must_be_twice_as_many() -> None:
    ring = drawn(4, (0, 1, 2), (1, 2, 3), (2, 3, 3), (3, 0, 3))
    found = pareto(ring, Collective.on(ring, "reduce-scatter", ranks=(3, 2)), max_steps=4, cache=False)
    assert proved(found) == [(6, 3, 7), (12, 4, 10)]  # 5/6 cannot be had with 6 chunks
    assert found.points[-1].proof.endswith("(6, 4, 5) refuted by CaDiCaL")


@pytest.mark.parametrize("steps", [1, *(pytest.param(it, marks=pytest.mark.long) for it in (2, 3))])
def test_blocks_that_are_alike_over_links_of_unlike_capacities(steps: int) -> None:
    links = (0, 1, 6), (0, 2, 10), (1, 0, 7), (1, 2, 1), (2, 0, 15), (2, 1, 6)
    unlike = drawn(3, *links)
    thrice = [Demand(frozenset({0}), frozenset({1}))] * 3
    found = pareto(unlike, Collective.custom(unlike, thrice), max_steps=steps, cache=False)
    assert proved(found) == [(2, 1, 1), (26, 2, 8), (178, 3, 49)][:steps]


def test_a_plan_that_the_deadline_cut_short_is_not_final(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more time the packing might have become a plan with fewer chunks: this one is not kept."""
    real = module.plan_of  # type: ignore[attr-defined]
    searcher = Scripted(problem_of("ring:4", "allgather"), lambda *_: Unknown())

    def until_late(*asked: Any, **knobs: Any) -> Any:
        found = real(*asked, **knobs)
        searcher.now_s = 2
        return found

    monkeypatch.setattr(module, "plan_of", until_late)
    found = step_optimum(searcher, 2, loose(2), None)
    assert found.out_of_time
    assert found.plan is not None and found.ratio == Fraction(3, 2)

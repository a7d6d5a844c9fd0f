"""The frontier of one problem of copies: number of steps by number of steps, until there is nothing to gain.

Numbers of steps are independent questions, so several are worked on at once where that is asked for. Their
answers are taken in ascending order of steps, which makes the curve the same whatever the number of jobs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Generic, TypeAlias, TypeVar

from arborcast.synth.chunks.bounds.step_certificate import StepBound
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.orbits import ChunkSend
from arborcast.synth.chunks.problem.prune import ChunkPlan
from arborcast.synth.chunks.solvers.cache import ChunkCache
from arborcast.synth.chunks.solvers.search import Searcher
from arborcast.synth.chunks.solvers.solver_child import SolverProcess
from arborcast.synth.chunks.step_result import StepOptimum, kept_optimum
from arborcast.synth.chunks.step_solver import (
    DRAFT,
    QUICK,
    ROUNDED,
    SKETCH,
    THOROUGH,
    SearchBudget,
    Seeds,
    is_large,
    step_optimum,
)
from arborcast.synth.deadline import Deadline
from arborcast.synth.progress import report

CopyOptimum: TypeAlias = StepOptimum[ChunkPlan]

AnyPoint = TypeVar("AnyPoint")

ENCODING = "sat"
"""How solvers are asked: of 48 frontiers none was another without HiGHS beside it, at 70 % of the cost."""


@dataclass(frozen=True)
class FrontierOptions:
    """How a curve is traced.

    Attributes:
        tolerance: stop where R/C is within this part of the static limit.
        seed: of the solvers.
        jobs: numbers of steps worked on at once, as joblib counts them.
        cache: whether to keep and use answers on disk.
        proofs: whether to prove the points; otherwise good plans are looked for with little effort.
        slack: without proofs, the part of its R/C that a plan may lose to have few chunks; None for none.
    """

    tolerance: Fraction = Fraction(0)
    seed: int = 0
    jobs: int = 1
    cache: bool = True
    proofs: bool = True
    slack: Fraction | None = None

    @property
    def compares(self) -> bool:
        """Whether plans are candidates, compared by their times: few chunks then gain more than R/C."""
        return not self.proofs and self.slack is None

    @property
    def budget(self) -> SearchBudget:
        """What is done for each number of steps."""
        if self.proofs:
            return THOROUGH
        return QUICK if self.compares else replace(ROUNDED, slack=self.slack)


@dataclass(frozen=True)
class Curve(Generic[AnyPoint]):
    """The points of a problem or of a collective, and what is known beyond them.

    Attributes:
        points: in order of steps, each with a smaller R/C than the one before.
        complete: whether nothing is missing: every point is proved and the last one attains the limit.
        why_stopped: what ended it.
        open_steps: numbers of steps at which something is left to prove.
        timed_out: whether the deadline ended it.
        limits: of each number of steps that was looked at the best limit known, over every schedule; none
            where none is known.
    """

    points: tuple[AnyPoint, ...]
    complete: bool
    why_stopped: str
    open_steps: tuple[int, ...]
    timed_out: bool
    limits: Mapping[int, StepBound]


def trace(
    problem: ChunkProblem, static: StepBound, last: int, options: FrontierOptions, deadline: Deadline
) -> Curve[CopyOptimum]:
    """The curve of a problem from its latency to at most `last` steps.

    Args:
        problem: one whose targets can all be reached.
        static: the limit of R/C for any number of steps.
        last: the largest S looked at, at least the latency.
        options: how to go about it.
        deadline: what is found by then is returned.
    """
    points: list[CopyOptimum] = []
    open_steps: list[int] = []
    limits: dict[int, StepBound] = {}
    why = f"no more than {last} steps were looked at"
    timed_out = False
    for steps, optimum in _optima(problem, static, last, options, deadline, points):
        if optimum.limit is not None:
            limits[steps] = optimum.limit
        best = points[-1].ratio if points else None
        improves = optimum.ratio is not None and (best is None or optimum.ratio < best)
        if improves:
            points.append(optimum)
        if not optimum.is_settled if improves else best is None or optimum.least < best:
            open_steps.append(steps)
        if optimum.out_of_time:
            if not timed_out:
                why, timed_out = f"{deadline} passed at {steps} steps", True
            if not is_large(problem):  # of many ranks, drafts of more steps are there already
                break
        elif enough := why_enough(points[-1].ratio if points else None, static.ratio, options.tolerance):
            why = enough
            break
    complete = not open_steps and bool(points) and points[-1].ratio == static.ratio
    return Curve(tuple(points), complete, why, tuple(open_steps), timed_out, limits)


def why_enough(best: Fraction | None, static: Fraction, tolerance: Fraction) -> str | None:
    """Why no more steps are looked at, once an R/C was found; None where it is not good enough."""
    if best is None or best > static * (1 + tolerance):
        return None
    if best == static:
        return "the limit of any number of steps is attained"
    return f"within {tolerance} of the limit of any number of steps"


def _optima(
    problem: ChunkProblem,
    static: StepBound,
    last: int,
    options: FrontierOptions,
    deadline: Deadline,
    points: Sequence[CopyOptimum],
) -> Iterator[tuple[int, CopyOptimum]]:
    """The optimum of each number of steps in turn; `points` is read as it grows."""
    latency = problem.latency
    assert latency is not None, "every target can be reached"
    steps = range(latency, last + 1)
    if is_large(problem):
        yield from _large_optima(problem, static, steps, options, deadline, points)
        return
    if options.jobs == 1:
        with SolverProcess() as child:
            child.start()
            for count in steps:
                below = points[-1].ratio if points else None
                yield count, _optimum(problem, count, static, below, options, deadline, child)
        return
    from joblib import Parallel, delayed, effective_n_jobs

    width = effective_n_jobs(options.jobs)
    for start in range(latency, last + 1, width):
        wave = steps[start - latency : start - latency + width]
        below = points[-1].ratio if points else None
        report(f"{wave[0]} to {wave[-1]} steps", 0, 0)
        tasks = (delayed(_job)(problem, count, static, below, options, deadline) for count in wave)
        yield from zip(wave, Parallel(n_jobs=options.jobs)(tasks), strict=True)


def _large_optima(
    problem: ChunkProblem,
    static: StepBound,
    steps: Sequence[int],
    options: FrontierOptions,
    deadline: Deadline,
    points: Sequence[CopyOptimum],
) -> Iterator[tuple[int, CopyOptimum]]:
    """The same where there may not be time enough for every optimum: first a draft of each, then more.

    Numbers of steps share the time that is left. What a draft knows stands where the time ends first.
    """
    drafts: dict[int, CopyOptimum] = {}
    seeds: Seeds = {}
    with SolverProcess() as child:
        for index, count in enumerate(steps):
            share = deadline.share(2 * len(steps) - index)
            draft = _optimum(problem, count, static, None, options, share, child, seeds)
            drafts[count] = draft
            _tell(count, draft)
            if draft.ratio is not None and draft.ratio <= static.ratio * (1 + options.tolerance):
                break  # nothing is gained by more steps
            if deadline.has_passed and any(each.ratio is not None for each in drafts.values()):
                break
        for count, draft in drafts.items():
            best = points[-1].ratio if points else None
            is_worse = best is not None and draft.least >= best
            if draft.is_settled or not options.proofs or is_worse or deadline.has_passed:
                yield count, draft
                continue
            share = deadline.share(sum(not later.is_settled for at, later in drafts.items() if at >= count))
            found = _optimum(problem, count, static, best, options, share, child)
            better = _better_of(draft, found)
            _tell(count, better)
            yield count, better


def _better_of(draft: CopyOptimum, found: CopyOptimum) -> CopyOptimum:
    """The better limit and the better plan of two, each with what is known of it."""
    if draft.limit is not None and draft.least > found.least:
        found = replace(found, limit=draft.limit)
    if draft.ratio is None or (found.ratio is not None and found.ratio <= draft.ratio):
        return found
    return replace(draft, limit=found.limit, out_of_time=found.out_of_time)


def _tell(steps: int, known: CopyOptimum) -> None:
    """Say what is known of a number of steps so far."""
    if known.ratio is None:
        report(f"{steps} steps: R/C at least {float(known.least):.5g}, none found yet", 0, 0)
        return
    size = f"({known.chunks}, {steps}, {known.ratio * known.chunks})"
    gap = float(known.ratio / known.least - 1) if known.least else math.inf
    report(
        f"{steps} steps: {size}, R/C {float(known.ratio):.5g}, at least {float(known.least):.5g}, "
        f"gap {gap:.2%}",
        0,
        0,
    )


def _job(
    problem: ChunkProblem,
    steps: int,
    static: StepBound,
    below: Fraction | None,
    options: FrontierOptions,
    deadline: Deadline,
) -> CopyOptimum:
    """One number of steps in a process of its own, which may be on another machine with another clock."""
    with SolverProcess() as child:
        return _optimum(problem, steps, static, below, options, deadline, child)


def _optimum(
    problem: ChunkProblem,
    steps: int,
    static: StepBound,
    below: Fraction | None,
    options: FrontierOptions,
    deadline: Deadline,
    child: SolverProcess,
    drafting: Seeds | None = None,
) -> CopyOptimum:
    """The optimum of one number of steps, from the cache where it was worked out to its end before.

    With `drafting`, the trees of one step fewer, a draft of it.
    """
    budget = options.budget
    if drafting is not None:
        budget = SKETCH if options.compares else DRAFT
    cache = ChunkCache() if options.cache and drafting is None else None
    searcher = Searcher(problem, options.seed, deadline, child, cache, ENCODING)
    return kept_optimum(
        cache,
        "optimum",
        problem,
        steps,
        static,
        lambda: step_optimum(searcher, steps, static, below, budget, drafting),
        (ChunkPlan, ChunkSend),
        below=None if below is None else str(below),
        encoding=ENCODING,
        seed=options.seed,
        proofs=int(options.proofs),
        slack=None if options.slack is None else str(options.slack),
    )

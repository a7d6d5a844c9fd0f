"""What is known of one number of steps, and what all searches for it share.

`synth.chunks.step_solver` searches for copies, `synth.chunks.allreduce.allreduce_solver` for allreduces: in
another order, with other limits and other plans. How both note what they find stands here.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import takewhile
from typing import Generic, Protocol, TypeVar

from arborcast.synth.chunks.bounds.step_certificate import (
    FlowDual,
    MessageDual,
    PairDual,
    StaticLimit,
    StepBound,
    TreeDual,
)
from arborcast.synth.chunks.bounds.step_check import certified_ratio
from arborcast.synth.chunks.problem.instance import ChunkProblem
from arborcast.synth.chunks.problem.outcome import Infeasible, Unknown
from arborcast.synth.chunks.solvers.cache import ChunkCache, Detail, kept_or_found
from arborcast.synth.chunks.solvers.search import ProblemSearcher
from arborcast.synth.chunks.solvers.solver_child import WorkerDiedError
from arborcast.synth.chunks.trees.whole_trees import admissible_chunk_counts
from arborcast.synth.errors import Prover, TimedOutError
from arborcast.synth.progress import report

log = logging.getLogger(__name__)


class HasRounds(Protocol):
    """A plan of either kind."""

    @property
    def rounds(self) -> tuple[int, ...]:
        """Of each step."""
        ...


AnyPlan = TypeVar("AnyPlan", bound=HasRounds)
AnyAnswer = TypeVar("AnyAnswer")
AnySearcher = TypeVar("AnySearcher", bound=ProblemSearcher)


@dataclass(frozen=True)
class StepOptimum(Generic[AnyPlan]):
    """What is known of one number of steps.

    Attributes:
        limit: the best proven limit of R/C over every schedule; None where nothing is known.
        chunks: C of the plan; 0 where there is none.
        plan: the best one found that has a smaller R/C than was asked to beat; None where there is none.
        minimality_proof: why no smaller C has the same R/C; None where that is not known.
        refuted_by: the solvers on whose word that rests, where it rests on any.
        out_of_time: whether the deadline cut this short.
        lost_solvers: whether solvers died, of too little memory mostly: with more there may be more to find.
    """

    limit: StepBound | None
    chunks: int = 0
    plan: AnyPlan | None = None
    minimality_proof: str | None = None
    refuted_by: tuple[Prover, ...] = ()
    out_of_time: bool = False
    lost_solvers: bool = False

    @property
    def ratio(self) -> Fraction | None:
        """R/C of the plan."""
        return None if self.plan is None else Fraction(sum(self.plan.rounds), self.chunks)

    @property
    def steps(self) -> int:
        """S of the plan; 0 where there is none."""
        return 0 if self.plan is None else len(self.plan.rounds)

    @property
    def least(self) -> Fraction:
        """The R/C that no schedule falls below, as far as is known."""
        return Fraction(0) if self.limit is None else self.limit.ratio

    @property
    def bounds(self) -> tuple[StepBound, ...]:
        """The limit, if there is one."""
        return () if self.limit is None else (self.limit,)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to prove: the plan attains the limit, and no smaller C does."""
        return bool(self.proved_by) and all(prover.is_exact for prover in self.proved_by)

    @property
    def proved_by(self) -> tuple[Prover, ...]:
        """Who says that there is nothing better; empty where that is not known."""
        if self.limit is None or self.ratio != self.limit.ratio or self.minimality_proof is None:
            return ()
        counted = (Prover.CADICAL,) if isinstance(self.limit.certificate, MessageDual) else ()
        return tuple(dict.fromkeys((Prover.LIMIT, *counted, *self.refuted_by)))

    @property
    def proof(self) -> str:
        """How it was proved, or what is missing."""
        if self.limit is None:
            return "not proved: no limit is known"
        if self.ratio != self.limit.ratio:
            return f"not proved: at least {self.limit.ratio} by {explain(self.limit)}"
        return f"{explain(self.limit)}; {self.minimality_proof or 'the smallest C is not proved'}"


class StepSearch(ABC, Generic[AnyPlan, AnySearcher]):
    """The best limit and the best plan so far of one number of steps."""

    def __init__(
        self, searcher: AnySearcher, steps: int, limit: StepBound | None, below: Fraction | None
    ) -> None:
        self._searcher = searcher
        self._problem = searcher.problem
        self._steps = steps
        self._below = below
        self._refuted: dict[tuple[Fraction, int], Infeasible] = {}  # R/C and C
        self.result: StepOptimum[AnyPlan] = StepOptimum(limit)

    @abstractmethod
    def settle(self) -> None:
        """Raise the limit and search, until there is nothing more to prove or to try."""

    def run(self) -> StepOptimum[AnyPlan]:
        """The best found; `out_of_time` says whether the deadline came first."""
        try:
            self.settle()
        except TimedOutError:
            return replace(self.result, out_of_time=True)
        return self.result

    def _is_of_interest(self, ratio: Fraction) -> bool:
        return self._below is None or ratio < self._below

    def _raise_to(self, limit: StepBound | None) -> None:
        if limit is not None and limit.ratio > self.result.least:
            self.result = replace(self.result, limit=limit)

    def _in_part(self, part: int, task: Callable[[], AnyAnswer]) -> AnyAnswer | None:
        """What a task answers in one part of so many of the time left; None where it does not end by then."""
        whole = self._searcher.deadline
        self._searcher.deadline = whole.share(part)
        try:
            return task()
        except TimedOutError:
            return None
        finally:
            self._searcher.deadline = whole

    def _asked(self, chunks: int, rounds: int, search: Callable[[], AnyAnswer]) -> AnyAnswer | Unknown:
        """What solvers answer for one C; nothing where they died."""
        self._report(f"searching ({chunks}, {self._steps}, {rounds})")
        try:
            return search()
        except WorkerDiedError as error:
            log.warning("(%d, %d, %d) is left open: %s", chunks, self._steps, rounds, error)
            self.result = replace(self.result, lost_solvers=True)
            return Unknown()

    def _take_plan(self, chunks: int, plan: AnyPlan) -> None:
        self.result = self._with_reason(replace(self.result, chunks=chunks, plan=plan))

    def _with_reason(self, optimum: StepOptimum[AnyPlan]) -> StepOptimum[AnyPlan]:
        """The same, with the reason why no smaller C has its R/C, where that is known."""
        ratio, chunks = optimum.ratio, optimum.chunks
        assert ratio is not None, "it has a plan"
        smaller = list(takewhile(lambda other: other < chunks, admissible_chunk_counts(ratio, self._steps)))
        if not smaller:
            lowest = chunks == ratio.denominator
            words = f"{ratio} is in lowest terms" if lowest else f"smaller C at {ratio} would give R < S"
            return replace(optimum, minimality_proof=words, refuted_by=())
        if any((ratio, other) not in self._refuted for other in smaller):
            return replace(optimum, minimality_proof=None, refuted_by=())
        by: dict[Prover, list[str]] = {}
        for other in smaller:
            size = f"({other}, {self._steps}, {ratio * other})"
            by.setdefault(self._refuted[ratio, other].proved_by, []).append(size)
        words = "; ".join(
            f"{', '.join(sizes)} refuted by {prover}{'' if prover.is_exact else ', which is no proof'}"
            for prover, sizes in by.items()
        )
        return replace(optimum, minimality_proof=words, refuted_by=tuple(by))

    def _report(self, what: str) -> None:
        report(f"{self._steps} steps: {what}", 0, 0)


def kept_optimum(
    cache: ChunkCache | None,
    subject: str,
    problem: ChunkProblem,
    steps: int,
    static: StepBound | None,
    find: Callable[[], StepOptimum[AnyPlan]],
    plans: Sequence[type],
    **details: Detail,
) -> StepOptimum[AnyPlan]:
    """What is known of a number of steps, from the cache where it was worked out to its end before.

    The certificate of what was kept is checked again, its plan by whoever verifies the schedule.

    Args:
        cache: None to keep nothing.
        subject: the kind of question, for the key.
        problem: what is to be done.
        steps: S.
        static: the limit for any number of steps; None where none holds for every schedule.
        find: works it out.
        plans: the classes of a plan and its parts.
        details: whatever else the answer depends on.
    """

    def found() -> StepOptimum[AnyPlan]:
        optimum = find()
        is_static = optimum.limit is not None and isinstance(optimum.limit.certificate, StaticLimit)
        return replace(optimum, limit=None) if is_static else optimum

    def checked(kept: StepOptimum[AnyPlan]) -> StepOptimum[AnyPlan]:
        if kept.limit is not None:
            proved = certified_ratio(problem, kept.limit.steps, kept.limit.certificate)
            if proved != kept.limit.ratio:
                raise ValueError(f"its certificate proves {proved}, it says {kept.limit.ratio}")
        return kept

    optimum = kept_or_found(
        cache,
        subject,
        problem,
        found,
        (StepOptimum, StepBound, FlowDual, TreeDual, PairDual, MessageDual, Prover, *plans),
        is_final=lambda optimum: not optimum.out_of_time and not optimum.lost_solvers,
        check=checked,
        steps=steps,
        static=None if static is None else str(static.ratio),
        **details,
    )
    if optimum.limit is None and static is not None:
        return replace(optimum, limit=replace(static, steps=steps))
    return optimum


def explain(limit: StepBound) -> str:
    """How a limit was proved, in words."""
    steps = "1 step" if limit.steps == 1 else f"{limit.steps} steps"
    match limit.certificate:
        case StaticLimit(bound):
            return f"limit of any number of steps ({type(bound.certificate).__name__.lower()}, exact)"
        case PairDual():
            return f"flows of every contribution in {steps} (dual, exact)"
        case FlowDual():
            return f"flows in {steps} (dual, exact)"
        case TreeDual():
            return f"trees in {steps} (dual, exact)"
        case MessageDual():
            return f"the fewest messages in {steps} (CaDiCaL)"

"""The least rounds per chunk of a given number of steps, over every number of chunks, and who attains it.

A lower limit rho that holds for every C comes from linear programs: a packing of trees, which is exact and a
schedule itself, or flows, which are exact where nothing is copied and weaker elsewhere. One search at the
smallest C for which rho * C is whole usually attains it, and then nothing needs to be refuted: rho in lowest
terms has no smaller C. Otherwise the C in between are searched or refuted one by one. Feasibility is never
assumed to be monotonic in C.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import takewhile

from arborcast.synth.chunks.bounds.certificate import (
    MessageDual,
    PairDual,
    PathDual,
    StaticLimit,
    StepBound,
    TreeDual,
)
from arborcast.synth.chunks.bounds.check import MOST_TREE_TARGETS
from arborcast.synth.chunks.bounds.flow_bounds import cut_bound, flow_bound
from arborcast.synth.chunks.problem.orbits import Group
from arborcast.synth.chunks.problem.outcome import Infeasible, Unknown
from arborcast.synth.chunks.problem.prune import ChunkPlan
from arborcast.synth.chunks.problem.symmetry import problem_group
from arborcast.synth.chunks.solvers.search import Answer, Searcher
from arborcast.synth.chunks.solvers.worker import WorkerDiedError
from arborcast.synth.chunks.trees.column_generation import TreeBound, tree_bound
from arborcast.synth.chunks.trees.plan import MOST_CHUNKS, NoPlanError, plan_near_it, plan_of
from arborcast.synth.chunks.trees.whole_trees import admissible_chunk_counts
from arborcast.synth.errors import Prover, TimedOutError
from arborcast.synth.progress import report

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """How much is done for a number of steps; counted, so that it is the same on every machine.

    Attributes:
        proofs: whether every limit that is affordable is worked out, or only the quickest.
        first_slices: effort of a search that may well fail, because its limit may be loose.
        last_slices: effort of a search whose answer matters.
        most_sends: possible sends (chunks, routes and steps multiplied) up to which a solver is asked.
        largest_guess: chunks up to which a ratio is looked for where no limit is attained.
        most_guesses: how many such searches there may be.
        most_packed: blocks for one rank each up to which their ways are packed, where flows did not do.
        most_chunks: chunks of a block up to which packings become plans, and a solver is asked.
        slack: the part of its R/C that a packing of more may lose to have fewer, and then nothing is searched
            that has a packing; None where it must lose nothing.
    """

    proofs: bool
    first_slices: int
    last_slices: int
    most_sends: int
    largest_guess: int
    most_guesses: int
    most_packed: int
    most_chunks: int = MOST_CHUNKS
    slack: Fraction | None = None


THOROUGH = SearchBudget(True, 3, 6, 400_000, 8, 40, 240)
"""To prove: up to two minutes of each of two cores for a search."""

QUICK = SearchBudget(False, 2, 2, 60_000, 2, 6, 0)
"""To have a candidate: half a second for a search."""

MOST_FLOW_TARGETS = 240
"""Targets of all demands together up to which the coupled flow program is solved: seconds."""


@dataclass(frozen=True)
class StepOptimum:
    """What is known of one number of steps.

    Attributes:
        limit: the best proven limit of R/C.
        chunks: C of the plan; 0 where there is none.
        plan: the best one found that has a smaller R/C than was asked to beat; None where there is none.
        smallest: why no smaller C has the same R/C; None where that is not known.
        refuted_by: the solvers on whose word that rests, where it rests on any.
        out_of_time: whether the deadline cut this short.
        lost_solvers: whether solvers died, of too little memory mostly: with more there may be more to find.
    """

    limit: StepBound
    chunks: int = 0
    plan: ChunkPlan | None = None
    minimality_proof: str | None = None
    refuted_by: tuple[Prover, ...] = ()
    out_of_time: bool = False
    lost_solvers: bool = False

    @property
    def ratio(self) -> Fraction | None:
        """R/C of the plan."""
        return None if self.plan is None else Fraction(sum(self.plan.rounds), self.chunks)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to prove: the plan attains the limit, and no smaller C does."""
        return bool(self.proved_by) and all(prover.is_exact for prover in self.proved_by)

    @property
    def proved_by(self) -> tuple[Prover, ...]:
        """Who says that there is nothing better; empty where that is not known."""
        if self.ratio != self.limit.ratio or self.minimality_proof is None:
            return ()
        return (Prover.LIMIT, *self.refuted_by)


def step_optimum(
    searcher: Searcher, steps: int, static: StepBound, below: Fraction | None, budget: SearchBudget = THOROUGH
) -> StepOptimum:
    """The least R/C in so many steps.

    S is at least the latency of the problem; only a smaller R/C than `below` is of interest.

    Returns:
        The best found; `out_of_time` says whether the deadline of the searcher came first.
    """
    state = _State(searcher, steps, replace(static, steps=steps), below, budget)
    try:
        state.settle()
    except TimedOutError:
        return replace(state.result, out_of_time=True)
    return state.result


class _State:
    """The best limit and the best plan so far."""

    def __init__(
        self, searcher: Searcher, steps: int, static: StepBound, below: Fraction | None, budget: SearchBudget
    ) -> None:
        self._budget = budget
        self._searcher = searcher
        self._problem = searcher.problem
        self._steps = steps
        self._below = below
        self._spent: dict[tuple[Fraction, int], int] = {}  # slices of the search for (R/C, C)
        self._refuted: dict[tuple[Fraction, int], Infeasible] = {}
        self._trees: TreeBound | None = None
        self._group: Group | None = None
        self.result = StepOptimum(static)

    def settle(self) -> None:
        """Raise the limit and search at it, until they meet or there is nothing more to try."""
        for raise_limit in self._limits():
            before = self.result.limit.ratio
            raise_limit()
            if not self._is_of_interest(self.result.limit.ratio):
                return
            if self._trees is not None:
                # Several demands make large integer programs of trees: there a search is faster.
                if self._budget.slack is None and len(self._problem.demands) > 1 and self._attempt():
                    return
                self._take_packing()
                if self._budget.slack is None:
                    self._shrink()
                elif self.result.ratio == self.result.limit.ratio:
                    self.result = self._with_reason(self.result)
            elif (self.result.limit.ratio > before or not self._spent) and self._attempt():
                return
        if self.result.plan is None:
            self._look_around()

    def _limits(self) -> list[Callable[[], None]]:
        """The ways to raise the limit, in the order in which they pay."""
        if self._problem.is_routing:
            # Flows are exact where nothing is copied; a packing attains them where the smallest C does not.
            few = len(self._problem.demands) <= self._budget.most_packed
            return [self._by_flows, self._by_trees] if few else [self._by_flows]
        if max(len(demand.targets) for demand in self._problem.demands) <= MOST_TREE_TARGETS:
            return [self._by_trees]  # exact, and mostly as fast as anything weaker
        return [self._by_cuts, self._by_flows] if self._budget.proofs else [self._by_cuts]

    def _is_of_interest(self, ratio: Fraction) -> bool:
        return self._below is None or ratio < self._below

    def _by_cuts(self) -> None:
        self._report("limit by cuts")
        self._raise_to(cut_bound(self._problem, self._steps, deadline=self._searcher.deadline))

    def _by_flows(self) -> None:
        targets = sum(len(demand.targets) for demand in self._problem.demands)
        if self._problem.is_routing or targets <= MOST_FLOW_TARGETS:
            self._report("limit by flows")
            self._raise_to(flow_bound(self._problem, self._steps, deadline=self._searcher.deadline))

    def _by_trees(self) -> None:
        self._report("limit by trees")
        self._group = problem_group(self._problem)
        deadline = self._searcher.deadline
        self._trees = tree_bound(self._problem, self._steps, deadline=deadline, group=self._group)
        self._raise_to(self._trees.bound)
        deadline.check("the packing of trees")

    def _raise_to(self, limit: StepBound) -> None:
        if limit.ratio > self.result.limit.ratio:
            self.result = replace(self.result, limit=limit)

    def _attempt(self) -> bool:
        """Search at the smallest C that could attain the limit; whether that settled it."""
        ratio = self.result.limit.ratio
        return self._take(ratio, next(admissible_chunk_counts(ratio, self._steps)), self._budget.first_slices)

    def _take_packing(self) -> None:
        """The packing of trees is a plan already, mostly with few chunks."""
        assert self._trees is not None
        if self._trees.bound.ratio != self.result.limit.ratio:
            return
        deadline = self._searcher.deadline
        try:
            chunks, plan = plan_of(
                self._problem,
                self._steps,
                self._trees,
                group=self._group,
                deadline=deadline,
                most_chunks=self._budget.most_chunks,
            )
        except NoPlanError:
            deadline.check("the plan of trees")
            slack = self._budget.slack
            near = None if slack is None else plan_near_it(self._problem, self._trees, slack)
            if near is None:
                return  # too many chunks, or a step left empty: then the search decides
            chunks, plan = near
        # Where the packing has a gap to the limit, it may not even beat what was asked.
        if self._is_of_interest(Fraction(sum(plan.rounds), chunks)):
            self.result = replace(self.result, chunks=chunks, plan=plan)
        deadline.check("the plan of trees")  # more time might have found fewer chunks: this is not final

    def _shrink(self) -> None:
        """Search every smaller C at the limit, in ascending order, until one is found or stays unknown."""
        ratio = self.result.limit.ratio
        known = self.result.chunks if self.result.ratio == ratio else None
        for chunks in admissible_chunk_counts(ratio, self._steps):
            if chunks == known:
                self.result = self._with_reason(self.result)
                return
            if self._take(ratio, chunks, self._budget.last_slices) or (ratio, chunks) not in self._refuted:
                return  # not knowing of this C, nothing could be said of the smallest any more

    def _look_around(self) -> None:
        """No plan attains a limit yet: the least R/C from there on that is found with few chunks."""
        for ratio, chunks in self._guesses()[: self._budget.most_guesses]:
            if self._take(ratio, chunks, self._budget.last_slices):
                return

    def _take(self, ratio: Fraction, chunks: int, slices: int) -> bool:
        """Search at one C unless that was done, and note what comes of it; whether a plan was found."""
        if self._is_proved(ratio, chunks) or self._spent.get((ratio, chunks), 0) >= slices:
            return False
        self._spent[ratio, chunks] = slices
        answer = self._search(chunks, ratio, slices)
        if isinstance(answer, Infeasible):
            self._refuted[ratio, chunks] = answer
        if not isinstance(answer, ChunkPlan):
            return False
        self.result = self._with_reason(replace(self.result, chunks=chunks, plan=answer))
        return True

    def _is_proved(self, ratio: Fraction, chunks: int) -> bool:
        answer = self._refuted.get((ratio, chunks))
        return answer is not None and answer.is_proof

    def _with_reason(self, optimum: StepOptimum) -> StepOptimum:
        """The same, with the reason why no smaller C has its R/C, where that is known."""
        ratio, chunks = optimum.ratio, optimum.chunks
        assert ratio is not None, "it has a plan"
        smaller = list(takewhile(lambda other: other < chunks, admissible_chunk_counts(ratio, self._steps)))
        if not smaller:
            return replace(optimum, minimality_proof=_lowest_terms(ratio, chunks), refuted_by=())
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

    def _guesses(self) -> list[tuple[Fraction, int]]:
        """Pairs of R/C and C with few chunks, the best first; for the limit at least its smallest C."""
        limit = self.result.limit.ratio
        worst = self._below or 2 * max(limit, Fraction(self._steps))
        pairs = {(limit, next(admissible_chunk_counts(limit, self._steps)))}
        for chunks in range(1, self._budget.largest_guess + 1):
            rounds = max(self._steps, -(-limit.numerator * chunks // limit.denominator))
            while Fraction(rounds, chunks) < worst:
                pairs.add((Fraction(rounds, chunks), chunks))
                rounds += 1
        return sorted(pairs)

    def _search(self, chunks: int, ratio: Fraction, slices: int) -> Answer:
        """Ask the solvers, unless the instance is larger than they should be asked."""
        rounds = int(ratio * chunks)
        sends = chunks * len(self._problem.demands) * len(self._problem.routes) * self._steps
        if sends > self._budget.most_sends or chunks > self._budget.most_chunks:
            return Unknown()
        self._report(f"searching ({chunks}, {self._steps}, {rounds})")
        try:
            return self._searcher.search(chunks, self._steps, rounds, slices=slices)
        except WorkerDiedError as error:
            log.warning("(%d, %d, %d) is left open: %s", chunks, self._steps, rounds, error)
            self.result = replace(self.result, lost_solvers=True)
            return Unknown()

    def _report(self, what: str) -> None:
        report(f"{self._steps} steps: {what}", 0, 0)


def _lowest_terms(ratio: Fraction, chunks: int) -> str:
    if chunks == ratio.denominator:
        return f"{ratio} is in lowest terms"
    return f"fewer chunks at {ratio} leave a step without a round"


def explain(limit: StepBound) -> str:
    """How a limit was proved, in words."""
    steps = "1 step" if limit.steps == 1 else f"{limit.steps} steps"
    match limit.certificate:
        case StaticLimit(bound):
            return f"limit of any number of steps ({type(bound.certificate).__name__.lower()}, exact)"
        case PathDual():
            return f"flows in {steps} (dual, exact)"
        case TreeDual():
            return f"trees in {steps} (dual, exact)"
        case PairDual():
            return f"flows of every contribution in {steps} (dual, exact)"
        case MessageDual():
            return f"the fewest messages in {steps} (CaDiCaL)"
